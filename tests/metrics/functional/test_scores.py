"""Scores against theory, numerical integration, scikit-learn and scipy."""

import math

import pytest
import scipy.integrate
import scipy.stats
import torch
import torchmetrics.functional as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F
from tests.metrics.functional.predictions import draw, targets
from tests.refusals import refusals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_ruled_out_costs_the_logarithm_of_the_smallest_normal_number(dtype):
    score = F.negative_log_likelihood(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1]))
    assert score.item() == pytest.approx(-math.log(torch.finfo(dtype).tiny))


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
    (lambda: F.negative_log_likelihood(BATCH, torch.zeros(3)), "float32.*one integer class"),
    (lambda: F.negative_log_likelihood(BATCH, torch.tensor([0, 1, 2])), "from 0 to 2, and probs have 2"),
    (lambda: F.gaussian_nll(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3)), r"target \(3,\).*equal"),
    (lambda: F.interval_coverage(torch.zeros(1), torch.ones(1), torch.zeros(1), 95), "level=95"),
    (lambda: F.determinant_sharpness(torch.ones(3)), r"\(\*, d, d\).*diag_embed"),
    (lambda: F.determinant_sharpness(torch.diag(torch.tensor([1.0, -1.0]))), "1 of 1.*negative determinant"),
)


def test_diagrams_ece_is_that_of_torchmetrics():
    probs, target = draw((3000, 7)), targets(3000, 7)
    for bins in (1, 15, 100):
        expected = tm.classification.multiclass_calibration_error(probs, target, num_classes=7, n_bins=bins)
        assert F.calibration_diagram(probs, target, bins).ece.item() == pytest.approx(expected.item(), rel=1e-6)


def test_bins_of_the_diagram_hold_what_lies_in_them():
    probs, target = draw((500, 4)), targets(500, 4)
    diagram = F.calibration_diagram(probs, target, bins=8)
    confidence, predicted = probs.max(1)
    for b in range(8):
        inside = (confidence >= b / 8) & (confidence < (b + 1) / 8)
        assert diagram.counts[b] == inside.sum()
        assert torch.allclose(diagram.confidence[b], confidence[inside].mean(), equal_nan=True)
        assert torch.allclose(diagram.accuracy[b], (predicted == target)[inside].float().mean(), equal_nan=True)
    certain = F.calibration_diagram(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), bins=8)
    assert certain.counts.tolist() == [0] * 7 + [1]
    assert certain.ece == 0


def calibrated(blocks=12, each=20):
    """Block b predicts the confidence (12 + b)/24, and exactly that share of it is correct."""
    probs, target = [], []
    for b in range(blocks):
        hits = round((0.5 + b / (2 * blocks)) * each * 12)
        confidence = hits / (each * 12)
        probs += [[confidence, 1 - confidence]] * (each * 12)
        target += [0] * hits + [1] * (each * 12 - hits)
    return torch.tensor(probs, dtype=torch.float64), torch.tensor(target)


@pytest.mark.parametrize("bins", [1, 12, 15, 100])
def test_adaptive_error_is_zero_for_perfect_calibration_whatever_the_order(bins):
    probs, target = calibrated()
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    assert F.adaptive_calibration_error(probs[order], target[order], bins).item() == pytest.approx(0, abs=1e-9)


def test_adaptive_error_is_the_mean_gap_of_equal_parts():
    probs = draw((600, 5))
    confidence, predicted = probs.max(1)
    target = torch.where(torch.rand(600) < 0.6, predicted, (predicted + 1) % 5)  # under- and then overconfident
    order = confidence.argsort()
    gaps = ((predicted == target).double() - confidence)[order].view(15, 40).mean(1)
    assert gaps.min() < 0 < gaps.max()
    assert F.adaptive_calibration_error(probs, target).item() == pytest.approx(gaps.abs().mean().item(), rel=1e-6)


def test_the_average_is_weighted_and_the_worst_clients_are_rounded_up():
    accuracies = torch.tensor([0.9, 0.2, 0.5, 0.7])
    assert F.weighted_accuracy(accuracies, torch.tensor([1, 2, 3, 4])).item() == pytest.approx(0.56)
    assert F.weighted_accuracy(accuracies, torch.ones(4)) == F.worst_fraction_accuracy(accuracies, 1.0)
    assert F.worst_fraction_accuracy(accuracies).item() == pytest.approx(0.2)
    assert F.worst_fraction_accuracy(accuracies, 0.3).item() == pytest.approx(0.35)
    assert F.worst_fraction_accuracy(torch.arange(30.0), 0.1) == 1  # three clients, not four


def test_clients_without_examples_do_not_count():
    accuracies = torch.tensor([0.9, torch.nan, 0.5])
    assert F.weighted_accuracy(accuracies, torch.tensor([1, 9, 3])).item() == pytest.approx(0.6)
    assert F.worst_fraction_accuracy(accuracies, 0.5).item() == pytest.approx(0.5)


TIME = torch.tensor([5.0, 8, 8, 12, 3, 8, 20, 15, 12, 1, 9, 20])
EVENT = torch.tensor([1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1])
RISK = torch.tensor([1.5, 0.3, 0.3, -0.2, 2.0, 0.9, -1.0, -0.4, 0.3, 1.5, 1.1, -1.0])
LIFELINES = 0.9019607843137255
"""lifelines 0.30.3: ``concordance_index(TIME, -RISK, EVENT)``."""
examples = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 5), st.booleans()), min_size=1, max_size=25)


def columns(rows):
    return tuple(torch.tensor(column) for column in zip(*rows))


def of_all_pairs(risk, time, event):
    """The definition, pair by pair."""
    score = pairs = 0
    for i in range(len(risk)):
        for j in range(len(risk)):
            later = time[i] < time[j] or (time[i] == time[j] and not event[j])
            if event[i] and later:
                pairs += 1
                score += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return score / pairs if pairs else math.nan


@given(examples)
@settings(deadline=None)
def test_index_is_that_of_all_pairs(rows):
    expected = of_all_pairs(*zip(*rows))
    assert F.concordance_index(*columns(rows)).item() == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_index_is_that_of_lifelines():
    assert F.concordance_index(RISK, TIME, EVENT).item() == pytest.approx(LIFELINES, abs=1e-6)


test_errors = refusals(
    FedBayesError,
    (RISK[:-1], TIME, EVENT, r"shapes differ: risk \(11,\), time \(12,\)"),
    (RISK.unsqueeze(1), TIME.unsqueeze(1), EVENT.unsqueeze(1), "a vector is needed"),
    (RISK, -TIME, EVENT, "time holds -5 among 12 of 12"),
    (RISK, TIME / torch.arange(12), EVENT, "time holds inf among 1 of 12"),
    (RISK, EVENT, TIME, "event holds 5 among 11 of 12.*swapped with time"),
    (RISK * torch.nan, TIME, EVENT, "risk is NaN at 12 of 12"),
    (RISK, TIME, [1] * 12, "event=.*give a torch.Tensor"),
    call=F.concordance_index,
)
