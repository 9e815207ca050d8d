"""The one meaning of layer: for partitions, for distances between groups, for colours in figures.

A layer is a module that owns trainable parameters directly, so the weight and the bias of a module
stay together; of parameter lists, those at the same place. A norm belongs to the layer before it,
so that convolution and batch norm count as one, as a reader would count; to the one after it where
that is nearer in the tree of modules (a transformer's block that begins with a norm), or where
there is none before; to the one at its own place where layers and norms are two lists side by side.
An embedding is a layer, and so are the bare parameters of a module. A tied parameter belongs to the
module that comes first.

All of it follows from names and shapes of parameters and types of modules, which a file can hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor, nn

from newton_summary.parallel.processes import trainable

Types = dict[str, str]  # from the path of a module to the name of its class; "" is the model


@dataclass(frozen=True)
class Layer:
    """Parameters that stay together: those of one module, and of the norms beside it."""

    name: str  # of the module
    weights: tuple[str, ...]
    biases: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return self.weights + self.biases


def role(name: str) -> str:
    """Return ``"bias"`` or ``"weight"``, the role of a parameter.

    A parameter whose own name contains ``bias`` is a bias (``bias``, ``in_proj_bias``,
    ``bias_hh_l0``, ``biases.3`` of a list). Everything else is a weight, including the scale of a
    norm, an embedding, and a bare parameter of a module.

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


def module_path(name: str) -> str:
    """Return the path of the module that owns a parameter; parametrizations are looked through.

    >>> module_path("net.0.weight"), module_path("0.parametrizations.weight.original0")
    ('net.0', '0')
    """
    owner, parametrized, _ = f".{name}".partition(".parametrizations.")
    return owner[1:] if parametrized else name.rpartition(".")[0]


def module_types(model: nn.Module) -> Types:
    """Return the type of every module on the way to a trainable parameter, by path."""
    modules = dict(model.named_modules(remove_duplicate=False))
    types: Types = {"": _type_name(model)}
    for name in trainable(model):
        parts = module_path(name).split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            types[path] = _type_name(modules[path])
    return types


def _type_name(module: nn.Module) -> str:
    """Return the name of a module's class, that of the original where torch has derived one."""
    added = ("FSDP", "Parametrized", "NonDynamicallyQuantizable")
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith(added))


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a model in order.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1))
    >>> [layer.name for layer in find_layers(net)]
    ['0', '3']
    """
    return layers_of(trainable(model), module_types(model))


def layers_of(params: Mapping[str, Tensor], types: Types) -> list[Layer]:
    """Return the layers that parameters form, in order; without types a norm is a layer too."""
    by_owner: dict[str, list[str]] = {}
    for name in params:
        by_owner.setdefault(_owner(name, types), []).append(name)
    owners = list(by_owner)
    others = {
        i
        for i, owner in enumerate(owners)
        if not _is_norm(types.get(owner, ""), [params[name] for name in by_owner[owner]])
    }
    members: dict[int, list[str]] = {}
    for i, owner in enumerate(owners):
        layer = i if i in others or not others else _nearest(owners, i, others, types)
        members.setdefault(layer, []).extend(by_owner[owner])
    return [
        Layer(
            name=owners[i],
            weights=tuple(n for n in names if role(n) == "weight"),
            biases=tuple(n for n in names if role(n) == "bias"),
        )
        for i, names in sorted(members.items())
    ]


def _owner(name: str, types: Types) -> str:
    """Return the module that a reader would say owns a parameter; in lists, with its place."""
    path, own = module_path(name), name.rpartition(".")[2]
    listed = types[path] in ("ParameterList", "ParameterDict") if types else own.isdecimal()
    return f"{path.rpartition('.')[0]}[{own}]" if listed else path


def _is_norm(kind: str, params: Sequence[Tensor]) -> bool:
    """Return whether a module is a norm, also one that torch does not know."""
    kind = kind.lower()
    vectors = all(sum(length > 1 for length in p.shape) <= 1 for p in params)
    return "norm" in kind and (vectors or kind.endswith(("layernorm", "rmsnorm")))


def _nearest(owners: Sequence[str], norm: int, others: set[int], types: Types) -> int:
    """Return the neighbour that shares more of a norm's module path; on a tie, the one before.

    One of several norms in a list, beside a list of as many layers or one more, has another
    neighbour: the layer at its place there.
    """

    def shared(layer: int) -> int:
        pairs = zip(owners[norm].split("."), owners[layer].split("."))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def list_of(i: int) -> str:
        """Return the list that holds a module at this depth; empty if none does."""
        path = ".".join(owners[i].split(".")[: depth + 1])
        return path if types.get(path) in ("ModuleList", "ModuleDict") else ""

    def place(i: int) -> str:
        return "".join(owners[i].split(".")[depth + 1 : depth + 2])

    def length(path: str) -> int:
        return len({place(i) for i in range(len(owners)) if list_of(i) == path})

    before, after = sorted(j for j in others if j < norm), sorted(j for j in others if j > norm)
    around = [*before[-1:], *after[:1]]
    depth = max(map(shared, around))
    if (own := list_of(norm)) and (norms := length(own)) > 1:
        lists = [path for path in map(list_of, around) if path]
        fit = [path for n in (norms, norms + 1) for path in lists if length(path) == n][:1]
        around = [j for j in others if list_of(j) in fit and place(j) == place(norm)] or around
    return max(around, key=lambda j: (shared(j), j < norm, -abs(j - norm)))


def last_layer(model: nn.Module, layers: Sequence[Layer]) -> Layer:
    """Return the layer that comes last, also where it is tied to an earlier one.

    A transformer's head that shares its weight with the embedding is listed as the embedding, the
    first layer, and is still the last one.
    """
    listed = {id(p): name for name, p in trainable(model).items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    last: dict[str, str] = {}  # of the last module, every name of a parameter and the listed one
    for name, p in model.named_parameters(remove_duplicate=False):
        path = module_path(name)
        if id(p) not in listed or _is_norm(_type_name(modules[path]), [p]):
            continue
        if not last or module_path(next(iter(last))) != path:
            last = {}
        last[name] = listed[id(p)]
    if not last:  # norms alone
        return layers[-1]
    own = [name for name, first in last.items() if name == first]
    chosen = own[0] if own else next(iter(last.values()))
    return next(layer for layer in layers if chosen in layer.parameters)
