"""The Gram matrix keeps the distances of honest clients, whatever the others send."""

import pytest
import torch

from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import Cohort
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


HONEST = 5
OUTLIERS = 4
SIZES = (3, 50, 9001)


def cohort(size, dtype, offset, far, hidden):
    """Four clients of size ``far`` (``hidden``: not where one looks first), then five around ``offset``."""
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
    found, direct = gram_of(clients_of(rows), None).squared_distances(), rows.double()
    expected = (direct[:, None] - direct).square().sum(2)
    honest = slice(OUTLIERS, None)
    torch.testing.assert_close(found[honest, honest], expected[honest, honest], rtol=1e-9, atol=0)
    torch.testing.assert_close(found[honest, :OUTLIERS], expected[honest, :OUTLIERS], rtol=1e-9, atol=0)


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
