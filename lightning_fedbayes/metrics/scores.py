"""Bases of metrics. Scores of predictive distributions and risks, calibration, and the accuracy of every client."""

from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_number
from lightning_fedbayes.metrics.functional import scores
from lightning_fedbayes.metrics.functional.scores import check_survival, concordance_index, cox_loss


class Plain(Metric):
    """A metric without gradients, which adds up batch by batch."""

    full_state_update = False
    is_differentiable = False


class ExampleMean(Plain):
    """Mean over all examples of one value per example. A subclass passes the values to :meth:`add` in ``update``.

    Batches and processes of any size combine exactly. The state's ``name`` is by default the class's: a
    MetricCollection takes two metrics for one if their states have equal names and values.
    """

    count: Tensor

    def __init__(self, name: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total_name = f"{name or type(self).__name__}_total"
        self.add_state(self.total_name, torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add the values of some examples, any shape."""
        setattr(self, self.total_name, getattr(self, self.total_name) + values.detach().sum())
        self.count = self.count + values.numel()

    def compute(self) -> Tensor:
        """Return the mean so far."""
        return getattr(self, self.total_name) / self.count


class ExampleLoss(ExampleMean):
    """Mean of a value of which less is better."""

    higher_is_better = False


class HitCounts(Plain):
    """Numbers of examples and of correct ones in ``groups`` groups. Kwargs are arguments of torchmetrics.Metric."""

    counts: Tensor
    hits: Tensor

    def __init__(self, groups: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("hits", torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")

    def add(self, counts: Tensor, hits: Tensor) -> None:
        """Add counts of examples and of correct ones, shape (groups,)."""
        self.counts = self.counts + counts
        self.hits = self.hits + hits


class BrierScore(ExampleLoss):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.brier_score`, from 0 (best) to 2."""

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(scores.brier_score(probs, target))


class NegativeLogLikelihood(ExampleLoss):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.negative_log_likelihood`, in nats."""

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add mean predictives, shape (batch, classes), and classes, shape (batch,)."""
        self.add(scores.negative_log_likelihood(probs, target))


class GaussianNLL(ExampleLoss):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_nll`, in nats."""

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(scores.gaussian_nll(mean, variance, target))


class GaussianCRPS(ExampleLoss):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.gaussian_crps`, in the units of the target."""

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(scores.gaussian_crps(mean, variance, target))


class IntervalCoverage(ExampleMean):
    """Share of targets in the central interval (:func:`~lightning_fedbayes.metrics.functional.interval_coverage`).

    Compare it with ``level``, the probability of the interval: a smaller share means overconfident.
    """

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        check_number("level", level, "(0, 1)", error=FedBayesError, why="it is the probability of an interval")
        super().__init__(f"interval_coverage_{level}".replace(".", "_"), **kwargs)
        self.level = level

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Add predictive means, variances (noise included) and targets, all of one shape."""
        self.add(scores.interval_coverage(mean, variance, target, self.level))


class DeterminantSharpness(ExampleLoss):
    """Mean of :func:`~lightning_fedbayes.metrics.functional.determinant_sharpness`, in the units of the targets."""

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
    """Calibration diagram, also called reliability diagram: confidence and accuracy in bins of equal width. ECE.

    ``compute()`` returns :class:`~lightning_fedbayes.metrics.functional.CalibrationBins`. Log its ``ece``. [BA-BFL]
    uses 100 ``bins``, most others 15.

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
    """Calibration error with bins of equal mass, over all batches.

    See :func:`~lightning_fedbayes.metrics.functional.adaptive_calibration_error`. Confidences are kept in a histogram
    of ``resolution`` cells over [0, 1].
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


class SurvivalMetric(Plain):
    """Keep risk, time and event of every example. A subclass implements :meth:`score`."""

    kept: ClassVar = ("risk", "time", "event")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.kept:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, risk: Tensor, time: Tensor, event: Tensor) -> None:
        """Add examples. See :func:`~lightning_fedbayes.metrics.functional.concordance_index`."""
        for name, vector in zip(self.kept, (risk, time, check_survival(time, event, risk=risk)), strict=True):
            getattr(self, name).append(vector.detach())

    def compute(self) -> Tensor:
        """Return the value so far. NaN before the first example."""
        vectors = [getattr(self, name) for name in self.kept]
        if not len(vectors[0]):
            return torch.tensor(torch.nan, device=self.device)
        return self.score(*map(dim_zero_cat, vectors))

    def score(self, risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
        """Return the value of all examples, a scalar."""
        raise NotImplementedError


class ConcordanceIndex(SurvivalMetric):
    """Harrell's c (:func:`~lightning_fedbayes.metrics.functional.concordance_index`) over all batches.

    Pairs of examples of different batches count as well.
    """

    higher_is_better = True

    def score(self, risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
        """Return Harrell's c."""
        return concordance_index(risk, time, event)


class CoxNLL(SurvivalMetric):
    """Negative log partial likelihood per example, with the risk sets of all batches together."""

    higher_is_better = False

    def score(self, risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
        """Return :func:`cox_loss` times the share of events."""
        return cox_loss(risk, time, event) * event.float().mean()
