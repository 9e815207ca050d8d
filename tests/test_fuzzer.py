"""A few of the random losses that ``python tests/fuzzer.py`` makes thousands of."""

from __future__ import annotations

import pytest
import torch

import fuzzer
from newton_summary.derivatives.sweep.rules import RULES

PROGRAMS = 30

pytestmark = pytest.mark.filterwarnings("ignore")


def test_random_losses_agree_with_differences_of_gradients() -> None:
    outcomes = {}
    for seed in range(PROGRAMS):
        program = fuzzer.write_program(seed)
        outcomes[seed] = fuzzer.check(program)
        assert outcomes[seed].kind not in ("wrong", "crash"), (
            f"{outcomes[seed]}\n{program.source()}"
        )
    kinds = [outcome.kind for outcome in outcomes.values()]
    assert kinds.count("right") >= 0.9 * PROGRAMS


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.bfloat16, 1e9)])
def test_random_losses_in_narrower_types(dtype: torch.dtype, tolerance: float) -> None:
    """To float32 they agree; in bfloat16 they are finite."""
    errors = []
    for seed in range(100, 110):
        program = fuzzer.write_program(seed)
        error = fuzzer.smoke(program, dtype)
        errors.append(error)
        assert error is None or error < tolerance, program.source()
    assert sum(error is not None for error in errors) >= 4


def test_a_program_is_its_seed() -> None:
    assert fuzzer.write_program(7) == fuzzer.write_program(7)
    assert fuzzer.write_program(7).source() != fuzzer.write_program(17).source()


def test_a_wrong_rule_is_found_and_the_program_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["cumsum"]

    def wrong(sweep, op, *args, **kwargs):
        t = right(sweep, op, *args, **kwargs)
        return None if t is None else t.map(lambda rows: 1.001 * rows)

    monkeypatch.setitem(RULES, "cumsum", wrong)

    def fails(program: fuzzer.Program) -> bool:
        return fuzzer.check(program).kind == "wrong"

    program = next(p for p in map(fuzzer.write_program, range(1000)) if fails(p))
    small = fuzzer.shrink(program, fails)
    assert "cumsum" in small.source()
    assert fails(small)
    assert len(small.steps) <= len(program.steps)
    assert all("cumsum" not in line for step in small.steps[:-1] for line in step.lines)
