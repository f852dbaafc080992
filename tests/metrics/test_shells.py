"""Metric shells: batches, resets, forward and merged processes give the value of the pure function on all data."""

import pickle

import pytest
import torch

from lightning_fedbayes import metrics as M
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F
from tests.refusals import refusals

BATCH, CLASSES, SAMPLES = 90, 5, 4
generator = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(SAMPLES, BATCH, CLASSES, generator=generator)
PROBS = LOGITS.softmax(-1)
MEAN_PROBS = PROBS.mean(0)
TARGET = torch.randint(CLASSES, (BATCH,), generator=generator)
CORRECT = MEAN_PROBS.argmax(1) == TARGET
ENTROPY = F.predictive_entropy(PROBS)
MU, Y = torch.randn(2, BATCH, generator=generator)
VARIANCE = torch.rand(BATCH, generator=generator) + 0.1
FACTOR = torch.randn(BATCH, 3, 3, generator=generator)
COVARIANCE = FACTOR @ FACTOR.mT + 0.1 * torch.eye(3)


def example_slices(inputs, part):
    """The examples ``part`` of tensors whose examples are in dimension 1 (sampled) or 0."""
    return tuple(x[:, part] if x is PROBS else x[part] for x in inputs)


EVENT = torch.rand(BATCH, generator=generator) < 0.5
RISK, TIME = torch.randint(8, (2, BATCH), generator=generator).float()
KEEPING = {"concordance": (M.ConcordanceIndex, (RISK, TIME, EVENT), F.concordance_index)}
"""Metrics that keep all examples."""
CASES = {
    "predictive_entropy": (M.PredictiveEntropy, (PROBS,), lambda *a: F.predictive_entropy(*a).mean()),
    "aleatoric": (M.KwonAleatoric, (PROBS,), lambda *a: F.kwon_aleatoric(*a).mean()),
    "epistemic": (M.KwonEpistemic, (PROBS,), lambda *a: F.kwon_epistemic(*a).mean()),
    "mutual_information": (M.MutualInformation, (PROBS,), lambda *a: F.mutual_information(*a).mean()),
    "brier": (M.BrierScore, (MEAN_PROBS, TARGET), lambda *a: F.brier_score(*a).mean()),
    "nll": (M.NegativeLogLikelihood, (MEAN_PROBS, TARGET), lambda *a: F.negative_log_likelihood(*a).mean()),
    "adaptive": (
        lambda: M.AdaptiveCalibrationError(bins=10, resolution=1_000_000),
        (MEAN_PROBS, TARGET),
        lambda *a: F.adaptive_calibration_error(*a, bins=10),
    ),
    "gaussian_nll": (M.GaussianNLL, (MU, VARIANCE, Y), lambda *a: F.gaussian_nll(*a).mean()),
    "gaussian_crps": (M.GaussianCRPS, (MU, VARIANCE, Y), lambda *a: F.gaussian_crps(*a).mean()),
    "sharpness": (M.DeterminantSharpness, (COVARIANCE,), lambda *a: F.determinant_sharpness(*a).mean()),
    "coverage": (
        lambda: M.IntervalCoverage(0.5),
        (MU, VARIANCE, Y),
        lambda *a: F.interval_coverage(*a, level=0.5).mean(),
    ),
    "calibration": (
        lambda: M.CalibrationDiagram(10),
        (MEAN_PROBS, TARGET),
        lambda *a: F.calibration_diagram(*a, bins=10),
    ),
    "retained": (lambda: M.AccuracyRetained(1_000_000), (CORRECT, ENTROPY), F.accuracy_retained),
}
every_metric = pytest.mark.parametrize(
    ("build", "inputs", "function"), [*CASES.values(), *KEEPING.values()], ids=[*CASES, *KEEPING]
)


def assert_equal(value, expected):
    pair = (tuple(each) if isinstance(each, tuple) else each for each in (value, expected))
    torch.testing.assert_close(*pair, equal_nan=True, check_dtype=False)


@every_metric
def test_batches_of_any_size_forward_resets_and_merged_processes_give_the_value_on_all_data(build, inputs, function):
    metric, first, second = build(), build(), build()
    for part in (slice(0, 1), slice(1, 50)):
        metric.update(*example_slices(inputs, part))
    last = example_slices(inputs, slice(50, BATCH))
    assert_equal(metric(*last), function(*last))
    assert_equal(metric.compute(), function(*inputs))
    metric.reset()
    metric.update(*example_slices(inputs, slice(0, 50)))
    assert_equal(metric.compute(), function(*example_slices(inputs, slice(0, 50))))
    first.update(*example_slices(inputs, slice(0, 50)))
    second.update(*last)
    first.merge_state(second)
    assert_equal(first.compute(), function(*inputs))


@pytest.mark.parametrize(("build", "inputs", "function"), CASES.values(), ids=CASES)
def test_state_is_of_constant_size_and_survives_pickling(build, inputs, function):
    metric = build()
    shapes = {name: value.shape for name, value in metric.metric_state.items()}
    metric.update(*inputs)
    metric.update(*inputs)
    assert {name: value.shape for name, value in metric.metric_state.items()} == shapes
    assert_equal(pickle.loads(pickle.dumps(metric)).compute(), metric.compute())
    assert metric.full_state_update is False


def test_default_resolutions_are_close_to_the_exact_values():
    number = 20_000
    probs = (2 * torch.randn(number, 10, generator=generator)).softmax(1)
    target = torch.distributions.Categorical(probs=probs**0.7).sample()
    adaptive = M.AdaptiveCalibrationError()
    adaptive.update(probs, target)
    assert adaptive.compute().item() == pytest.approx(F.adaptive_calibration_error(probs, target).item(), abs=1e-4)
    correct, tiny = probs.argmax(1) == target, 1e-4 * F.predictive_entropy(probs.unsqueeze(0))
    metric = M.AccuracyRetained()
    metric.update(correct, tiny)
    assert metric.compute().area.item() == pytest.approx(F.accuracy_retained(correct, tiny).area.item(), abs=5e-3)


test_errors = refusals(
    FedBayesError,
    (lambda: M.AccuracyRetained().update(CORRECT, ENTROPY + 1), "must lie in .0, 1.*normalise"),
)
