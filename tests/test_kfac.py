"""K-FAC against the Hessian of a network on which it is exact."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary.experiments.kfac import KFAC, damped


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class ExactKFAC(KFAC):
    """Takes the mean over all labels in place of a drawn one: each sample once for each label."""

    def observe(self, inputs):
        self.labels = self.model(inputs[:1]).shape[1]
        super().observe(inputs.repeat_interleave(self.labels, 0))

    def _cotangent(self, outputs):
        C = self.labels
        label = torch.eye(C).repeat(len(outputs) // C, 1)
        if self.likelihood == "gaussian":
            return 2**0.5 * label
        p = outputs.softmax(1)
        return (C * (p * label).sum(1, keepdim=True)).sqrt() * (p - label)


def linear_network():
    """Three linear layers, the second as a convolution over the whole image."""
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 5, 2),
        nn.Flatten(),
        nn.Linear(5, 3, bias=False),
    )


def block_hessian(model, layer, x, y):
    """Hessian of the mean squared error by [W b] of one layer, row by row."""
    names = {id(p): n for n, p in model.named_parameters()}
    own = [layer.weight] + ([layer.bias] if layer.bias is not None else [])
    out = len(layer.weight)
    flat = torch.cat([p.detach().reshape(out, -1) for p in own], 1)

    def loss(theta):
        theta = theta.view_as(flat)
        parts = theta.split([p.numel() // out for p in own], 1)
        params = dict(model.named_parameters())
        params |= {names[id(p)]: part.reshape(p.shape) for p, part in zip(own, parts)}
        return F.mse_loss(torch.func.functional_call(model, params, (x,)), y)

    return torch.autograd.functional.hessian(loss, flat.flatten()), own


@pytest.mark.parametrize("factored", [False, True])
def test_exact_on_a_deep_linear_network(factored):
    """Martens and Grosse: with linear layers and squared error, A (x) G is the Fisher matrix.

    The loss is quadratic in one layer, so that layer's Fisher block is its Hessian.
    """
    model, x, y = linear_network(), torch.randn(20, 4), torch.randn(20, 3)
    how = {"likelihood": "gaussian", "factored": factored}
    kfac = ExactKFAC(model, lr=1.0, momentum=0.0, damping=0.3, decay=0.0, **how)
    assert len(kfac.layers) == 3
    blocks = [block_hessian(model, layer, x, y) for layer in kfac.layers]
    kfac.observe(x)
    F.mse_loss(model(x), y).backward()
    before = {p: p.detach().clone() for p in model.parameters()}
    kfac.step()
    for layer, (H, own) in zip(kfac.layers, blocks):
        A, G = kfac.state[layer.weight]["A"], kfac.state[layer.weight]["G"]
        torch.testing.assert_close(torch.kron(G, A), H)
        out = len(layer.weight)
        gradient = torch.cat([p.grad.reshape(out, -1) for p in own], 1)
        moved = torch.cat([(before[p] - p.detach()).reshape(out, -1) for p in own], 1)
        fisher = H + 0.3 * torch.eye(len(H))
        if factored:
            A, G = damped(A, G, 0.3)
            fisher = torch.kron(G, A)
        expected = torch.linalg.solve(fisher, gradient.flatten())
        torch.testing.assert_close(moved.flatten(), expected)


def test_damping_is_that_of_the_product():
    """(A + pi r I) (x) (G + r/pi I) = A (x) G + lambda I + cross terms; lambda = r^2."""
    A, G = torch.diag(torch.tensor([1.0, 3.0])), torch.diag(torch.tensor([8.0]))
    dA, dG = damped(A, G, 0.04)
    pi = (2 / 8) ** 0.5
    torch.testing.assert_close(dA, A + pi * 0.2 * torch.eye(2))
    torch.testing.assert_close(dG, G + 0.2 / pi * torch.eye(1))


def test_one_draw_has_the_right_mean():
    """The Fisher of drawn labels tends to the exact one, and to that of the softmax."""
    model = nn.Sequential(nn.Linear(3, 4))
    x = torch.randn(5, 3)
    exact = ExactKFAC(model, decay=0.0)
    exact.observe(x)
    p = model(x).softmax(1)
    softmax = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(0)
    torch.testing.assert_close(exact.state[model[0].weight]["G"], softmax.detach())
    drawn = KFAC(model, decay=0.0)
    drawn.observe(x.repeat(4000, 1))
    torch.testing.assert_close(
        drawn.state[model[0].weight]["G"], softmax.detach(), atol=0.01, rtol=0
    )


def test_averages_start_from_the_identity():
    model = nn.Sequential(nn.Linear(3, 4))
    once, averaged = ExactKFAC(model, decay=0.0), ExactKFAC(model, decay=0.9)
    x = torch.randn(5, 3)
    for kfac in (once, averaged):
        kfac.observe(x)
    new, mean = once.state[model[0].weight]["A"], averaged.state[model[0].weight]["A"]
    torch.testing.assert_close(mean, 0.9 * torch.eye(4) + 0.1 * new)


def test_kl_clip_bounds_the_step_in_the_metric_of_the_gradient():
    """lr^2 v^T g of the clipped step is kl_clip once it would be more; a smaller one is kept."""
    model, x, y = linear_network(), torch.randn(20, 4), torch.randn(20, 3)
    gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    start = [p.detach().clone() for p in model.parameters()]

    def moved(kl_clip):
        how = {"likelihood": "gaussian", "kl_clip": kl_clip}
        kfac = ExactKFAC(model, lr=0.1, momentum=0.0, decay=0.0, **how)
        for p, before, g in zip(model.parameters(), start, gradients):
            p.data.copy_(before)
            p.grad = g.clone()
        kfac.observe(x)
        kfac.step()
        return [before - p.detach() for p, before in zip(model.parameters(), start)]

    free, bound, loose = moved(float("inf")), moved(1e-6), moved(1e6)
    squared = 0.1 * sum((v * g).sum() for v, g in zip(free, gradients))  # lr^2 v^T g
    assert squared > 1e-6
    for a, b, c in zip(free, bound, loose):
        torch.testing.assert_close(b, a * (1e-6 / squared).sqrt())
        assert torch.equal(a, c)


def test_weight_decay_begins_at_the_twentieth_covariance():
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    kfac = KFAC(model, lr=0.5, momentum=0.0, weight_decay=0.1, covariance_period=2)
    weight = model[0].weight
    for step in range(41):
        weight.grad = torch.zeros_like(weight)
        before = weight.detach().clone()
        kfac.step()
        assert torch.equal(weight.detach(), before - 0.5 * (0.1 * before if step >= 40 else 0))


def test_resumes_with_its_factors():
    def make():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        return model, ExactKFAC(model, lr=0.1, covariance_period=2, inverse_period=4)

    def steps(model, kfac, count):
        for i in range(count):
            x = torch.linspace(0, 1 + i, 15).view(5, 3)
            if kfac.covariances_due:
                kfac.observe(x)
            kfac.zero_grad()
            model(x).logsumexp(1).mean().backward()
            kfac.step()

    model, kfac = make()
    steps(model, kfac, 5)
    other, resumed = make()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(kfac.state_dict()))
    steps(model, kfac, 5)
    steps(other, resumed, 5)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)
