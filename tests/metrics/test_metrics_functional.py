"""Metric functions against theory, numerical integration, scikit-learn, scipy and torchmetrics."""

import math

import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draw(shape, seed=0, temperature=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (temperature * torch.randn(shape, generator=generator, dtype=dtype)).softmax(-1)


def targets(batch, classes, seed=1):
    return torch.randint(classes, (batch,), generator=torch.Generator().manual_seed(seed))


sampled = st.builds(draw, st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(2, 7)), st.integers(0, 10_000),
                    st.floats(0, 30))


@given(sampled)
@settings(deadline=None)
def test_kwon_matrices_sum_to_the_covariance_of_the_label(probs):
    mean = probs.mean(0)
    covariance = mean.diag_embed() - mean.unsqueeze(2) * mean.unsqueeze(1)
    parts = F.aleatoric_covariance(probs), F.epistemic_covariance(probs)
    assert torch.allclose(sum(parts), covariance, atol=1e-12)
    for matrix, trace in zip(parts, (F.aleatoric_uncertainty(probs), F.epistemic_uncertainty(probs))):
        assert torch.allclose(matrix.diagonal(dim1=1, dim2=2).sum(1), trace, atol=1e-12)
        assert torch.linalg.eigvalsh(matrix).min() >= -1e-12


def test_epistemic_covariance_is_the_covariance_of_the_samples():
    probs = draw((9, 4, 5))
    for example in range(4):
        expected = torch.cov(probs[:, example].T, correction=0)
        assert torch.allclose(F.epistemic_covariance(probs)[example], expected, atol=1e-12)


@given(sampled)
@settings(deadline=None)
def test_mutual_information_is_entropy_lost_by_knowing_the_parameters(probs):
    information = F.mutual_information(probs)
    total = F.predictive_entropy(probs, normalize=False)
    mean_entropy = F.predictive_entropy(probs.flatten(0, 1).unsqueeze(0), normalize=False).view(probs.shape[:2]).mean(0)
    assert torch.allclose(information, total - mean_entropy, atol=1e-9)
    divergence = torch.special.xlogy(probs, probs / probs.mean(0)).sum(-1).mean(0)
    assert torch.allclose(information, divergence, atol=1e-9)
    assert (information >= 0).all()
    assert (information <= math.log(len(probs)) + 1e-9).all()


@given(sampled)
@settings(deadline=None)
def test_entropy_is_scipys_and_lies_between_0_and_1(probs):
    expected = torch.as_tensor(scipy.stats.entropy(probs.mean(0).numpy(), axis=1, base=probs.shape[2]))
    entropy = F.predictive_entropy(probs)
    assert torch.allclose(entropy, expected, atol=1e-9)
    assert (entropy >= 0).all()
    assert (entropy <= 1 + 1e-12).all()


def test_extremes_of_uncertainty():
    uniform = torch.full((3, 2, 8), 1 / 8)
    assert torch.allclose(F.predictive_entropy(uniform), torch.ones(2))
    assert torch.allclose(F.aleatoric_uncertainty(uniform), torch.full((2,), 7 / 8))
    assert (F.epistemic_uncertainty(uniform) == 0).all()
    assert torch.allclose(F.mutual_information(uniform), torch.zeros(2), atol=1e-6)
    votes = torch.eye(4).unsqueeze(1)  # four certain samples that all disagree
    assert F.aleatoric_uncertainty(votes).item() == 0
    assert F.epistemic_uncertainty(votes).item() == pytest.approx(3 / 4)
    assert F.mutual_information(votes).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    "function",
    [F.predictive_entropy, F.aleatoric_uncertainty, F.epistemic_uncertainty, F.mutual_information],
)
def test_sample_functions_are_invariant_to_order_and_take_half_floats(function):
    probs = draw((5, 6, 3))
    assert torch.allclose(function(probs), function(probs.flip(0)))
    assert torch.allclose(function(probs), function(probs.flip(2)))
    assert torch.allclose(function(probs).flip(0), function(probs.flip(1)))
    assert function(probs.bfloat16()).dtype == torch.float32


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


