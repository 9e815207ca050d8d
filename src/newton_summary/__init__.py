"""Exact higher-order information about the training of a network, seen through groups of layers."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from newton_summary import analysis as analysis
    from newton_summary import data as data
    from newton_summary import figures as figures
    from newton_summary import integrations as integrations
    from newton_summary.advice import Advice, suggest_lrs
    from newton_summary.history import History, Trial
    from newton_summary.learning_rates import LearningRates, learning_rates
    from newton_summary.measure import derivative_tensor, summarize, taylor_terms
    from newton_summary.optimizer import NewtonSummary
    from newton_summary.partition import Partition, make_partition
    from newton_summary.report import report
    from newton_summary.strengths import Strengths, suggest_lambda_int
    from newton_summary.summary import Summary, SummaryWindow
    from newton_summary.trials import step_trials
    from newton_summary.verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "History",
    "LearningRates",
    "NewtonSummary",
    "Partition",
    "Strengths",
    "Summary",
    "SummaryWindow",
    "Trial",
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
    "advice": ("Advice", "suggest_lrs"),
    "history": ("History", "Trial"),
    "learning_rates": ("LearningRates", "learning_rates"),
    "measure": ("derivative_tensor", "summarize", "taylor_terms"),
    "optimizer": ("NewtonSummary",),
    "partition": ("Partition", "make_partition"),
    "report": ("report",),
    "strengths": ("Strengths", "suggest_lambda_int"),
    "summary": ("Summary", "SummaryWindow"),
    "trials": ("step_trials",),
    "verification": ("Verification", "verify"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("analysis", "data", "figures", "integrations")


class _Package(ModuleType):
    """Imports a name when it is first used: torch takes a second, and ``--help`` needs none of it.

    ``learning_rates`` and ``report`` are functions and submodules. The import system would put the
    submodule in the place of the function; here the function stays.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"newton_summary.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'newton_summary' has no attribute {name!r}")
        value = getattr(import_module(f"newton_summary.{_HOMES[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # joblib, dask and others send functions that use the package; a subclass they do not know.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__, *_SUBMODULES})


sys.modules[__name__].__class__ = _Package
