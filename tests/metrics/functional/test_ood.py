"""Detection of out-of-distribution examples against scikit-learn, closed forms and invariances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F

TWO = torch.tensor([0.1, 0.2])
sides = st.lists(st.integers(-4, 4), min_size=1, max_size=30).map(lambda values: torch.tensor(values).double())
"""Uncertainties with many ties."""


def labelled(inside, outside):
    return torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]), torch.cat([inside, outside])


@given(sides, sides)
@settings(deadline=None)
def test_auroc_is_scikit_learns(inside, outside):
    assert F.ood_auroc(inside, outside).item() == pytest.approx(roc_auc_score(*labelled(inside, outside)), abs=1e-6)


@given(sides, sides, st.sampled_from([0.05, 0.5, 0.8, 0.95, 1.0]))
@settings(deadline=None)
def test_fpr_is_that_of_scikit_learns_first_point_that_reaches_the_recall(inside, outside, recall):
    fpr, tpr, _ = roc_curve(*labelled(inside, outside), drop_intermediate=False)
    expected = fpr[(tpr >= recall - 1e-12).argmax()]
    assert F.ood_fpr(inside, outside, recall).item() == pytest.approx(expected, abs=1e-6)


@given(sides, sides)
@settings(deadline=None)
def test_only_the_order_counts(inside, outside):
    """A monotone map changes nothing, one that turns the order round swaps the sides."""
    for change in (torch.exp, lambda u: u**3 - 7, lambda u: 1e6 * u):
        assert F.ood_auroc(change(inside), change(outside)) == F.ood_auroc(inside, outside)
        assert F.ood_fpr(change(inside), change(outside)) == F.ood_fpr(inside, outside)
    assert F.ood_auroc(-inside, -outside).item() == pytest.approx(F.ood_auroc(outside, inside).item(), abs=1e-6)
    swapped = F.ood_auroc(outside, inside)
    assert (F.ood_auroc(inside, outside) + swapped).item() == pytest.approx(1, abs=1e-6)
    assert F.ood_auroc(inside.repeat(3), outside.flip(0)).item() == pytest.approx(F.ood_auroc(inside, outside).item())


@pytest.mark.parametrize("distance", [0.0, 0.5, 1.5, 3.0])
def test_two_normals(distance):
    r"""AUROC is :math:`\Phi(d/\sqrt2)`; the false-positive rate at recall r is :math:`\Phi(\Phi^{-1}(r) - d)`."""
    quantiles = torch.from_numpy(norm.ppf((torch.arange(4000).double() + 0.5).numpy() / 4000))
    inside, outside = quantiles, quantiles + distance
    assert F.ood_auroc(inside, outside).item() == pytest.approx(norm.cdf(distance / math.sqrt(2)), abs=1e-3)
    for recall in (0.5, 0.95):
        expected = norm.cdf(norm.ppf(recall) - distance)
        assert F.ood_fpr(inside, outside, recall).item() == pytest.approx(expected, abs=1e-3)


def test_extremes_and_ties():
    inside, outside = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, torch.inf])
    assert (F.ood_auroc(inside, outside), F.ood_fpr(inside, outside)) == (1, 0)
    assert (F.ood_auroc(outside, inside), F.ood_fpr(outside, inside)) == (0, 1)
    same = torch.zeros(5)
    assert (F.ood_auroc(same, same), F.ood_fpr(same, same)) == (0.5, 1)  # all are called so, or none is


@pytest.mark.parametrize("examples", [20, 100, 140, 1000])
def test_recall_is_reached_without_one_example_too_many(examples):
    """0.95 · n examples, though the product may be a little more in floating point."""
    outside = torch.arange(examples).double()
    threshold = examples - round(0.95 * examples)
    inside = outside.repeat_interleave(2)
    assert F.ood_fpr(inside, outside).item() == pytest.approx((examples - threshold) / examples)


@pytest.mark.parametrize("function", [F.ood_auroc, F.ood_fpr])
@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        (TWO, torch.ones(2, 1), r"uncertainty_out has shape \(2, 1\).*flatten"),
        (torch.ones(0), TWO, r"uncertainty_in has shape \(0,\).*at least one"),
        (TWO, torch.tensor([0.1, torch.nan]), "uncertainty_out is NaN at 1 of 2"),
        ([0.1], TWO, "uncertainty_in=.*give a torch.Tensor"),
    ],
)
def test_errors(function, inside, outside, says):
    with pytest.raises(FedBayesError, match=says):
        function(inside, outside)
