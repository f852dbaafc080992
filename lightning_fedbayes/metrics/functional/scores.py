"""Scores of predictive distributions and of risks, calibration, and fairness over clients."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_number, shown
from lightning_fedbayes.metrics.functional import utilities

Vector = Tensor | Sequence[float]

PAIRS = 2**24
"""Most pairs of examples that are compared at once."""


def negative_log_likelihood(probs: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood of each example, :math:`-\log \bar p_y`, in nats.

    A probability below the smallest normal number of its dtype counts as that number: 87 nats in float32.

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,), as of the result. Its mean is the score.

    >>> negative_log_likelihood(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([ 0.6931, 87.3365])
    """
    probs = utilities.check_predictive(probs, target)
    chosen = probs.gather(1, utilities.class_indices(probs, target)).squeeze(1)
    return -chosen.clamp_min(torch.finfo(probs.dtype).tiny).log()


def brier_score(probs: Tensor, target: Tensor) -> Tensor:
    r"""Brier score of each example, :math:`\sum_c (\bar p_c - [c = y])^2`, from 0 (best) to 2. Source: Brier (1950).

    Unlike the log-likelihood it is bounded, so a few confident errors do not dominate it. Arguments and shapes as for
    :func:`negative_log_likelihood`.

    >>> brier_score(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.5000, 2.0000])
    """
    probs = utilities.check_predictive(probs, target)
    truth = utilities.class_indices(probs, target)
    return probs.scatter_add(1, truth, -torch.ones_like(truth, dtype=probs.dtype)).square().sum(1)


def gaussian_nll(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood, :math:`\tfrac12 \log 2\pi\sigma^2 + (y - \mu)^2 / 2\sigma^2`, in nats.

    A variance below the smallest normal number of its dtype counts as that number.

    Args:
        mean, variance, target: predictive mean μ, variance σ² (noise included) and y, all of one shape, as of the
            result. Its mean is the score. Other shapes and a negative variance raise FedBayesError.

    >>> gaussian_nll(torch.zeros(1), torch.ones(1), torch.zeros(1))
    tensor([0.9189])
    """
    utilities.check_gaussian(mean, variance, target)
    variance = utilities.at_least_float32(variance)
    variance = variance.clamp_min(torch.finfo(variance.dtype).tiny)
    return 0.5 * ((2 * math.pi * variance).log() + (target - mean) ** 2 / variance)


def gaussian_crps(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    r"""Continuous ranked probability score, :math:`\int (\Phi(\tfrac{x-\mu}{\sigma}) - [x \ge y])^2 dx`, closed form.

    .. math:: \sigma \left( z (2\Phi(z) - 1) + 2\varphi(z) - 1/\sqrt\pi \right), \quad z = (y - \mu) / \sigma

    In the units of the target; |y − μ| for a point forecast (σ = 0). It punishes outliers less than the likelihood.

    Arguments and shapes as for :func:`gaussian_nll`. Source: Gneiting and Raftery (2007) eq. (21), of opposite sign.

    >>> gaussian_crps(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, -3.0]))
    tensor([0.2337, 3.0000])
    """
    utilities.check_gaussian(mean, variance, target)
    error, deviation = utilities.at_least_float32(target - mean), utilities.at_least_float32(variance).sqrt()
    z = error / deviation.clamp_min(torch.finfo(deviation.dtype).tiny)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return error * torch.erf(z / math.sqrt(2)) + deviation * (2 * density - 1 / math.sqrt(math.pi))


def interval_coverage(mean: Tensor, variance: Tensor, target: Tensor, level: float = 0.95) -> Tensor:
    r"""Return 1 where the target is in the central interval of probability ``level``, :math:`|y - \mu| \le z\,\sigma`.

    Otherwise 0. Compare the share of ones with ``level``, in (0, 1): a smaller share means overconfident. Other
    arguments and shapes as for :func:`gaussian_nll`.

    >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([1.9, 2.0]))
    tensor([1., 0.])
    """
    check_number("level", level, "(0, 1)", error=FedBayesError, why="it is the probability of an interval")
    utilities.check_gaussian(mean, variance, target)
    variance = utilities.at_least_float32(variance)
    half_width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item() * variance.sqrt()
    return ((target - mean).abs() <= half_width).to(variance.dtype)


def determinant_sharpness(covariance: Tensor) -> Tensor:
    r"""Determinant sharpness :math:`\det(\Sigma)^{1/2d}`: the geometric mean of the predictive standard deviations.

    It measures how concentrated predictions are, right or wrong: compare it only among calibrated ones. For one target
    (d = 1) it is the standard deviation. Pass ``variance[..., None, None]``.

    Args:
        covariance: predictive covariance Σ of d targets, shape (*, d, d), positive semidefinite, else FedBayesError.

    Returns: shape (*), in the units of the targets. Its mean is the score. Source: [FedAG] eq. (8).

    >>> determinant_sharpness(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))  # √(2 · 3)
    tensor(2.4495)
    """
    utilities.check_numbers(covariance=covariance)
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2]:
        remedy = "give (*, d, d); for variances of independent targets pass variance.diag_embed()"
        raise FedBayesError(f"covariance has shape {tuple(covariance.shape)}: {remedy}")
    sign, logarithm = torch.linalg.slogdet(utilities.at_least_float32(covariance))
    if (sign < 0).any():
        wrong = f"{int((sign < 0).sum())} of {sign.numel()} covariances"
        raise FedBayesError(f"{wrong} have a negative determinant; give positive semidefinite matrices")
    return (logarithm / (2 * covariance.shape[-1])).exp()


class CalibrationBins(NamedTuple):
    """Data of a calibration diagram, by bin: mean confidence and accuracy, NaN in empty bins, and counts. The ECE."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor
    ece: Tensor


