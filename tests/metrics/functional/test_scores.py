"""Scores against theory, numerical integration, scikit-learn and scipy."""

import math

import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F
from tests.metrics.functional.predictions import draw, targets
from tests.refusals import refusals


def test_log_likelihood_is_sklearns():
    probs, target = draw((50, 4)), targets(50, 4)
    expected = sklearn.metrics.log_loss(target, probs, labels=range(4))
    assert F.negative_log_likelihood(probs, target).mean().item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_ruled_out_costs_the_logarithm_of_the_smallest_normal_number(dtype):
    score = F.negative_log_likelihood(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1]))
    assert score.item() == pytest.approx(-math.log(torch.finfo(dtype).tiny))


def test_brier_is_sklearns():
    probs, target = draw((50, 2)), targets(50, 2)
    expected = 2 * sklearn.metrics.brier_score_loss(target, probs[:, 1])
    assert F.brier_score(probs, target).mean().item() == pytest.approx(expected)
    many, target = draw((50, 5)), targets(50, 5)
    onehot = torch.nn.functional.one_hot(target, 5)
    assert torch.allclose(F.brier_score(many, target), (many - onehot).square().sum(1))


@pytest.mark.parametrize("score", [F.negative_log_likelihood, F.brier_score])
def test_classification_scores_are_proper(score):
    """The expected score under p is least when p itself is predicted: its gradient along the simplex is zero."""
    truth = draw((1, 4))
    logits = truth.log().requires_grad_()
    expected = sum(truth[0, c] * score(logits.softmax(1), torch.tensor([c])).sum() for c in range(4))
    (gradient,) = torch.autograd.grad(expected, logits)
    assert gradient.abs().max() < 1e-12


def gaussian_case(batch=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean, target = torch.randn(2, batch, generator=generator, dtype=torch.float64) * 2
    return mean, torch.rand(batch, generator=generator, dtype=torch.float64) * 3 + 0.1, target


def test_gaussian_nll_is_scipys():
    mean, variance, target = gaussian_case()
    expected = -scipy.stats.norm.logpdf(target, mean, variance.sqrt())
    assert torch.allclose(F.gaussian_nll(mean, variance, target), torch.as_tensor(expected))


@pytest.mark.parametrize("example", range(8))
def test_gaussian_crps_is_the_integral(example):
    mean, variance, target = (values[example] for values in gaussian_case(8))
    normal = scipy.stats.norm(mean.item(), math.sqrt(variance.item()))
    below, _ = scipy.integrate.quad(lambda x: normal.cdf(x) ** 2, -40, target.item(), limit=200)
    above, _ = scipy.integrate.quad(lambda x: normal.sf(x) ** 2, target.item(), 40, limit=200)
    assert F.gaussian_crps(mean, variance, target).item() == pytest.approx(below + above, rel=1e-6)


def test_crps_scales_and_shifts_with_the_target():
    mean, variance, target = gaussian_case()
    samples = torch.randn(7, len(mean), dtype=torch.float64)
    moved = 3 * target + 100
    assert torch.allclose(3 * F.ensemble_crps(samples, target), F.ensemble_crps(3 * samples + 100, moved))
    assert torch.allclose(
        3 * F.gaussian_crps(mean, variance, target), F.gaussian_crps(3 * mean + 100, 9 * variance, moved)
    )


@given(st.integers(2, 12), st.integers(0, 1000), st.sampled_from([0.0, 1e3]))
@settings(deadline=None)
def test_ensemble_crps_is_the_double_sum(number, seed, offset):
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(number, 5, generator=generator, dtype=torch.float64) + offset
    target = torch.randn(5, generator=generator, dtype=torch.float64) + offset
    pairs = (samples.unsqueeze(0) - samples.unsqueeze(1)).abs().sum((0, 1))
    expected = (samples - target).abs().mean(0) - pairs / (2 * number * (number - 1))
    assert torch.allclose(F.ensemble_crps(samples, target), expected, atol=1e-9)


@pytest.mark.parametrize("number", [2, 5, 40])
def test_fair_crps_is_unbiased_for_few_samples(number):
    """E[CRPS] of N(0, 1) samples against N(0, 1) targets is 1/√π ≈ 0.564, for any number of samples."""
    trials = 200_000
    generator = torch.Generator().manual_seed(number)
    samples, target = torch.randn(number, trials, generator=generator), torch.randn(trials, generator=generator)
    scores = F.ensemble_crps(samples, target)
    assert abs(scores.mean() - 1 / math.sqrt(math.pi)) < 5 * scores.std() / math.sqrt(trials)


def test_many_samples_give_the_gaussian_crps():
    mean, variance, target = gaussian_case(6)
    samples = mean + variance.sqrt() * torch.randn(100_000, 6, dtype=torch.float64)
    assert torch.allclose(F.ensemble_crps(samples, target), F.gaussian_crps(mean, variance, target), rtol=0.03)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.95])
def test_coverage_of_exact_gaussian_data_is_the_level(level):
    number = 200_000
    mean, deviation = torch.randn(number), torch.rand(number) + 0.1
    covered = F.interval_coverage(mean, deviation**2, mean + deviation * torch.randn(number), level)
    assert abs(covered.mean() - level) < 5 * math.sqrt(level * (1 - level) / number)


def test_determinant_sharpness_is_the_root_of_the_determinant():
    factor = torch.randn(6, 3, 3, dtype=torch.float64)
    covariance = factor @ factor.mT
    expected = torch.linalg.det(covariance) ** (1 / 6)
    assert torch.allclose(F.determinant_sharpness(covariance), expected)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    assert torch.allclose(F.determinant_sharpness(rotation @ covariance @ rotation.mT), expected)
    variance = torch.rand(4) + 0.1
    assert torch.allclose(F.determinant_sharpness(variance[:, None, None]), variance.sqrt())
    assert F.determinant_sharpness(torch.zeros(2, 2)) == 0
    assert torch.allclose(F.determinant_sharpness(1e-30 * torch.eye(50)), torch.tensor(1e-15))


BATCH, SAMPLES = torch.full((3, 2), 0.5), torch.full((4, 3, 2), 0.5)


test_errors_name_the_shape_and_the_remedy = refusals(
    FedBayesError,
    (lambda: F.brier_score(SAMPLES, torch.zeros(3).long()), r"\(4, 3, 2\).*\(batch, classes\).*probs.mean"),
    (lambda: F.brier_score(BATCH, torch.zeros(2).long()), r"\(2,\).*one integer class"),
    (lambda: F.negative_log_likelihood(BATCH, torch.zeros(3)), "float32.*one integer class"),
    (lambda: F.negative_log_likelihood(BATCH, torch.tensor([0, 1, 2])), "from 0 to 2, and probs have 2"),
    (lambda: F.gaussian_nll(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3)), r"target \(3,\).*equal"),
    (lambda: F.ensemble_crps(torch.zeros(1, 3), torch.zeros(3)), "at least 2 samples"),
    (lambda: F.ensemble_crps(torch.zeros(5, 3, 1), torch.zeros(3)), r"samples_but_first \(3, 1\)"),
    (lambda: F.interval_coverage(torch.zeros(1), torch.ones(1), torch.zeros(1), 95), "level=95"),
    (lambda: F.determinant_sharpness(torch.ones(3)), r"\(\*, d, d\).*diag_embed"),
    (lambda: F.determinant_sharpness(torch.diag(torch.tensor([1.0, -1.0]))), "1 of 1.*negative determinant"),
)
