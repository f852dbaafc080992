"""The Gaussian posterior: divergences, draws, and the ways in which it is stored."""

import io
import math
import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.core import posterior as posterior_module
from lightning_fedbayes.core.errors import PosteriorError
from lightning_fedbayes.core.posterior import is_zero, zeros_like
from tests.refusals import refusals

SHAPES = st.lists(st.sampled_from([(), (1,), (3,), (2, 2), (0,), (1, 2, 3)]), min_size=1, max_size=3)
SEEDS = st.integers(0, 2**32 - 1)
MANY = settings(deadline=None, max_examples=60)


def draw_posterior(shapes, seed, dtype=torch.float64, atoms=0.0):
    """Means of order 1, variances log-uniform over twelve orders, a share ``atoms`` of them 0."""
    random = np.random.default_rng(seed)
    means, variances = {}, {}
    for i, shape in enumerate(shapes):
        variance = np.where(random.random(shape) < atoms, 0.0, 10 ** random.uniform(-8, 4, shape))
        means[f"p{i}"] = torch.tensor(random.normal(size=shape), dtype=dtype)
        variances[f"p{i}"] = torch.tensor(variance, dtype=dtype)
    return GaussianPosterior(means, variances)


def assert_equal(first, second):
    assert first.names == second.names
    for name in first.names:
        for a, b in ((first.mean, second.mean), (first.variance, second.variance)):
            assert torch.equal(a[name], b[name])
            assert a[name].dtype == b[name].dtype


def bytes_of(tensor):
    return tensor.untyped_storage().nbytes()


@given(shapes=SHAPES, seed=SEEDS)
@MANY
def test_kl_is_the_sum_over_parameters(shapes, seed):
    q, p = draw_posterior(shapes, seed), draw_posterior(shapes, seed + 1)
    ours, theirs = ({n: Normal(each.mean[n], each.variance[n].sqrt()) for n in each.names} for each in (q, p))
    terms = [kl_divergence(ours[n], theirs[n]).sum() for n in q.names]
    torch.testing.assert_close(q.kl(p), torch.stack(terms).sum(), rtol=1e-9, atol=1e-12)


@given(shapes=SHAPES, seed=SEEDS, atoms=st.sampled_from([0.0, 0.5, 1.0]))
@MANY
def test_kl_of_itself_is_zero_and_no_kl_is_negative(shapes, seed, atoms):
    q = draw_posterior(shapes, seed, atoms=atoms)
    nearby = GaussianPosterior({n: m + 1e-9 for n, m in q.mean.items()}, q.variance)
    assert q.kl(q) == 0
    assert q.kl(nearby) >= 0


@given(shapes=SHAPES, seed=SEEDS)
@MANY
def test_entries_that_are_deterministic_in_both_do_not_count(shapes, seed):
    q, p = draw_posterior(shapes, seed), draw_posterior(shapes, seed + 1)
    point = torch.tensor([3.0, -1.0], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    extended = [
        GaussianPosterior({**each.mean, "d": shift * point}, {**each.variance, "d": zero})
        for each, shift in ((q, 1.0), (p, 5.0))
    ]
    torch.testing.assert_close(extended[0].kl(extended[1]), q.kl(p))


def test_kl_is_infinite_where_one_is_deterministic_and_matches_parameters_by_name():
    point, normal = (GaussianPosterior({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, v])}) for v in (0.0, 1.0))
    assert point.kl(normal) == math.inf
    assert normal.kl(point) == math.inf
    q = draw_posterior([(3,), (3,)], 0)
    p = draw_posterior([(3,), (3,)], 1)
    turned = GaussianPosterior(dict(reversed(p.mean.items())), dict(reversed(p.variance.items())))
    torch.testing.assert_close(q.kl(turned), q.kl(p))


Q, ZEROS = draw_posterior([(3,), (2,)], 0), {"w": torch.zeros(2)}
test_kl_of_different_networks_and_variances_that_are_none_are_refused = refusals(
    PosteriorError,
    (lambda: Q.kl(draw_posterior([(3,)], 0)), r"only this posterior has p1, .*none.*same network"),
    (lambda: Q.kl(draw_posterior([(3,), (3,)], 0)), r"'p1' has shape \(2,\).*\(3,\) in the other"),
    (lambda: GaussianPosterior(ZEROS, {"w": torch.tensor([1.0, -0.5])}), r"'w' is negative at 1 .*\(minimum -0\.5\)"),
    (lambda: GaussianPosterior(ZEROS, {"v": torch.ones(2)}), r"only mean has w, only variance has v;"),
    (lambda: GaussianPosterior(ZEROS, {"w": torch.ones(3)}), r"'w' has shape \(2,\) in mean but \(3,\) in variance"),
)


