"""Every partition deals each example at most once, and keeps the classes, proportions and sizes that it promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import PartitionError
from lightning_fedbayes.data.partition import Split, label_skew
from lightning_fedbayes.data.partition.base import counts_table
from tests.refusals import refusals

labels_with_gaps = st.lists(st.sampled_from([-3, 0, 7, 40, 41]), min_size=20, max_size=120).map(torch.tensor)
seeds = st.integers(0, 2**31)
any_partition = st.one_of(
    st.builds(fb.IIDPartition, st.integers(1, 10)),
    st.builds(
        fb.DirichletPartition, st.integers(1, 4), st.floats(0.5, 50), min_examples=st.just(1), balance=st.booleans()
    ),
    st.builds(fb.DirichletPartition, st.integers(1, 10), st.floats(1e-3, 1e6), st.just("client")),
    st.builds(fb.SizesPartition, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)),
    st.builds(fb.SizesPartition, st.lists(st.floats(0.1, 0.25), min_size=1, max_size=4).map(tuple)),
)


@pytest.mark.slow
@given(any_partition, labels_with_gaps, seeds)
@settings(deadline=None, max_examples=200)
def test_every_example_at_most_once_and_same_seed_same_split(partition, labels, seed):
    split, again = partition.split(labels, seed), partition.split(labels, seed, num_examples=len(labels))
    assert all(torch.equal(a, b) for a, b in zip(split.indices, again.indices, strict=True))
    dealt = torch.cat(split.indices)
    assert len(dealt.unique()) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)
    assert all(client.dtype == torch.int64 and (client.diff() > 0).all() for client in split.indices)
    assert len(split.indices) == partition.clients
    assert min(split.sizes) >= 1
    left_out = len(labels) - len(dealt)
    if isinstance(partition, fb.IIDPartition) or getattr(partition, "per", None) == "label":
        assert left_out == 0
    elif isinstance(partition, fb.DirichletPartition):
        assert set(split.sizes) == {len(labels) // partition.clients}
    elif not partition.fractional:
        assert split.sizes == partition.sizes


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_integer_dtypes_give_the_same_split(dtype):
    labels = torch.arange(200) % 2
    a, b = (fb.DirichletPartition(3, 1.0).split(y, 5) for y in (labels, labels.to(dtype)))
    assert all(torch.equal(x, y) for x, y in zip(a.indices, b.indices))


@given(labels_with_gaps, seeds)
@settings(deadline=None)
def test_counts_table_counts(labels, seed):
    split = fb.IIDPartition(3).split(labels, seed)
    counts, classes = counts_table(split.indices, labels)
    assert classes == tuple(sorted(set(labels.tolist())))
    for client, row in zip(split.indices, counts):
        assert row.tolist() == [(labels[client] == c).sum() for c in classes]
    assert split.sizes == tuple(counts.sum(1).tolist())


def test_split_of_own_indices_is_sorted():
    split = Split.from_indices([np.array([4, 1]), [0]], torch.tensor([1, 1, 1, 1, 2]))
    assert split.indices[0].tolist() == [1, 4]
    assert split.counts.tolist() == [[1, 1], [1, 0]]


def test_iid_sizes_differ_by_at_most_one_seeds_differ_and_fractions_that_sum_to_one_use_all():
    assert sum(fb.SizesPartition([1 / 3, 1 / 3, 1 / 3]).split(None, 0, 100).sizes) == 100
    first, second = fb.IIDPartition(7).split(None, 0, 100), fb.IIDPartition(7).split(None, 1, 100)
    assert max(first.sizes) - min(first.sizes) <= 1
    assert not torch.equal(first.indices[0], second.indices[0])
    assert first.counts is None
    assert first.classes == ()


def test_regression_targets_can_be_dealt_iid_but_not_by_label():
    target = torch.randn(30)
    assert fb.IIDPartition(3).split(target, 0).counts is None
    with pytest.raises(PartitionError, match=r"float32.*integer class.*bin"):
        fb.DirichletPartition(3, 1.0).split(target, 0)


def balanced(classes, each):
    return torch.arange(classes * each) % classes


@given(labels_with_gaps, st.integers(1, 6), st.integers(1, 5), seeds)
@settings(deadline=None, max_examples=200)
def test_class_partition_gives_every_client_exactly_m_classes(labels, clients, per_client, seed):
    sizes = labels.unique(return_counts=True)[1]
    partition = fb.ClassPartition(clients, per_client)
    possible = per_client <= len(sizes) <= clients * per_client <= sizes.clamp_max(clients).sum()
    if not possible:
        with pytest.raises(PartitionError, match="classes"):
            partition.split(labels, seed)
        return
    split = partition.split(labels, seed)
    assert ((split.counts > 0).sum(1) == per_client).all()
    assert torch.equal(torch.cat(split.indices).sort().values, torch.arange(len(labels)))
    for column in split.counts.T:
        shards = column[column > 0]
        assert shards.max() - shards.min() <= 1
    if (smaller := int(split.counts.max()) - 1) > 0:  # no cut gives a smaller largest shard
        needed = -(-sizes // smaller)
        assert needed.sum() > clients * per_client or needed.max() > clients


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_split_labels_has_dirichlet_moments(alpha):
    """Without the balance cap each label's shares are Dir(α): mean 1/K, variance (1/K)(1 − 1/K)/(Kα + 1)."""
    clients, draws, generator = 4, 8000, np.random.default_rng(0)
    supply = np.full(draws, 10_000)  # one "label" per draw
    shares = label_skew.split_labels(clients, alpha, supply, False, generator) / 10_000
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.allclose(shares.mean(1), 1 / clients, atol=5 * np.sqrt(variance / draws))
    assert np.allclose(shares.var(1), variance, rtol=0.1)


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_clients_with_ample_data_have_dirichlet_multinomial_moments(alpha):
    """Supply never runs out: shares have the mean f and variance f(1 − f)/(αC + 1)·(1 + (αC)/n) of the compound."""
    clients, size, supply, generator = 6000, 500, np.array([4, 3, 1]) * 6000 * 500, np.random.default_rng(1)
    proportions = label_skew.draw_proportions(clients, alpha, supply, generator)
    counts = label_skew.deal_by_proportions(proportions, size, supply, generator)
    shares, f, total = counts / size, supply / supply.sum(), alpha * 3
    variance = f * (1 - f) / (total + 1) * (1 + total / size)
    assert (counts.sum(1) == size).all()
    assert (np.abs(shares.mean(0) - f) < 5 * np.sqrt(variance / clients)).all()
    assert np.allclose(shares.var(0), variance, rtol=0.1)


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 100.0])
def test_dealing_without_replacement_uses_up_the_data_and_prefers_no_client(alpha):
    supply, clients, generator = np.array([50, 30, 20]), 5, np.random.default_rng(2)
    proportions = (label_skew.draw_proportions(clients, alpha, supply, generator) for _ in range(2000))
    deals = np.stack([label_skew.deal_by_proportions(each, 20, supply, generator) for each in proportions])
    assert (deals.sum(1) == supply).all()
    assert (deals.sum(2) == 20).all()
    error = deals.std(0) / np.sqrt(len(deals))
    assert (np.abs(deals.mean(0) - supply / clients) < 5 * error + 1e-9).all()


