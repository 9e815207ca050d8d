"""The result of a measurement: gbar, Hbar and D3 (paper, Section 4), and their means."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from newton_summary.display.html import html_heatmap, side_by_side
from newton_summary.display.names import first_names
from newton_summary.display.table import ShownAsTable, without_middle
from newton_summary.errors import UserError
from newton_summary.partition import Partition
from newton_summary.storage.reading import Damaged, content_of, explained, load_tensors
from newton_summary.storage.writing import save_tensors

T = TypeVar("T")
Role = Literal["weight", "bias", "mixed"]


class Block(NamedTuple):
    """The entries of a matrix between two kinds of groups."""

    rows: tuple[str, ...]  # names of the groups
    columns: tuple[str, ...]
    values: Tensor  # (rows, columns)


@dataclass(frozen=True, eq=False)
class Summary(ShownAsTable):
    """Derivatives of the loss along ``u``, seen through a partition into S groups.

    All three are derivatives at ``eta = 0`` of phi(eta) = L(theta + U I_{P:S} eta) (paper, Sections
    3 and 4). A measurement of lower order leaves the higher ones ``None``. Made by
    :func:`summarize`, or by hand:

    >>> summary = Summary(
    ...     gbar=torch.tensor([3.0, 1.0]),
    ...     Hbar=torch.tensor([[2.0, 1.0], [1.0, 1.0]]),
    ...     D3=torch.tensor([1.0, -8.0]),
    ... )
    >>> len(summary), summary.order, summary.names
    (2, 3, ('0', '1'))
    >>> summary.predicted_change(eta=torch.tensor([1.0, 1.0]))  # -eta.gbar + 1/2 eta.Hbar eta
    tensor(-1.5000)
    >>> summary.inverse()
    tensor([[ 1., -1.],
            [-1.,  2.]])
    """

    _right = range(1, 6)

    gbar: Tensor  # (S,)    first derivative, D^(1)(u)
    Hbar: Tensor | None = None  # (S, S)  second derivative, D^(2)(u)
    D3: Tensor | None = None  # (S,)    diagonal of the third, signed
    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))  # ()  mean of samples
    num_samples: int = 0
    partition: Partition | None = None
    backend: str = "given"  # what computed it; "given" if made by hand
    reason: str | None = None  # why this backend and not the default one
    approximate: bool = False  # true for central differences, and where a warning says so
    gbar_stderr: Tensor | None = None  # (S,)    standard error of gbar over batches
    Hbar_stderr: Tensor | None = None  # (S, S)  standard error of Hbar
    parts: tuple[Summary, ...] = ()  # the batches' own summaries, with stderr=True

    def __post_init__(self) -> None:
        """Check types and shapes."""
        for name, value, ndim in (
            ("gbar", self.gbar, 1),
            ("Hbar", self.Hbar, 2),
            ("D3", self.D3, 1),
            ("gbar_stderr", self.gbar_stderr, 1),
            ("Hbar_stderr", self.Hbar_stderr, 2),
        ):
            if value is None and name != "gbar":
                continue
            if not isinstance(value, Tensor) or not value.is_floating_point():
                what = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"{name} is {what}: expected a real floating-point tensor.")
            if self.gbar.ndim != 1:
                raise ValueError(f"gbar has shape {tuple(value.shape)}: expected a vector, (S,).")
            if value.shape != self.gbar.shape * ndim:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, but gbar has {len(self)} entries: "
                    f"expected shape {(len(self),) * ndim}."
                )
        if self.partition is not None and len(self.partition) != len(self):
            raise ValueError(
                f"The partition has {len(self.partition)} groups, but gbar has {len(self)} entries."
            )
        object.__setattr__(self, "loss", torch.as_tensor(self.loss))  # a plain number is fine

    def __len__(self) -> int:
        """Return S, the number of groups."""
        return len(self.gbar)

    @property
    def order(self) -> int:
        """Highest order of derivative that was measured, 1, 2 or 3."""
        return 1 if self.Hbar is None else 2 if self.D3 is None else 3

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups; their numbers where there is no partition."""
        if self.partition is not None:
            return self.partition.names
        return tuple(str(s) for s in range(len(self)))

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the groups for readers, as in ``0.weight (Conv2d)``."""
        return self.names if self.partition is None else self.partition.titles

    # --- arithmetic -------------------------------------------------------------------------------

    @staticmethod
    def mean(summaries: Sequence[Summary], weights: Sequence[float] | None = None) -> Summary:
        """Average summaries of the same groups; D3 with its sign, so that batches add up.

        >>> one = Summary(torch.tensor([1.0]), torch.tensor([[2.0]]), torch.tensor([-4.0]))
        >>> other = Summary(torch.tensor([3.0]), torch.tensor([[4.0]]), torch.tensor([8.0]))
        >>> Summary.mean([one, other], weights=[100, 300]).D3
        tensor([5.])

        Args:
            summaries: At least one.
            weights: Relative weights, such as numbers of samples; equal by default.

        Returns:
            A summary of the lowest order among them, with the partition and the backend of the
            last one, approximate if any of them is.
        """
        if not summaries:
            raise ValueError("There are no summaries to average: pass at least one.")
        weights = [1.0] * len(summaries) if weights is None else list(weights)
        if len(weights) != len(summaries):
            raise ValueError(f"Got {len(summaries)} summaries but {len(weights)} weights.")
        total = float(sum(weights))
        if min(weights) < 0 or not total > 0:
            raise ValueError(f"weights={weights}: expected positive numbers.")
        for summary in summaries:
            if summary.names != summaries[0].names:
                raise ValueError(
                    f"The groups differ: {_differing(summaries[0].names, summary.names)}. Only "
                    f"summaries of the same partition can be averaged."
                )
        order = min(summary.order for summary in summaries)
        names = ("loss", "gbar", "Hbar", "D3")[: order + 1]
        shares = [weight / total for weight in weights]
        loss, gbar, *higher = (
            _mean([getattr(x, name) for x in summaries], shares) for name in names
        )
        return replace(
            summaries[-1],
            gbar=gbar,
            Hbar=higher[0] if order >= 2 else None,
            D3=higher[1] if order >= 3 else None,
            loss=loss,
            num_samples=sum(summary.num_samples for summary in summaries),
            approximate=any(summary.approximate for summary in summaries),
            gbar_stderr=None,
            Hbar_stderr=None,
            parts=(),
        )

    def with_stderr(self, parts: Sequence[Summary]) -> Summary:
        """Return this mean of batches with the standard errors of gbar and Hbar over them.

        With B batches of n_b samples, N in all, the square of the error of a mean is
        B/(B-1) sum_b (n_b/N)^2 (x_b - mean)^2. With a single batch there is no error.
        """
        count, total = len(parts), sum(part.num_samples for part in parts)

        def error(name: str) -> Tensor | None:
            mean = getattr(self, name)
            if count < 2 or mean is None:
                return None
            gaps = (part.num_samples / total * (getattr(part, name) - mean) for part in parts)
            return (count / (count - 1) * torch.stack(list(gaps)).square().sum(0)).sqrt()

        return replace(
            self, gbar_stderr=error("gbar"), Hbar_stderr=error("Hbar"), parts=tuple(parts)
        )

    def to(self, *args: Any, **kwargs: Any) -> Summary:
        """Convert dtype and device, as ``Tensor.to`` does."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        changed: dict[str, Any] = {n: x.to(*args, **kwargs) for n, x in tensors.items()}
        parts = tuple(part.to(*args, **kwargs) for part in self.parts)
        return replace(self, **changed, parts=parts)

    # --- views ------------------------------------------------------------------------------------

    def hessian(self) -> Tensor:
        """Return ``Hbar``; raise if it was not measured."""
        if self.Hbar is None:
            raise ValueError("This summary has no Hbar: measure with order=2 or order=3.")
        return self.Hbar

    def inverse(self, without_dead: bool = False) -> Tensor:
        """Return the inverse of ``Hbar``, computed in float64.

        The groups are first brought to one scale, so that no digits are lost between groups whose
        rates differ by many orders of magnitude.

        Args:
            without_dead: Leave out groups that do not affect the loss, whose rows are zero, such as
                a bias before a batch norm; their entries are nan. By default they are an error.

        Raises:
            ValueError: If ``Hbar`` has non-finite entries, or is singular.
        """
        H = self.hessian().detach().double().cpu()
        if not bool(torch.isfinite(H).all()):
            raise ValueError("Hbar has non-finite entries, so it has no inverse.")
        live = ~self.dead
        if not bool(live.all()) and not (without_dead and bool(live.any())):
            raise ValueError(
                f"Hbar has no inverse: the row of group {self.names[int((~live).nonzero()[0])]!r} "
                f"is zero. Does the loss depend on this group, and does the direction move it?"
            )
        H = H[live][:, live]
        scale = _equilibrate(H)
        scaled = H / scale[:, None] / scale[None, :]
        _, singular_values, rows = torch.linalg.svd(scaled)
        if singular_values[-1] <= len(H) * torch.finfo(torch.float64).eps * singular_values[0]:
            shares = rows[-1].abs()  # of the groups in the direction that Hbar maps to zero
            live_names = [self.names[s] for s in live.nonzero().flatten().tolist()]
            alike = [n for n, share in zip(live_names, shares) if share > 0.1 * shares.max()]
            raise ValueError(
                f"Hbar has no inverse: {first_names(alike)} can move against each other without "
                f"changing the slope of the loss (singular value {singular_values[-1]:.1e}). Merge "
                f"them, with a coarser partition."
            )
        inverse: Tensor = torch.linalg.inv(scaled) / scale[:, None] / scale[None, :]
        whole = torch.full((len(self), len(self)), float("nan"), dtype=torch.float64)
        whole[live[:, None] & live[None, :]] = ((inverse + inverse.T) / 2).reshape(-1)
        return whole.to(self.gbar)

    @property
    def dead(self) -> Tensor:
        """Which groups have no effect on the curvature: rows of zeros in ``Hbar``, (S,)."""
        return (self.hessian().detach().cpu() == 0).all(1)

    def block(self, row_role: Role, column_role: Role, matrix: Tensor | None = None) -> Block:
        """Return the entries of ``Hbar`` between groups of two roles, ``"weight"`` or ``"bias"``.

        Args:
            row_role: Role of the groups in the rows.
            column_role: Role of the groups in the columns.
            matrix: Another (S, S) matrix to take the entries from, such as the inverse.
        """
        if self.partition is None:
            raise ValueError("The summary has no partition, so its groups have no roles.")
        roles = self.partition.roles
        for given in (row_role, column_role):
            if given not in ("weight", "bias", "mixed"):
                raise ValueError(f"Unknown role {given!r}: use 'weight', 'bias' or 'mixed'.")
        rows = [s for s, role in enumerate(roles) if role == row_role]
        columns = [s for s, role in enumerate(roles) if role == column_role]
        matrix = self.hessian() if matrix is None else matrix
        if tuple(matrix.shape) != (len(self), len(self)):
            raise ValueError(
                f"The matrix has shape {tuple(matrix.shape)}, but there are {len(self)} groups."
            )
        values = matrix[rows][:, columns]
        names = self.names
        return Block(tuple(names[s] for s in rows), tuple(names[s] for s in columns), values)

    def blocks(self, matrix: Tensor | None = None) -> dict[str, Block]:
        """Return the blocks weight-weight, weight-bias and bias-bias (Section 6.1)."""
        pairs: tuple[tuple[Role, Role], ...]
        pairs = (("weight", "weight"), ("weight", "bias"), ("bias", "bias"))
        return {f"{row}-{column}": self.block(row, column, matrix) for row, column in pairs}

    def predicted_change(self, eta: Tensor, order: Literal[1, 2] = 2) -> Tensor:
        """Return the change of the loss that the step ``theta - U I_{P:S} eta`` should make.

        Delta_2(eta) of the paper's Section 4, for order 2.

        Args:
            eta: Learning rates, (S,).
            order: 1 for the slope alone, 2 with the curvature.
        """
        if order not in (1, 2):
            raise ValueError(
                f"order={order}: expected 1 or 2, since only the diagonal of the third order is "
                "measured."
            )
        if not isinstance(eta, Tensor):
            raise TypeError(
                f"eta has type {type(eta).__name__}: expected a tensor of shape ({len(self)},), "
                "such as learning_rates(summary).eta."
            )
        if tuple(eta.shape) != (len(self),):
            raise ValueError(f"eta has shape {tuple(eta.shape)}: expected ({len(self)},).")
        eta = eta.to(self.gbar)
        change = -eta @ self.gbar
        return change if order == 1 else change + 0.5 * eta @ self.hessian() @ eta

    def _html_rows(self) -> str:
        """Return the table, and a heat map of ``Hbar``."""
        maps = [] if self.Hbar is None else [html_heatmap(self.titles, self.Hbar)]
        return side_by_side([super()._html_rows(), *maps])

    def _rows(self) -> list[list[str]]:
        """Return the diagonal of every order by group."""
        columns = [["group", *self.names]]
        for title, values in (
            ("gbar", self.gbar),
            ("±", self.gbar_stderr),
            ("Hbar_ss", self.Hbar),
            ("±", self.Hbar_stderr),
            ("D3_sss", self.D3),
        ):
            if values is not None:
                values = values.diagonal() if values.ndim == 2 else values
                sign = "" if title == "±" else "+"
                numbers = values.detach().double().cpu().tolist()
                columns.append([title, *(f"{number:{sign}.3e}" for number in numbers)])
        return without_middle([list(row) for row in zip(*columns, strict=True)])

    def _title(self) -> str:
        how = f"backend {self.backend}" + (", approximate" if self.approximate else "")
        title = f"Summary of {len(self)} groups, order {self.order}, {how}"
        if self.num_samples:
            title += f", {self.num_samples:,} samples, loss {float(self.loss):.6g}"
        return title + (f"\n({self.reason})" if self.reason else "")

    # --- files ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the summary as plain values and tensors, without the model's parameters."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.partition is not None:
            state["partition"] = self.partition.state_dict()
        state["parts"] = [replace(part, partition=None).state_dict() for part in self.parts]
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Summary:
        """Rebuild a summary from :meth:`state_dict`; unknown fields are ignored."""
        known = {f.name for f in fields(cls)}
        state = {name: value for name, value in state.items() if name in known}
        if state.get("partition") is not None:
            state["partition"] = Partition.from_state_dict(state["partition"])
        parts = (cls.from_state_dict(part) for part in state.get("parts", ()))
        state["parts"] = tuple(replace(p, partition=state.get("partition")) for p in parts)
        made = cls(**state)
        # What a file may have and a measurement cannot:
        if made.loss.numel() != 1 or not made.loss.is_floating_point():
            raise ValueError("The loss is not a number.")
        kinds = {"num_samples": int, "backend": str, "reason": str | None, "approximate": bool}
        for name, kind in kinds.items():
            if not isinstance(getattr(made, name), kind):
                raise ValueError(f"{name} is {getattr(made, name)!r}.")
        if not len(made) or made.num_samples < 0:
            raise ValueError("There are no groups, or a negative number of samples.")
        return made

    def save(self, path: str | Path) -> None:
        """Write the summary to a file, which :meth:`load` reads on any machine."""
        save_tensors(path, self.to("cpu").state_dict())

    @classmethod
    def load(cls, path: str | Path) -> Summary:
        """Read a summary from a file; nothing in the file is executed."""
        return read_state(path, cls.from_state_dict, "gbar", cls.__name__)


