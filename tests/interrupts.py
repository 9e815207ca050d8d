"""Interrupts at random moments: whatever is measured, everything is as it was before.

    python tests/interrupts.py --tries 300      # of each kind and way; failures are printed
    python tests/interrupts.py --kinds sweep advice --seed 7

An interrupt is an exception as Ctrl-C is one, raised in two ways: by a signal at a random time, and
by a trace function before a random line, call or return, also where no signal is ever handled.
After each of them the model, its gradients, hooks and buffers, the optimizer, the random numbers
and the settings of torch are compared with what they were, and every so often a measurement and a
training step with what they gave. A step that trains may have moved some of the parameters.
"""

from __future__ import annotations

import argparse
import copy
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import newton_summary as ns
from newton_summary.probe.eager import is_measuring

WAYS = ("trace", "signal")


class Interrupt(BaseException):
    """Like KeyboardInterrupt, which would stop whoever runs this."""


class Net(nn.Module):
    """A network with all that a measurement has to look after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.3)
        self.calls, self.seen, self.log = 0, None, []

    def forward(self, x):
        self.calls += 1
        self.seen = x
        self.log.append(x)
        x = checkpoint(self.a, x, use_reentrant=False)
        return self.b(self.dropout(torch.tanh(self.norm(x))))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Problem:
    """A model in the middle of a training, and what can be done with it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().double()
        x = torch.randn(6, 3, dtype=torch.float64)
        self.batch = (x, torch.randint(3, (6,)))
        self.fired = [0]
        self.model.a.weight.register_hook(self._count)
        self.model.b.register_full_backward_hook(lambda *args: None)
        self.adam = torch.optim.Adam(self.model.parameters(), foreach=False)
        loss_fn(self.model, self.batch).backward()
        self.adam.step()
        self.groups = ns.make_partition(self.model, "weights-biases")
        self.summary = ns.summarize(self.model, loss_fn, self.batch, partition=self.groups)
        self.trainers: list[Any] = [self.adam]

    def _count(self, grad: torch.Tensor) -> torch.Tensor:
        self.fired[0] += 1
        return grad

    def measure(self, **how: Any) -> ns.Summary:
        return ns.summarize(self.model, loss_fn, self.batch, partition=self.groups, **how)

    def newton(self, **settings: Any) -> Callable[[], Any]:
        """Return a step that is measured, after the first, which is searched for."""
        newton = ns.NewtonSummary(self.groups, loss_fn, summary_period=1, **settings)
        newton.step(self.batch)
        self.trainers.append(newton)
        return lambda: newton.step(self.batch)

    def paper(self) -> Callable[[], Any]:
        """Return a step of the paper's algorithm that refreshes, after one that did."""
        loader = torch.utils.data.DataLoader([tuple(x) for x in zip(*self.batch)], 3, shuffle=True)
        how = {"summary_period": 1, "warmup": 0, "curvature": (loss_fn, loader)}
        newton = ns.NewtonSummary.paper(self.groups, **how)
        newton.step()
        self.trainers.append(newton)
        return newton.step

    def steered(self) -> Callable[[], Any]:
        """Return a step that is measured, after the first, which is searched for."""
        controller = ns.RateController(self.adam, self.model, loss_fn, period=1)
        controller.step(self.batch)
        self.trainers.append(controller)
        return lambda: controller.step(self.batch)


