"""How the parameters of a model are grouped (paper, Section 4)."""

from newton_summary.partition.groups import Member, Partition
from newton_summary.partition.layers import Layer, find_layers
from newton_summary.partition.parameters import Params, result_dtype, role, trainable, unwrap
from newton_summary.partition.schemes import PARTITIONS
from newton_summary.partition.specs import Spec, make_partition

__all__ = [
    "PARTITIONS",
    "Layer",
    "Member",
    "Params",
    "Partition",
    "Spec",
    "find_layers",
    "make_partition",
    "result_dtype",
    "role",
    "trainable",
    "unwrap",
]
