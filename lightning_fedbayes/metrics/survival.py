"""Order of predicted risks against times to an event, over all batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_fedbayes.metrics.functional.survival import check_survival, concordance_index


class SurvivalMetric(Metric):
    """Keep risk, time and event of every example; a subclass implements :meth:`score`.

    The value needs all examples at once, so the state grows by three numbers per example.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False

    risk: list[Tensor]
    time: list[Tensor]
    event: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("risk", "time", "event"):
            self.add_state(name, [], dist_reduce_fx="cat")

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
        self.risk.append(risk.detach())
        self.time.append(time.detach())
        self.event.append(happened)

    def compute(self) -> Tensor:
        """Return the value so far; NaN before the first example."""
        if not len(self.event):
            return torch.tensor(torch.nan, device=self.device)
        return self.score(dim_zero_cat(self.risk), dim_zero_cat(self.time), dim_zero_cat(self.event))

    def score(self, risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
        """Return the value of all examples, a scalar."""
        raise NotImplementedError

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value so far, or the values ``val``, as torchmetrics does: (figure, axes)."""
        return self._plot(val, ax)


class ConcordanceIndex(SurvivalMetric):
    """Harrell's c (:func:`~lightning_fedbayes.metrics.functional.concordance_index`) over all batches.

    Pairs of examples of different batches count as well.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> ConcordanceIndex()(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]))
    tensor(0.6667)
    """

    higher_is_better = True

    def score(self, risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
        """Return Harrell's c."""
        return concordance_index(risk, time, event)
