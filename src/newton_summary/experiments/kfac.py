"""K-FAC (Martens and Grosse, 2015; for convolutions Grosse and Martens, 2016), as a baseline.

For a layer with inputs ``a`` and output gradients ``g`` the Fisher matrix is taken to be A (x) G,
with A = E[a a^T] and G = E[g g^T]. This is exact for a deep linear network with squared error,
which is how the tests check it.

Follows the conventions of the package that the paper used: the averages of A and G start from the
identity, lambda is added to the eigenvalues of A (x) G, steps are bounded by ``kl_clip``, and
weight decay is an L2 term on top of the preconditioned gradient, from the twentieth update of the
covariances on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Layer = nn.Linear | nn.Conv2d


class KFAC(Optimizer):
    """Natural gradient with a Kronecker-factored Fisher matrix, and momentum.

    The covariances are those of the model's own distribution (labels are drawn from it, not taken
    from the data), averaged with exponential weights. Parameters outside linear and convolutional
    layers move along their gradient.

    Arguments as for :class:`newton_summary.experiments.config.KFACConfig`, and some more.

    Args:
        damping: lambda. A layer's step is (A (x) G + lambda I)^-1 times its gradient.
        kl_clip: The step is scaled by min(1, sqrt(kl_clip / (lr^2 v^T g))), where v is the
            preconditioned gradient.
        covariance_period: Steps between updates of A and G; see :attr:`covariances_due`.
        factored: Add the root of lambda to A and G instead (Martens and Grosse, Section 6.3).
            Cheaper, because no eigenvectors are needed, and with cross terms that damp more.
        likelihood: ``"categorical"`` for cross-entropy, ``"gaussian"`` for a mean squared error
            over all outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        damping: float = 1e-2,
        kl_clip: float = math.inf,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        covariance_period: int = 10,
        inverse_period: int = 100,
        decay: float = 0.95,
        *,
        factored: bool = False,
        likelihood: Literal["categorical", "gaussian"] = "categorical",
    ):
        self.model = model
        self.damping, self.decay, self.factored = damping, decay, factored
        self.kl_clip, self.weight_decay = kl_clip, weight_decay
        self.covariance_period, self.inverse_period = covariance_period, inverse_period
        self.likelihood = likelihood
        self.layers = [m for m in model.modules() if isinstance(m, Layer) and _is_plain(m)]
        options = {"lr": lr, "momentum": momentum, "steps": 0}
        super().__init__([{"params": list(model.parameters())}], options)

    @property
    def covariances_due(self) -> bool:
        """Whether :meth:`observe` is to be called before the next step."""
        return bool(self.param_groups[0]["steps"] % self.covariance_period == 0)

    def observe(self, inputs: Tensor) -> None:
        """Update A and G from a batch, with its own forward and backward pass."""
        seen: dict[Layer, tuple[Tensor, Tensor]] = {}

        def remember(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[layer] = inputs[0], output

        hooks = [layer.register_forward_hook(remember) for layer in self.layers]
        try:
            with torch.enable_grad():
                outputs = self.model(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        ends = [end for _, end in seen.values()]
        grads = torch.autograd.grad(outputs, ends, self._cotangent(outputs.detach()))
        for (layer, (a, _)), g in zip(seen.items(), grads, strict=True):
            state = self.state[layer.weight]
            covariances = {"A": input_covariance(layer, a.detach()), "G": gradient_covariance(g)}
            for name, value in covariances.items():
                if name not in state:
                    state[name] = torch.eye(len(value), dtype=value.dtype, device=value.device)
                state[name] = torch.lerp(value, state[name], self.decay)

    def _cotangent(self, outputs: Tensor) -> Tensor:
        """Draw derivatives c of samples' losses by the outputs: E[c c^T] is the Fisher matrix."""
        if self.likelihood == "gaussian":  # of the mean over all outputs of the squared error
            return math.sqrt(2 / outputs.shape[1]) * torch.randn_like(outputs)
        p = outputs.softmax(1)
        labels = (p / torch.empty_like(p).exponential_()).argmax(1)  # a draw from p
        return p - torch.eye(p.shape[1], dtype=p.dtype, device=p.device)[labels]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one step along the present gradients."""
        group = self.param_groups[0]
        if group["steps"] % self.inverse_period == 0:
            self._invert()
        update = {p: p.grad for p in group["params"] if p.grad is not None}
        natural: dict[Tensor, Tensor] = {}
        for layer in self.layers:
            if layer.weight in update and "A" in self.state[layer.weight]:
                natural |= self._precondition(layer)
        if natural and math.isfinite(self.kl_clip):
            products = torch._foreach_mul(list(natural.values()), [update[p] for p in natural])
            inner = torch.stack([product.sum() for product in products]).sum()
            scale = (math.sqrt(self.kl_clip) / (group["lr"] * inner.sqrt())).clamp(max=1)
            natural = dict(zip(natural, torch._foreach_mul(list(natural.values()), scale)))
        update |= natural
        parameters = list(update)
        changes = list(update.values())
        if self.weight_decay and group["steps"] >= 20 * self.covariance_period:
            changes = list(torch._foreach_add(changes, parameters, alpha=self.weight_decay))
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, changes)
        torch._foreach_add_(parameters, momenta, alpha=-group["lr"])
        group["steps"] += 1

    def _invert(self) -> None:
        for layer in self.layers:
            state = self.state[layer.weight]
            if "A" in state and self.factored:
                for name, M in zip("AG", damped(state["A"], state["G"], self.damping)):
                    state[f"{name}_inverse"] = torch.cholesky_inverse(torch.linalg.cholesky(M))
            elif "A" in state:
                a, state["A_vectors"] = torch.linalg.eigh(state["A"])
                g, state["G_vectors"] = torch.linalg.eigh(state["G"])
                state["values"] = torch.outer(g.clamp_min(0), a.clamp_min(0)) + self.damping

    def _precondition(self, layer: Layer) -> dict[Tensor, Tensor]:
        """Return (A (x) G + lambda I)^-1 [dW db] of a layer, by parameter."""
        weight, bias = layer.weight, layer.bias
        assert weight.grad is not None
        gradient = weight.grad.flatten(1)
        if bias is not None:
            assert bias.grad is not None
            gradient = torch.cat([gradient, bias.grad[:, None]], 1)
        state = self.state[weight]
        if self.factored:
            result = state["G_inverse"] @ gradient @ state["A_inverse"]
        else:
            A, G = state["A_vectors"], state["G_vectors"]
            result = G @ (G.T @ gradient @ A / state["values"]) @ A.T
        if bias is None:
            return {weight: result.view_as(weight)}
        return {weight: result[:, :-1].reshape(weight.shape), bias: result[:, -1]}


def damped(A: Tensor, G: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return A + pi sqrt(lambda) I and G + sqrt(lambda)/pi I; pi^2 is the ratio of their scales."""
    tiny = torch.finfo(A.dtype).tiny
    scale_A, scale_G = (M.diagonal().mean().clamp_min(tiny) for M in (A, G))
    pi = (scale_A / scale_G).sqrt()
    root = math.sqrt(damping)
    A, G = A.clone(), G.clone()
    A.diagonal().add_(pi * root)
    G.diagonal().add_(root / pi)
    return A, G


def input_covariance(layer: Layer, x: Tensor) -> Tensor:
    """Return A: the mean over samples of a a^T, summed over positions; a has a 1 for the bias."""
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a = patches.transpose(1, 2).flatten(0, 1)  # (N * positions, channels * kernel)
    else:
        a = x.flatten(0, -2)
    if layer.bias is not None:
        a = torch.cat([a, a.new_ones(len(a), 1)], 1)
    return a.T @ a / len(x)


def gradient_covariance(g: Tensor) -> Tensor:
    """Return G: the mean over samples and positions of g g^T."""
    rows = g.movedim(1, -1).flatten(0, -2) if g.ndim == 4 else g.flatten(0, -2)
    return rows.T @ rows / len(rows)


def _is_plain(layer: Layer) -> bool:
    """Whether a layer's weight is a parameter, and each output sees every channel."""
    plain = isinstance(layer._parameters.get("weight"), Tensor)
    if isinstance(layer, nn.Conv2d):
        return plain and layer.groups == 1 and not isinstance(layer.padding, str)
    return plain
