"""Detection of out-of-distribution examples by their uncertainty, over all batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_number
from lightning_fedbayes.metrics.examples import ExampleMetric
from lightning_fedbayes.metrics.functional.ood import ood_auroc, ood_fpr
from lightning_fedbayes.metrics.functional.utilities import check_not_nan, check_vectors


class OutOfDistributionMetric(ExampleMetric):
    """Keep the uncertainty of every example and the side that it is of; a subclass implements :meth:`separation`.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    kept = ("uncertainty", "out")

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
        self.keep(uncertainty, out.to(uncertainty.device))

    def score(self, *vectors: Tensor) -> Tensor:
        """Return the value of all examples; NaN as long as one side has none."""
        uncertainty, out = vectors
        if not 0 < int(out.sum()) < len(out):
            return torch.tensor(torch.nan, device=self.device)
        return self.separation(uncertainty[~out], uncertainty[out])

    def separation(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the value of both sides' uncertainties, a scalar."""
        raise NotImplementedError


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

    def separation(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
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

    def separation(self, uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
        """Return the false-positive rate."""
        return ood_fpr(uncertainty_in, uncertainty_out, self.recall)
