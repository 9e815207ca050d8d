"""Exact higher-order information about the training of a network, seen through groups of layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from newton_summary import analysis as analysis
    from newton_summary import data as data
    from newton_summary import figures as figures
    from newton_summary import integrations as integrations
    from newton_summary.errors import (
        CannotDifferentiate,
        CoupledSamplesError,
        NewtonSummaryError,
        NotFiniteError,
        RankError,
        RankNotFiniteError,
    )
    from newton_summary.history import History, Measured, Trial
    from newton_summary.measuring.advice import Advice, GroupAdvice, suggest_lrs
    from newton_summary.measuring.lambda_int import Strengths, TriedStrength, suggest_lambda_int
    from newton_summary.measuring.measurement import derivative_tensor, summarize, taylor_terms
    from newton_summary.measuring.trial_steps import step_trials
    from newton_summary.measuring.tried_rates import learning_rates
    from newton_summary.measuring.verification import Verification, verify
    from newton_summary.optimizer import NewtonSummary
    from newton_summary.optimizer.controller import RateController, RateRecord
    from newton_summary.page import report
    from newton_summary.partition import Partition, make_partition
    from newton_summary.solver import LearningRates
    from newton_summary.summary import Summary, SummaryWindow

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "CannotDifferentiate",
    "CoupledSamplesError",
    "GroupAdvice",
    "History",
    "LearningRates",
    "Measured",
    "NewtonSummary",
    "NewtonSummaryError",
    "NotFiniteError",
    "Partition",
    "RankError",
    "RankNotFiniteError",
    "RateController",
    "RateRecord",
    "Strengths",
    "Summary",
    "SummaryWindow",
    "Trial",
    "TriedStrength",
    "Verification",
    "__version__",
    "derivative_tensor",
    "learning_rates",
    "make_partition",
    "report",
    "step_trials",
    "suggest_lambda_int",
    "suggest_lrs",
    "summarize",
    "taylor_terms",
    "verify",
]

_MODULES = {
    "errors": (
        "CannotDifferentiate",
        "CoupledSamplesError",
        "NewtonSummaryError",
        "NotFiniteError",
        "RankError",
        "RankNotFiniteError",
    ),
    "history": ("History", "Measured", "Trial"),
    "measuring.advice": ("Advice", "GroupAdvice", "suggest_lrs"),
    "measuring.lambda_int": ("Strengths", "TriedStrength", "suggest_lambda_int"),
    "measuring.measurement": ("derivative_tensor", "summarize", "taylor_terms"),
    "measuring.trial_steps": ("step_trials",),
    "measuring.tried_rates": ("learning_rates",),
    "measuring.verification": ("Verification", "verify"),
    "optimizer": ("NewtonSummary",),
    "optimizer.controller": ("RateController", "RateRecord"),
    "page": ("report",),
    "partition": ("Partition", "make_partition"),
    "solver": ("LearningRates",),
    "summary": ("Summary", "SummaryWindow"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("analysis", "data", "figures", "integrations")


def __getattr__(name: str) -> Any:
    """Import a name at its first use: torch takes a second, and ``--help`` needs none of it."""
    if name in _SUBMODULES:
        return import_module(f"newton_summary.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'newton_summary' has no attribute {name!r}")
    value = getattr(import_module(f"newton_summary.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
