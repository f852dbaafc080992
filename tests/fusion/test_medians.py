"""Order statistics, coordinate by coordinate."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from lightning_fedbayes import fuse
from lightning_fedbayes.fusion import TrimmedMean

from .strategies import assert_same, posterior

COUNTS = st.integers(1, 12)
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(deadline=None, max_examples=40)


def draw(count, seed):
    """Means and variances, (count, 6) each."""
    random = np.random.default_rng(seed)
    return random.normal(0, 1, (count, 6)), 10 ** random.uniform(-3, 2, (count, 6))


def clients_of(means, variances):
    return [posterior(mean, variance) for mean, variance in zip(means, variances, strict=True)]


@given(count=COUNTS, seed=SEEDS)
@FEW
def test_median_of_means_and_of_variances(count, seed):
    means, variances = draw(count, seed)
    expected = posterior(np.median(means, 0), np.median(variances, 0))
    assert_same(fuse("coordinate_median", clients_of(means, variances)), expected, rtol=1e-14)


@given(count=COUNTS, seed=SEEDS, trim=st.integers(0, 5))
@FEW
def test_trimmed_by_a_number_of_clients(count, seed, trim):
    trim = min(trim, (count - 1) // 2)
    means, variances = draw(count, seed)
    both = (trim_mean(each, (trim + 1e-6) / count, axis=0) for each in (means, variances))
    assert_same(fuse(TrimmedMean(trim=trim), clients_of(means, variances)), posterior(*both), rtol=1e-12)


@given(count=COUNTS, seed=SEEDS)
@FEW
def test_limits_are_the_average_and_the_median(count, seed):
    clients = clients_of(*draw(count, seed))
    assert_same(fuse(TrimmedMean(trim=0), clients), fuse("nwa", clients), rtol=1e-12)
    assert_same(fuse(TrimmedMean(trim=0.4999), clients), fuse("coordinate_median", clients), rtol=1e-12)


@pytest.mark.parametrize(
    ("trim", "count", "dropped"),
    [(0.1, 1, 0), (0.1, 2, 0), (0.1, 3, 1), (0.1, 10, 1), (0.1, 11, 2), (0.07, 100, 7), (0.29, 100, 29), (0.3, 10, 3),
     (0.45, 4, 1), (0.0, 9, 0), (2, 5, 2), (0, 5, 0)],
)
def test_a_fraction_is_rounded_up(trim, count, dropped):
    assert TrimmedMean(trim=trim).dropped(count) == dropped


@given(good=st.integers(1, 6), seed=SEEDS, bad=st.sampled_from([-1e30, 1e30, 0.0, 5.0]))
@FEW
def test_a_minority_leaves_every_value_between_honest_ones(good, seed, bad):
    means, variances = draw(good, seed)
    liars = [posterior(np.full(6, bad), np.full(6, abs(bad)))] * (good - 1)
    fused = fuse("coordinate_median", [*liars, *clients_of(means, variances)])
    for value, honest in ((fused.mean["w"], means), (fused.variance["w"], variances)):
        assert (value.numpy() >= honest.min(0)).all()
        assert (value.numpy() <= honest.max(0)).all()


def test_blocks_do_not_show(monkeypatch):
    clients = clients_of(*draw(5, 0))
    whole = fuse("coordinate_median", clients)
    monkeypatch.setattr("lightning_fedbayes.fusion.columns.ENTRIES", 10)
    assert_same(fuse("coordinate_median", clients), whole, rtol=0)


def test_a_variance_that_half_of_the_clients_have():
    clients = [posterior([0.0], [0.0]), posterior([1.0], [4.0]), posterior([2.0], [0.0]), posterior([3.0], [8.0])]
    assert fuse("coordinate_median", clients).variance["w"].item() == 2
    assert fuse("coordinate_median", clients[:3]).variance["w"].item() == 0
    assert torch.equal(fuse("trimmed_mean", clients[:1]).mean["w"], clients[0].mean["w"])