def need_summary(summary: object, what: str) -> None:
    """Raise unless this is a summary."""
    if not isinstance(summary, Summary):
        raise TypeError(
            f"{what} needs a Summary, not {type(summary).__name__}: measure one with "
            "summarize(model, loss_fn, data), or make one with Summary(gbar=..., Hbar=..., "
            "D3=...)."
        )


def not_finite(summary: Summary) -> str:
    """Return which results are not finite, and for which group first; empty if all are finite."""
    results = {"gbar": summary.gbar, "Hbar": summary.Hbar, "D3": summary.D3}
    parts = {name: x for name, x in results.items() if x is not None}
    numbers = torch.cat([x.reshape(-1) for x in parts.values()])
    if math.isfinite(torch.linalg.vector_norm(numbers, math.inf)):  # one number to wait for
        return ""
    wrong = {name: ~torch.isfinite(x) for name, x in parts.items()}
    names = [name for name, where in wrong.items() if bool(where.any())]
    first = min(int(wrong[name].nonzero()[0, 0]) for name in names)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    verb = "is" if len(names) == 1 else "are"
    return f"{listed} {verb} not finite (first for {summary.names[first]!r})"


def read_state(
    path: str | Path, rebuild: Callable[[Mapping[str, Any]], T], key: str, kind: str
) -> T:
    """Return what a file holds; every state of this kind has ``key``."""
    try:
        with explained(Path(path)):
            state = load_tensors(content_of(Path(path)))
            if not isinstance(state, dict) or key not in state:
                raise Damaged("it is another file")
            return rebuild(state)
    except UserError as error:
        reason = str(error).rpartition(" cannot be read: ")[2].rstrip(".")
        raise ValueError(
            f"{path} is not a {kind.lower()} file ({reason}): use one written by {kind}.save."
        ) from None


