"""The parameters of a model, divided into groups.

A partition assigns every trainable entry of the parameters to exactly one of S groups. It stands
for the paper's matrix I_{S:P} (Section 4), which is never built: a parameter that lies in one group
as a whole is labelled with that group's number, one that is divided with a tensor of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from newton_summary.display.names import first_names, nearest
from newton_summary.display.table import ShownAsTable, without_middle
from newton_summary.parallel.processes import Params, aliases_of, is_sharded, whole
from newton_summary.partition.layers import Types, layers_of, module_path, module_types, role


@dataclass(frozen=True)
class Member:
    """A parameter, or a part of one, inside a group."""

    name: str  # of the parameter
    shape: tuple[int, ...]  # of the whole parameter
    count: int  # how many of its entries are in the group

    @property
    def whole(self) -> bool:
        """Whether the group holds every entry of the parameter."""
        return self.count == int(np.prod(self.shape))


class Partition(ShownAsTable):
    """The parameters of a model, divided into S named groups.

    Made by :func:`make_partition`. ``len(partition)`` is S, ``partition.names`` are the names of
    the groups, ``print(partition)`` shows them as a table.

    Attributes:
        names: Name of each group.
        members: For each group, the parameters (or parts of parameters) in it.
        params: The live parameters by name, in the order of the model.
        labels: For each parameter, the number of its group, or a tensor of its shape that holds
            the number of the group of every entry.
        model: The model that was divided; None for a partition read from a file.

    >>> from newton_summary import make_partition
    >>> partition = make_partition(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)))
    >>> partition.names
    ('0.weight', '0.bias', '2.weight', '2.bias')
    >>> partition.titles[0], partition.roles[0], partition.sizes[0], partition.layers
    ('0.weight (Linear)', 'weight', 6, (0, 0, 1, 1))
    """

    _right = (0, 4)

    def __init__(
        self,
        names: Sequence[str],
        params: Params,
        labels: dict[str, int | Tensor],
        model: nn.Module | None = None,
        types: Types | None = None,
    ):
        """Check that every entry lies in one group and that no group is empty."""
        self.model = model
        self._types = types
        self.names: tuple[str, ...] = tuple(names)
        self.params = params
        self.labels = labels
        self.members = self._find_members()
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"Two groups are called {twice!r}: group names must be unique.")

    def _find_members(self) -> tuple[tuple[Member, ...], ...]:
        groups: list[list[Member]] = [[] for _ in self.names]
        for name, label in self.labels.items():
            shape = tuple(self.params[name].shape)
            if isinstance(label, int):
                groups[label].append(Member(name, shape, int(np.prod(shape))))
                continue
            counts = torch.bincount(label.flatten().cpu(), minlength=len(self.names))
            for s in counts.nonzero().flatten().tolist():
                groups[s].append(Member(name, shape, int(counts[s])))
        for group_name, group in zip(self.names, groups, strict=True):
            if not group:
                raise ValueError(
                    f"Group {group_name!r} is empty. Leave it out, or add a parameter."
                )
        return tuple(tuple(group) for group in groups)

    def __len__(self) -> int:
        """Return S, the number of groups."""
        return len(self.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries in each group."""
        return tuple(sum(member.count for member in group) for group in self.members)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """``"weight"``, ``"bias"`` or ``"mixed"`` for each group."""
        found = [{role(member.name) for member in group} for group in self.members]
        return tuple(roles.pop() if len(roles) == 1 else "mixed" for roles in found)

    @property
    def divided(self) -> list[str]:
        """Names of the parameters that are divided among groups."""
        return [name for name, label in self.labels.items() if not isinstance(label, int)]

    @cached_property
    def types(self) -> Types:
        """Name of the class of each module on the way to a parameter, by path; "" is the model.

        Empty for a partition read from a file that does not have them.
        """
        return self._types or ({} if self.model is None else module_types(self.model))

    @property
    def titles(self) -> tuple[str, ...]:
        """Names for readers: those of numbered modules have the module's type added."""
        return tuple(self._titled(name) for name in self.names)

    def _titled(self, name: str) -> str:
        path = module_path(name) if name in self.params else name
        kind = self.types.get(path)
        return f"{name} ({kind})" if kind and path.rpartition(".")[2].isdecimal() else name

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Number of the layer of each group, counted in the order of the groups.

        Groups that hold parameters of the same layer have the same number, such as a weight and its
        bias, or a convolution and its batch norm.
        """
        names = [{member.name for member in group} for group in self.members]
        numbers = list(range(len(self)))
        for layer in layers_of(self.params, self.types):  # joins the groups that it has a part in
            joined = {n for n, held in zip(numbers, names) if not held.isdisjoint(layer.parameters)}
            first = min(joined)
            numbers = [first if n in joined else n for n in numbers]
        order = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
        return tuple(order[number] for number in numbers)

    def index(self, name: str) -> int:
        """Return the number of the group called ``name``."""
        if name not in self.names:
            known = nearest(name, self.names) or f" Groups: {first_names(self.names)}."
            raise KeyError(f"There is no group {name!r}.{known}")
        return self.names.index(name)

    def inner(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
        """Return <a, b> restricted to each group, shape (S,): I_{S:P} Diag(a) b (paper, App. B).

        A parameter that ``a`` does not name counts as zero. Differentiable. The result has the
        widest dtype among the parameters, and float32 at least.
        """
        numbers: list[int] = []
        dots: list[Tensor] = []
        first = next(iter(self.params.values()))
        dtype = result_dtype(self.params)
        result = torch.zeros(len(self), dtype=dtype, device=first.device)
        for name in a:
            label = self.labels[name]
            value = a[name].to_dense() if a[name].is_sparse else whole(a[name])  # of an embedding
            left, right = value.to(dtype).reshape(-1), whole(b[name]).to(dtype).reshape(-1)
            if isinstance(label, int):
                numbers.append(label)
                dots.append(torch.dot(left, right).to(first.device))
            else:
                product = (left * right).to(first.device)
                result = result.index_add(0, label.flatten().to(first.device), product)
        if dots:
            where = torch.tensor(numbers, device=first.device)
            result = result.index_add(0, where, torch.stack(dots))
        return result

    def restrict(self, u: Mapping[str, Tensor], s: int) -> Params:
        """Return U^s: the parts of ``u`` in group ``s``, by name, zero where other groups are."""
        part: Params = {}
        for member in self.members[s]:
            label, value = self.labels[member.name], u[member.name]
            if isinstance(label, Tensor):
                value = value * (label.to(value.device) == s)
            part[member.name] = value
        return part

    def scale(self, u: Mapping[str, Tensor], eta: Tensor) -> Params:
        """Return U I_{P:S} eta: every entry of ``u`` times the number of its group."""
        scaled: Params = {}
        for name, label in self.labels.items():
            factor = eta[label] if isinstance(label, int) else eta[label.to(eta.device)]
            scaled[name] = u[name] * factor.to(u[name])
        return scaled

    def facts(self) -> dict[str, str]:
        """Return what has to be the same in processes that measure together, by its description."""
        found = {}
        for name, p in self.params.items():
            label = self.labels[name]
            if isinstance(label, int):
                where = repr(self.names[label])
            else:
                groups, counts = torch.unique(label, return_counts=True)
                some = dict(zip(groups.tolist()[:3], counts.tolist()[:3]))
                where = f"{some}, {len(groups)} in all"
            kind = "sharded " if is_sharded(p) else ""
            found[f"parameter {name!r}"] = f"{kind}{p.dtype} {tuple(p.shape)} in group {where}"
        return found

    def param_groups(self, **defaults: Any) -> list[dict[str, Any]]:
        """Return one named parameter group for each group, as torch optimizers take them.

        Args:
            **defaults: Options of every group, such as ``lr=0.1``.

        Raises:
            ValueError: If a parameter is divided among groups, which torch does not allow.
        """
        if any(p.is_meta for p in self.params.values()):
            raise ValueError(
                "The partition was read from a file, so its parameters have no values: make one "
                "of the live model with make_partition(model, ...)."
            )
        if self.divided:
            raise ValueError(
                f"Parameter {self.divided[0]!r} is divided among groups, but torch's parameter "
                "groups take whole parameters only. Use a partition into whole tensors, such as "
                "'canonical'."
            )
        return [
            {"params": [self.params[member.name] for member in group], "name": name, **defaults}
            for name, group in zip(self.names, self.members, strict=True)
        ]

    def to(self, device: torch.device | str | None = None) -> Partition:
        """Return the partition with its index tensors moved; the parameters stay where they are.

        Args:
            device: The new device; by default that of the parameter they divide.
        """
        labels = {
            name: label if isinstance(label, int) else label.to(device or self.params[name].device)
            for name, label in self.labels.items()
        }
        if all(labels[name] is label for name, label in self.labels.items()):
            return self
        return self.regrouped(self.names, labels)

    def regrouped(self, names: Sequence[str], labels: dict[str, int | Tensor]) -> Partition:
        """Return other groups of the same parameters."""
        return Partition(names, self.params, labels, self.model, self.types)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups as plain values and tensors, without the values of the parameters."""
        return {
            "names": list(self.names),
            "shapes": {name: list(p.shape) for name, p in self.params.items()},
            "labels": {n: x if isinstance(x, int) else x.cpu() for n, x in self.labels.items()},
            "types": dict(self.types),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Partition:
        """Rebuild a partition; its parameters are placeholders without storage."""
        names, shapes, labels = list(state["names"]), state["shapes"], dict(state["labels"])
        types = dict(state.get("types") or {})
        texts = (*names, *shapes, *types, *types.values())
        if not all(isinstance(text, str) for text in texts) or labels.keys() != shapes.keys():
            raise ValueError("Not the groups of a partition.")
        params = {n: torch.empty(s, device="meta") for n, s in shapes.items()}
        for name, label in labels.items():
            whole_numbers = torch.as_tensor(label)
            if whole_numbers.dtype != torch.int64 or (
                isinstance(label, Tensor) and label.shape != params[name].shape
            ):
                raise ValueError(f"The groups of {name!r} are not whole numbers.")
            if not ((whole_numbers >= 0) & (whole_numbers < len(names))).all():
                raise ValueError(f"The groups of {name!r} do not exist.")
        return cls(names, params, labels, types=types)

    def __repr__(self) -> str:
        """Return the number of groups and of parameters."""
        plural = "" if len(self) == 1 else "s"
        return f"Partition({len(self)} group{plural}, {sum(self.sizes):,} parameters)"

    def _title(self) -> str:
        return repr(self)

    def _rows(self) -> list[tuple[str, ...]]:
        """Return number, name, modules, role, entries and parameters of each group."""
        rows = [("", "group", "module", "role", "entries", "parameters")]
        aliases = {} if self.model is None else aliases_of(self.model)
        for s, (name, kind, size) in enumerate(
            zip(self.names, self.roles, self.sizes, strict=True)
        ):
            held = _describe(self.members[s], name, aliases)
            rows.append((str(s), name, self._module_types(s), kind, f"{size:,}", held))
        return without_middle(rows)

    def _module_types(self, s: int) -> str:
        """Return the types of the modules that own the parameters of a group."""
        if self.names[s] in self.types:  # a module, such as a block
            return self.types[self.names[s]]
        paths = (module_path(member.name) for member in self.members[s])
        found = list(dict.fromkeys(self.types.get(path, "") for path in paths))
        return ", ".join(found[:3]) + (" ..." if len(found) > 3 else "")


def result_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """Return the widest dtype of the parameters, and float32 at least."""
    dtype = torch.float32
    for p in params.values():
        dtype = torch.promote_types(dtype, p.dtype)
    return dtype


def inner_of_all(a: Iterable[Tensor], b: Iterable[Tensor]) -> Tensor:
    """Return <a, b> over all tensors as one number in float64, in few operations."""
    products = torch._foreach_mul(list(map(_plain, a)), list(map(_plain, b)))
    flat = [x.reshape(-1).to(products[0].device) for x in products]
    return torch.cat(flat).sum(dtype=torch.float64)


def _plain(x: Tensor) -> Tensor:
    """Return a tensor that is dense, and in float32 at least."""
    x = x if x.layout is torch.strided else x.to_dense()
    return x if x.itemsize >= 4 else x.float()


def _describe(members: Sequence[Member], group: str, aliases: Mapping[str, str]) -> str:
    """Return the parameters of a group: each of a few, the first and the last of many."""
    if len(members) > 2:
        return f"{len(members)} tensors: {members[0].name} ... {members[-1].name}"
    parts = []
    for member in members:
        name = "" if member.name == group else f"{member.name} "
        part = "" if member.whole else f"{member.count:,} of "
        tied = [other for other, n in aliases.items() if n == member.name and other != n]
        also = f" = {', '.join(tied)}" if tied else ""
        parts.append(f"{name}{part}{member.shape}{also}")
    return ", ".join(parts)
