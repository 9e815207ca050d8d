"""How the parameters of a model are grouped (paper, Section 4)."""

from newton_summary.parallel.processes import Params, trainable, unwrap
from newton_summary.partition.groups import Member, Partition, inner_of_all, result_dtype
from newton_summary.partition.layers import Layer, find_layers, role
from newton_summary.partition.schemes import PARTITIONS, Spec, make_partition

__all__ = [
    "PARTITIONS",
    "Layer",
    "Member",
    "Params",
    "Partition",
    "Spec",
    "find_layers",
    "inner_of_all",
    "make_partition",
    "result_dtype",
    "role",
    "trainable",
    "unwrap",
]
