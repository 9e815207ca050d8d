"""Exact higher-order information about the training of a network, seen through groups of layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from newton_summary import analysis as analysis
    from newton_summary import data as data
    from newton_summary import figures as figures
    from newton_summary import integrations as integrations
    from newton_summary.errors import CannotDifferentiate as CannotDifferentiate
    from newton_summary.errors import CannotWriteError as CannotWriteError
    from newton_summary.errors import CoupledSamplesError as CoupledSamplesError
    from newton_summary.errors import NewtonSummaryError as NewtonSummaryError
    from newton_summary.errors import NotFiniteError as NotFiniteError
    from newton_summary.errors import RankError as RankError
    from newton_summary.errors import RankNotFiniteError as RankNotFiniteError
    from newton_summary.errors import UserError as UserError
    from newton_summary.history import History as History
    from newton_summary.history import Measured as Measured
    from newton_summary.history import Trial as Trial
    from newton_summary.measuring.advice import Advice as Advice
    from newton_summary.measuring.advice import GroupAdvice as GroupAdvice
    from newton_summary.measuring.advice import suggest_lrs as suggest_lrs
    from newton_summary.measuring.lambda_int import Strengths as Strengths
    from newton_summary.measuring.lambda_int import TriedStrength as TriedStrength
    from newton_summary.measuring.lambda_int import suggest_lambda_int as suggest_lambda_int
    from newton_summary.measuring.measurement import derivative_tensor as derivative_tensor
    from newton_summary.measuring.measurement import summarize as summarize
    from newton_summary.measuring.measurement import taylor_terms as taylor_terms
    from newton_summary.measuring.trial_steps import step_trials as step_trials
    from newton_summary.measuring.tried_rates import learning_rates as learning_rates
    from newton_summary.measuring.verification import Verification as Verification
    from newton_summary.measuring.verification import verify as verify
    from newton_summary.optimizer import NewtonSummary as NewtonSummary
    from newton_summary.optimizer.controller import RateController as RateController
    from newton_summary.optimizer.controller import RateRecord as RateRecord
    from newton_summary.page import report as report
    from newton_summary.partition import Partition as Partition
    from newton_summary.partition import make_partition as make_partition
    from newton_summary.solver import LearningRates as LearningRates
    from newton_summary.summary import Summary as Summary
    from newton_summary.summary import SummaryWindow as SummaryWindow

__version__ = "0.2.0.dev0"

_MODULES = {
    "errors": (
        "CannotDifferentiate",
        "CannotWriteError",
        "CoupledSamplesError",
        "NewtonSummaryError",
        "NotFiniteError",
        "RankError",
        "RankNotFiniteError",
        "UserError",
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
__all__ = ["__version__", *sorted(_HOMES)]
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
    return sorted([*__all__, *_SUBMODULES])
