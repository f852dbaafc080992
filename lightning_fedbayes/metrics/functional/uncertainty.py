"""Uncertainty of a classifier's predictions: measures of it, and what they are worth.

The total uncertainty is the entropy of the mean predictive, or the variance of the one-hot label. Both split into an
aleatoric part (noise in the label) and an epistemic part (disagreement of the posterior samples).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import digamma, entr

from lightning_fedbayes.metrics.functional import utilities


def predictive_entropy(probs: Tensor) -> Tensor:
    r"""Entropy of the mean predictive, :math:`\tilde H = -\sum_c \bar p_c \log \bar p_c / \log C`.

    The total uncertainty: 0 if one class is certain, 1 if all are equally likely. Source: [FBDL] eq. (8).
    Shapes: class probabilities of each posterior sample (samples, batch, classes), result (batch,).

    >>> predictive_entropy(torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    tensor([1., 0.])
    """
    return entr(utilities.check_samples(probs).mean(0)).sum(-1) / math.log(probs.shape[-1])


def mutual_information(probs: Tensor) -> Tensor:
    r"""Information the label carries about the parameters, :math:`H(\bar p) - \frac1M \sum_m H(p_m) \ge 0`, in nats.

    The epistemic part of the predictive entropy (BALD): 0 if all posterior samples agree.
    Source: Houlsby et al. (2011); Depeweg et al. (2018).
    Shapes: class probabilities of each posterior sample (samples, batch, classes), result (batch,).

    >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # log 2
    tensor([0.6931])
    """
    probs = utilities.check_samples(probs)
    return (entr(probs.mean(0)).sum(-1) - entr(probs).sum(-1).mean(0)).clamp_min(0)


def kwon_aleatoric(probs: Tensor) -> Tensor:
    r"""Noise of the label: the trace of :math:`\frac1M \sum_m \mathrm{diag}(p_m) - p_m p_m^\top`.

    From 0 (every sample certain) to 1 − 1/C. Source: [FBDL] eq. (9), reported as the trace.
    Shapes: class probabilities of each posterior sample (samples, batch, classes), result (batch,).

    >>> kwon_aleatoric(torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    tensor([0.5000, 0.0000])
    """
    probs = utilities.check_samples(probs)
    return (probs * (1 - probs)).sum(-1).mean(0)


def kwon_epistemic(probs: Tensor) -> Tensor:
    r"""Disagreement of samples: the trace of :math:`\frac1M \sum_m (p_m - \bar p)(p_m - \bar p)^\top`.

    0 if all posterior samples agree (always for one sample), at most 1 − 1/C. Source: [FBDL] eq. (9), as the trace.
    Shapes: class probabilities of each posterior sample (samples, batch, classes), result (batch,).

    >>> kwon_epistemic(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.5000])
    """
    probs = utilities.check_samples(probs)
    return (probs - probs.mean(0)).square().sum(-1).mean(0)


class RetainedCurve(NamedTuple):
    """Fractions retained, ascending to 1, and their accuracies, shape (points,) each. Area, a scalar: 1 − AURC."""

    fraction: Tensor
    accuracy: Tensor
    area: Tensor


def accuracy_retained(correct: Tensor, uncertainty: Tensor) -> RetainedCurve:
    r"""Accuracy of the least uncertain examples against the fraction retained; :math:`\frac1N \sum_n \mathrm{acc}(n)`.

    The most uncertain examples are discarded first, equally uncertain ones together. A useful uncertainty gives a curve
    that falls from 1 to the plain accuracy, a useless one a level line. acc(n) is the accuracy of the n least uncertain
    examples, among equally uncertain ones its expectation over a random choice. Use its mean, the area, to compare
    measures of uncertainty of one model. Between models it also rewards plain accuracy.

    Args:
        correct: true where the example was classified correctly, shape (batch,).
        uncertainty: any measure of uncertainty, shape (batch,).

    Returns: one point of the curve per distinct uncertainty.
    Source: Filos et al. (2019); [FBDL] Figs. 2, 4, 6 and 7. Geifman, Uziel and El-Yaniv (2019) for the area.

    >>> curve = accuracy_retained(torch.tensor([1, 0, 1, 0]), torch.tensor([0.1, 0.5, 0.2, 0.5]))
    >>> curve.fraction, curve.accuracy
    (tensor([0.2500, 0.5000, 1.0000]), tensor([1.0000, 1.0000, 0.5000]))
    >>> accuracy_retained(torch.tensor([1, 0]), torch.tensor([0.1, 0.5])).area  # (1 + 1/2) / 2
    tensor(0.7500)
    """
    utilities.check_vectors(correct=correct, uncertainty=uncertainty)
    counts, hits = utilities.sum_by_value(uncertainty, correct)
    return retained_of_groups(counts, hits, correct.device)


def retained_of_groups(counts: Tensor, hits: Tensor, device: torch.device) -> RetainedCurve:
    """Return the curve of groups of equally uncertain examples, (groups,), float64 on the CPU, certain first.

    Within a group of accuracy a that starts after n₀ examples with c₀ correct, acc(n) = a + (c₀ − n₀a)/n. The sum of
    1/n over the group is a difference of digamma functions.
    """
    counts, hits = counts[counts > 0], hits[counts > 0]
    ends, hits_there = counts.cumsum(0), hits.cumsum(0)
    before, hits_before = ends - counts, hits_there - hits
    accuracy = hits / counts
    harmonic = digamma(ends + 1) - digamma(before + 1)
    area = (counts * accuracy + (hits_before - before * accuracy) * harmonic).sum() / counts.sum()
    return RetainedCurve(*(each.float().to(device) for each in (ends / counts.sum(), hits_there / ends, area)))
