"""What is made from a summary, and what shows it, says what it wants instead of failing inside."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import interrupts
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
    "budget misspelt": (
        lambda: ns.NewtonSummary(NET, loss_fn, budjet=0.1),
        "NewtonSummary has no argument 'budjet'. Did you mean 'budget'",
    ),
    "period misspelt": (
        lambda: ns.NewtonSummary.paper(ns.make_partition(NET), sumary_period=5),
        "NewtonSummary.paper has no argument 'sumary_period'. Did you mean 'summary_period'",
    ),
    "loss as the paper's lr": (
        lambda: ns.NewtonSummary.paper(ns.make_partition(NET), loss_fn, [BATCH]),
        r"is lr\. Pass loss and data .* curvature=\(loss_fn, batches\)",
    ),
    "lambda word": (
        lambda: ns.learning_rates(SUMMARY, "auto"),
        "tries steps, which needs the model",
    ),
    "lambda other": (lambda: ns.learning_rates(SUMMARY, "x"), "lambda_int='x': expected a finite"),
    "lambda vector": (
        lambda: ns.learning_rates(SUMMARY, torch.ones(2)),
        ": expected a finite number",
    ),
    "lambda text": (lambda: ns.learning_rates(SUMMARY, "1"), "lambda_int='1': expected a finite"),
    "lambda below": (lambda: ns.learning_rates(SUMMARY, -1), "lambda_int=-1: expected a finite"),
    "advice lambda": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, lambda_int="x"),
        "lambda_int='x': expected a finite number, 0 or more",
    ),
    "advice lambda below": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, lambda_int=-1),
        "lambda_int=-1: expected a finite number, 0 or more",
    ),
    "advice fraction": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, fraction="a"),
        r"fraction='a': expected a number above 0, at most 1",
    ),
    "advice change": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, max_change=float("inf")),
        "max_change=inf: expected a finite number above 1",
    ),
    "advice option": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, microbatches=2),
        "suggest_lrs has no argument 'microbatches'. Did you mean 'microbatch'",
    ),
    "advice typo": (
        lambda: ns.suggest_lrs(NET, never, BATCH, SGD, rehersal=False),
        "suggest_lrs has no argument 'rehersal'. Did you mean 'rehearsal'",
    ),
    "rates word": (
        lambda: ns.step_trials(*TRIED, "x"),
        "rates has type str: expected what learning_rates",
    ),
    "one fraction": (
        lambda: ns.step_trials(*TRIED, fractions=0.5),
        "fractions=0.5: expected a list of numbers",
    ),
    "fractions of words": (
        lambda: ns.step_trials(*TRIED, fractions=["a"]),
        r"fractions=\['a'\]: expected a list of numbers",
    ),
    "one strength": (
        lambda: ns.suggest_lambda_int(*TRIED, strengths=10),
        "strengths=10: expected a list of numbers",
    ),
    "eta list": (lambda: SUMMARY.predicted_change([1, 2]), r"has type list: .*shape \(2,\).*\.eta"),
    "eta rates": (lambda: SUMMARY.predicted_change(RATES), r"LearningRates: .*\(summary\)\.eta"),
    "history rates": (
        lambda: History().add(0, SUMMARY, None),
        "has type NoneType: pass learning_rates",
    ),
    "report path": (lambda: ns.report(SUMMARY, None), r"NoneType: use report\(what, path\)"),
    "report turned": (lambda: ns.report("page.html", SUMMARY), "path has type Summary"),
    "report nothing": (lambda: ns.report("no/where", "page.html"), "no.where does not exist: pass"),
    "pairs count": (lambda: analysis.strongest_pairs(SUMMARY, "3"), "count='3': expected a number"),
    "coarsen none": (lambda: analysis.coarsen(None, {}), "needs a Summary, not NoneType"),
    "coarsen list": (lambda: analysis.coarsen(SUMMARY, ["a"]), "{'both': .*'weight', 'bias'"),
    "smooth history": (lambda: analysis.smooth(History(), [1]), r"history\.rates, history\.epochs"),
    "heat map": (lambda: figures.heatmap(None), "heatmap needs a Summary.*NoneType"),
    "rates": (lambda: figures.rates(SUMMARY), r"rates needs a History, not Summary.*History\.of"),
    "curves": (lambda: figures.curves(SUMMARY), "curves needs a History, not Summary"),
    "changes": (lambda: figures.predicted_change(RATES), "needs a History, not LearningRates"),
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


# --- what is wrong about a measurement, and what it leaves ---------------------------------------


def wrong_losses(kind):
    def loss(model, batch):
        value = interrupts.loss_fn(model, batch)
        if kind == "raises":
            raise ArithmeticError("of the user's own")
        if kind == "moves":
            model.a.weight.data.add_(1)
        return {"nan": value * math.nan, "float": value.item(), "two": value.expand(2)}.get(
            kind, value.detach() if kind == "detached" else value
        )

    return loss


def empty(batch):
    return tuple(x[:0] for x in batch)


def as_numpy(batch):
    return tuple(x.numpy() for x in batch)


OURS = interrupts.loss_fn
MEASURED = {
    "no samples": (lambda p: ns.summarize(p.model, OURS, empty(p.batch)), "Batch 0 has no samples"),
    "no batch": (lambda p: ns.summarize(p.model, OURS, []), "The data is empty"),
    "no data": (lambda p: ns.summarize(p.model, OURS, None), "data=None, and loss_fn failed"),
    "arrays": (lambda p: ns.summarize(p.model, OURS, as_numpy(p.batch)), "holds numpy arrays"),
    "order": (lambda p: p.measure(order=4), "order=4: expected 1, 2 or 3"),
    "backend": (lambda p: p.measure(backend="swep"), "Did you mean 'sweep'"),
    "microbatch": (lambda p: p.measure(microbatch=0), "microbatch=0: expected a number of samples"),
    "microbatch true": (lambda p: p.measure(microbatch=True), "microbatch=True: expected a number"),
    "microbatch of steps": (
        lambda p: ns.NewtonSummary(p.groups, OURS, microbatch=0),
        "microbatch=0: expected a number of samples",
    ),
    "direction": (lambda p: p.measure(direction="grad"), "Unknown direction 'grad'"),
    "NewtonSummary as direction": (
        lambda p: p.measure(direction=ns.NewtonSummary(p.groups, OURS)),
        "NewtonSummary cannot give a direction",
    ),
    "NewtonSummary advised": (
        lambda p: ns.suggest_lrs(p.model, OURS, p.batch, ns.NewtonSummary(p.groups, OURS)),
        "NewtonSummary finds its own rates: pass an optimizer whose lr",
    ),
    "samples": (
        lambda p: ns.summarize(p.model, OURS, p.batch, num_samples=-1),
        "num_samples=-1: expected a whole number",
    ),
    "ranks": (lambda p: p.measure(distributed="yes"), "distributed='yes': expected 'auto'"),
    "stack": (lambda p: p.measure(stack_limit="much"), "stack_limit='much'"),
    "meta": (
        lambda p: ns.summarize(nn.Linear(3, 2, device="meta"), OURS, p.batch),
        "on the meta device",
    ),
    "not a model": (
        lambda p: ns.summarize(OURS, p.model, p.batch),
        "model has type function",
    ),
    "not a loss": (lambda p: ns.summarize(p.model, None, p.batch), "loss_fn has type NoneType"),
    **{
        f"loss {kind}": (
            lambda p, kind=kind: ns.summarize(p.model, wrong_losses(kind), p.batch),
            message,
        )
        for kind, message in {
            "raises": "of the user's own",
            "moves": "changed parameter 'a.weight' in place",
            "nan": "The loss is nan",
            "float": "returned float: expected the loss as a tensor",
            "two": r"a tensor of shape \(2,\)",
            "detached": "does not depend on the parameters",
        }.items()
    },
    "tensor order": (
        lambda p: ns.derivative_tensor(p.model, OURS, p.batch, order=0),
        "order=0: expected a whole number",
    ),
    "tensor too large": (
        lambda p: ns.derivative_tensor(p.model, OURS, p.batch, partition="discrete", order=12),
        "backward passes, and about .* times as long as order 4",
    ),
    "terms too many": (
        lambda p: ns.taylor_terms(p.model, OURS, p.batch, order=40),
        "order=40 of 1 groups takes 40 backward passes, and about 2e.14 times as long",
    ),
    "steps without a gradient": (
        lambda p: ns.NewtonSummary(NET, OURS).step(p.batch),
        r"No parameter of the partition has a gradient.*before step\(\), not in a closure",
    ),
}


@pytest.mark.parametrize("case", MEASURED)
@pytest.mark.filterwarnings("ignore")
def test_an_error_says_what_to_write_and_leaves_everything_as_it_was(case):
    call, message = MEASURED[case]
    problem = interrupts.Problem()
    before = interrupts.everything(problem, trains=False)
    with pytest.raises((TypeError, ValueError, ArithmeticError), match=message):
        call(problem)
    after = interrupts.everything(problem, trains=False)
    assert [name for name in before if not interrupts.same(before[name], after[name])] == []


def test_groups_that_memory_has_no_room_for_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**18))
    model = nn.Linear(30_029, 1)
    with pytest.raises(ValueError, match=r"of order 2 of 30,030 groups take 20\.2 GiB, .* has 1:"):
        ns.summarize(model, never, torch.ones(1, 30_029), partition="discrete")


def test_a_high_order_says_what_it_takes():
    model = nn.Linear(2, 1, bias=False)
    with pytest.warns(UserWarning, match="order=9 of 1 groups takes 9 backward passes, and about"):
        ns.taylor_terms(model, lambda m, x: m(x).square().mean(), torch.ones(3, 2), order=9)