def test_crps_of_a_point_forecast_is_the_absolute_error_and_has_no_nan():
    mean, target = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, -1.0, 5.5])
    assert torch.equal(F.gaussian_crps(mean, torch.zeros(3), target), torch.tensor([0.0, 2.0, 0.5]))
    assert F.gaussian_nll(mean[:1], torch.zeros(1), target[:1]).isfinite()


def test_crps_scales_and_shifts_with_the_target():
    mean, variance, target = gaussian_case()
    samples = torch.randn(7, len(mean), dtype=torch.float64)
    moved = 3 * target + 100
    assert torch.allclose(3 * F.ensemble_crps(samples, target), F.ensemble_crps(3 * samples + 100, moved))
    assert torch.allclose(3 * F.gaussian_crps(mean, variance, target),
                          F.gaussian_crps(3 * mean + 100, 9 * variance, moved))


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


def test_interval_edge_is_the_normal_quantile():
    edge = scipy.stats.norm.ppf(0.9)
    inside = F.interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([-edge + 1e-4, -edge - 1e-4]), level=0.8)
    assert inside.tolist() == [1, 0]


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


def brute_force_area(correct, uncertainty):
    """acc(n) for every n, where of a tie group the retained part has the group's mean accuracy."""
    order = uncertainty.argsort(stable=True)
    correct, uncertainty = correct.double()[order], uncertainty[order]
    for value in uncertainty.unique():
        correct[uncertainty == value] = correct[uncertainty == value].mean()
    return (correct.cumsum(0) / torch.arange(1, len(correct) + 1)).mean()


retained = st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.11, 0.5, 1.0])), min_size=1, max_size=30)


@given(retained, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_accuracy_retained_does_not_depend_on_the_order_of_ties(examples, shuffler):
    correct, uncertainty = map(torch.tensor, zip(*examples))
    shuffler.shuffle(examples)
    again = tuple(map(torch.tensor, zip(*examples)))
    curve = F.accuracy_retained_curve(correct, uncertainty)
    assert all(torch.equal(a, b) for a, b in zip(curve, F.accuracy_retained_curve(*again)))
    area = F.accuracy_retained_area(correct, uncertainty)
    assert torch.allclose(area, F.accuracy_retained_area(*again))
    assert area.item() == pytest.approx(brute_force_area(correct, uncertainty).item(), abs=1e-6)
    assert curve[0][-1] == 1
    assert curve[1][-1].item() == pytest.approx(correct.float().mean().item())


def test_accuracy_retained_of_perfect_constant_and_inverted_uncertainty():
    correct = torch.tensor([True] * 60 + [False] * 40)
    perfect = F.accuracy_retained_curve(correct, torch.arange(100.0))
    assert (perfect[1][:60] == 1).all()
    constant = F.accuracy_retained_area(correct, torch.zeros(100))
    best, worst = (F.accuracy_retained_area(correct, sign * torch.arange(100.0)) for sign in (1, -1))
    assert constant.item() == pytest.approx(0.6)
    assert best > constant > worst


def test_reliability_ece_is_that_of_torchmetrics():
    probs, target = draw((3000, 7)), targets(3000, 7)
    for bins in (1, 15, 100):
        expected = tm.classification.multiclass_calibration_error(probs, target, num_classes=7, n_bins=bins)
        assert F.reliability(probs, target, bins).ece.item() == pytest.approx(expected.item(), rel=1e-6)


def test_reliability_bins_hold_what_lies_in_them():
    probs, target = draw((500, 4)), targets(500, 4)
    diagram = F.reliability(probs, target, bins=8)
    confidence, predicted = probs.max(1)
    for b in range(8):
        inside = (confidence >= b / 8) & (confidence < (b + 1) / 8)
        assert diagram.counts[b] == inside.sum()
        assert torch.allclose(diagram.confidence[b], confidence[inside].mean(), equal_nan=True)
        assert torch.allclose(diagram.accuracy[b], (predicted == target)[inside].float().mean(), equal_nan=True)
    certain = F.reliability(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), bins=8)
    assert certain.counts.tolist() == [0] * 7 + [1]
    assert certain.ece == 0


