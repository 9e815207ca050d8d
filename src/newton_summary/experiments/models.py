"""The models of the paper's experiments (Section 6.2, App. H), and some in use today.

Weights are drawn from N(0, gain^2 / fan_in), biases are zero. The gain is 1 with tanh (MLP, LeNet)
and sqrt(2) with ELU (VGG-11', BigMLP).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TANH_GAIN, ELU_GAIN = 1.0, math.sqrt(2)


def initialize(model: nn.Module, gain: float) -> nn.Module:
    """Draw the weights of linear and convolutional layers from N(0, gain^2 / fan_in)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=gain / math.sqrt(fan_in))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class NTK(nn.Module):
    """A weight that is a parameter of unit size times gain / sqrt(fan_in), as in NTK theory."""

    def __init__(self, weight: Tensor, gain: float):
        """Take the scale from the shape of the weight."""
        super().__init__()
        self.scale = gain / math.sqrt(weight[0].numel())

    def forward(self, X: Tensor) -> Tensor:
        """Return the weight that the layer computes with."""
        return X * self.scale

    def right_inverse(self, W: Tensor) -> Tensor:
        """Return the parameter that gives a weight."""
        return W / self.scale


def to_ntk(model: nn.Module, gain: float) -> nn.Module:
    """Change a model to the NTK parameterisation; what it computes stays the same (App. E)."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.utils.parametrize.register_parametrization(
                module, "weight", NTK(module.weight, gain)
            )
    return model


def perceptron(sizes: Sequence[int], activation: Callable[[], nn.Module], gain: float) -> nn.Module:
    """A multilayer perceptron on flattened images."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return initialize(nn.Sequential(*layers[:-1]), gain)


def mlp(features: int = 784, width: int = 1024) -> nn.Module:
    """MLP of the paper: 784-1024-200-100-10 with tanh, for the 28 x 28 images of MNIST."""
    return perceptron([features, width, 200, 100, 10], nn.Tanh, TANH_GAIN)


def lenet(channels: int = 3) -> nn.Module:
    """LeNet-5 with tanh and max-pooling, for images of 32 x 32."""
    return initialize(
        nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.Tanh(),
            nn.Linear(120, 84),
            nn.Tanh(),
            nn.Linear(84, 10),
        ),
        TANH_GAIN,
    )


def vgg11(width: int = 64, channels: int = 3) -> nn.Module:
    """VGG-11': eight 3x3 convolutions with ELU, the first of ``width`` channels; a linear layer."""
    layers: list[nn.Module] = []
    for factor in (1, "M", 2, "M", 4, 4, "M", 8, 8, "M", 8, 8, "M"):
        if factor == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width * int(factor), 3, padding=1), nn.ELU()]
        channels = width * int(factor)
    return initialize(nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10)), ELU_GAIN)


def big_mlp(depth: int = 20, width: int = 1024, features: int = 3072) -> nn.Module:
    """BigMLP: 20 layers of 1024 with ELU, and a classification layer, for CIFAR-10."""
    return perceptron([features, *[width] * depth, 10], nn.ELU, ELU_GAIN)


def vbig_mlp(depth: int = 100, width: int = 1024, features: int = 3072) -> nn.Module:
    """VBigMLP of App. H: 100 layers of 1024 with ELU, and a classification layer.

    The paper counts 2L = 200 tensors, so without the classification layer; its author's code has
    101 layers, as BigMLP has 21. This follows the code.
    """
    return big_mlp(depth, width, features)


def autoencoder(features: int = 784, width: int = 256, code: int = 32) -> nn.Module:
    """A perceptron with tanh that reconstructs its input from ``code`` numbers."""
    return perceptron([features, width, code, width, features], nn.Tanh, TANH_GAIN)


class Rosenbrock(nn.Module):
    """Rosenbrock's valley (1 - x)^2 + 100 (y - x^2)^2, from its usual start (-1.2, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(-1.2))
        self.y = nn.Parameter(torch.tensor(1.0))

    def forward(self, samples: Tensor) -> Tensor:
        """Return the value once for each sample, whatever that is."""
        value = (1 - self.x) ** 2 + 100 * (self.y - self.x**2) ** 2
        return value.expand(len(samples))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut."""

    def __init__(self, fan_in: int, fan_out: int, stride: int):
        """The shortcut is a 1x1 convolution where the shape changes."""
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


def resnet18(width: int = 64, classes: int = 10, channels: int = 3) -> nn.Module:
    """ResNet-18 with batch norm, in its form for images of 32 x 32."""
    stem: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    blocks: list[nn.Module] = []
    channels = width
    for i in range(4):
        fan_out = width * 2**i
        blocks += [
            ResidualBlock(channels, fan_out, 1 if i == 0 else 2),
            ResidualBlock(fan_out, fan_out, 1),
        ]
        channels = fan_out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return initialize(nn.Sequential(*stem, *blocks, *head), ELU_GAIN)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int):
        """One linear layer for queries, keys and values together."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier positions."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return projected


class GPTBlock(nn.Module):
    """Attention and a perceptron, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int):
        """The perceptron is four times as wide."""
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """A decoder in the style of GPT-2; the output layer shares its weight with the embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int):
        """GPT-2 small is GPT(50257, 1024, 768, 12, 12), 124 million parameters."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[GPTBlock(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * depth) if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        T = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(T, device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)
