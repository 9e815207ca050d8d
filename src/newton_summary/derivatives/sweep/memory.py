"""How much memory the stack of a sweep will take, and how to keep it within a limit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from newton_summary.derivatives.sweep.tape import Tape
from newton_summary.partition import Partition

SMALL = 2**30  # bytes; assumed to be free
UNKNOWN = 2**33  # bytes; assumed to be free where it is unknown
WORKING_COPIES = 3  # of the largest stack, while a rule computes


class StackTooLarge(Exception):
    """The stack of a batch would need more memory than it may take."""

    def __init__(self, needed: int, limit: int, loss: torch.Tensor):
        """Remember by how much, and the loss of the whole batch."""
        super().__init__(
            f"The stack needs {needed / 2**30:.2f} GiB, the limit is {limit / 2**30:.2f}."
        )
        self.needed, self.limit, self.loss = needed, limit, loss


def stack_bytes(tape: Tape, partition: Partition, order: int) -> int:
    """Estimate the peak of all stacks that are alive at the same time.

    Goes over the tape as the sweep does, with sets of groups in the place of tensors.
    """
    met: dict[int, frozenset[int]] = {}
    for slot, name in tape.leaves.items():
        label = partition.labels[name]
        mine = [label] if isinstance(label, int) else torch.unique(label).tolist()
        met[slot] = frozenset(mine)
    second_order: set[int] = set()  # slots with second derivatives
    sizes: dict[int, int] = {}
    alive = peak = 0
    chunked = {i: logits for logits in tape.chunked for i in logits.ops}
    for i, op in enumerate(tape.ops):
        logits = chunked.get(i)
        if op.passed:
            union = frozenset().union(*[met[slot] for slot in op.inputs if slot in met])
            second = order == 3 and (op.curved or not second_order.isdisjoint(op.inputs))
            work = 0
            for value in op.outputs:
                if value is None or value.slot is None:
                    continue
                size = len(union) * (2 if second else 1) * value.tensor.nbytes
                if logits is not None:
                    size = -(-size * logits.at_a_time // logits.rows)
                work = max(work, size)
                if value.slot in tape.needed:
                    met[value.slot], sizes[value.slot] = union, size
                    alive += size
                    if second:
                        second_order.add(value.slot)
            peak = max(peak, alive + WORKING_COPIES * work)
        for slot in op.finishes:
            alive -= sizes.pop(slot, 0)
            met.pop(slot, None)
    return peak


def default_limit(device: torch.device, needed: int, may_split: bool) -> int:
    """Return half of the free memory; a quarter if the batch can be split, which costs less.

    Does not ask for the free memory where little is needed: that takes longer than a small sweep.
    """
    return SMALL if needed <= SMALL else free_memory(device) // (4 if may_split else 2)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, with those that torch keeps in reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN


def group_chunks(S: int, parts: int) -> Iterator[Sequence[int]]:
    """Give sets of groups such that every pair of groups is together in one of them.

    With n parts the groups are cut into 2n chunks, and every two chunks are one set: S / n
    groups at a time, n (2n - 1) times.

    >>> [list(groups) for groups in group_chunks(4, 2)]
    [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    """
    if S <= 2:
        yield range(S)
        return
    pieces = min(2 * parts, S)
    cuts = [round(i * S / pieces) for i in range(pieces + 1)]
    chunks = [range(a, b) for a, b in pairwise(cuts)]
    for i, first in enumerate(chunks):
        for second in chunks[i + 1 :]:
            yield [*first, *second]
