"""Report of a classifier's calibration, uncertainty and fairness, to the logger."""

import math
from collections.abc import Mapping

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.callbacks.evaluator import Reader, evaluator_of
from lightning_fedbayes.callbacks.loggers import log_curves, log_figure
from lightning_fedbayes.clients.evaluation import Predicted
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import FedBayesError, check_at_least
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.metrics import AccuracyRetained, CalibrationDiagram, RetainedCurve, functional


def relative_information(probs: Tensor) -> Tensor:
    r"""Return the mutual information over :math:`\log C`, its largest value for C classes, shape (batch,).

    >>> relative_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([1.])
    """
    return functional.mutual_information(probs) / math.log(max(2, probs.shape[-1]))


MEASURES = {
    "entropy": functional.predictive_entropy,
    "epistemic": relative_information,
    "kwon_aleatoric": functional.kwon_aleatoric,
    "kwon_epistemic": functional.kwon_epistemic,
}
POINTS = 50
"""Points of an accuracy-retained curve in the log, at equal distances."""
ENTRIES = 2**20
"""Probabilities that are counted at once: a single batch takes as long as a small network."""


class UncertaintyReport(Reader):
    """Calibration diagram, accuracy against retained examples and accuracy per client, from validation and test.

    It reads what ``validation_step`` (``test_step``) returns: a dict with "probs", class probabilities of shape
    (samples, batch, classes) or (batch, classes), and "target", classes of shape (batch,).
    :class:`FederatedBayes` brings one along. Add it yourself to train without a federation.

    Logged in every validation: the area under accuracy-retained for entropy, mutual information ("epistemic") and
    Kwon's aleatoric and epistemic traces, and both curves as data, "val/calibration_curve" and "val/retained_curve".
    Logged at the end: the two pictures.

    For a module whose steps return no probabilities, in a federation, the report predicts from the global posterior by
    a :class:`~lightning_fedbayes.PosteriorPredictive`, and figures are "val/draws/...".

    Where the validation data are the clients', :class:`ClientReport` logs their accuracies. Elsewhere accuracies per
    class are averaged with each client's label proportions, an unbiased estimate under label skew, and logged as
    "val/client_accuracy" (average by size) and "val/worst_client_accuracy" (worst 10 %).

    Args:
        samples: draws for these predictions. None predicts nothing, as in the report that a federation brings along.

    Attributes:
        client_accuracy: of each client of the federation, on its data or estimated. None if unknown.
        by: "draws/" if it comes from predictions that the package has drawn, otherwise "".
    """

    def __init__(self, samples: int | None = 10) -> None:
        if samples is not None:
            check_at_least("samples", samples, 1)
        self.samples, self.is_given = samples, samples is not None
        self.label_counts: Tensor | None = None
        self.classes: tuple = ()
        self.client_sizes: tuple[int, ...] = ()
        self.client_names: tuple[str, ...] = ()
        self.client_accuracy: Tensor | None = None
        self.by = self._begin = ""
        self._calibration = CalibrationDiagram()
        self._retained = {name: AccuracyRetained() for name in MEASURES}
        self._reset()

    def set_clients(
        self, sizes: tuple[int, ...], label_counts: Tensor | None, classes: tuple, names: tuple[str, ...] = ()
    ) -> None:
        """Set the clients whose accuracies are reported: numbers of examples, also by class if known, and names."""
        self.client_sizes, self.label_counts, self.classes, self.client_names = sizes, label_counts, classes, names

    def _reset(self) -> None:
        for metric in (self._calibration, *self._retained.values()):
            metric.reset()
        self._hits = self._totals = torch.zeros(0, dtype=torch.float64)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._seen = 0
        self._log_likelihood = 0.0

    def asks(self, module: L.LightningModule, posterior: GaussianPosterior | None, *, has_clients: bool) -> bool:
        """Return True if the posterior predicts."""
        return self.samples is not None and posterior is not None

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reset all metrics."""
        super().on_validation_epoch_start(trainer, pl_module)
        self._reset()

    def see(self, found: Predicted) -> None:
        """Add a batch of class probabilities."""
        if "probs" in found:
            self.update(found["probs"].detach().cpu(), found["target"].detach().cpu())

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add probabilities (samples, batch, classes) or (batch, classes) and targets (batch,)."""
        probs = probs.unsqueeze(0) if probs.ndim == 2 else probs
        if self._waiting and probs.shape[::2] != self._waiting[0][0].shape[::2]:
            self._count()
        self._seen += len(target)
        likelihood = probs[:, torch.arange(len(target)), target].double()
        self._log_likelihood += float(likelihood.clamp_min(torch.finfo(probs.dtype).tiny).log().mean(0).sum())
        self._waiting.append((probs, target))
        if sum(each.numel() for each, _ in self._waiting) >= ENTRIES:
            self._count()

    def _count(self) -> None:
        if not self._waiting:
            return
        probs, target = (torch.cat(parts, dim) for parts, dim in zip(zip(*self._waiting), (1, 0)))
        self._waiting = []
        mean = probs.mean(0)
        correct = mean.argmax(-1) == target
        self._calibration.update(mean, target)
        for name, measure in MEASURES.items():
            self._retained[name].update(correct, measure(probs))
        hits, totals = (each.bincount(minlength=mean.shape[-1]).double() for each in (target[correct], target))
        if len(self._totals) == len(totals):
            hits, totals = self._hits + hits, self._totals + totals
        self._hits, self._totals = hits, totals

    @property
    def log_likelihood(self) -> tuple[float, int]:
        r"""Sum of :math:`E_q \log p(y \mid x, \theta)` over the examples since the start, and their number."""
        return self._log_likelihood, self._seen

    def log_likelihood_in(self, trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[float, int]:
        """Return :attr:`log_likelihood` once all predictions of a validation are there."""
        evaluator_of(trainer).complete(trainer, pl_module)
        return self.log_likelihood

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the areas and the clients' accuracies."""
        self._log(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As :meth:`on_validation_epoch_end`, and draw."""
        self._log(trainer, pl_module, "test")
        self.draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last validation."""
        self.draw(trainer)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        evaluator = evaluator_of(trainer)
        evaluator.complete(trainer, pl_module)
        if not self._seen or trainer.sanity_checking:
            return
        self._count()
        retained = {name: metric.compute() for name, metric in self._retained.items()}
        self._begin = f"{stage}/{evaluator.by('batches')}"
        figures = {f"{self._begin}retained_area_{name}": float(curve.area) for name, curve in retained.items()}
        if trainer.loggers:
            self._log_curves(trainer, retained)
        measured = self._measured_accuracy(trainer, pl_module)
        known = measured is not None and not bool(measured.isnan().all())
        self.client_accuracy = measured if known else self._estimated_accuracy()
        self.by = evaluator.by("client" if known else "batches")
        if measured is None and self.client_accuracy is not None:
            known = ~torch.isnan(self.client_accuracy)
            if bool(known.any()):
                sizes = torch.tensor(self.client_sizes, dtype=torch.float64)[known]
                accuracies = self.client_accuracy[known]
                figures[f"{self._begin}client_accuracy"] = float(functional.weighted_accuracy(accuracies, sizes))
                figures[f"{self._begin}worst_client_accuracy"] = float(functional.worst_fraction_accuracy(accuracies))
        pl_module.log_dict(figures)

    def _log_curves(self, trainer: L.Trainer, retained: Mapping[str, RetainedCurve]) -> None:
        round = trainer.current_epoch + (trainer.state.fn == "fit")
        bins = self._calibration.compute()
        full = bins.counts > 0
        columns = {
            "confidence": bins.confidence,
            "accuracy": bins.accuracy,
            "perfect calibration": bins.confidence,
            "share of examples": bins.counts / bins.counts.sum(),
        }
        rows = torch.stack([each[full] for each in columns.values()], 1).tolist()
        log_curves(trainer.loggers, f"{self._begin}calibration_curve", tuple(columns), rows, round, "Calibration")
        shares = torch.arange(1, POINTS + 1) / POINTS
        curves = []
        for curve in retained.values():  # of one point each, where all examples are equally uncertain
            fraction, accuracy = torch.atleast_1d(curve.fraction), torch.atleast_1d(curve.accuracy)
            curves.append(accuracy[torch.searchsorted(fraction, shares).clamp_max(len(fraction) - 1)])
        rows = torch.stack([shares, *curves], 1).tolist()
        title = "Accuracy when the most uncertain are discarded"
        log_curves(
            trainer.loggers, f"{self._begin}retained_curve", ("examples retained", *retained), rows, round, title
        )

    def _measured_accuracy(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Tensor | None:
        """Return every client's accuracy on its data, NaN without any, shape (clients,). None if they are unknown."""
        evaluator = evaluator_of(trainer)
        if not evaluator.has_clients(trainer, pl_module):
            return None
        try:
            found = evaluator.predictions(trainer, pl_module)
        except FedBayesError:  # ClientReport prints it
            return None
        accuracy = {
            name: float((each["probs"].argmax(-1) == each["target"]).double().mean())
            for name, each in found.items()
            if "probs" in each
        }
        names = self.client_names if len(evaluator.loaders) == 1 else tuple(found)
        return torch.tensor([accuracy.get(name, math.nan) for name in names], dtype=torch.float64)

    def _estimated_accuracy(self) -> Tensor | None:
        """Return every client's accuracy by its label mix, NaN if none of its classes is seen. None without clients."""
        if self.label_counts is None:
            return None
        classes = torch.tensor(self.classes, dtype=torch.int64)
        if int(classes.min()) < 0 or int(classes.max()) >= len(self._totals):
            return None  # labels that are no class indices
        seen = self._totals[classes] > 0
        per_class = (self._hits[classes] / self._totals[classes].clamp_min(1))[seen]
        mix = self.label_counts.double()[:, seen]
        return (mix * per_class).sum(1) / mix.sum(1)

    def draw(self, trainer: L.Trainer) -> None:
        """Log the pictures of the last evaluation."""
        if not self._seen or not trainer.loggers:
            return
        round = trainer.current_epoch
        log_figure(trainer.loggers, f"{self._begin}calibration", self._calibration.plot()[0], round)
        curves = {name: metric.compute()[:2] for name, metric in self._retained.items()}
        log_figure(trainer.loggers, f"{self._begin}accuracy_retained", plots.accuracy_retained(curves), round)
