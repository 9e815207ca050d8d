"""What is made from a summary, and what shows it, says what it wants instead of failing inside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from newton_summary import History, analysis, figures

torch.manual_seed(0)
NET = nn.Linear(3, 2)
BATCH = (torch.randn(4, 3), torch.randint(2, (4,)))
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def never(model, batch):
    raise AssertionError("A wrong number is told before anything is measured.")


SUMMARY = ns.summarize(NET, loss_fn, BATCH)
RATES = ns.learning_rates(SUMMARY)
TRIED = (NET, loss_fn, BATCH, SUMMARY)

WRONG = {
    "lambda word": (lambda: ns.learning_rates(SUMMARY, "auto"), "lambda_int='auto': write a"),
    "lambda none": (lambda: ns.learning_rates(SUMMARY, None), "lambda_int=None: write a finite"),
    "lambda vector": (lambda: ns.learning_rates(SUMMARY, torch.ones(2)), "write a finite number"),
    "lambda below": (lambda: ns.learning_rates(SUMMARY, -1), "lambda_int=-1: write a finite"),
    "advice lambda": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, lambda_int="x"),
        "lambda_int='x': write a finite number, 0 or more",
    ),
    "advice lambda below": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, lambda_int=-1),
        "lambda_int=-1: write a finite number, 0 or more",
    ),
    "advice fraction": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, fraction="a"),
        r"fraction='a': fraction is in \(0, 1\]",
    ),
    "advice change": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, max_change=float("inf")),
        "max_change=inf: fraction",
    ),
    "rates word": (lambda: ns.step_trials(*TRIED, "x"), "of type str: pass what learning_rates"),
    "one fraction": (
        lambda: ns.step_trials(*TRIED, fractions=0.5),
        "fractions=0.5: write a list of numbers",
    ),
    "fractions of words": (
        lambda: ns.step_trials(*TRIED, fractions=["a"]),
        r"fractions=\['a'\]: write a list of numbers",
    ),
    "one strength": (
        lambda: ns.suggest_lambda_int(*TRIED, strengths=10),
        "strengths=10: write a list of numbers",
    ),
    "eta list": (lambda: SUMMARY.predicted_change([1, 2]), r"type list: .*shape \(2,\).*\.eta"),
    "eta rates": (lambda: SUMMARY.predicted_change(RATES), r"LearningRates: .*\(summary\)\.eta"),
    "history rates": (lambda: History().add(0, SUMMARY, None), "NoneType: pass learning_rates"),
    "report path": (lambda: ns.report(SUMMARY, None), r"NoneType: write report\(what, path\)"),
    "report turned": (lambda: ns.report("page.html", SUMMARY), "path is of type Summary"),
    "report nothing": (lambda: ns.report("no/where", "page.html"), "no.where does not exist: pass"),
    "pairs count": (lambda: analysis.strongest_pairs(SUMMARY, "3"), "count='3': write a number"),
    "coarsen none": (lambda: analysis.coarsen(None, {}), "needs a Summary, not NoneType"),
    "coarsen list": (lambda: analysis.coarsen(SUMMARY, ["a"]), "{'both': .*'weight', 'bias'"),
    "smooth history": (lambda: analysis.smooth(History(), [1]), r"history\.rates, history\.epochs"),
    "heat map": (lambda: figures.heatmap(None), "heatmap needs a Summary.*NoneType"),
    "rates": (lambda: figures.rates(SUMMARY), r"rates draws a History.*Summary.*History\.of"),
    "curves": (lambda: figures.curves(SUMMARY), "curves draws a History.*of type Summary"),
    "changes": (lambda: figures.predicted_change(RATES), "draws a History.*of type LearningRates"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wanted_is_told(case):
    call, message = WRONG[case]
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=message):
        call()


def test_several_histories_may_be_any_iterable():
    history = History("a", curves={"loss": [(0, 1.0), (1, 0.5)]})
    figure = figures.curves(one for one in (history, history))
    assert len(figure.axes[0].lines) == 2
