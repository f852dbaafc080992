"""Accuracy when the most uncertain examples are left to someone else."""

from __future__ import annotations

from torch import Tensor
from torch.special import digamma

from lightning_fedbayes.metrics.functional.checks import check_vectors
from lightning_fedbayes.metrics.functional.groups import sum_by_value


def accuracy_retained_curve(correct: Tensor, uncertainty: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy of the least uncertain examples against the fraction of examples retained.

    A useful uncertainty gives a curve that falls from 1 to the plain accuracy; a useless one gives a level line.
    Examples of equal uncertainty are retained or discarded together, so the order of the data does not matter.

    Args:
        correct: whether each example was classified correctly, shape (batch,).
        uncertainty: any measure of uncertainty, shape (batch,).

    Returns: fractions retained (ascending, the last is 1) and accuracies, one entry per distinct uncertainty.

    Source: Filos et al. (2019); Federated Bayesian deep learning (2024) Figs. 2, 4, 6 and 7.

    >>> import torch
    >>> accuracy_retained_curve(torch.tensor([1, 0, 1, 0]), torch.tensor([0.1, 0.5, 0.2, 0.5]))
    (tensor([0.2500, 0.5000, 1.0000]), tensor([1.0000, 1.0000, 0.5000]))
    """
    check_vectors(correct=correct, uncertainty=uncertainty)
    fractions, accuracy = curve_of_groups(*sum_by_value(uncertainty, correct))
    return fractions.float().to(correct.device), accuracy.float().to(correct.device)


def accuracy_retained_area(correct: Tensor, uncertainty: Tensor) -> Tensor:
    r"""Mean accuracy over all retained numbers, :math:`\frac1N \sum_{n=1}^N \mathrm{acc}(n)`: 1 − AURC.

    acc(n) is the accuracy of the n least uncertain examples, where of equally uncertain ones a random part is retained
    (in expectation, in closed form). Use it to compare measures of uncertainty of one model; across models
    it also rewards plain accuracy.

    Args:
        correct: whether each example was classified correctly, shape (batch,).
        uncertainty: any measure of uncertainty, shape (batch,).

    Returns: a scalar in [0, 1].

    Source: Geifman, Uziel and El-Yaniv (2019), the area under the risk–coverage curve.

    >>> import torch
    >>> accuracy_retained_area(torch.tensor([1, 0]), torch.tensor([0.1, 0.5]))  # (1 + 1/2) / 2
    tensor(0.7500)
    """
    check_vectors(correct=correct, uncertainty=uncertainty)
    return area_of_groups(*sum_by_value(uncertainty, correct)).float().to(correct.device)


def curve_of_groups(counts: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """Fractions and accuracies at the ends of groups of equally uncertain examples, most certain first.

    Args:
        counts: examples in each group, float64, shape (groups,); empty groups are skipped.
        hits: correct ones among them, shape (groups,).
    """
    counts, hits = counts[counts > 0], hits[counts > 0]
    return counts.cumsum(0) / counts.sum(), hits.cumsum(0) / counts.cumsum(0)


def area_of_groups(counts: Tensor, hits: Tensor) -> Tensor:
    """Mean of acc(n) over n = 1..N, for the groups of :func:`curve_of_groups`.

    Within a group of accuracy a that starts after n₀ examples with c₀ correct, acc(n) = a + (c₀ − n₀a)/n; the sum of
    1/n over the group is a difference of digamma functions.
    """
    counts, hits = counts[counts > 0], hits[counts > 0]
    before, hits_before = counts.cumsum(0) - counts, hits.cumsum(0) - hits
    accuracy = hits / counts
    harmonic = digamma(before + counts + 1) - digamma(before + 1)
    return (counts * accuracy + (hits_before - before * accuracy) * harmonic).sum() / counts.sum()
