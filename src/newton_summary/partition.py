"""How the parameters of a model are grouped.

A partition assigns every trainable entry of the parameters to exactly one of S groups. It plays the
part of the matrix I_{S:P} of the paper (Section 4), which is never built: a parameter that lies in
one group as a whole is known by that group's number, one that is divided by a tensor of numbers.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from newton_summary.notebook import html_table, paragraph
from newton_summary.sharded import settle, whole

Params = dict[str, Tensor]
Spec = str | Mapping[str, Any] | Iterable[Sequence[Any]]

MAX_ROWS = 60  # of a printed table; longer ones are shortened in the middle


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


class Partition:
    """The parameters of a model, divided into S named groups.

    Made by :func:`make_partition`. ``len(partition)`` is S, ``partition.names`` are the names of
    the groups, ``print(partition)`` shows them as a table.

    Attributes:
        names: Name of each group.
        roles: ``"weight"``, ``"bias"`` or ``"mixed"`` for each group.
        members: For each group, the parameters (or parts of parameters) in it.
        params: The live parameters by name, in the order of the model.
        labels: For each parameter, the number of its group, or a tensor of its shape that holds
            the number of the group of every entry.
        model: The model that was divided; None for a partition read from a file.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Params,
        labels: dict[str, int | Tensor],
        model: nn.Module | None = None,
    ):
        """Check that every entry lies in one group and that no group is empty."""
        self.model = model
        self.names: tuple[str, ...] = tuple(names)
        self.params = params
        self.labels = labels
        self.members = self._find_members()
        self.roles: tuple[str, ...] = tuple(_common_role(group) for group in self.members)
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"Two groups are called {twice!r}. Give every group its own name.")

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
                    f"Group {group_name!r} is empty. Leave it out, or give it a parameter."
                )
        return tuple(tuple(group) for group in groups)

    def __len__(self) -> int:
        """Return S, the number of groups."""
        return len(self.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries in each group."""
        return tuple(sum(member.count for member in group) for group in self.members)

    def index(self, name: str) -> int:
        """Return the number of the group called ``name``."""
        if name not in self.names:
            raise KeyError(f"No group is called {name!r}.{_nearest(name, self.names)}")
        return self.names.index(name)

    def inner(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
        """Return <a, b> restricted to each group, shape (S,): I_{S:P} Diag(a) b.

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
        """Return U^s: the parts of ``u`` in group ``s``, by name, zero at others' entries."""
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

    def param_groups(self, **defaults: Any) -> list[dict[str, Any]]:
        """Return one named parameter group for each group, as torch optimizers take them.

        Args:
            **defaults: Options that every group starts with, such as ``lr=0.1``.

        Raises:
            ValueError: If a parameter is divided among groups, which torch does not allow.
        """
        if any(p.is_meta for p in self.params.values()):
            raise ValueError(
                "This partition was read from a file, so its parameters have no values. Make one "
                "of the live model with make_partition(model, ...)."
            )
        divided = [name for name, label in self.labels.items() if not isinstance(label, int)]
        if divided:
            raise ValueError(
                f"Parameter {divided[0]!r} is divided among groups, and a torch parameter group "
                f"takes whole parameters only. Use a partition whose groups hold whole tensors, "
                f"such as 'canonical'."
            )
        return [
            {"params": [self.params[member.name] for member in group], "name": name, **defaults}
            for name, group in zip(self.names, self.members, strict=True)
        ]

    def to(self, device: torch.device | str | None = None) -> Partition:
        """Return the partition with its index tensors moved; the parameters stay as they are.

        Args:
            device: Where to; if not given, to the device of the parameter that they divide.
        """
        labels = {
            name: label if isinstance(label, int) else label.to(device or self.params[name].device)
            for name, label in self.labels.items()
        }
        if all(labels[name] is label for name, label in self.labels.items()):
            return self
        return Partition(self.names, self.params, labels, self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return what a file needs to describe the groups: no parameter values."""
        return {
            "names": list(self.names),
            "shapes": {name: list(p.shape) for name, p in self.params.items()},
            "labels": {n: x if isinstance(x, int) else x.cpu() for n, x in self.labels.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Partition:
        """Rebuild a partition from a file; its parameters are placeholders without storage."""
        params = {n: torch.empty(s, device="meta") for n, s in state["shapes"].items()}
        return cls(state["names"], params, dict(state["labels"]))

    def __repr__(self) -> str:
        """Return the number of groups and of parameters."""
        return f"Partition({len(self)} groups, {sum(self.sizes):,} parameters)"

    def __str__(self) -> str:
        """Return a table: number, name, role, entries and parameters of each group."""
        return f"{self!r}\n{text_table(self._rows(), right=(0, 3))}"

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        return paragraph(repr(self)) + html_table(self._rows(), right=(0, 3))

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("", "group", "role", "entries", "parameters")]
        aliases = {} if self.model is None else _aliases(self.model)
        for s, (name, role, size) in enumerate(
            zip(self.names, self.roles, self.sizes, strict=True)
        ):
            rows.append(
                (str(s), name, role, f"{size:,}", _describe(self.members[s], name, aliases))
            )
        return shorten(rows)


def shorten(rows: list[Any]) -> list[Any]:
    """Return the rows of a table, header first, with the middle left out if there are many."""
    if len(rows) <= MAX_ROWS + 1:
        return rows
    gap = ["..." if cell else "" for cell in rows[0]]
    return [*rows[: MAX_ROWS // 2 + 1], gap, *rows[-MAX_ROWS // 2 + 1 :]]


def text_table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Lay out rows of text in columns; the first row is the header.

    >>> print(text_table([("group", "size"), ("a", "10")], right=[1]))
    group  size
    a        10
    """
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    to_right = set(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if c in to_right else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def result_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """Return the widest dtype of the parameters, and float32 at least."""
    dtype = torch.float32
    for p in params.values():
        dtype = torch.promote_types(dtype, p.dtype)
    return dtype


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers: of data parallelism, and of ``torch.compile``.

    One that FSDP2 looks after is put into its sharded state: else it may show other parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"The model is of type {type(model).__name__}: give a torch.nn.Module, the model "
            f"itself and not its parameters or its class."
        )
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # loaded by who has compiled a model
    compiled = compiler.OptimizedModule if compiler is not None else ()
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        if isinstance(model, parallel):
            model = model.module
        elif isinstance(model, compiled):
            model = model._orig_mod
        else:
            break
    settle(model)
    return model


# --- the ways to group ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Parameters that stay together: those of one module, and of the norms that follow it."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


def role(name: str) -> str:
    """Return ``"bias"`` or ``"weight"``, the role of a parameter.

    What is added is a bias: a parameter whose own name contains ``bias`` (``bias``,
    ``in_proj_bias``, ``bias_hh_l0``, ``biases.3`` of a list). Everything else is a weight, also the
    scale of a norm layer, an embedding, and a bare parameter of a module.

    >>> role("encoder.0.in_proj_bias"), role("norm.weight"), role("cls_token")
    ('bias', 'weight', 'weight')
    >>> role("0.parametrizations.weight.original0")
    'weight'
    """
    *_, seen_through = f".{name}".partition(".parametrizations.")
    if seen_through:
        own = seen_through.partition(".")[0]
    else:
        own = next((part for part in reversed(name.split(".")) if not part.isdecimal()), "")
    return "bias" if "bias" in own else "weight"


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a model in order.

    A layer is a module that owns trainable parameters directly, so the weight and the bias of a
    module stay together; of parameter lists, those at the same place. A norm layer belongs to the
    layer before it, so that convolution and batch norm count as one, as a reader would; to the one
    after it where that is nearer in the tree of modules (a transformer's block that begins with a
    norm), or where there is none before. An embedding is a layer, and so are the bare parameters of
    a module. A tied parameter belongs to the module that comes first.
    """
    modules = dict(model.named_modules())
    by_owner: dict[str, list[str]] = {}
    for name in trainable(model):
        by_owner.setdefault(_owner(name, modules), []).append(name)
    owners = list(by_owner)
    others = [i for i, owner in enumerate(owners) if not _is_norm(modules.get(owner))]
    layers: dict[int, list[str]] = {}
    for i, owner in enumerate(owners):
        layer = i
        if i not in others and others:
            before = max((j for j in others if j < i), default=None)
            after = min((j for j in others if j > i), default=None)
            layer = _nearer(owners, i, before, after)
        layers.setdefault(layer, []).extend(by_owner[owner])
    return [
        Layer(
            weights=tuple(n for n in names if role(n) == "weight"),
            biases=tuple(n for n in names if role(n) == "bias"),
        )
        for _, names in sorted(layers.items())
    ]


def _nearer(owners: Sequence[str], norm: int, before: int | None, after: int | None) -> int:
    """Return which neighbour shares more of the module path with a norm; in doubt the former."""

    def shared(layer: int) -> int:
        pairs = zip(owners[norm].split("."), owners[layer].split("."))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    if before is None or after is None:
        return next(layer for layer in (before, after) if layer is not None)
    return after if shared(after) > shared(before) else before


def _owner(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the module that a user would say owns a parameter.

    Parametrisations are seen through. The entries of parameter lists are told apart by their place.
    """
    owner, parametrized, _ = f".{name}".partition(".parametrizations.")
    if parametrized:
        return owner[1:]
    owner, _, own = name.rpartition(".")
    if isinstance(modules.get(owner), nn.ParameterList | nn.ParameterDict):
        return f"{owner.rpartition('.')[0]}[{own}]"
    return owner


def _is_norm(module: nn.Module | None) -> bool:
    """Return whether a module is a norm layer, also one that torch does not know."""
    if module is None or "norm" not in type(module).__name__.lower():
        return False
    shapes = (p.shape for p in module.parameters(recurse=False))
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or all(
        sum(length > 1 for length in shape) <= 1 for shape in shapes
    )


def canonical(model: nn.Module) -> dict[str, list[str]]:
    """One group for each parameter tensor."""
    return {name: [name] for name in trainable(model)}


def trivial(model: nn.Module) -> dict[str, list[str]]:
    """One group for everything."""
    return {"all": list(trainable(model))}


def weights_biases(model: nn.Module) -> dict[str, list[str]]:
    """All the weights, and all the biases."""
    names = list(trainable(model))
    groups = {
        "weights": [n for n in names if role(n) == "weight"],
        "biases": [n for n in names if role(n) == "bias"],
    }
    return {name: members for name, members in groups.items() if members}


def blocks(model: nn.Module, k: int) -> dict[str, list[str]]:
    """k consecutive blocks of the body, weights and biases apart; the last layer stands alone."""
    *body, last = find_layers(model)
    _check_count(k, len(body), f"blocks-{k}", "layers before the last one")
    chunks = [[body[i] for i in part] for part in np.array_split(range(len(body)), k)]
    return _split_by_role("block", chunks) | _alone(last)


def alternate(model: nn.Module, k: int) -> dict[str, list[str]]:
    """Layer l of the body in block l % k, weights and biases apart; the last layer stands alone."""
    *body, last = find_layers(model)
    _check_count(k, len(body), f"alternate-{k}", "layers before the last one")
    return _split_by_role("alternate", [body[i::k] for i in range(k)]) | _alone(last)


def chunks(model: nn.Module, k: int) -> dict[str, list[str]]:
    """k consecutive blocks of all the layers, weights and biases apart (VBigMLP, App. H)."""
    layers = find_layers(model)
    _check_count(k, len(layers), f"chunks-{k}", "layers")
    parts = [[layers[i] for i in part] for part in np.array_split(range(len(layers)), k)]
    return _split_by_role("chunk", parts)


def discrete(model: nn.Module) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """One group for each number: S = P, Newton's method (App. C)."""
    return {
        name + (str(list(index)).replace(" ", "") if index else ""): [(name, index)]
        for name, p in trainable(model).items()
        for index in np.ndindex(*p.shape)
    }


PARTITIONS: dict[str, Callable[..., Mapping[str, Sequence[Any]]]] = {
    "canonical": canonical,
    "trivial": trivial,
    "weights-biases": weights_biases,
    "blocks-k": blocks,
    "alternate-k": alternate,
    "chunks-k": chunks,
    "discrete": discrete,
}


def make_partition(model: nn.Module, spec: Spec = "canonical") -> Partition:
    r"""Divide the trainable parameters of a model into groups.

    Args:
        model: Any module; wrappers of data parallelism and of torch.compile are looked through.
        spec: One of

            - ``"canonical"`` (one group per tensor), ``"trivial"`` (one group),
              ``"weights-biases"`` (two groups), ``"discrete"`` (one group per number);
            - with any number, ``"chunks-5"`` (five runs of consecutive layers), ``"blocks-4"`` (the
              same, with the last layer apart), ``"alternate-4"`` (every fourth layer together, with
              the last layer apart); in each of these, weights and biases are groups of their own. A
              norm counts with the layer beside it;
            - a mapping from the name of a group to a regular expression that is searched in the
              parameters' names, to ``...`` for all that no other group takes, or to a list as
              below;
            - a list of lists of parameter names. In place of a name, a pair ``(name, index)`` takes
              a part of a parameter: ``index`` is what one would write between brackets.

    Returns:
        The partition. Frozen parameters are not in it.

    Raises:
        ValueError: If a parameter is in two groups or in none, a group is empty, a name is not
            known, a pattern matches nothing, or there are fewer layers than blocks.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> print(make_partition(net, {"first": r"^0\.", "rest": ...}))
    Partition(2 groups, 23 parameters)
       group  role   entries  parameters
    0  first  mixed       15  0.weight (3, 4), 0.bias (3,)
    1  rest   mixed        8  2.weight (2, 3), 2.bias (2,)
    """
    model = unwrap(model)
    params = trainable(model)
    if not params:
        raise ValueError(
            "The model has no parameter that requires a gradient. "
            "Call model.requires_grad_(True), or on the parameters to be measured."
        )
    for name, p in params.items():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet: it is of a lazy module. Call the model once "
                f"on some data before it is divided."
            )
    if isinstance(spec, str):
        groups = _named_spec(spec)(model)
    elif isinstance(spec, Mapping):
        groups = _match_patterns(spec, model)
    elif isinstance(spec, Iterable):
        groups = _name_lists(spec)
    else:
        raise TypeError(
            f"A partition is made from the name of one, a mapping, or a list of lists, and not "
            f"from {spec!r}."
        )
    return _assemble(groups, model)


def trainable(model: nn.Module) -> Params:
    """Return the parameters that require a gradient, by name; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter, of tied ones too, to the one that the partition uses."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


def _named_spec(spec: str) -> Callable[[nn.Module], Mapping[str, Sequence[Any]]]:
    if spec in PARTITIONS and not spec.endswith("-k"):
        return PARTITIONS[spec]
    kind, _, number = spec.rpartition("-")
    if f"{kind}-k" in PARTITIONS and number.isdecimal():
        make = PARTITIONS[f"{kind}-k"]
        return lambda model: make(model, int(number))
    if f"{spec}-k" in PARTITIONS or spec in PARTITIONS:
        kind = spec.removesuffix("-k")
        raise ValueError(f"{spec!r} needs a number of blocks: write for example '{kind}-4'.")
    raise ValueError(
        f"Unknown partition {spec!r}.{_nearest(spec, PARTITIONS)} "
        f"Write one of {', '.join(PARTITIONS)} (with a number for k), a mapping, or a list of "
        f"lists."
    )


def _match_patterns(spec: Mapping[str, Any], model: nn.Module) -> dict[str, list[Any]]:
    """Turn patterns into lists of names; ``...`` takes what the others leave."""
    names = list(trainable(model))
    groups: dict[str, list[Any]] = {}
    for group, rule in spec.items():
        if not isinstance(group, str):
            raise TypeError(f"The name of a group is a string, and not {group!r}.")
        if isinstance(rule, EllipsisType):
            groups[group] = []
        elif isinstance(rule, str | re.Pattern):
            groups[group] = _search(rule, names, group, model)
        elif isinstance(rule, list | tuple):
            groups[group] = list(rule)
        else:
            raise TypeError(
                f"Group {group!r} is {rule!r}: write a regular expression, a list of names, or ..."
            )
    rests = [group for group, rule in spec.items() if isinstance(rule, EllipsisType)]
    if len(rests) > 1:
        raise ValueError(f"Both {rests[0]!r} and {rests[1]!r} are `...`: one group takes the rest.")
    if rests:
        aliases = _aliases(model)
        taken = {
            aliases.get(_name_and_index(member, group)[0])
            for group, members in groups.items()
            for member in members
        }
        groups[rests[0]] = [name for name in names if name not in taken]
        if not groups[rests[0]]:
            raise ValueError(
                f"Group {rests[0]!r} takes the rest, and nothing is left for it: leave it out."
            )
    return groups


def _search(
    pattern: str | re.Pattern[str], names: list[str], group: str, model: nn.Module
) -> list[str]:
    """Return the names that a pattern is found in."""
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ValueError(
            f"Group {group!r}: {pattern!r} is no regular expression: {error}."
        ) from None
    if found:
        return found
    text = pattern if isinstance(pattern, str) else pattern.pattern
    message = f"Group {group!r}: the pattern {text!r} matches no trainable parameter."
    for other, first in _aliases(model).items():
        if re.search(pattern, other):
            if first not in names:
                raise ValueError(f"{message} It matches {other!r}, which is frozen.")
            raise ValueError(
                f"{message} It matches {other!r}, which is tied to {first!r}: match that name."
            )
    raise ValueError(f"{message} Their names are {_shortened(names)}.")


def _name_lists(spec: Iterable[Any]) -> dict[str, list[Any]]:
    """Name the groups of a list of lists: by their parameter if there is one, by number if more."""
    groups: dict[str, list[Any]] = {}
    for s, members in enumerate(spec):
        if not isinstance(members, list | tuple):
            raise TypeError(
                f"Group {s} is {members!r}: a list of groups holds lists of parameter names."
            )
        alone = len(members) == 1 and isinstance(members[0], str)
        name = members[0] if alone else f"group{s}"
        if name in groups:
            raise ValueError(f"Parameter {name!r} forms two groups of its own. Name it once.")
        groups[name] = list(members)
    return groups


def _name_and_index(member: Any, group: str) -> tuple[str, Any]:
    """Return the parameter's name and the index into it, None for the whole parameter."""
    if isinstance(member, str):
        return member, None
    if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str):
        return member
    held = "a tensor" if isinstance(member, Tensor) else repr(member)
    raise TypeError(
        f"Group {group!r} holds {held}: write the name of a parameter, or a pair (name, index) "
        f"for a part of one."
    )


