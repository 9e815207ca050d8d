"""Exact higher-order information about the training of a network, seen through groups of layers."""

from newton_summary.advice import Advice, suggest_lrs
from newton_summary.history import History, Trial
from newton_summary.learning_rates import LearningRates, learning_rates
from newton_summary.measure import derivative_tensor, summarize, taylor_terms
from newton_summary.optimizer import NewtonSummary
from newton_summary.partition import Partition, make_partition
from newton_summary.report import report
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
    "suggest_lrs",
    "summarize",
    "taylor_terms",
    "verify",
]