@pytest.mark.parametrize("balance", [True, False])
def test_labels_prefer_no_client_even_when_they_are_few(balance):
    generator = np.random.default_rng(3)
    deals = np.stack([label_skew.split_labels(4, 50.0, np.array([3, 2, 7]), balance, generator) for _ in range(4000)])
    error = deals.std(0) / np.sqrt(len(deals))
    assert (np.abs(deals.mean(0) - np.array([3, 2, 7]) / 4) < 5 * error).all()


@pytest.mark.parametrize("per", ["label", "client"])
@pytest.mark.parametrize("alpha", [1e9, 1e300])
def test_large_alpha_gives_equal_proportions(per, alpha):
    labels = torch.cat([torch.zeros(4000), torch.ones(2000)]).long()
    counts = fb.DirichletPartition(5, alpha, per=per).split(labels, 0).counts.double()
    expected = torch.tensor([4000 / 5, 2000 / 5], dtype=torch.float64)
    slack = 2 if per == "label" else 5 * (1200 * 2 / 9) ** 0.5
    assert (counts - expected).abs().max() <= slack


def test_clients_with_distinct_favourites_get_exactly_them():
    counts = label_skew.deal_by_proportions(np.eye(4), 25, np.full(4, 25), np.random.default_rng(0))
    assert np.array_equal(counts, 25 * np.eye(4))