def _assemble(groups: Mapping[str, Sequence[Any]], model: nn.Module) -> Partition:
    """Turn lists of members into labels, and find what lies in two groups or in none."""
    params, aliases = trainable(model), _aliases(model)
    names = list(groups)
    labels: dict[str, int | Tensor] = {}
    for s, (group, members) in enumerate(groups.items()):
        for member in members:
            written, index = _name_and_index(member, group)
            name = aliases.get(written, written)
            if name not in params:
                raise ValueError(_unknown_name(written, group, params, aliases))
            label = labels.get(name)
            if index is None and label is None:
                labels[name] = s
                continue
            if isinstance(label, int):
                raise ValueError(_in_two_groups(name, names[label], group, aliases))
            if label is None:
                label = torch.full(params[name].shape, -1, dtype=torch.long)
            chosen = _index_mask(label, index, written, group)
            taken = label[chosen & (label >= 0)]
            if len(taken):
                raise ValueError(_in_two_groups(name, names[int(taken[0])], group, aliases))
            label[chosen] = s
            labels[name] = label
    for name, p in params.items():
        label = labels.get(name)
        if label is None:
            raise ValueError(
                f"Parameter {name!r} is in no group. Add it to one, freeze it with "
                f"requires_grad_(False), or let a group take the rest: {{'rest': ...}}."
            )
        if isinstance(label, Tensor):
            if bool((label < 0).any()):
                where = tuple((label < 0).nonzero()[0].tolist())
                raise ValueError(f"Entry {where} of parameter {name!r} is in no group. Add it.")
            whole = bool((label == label.flatten()[0]).all())
            labels[name] = int(label.flatten()[0]) if whole else label.to(p.device)
    return Partition(names, params, {name: labels[name] for name in params}, model)


