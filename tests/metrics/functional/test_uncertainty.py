"""Measures of uncertainty against theory and scipy, the accuracy–retained curve against its definition."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F
from tests.metrics.functional.predictions import draw
from tests.refusals import refusals

sampled = st.builds(
    draw, st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(2, 7)), st.integers(0, 10_000), st.floats(0, 30)
)


@given(sampled)
@settings(deadline=None)
def test_kwons_traces_are_those_of_covariances_and_sum_to_that_of_the_label(probs):
    mean = probs.mean(0)
    spread = torch.stack([torch.cov(each.T, correction=0).trace() for each in probs.unbind(1)])
    assert torch.allclose(F.kwon_epistemic(probs), spread, atol=1e-12)
    assert torch.allclose(F.kwon_aleatoric(probs) + spread, (mean * (1 - mean)).sum(1), atol=1e-12)


@given(sampled)
@settings(deadline=None)
def test_mutual_information_is_entropy_lost_by_knowing_the_parameters(probs):
    information = F.mutual_information(probs)
    mean_entropy = F.predictive_entropy(probs.flatten(0, 1).unsqueeze(0)).view(probs.shape[:2]).mean(0)
    lost = (F.predictive_entropy(probs) - mean_entropy) * math.log(probs.shape[2])  # in nats
    assert torch.allclose(information, lost, atol=1e-9)
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


@pytest.mark.parametrize("function", [F.predictive_entropy, F.kwon_aleatoric, F.kwon_epistemic, F.mutual_information])
def test_sample_functions_are_invariant_to_order_and_take_half_floats(function):
    probs = draw((5, 6, 3))
    assert torch.allclose(function(probs), function(probs.flip(0)))
    assert torch.allclose(function(probs), function(probs.flip(2)))
    assert torch.allclose(function(probs).flip(0), function(probs.flip(1)))
    assert function(probs.bfloat16()).dtype == torch.float32


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
    curve = F.accuracy_retained(correct, uncertainty)
    assert all(torch.equal(a, b) for a, b in zip(curve, F.accuracy_retained(*again)))
    assert curve.area.item() == pytest.approx(brute_force_area(correct, uncertainty).item(), abs=1e-6)
    assert curve[0][-1] == 1
    assert curve[1][-1].item() == pytest.approx(correct.float().mean().item())


test_errors_name_the_shape_and_the_remedy = refusals(
    FedBayesError,
    (lambda: F.predictive_entropy(torch.full((3, 2), 0.5)), r"\(3, 2\).*\(samples, batch, classes\).*unsqueeze"),
    (lambda: F.mutual_information(torch.ones(4, 3, 1)), "at least 2 classes"),
    (lambda: F.accuracy_retained(torch.ones(3), torch.ones(2)), "uncertainty"),
    (lambda: F.accuracy_retained(torch.ones(3, 1), torch.ones(3, 1)), "a vector"),
)
