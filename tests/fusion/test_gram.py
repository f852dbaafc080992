"""The Gram matrix keeps the distances of honest clients, whatever the others send."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import Cohort
from lightning_fedbayes.fusion.gram import combine, squared_distances_to
from lightning_fedbayes.fusion.gram import gram_of as gram_of_cohort

from .strategies import posterior


def clients_of(rows):
    """Point masses of two parameters from the rows of a matrix."""
    return [GaussianPosterior.point_mass({"a": row[:2].clone(), "b": row[2:].clone()}) for row in rows]


def gram_of(clients, previous, numbers=None):
    """The Gram matrix of clients of equal weight."""
    count = len(clients)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    return gram_of_cohort(Cohort(clients, weights, previous, numbers or tuple(range(count))))


def direct_distances(rows):
    """Squared distances of the float64 rows, by subtraction."""
    rows = rows.double()
    return (rows[:, None] - rows).square().sum(2)


HONEST = 5
OUTLIERS = 4
SIZES = (3, 50, 9001)


def cohort(size, dtype, offset, far, hidden):
    """Four clients that send values of size ``far``, then five around ``offset``.

    Args:
        hidden: the four are like an honest client in the coordinates that are looked at first.
    """
    random = torch.Generator().manual_seed(size)
    rows = (offset + torch.randn(OUTLIERS + HONEST, size, generator=random, dtype=torch.float64)).to(dtype)
    bad = far * torch.randn(OUTLIERS, size, generator=random, dtype=torch.float64)
    if hidden:
        bad[:, :: max(1, -(-size // 4096))] = rows[OUTLIERS, :: max(1, -(-size // 4096))].double()
    rows[:OUTLIERS] = bad.to(dtype)
    return rows


@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "hidden"])
@pytest.mark.parametrize("far", [1.0, 1e8, 1e30])
@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_distances_are_those_of_the_differences(size, dtype, offset, far, hidden):
    rows = cohort(size, dtype, offset, far, hidden)
    found, expected = gram_of(clients_of(rows), None).squared_distances(), direct_distances(rows)
    honest = slice(OUTLIERS, None)
    torch.testing.assert_close(found[honest, honest], expected[honest, honest], rtol=1e-9, atol=0)
    torch.testing.assert_close(found[honest, :OUTLIERS], expected[honest, :OUTLIERS], rtol=1e-9, atol=0)


@given(clients=st.integers(1, 6), size=st.integers(0, 9), seed=st.integers(0, 2**32 - 1), with_previous=st.booleans())
@settings(deadline=None, max_examples=60)
def test_products_differ_from_those_of_the_rows_by_the_centre_alone(clients, size, seed, with_previous):
    random = np.random.default_rng(seed)
    rows = torch.tensor(random.normal(0, 3, (clients + 1, size)))
    if not with_previous:
        rows[-1] = 0
    previous = clients_of(rows[-1:])[0] if with_previous else None
    gram = gram_of(clients_of(rows[:-1]), previous)
    assert gram.size == size
    assert torch.equal(gram.products, gram.products.T)
    seen = [c for c in range(clients) if not gram.products[c].any()]  # the centre sees itself at 0
    assert any(torch.allclose(gram.products, (rows - rows[c]) @ (rows - rows[c]).T, atol=1e-9) for c in seen)
    distances = gram.squared_distances()
    assert not distances.diagonal().any()
    assert bool((distances >= 0).all())


@given(clients=st.integers(1, 5), size=st.integers(0, 7), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_distances_to_a_combination_are_those_to_the_combined_parameters(clients, size, seed):
    random = np.random.default_rng(seed)
    rows = torch.tensor(random.normal(0, 3, (clients + 1, size)))
    posteriors, (previous,) = clients_of(rows[:-1]), clients_of(rows[-1:])
    coefficients = torch.tensor(random.normal(0, 1, clients))
    point = combine(posteriors, coefficients, previous)
    affine = torch.cat([coefficients, 1 - coefficients.sum()[None]])
    torch.testing.assert_close(point, affine @ rows)
    found = squared_distances_to(gram_of(posteriors, previous).products, affine)
    torch.testing.assert_close(found, (rows - point).square().sum(1))


def test_origin_is_zero_without_a_previous_posterior():
    clients = [posterior([3.0, 4.0], 0.0), posterior([6.0, 8.0], 0.0)]
    half = torch.tensor([0.5, 0.0], dtype=torch.float64)
    assert combine(clients, half, None).tolist() == [1.5, 2.0]
    assert combine(clients, half, posterior([1.0, 0.0], 0.0)).tolist() == [2.0, 2.0]
    assert combine(clients, torch.zeros(2, dtype=torch.float64), None).tolist() == [0.0, 0.0]
    affine = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    assert squared_distances_to(gram_of(clients, None).products, affine).tolist() == [6.25, 56.25, 6.25]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_squares_beyond_double_precision_name_the_client(bad):
    clients = [posterior([float(k), 0.0], 0.0) for k in range(4)]
    clients[bad] = posterior([1e200, 0.0], 0.0)
    numbers = (7, 3, 12, 5)
    words = rf"client {numbers[bad]}: its squared distance to client \d+ is beyond double precision; leave out"
    with pytest.raises(FusionError, match=words):
        gram_of(clients, None, numbers)


def test_products_do_not_depend_on_the_blocks(monkeypatch):
    clients = clients_of(torch.randn(4, 100, dtype=torch.float64))
    whole = gram_of(clients, None).products
    monkeypatch.setattr("lightning_fedbayes.fusion.gram.ENTRIES", 35)
    torch.testing.assert_close(gram_of(clients, None).products, whole)