def _readings() -> dict[str, Callable[[Problem], Callable[[], Any]]]:
    def adam(problem: Problem) -> torch.optim.Optimizer:
        return torch.optim.Adam(problem.model.parameters())

    return {
        "sweep": lambda p: lambda: p.measure(backend="sweep"),
        "nested": lambda p: lambda: p.measure(backend="nested", order=2),
        "differences": lambda p: lambda: p.measure(backend="differences", order=2),
        "direction": lambda p: lambda: p.measure(direction=p.adam, order=2),
        "tensor": lambda p: (
            lambda: ns.derivative_tensor(p.model, loss_fn, p.batch, partition=p.groups, order=2)
        ),
        "trials": lambda p: lambda: ns.step_trials(p.model, loss_fn, p.batch, p.summary),
        "advice": lambda p: lambda: ns.suggest_lrs(p.model, loss_fn, [p.batch] * 2, p.adam),
        "verify": lambda p: lambda: ns.verify(p.model, loss_fn, p.batch),
        "newton": lambda p: p.newton(),
        "newton along adam": lambda p: p.newton(direction=adam(p)),
        "paper": lambda p: p.paper(),
        "controller": lambda p: p.steered(),
    }


KINDS = _readings()
TRAINS = ("newton", "newton along adam", "paper", "controller")


def everything(problem: Problem, trains: bool) -> dict[str, Any]:
    """Return all that an interrupt could have changed, by name; of a training, all but its work."""
    model = problem.model
    named = list(model.named_parameters())
    found: dict[str, Any] = {
        "gradients": [p.grad if p.grad is None else (id(p.grad), p.grad.clone()) for _, p in named],
        "what requires a gradient": [p.requires_grad for _, p in named],
        "hooks of tensors": [dict(p._backward_hooks or {}) for _, p in named],
        "modes": [m.training for m in model.modules()],
        "hooks of modules": [
            [dict(h) for h in (m._backward_hooks, m._backward_pre_hooks, m._forward_hooks)]
            for m in model.modules()
        ],
        "buffers": [(id(b), b.clone()) for b in model.buffers()],
        "attributes": (model.calls, id(model.seen), list(map(id, model.log))),
        "random numbers": (
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ),
        "gradients on": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "function modes": (_modes(), torch._C._is_torch_function_enabled()),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "functorch": torch._C._functorch.peek_interpreter_stack() is None,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "saved tensors": (torch._C._autograd._saved_tensors_hooks_is_enabled(),),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "forward mode": torch.autograd.forward_ad._current_level,
        "measuring": is_measuring(),
        "learning rates": [g["lr"] for t in problem.trainers for g in _groups(t)],
        "the optimizer": [sorted(vars(t)) for t in problem.trainers],
        "hooks of the optimizer": list(problem.adam._optimizer_step_pre_hooks),
    }
    if not trains:
        found["parameters"] = [p.detach().clone() for _, p in named]
        found["versions"] = [p._version for _, p in named]
        found["state of the optimizer"] = [
            {k: v.clone() for k, v in s.items()} for s in problem.adam.state.values()
        ]
    return found


def _modes() -> list[str]:
    """Return the active function modes, but for ours: left behind, they pass everything on."""
    stack = _get_current_function_mode_stack()
    kinds = [f"{type(mode).__module__}.{type(mode).__name__}" for mode in stack]
    return [kind for kind in kinds if not kind.startswith("newton_summary.")]


def _groups(trainer: Any) -> Any:
    return getattr(trainer, "optimizer", trainer).param_groups