def _index_mask(label: Tensor, index: Any, name: str, group: str) -> Tensor:
    mask = torch.zeros_like(label, dtype=torch.bool)
    if isinstance(index, Tensor):
        index = index.cpu()
    try:
        mask[... if index is None else index] = True
    except (IndexError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"Group {group!r}: {index!r} is no index of parameter {name!r} "
            f"of shape {tuple(label.shape)}: {error}"
        ) from None
    if not bool(mask.any()):
        raise ValueError(
            f"Group {group!r}: {index!r} takes no entry of parameter {name!r} "
            f"of shape {tuple(label.shape)}. Leave it out."
        )
    return mask


def _unknown_name(
    name: str, group: str, params: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> str:
    if name in aliases:
        return (
            f"Group {group!r} names {name!r}, which is frozen. Leave it out, or call "
            f"requires_grad_(True) on it."
        )
    return f"Group {group!r}: no parameter is called {name!r}.{_nearest(name, params)}"


def _in_two_groups(name: str, first: str, second: str, aliases: Mapping[str, str]) -> str:
    others = [other for other, same in aliases.items() if same == name and other != name]
    tied = f" (which is also {', '.join(map(repr, others))})" if others else ""
    if first == second:
        return f"Parameter {name!r}{tied} is twice in group {first!r}. Name it once."
    return (
        f"Parameter {name!r}{tied} is in two groups, {first!r} and {second!r}. "
        f"Make their patterns or lists exclude each other."
    )


def _check_count(k: int, available: int, spec: str, what: str) -> None:
    if not 1 <= k <= available:
        raise ValueError(
            f"{spec!r} needs {k} {what}, and the model has {available}. "
            f"Write a number from 1 to {available}."
            if available
            else f"{spec!r}: the model has only one layer. Use 'canonical'."
        )


def _split_by_role(prefix: str, parts: Sequence[Sequence[Layer]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for i, layers in enumerate(parts):
        groups[f"{prefix}{i}.weights"] = [name for layer in layers for name in layer.weights]
        groups[f"{prefix}{i}.biases"] = [name for layer in layers for name in layer.biases]
    return {name: members for name, members in groups.items() if members}


def _alone(layer: Layer) -> dict[str, list[str]]:
    return {name: [name] for name in (*layer.weights, *layer.biases)}


def _common_role(members: Sequence[Member]) -> str:
    roles = {role(member.name) for member in members}
    return roles.pop() if len(roles) == 1 else "mixed"


def _describe(members: Sequence[Member], group: str, aliases: Mapping[str, str]) -> str:
    """Tell the parameters of a group: each of a few, the first and the last of many."""
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


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _shortened(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
