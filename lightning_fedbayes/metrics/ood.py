"""Detection of out-of-distribution examples by their uncertainty, over all batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_fedbayes.errors import FedBayesError, check_number
from lightning_fedbayes.metrics.functional.ood import ood_auroc, ood_fpr
from lightning_fedbayes.metrics.functional.utilities import check_not_nan, check_vectors


class OutOfDistributionMetric(Metric):
    """Keep the uncertainty of every example and the side that it is of; a subclass implements :meth:`score`.

    The value needs all examples at once, so the state grows by two numbers per example.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False

    uncertainty: list[Tensor]
    out: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("uncertainty", [], dist_reduce_fx="cat")
        self.add_state("out", [], dist_reduce_fx="cat")

    def update(self, uncertainty: Tensor, out: Tensor | bool) -> None:
        """Add examples.

        Args:
            uncertainty: any measure of uncertainty, shape (batch,).
            out: true where the example is out of distribution, bool, shape (batch,), or True or False for all.

        Raises:
            FedBayesError: other shapes or types; an uncertainty is NaN.
        """
        check_vectors(uncertainty=uncertainty)
        if isinstance(out, bool):
            out = torch.full_like(uncertainty, out, dtype=torch.bool)
        check_vectors(uncertainty=uncertainty, out=out)
        if out.dtype != torch.bool:
            raise FedBayesError(f"out is of {out.dtype}: give torch.bool, True for out-of-distribution examples")
        check_not_nan(uncertainty=uncertainty)
        self.uncertainty.append(uncertainty.detach())
        self.out.append(out.to(uncertainty.device))

    def compute(self) -> Tensor:
        """Return the value so far; NaN as long as one side has no examples."""
        if not len(self.out):
            return torch.tensor(torch.nan, device=self.device)
        uncertainty, out = dim_zero_cat(self.uncertainty), dim_zero_cat(self.out)
        if not 0 < int(out.sum()) < len(out):
            return torch.tensor(torch.nan, device=self.device)
        return self.score(uncertainty[~out], uncertainty[out])

    def score(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the value of both sides' uncertainties, a scalar."""
        raise NotImplementedError

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value so far, or the values ``val``, as torchmetrics does: (figure, axes)."""
        return self._plot(val, ax)


class OutOfDistributionAUROC(OutOfDistributionMetric):
    """AUROC of an uncertainty (:func:`~lightning_fedbayes.metrics.functional.ood_auroc`) over all batches.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.

    >>> metric = OutOfDistributionAUROC()
    >>> metric.update(torch.tensor([0.1, 0.2]), False)
    >>> metric.update(torch.tensor([0.2, 0.9]), True)
    >>> metric.compute()
    tensor(0.8750)
    """

    higher_is_better = True

    def score(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the AUROC."""
        return ood_auroc(uncertainty_in, uncertainty_out)


class OutOfDistributionFPR(OutOfDistributionMetric):
    """False-positive rate of an uncertainty (:func:`~lightning_fedbayes.metrics.functional.ood_fpr`) over all batches.

    Args:
        recall: share of out-of-distribution examples to be found, above 0 and at most 1.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    Raises:
        FedBayesError: ``recall`` is outside (0, 1].
    """

    higher_is_better = False

    def __init__(self, recall: float = 0.95, **kwargs: Any) -> None:
        check_number("recall", recall, "(0, 1]", error=FedBayesError, why="it is the share of examples to be found")
        super().__init__(**kwargs)
        self.recall = recall

    def score(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the false-positive rate."""
        return ood_fpr(uncertainty_in, uncertainty_out, self.recall)