def _equilibrate(H: Tensor) -> Tensor:
    """Return scales d such that the rows of the symmetric H_st / (d_s d_t) have a largest entry 1.

    Ruiz' iteration: every pass halves the logarithm of the remaining factor.
    """
    scale = torch.ones(len(H), dtype=H.dtype)
    for _ in range(100):
        largest = (H / scale[:, None] / scale[None, :]).abs().amax(1)
        if bool(((largest - 1).abs() < 1e-3).all()):
            break
        scale = scale * largest.sqrt()
    return scale


def _mean(terms: list[Tensor], shares: list[float]) -> Tensor:
    """Return a mean, added up in float32 at least: in 16 bits small terms vanish in a long sum."""
    x = torch.stack(terms)
    if not x.is_floating_point():  # a loss that was given as a whole number
        x = x.to(torch.get_default_dtype())
    wide = torch.promote_types(x.dtype, torch.float32)
    if len(set(shares)) == 1:  # numbers sent to a GPU would have to wait for it
        return x.mean(0, dtype=wide).to(x.dtype)
    weights = x.new_tensor(shares, dtype=wide).view(-1, *[1] * (x.dim() - 1))
    return (weights * x).sum(0).to(x.dtype)


def _differing(names: Sequence[str], others: Sequence[str]) -> str:
    if len(names) != len(others):
        return f"{len(names)} groups and {len(others)}"
    return next(f"{a!r} and {b!r}" for a, b in zip(names, others, strict=True) if a != b)