@pytest.mark.parametrize("shape", [(), (1,), (1000, 1000), (0,)])
def test_point_mass_takes_no_memory_for_its_variance(shape):
    q = GaussianPosterior.point_mass({"w": torch.ones(shape)})
    assert q.variance["w"].shape == shape
    assert bytes_of(q.variance["w"]) <= q.mean["w"].element_size()
    assert is_zero(q.variance["w"])
    for copy in (q.clone(), q.to("cpu"), deepcopy(q), GaussianPosterior.from_state_dict(q.state_dict())):
        assert bytes_of(copy.variance["w"]) <= q.mean["w"].element_size()


@given(
    shapes=SHAPES,
    seed=SEEDS,
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    atoms=st.sampled_from([0.0, 0.5, 1.0]),
)
@MANY
def test_flatten_and_unflatten_are_inverse(shapes, seed, dtype, atoms):
    q = draw_posterior(shapes, seed, dtype, atoms)
    mean, variance = q.flatten()
    assert mean.dtype == variance.dtype == torch.float64
    assert mean.shape == variance.shape == (q.num_parameters,)
    assert_equal(q.unflatten(mean, variance), q)


def test_copies_share_no_memory():
    q = draw_posterior([(3,)], 0)
    copies = q.clone(), q.unflatten(*q.flatten())
    before = draw_posterior([(3,)], 0)
    for tensor in (q.mean["p0"], q.variance["p0"]):
        tensor.add_(1)
    for copy in copies:
        assert_equal(copy, before)


def test_state_dict_survives_a_file_of_weights_only():
    q = GaussianPosterior(
        {**draw_posterior([(2,)], 0).mean, "d": torch.ones(1000)},
        {**draw_posterior([(2,)], 0).variance, "d": zeros_like(torch.ones(1000))},
    )
    state = q.state_dict()
    assert "d" not in state["variance"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert_equal(GaussianPosterior.from_state_dict(torch.load(file, weights_only=True)), q)
    assert_equal(pickle.loads(pickle.dumps(q)), q)


@pytest.mark.parametrize("together", [True, False])
def test_draws_have_the_moments_of_the_posterior(together):
    count = 4000
    q = GaussianPosterior(
        {"a": torch.tensor([1.0, -2.0, 3.0]), "b": torch.tensor(0.5)},
        {"a": torch.tensor([4.0, 0.01, 0.0]), "b": torch.tensor(1e-4)},
    )
    generator = torch.Generator().manual_seed(0)
    many = q.sample(count, generator) if together else [q.sample(generator=generator) for _ in range(count)]
    draws = many if isinstance(many, dict) else {name: torch.stack([each[name] for each in many]) for name in q.names}
    flat = torch.cat([draws["a"], draws["b"][:, None]], 1).double()
    mean, variance = q.flatten()
    assert bool(((flat.mean(0) - mean).abs() <= 5 * (variance / count).sqrt()).all())
    assert bool(((flat.var(0) - variance).abs() <= 5 * variance * (2 / count) ** 0.5).all())
    random = variance > 0
    correlations = torch.corrcoef(flat[:, random].T) - torch.eye(int(random.sum()))
    assert correlations.abs().max() < 5 / count**0.5


def test_draws_come_from_the_generator_alone():
    q = draw_posterior([(5,)], 0)
    before = torch.get_rng_state()
    first, second = (q.sample(generator=torch.Generator().manual_seed(3))["p0"] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("most", [0, 2**22])
@pytest.mark.parametrize("together", [1, 20, 2**18])
@pytest.mark.parametrize("certain", [True, False])
def test_rows_of_a_stack_are_the_posteriors_of_its_clients(most, together, certain, monkeypatch):
    monkeypatch.setattr(posterior_module, "MOST_AT_ONCE", most)
    monkeypatch.setattr(posterior_module, "POINT_PIECE", together)
    shapes = {"matrix": (3, 2), "scalar": (), "empty": (0,)}
    mean = {name: torch.randn(4, *shape) for name, shape in shapes.items()}
    variance = {name: zeros_like(m) if certain or name == "scalar" else torch.rand_like(m) for name, m in mean.items()}
    variance = dict(reversed(variance.items()))  # names need not be in one order
    rows = [*GaussianPosterior(mean, variance).unbind()]
    assert len(rows) == 4
    for k, row in enumerate(rows):
        alone = GaussianPosterior({n: m[k] for n, m in mean.items()}, {n: v[k] for n, v in variance.items()})
        assert row.names == alone.names
        assert all(torch.equal(row.mean[n], alone.mean[n]) for n in shapes)
        assert all(torch.equal(row.variance[n], alone.variance[n]) for n in shapes)
        for first, second in zip(row.flatten(), alone.flatten(), strict=True):
            assert torch.equal(first, second)
            assert first.dtype == torch.float64
        assert row.num_bytes == alone.num_bytes
        assert row.is_point_mass == alone.is_point_mass == certain
        assert row.clone().mean["matrix"].data_ptr() != row.mean["matrix"].data_ptr()
