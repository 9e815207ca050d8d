"""Normalisation layers from elementary operations.

Differentiating torch's fused LayerNorm, BatchNorm and InstanceNorm three times gives silently wrong
numbers (3 % to 30 % off on small networks, torch 2.13). Built from means and products they are
right at every order. Their first derivatives are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def standardize(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """Subtract the mean over ``dims`` and divide by the standard deviation."""
    centered = x - x.mean(dims, keepdim=True)
    return centered * ((centered * centered).mean(dims, keepdim=True) + eps).rsqrt()


def per_channel(parameter: Tensor, like: Tensor) -> Tensor:
    """Reshape a parameter of length C so that it applies to dimension 1 of ``like``."""
    return parameter.reshape((1, -1) + (1,) * (like.dim() - 2))


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift; either may be missing."""
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _channel_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    weight = None if weight is None else per_channel(weight, x)
    bias = None if bias is None else per_channel(bias, x)
    return affine(x, weight, bias)


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Elementary form of ``F.layer_norm``."""
    dims = list(range(-len(normalized_shape), 0))
    return affine(standardize(input, dims, eps), weight, bias)


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Elementary form of ``F.rms_norm``."""
    dims = list(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return affine(input * ((input * input).mean(dims, keepdim=True) + eps).rsqrt(), weight, None)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Elementary form of ``F.group_norm``."""
    grouped = input.reshape(input.shape[0], num_groups, -1)
    return _channel_affine(standardize(grouped, [-1], eps).reshape(input.shape), weight, bias)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Elementary form of ``F.instance_norm``; running statistics are left as they are."""
    if not use_input_stats:
        return _fixed_norm(input, running_mean, running_var, weight, bias, eps)
    return _channel_affine(standardize(input, list(range(2, input.dim())), eps), weight, bias)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Elementary form of ``F.batch_norm``; running statistics are left as they are."""
    if not training:
        return _fixed_norm(input, running_mean, running_var, weight, bias, eps)
    dims = [0, *range(2, input.dim())]
    return _channel_affine(standardize(input, dims, eps), weight, bias)


def _fixed_norm(
    input: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    assert mean is not None and var is not None, "evaluation uses the running statistics"
    x = (input - per_channel(mean, input)) * (per_channel(var, input) + eps).rsqrt()
    return _channel_affine(x, weight, bias)


def _torch_batch_norm(input: Tensor, weight: Any, bias: Any, *rest: Any) -> Tensor:
    """``torch.batch_norm`` takes the same arguments in another order."""
    return batch_norm(input, rest[0], rest[1], weight, bias, *rest[2:])


def _torch_instance_norm(input: Tensor, weight: Any, bias: Any, *rest: Any) -> Tensor:
    return instance_norm(input, rest[0], rest[1], weight, bias, *rest[2:])


ELEMENTARY: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.instance_norm: instance_norm,
    torch.instance_norm: _torch_instance_norm,
    F.batch_norm: batch_norm,
    torch.batch_norm: _torch_batch_norm,
}


class ElementaryNorms(TorchFunctionMode):  # type: ignore[misc]
    """While active, norm layers are computed from elementary operations."""

    def __torch_function__(  # noqa: D105
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return ELEMENTARY.get(func, func)(*args, **(kwargs or {}))