class SummaryWindow:
    """The mean of the last few summaries (paper, Algorithm 2: window of size upsilon).

    >>> window = SummaryWindow(2)
    >>> for slope in (1.0, 3.0, 5.0):
    ...     mean = window.push(Summary(gbar=torch.tensor([slope])))
    >>> len(window), mean.gbar
    (2, tensor([4.]))
    """

    def __init__(self, size: int):
        """Keep the last ``size`` summaries."""
        if size < 1:
            raise ValueError(f"size={size}: expected 1 or more.")
        self._summaries: deque[Summary] = deque(maxlen=size)

    def __len__(self) -> int:
        """Return the number of summaries in the window."""
        return len(self._summaries)

    @property
    def size(self) -> int:
        """The largest number of summaries."""
        return self._summaries.maxlen or 0

    def push(self, summary: Summary) -> Summary:
        """Add a summary, drop the oldest if the window is full, and return the mean."""
        self._summaries.append(summary)
        return self.mean()

    def mean(self) -> Summary:
        """Return the mean of the summaries in the window."""
        return Summary.mean(list(self._summaries))

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain values and tensors."""
        return {"size": self.size, "summaries": [s.state_dict() for s in self._summaries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by those of a saved window."""
        summaries = (Summary.from_state_dict(s) for s in state["summaries"])
        self._summaries = deque(summaries, maxlen=state["size"])
