"""Report of a classifier's calibration, uncertainty and fairness, to the logger."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.callbacks.loggers import log_figure
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import check_at_least
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.metrics import AccuracyRetained, CalibrationDiagram
from lightning_fedbayes.metrics.functional import (
    kwon_aleatoric,
    kwon_epistemic,
    mutual_information,
    predictive_entropy,
    weighted_accuracy,
    worst_fraction_accuracy,
)
from lightning_fedbayes.modules import PosteriorPredictive


def relative_information(probs: Tensor) -> Tensor:
    r"""Return the mutual information over :math:`\log C`, its largest value for C classes, shape (batch,).

    >>> relative_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([1.])
    """
    return mutual_information(probs) / math.log(max(2, probs.shape[-1]))


MEASURES = {
    "entropy": predictive_entropy,
    "epistemic": relative_information,
    "kwon_aleatoric": kwon_aleatoric,
    "kwon_epistemic": kwon_epistemic,
}


class UncertaintyReport(L.Callback):
    """Calibration diagram, accuracy against retained examples and accuracy per client, from validation and test.

    It reads what ``validation_step`` (``test_step``) returns: a dict with "probs", class probabilities of shape
    (samples, batch, classes) or (batch, classes), and "target", classes of shape (batch,). Other modules are left
    alone. :class:`FederatedBayes` brings one along; add it yourself to train without a federation.

    Logged in every validation: the area under accuracy-retained for entropy, mutual information ("epistemic") and
    Kwon's aleatoric and epistemic traces, and the weighted average and worst-10 % accuracy of the clients. Logged at
    the end: the two pictures.

    A module without Bayesian layers returns no such thing. Give ``samples``, and in a federation the report predicts
    from the global posterior (of :class:`~lightning_fedbayes.IVON`, say) by a
    :class:`~lightning_fedbayes.PosteriorPredictive`, with batches of inputs and classes and a ``forward`` that gives
    logits.

    A client's accuracy is that on its own validation loader if there are as many loaders as clients; otherwise the
    accuracies per class are averaged with the client's label proportions, an unbiased estimate under label skew.

    Args:
        samples: draws for the predictions of such a module; None leaves it alone.

    Attributes:
        posterior: the global one; :class:`FederatedBayes` sets it.
    """

    def __init__(self, samples: int | None = None) -> None:
        if samples is not None:
            check_at_least("samples", samples, 1)
        self.samples = samples
        self.posterior: GaussianPosterior | None = None
        self._predictive: PosteriorPredictive | None = None
        self.label_counts: Tensor | None = None
        self.classes: tuple = ()
        self.client_sizes: tuple[int, ...] = ()
        self.client_accuracy: Tensor | None = None
        self._calibration = CalibrationDiagram()
        self._retained = {name: AccuracyRetained() for name in MEASURES}
        self._reset()

    def set_clients(self, sizes: tuple[int, ...], label_counts: Tensor | None, classes: tuple) -> None:
        """Set the clients whose accuracies are reported.

        Args:
            sizes: training examples of each client.
            label_counts: training examples per client and class, shape (clients, classes); None if unknown.
            classes: the classes of its columns.
        """
        self.client_sizes, self.label_counts, self.classes = sizes, label_counts, classes

    def _reset(self) -> None:
        for metric in (self._calibration, *self._retained.values()):
            metric.reset()
        self._hits: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self._seen = 0
        self._log_likelihood = 0.0

    # -- collecting ----------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reset all metrics."""
        self._reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch."""
        if isinstance(outputs, dict) and are_class_predictions(outputs.get("probs"), outputs.get("target")):
            self.update(outputs["probs"].detach().cpu(), outputs["target"].detach().cpu(), dataloader_idx)
        elif self.samples is not None and self.posterior is not None and isinstance(batch, list | tuple):
            probs = self.predictive(pl_module, self.posterior).sample(batch[0]).softmax(-1)
            if are_class_predictions(probs, batch[1]):
                self.update(probs.cpu(), batch[1].cpu(), dataloader_idx)

    on_test_batch_end = on_validation_batch_end

    def predictive(self, module: L.LightningModule, posterior: GaussianPosterior) -> PosteriorPredictive:
        """Return the predictions of a module that has none, by ``posterior``; one object, which warns once."""
        if self._predictive is None or self._predictive.network is not module:
            assert self.samples is not None
            self._predictive = PosteriorPredictive(module, posterior, self.samples)
        self._predictive.posterior = posterior
        return self._predictive.eval()

    def update(self, probs: Tensor, target: Tensor, loader: int = 0) -> None:
        """Add probabilities (samples, batch, classes) or (batch, classes) and targets (batch,)."""
        probs = probs.unsqueeze(0) if probs.ndim == 2 else probs
        mean = probs.mean(0)
        correct = mean.argmax(-1) == target
        self._seen += len(target)
        likelihood = probs[:, torch.arange(len(target)), target].double()
        self._log_likelihood += float(likelihood.clamp_min(torch.finfo(probs.dtype).tiny).log().mean(0).sum())
        self._calibration.update(mean, target)
        for name, measure in MEASURES.items():
            self._retained[name].update(correct, measure(probs))
        ones = torch.ones(len(target), dtype=torch.float64)
        for sums, values in ((self._hits, correct.double()), (self._totals, ones)):
            current = torch.zeros(mean.shape[-1], dtype=torch.float64).index_add_(0, target, values)
            sums[loader] = sums[loader] + current if loader in sums else current

    @property
    def log_likelihood(self) -> tuple[float, int]:
        r"""Sum of :math:`E_q \log p(y \mid x, \theta)` over the examples since the start, and their number."""
        return self._log_likelihood, self._seen

    # -- reporting -----------------------------------------------------------------------------------------------------

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the areas and the clients' accuracies."""
        self._log(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As :meth:`on_validation_epoch_end`, and draw."""
        self._log(trainer, pl_module, "test")
        self.draw(trainer, "test")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last validation."""
        self.draw(trainer, "val")

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self._seen or trainer.sanity_checking:
            return
        figures = {
            f"{stage}/retained_area_{name}": float(metric.compute().area) for name, metric in self._retained.items()
        }
        self.client_accuracy = self._client_accuracy()
        if self.client_accuracy is not None:
            known = ~torch.isnan(self.client_accuracy)
            if bool(known.any()):
                sizes = torch.tensor(self.client_sizes, dtype=torch.float64)[known]
                accuracies = self.client_accuracy[known]
                figures[f"{stage}/client_accuracy"] = float(weighted_accuracy(accuracies, sizes))
                figures[f"{stage}/worst_client_accuracy"] = float(worst_fraction_accuracy(accuracies))
        pl_module.log_dict(figures)

    def _client_accuracy(self) -> Tensor | None:
        """Accuracy of every client, shape (clients,), NaN where nothing is known of it; None without clients."""
        clients = len(self.client_sizes)
        if clients and len(self._totals) == clients:
            return torch.stack([self._hits[k].sum() / self._totals[k].sum() for k in range(clients)])
        if self.label_counts is None:
            return None
        hits, totals = sum(self._hits.values()), sum(self._totals.values())
        assert isinstance(hits, Tensor)
        assert isinstance(totals, Tensor)
        classes = torch.tensor(self.classes, dtype=torch.int64)
        if int(classes.min()) < 0 or int(classes.max()) >= len(totals):
            return None  # labels that are no class indices
        seen = totals[classes] > 0
        per_class = (hits[classes] / totals[classes].clamp_min(1))[seen]
        mix = self.label_counts.double()[:, seen]
        return (mix * per_class).sum(1) / mix.sum(1)

    def draw(self, trainer: L.Trainer, stage: str) -> None:
        """Log the pictures of the last evaluation."""
        if not self._seen or not trainer.loggers:
            return
        round = trainer.current_epoch
        log_figure(trainer, f"{stage}/calibration", self._calibration.plot()[0], round)
        curves = {}
        for name, metric in self._retained.items():
            curve = metric.compute()
            curves[name] = (curve.fraction, curve.accuracy)
        log_figure(trainer, f"{stage}/accuracy_retained", plots.accuracy_retained(curves), round)


def are_class_predictions(probs: Any, target: Any) -> bool:
    """Return True for class probabilities (samples, batch, classes) or (batch, classes), and classes (batch,)."""
    return (
        isinstance(probs, Tensor)
        and isinstance(target, Tensor)
        and probs.ndim in (2, 3)
        and target.ndim == 1
        and not target.is_floating_point()
        and probs.shape[-2] == len(target)
    )


def bring_report(trainer: L.Trainer, beside: L.Callback) -> UncertaintyReport:
    """The Trainer's :class:`UncertaintyReport`; a new one behind the callback ``beside`` if it has none."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, UncertaintyReport):
            return callback
    report = UncertaintyReport()
    callbacks.insert(callbacks.index(beside) + 1, report)
    return report
