"""The parameters of a model by name, whatever the model is wrapped in."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from newton_summary.parallel.processes import settle

Params = dict[str, Tensor]


def trainable(model: nn.Module) -> Params:
    """Return the parameters that require a gradient, by name; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter, of tied ones too, to the one that the partition uses."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


def result_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """Return the widest dtype of the parameters, and float32 at least."""
    dtype = torch.float32
    for p in params.values():
        dtype = torch.promote_types(dtype, p.dtype)
    return dtype


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers: of data parallelism, and of ``torch.compile``.

    An FSDP2 module is put into its sharded state: otherwise it may show other parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"The model is of type {type(model).__name__}: pass a torch.nn.Module, the model "
            f"itself, not its parameters or its class."
        )
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # loaded once somebody compiles a model
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
