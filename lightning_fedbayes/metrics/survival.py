"""Scores of predicted risks by times to an event, over all batches."""

from __future__ import annotations

from torch import Tensor

from lightning_fedbayes.metrics.examples import ExampleMetric
from lightning_fedbayes.metrics.functional.survival import check_survival, concordance_index, cox_loss


class SurvivalMetric(ExampleMetric):
    """Keep risk, time and event of every example; a subclass implements :meth:`score`."""

    kept = ("risk", "time", "event")

    def update(self, risk: Tensor, time: Tensor, event: Tensor) -> None:
        """Add examples.

        Args:
            risk: predicted risk, higher for an earlier event, such as the log risk of a Cox model, shape (batch,).
            time: observed time to the event or to censoring, any unit, at least 0, shape (batch,).
            event: 1 (or True) where the event was observed, 0 where the example was censored, shape (batch,).

        Raises:
            FedBayesError: shapes differ, no examples, ``time`` is not finite or negative, ``event`` is not 0 or 1.
        """
        happened = check_survival(time, event, risk=risk)
        self.keep(risk, time, happened)


class ConcordanceIndex(SurvivalMetric):
    """Harrell's c (:func:`~lightning_fedbayes.metrics.functional.concordance_index`) over all batches.

    Pairs of examples of different batches count as well. Arguments are those of :class:`torchmetrics.Metric`.

    >>> import torch
    >>> ConcordanceIndex()(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]))
    tensor(0.6667)
    """

    higher_is_better = True

    def score(self, *vectors: Tensor) -> Tensor:
        """Return Harrell's c."""
        return concordance_index(*vectors)


class CoxNLL(SurvivalMetric):
    """Negative log partial likelihood per example, with the risk sets of all batches together."""

    higher_is_better = False

    def score(self, *vectors: Tensor) -> Tensor:
        """Return :func:`cox_loss` times the share of events."""
        return cox_loss(*vectors) * vectors[2].float().mean()
