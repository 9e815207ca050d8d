"""The minimum inside a box, against a fine grid and against scipy."""

import itertools
import time

import numpy as np
import pytest

from newton_summary.measuring.box import CubicModel, box_minimum

LOW, HIGH = 0.1, 10.0


def random_model(S, seed, shift, cubic):
    """With ``shift`` below 0 the curvature has negative eigenvalues."""
    draw = np.random.default_rng(seed)
    scale = 10 ** draw.uniform(-2, 2, S)
    A = draw.normal(size=(S, S))
    H = (A @ A.T / S + shift * np.eye(S)) * scale[:, None] * scale
    return CubicModel(draw.normal(size=S) * 3 * scale, H, cubic * scale * draw.random(S), 1.0)


@pytest.mark.parametrize("shift", [0.1, -0.5, -2.0])
@pytest.mark.parametrize("cubic", [0.0, 1.0])
@pytest.mark.parametrize("S", [1, 2, 3])
def test_no_point_of_a_grid_is_lower(S, cubic, shift):
    axis = np.geomspace(LOW, HIGH, {1: 2000, 2: 200, 3: 40}[S])
    points = np.array(list(itertools.product(axis, repeat=S)))
    for seed in range(6):
        model = random_model(S, seed, shift, cubic)
        c = box_minimum(model, LOW, HIGH)
        assert ((c >= LOW) & (c <= HIGH)).all()
        values = model(points)
        assert model(c) <= values.min() + 1e-9 * np.abs(values).max()


def test_no_corner_is_lower():
    """The curvature is negative in most directions: minima are corners, and there are several.

    The best one is found from another by moving one entry at a time: twice for seed 19.
    """
    corners = np.array(list(itertools.product([LOW, HIGH], repeat=4)))
    for seed in range(30):
        draw = np.random.default_rng(seed)
        A = draw.normal(size=(4, 4))
        model = CubicModel(draw.normal(size=4), (A + A.T) / 2 - 2 * np.eye(4), np.zeros(4), 0.0)
        lowest = model(corners).min()
        assert model(box_minimum(model, LOW, HIGH)) <= lowest + 1e-9 * abs(lowest)


@pytest.mark.parametrize("cubic", [0.0, 1.0])
def test_convex_models_have_scipys_minimum(cubic):
    optimize = pytest.importorskip("scipy.optimize")
    for S, seed in ((12, 0), (12, 1), (12, 2), (12, 3), (12, 7), (8, 18)):
        model = random_model(S, seed, 0.1, cubic)
        c = box_minimum(model, LOW, HIGH)
        options = {"jac": model.slope, "method": "L-BFGS-B", "bounds": [(LOW, HIGH)] * S}
        other = optimize.minimize(model, np.ones(S), **options, options={"maxiter": 5000})
        assert model(c) <= other.fun + 1e-6 * abs(other.fun)
        slope = model.slope(c)
        free = (c > LOW) & (c < HIGH)
        size = np.abs(model.H) @ c + np.abs(model.g)
        assert (np.abs(slope[free]) <= 1e-6 * size[free]).all()
        assert (slope[c <= LOW] >= 0).all() and (slope[c >= HIGH] <= 0).all()


def test_derivatives_are_those_of_the_model():
    model, c, h = random_model(4, 0, -1.0, 1.0), np.array([0.3, 1.0, 2.0, 5.0]), 1e-6
    steps = h * np.eye(4)
    slope = [(model(c + e) - model(c - e)) / (2 * h) for e in steps]
    np.testing.assert_allclose(model.slope(c), slope, rtol=1e-5, atol=1e-4)
    bend = [(model.slope(c + e) - model.slope(c - e)) / (2 * h) for e in steps]
    np.testing.assert_allclose(model.curvature(c), bend, rtol=1e-5, atol=1e-4)


def test_ties_are_the_same_model_in_fewer_factors():
    model = random_model(3, 1, 0.1, 1.0)
    groups = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    x = np.array([0.7, 3.0])
    assert model.tied(groups)(x) == pytest.approx(float(model(groups @ x)))


def test_a_nearby_start_finds_the_same_and_time_is_short():
    model = random_model(40, 2, -0.3, 1.0)
    start = time.perf_counter()
    c = box_minimum(model, LOW, HIGH)
    assert time.perf_counter() - start < 5
    np.testing.assert_allclose(box_minimum(model, LOW, HIGH, near=c), c, rtol=1e-6)