@pytest.mark.parametrize("seed", range(20))
def test_min_examples_is_respected(seed):
    labels = balanced(10, 60)
    assert min(fb.DirichletPartition(10, 0.3).split(labels, seed).sizes) >= 10
    assert min(fb.DirichletPartition(10, 0.3, min_examples=25).split(labels, seed).sizes) >= 25


@given(seeds, st.integers(2, 6), st.floats(0.1, 2))
@settings(deadline=None)
def test_balance_closes_clients_that_hold_an_equal_share(seed, clients, alpha):
    supply = np.array([30, 50, 20, 40])
    counts = label_skew.split_labels(clients, alpha, supply, True, np.random.default_rng(seed))
    before = np.cumsum(counts, axis=1)[:, :-1]
    assert (counts[:, 1:][before * clients >= supply.sum()] == 0).all()
    assert np.array_equal(counts.sum(0), supply)


test_errors_name_value_rule_and_remedy = refusals(
    PartitionError,
    (lambda: fb.IIDPartition(5).split(None, 0, 4), "5 clients cannot share 4.*fewer clients"),
    (lambda: fb.IIDPartition(5).split(None, 0), "pass one of them"),
    (lambda: fb.IIDPartition(5).split(torch.zeros(7), 0, 8), "num_examples is 8.*7 labels"),
    (lambda: fb.IIDPartition(2).split(["cat"] * 2, 0), "type list cannot be read as numbers.*one integer per example"),
    (lambda: fb.SizesPartition(()), r"sizes=\(\)"),
    (lambda: fb.SizesPartition((3, 0.5)), "mix"),
    (lambda: fb.SizesPartition((0.7, 0.5)), "sum to 1.2"),
    (lambda: fb.SizesPartition((7, 5)).split(None, 0, 10), "sum to 12.*10 examples"),
    (lambda: fb.SizesPartition((0.99, 0.01)).split(None, 0, 10), "client 1 of 2 would get none"),
    (lambda: fb.DirichletPartition(3, 0.0), "alpha=0.0.*above 0"),
    (lambda: fb.DirichletPartition(3, float("inf")), "IIDPartition"),
    (lambda: fb.DirichletPartition(3, 1.0, per="clients"), "did you mean 'client'"),
    (lambda: fb.DirichletPartition(3, 1.0, min_examples=0), "min_examples=0"),
    (lambda: fb.DirichletPartition(3, 1.0).split(None, 0, 10), "labels are unknown.*labels="),
    (lambda: fb.DirichletPartition(3, 1.0, min_examples=50).split(balanced(2, 50), 0), "50 × 3.*100.*lower"),
    (lambda: fb.DirichletPartition(30, 1e-3).split(balanced(3, 200), 0), "1000 draws.*raise alpha.*per='client'"),
    (lambda: fb.ClassPartition(3, 5).split(balanced(4, 9), 0), "5.*4 classes"),
    (lambda: fb.ClassPartition(3, 2).split(balanced(10, 9), 0), "only 6 of the 10.*raise clients"),
    (lambda: fb.ClassPartition(9, 2).split(balanced(2, 5), 0), "need 18 shards.*only 10"),
)