def same(a: Any, b: Any) -> bool:
    """Return whether two readings are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class InterruptAt:
    """A trace function that raises at the n-th line, call or return."""

    def __init__(self, n: int):
        self.n, self.count, self.where = n, 0, ""

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        self.count += 1
        if self.count == self.n:
            sys.settrace(None)
            self.where = f"{event} at {frame.f_code.co_filename}:{frame.f_lineno}"
            raise Interrupt
        return self


def by_trace(run: Callable[[], Any], n: int) -> tuple[int, str]:
    """Run, interrupt at the n-th event, and return how many there were, and where it was."""
    interrupt, before = InterruptAt(n), sys.gettrace()
    try:
        sys.settrace(interrupt)
        run()
    except Interrupt:
        pass
    except RuntimeError as error:
        if "mode stack" not in str(error):  # a mode of torch that was stopped half-way
            raise
    finally:
        sys.settrace(before)
    return interrupt.count, interrupt.where


def by_signal(run: Callable[[], Any], seconds: float) -> str:
    """Run, interrupt after so many seconds, and return where that was."""
    where = "not reached"

    def handle(number: int, frame: Any) -> None:
        nonlocal where
        where = f"signal at {frame.f_code.co_filename}:{frame.f_lineno}"
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:
        pass
    except RuntimeError as error:
        if "mode stack" not in str(error):
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return where


def campaign(kind: str, way: str, tries: int, seed: int = 0, check_every: int = 25) -> list[str]:
    """Interrupt one thing many times; return what was not as before, and where that was."""
    problem = Problem()
    run, trains = KINDS[kind](problem), kind in TRAINS
    numbers = random.Random(seed)
    failures = []
    run()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    total = by_trace(run, 0)[0] if way == "trace" else 0
    for trial in range(tries):
        old = [p.detach().clone() for p in problem.model.parameters()]
        before = everything(problem, trains)
        if way == "trace":
            where = by_trace(run, numbers.randint(1, total))[1]
        else:
            where = by_signal(run, max(numbers.uniform(0, seconds), 1e-6))
        after = everything(problem, trains)
        wrong = [name for name in before if not same(before[name], after[name])]
        if trains:
            wrong += _moved_wrongly(problem, old)
        if (trial + 1) % check_every == 0 or wrong:
            with torch.enable_grad():
                wrong += works(problem, trains)
        if wrong:
            failures.append(f"{kind}: {', '.join(wrong)} ({where})")
            problem = Problem()
            run = KINDS[kind](problem)
            run()
    return failures


def _moved_wrongly(problem: Problem, old: list[torch.Tensor]) -> list[str]:
    now = list(problem.model.parameters())
    if not all(bool(p.isfinite().all()) for p in now):
        return ["parameters that are not finite"]
    far = [float((p - q).norm()) > 1.0 for p, q in zip(now, old, strict=True)]
    return ["parameters that are far away"] if any(far) else []


def works(problem: Problem, trains: bool) -> list[str]:
    """Return what no longer does what it did."""
    wrong = []
    with torch.random.fork_rng():
        again = problem.measure()
        if again.backend != "sweep":
            wrong.append("the backend")
        if not trains and not torch.equal(again.Hbar, problem.summary.Hbar):
            wrong.append("Hbar")
        copied = copy.deepcopy(problem.model)
        grads = [p.grad for p in problem.model.parameters()]
        buffers = [b.clone() for b in problem.model.buffers()]
        plain = problem.model.calls, problem.model.seen, list(problem.model.log)
        fired = problem.fired[0]
        torch.manual_seed(1)
        for p in problem.model.parameters():
            p.grad = None
        loss_fn(problem.model, problem.batch).backward()
        torch.manual_seed(1)
        copied.zero_grad()
        loss_fn(copied, problem.batch).backward()
        pairs = zip(problem.model.parameters(), copied.parameters(), strict=True)
        if not all(torch.equal(p.grad, q.grad) for p, q in pairs):
            wrong.append("gradients of training")
        if problem.fired[0] == fired:
            wrong.append("hooks on gradients")
        for p, grad in zip(problem.model.parameters(), grads, strict=True):
            p.grad = grad
        for b, value in zip(problem.model.buffers(), buffers, strict=True):
            b.copy_(value)
        problem.model.calls, problem.model.seen, problem.model.log[:] = plain
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tries", type=int, default=100, help="of each kind and way")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # an interrupt inside a destructor
    count = 0
    for kind in args.kinds:
        for way in args.ways:
            failures = campaign(kind, way, args.tries, args.seed)
            count += len(failures)
            print(f"{kind}, by {way}: {len(failures)} of {args.tries} not as before", flush=True)
            for line, times in Counter(failures).most_common():
                print(f"  {times} x {line}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