def calibrated(blocks=12, each=20):
    """Block b predicts the confidence (11 + b)/24, of which that share is correct exactly."""
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


def test_one_bin_gives_the_difference_of_accuracy_and_confidence():
    probs, target = draw((77, 5)), targets(77, 5)
    expected = ((probs.argmax(1) == target).double().mean() - probs.max(1).values.mean()).abs().item()
    assert F.adaptive_calibration_error(probs, target, bins=1).item() == pytest.approx(expected, rel=1e-6)
    assert F.reliability(probs, target, bins=1).ece.item() == pytest.approx(expected, rel=1e-6)


def test_fairness():
    accuracies = torch.tensor([0.9, 0.2, 0.5, 0.7])
    assert F.weighted_accuracy(accuracies, torch.tensor([1, 2, 3, 4])).item() == pytest.approx(0.56)
    assert F.weighted_accuracy(accuracies, torch.ones(4)) == F.worst_fraction_accuracy(accuracies, 1.0)
    assert F.worst_fraction_accuracy(accuracies).item() == pytest.approx(0.2)
    assert F.worst_fraction_accuracy(accuracies, 0.3).item() == pytest.approx(0.35)
    assert F.worst_fraction_accuracy(torch.arange(30.0), 0.1) == 1  # three clients, not four


BATCH, SAMPLES = torch.full((3, 2), 0.5), torch.full((4, 3, 2), 0.5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: F.predictive_entropy(BATCH), r"\(3, 2\).*\(samples, batch, classes\).*unsqueeze"),
        (lambda: F.mutual_information(torch.ones(4, 3, 1)), "at least 2 classes"),
        (lambda: F.brier_score(SAMPLES, torch.zeros(3).long()), r"\(4, 3, 2\).*\(batch, classes\).*probs.mean"),
        (lambda: F.brier_score(BATCH, torch.zeros(2).long()), r"\(2,\).*one integer class"),
        (lambda: F.negative_log_likelihood(BATCH, torch.zeros(3)), "float32.*one integer class"),
        (lambda: F.gaussian_nll(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3)), r"target \(3,\).*equal"),
        (lambda: F.ensemble_crps(torch.zeros(1, 3), torch.zeros(3)), "at least 2 samples"),
        (lambda: F.ensemble_crps(torch.zeros(5, 3, 1), torch.zeros(3)), r"samples_but_first \(3, 1\)"),
        (lambda: F.interval_coverage(torch.zeros(1), torch.ones(1), torch.zeros(1), 95), "level is 95"),
        (lambda: F.determinant_sharpness(torch.ones(3)), r"\(\*, d, d\).*diag_embed"),
        (lambda: F.determinant_sharpness(torch.diag(torch.tensor([1.0, -1.0]))), "1 of 1.*negative determinant"),
        (lambda: F.adaptive_calibration_error(BATCH, torch.zeros(3).long(), bins=0), "bins is 0"),
        (lambda: F.accuracy_retained_curve(torch.ones(3), torch.ones(2)), "uncertainty"),
        (lambda: F.accuracy_retained_area(torch.ones(3, 1), torch.ones(3, 1)), "a vector"),
        (lambda: F.worst_fraction_accuracy(torch.ones(3), 0.0), "fraction is 0"),
    ],
)
def test_errors_name_the_shape_and_the_remedy(call, says):
    with pytest.raises(FedBayesError, match=says):
        call()


@pytest.mark.parametrize("score", [F.gaussian_nll, F.gaussian_crps, F.interval_coverage])
def test_a_negative_variance_is_refused(score):
    with pytest.raises(FedBayesError, match=r"variance is negative at 1 of 3 entries \(minimum -1\)"):
        score(torch.zeros(3), torch.tensor([1.0, -1.0, 0.5]), torch.zeros(3))
