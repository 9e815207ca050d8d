"""How much memory the stack of a sweep takes, and how to keep it within a limit."""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from newton_summary.derivatives.sweep.rules.elementwise import CURVED, RELATIVE
from newton_summary.derivatives.sweep.tape import Tape, groups_in
from newton_summary.partition import Partition

SMALL = 2**30  # bytes; assumed to be free
UNKNOWN = 2**33  # bytes; assumed to be free where it is unknown
LARGEST_KEPT, MOST_KEPT = 2**28, 2**30  # bytes of one array, and in all, that glibc keeps
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
WORKING_COPIES = 3  # of the largest stack, while a rule computes


def bytes_of(limit: int | str) -> int:
    """Return a limit of memory in bytes.

    >>> bytes_of("4GB"), bytes_of("1.5 GiB"), bytes_of(1024)
    (4000000000, 1610612736, 1024)
    """
    number: int | float | str = limit
    unit = 1
    if isinstance(limit, str):
        found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?)?B?\s*", limit, re.IGNORECASE)
        number, prefix = found.groups(default="") if found else ("", "")
        unit = (1024 if prefix[1:] else 1000) ** " KMGT".index(prefix[:1].upper() or " ")
    try:
        size = int(float(number) * unit)
    except (TypeError, ValueError, OverflowError):
        size = 0
    if size <= 0 or isinstance(limit, bool):
        raise ValueError(
            f"stack_limit={limit!r}: expected a number of bytes, or a string such as '4GB' or "
            "'500 MiB'."
        )
    return size


class StackTooLarge(Exception):
    """The stack of a batch would need more memory than it may take."""

    def __init__(self, needed: int, limit: int):
        """Store how much is needed, and the limit."""
        super().__init__(
            f"The stack needs {needed / 2**30:.2f} GiB, but the limit is {limit / 2**30:.2f}."
        )
        self.needed, self.limit = needed, limit


def stack_bytes(tape: Tape, partition: Partition, order: int) -> int:
    """Estimate the peak of all stacks that are alive at the same time.

    Goes over the tape as the sweep does, with sets of groups in place of tensors.
    """
    met = {slot: frozenset(groups_in(partition.labels[n])) for slot, n in tape.leaves.items()}
    second_order: set[int] = set()  # slots with second derivatives
    sizes: dict[int, int] = {}
    alive = peak = 0
    # The part of a value that is passed at a time once all groups are met, a larger one before; of
    # what a run of tokens gives out, all is kept.
    share = {i: x.at_a_time / x.rows for x in tape.chunked for i in x.ops}
    share |= {i: x.at_a_time / x.tokens for x in tape.runs for i in x.ops}
    inside: set[int | None] = {s for x in tape.runs for i in x.ops for s in tape.ops[i].finishes}
    inside |= {v.slot for x in tape.chunked for i in x.ops for v in tape.ops[i].made}
    for i, op in enumerate(tape.ops):
        if op.passed:
            union = frozenset().union(*[met[slot] for slot in op.inputs if slot in met])
            second = order == 3 and (op.curved or not second_order.isdisjoint(op.inputs))
            in_parts = tape.loss.device.type == "cpu" and op.name in CURVED | RELATIVE
            work = 0
            for value in op.made:
                entry = value.tensor.element_size()  # sparse tensors have no nbytes
                size = len(union) * (2 if second else 1) * value.tensor.numel() * entry
                more = len(partition) / max(1, len(union))
                passed = math.ceil(size * min(1, more * share.get(i, 1)))
                work = max(work, 0 if in_parts else passed)
                size = passed if value.slot in inside else size
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


@cache
def keep_freed_memory() -> None:
    """Have glibc keep what is freed, so that the next stack need not ask the system for it again.

    It would return large arrays at once, and much of what is free at the end of its heap, and every
    new page is cleared. The user's own settings are respected.
    """
    settings = [*os.environ, os.environ.get("GLIBC_TUNABLES", "")]
    if any("malloc" in text.lower() and "threshold" in text.lower() for text in settings):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(M_TRIM_THRESHOLD, MOST_KEPT)


def default_limit(device: torch.device, needed: int, may_split: bool) -> int:
    """Return half of the free memory; a quarter if the batch can be split, which is cheaper.

    Does not query the free memory where little is needed: that takes longer than a small sweep.
    """
    return SMALL if needed <= SMALL else free_memory(device) // (4 if may_split else 2)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device, including those that torch keeps in reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN


def plan_of_sweeps(S: int, parts: int, order: int) -> list[tuple[Sequence[int], int]]:
    """Return which groups to sweep at a time, and to which order, for a number of parts.

    D3 needs the derivatives of a group alone, and Hbar needs no second ones, which are half of all.
    So with two parts, all groups are swept to order 2, and then each half of them to order 3: half
    of the memory for one and a half times the work.

    >>> plan_of_sweeps(4, 2, 3)
    [([0, 1, 2, 3], 2), (range(0, 4, 2), 3), (range(1, 4, 2), 3)]
    """
    if order == 2:
        return [(groups, 2) for groups in group_chunks(S, parts)]
    pairs = [(groups, 2) for groups in group_chunks(S, -(-parts // 2))]
    return [*pairs, *((range(i, S, parts), 3) for i in range(min(parts, S)))]


def group_chunks(S: int, parts: int) -> Iterator[Sequence[int]]:
    """Yield sets of groups such that every pair of groups is together in one of them.

    With n parts the groups are dealt out to 2n chunks, and every two chunks are one set: S / n
    groups at a time, n (2n - 1) times. Dealt out, since groups that are met early are carried far:
    a set of nothing but those would take as much memory as all groups.

    >>> [list(groups) for groups in group_chunks(4, 2)]
    [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    """
    if S <= 2:
        yield range(S)
        return
    pieces = min(2 * parts, S)
    chunks = [range(i, S, pieces) for i in range(pieces)]
    for i, first in enumerate(chunks):
        for second in chunks[i + 1 :]:
            yield sorted([*first, *second])
