"""The paper's statements, each as a test that quotes it.

P. Wolinski, "Gathering and Exploiting Higher-Order Information when Training Large Structured
Models". Formulas are written in plain text. What a statement is compared with comes from a full
Hessian, or from derivatives by eta, computed in this file; a note says where the paper's own
formula has a slip.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torch.func import functional_call, jacfwd

import newton_summary as ns

# torch.func.jacfwd uses torch.jit.script inside.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

# Every model here returns its loss, so that one loss function serves all.


def loss_fn(model, batch):
    return model(*batch)


class Quadratic(nn.Module):
    """1/2 theta.H theta + b.theta, theta in vectors x0, x1, ... of the given sizes."""

    def __init__(self, H, b, theta, sizes):
        super().__init__()
        self.H, self.b = torch.as_tensor(H), torch.as_tensor(b)
        for s, part in enumerate(torch.as_tensor(theta).split(list(sizes))):
            self.register_parameter(f"x{s}", nn.Parameter(part.clone()))

    def forward(self):
        theta = torch.cat(list(self.parameters()))
        return 0.5 * theta @ self.H @ theta + self.b @ theta


class Logistic(nn.Module):
    """Softmax regression with weight decay: a strictly convex network loss."""

    def __init__(self, generator):
        super().__init__()
        self.weight = nn.Parameter(random(generator, 3, 3))
        self.bias = nn.Parameter(random(generator, 3))

    def forward(self, x, y):
        logits = x @ self.weight.T + self.bias
        decay = self.weight.square().sum() + self.bias.square().sum()
        return soft_cross_entropy(logits, y) + 0.05 * decay


class Network(nn.Module):
    """3-5-2 with tanh. Its tensors are theta = a T + beta in the parameters T."""

    def __init__(self, theta, a=None, beta=None, loss="cross-entropy"):
        super().__init__()
        self.a = dict.fromkeys(theta, 1.0) | (a or {})
        self.beta = dict.fromkeys(theta, 0.0) | (beta or {})
        self.loss = loss
        for name, value in theta.items():
            T = (value - self.beta[name]) / self.a[name]
            self.register_parameter(name, nn.Parameter(T))

    def theta(self):
        return {n: self.a[n] * T + self.beta[n] for n, T in self.named_parameters()}

    def logits(self, x):
        theta = self.theta()
        hidden = torch.tanh(x @ theta["weight1"].T + theta["bias1"])
        return hidden @ theta["weight2"].T + theta["bias2"]

    def forward(self, x, y):
        if self.loss == "cross-entropy":
            return soft_cross_entropy(self.logits(x), y)
        return (self.logits(x) - y).square().mean()


class NTKNetwork(nn.Module):
    """The same network in the NTK parameterisation, as [Jacot et al. 2018] write it."""

    def __init__(self, theta, bias_scale=0.1, loss="cross-entropy"):
        super().__init__()
        self.bias_scale, self.loss = bias_scale, loss
        for name, value in theta.items():
            T = value / bias_scale if "bias" in name else value * math.sqrt(value.shape[1])
            self.register_parameter(name, nn.Parameter(T))

    def theta(self):
        return {
            n: T * self.bias_scale if "bias" in n else T / math.sqrt(T.shape[1])
            for n, T in self.named_parameters()
        }

    def logits(self, x):
        hidden = torch.tanh(x @ self.weight1.T / math.sqrt(3) + self.bias_scale * self.bias1)
        return hidden @ self.weight2.T / math.sqrt(5) + self.bias_scale * self.bias2

    forward = Network.forward


def soft_cross_entropy(logits, y):
    return -(y * logits.log_softmax(1)).sum(1).mean()


def random(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def network_problem(seed=3, samples=60):
    """The starting point of a 3-5-2 network, and data with soft labels.

    From some seeds Method 1 amplifies rounding errors as a chaotic system does; from this one a
    trajectory is stable.
    """
    generator = seeded(seed)
    theta = {
        "weight1": random(generator, 5, 3) / math.sqrt(3),
        "bias1": random(generator, 5) / 10,
        "weight2": random(generator, 2, 5) / math.sqrt(5),
        "bias2": random(generator, 2) / 10,
    }
    x = random(generator, samples, 3)
    scores = torch.stack([x.sum(1).sin() + x[:, 0] / 2, x[:, 1] * x[:, 2]], 1)
    return theta, (x, scores.softmax(1))


def logistic_problem(seed=0, samples=40):
    generator = seeded(seed)
    model = Logistic(generator)
    batch = random(generator, samples, 3), random(generator, samples, 3).softmax(1)
    return model, batch


def convex_quadratic(seed=0, sizes=(3, 1, 4)):
    generator = seeded(seed)
    P = sum(sizes)
    A = random(generator, P, P)
    H = A @ A.T + 0.1 * torch.eye(P, dtype=torch.float64)
    return Quadratic(H, random(generator, P), random(generator, P), sizes), ()


def convex_problems():
    return {"quadratic": convex_quadratic(), "logistic regression": logistic_problem()}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy()


def named(model, vector):
    """Cut a vector of length P into tensors with the names and shapes of the parameters."""
    sizes = [p.numel() for p in model.parameters()]
    parts = torch.as_tensor(vector).split(sizes)
    return {n: part.view_as(p) for (n, p), part in zip(model.named_parameters(), parts)}


def random_direction(model, seed):
    return named(model, random(seeded(seed), sum(p.numel() for p in model.parameters())))


def dense(model, batch):
    """theta (P,), g (P,) and H (P, P), by torch.autograd.functional."""

    def loss(vector):
        return functional_call(model, named(model, vector), batch)

    theta = torch.as_tensor(flat(model.parameters()))
    g = torch.autograd.functional.jacobian(loss, theta)
    H = torch.autograd.functional.hessian(loss, theta)
    return theta.numpy(), g.numpy(), H.numpy()


def indicator(model):
    """I_{S:P} of the canonical partition, (S, P): one row for each tensor."""
    sizes = [p.numel() for p in model.parameters()]
    return np.repeat(np.eye(len(sizes)), sizes, axis=1)


def loss_along(model, batch, u):
    """phi(eta) = L(theta + U I_{P:S} eta) of the canonical partition, by functional_call."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def phi(eta):
        moved = {n: p + eta[s] * u[n] for s, (n, p) in enumerate(params.items())}
        return functional_call(model, moved, batch)

    return phi