def calibration_diagram(probs: Tensor, target: Tensor, bins: int = 15) -> CalibrationBins:
    r"""Calibration diagram: confidence, accuracy and number of examples of B bins of equal width, and their ECE.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|

    It is also called a reliability diagram. Confidence is the largest probability. Source: Guo et al. (2017).

    Args:
        probs: mean predictive, shape (batch, classes).
        target: class of each example, integers, shape (batch,).
        bins: number of bins B.

    >>> diagram = calibration_diagram(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]), bins=2)
    >>> diagram.accuracy, diagram.ece
    (tensor([   nan, 0.5000]), tensor(0.3500))
    """
    return calibration_of_sums(*calibration_sums(probs, target, bins))


def calibration_sums(probs: Tensor, target: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per bin, the number of examples, the sum of their confidences and the number of correct ones."""
    check_at_least("bins", bins, 1, error=FedBayesError)
    probs = utilities.check_predictive(probs, target)
    confidence, predicted = probs.max(1)
    index = (confidence * bins).long().clamp(0, bins - 1)
    counts, confidences, hits = utilities.sum_by_index(index, bins, confidence, (predicted == target).to(probs.dtype))
    return counts.long(), confidences, hits.long()


def calibration_of_sums(counts: Tensor, confidences: Tensor, hits: Tensor) -> CalibrationBins:
    """Return the diagram from the sums of :func:`calibration_sums`."""
    ece = (hits - confidences).abs().sum() / counts.sum()
    return CalibrationBins(confidences / counts, hits / counts, counts, ece)


def adaptive_calibration_error(probs: Tensor, target: Tensor, bins: int = 15) -> Tensor:
    r"""Adaptive ECE, :math:`\sum_b \frac1B |\mathrm{acc}_b - \mathrm{conf}_b|` over B bins with N/B examples each.

    Bins of equal mass are fine where the examples are. A boundary among examples of equal confidence gives each bin its
    share of their mean accuracy. A scalar in [0, 1]. Arguments of :func:`calibration_diagram`.
    Source: Nguyen and O'Connor (2015); Mukhoti et al. (2020), "AdaECE".

    >>> adaptive_calibration_error(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([0, 1]))
    tensor(0.)
    """
    check_at_least("bins", bins, 1, error=FedBayesError)
    probs = utilities.check_predictive(probs, target)
    confidence, predicted = probs.max(1)
    counts, confidences, hits = utilities.sum_by_value(confidence, confidence, predicted == target)
    return equal_mass_error(counts, confidences, hits, bins).float().to(probs.device)


def equal_mass_error(counts: Tensor, confidences: Tensor, hits: Tensor, bins: int) -> Tensor:
    """Return the adaptive ECE of groups of examples in ascending order of confidence, shape (groups,), float64."""
    gap = (hits - confidences)[counts > 0]
    mass = counts[counts > 0].cumsum(0)
    edges = torch.linspace(0, 1, bins + 1, dtype=mass.dtype) * mass[-1]
    x, y = (torch.cat([mass.new_zeros(1), each]) for each in (mass, gap.cumsum(0)))
    right = torch.searchsorted(x, edges).clamp(1, len(x) - 1)  # and between the points linearly
    between = torch.lerp(y[right - 1], y[right], (edges - x[right - 1]) / (x[right] - x[right - 1]))
    return between.diff().abs().sum() / mass[-1]


def weighted_accuracy(accuracies: Vector, weights: Vector) -> Tensor:
    r"""Average accuracy over clients, :math:`\sum_k \omega_k \mathrm{Acc}_k`, a scalar: utilitarian fairness.

    Args:
        accuracies: accuracy of each client, shape (clients,). A client without test examples (NaN) does not count.
        weights: weight of each client, non-negative, shape (clients,). The source takes numbers of training examples.

    Source: [BA-BFL] §4, Acc_avg.

    >>> weighted_accuracy(torch.tensor([0.5, 1.0, torch.nan]), torch.tensor([3, 1, 6]))
    tensor(0.6250)
    """
    accuracies, weights = as_floats(accuracies), as_floats(weights)
    utilities.check_vectors(accuracies=accuracies, weights=weights)
    known = ~accuracies.isnan()
    return (accuracies[known] * weights[known]).sum() / weights[known].sum()


def worst_fraction_accuracy(accuracies: Vector, fraction: float = 0.1) -> Tensor:
    """Mean of the worst ⌈fraction·K⌉ accuracies of clients, a scalar: egalitarian fairness.

    ``accuracies`` as for :func:`weighted_accuracy`. ``fraction`` in (0, 1], where 1 gives the plain mean.
    Source: [BA-BFL] §4, worst 10% accuracies.

    >>> worst_fraction_accuracy(torch.tensor([0.9, 0.4, 0.6, 0.8]), fraction=0.5)
    tensor(0.5000)
    """
    check_number("fraction", fraction, "(0, 1]", error=FedBayesError)
    accuracies = as_floats(accuracies)
    utilities.check_vectors(accuracies=accuracies)
    known = accuracies[~accuracies.isnan()]
    # 0.1 · 30 is a little more than 3 in floating point, but means 3 clients
    return known.sort().values[: math.ceil(fraction * len(known) - 1e-9)].mean()


def as_floats(values: Vector) -> Tensor:
    """Return a list or a tensor of any numbers as a floating-point tensor."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # what torch raises for other values
        raise FedBayesError(f"{shown(values)} cannot be read as numbers: give one per client") from None
    utilities.check_numbers(values=tensor)
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def concordance_index(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    r"""Harrell's c: share of comparable pairs in which the example with the earlier event has the higher risk.

    .. math:: c = \frac{\sum_{(i, j) \in P} [r_i > r_j] + \tfrac12 [r_i = r_j]}{|P|}, \qquad
              P = \{(i, j): e_i = 1,\ t_i < t_j \text{ or } (t_i = t_j,\ e_j = 0)\}

    A pair is comparable if it is known which event came first: an example that is censored at the time of another event
    outlived it. Two events at one time are not comparable. Equal risks count half. 1 is a perfect order, 0.5 is chance.
    Use it for the discrimination of a survival model, not for calibration.

    Args:
        risk: predicted risk, higher for an earlier event, any unit, not NaN, such as the log risk of a Cox model or
            minus a predicted time, shape (batch,).
        time: observed time to the event or to censoring, any unit, at least 0, shape (batch,).
        event: 1 (or True) where the event was observed, 0 where the example was censored, shape (batch,).

    Raises: FedBayesError if shapes differ, there are no examples, or values are outside of these ranges.
    Returns: a scalar in [0, 1]. NaN if no pair is comparable. Source: Harrell et al. (1982).

    >>> concordance_index(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]))
    tensor(0.6667)
    """
    happened = check_survival(time, event, risk=risk)
    if bool(risk.isnan().any()):
        where = f"{int(risk.isnan().sum())} of {risk.numel()} entries"
        raise FedBayesError(f"risk is NaN at {where}: correct these predictions, or leave the examples out")
    halves = pairs = happened.new_zeros((), dtype=torch.int64)
    for index in happened.nonzero().split(max(1, PAIRS // len(time))):
        outlived = (time[index] < time) | ((time[index] == time) & ~happened)
        pairs = pairs + outlived.sum()
        halves = halves + 2 * (outlived & (risk[index] > risk)).sum() + (outlived & (risk[index] == risk)).sum()
    return halves / (2 * pairs)


def cox_loss(log_risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    r"""Negative log partial likelihood of the Cox model per event, in nats.

    .. math:: -\frac{1}{\sum_i e_i} \sum_{i: e_i = 1} \Bigl( h_i - \log \sum_{j: t_j \ge t_i} e^{h_j} \Bigr)

    for the hazard :math:`\lambda_0(t) e^{h_i}` with any baseline :math:`\lambda_0`. The risk set of an event is all
    examples of the batch that are observed at least until then, with equal times included (Breslow's method for ties).
    Use it to train on censored times to an event, in batches as large as memory allows.

    Args:
        log_risk: log of the relative hazard h, shape (batch,).
        time, event: as for :func:`concordance_index`.

    Returns: a scalar, at least 0. 0 with gradients of 0 if no event was observed.
    Source: Cox (1972); Breslow (1974); FLamby: Ogier du Terrail et al. (2022).

    >>> cox_loss(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 0]))  # log 3
    tensor(1.0986)
    """
    happened = check_survival(time, event, log_risk=log_risk)
    return cox_terms(log_risk, time, happened)[0].sum() / happened.sum().clamp_min(1)


def cox_terms(log_risk: Tensor, time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
    """Return each example's term of :func:`cox_loss`, last time first, and the examples' order. ``vmap`` can map it."""
    order = time.argsort(descending=True)
    log_risk, time, event = utilities.at_least_float32(log_risk)[order], time.double()[order], event[order]
    last_of_equal_time = torch.searchsorted(-time, -time, right=True) - 1
    log_risk_set = log_risk.logcumsumexp(0)[last_of_equal_time]
    return torch.where(event != 0, log_risk_set - log_risk, 0), order


def check_survival(time: Tensor, event: Tensor, **predicted: Tensor) -> Tensor:
    """Return ``event`` as bool. Raise FedBayesError unless it is 0 or 1 and ``time`` finite and at least 0."""
    utilities.check_vectors(**predicted, time=time, event=event)
    if not len(time):
        raise FedBayesError("time and event have no entries, but at least one example is needed; skip an empty batch")
    late = "drop those examples, or censor them at the last time known"
    swapped = "give 1 where the event was observed and 0 where it was censored (swapped with time?)"
    for name, values, wrong, what, remedy in (
        ("time", time, ~(time.isfinite() & (time >= 0)), "not finite or negative", late),
        ("event", event, (event != 0) & (event != 1), "neither 0 nor 1", swapped),
    ):
        if bool(wrong.any()):
            given = f"{name} holds {values[wrong][0].item():.6g} among {int(wrong.sum())} of {len(values)} entries"
            raise FedBayesError(f"{given} that are {what}; {remedy}")
    return event != 0
