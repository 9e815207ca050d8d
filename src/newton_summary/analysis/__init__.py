"""How the groups of a model interact, read off a summary (paper, Section 6.1 and App. H)."""

from newton_summary.analysis.coarsening import Merges, coarsen, suggest_merges
from newton_summary.analysis.interactions import (
    InverseKept,
    JointGain,
    Kept,
    Pair,
    Smoothed,
    StrongestPairs,
    inverse_kept,
    joint_gain,
    layer_numbers,
    normalized,
    smooth,
    strongest_pairs,
)

__all__ = [
    "InverseKept",
    "JointGain",
    "Kept",
    "Merges",
    "Pair",
    "Smoothed",
    "StrongestPairs",
    "coarsen",
    "inverse_kept",
    "joint_gain",
    "layer_numbers",
    "normalized",
    "smooth",
    "strongest_pairs",
    "suggest_merges",
]
