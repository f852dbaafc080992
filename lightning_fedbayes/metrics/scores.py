"""Scores of predictive distributions, calibration of a classifier, and the accuracy of every client."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_number, is_whole
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.metrics.examples import ExampleMean, HitCounts
from lightning_fedbayes.metrics.functional import scores
from lightning_fedbayes.metrics.functional.utilities import check_predictive, sum_by_index


class BrierScore(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.brier_score`, from 0 (best) to 2.

    >>> BrierScore()(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.2500)
    """

    higher_is_better = False

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(scores.brier_score(probs, target))


class NegativeLogLikelihood(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.negative_log_likelihood`, in nats.

    >>> NegativeLogLikelihood()(torch.full((3, 10), 0.1), torch.tensor([0, 4, 9]))
    tensor(2.3026)
    """

    higher_is_better = False

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(scores.negative_log_likelihood(probs, target))


class GaussianNLL(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_nll`, in nats.

    >>> GaussianNLL()(torch.zeros(4), torch.ones(4), torch.zeros(4))  # log √2π
    tensor(0.9189)
    """

    higher_is_better = False

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(scores.gaussian_nll(mean, variance, target))


class GaussianCRPS(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_crps`, in the units of the target."""

    higher_is_better = False

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(scores.gaussian_crps(mean, variance, target))


class EnsembleCRPS(ExampleMean):
    """Mean of the fair :func:`~lightning_fedbayes.metrics.functional.ensemble_crps`, in the units of the target."""

    higher_is_better = False

    def update(self, samples: Tensor, target: Tensor) -> None:
        """Add draws from the predictive distribution, shape (samples, *), and targets, shape (*)."""
        self.add(scores.ensemble_crps(samples, target))


class IntervalCoverage(ExampleMean):
    """Share of targets in the central interval (:func:`~lightning_fedbayes.metrics.functional.interval_coverage`).

    Compare it with ``level``, the probability of the interval: a smaller share means overconfident, a larger one
    underconfident. Other arguments are those of :class:`torchmetrics.Metric`.
    """

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        check_number("level", level, "(0, 1)", error=FedBayesError, why="it is the probability of an interval")
        super().__init__(f"interval_coverage_{level}".replace(".", "_"), **kwargs)
        self.level = level

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(scores.interval_coverage(mean, variance, target, self.level))


class DeterminantSharpness(ExampleMean):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.determinant_sharpness`, in the units of the targets."""

    higher_is_better = False

    def update(self, covariance: Tensor) -> None:
        """Add predictive covariances, shape (*, d, d)."""
        self.add(scores.determinant_sharpness(covariance))


class CalibrationSums(HitCounts):
    """Sums of confidences and correct examples in cells of equal width over [0, 1]."""

    higher_is_better = False

    confidences: Tensor

    def __init__(self, cells: int, **kwargs: Any) -> None:
        super().__init__(cells, **kwargs)
        self.cells = cells
        self.add_state("confidences", torch.zeros(cells), dist_reduce_fx="sum")

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        counts, confidences, hits = scores.calibration_sums(probs.detach(), target, self.cells)
        self.add(counts, hits)
        self.confidences = self.confidences + confidences


class CalibrationDiagram(CalibrationSums):
    """Calibration diagram, also called reliability diagram: confidence and accuracy in bins of equal width; ECE.

    ``compute()`` returns :class:`~lightning_fedbayes.metrics.functional.CalibrationBins`; log its ``ece``.

    Args:
        bins: number of bins; [BA-BFL] uses 100, most others 15.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> diagram = CalibrationDiagram(bins=2)
    >>> diagram.update(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    >>> diagram.compute().ece
    tensor(0.3500)
    """

    def __init__(self, bins: int = 15, **kwargs: Any) -> None:
        check_at_least("bins", bins, 1, error=FedBayesError)
        super().__init__(bins, **kwargs)

    def compute(self) -> scores.CalibrationBins:
        """Return the diagram so far."""
        return scores.calibration_of_sums(self.counts, self.confidences, self.hits)

    def plot(self) -> tuple[Figure, Axes]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw the diagram so far: (figure, axes)."""
        figure = plots.calibration_diagram(*self.compute())
        return figure, figure.axes[0]


class AdaptiveCalibrationError(CalibrationSums):
    """Calibration error with bins of equal mass (see the function of the same name), over all batches.

    Confidences are kept in a fine histogram, so the state does not grow with the data. Examples in one cell count as
    equally confident: with 10,000 cells this matters only at the boundary of a bin, for confidences that differ by less
    than 1e-4.

    Args:
        bins: number of bins of equal mass.
        resolution: number of cells of the histogram over [0, 1].
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, bins: int = 15, resolution: int = 10_000, **kwargs: Any) -> None:
        check_at_least("bins", bins, 1, error=FedBayesError)
        check_at_least("resolution", resolution, 1, error=FedBayesError)
        super().__init__(resolution, **kwargs)
        self.bins = bins

    def compute(self) -> Tensor:
        """Return the calibration error so far, a scalar."""
        sums = (sums.cpu().double() for sums in (self.counts, self.confidences, self.hits))
        return scores.equal_mass_error(*sums, bins=self.bins).float().to(self.device)


class ClientAccuracy(HitCounts):
    """Accuracy of each client on its own data. Source: [BA-BFL] §4.

    For fairness, pass ``compute()`` to :func:`~lightning_fedbayes.metrics.functional.weighted_accuracy` and
    :func:`~lightning_fedbayes.metrics.functional.worst_fraction_accuracy`.

    Args:
        clients: number of clients.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> metric = ClientAccuracy(clients=2)
    >>> metric(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    tensor([1., 0.])
    """

    higher_is_better = True

    def __init__(self, clients: int, **kwargs: Any) -> None:
        check_at_least("clients", clients, 1, error=FedBayesError)
        super().__init__(clients, **kwargs)
        self.clients = clients

    def update(self, probs: Tensor, target: Tensor, client: Tensor | int) -> None:
        """Add examples.

        Args:
            probs: mean predictive, shape (batch, classes).
            target: classes, shape (batch,).
            client: number of the client that each example belongs to, shape (batch,), or one for all.
        """
        hit = check_predictive(probs, target).argmax(1) == target
        owner = as_owner(client, hit)
        if hit.numel() and not 0 <= int(owner.min()) <= int(owner.max()) < self.clients:
            raise FedBayesError(
                f"client ranges from {owner.min()} to {owner.max()}, but there are {self.clients} clients, "
                f"numbered from 0; create ClientAccuracy with more clients"
            )
        self.add(*sum_by_index(owner, self.clients, hit.long()))

    def compute(self) -> Tensor:
        """Return the accuracy of each client so far, shape (clients,); NaN for a client without examples."""
        return self.hits / self.counts

    def plot(self, val: Tensor | None = None) -> tuple[Figure, Axes]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw the accuracy of every client so far, or ``val`` of shape (clients,), as bars: (figure, axes)."""
        figure = plots.client_accuracy(self.compute() if val is None else val)
        return figure, figure.axes[0]


def as_owner(client: Any, like: Tensor) -> Tensor:
    """Return the client of each example as a vector like ``like``; raise FedBayesError if it is not a whole number."""
    if is_whole(client):
        check_at_least("client", client, 0, error=FedBayesError)
        return torch.full_like(like, int(client), dtype=torch.int64)
    check_tensor("client", client, error=FedBayesError)
    if client.dtype not in (torch.int64, torch.int32) or client.shape not in ((), like.shape):
        raise FedBayesError(
            f"client has shape {tuple(client.shape)} and dtype {client.dtype}; give one whole number per example, "
            f"shape {tuple(like.shape)}, or one for all"
        )
    return client.to(like.device).expand_as(like)
