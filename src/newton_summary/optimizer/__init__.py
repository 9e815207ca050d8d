"""NewtonSummary, the paper's method as a torch optimizer (Algorithm 2)."""

from newton_summary.optimizer.newton_summary import NewtonSummary

__all__ = ["NewtonSummary"]
