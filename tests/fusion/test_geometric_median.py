"""The geometric median minimises the weighted sum of distances."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.fusion import GeometricMedian, get_rule
from lightning_fedbayes.fusion.robust import start


def points(rows):
    return [GaussianPosterior.point_mass({"w": row}) for row in torch.as_tensor(np.asarray(rows)).unbind(0)]


def objective(y, rows, weights):
    return float(weights @ np.linalg.norm(rows - y, axis=1))


def slow(rows, weights):
    """The minimiser over all P parameters, by descent from the best client and from the average."""
    starts = [weights @ rows, min(rows, key=lambda row: objective(row, rows, weights)) + 1e-3]

    def value_and_gradient(y):
        away = y - rows
        norms = np.sqrt((away**2).sum(1) + 1e-18)
        return weights @ norms, (weights / norms) @ away

    found = [minimize(value_and_gradient, y, jac=True, method="BFGS", options={"gtol": 1e-10}).x for y in starts]
    return min([*found, *rows], key=lambda y: objective(y, rows, weights))


@pytest.mark.parametrize(("count", "size"), [(3, 2), (5, 3), (9, 30), (20, 4), (30, 100)])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_agrees_with_slow_minimisation(count, size, equal, scale):
    random = np.random.default_rng(count * size)
    rows = random.normal(0, 1, (count, size)) * 10 ** random.uniform(-1, 1, (count, 1))
    weights = np.full(count, 1 / count) if equal else random.dirichlet(np.full(count, 2.0))
    fused = fuse("geometric_median", points(scale * rows), weights.tolist()).mean["w"].numpy() / scale
    expected = slow(rows, weights)
    np.testing.assert_allclose(fused, expected, atol=1e-5 * np.abs(rows).max())
    assert objective(fused, rows, weights) <= objective(expected, rows, weights) * (1 + 1e-6)


@given(count=st.integers(1, 9), size=st.integers(1, 6), seed=st.integers(0, 2**32 - 1), moved=st.floats(1e-3, 10))
@settings(deadline=None, max_examples=60)
def test_every_move_raises_the_objective(count, size, seed, moved):
    random = np.random.default_rng(seed)
    rows, weights = random.normal(0, 1, (count, size)), random.dirichlet(np.ones(count))
    fused = fuse("geometric_median", points(rows), weights.tolist()).mean["w"].numpy()
    least = objective(fused, rows, weights)
    for direction in [*random.normal(0, 1, (4, size)), *(rows - fused)]:
        assert objective(fused + moved * direction, rows, weights) > least - 2e-6


def test_in_one_dimension_it_is_the_weighted_median():
    rows, weights = [[1.0], [2.0], [4.0], [100.0]], [0.2, 0.1, 0.4, 0.3]
    assert fuse("geometric_median", points(rows), weights).mean["w"].item() == pytest.approx(4, abs=1e-5)


@pytest.mark.parametrize("others", [[[1e30, -1e30]], [[3.0, 4.0], [1e30, 0.0], [-7.0, 1e8]]])
def test_half_of_the_weight_on_one_point_is_the_answer(others):
    rows = [[1.0, 2.0]] * len(others) + others
    np.testing.assert_allclose(
        fuse("geometric_median", points(rows[1:] + rows[:1] * 2)).mean["w"], [1.0, 2.0], atol=1e-12
    )


@pytest.mark.parametrize("bad", [1, 4])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_updates_of_any_size_pull_as_much_as_their_direction(bad, offset):
    """The pull of a client is a unit vector, so 10³⁰ moves the median like 10⁹ in the same direction."""
    random = np.random.default_rng(bad)
    honest, directions = offset + random.normal(0, 1, (6, 8)), random.normal(0, 1, (bad, 8))
    far, farther = ([*honest, *(size * directions)] for size in (1e12, 1e30))
    once, twice = (fuse("geometric_median", points(rows)).mean["w"].numpy() for rows in (far, farther))
    np.testing.assert_allclose(once, twice, atol=1e-5)
    assert np.linalg.norm(once - honest.mean(0)) < 4 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


@pytest.mark.parametrize("smoothing", [1.0, 0.1, 1e-3, 1e-6])
def test_smoothing_costs_at_most_half_of_itself(smoothing):
    random = np.random.default_rng(1)
    rows = np.concatenate([random.normal(0, 1, (8, 3)), np.full((5, 3), 4.0)])
    weights = np.full(13, 1 / 13)
    fused = fuse(GeometricMedian(smoothing=smoothing), points(rows)).mean["w"].numpy()
    _, scale = start(torch.cdist(torch.tensor(rows), torch.tensor(rows)), torch.tensor(weights))
    excess = objective(fused, rows, weights) - objective(slow(rows, weights), rows, weights)
    assert -1e-9 < excess <= smoothing * scale / 2 + 1e-9


def test_weights_count_as_copies():
    rows = np.random.default_rng(2).normal(0, 1, (4, 3))
    copies = fuse("geometric_median", points(rows[[0, 0, 1, 2, 2, 2, 3]]))
    weighted = fuse("geometric_median", points(rows), [2.0, 1.0, 3.0, 1.0])
    torch.testing.assert_close(weighted.mean["w"], copies.mean["w"], rtol=1e-6, atol=1e-6)
    assert get_rule("rfa").uses_weights