def gradient(model, batch):
    grads = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
    return {name: grad for (name, _), grad in zip(model.named_parameters(), grads)}


def summarize(model, batch, partition="canonical", direction="gradient", order=3):
    return ns.summarize(
        model,
        loss_fn,
        batch,
        partition=partition,
        direction=direction,
        order=order,
        backend="nested",
    )


def move(model, partition, u, eta):
    """The training step theta <- theta - U I_{P:S} eta."""
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, step in partition.scale(u, eta).items():
            params[name] -= step


def step_of(model, batch, partition, lambda_int=0.0):
    """U I_{P:S} eta of one step of the method along the gradient, as a vector, and the rates."""
    partition = ns.make_partition(model, partition)
    u = gradient(model, batch)
    summary = summarize(model, batch, partition, u, order=2 if lambda_int == 0 else 3)
    rates = ns.learning_rates(summary, lambda_int)
    return flat(partition.scale(u, rates.eta).values()), rates


# --- Section 3: the tensors D^(d)(u) -------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_taylor_term_is_the_full_contraction(order):
    """Section 3, Eqn. (3): "d^d L / d theta^d [u, ..., u] = D^(d)(u)[1_S, ..., 1_S]".

    Both sides also against the d-th derivative of t -> L(theta + t u) by that one number t.
    """
    theta, batch = network_problem()
    model = Network(theta)
    u = random_direction(model, seed=order)
    D = ns.derivative_tensor(model, loss_fn, batch, order=order, direction=u)
    assert D.shape == (4,) * order
    terms = ns.taylor_terms(model, loss_fn, batch, order=order, direction=u)
    torch.testing.assert_close(D.sum(), terms[-1], rtol=1e-11, atol=1e-11)

    phi = loss_along(model, batch, u)
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = phi(t.expand(4))
    for d in range(order):
        (value,) = torch.autograd.grad(value, t, create_graph=True)
        torch.testing.assert_close(terms[d], value.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tensor_is_the_derivative_by_group(order):
    """Section 3, Eqn. (4): "(D^d(u))_{s1..sd} = d^d L / dT^s1 .. dT^sd [U^s1, ..., U^sd]".

    Here every entry, without use of symmetry, as a derivative of phi(eta). The package computes
    each entry once and copies it to the mirrored places, so this is also the test that the order
    of differentiation does not matter.
    """
    theta, batch = network_problem(samples=7)
    model = Network(theta)
    u = random_direction(model, seed=order)
    derivative = loss_along(model, batch, u)
    for _ in range(order):
        derivative = jacfwd(derivative)
    expected = derivative(torch.zeros(4, dtype=torch.float64))
    actual = ns.derivative_tensor(model, loss_fn, batch, order=order, direction=u)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    for axis in range(1, order):
        assert torch.equal(actual, actual.transpose(0, axis))


@pytest.mark.parametrize("loss", ["cross-entropy", "squared error"])
def test_summary_is_made_of_the_tensors(loss):
    """Section 4: "Hbar_t = D^(2)(u_t) and gbar_t = D^(1)(u_t)"; Section 5.1: D holds "the diagonal
    coefficients (D_1, ..., D_S) of D^(3)(u)".

    With squared error the loss is quadratic in the last layer, whose D3 is zero.
    """
    theta, batch = network_problem()
    model = Network(theta, loss=loss)
    u = random_direction(model, seed=0)
    summary = summarize(model, batch, direction=u)
    derivative, tensors = loss_along(model, batch, u), []
    for _ in range(3):
        derivative = jacfwd(derivative)
        tensors.append(derivative(torch.zeros(4, dtype=torch.float64)))
    D3 = torch.einsum("sss->s", tensors[2])
    torch.testing.assert_close(summary.gbar, tensors[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(summary.Hbar, tensors[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(summary.D3, D3, rtol=1e-11, atol=1e-12)
    assert D3[:2].abs().min() > 1e-3
    assert (D3[2:].abs().max() > 1e-3) == (loss == "cross-entropy")


@pytest.mark.parametrize("order", [2, 3])
def test_tensor_is_a_partial_contraction_of_the_full_derivative(order):
    """Section 3: D^d(u) is "a tensor of order d and size S in every dimension resulting from a
    partial contraction of the full derivative".
    """
    model, batch = logistic_problem()
    u = random_direction(model, seed=1)

    def loss(vector):
        return functional_call(model, named(model, vector), batch)

    full = loss
    for _ in range(order):
        full = jacfwd(full)
    tensor = full(torch.as_tensor(flat(model.parameters()))).numpy()
    IU = indicator(model) * flat(u.values())
    for axis in range(order):
        tensor = np.moveaxis(np.tensordot(IU, tensor, (1, axis)), 0, axis)
    actual = ns.derivative_tensor(model, loss_fn, batch, order=order, direction=u)
    np.testing.assert_allclose(actual, tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tensor_is_homogeneous_in_every_group(order):
    """Eqn. (4) is linear in each U^s: with U^s times c_s, entry (s1..sd) is c_s1 .. c_sd larger."""
    theta, batch = network_problem(samples=7)
    model = Network(theta)
    u = random_direction(model, seed=order)
    c = torch.tensor([0.5, -3.0, 2.0, 10.0], dtype=torch.float64)

    def tensor(factors):
        scaled = {name: factor * u[name] for name, factor in zip(u, factors)}
        return ns.derivative_tensor(model, loss_fn, batch, order=order, direction=scaled)

    expected = tensor(torch.ones(4))
    for axis in range(order):
        expected = expected * c.reshape([4 if a == axis else 1 for a in range(order)])
    torch.testing.assert_close(tensor(c), expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(tensor([2.0] * 4), 2**order * tensor([1.0] * 4))


def test_taylor_terms_predict_the_loss():
    """Section 3: "L(theta + u) = L(theta) + sum_{d=1}^D 1/d! d^d L / d theta^d [u, ..., u]
    + o(||u||^D)": with half the step the remainder is 2^(D+1) times smaller.
    """
    theta, batch = network_problem()
    model = Network(theta)
    u = random_direction(model, seed=0)
    terms = ns.taylor_terms(model, loss_fn, batch, order=4, direction=u)
    phi = loss_along(model, batch, u)

    def remainder(t, D):
        predicted = sum(float(terms[d - 1]) * t**d / math.factorial(d) for d in range(1, D + 1))
        return float(phi([t] * 4).detach()) - float(phi([0.0] * 4).detach()) - predicted

    for D in range(1, 5):
        ratio = remainder(0.01, D) / remainder(0.005, D)
        assert ratio == pytest.approx(2 ** (D + 1), rel=0.05), D


# --- Section 4 and App. B: the learning rates ----------------------------------------------------


def reading_of_the_taylor_expansion(model, batch, u):
    """Section 4: minimise Delta_2 = -eta.gbar + 1/2 eta.Hbar eta with the matrices written out."""
    _, g, H = dense(model, batch)
    I_SP, U = indicator(model), np.diag(u)
    eta = np.linalg.solve(I_SP @ U @ H @ U @ I_SP.T, I_SP @ U @ g)
    return U @ I_SP.T @ eta


def reading_of_multivariate_optimisation(model, batch, u):
    """App. B: minimise the second-order approximation of f(eta) = L(T - eta U) - L(T).

    The gradient of f at 0 is -gbar. (App. B says that gbar "is the gradient of f": a slip, for its
    own expansion of f has -eta.gbar.)
    """
    phi = loss_along(model, batch, named(model, u))
    zero = torch.zeros(len(list(model.parameters())), dtype=torch.float64)
    df = torch.autograd.functional.jacobian(lambda eta: phi(-eta), zero).numpy()
    d2f = torch.autograd.functional.hessian(lambda eta: phi(-eta), zero).numpy()
    # Numerically, as the paper allows: conjugate gradients, which end after S steps.
    eta, r = np.zeros_like(df), -df
    p = r
    for _ in range(len(eta)):
        t = r @ r / (p @ d2f @ p)
        eta, r_next = eta + t * p, r - t * d2f @ p
        r, p = r_next, r_next + (r_next @ r_next) / (r @ r) * p
    return u * (indicator(model).T @ eta)


def reading_of_the_subspace(model, batch, u):
    """App. B: minimise -v.g + 1/2 v.H v over v in span(u_1, ..., u_S) by Lagrange multipliers.

    The constraint is C v = 0, where the rows of C span the orthogonal complement.
    """
    _, g, H = dense(model, batch)
    C = scipy.linalg.null_space(indicator(model) * u).T
    n = len(C)
    KKT = np.block([[H, C.T], [C, np.zeros((n, n))]])
    return np.linalg.solve(KKT, np.concatenate([g, np.zeros(n)]))[: len(g)]


@pytest.mark.parametrize("along", ["gradient", "random direction"])
@pytest.mark.parametrize("problem", ["quadratic", "logistic regression", "network"])
def test_three_readings_agree(problem, along):
    """App. B: "This method can also be derived by taking the point of view of multivariate
    optimization", and "can be interpreted as an optimization of the descent direction within a
    vector subspace".
    """
    if problem == "network":  # not convex, but Hbar is positive definite at this point
        theta, batch = network_problem()
        model = Network(theta)
    else:
        model, batch = convex_problems()[problem]
    u = gradient(model, batch) if along == "gradient" else random_direction(model, seed=0)
    partition = ns.make_partition(model, "canonical")
    summary = summarize(model, batch, partition, u, order=2)
    rates = ns.learning_rates(summary, lambda_int=0.0)
    assert rates.status == "newton"
    actual = flat(partition.scale(u, rates.eta).values())
    for reading in (
        reading_of_the_taylor_expansion,
        reading_of_multivariate_optimisation,
        reading_of_the_subspace,
    ):
        expected = reading(model, batch, flat(u.values()))
        np.testing.assert_allclose(
            actual, expected, rtol=1e-8, atol=1e-9 * np.abs(expected).max(), err_msg=str(reading)
        )


def test_hbar_from_pairs_of_directions():
    """Section 5.2: Hbar "can be done efficiently by computing u^T H v for a number S x S of pairs
    of well-chosen directions".
    """
    theta, batch = network_problem()
    model = Network(theta)
    _, g, H = dense(model, batch)
    summary = summarize(model, batch)
    families = [named(model, row * g) for row in indicator(model)]  # u_1, ..., u_S
    for s, u_s in enumerate(families):
        assert float(summary.gbar[s]) == pytest.approx(flat(u_s.values()) @ g, rel=1e-12)
        for t, u_t in enumerate(families):
            pair = flat(u_s.values()) @ H @ flat(u_t.values())
            assert float(summary.Hbar[s, t]) == pytest.approx(pair, rel=1e-10, abs=1e-13)


def test_predicted_change_is_the_real_one_on_a_quadratic():
    """Section 4 minimises "the order-2 Taylor approximation of L(theta_{t+1}) - L(theta_t)",
    which is all there is of a quadratic.
    """
    for seed in range(20):
        model, batch = convex_quadratic(seed)
        partition = ns.make_partition(model, "canonical")
        u = random_direction(model, seed=100 + seed)
        summary = summarize(model, batch, partition, u)
        assert torch.equal(summary.D3, torch.zeros_like(summary.D3))
        rates = ns.learning_rates(summary, lambda_int=1.0)
        before = float(loss_fn(model, batch).detach())
        move(model, partition, u, rates.eta)
        real = float(loss_fn(model, batch).detach()) - before
        assert float(summary.predicted_change(rates.eta)) == pytest.approx(real, abs=1e-12)
        assert rates.model_change == pytest.approx(real, abs=1e-12)
        assert real == pytest.approx(-0.5 * float(rates.eta @ summary.gbar), abs=1e-12)
        assert real < 0


def test_predicted_change_is_right_to_second_order_on_a_network():
    """App. B: L(theta_{t+1}) = L - eta.gbar + 1/2 eta.Hbar eta + o(||eta||^2): with half the step
    the error is eight times smaller.
    """
    theta, batch = network_problem()

    def error(t):
        model = Network(theta)
        partition = ns.make_partition(model, "canonical")
        u = gradient(model, batch)
        summary = summarize(model, batch, partition, u)
        eta = t * ns.learning_rates(summary).eta
        move(model, partition, u, eta)
        real = float(loss_fn(model, batch).detach()) - float(summary.loss)
        return real - float(summary.predicted_change(eta))

    assert error(0.02) / error(0.01) == pytest.approx(8, rel=0.1)


# --- Section 5 and App. C: Cauchy and Newton -----------------------------------------------------


@pytest.mark.parametrize("problem", ["quadratic", "logistic regression", "network"])
def test_trivial_partition_is_cauchy_steepest_descent(problem):
    """Section 5.2: "Cauchy's steepest descent is recovered when using the trivial partition, that
    is, S = 1"; App. C: "theta - g (g.g) / (g.Hg)".
    """
    if problem == "network":
        theta, batch = network_problem()
        model = Network(theta)
    else:
        model, batch = convex_problems()[problem]
    _, g, H = dense(model, batch)
    step, rates = step_of(model, batch, "trivial")
    assert rates.status == "newton"
    assert float(rates.eta) == pytest.approx(g @ g / (g @ H @ g), rel=1e-11)
    np.testing.assert_allclose(step, g * (g @ g) / (g @ H @ g), rtol=1e-11)


@pytest.mark.parametrize("problem", ["quadratic", "logistic regression"])
def test_discrete_partition_is_newtons_method(problem):
    """Section 5.2: "Newton's method is recovered when using the discrete partition, that is,
    S = P"; App. C: "theta_{t+1} := theta_t - G_t x = theta_t - H_t^-1 g_t".
    """
    model, batch = convex_problems()[problem]
    theta, g, H = dense(model, batch)
    assert np.linalg.eigvalsh(H)[0] > 0
    step, rates = step_of(model, batch, "discrete")
    assert len(rates.eta) == len(theta)
    np.testing.assert_allclose(theta - step, theta - np.linalg.solve(H, g), rtol=1e-9, atol=1e-10)


def test_newtons_method_where_a_gradient_coordinate_is_zero():
    """App. C: "In the case where all the coordinates of the gradient g_t are nonzero". A parameter
    whose coordinate is zero does not move, and the others make Newton's step among themselves.
    """
    H = np.array([[4.0, 1, 1, 0], [1, 3, 1, 1], [1, 1, 5, 2], [0, 1, 2, 3]])
    b = np.array([2.0, 1, 2, -1])
    model = Quadratic(H, b, np.array([1.0, -1, 0, 1]), [4])
    _, g, _ = dense(model, ())
    assert np.linalg.eigvalsh(H)[0] > 0
    assert g.tolist() == [5, 0, 4, 1]
    step, rates = step_of(model, (), "discrete")
    assert rates.status == "flat"
    others = [0, 2, 3]
    expected = np.zeros(4)
    expected[others] = np.linalg.solve(H[np.ix_(others, others)], g[others])
    np.testing.assert_allclose(step, expected, rtol=1e-9, atol=1e-12)
    assert not np.allclose(step, np.linalg.solve(H, g), rtol=0.01)


# --- Section 5: Method 1 -------------------------------------------------------------------------


@pytest.mark.parametrize("lambda_int", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_method_1_is_stationary(seed, lambda_int):
    """Section 5.1: "our goal is to minimize according to eta the function T", which is "equivalent
    to finding a solution eta* = (Hbar + lambda_int/2 ||D eta*|| D^2)^-1 gbar".
    """
    theta, batch = network_problem(seed)
    summary = summarize(Network(theta), batch)
    gbar, Hbar, D = summary.gbar, summary.Hbar, summary.D3.abs() ** (1 / 3)

    def T(eta):
        return -eta @ gbar + 0.5 * eta @ Hbar @ eta + lambda_int / 6 * (D * eta).norm() ** 3

    rates = ns.learning_rates(summary, lambda_int)
    eta = rates.eta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(T(eta), eta)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-11)
    radius = (D * rates.eta).norm()
    assert rates.radius == pytest.approx(float(radius), rel=1e-12)
    M = Hbar + lambda_int / 2 * radius * D.square().diag()
    torch.testing.assert_close(rates.eta, torch.linalg.solve(M, gbar), rtol=1e-8, atol=1e-10)
    assert float(T(rates.eta)) < 0


class Cubic(Quadratic):
    """A quadratic plus a cubic in each group: its third derivatives lie within the groups."""

    def __init__(self, *args, c):
        super().__init__(*args)
        self.c = torch.as_tensor(c)

    def forward(self):
        return super().forward() + (self.c * torch.cat(list(self.parameters())) ** 3).sum() / 6


def cubic_problem(seed):
    generator = seeded(seed)
    sizes, P = (3, 1, 2), 6
    A = random(generator, P, P)
    model = Cubic(
        (A + A.T) / 2,
        random(generator, P),
        random(generator, P),
        sizes,
        c=10 * random(generator, P),
    )
    return model, ns.make_partition(model, "canonical")


def test_cubic_term_bounds_the_change_of_the_loss():
    """Section 5.1: "one has to take into account order-3 information, and regularize Hbar so that
    the resulting update remains in a region [...] where the cubic term of the Taylor approximation
    is negligible".

    Where third derivatives lie within the groups and higher ones are zero, this can be proved for
    lambda_int = 1: |sum_s D3_s eta_s^3| <= sum_s |d_s eta_s|^3 <= ||D eta||^3, so the real change
    of the loss is at most T(eta), and that is at most T(0) = 0, with Hbar indefinite or not.
    Without the cubic term the loss does rise.
    """

    def change(seed, lambda_int):
        model, partition = cubic_problem(seed)
        u = gradient(model, ())
        summary = summarize(model, (), partition, u)
        rates = ns.learning_rates(summary, lambda_int)
        T = rates.model_change + lambda_int / 6 * rates.radius**3
        move(model, partition, u, rates.eta)
        return float(loss_fn(model, ()).detach()) - float(summary.loss), T, summary

    indefinite = 0
    for seed in range(100):
        real, T, summary = change(seed, lambda_int=1.0)
        assert real <= T + 1e-10
        assert T < 0
        indefinite += bool(torch.linalg.eigvalsh(summary.Hbar)[0] < 0)
    assert 10 < indefinite < 100
    assert any(change(seed, lambda_int=0.0)[0] > 0 for seed in range(100))


def test_internal_damping_shrinks_the_region():
    """Section 5.1: lambda_int "can be used to tune the strength of the cubic regularization".

    The radius ||D eta|| falls as lambda_int grows. At a stationary point with Hbar >= -mu D^2,
    lambda_int/2 radius^3 = eta.gbar - eta.Hbar eta <= ||D^-1 gbar|| radius + mu radius^2.
    """
    for seed in range(20):
        model, partition = cubic_problem(seed)
        summary = summarize(model, (), partition)
        D = np.abs(summary.D3.numpy()) ** (1 / 3)
        mu = max(0, -np.linalg.eigvalsh(summary.Hbar.numpy() / np.outer(D, D))[0])
        slope = np.linalg.norm(summary.gbar.numpy() / D)
        strengths = [0.1, 1.0, 10.0, 100.0]
        radii = [ns.learning_rates(summary, strength).radius for strength in strengths]
        assert all(larger > smaller for larger, smaller in pairwise(radii))
        for strength, r in zip(strengths, radii):
            assert strength / 2 * r**2 <= (slope + mu * r) * (1 + 1e-10)


# --- App. E: invariance --------------------------------------------------------------------------


def method_1(summary):
    return ns.learning_rates(summary, lambda_int=1.0).eta


def damped(summary):
    """Standard regularisation, (Hbar + lambda I)^-1 gbar."""
    lam = 0.1
    return torch.linalg.solve(summary.Hbar + lam * torch.eye(len(summary)), summary.gbar)


def isotropic(summary):
    """Nesterov's cubic regularisation, which has ||eta||^3 in place of ||D eta||^3."""
    return method_1(ns.Summary(summary.gbar, summary.Hbar, torch.ones_like(summary.gbar)))


def trajectory(model, batch, partition, rates=method_1, momentum=0.0, steps=30):
    """theta_1, ..., theta_30, (steps, P), of full-batch training in the coordinates theta."""
    partition = ns.make_partition(model, partition)
    u = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    thetas = []
    for _ in range(steps):
        u = {name: momentum * u[name] + g for name, g in gradient(model, batch).items()}
        summary = summarize(model, batch, partition, direction=u)
        move(model, partition, u, rates(summary))
        thetas.append(flat(model.theta().values()))
    return np.array(thetas)


def distance(a, b):
    return np.abs(a - b).max()


# Scalings a_s, of both signs and many sizes, and offsets beta_s, the same within each group.
SCALE = {"weight1": 20.0, "bias1": -0.1, "weight2": 3.0**-0.5, "bias2": 0.007}
OFFSET = {"weight1": 0.3, "bias1": -1.0, "weight2": 0.7, "bias2": 5.0}
COMMON_SCALE = {"weight1": 3.0, "weight2": 3.0, "bias1": -0.01, "bias2": -0.01}
COMMON_OFFSET = {"weight1": 0.3, "weight2": 0.3, "bias1": 1.0, "bias2": 1.0}


@pytest.mark.parametrize("loss", ["cross-entropy", "squared error"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("partition", "a", "beta"),
    [("canonical", SCALE, OFFSET), ("weights-biases", COMMON_SCALE, COMMON_OFFSET)],
)
def test_trajectory_is_invariant(partition, a, beta, momentum, loss):
    """Section 5.2: "the trajectory of optimization of a model trained by Method 1 is invariant by
    affine reparameterization of the sub-vectors of parameters", with "nonzero scalings" and
    offsets; "It holds if u_t is the gradient or a moving average of the gradients (momentum)".

    App. E assumes d_s > 0; with squared error the last layer has D3 = 0.
    """
    theta, batch = network_problem()
    standard = trajectory(Network(theta, loss=loss), batch, partition, momentum=momentum)
    other = Network(theta, a, beta, loss=loss)
    reparametrised = trajectory(other, batch, partition, momentum=momentum)
    assert distance(standard, reparametrised) < 1e-9
    assert distance(standard[-1], standard[0]) > 0.1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_standard_and_ntk_parameterisation_train_alike(momentum):
    """Section 5.2: "one can use either the usual or the NTK parameterization, which consists of a
    layer-wise scaling of the parameters".
    """
    theta, batch = network_problem()
    standard, ntk = Network(theta), NTKNetwork(theta)
    torch.testing.assert_close(standard(*batch), ntk(*batch), rtol=1e-14, atol=0)
    assert distance(flat(standard.parameters()), flat(ntk.parameters())) > 0.5
    a = trajectory(standard, batch, "canonical", momentum=momentum)
    b = trajectory(ntk, batch, "canonical", momentum=momentum)
    assert distance(a, b) < 1e-9


@pytest.mark.parametrize("rates", [damped, isotropic])
def test_other_regularisations_break_the_invariance(rates):
    """Section 5.2: "Compared to the standard regularization Hbar + lambda I and Nesterov's cubic
    regularization, the anisotropic Nesterov regularization does not break the property of
    invariance by subset-wise scaling".

    The other two break it already in the first step. Offsets and signs alone they do not mind.
    """
    theta, batch = network_problem()
    standard = trajectory(Network(theta), batch, "canonical", rates)
    scaled = trajectory(Network(theta, SCALE, OFFSET), batch, "canonical", rates)
    ntk = trajectory(NTKNetwork(theta), batch, "canonical", rates)
    for other in (scaled, ntk):
        assert distance(standard[0], other[0]) > 1e-3
        assert distance(standard, other) > 0.05
    signs = {name: math.copysign(1, a) for name, a in SCALE.items()}
    moved = trajectory(Network(theta, signs, OFFSET), batch, "canonical", rates)
    assert distance(standard, moved) < 1e-9


def test_scaling_within_a_group_breaks_the_invariance():
    """App. E asks that "p1, p2 in I_s => alpha_p1 = alpha_p2": a condition that is needed."""
    theta, batch = network_problem()
    standard = trajectory(Network(theta), batch, "trivial")
    same = trajectory(Network(theta, dict.fromkeys(theta, 20.0), OFFSET), batch, "trivial")
    assert distance(standard, same) < 1e-9
    different = trajectory(Network(theta, SCALE, OFFSET), batch, "trivial")
    assert distance(standard, different) > 0.05


def test_rates_and_summary_change_as_the_proof_says():
    """App. E: "Hbar~ = J^2 Hbar J^2, gbar~ = J^2 gbar", "D~ = J^2 D", "eta* = J^2 eta~*"."""
    theta, batch = network_problem()
    plain = summarize(Network(theta), batch)
    other = summarize(Network(theta, SCALE, OFFSET), batch)
    J2 = torch.tensor([SCALE[name] ** 2 for name in theta], dtype=torch.float64)
    torch.testing.assert_close(other.gbar, J2 * plain.gbar, rtol=1e-11, atol=0)
    torch.testing.assert_close(other.Hbar, J2[:, None] * plain.Hbar * J2, rtol=1e-9, atol=0)
    torch.testing.assert_close(other.D3, J2**3 * plain.D3, rtol=1e-9, atol=0)
    torch.testing.assert_close(method_1(plain), J2 * method_1(other), rtol=1e-9, atol=0)


# --- App. F: the rate of convergence -------------------------------------------------------------


def spectral_matrix(generator, eigenvalues):
    """A random symmetric matrix with these eigenvalues."""
    n = len(eigenvalues)
    Q, _ = np.linalg.qr(random(generator, n, n).numpy())
    H = Q @ np.diag(eigenvalues) @ Q.T
    return (H + H.T) / 2


def convergence_rate(blocks):
    """max_s (A_s - a_s)^2 / (A_s + a_s)^2."""
    spectra = [np.linalg.eigvalsh(H) for H in blocks]
    return max((h[-1] - h[0]) ** 2 / (h[-1] + h[0]) ** 2 for h in spectra)


def positive_quadratic(blocks, theta):
    """L(theta) = 1/2 theta.H theta, H = Diag(H_1, ..., H_S), one parameter for each block."""
    H = scipy.linalg.block_diag(*blocks)
    return Quadratic(H, np.zeros(len(H)), theta, [len(block) for block in blocks])


def losses(model, partition, steps):
    """L(theta_t) for t = 0, ..., steps, in numpy, of training without cubic term."""
    H, values = model.H.numpy(), []
    for _ in range(steps + 1):
        theta = flat(model.parameters())
        values.append(0.5 * theta @ H @ theta)
        u = gradient(model, ())
        summary = summarize(model, (), partition, u, order=2)
        move(model, summary.partition, u, ns.learning_rates(summary, lambda_int=0.0).eta)
    return values


def test_theorem_1_bounds_the_rate():
    """Theorem 1 (App. F): "The method has a linear rate of convergence. For any theta_t != 0:
    L(theta_{t+1}) / L(theta_t) <= max_s (A_s - a_s)^2 / (A_s + a_s)^2".
    """
    slack = []
    for seed in range(100):
        generator = seeded(seed)
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 5, size=rng.integers(1, 5))
        blocks = [spectral_matrix(generator, 10 ** rng.uniform(-2, 2, n)) for n in sizes]
        bound = convergence_rate(blocks)
        theta = random(generator, sum(sizes)).numpy()
        values = losses(positive_quadratic(blocks, theta), "canonical", steps=3)
        for before, after in pairwise(values):
            assert after <= bound * before + 1e-13 * values[0], seed
            slack.append(after / before / bound if bound > 1e-6 else 0)
    assert max(slack) > 0.9  # the bound is not far from what happens


def test_theorem_1_is_tight():
    """Theorem 1: "this rate is optimal, since it is possible to build theta_t such that" equality
    holds: "theta_t = H^-1 (g_min + g_max)".

    The theorem is right; the last lines of its proof are not. With g = g_min + g_max, g.g is 2 and
    its square 4, so L(theta_{t+1}) - L(theta_t) is -1/2 4/(A + a), not -1/2 2/(A + a), and the
    ratio 1 - 4 A a / (A + a)^2, not 1 - 2 A a / (A + a)^2; only the former is the
    (A - a)^2 / (A + a)^2 of the line that follows. Besides, every other group has g_s = 0 at this
    point, so for S > 1 Hbar has zero rows, and Hbar^-1 gbar is to be read as: they stay.
    """
    for seed in range(20):
        generator = seeded(seed)
        rng = np.random.default_rng(seed)
        sizes = rng.integers(2, 5, size=rng.integers(1, 4))
        blocks = [spectral_matrix(generator, 10 ** rng.uniform(-1, 1, n)) for n in sizes]
        bound = convergence_rate(blocks)
        s0 = int(np.argmax([convergence_rate([block]) for block in blocks]))
        h, V = np.linalg.eigh(blocks[s0])
        a, A = h[0], h[-1]
        parts = [np.zeros(n) for n in sizes]
        parts[s0] = np.linalg.solve(blocks[s0], V[:, 0] + V[:, -1])
        values = losses(positive_quadratic(blocks, np.concatenate(parts)), "canonical", steps=3)
        assert values[1] / values[0] == pytest.approx(bound, rel=1e-9)
        assert values[1] / values[0] == pytest.approx(1 - 4 * A * a / (A + a) ** 2, rel=1e-9)
        assert values[1] / values[0] < 1 - 2 * A * a / (A + a) ** 2 - 1e-3
        # Along two eigenvectors the gradient zigzags, so the rate stays the worst for ever.
        assert values[3] / values[0] == pytest.approx(bound**3, rel=1e-7)


def test_groups_of_like_curvature_converge_faster():
    """App. F, first remark: "better convergence rates can be achieved by [...] choosing partitions
    such that, for all s, the eigenvalues (h_p)_{p in I_s} are not too spread out".

    A diagonal H is consistent with every partition of its indices. The worst start for the bad
    partition takes it 10 steps to reach what the good one reaches in 1.
    """
    h = np.array([1.0, 1.2, 100.0, 120.0])
    model = Quadratic(np.diag(h), np.zeros(4), 1 / h, [4])

    def run(groups, steps):
        model.x0.data = torch.as_tensor(1 / h)  # g = (1, 1, 1, 1)
        partition = ns.make_partition(model, [[("x0", group)] for group in groups])
        bound = convergence_rate([np.diag(h[group]) for group in groups])
        values = losses(model, partition, steps)
        assert values[-1] <= bound**steps * values[0] * (1 + 1e-9)
        return values[-1] / values[0]

    good = run([[0, 1], [2, 3]], steps=1)
    bad = run([[0, 2], [1, 3]], steps=10)
    assert good < 0.01 < 0.5 < bad
