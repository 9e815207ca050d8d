"""Changes that are undone at the end, whatever happens in between.

An interrupt may come at any line, also inside of the code that puts things back. So every change is
announced in a journal *before* it is made, every step back may be taken twice, and journals are
nested: what an interrupted one has left is undone by the one around it.

Journals belong to a thread, so other threads see nothing of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

Step = Callable[[], object]


class _Here(threading.local):
    """What this thread is doing."""

    journal: Journal | None = None  # the innermost
    measuring = False


_here = _Here()


class Journal:
    """A context at whose end all announced changes are undone, the last one first.

    >>> numbers = [1]
    >>> with Journal() as journal:
    ...     journal.undo_later(numbers.clear)
    ...     numbers.append(2)
    >>> numbers
    []
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._tries = 0  # of the last step
        self._outer: Journal | None = None

    def undo_later(self, step: Step) -> None:
        """Announce a change: ``step`` puts back what is there now.

        It is taken also if the change is never made, and again if it was interrupted.
        """
        self._steps.append(step)

    def undo(self) -> None:
        """Undo everything; after an interrupt, everything that is left."""
        while self._steps:
            if self._tries < 2:  # a step that fails twice must not keep back the others
                self._tries += 1
                self._steps[-1]()
            self._steps.pop()
            self._tries = 0

    def __enter__(self) -> Journal:
        """Become this thread's innermost journal."""
        self._outer = _here.journal
        _here.journal = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Undo everything that this journal, and interrupted ones inside of it, still hold."""
        try:
            self._undo_all()
        finally:
            self._undo_all()

    def _undo_all(self) -> None:
        while (inner := _here.journal) is not None and inner is not self and self._contains(inner):
            inner.undo()
            _here.journal = inner._outer
        self.undo()
        if _here.journal is self:
            _here.journal = self._outer

    def _contains(self, other: Journal) -> bool:
        outer = other._outer
        while outer is not None and outer is not self:
            outer = outer._outer
        return outer is self


def is_measuring() -> bool:
    """Whether this thread is inside of a measurement."""
    return _here.measuring


def start_measuring(journal: Journal, alone: bool) -> None:
    """Begin a measurement, which ends with the journal.

    Args:
        journal: Of the measurement.
        alone: Whether to wait until no other thread measures. They would draw from the same random
            numbers, and on the same model put back each other's changes.
    """
    before = _here.measuring

    def stop() -> None:
        _here.measuring = before

    if alone and not before:
        journal.undo_later(_end_turn)
        _wait_for_turn()
    journal.undo_later(stop)
    _here.measuring = True


def interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the interrupt that an error was raised in the course of, if there was one."""
    while error is not None and isinstance(error, Exception):
        error = error.__context__
    return error


# Which thread measures, under the key "turn". Not a lock: an interrupt could leave it locked. Each
# operation of a dict is whole to other threads.
_turns: dict[str, int] = {}


def _wait_for_turn() -> None:
    me = threading.get_ident()
    while (owner := _turns.setdefault("turn", me)) != me:
        if owner not in sys._current_frames():  # it has ended without ending its turn
            _turns.pop("turn", None)
        time.sleep(0.002)


def _end_turn() -> None:
    if _turns.get("turn") == threading.get_ident():
        _turns.pop("turn", None)
