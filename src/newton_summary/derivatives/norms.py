"""Normalisation from elementary operations.

Differentiating torch's fused LayerNorm, BatchNorm and InstanceNorm three times silently gives wrong
numbers (3 % to 30 % off on small networks, torch 2.13), and so does differentiating the fused
weight norm twice. Built from means and products they are correct at every order. Their first
derivatives are the same either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import handle_torch_function, has_torch_function_unary

Maybe = Tensor | None  # an argument that may be missing


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that torch normalises in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def standardize(x: Tensor, dims: list[int], eps: float, centred: bool = True) -> Tensor:
    """Subtract the mean over ``dims``, unless not centred, and divide by the root mean square.

    A single operation to a recorder of torch functions: the sweep has a rule for it.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(standardize, (x,), x, dims, eps, centred)
    centered = x - x.mean(dims, keepdim=True) if centred else x
    return centered * ((centered * centered).mean(dims, keepdim=True) + eps).rsqrt()


def per_channel(parameter: Tensor, like: Tensor) -> Tensor:
    """Reshape a parameter of length C so that it applies to dimension 1 of ``like``."""
    return parameter.reshape((1, -1) + (1,) * (like.dim() - 2))


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift; either may be missing."""
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _channel_affine(x: Tensor, *scale_and_shift: Tensor | None) -> Tensor:
    return affine(x, *(None if p is None else per_channel(p, x) for p in scale_and_shift))


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Elementary form of ``torch.layer_norm``."""
    dims = list(range(-len(normalized_shape), 0))
    x = input.to(accumulation_dtype(input))
    return affine(standardize(x, dims, eps), weight, bias).to(input.dtype)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Maybe = None, eps: float | None = None
) -> Tensor:
    """Elementary form of ``torch.rms_norm``."""
    dims = list(range(-len(normalized_shape), 0))
    x = input.to(accumulation_dtype(input))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return affine(standardize(x, dims, eps, False), weight, None).to(input.dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Elementary form of ``torch.group_norm``."""
    grouped = input.to(accumulation_dtype(input)).reshape(input.shape[0], num_groups, -1)
    x = standardize(grouped, [-1], eps).reshape(input.shape)
    return _channel_affine(x, weight, bias).to(input.dtype)


def batch_norm(
    input: Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    over_samples: bool = True,
) -> Tensor:
    """Elementary form of ``torch.batch_norm``."""
    dims = [d for d in range(input.dim()) if d > 1 or (d == 0 and over_samples)]
    x = _standardized(input, dims if training else None, running_mean, running_var, momentum, eps)
    return _channel_affine(x, weight, bias).to(input.dtype)


def instance_norm(*args: Any, **named: Any) -> Tensor:
    """Elementary form of ``torch.instance_norm``: a batch norm of every sample by itself."""
    named = {"training" if key == "use_input_stats" else key: x for key, x in named.items()}
    return batch_norm(*args, **{**named, "over_samples": False})


def _standardized(
    input: Tensor, dims: list[int] | None, mean: Maybe, var: Maybe, momentum: float, eps: float
) -> Tensor:
    """Standardize over ``dims`` and move the running statistics; without dims, by the latter."""
    if dims is not None:
        _update_statistics(input, dims, mean, var, momentum)
        return standardize(input.to(accumulation_dtype(input)), dims, eps)
    assert mean is not None and var is not None, "evaluation uses the running statistics"
    return (input - per_channel(mean, input)) * (per_channel(var, input) + eps).rsqrt()


def _update_statistics(
    input: Tensor, dims: list[int], mean: Tensor | None, var: Tensor | None, momentum: float
) -> None:
    """Move the running statistics as torch does: the same forward pass may read them again."""
    if math.prod(input.shape[d] for d in dims) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    if mean is None or var is None:
        return
    with torch.no_grad():
        for running, new in zip((var, mean), torch.var_mean(input, dims), strict=True):
            new = new.reshape(-1, len(running)).mean(0)  # over the samples, if not in dims
            running.data.lerp_(new.to(running), momentum)  # counts no new version, like torch's


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Elementary form of ``torch._weight_norm``: v with the norm g over all dimensions but one."""
    dims = [d for d in range(v.dim()) if dim == -1 or d != dim]
    return v * (g * (v * v).sum(dims, keepdim=True).rsqrt())


# Those of torch.nn.functional call these.
ELEMENTARY: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.layer_norm: layer_norm,
    torch.rms_norm: rms_norm,
    torch.group_norm: group_norm,
    torch.instance_norm: instance_norm,
    torch.batch_norm: batch_norm,
    torch._weight_norm: weight_norm,
}


def elementary_form(func: Callable[..., Any]) -> Callable[..., Tensor] | None:
    """Return how to compute a torch function from elementary operations, if it is a norm.

    Also for operators, such as ``torch.ops.aten.layer_norm``.
    """
    if isinstance(func, OpOverload | OpOverloadPacket):
        packet = func if isinstance(func, OpOverloadPacket) else func.overloadpacket
        func = getattr(torch, packet.__name__, func)
    return ELEMENTARY.get(func)


# Nodes of autograd's graph that torch differentiates wrongly. They are there where a norm is called
# so that no mode sees it: as a native operator, from TorchScript or from C++.
_WRONG = frozenset(
    f"{name}0"
    for name in (
        "BatchNormBackwardBackward",
        "CudnnBatchNormBackwardBackward",
        "MiopenBatchNormBackwardBackward",
        "NativeBatchNormBackwardBackward",
        "NativeLayerNormBackwardBackward",
        "WeightNormInterfaceBackward",
    )
)


def is_wrong(node: Any) -> bool:
    """Return whether a node of a scalar's graph leads to wrong second derivatives."""
    in_training = getattr(node, "_saved_train", True)  # else a batch norm is linear
    return node.name() in _WRONG and in_training
