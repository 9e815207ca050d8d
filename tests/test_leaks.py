"""Calls leave nothing behind; ``python scripts/campaign.py leaks`` makes thousands of them."""

import pytest

import leaks


@pytest.mark.parametrize(
    "use",
    ["sweep", "newton along adam", "a loss that fails", "sequences", "a model of its own"],
)
@pytest.mark.filterwarnings("ignore")
def test_calls_leave_nothing_behind(use):
    assert leaks.grows(use, calls=8, before=4) == ""


def test_what_is_kept_is_seen(monkeypatch):
    kept = []
    monkeypatch.setitem(leaks.USES, "keeper", lambda p: lambda: kept.append(p.measure()))
    assert "tensors more" in leaks.grows("keeper", calls=8, before=4)
