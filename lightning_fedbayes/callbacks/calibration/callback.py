"""Calibration inside a Trainer: found on validation data, scored on test data, kept in checkpoints. Its predictions."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fedbayes.callbacks import ExamplePrivacy, FederatedBayes
from lightning_fedbayes.callbacks.evaluator import Datasets, Reader, by_name, callback_of, data_of, evaluator_of
from lightning_fedbayes.callbacks.loggers import log_table
from lightning_fedbayes.clients import evaluation
from lightning_fedbayes.clients.evaluation import ClientScores, Predicted
from lightning_fedbayes.clients.privacy.update import EXACT, Door
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError, FederationError, NotSent
from lightning_fedbayes.core.messages import Kind
from lightning_fedbayes.core.seeding import derive_seed
from lightning_fedbayes.data.clients import check_dataset
from lightning_fedbayes.metrics.likelihoods import check_by_example

UNSCALED = "There is no probability or interval of one to be calibrated: leave calibrations out; risks have a c-index"
"""Reason for likelihoods without calibration."""


def predictions_of(
    predictive: nn.Module, datasets: Datasets, batch_size: int = 256, seed: int = 0, first: int = 0
) -> dict[str, tuple[Tensor, ...]]:
    """Return each client's logits, (samples, N, classes), and targets, (N,).

    Logits come from ``predictive.sample(inputs)`` if there is such a method, otherwise from ``predictive(inputs)``, one
    draw. N are the examples, or their positions (:data:`~lightning_fedbayes.metrics.likelihoods.Rows`). For numbers the
    result is means, standard deviations and targets, vectors of shape (N · targets,).

    Args:
        predictive: a :class:`~lightning_fedbayes.PosteriorPredictive`, a Bayesian module or any other module. It is
            used in evaluation mode, on the device of its parameters.
        datasets: of inputs and targets, by client, with batches of any form that ``predictive`` takes.
        batch_size: examples at a time.
        seed: of the draws, which depend on the client's number, not on other clients. Global generators stay unused.
        first: number of the first client.

    Raises FedBayesError: no module, no data sets by name, a client without an example, examples that are no pairs.
    """
    return {name: scalable(each) for name, each in rows_of_clients(predictive, datasets, batch_size, seed, first)}


def scalable(found: Predicted) -> tuple[Tensor, ...]:
    """Return the parts that a temperature scales: logits and targets, or means, standard deviations and targets."""
    return numbers_of(found) if "mean" in found else logits_of(found)


def logits_of(found: Predicted) -> tuple[Tensor, Tensor]:
    """Return a client's logits and targets. Raise FedBayesError without logits, as of a regressor."""
    if "logits" not in found:
        regressor = "A regressor has none: calibrate it by FederatedConformal(kind='interval')"
        raise FedBayesError(f'no logits are known: return "logits" beside "probs" and "target". {regressor}')
    return found["logits"], found["target"]


def numbers_of(found: Predicted) -> tuple[Tensor, Tensor, Tensor]:
    """Return a client's means, standard deviations and targets, flat. Raise FedBayesError if they are missing."""
    if "mean" not in found:
        remedy = "PosteriorPredictive(module, posterior, likelihood=fb.Gaussian(noise=...))"
        raise FedBayesError(f"the module predicts no mean and variance: give a regressor, or {remedy}")
    return found["mean"].flatten(), found["variance"].sqrt().flatten(), found["target"].flatten()


def rows_of_clients(
    predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int, first: int = 0, *, numbers: bool = False
) -> Iterator[tuple[str, Predicted]]:
    """Yield each client's name and rows (:func:`predictions_of`). With ``numbers`` by ``predict_step`` if possible."""
    errors.check_kind("predictive", predictive, nn.Module, "give a torch.nn.Module", error=FedBayesError)
    check_by_example(predictive, UNSCALED)
    evaluation.check_pass(batch_size, seed)
    errors.check_at_least("first", first, 0, error=FedBayesError)
    steps = numbers and isinstance(predictive, L.LightningModule) and evaluation.has_predict_step(predictive)
    predict: Any = evaluation.predicted if steps else evaluation.rows_by_outputs

    for number, (name, dataset) in enumerate(by_name(datasets).items(), first):
        client_seed = derive_seed(seed, "evaluation", client=number)
        yield name, evaluation.predict_data(predictive, dataset, batch_size, client_seed, partial(predict, predictive))


def check_apart(datasets: Datasets, trained_on: Dataset | None) -> None:
    """Warn, in one line, of calibration examples that were trained on, as far as data sets and Subsets tell."""
    if trained_on is None:
        return
    check_dataset("trained_on", trained_on)
    used: dict[int, set[int]] = {}
    for base, rows in map(_rows, _parts(trained_on)):
        used.setdefault(id(base), set()).update(rows)
    shared = {}
    for name, dataset in by_name(datasets).items():
        number = sum(len(rows & used.get(id(base), set())) for base, rows in map(_rows, _parts(dataset)))
        if number:
            shared[name] = number, len(dataset)  # pyright: ignore[reportArgumentType]
    if shared:
        used_again, total = map(sum, zip(*shared.values()))
        who, whose = ("client", "its") if len(shared) == 1 else ("clients", "their")
        found = f"{used_again} of {whose} {total} calibration examples were trained on, so what is calibrated is"
        rank_zero_warn(f"{who} {errors.listed(shared)}: {found} too confident; hold examples out before training")


def _parts(dataset: Dataset) -> list[Dataset]:
    """Return the parts of a ConcatDataset and of those within it, or the data set itself."""
    if isinstance(dataset, ConcatDataset):
        return [part for each in dataset.datasets for part in _parts(each)]
    return [dataset]


def _rows(dataset: Dataset) -> tuple[Dataset, set[int]]:
    """Return the data set under a Subset, and the Subset's rows of it."""
    if not isinstance(dataset, Subset):
        return dataset, set(range(len(dataset)))  # pyright: ignore[reportArgumentType]
    base, rows = dataset.dataset, [int(index) for index in dataset.indices]
    while isinstance(base, Subset):
        rows, base = [int(base.indices[row]) for row in rows], base.dataset
    return base, set(rows)


Found = Mapping[str, tuple[Tensor, ...]]
"""Client name → its logits and targets, or its means, standard deviations and targets."""


class CalibrationCallback(Reader):
    """Calibrates in every validation, so that each checkpoint holds the calibration of its weights.

    ``trainer.test`` scores the result, in tables by client, and ``trainer.predict`` uses it. Validation data that are
    not of clients are one, "all". Figures of drawn predictions are "val/draws/..." and "test/draws/...".
    """

    calibrates = True
    label: str
    """Name of its figures in the log."""
    sends: ClassVar[Kind]
    """The kind of message that a client sends for it."""
    if_private: ClassVar[str]
    """The remedy where privacy keeps that message back."""
    epsilon: float | None = None
    max_influence: float | None
    takes_moments = False
    """True if it takes mean and variance of ``predict_step``, which may be exact."""
    _compared = False
    """True once the validation data have been compared with the training data."""

    @abstractmethod
    def calibrate(self, trainer: L.Trainer, found: Found, seed: int) -> None:
        """Calibrate on the clients' validation data."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Return the figures of a calibration to log."""

    @abstractmethod
    def score(self, found: Found) -> ClientScores:
        """Score the calibrated predictions on each client's test data."""

    def evaluate(
        self, predictive: nn.Module, datasets: Datasets, *, batch_size: int = 256, seed: int = 0
    ) -> ClientScores:
        """Return the scores of the calibrated predictions on each client's data, other than those of the fit.

        They are accuracy, NLL and ECE (of numbers RMSE, NLL and coverage), or coverage and size of the sets (width of
        the intervals). For the arguments see :meth:`fit_from`.

        Raises FedBayesError: before a fit, an unknown client, or as :meth:`fit_from`.
        """
        return self.score(self._found(predictive, datasets, batch_size, seed))

    def _found(self, predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int, first: int = 0) -> Found:
        found = rows_of_clients(predictive, datasets, batch_size, seed, first, numbers=self.takes_moments)
        return {name: self.read(each) for name, each in found}

    def _tell(self, what: str, names: list[str]) -> None:
        """Name the bounded clients. ``what`` they have sent."""
        if names:
            whose = f"the {what} of client{'s' if len(names) > 1 else ''} {errors.listed(names)} stand out"
            most = f"count for at most max_influence={self.max_influence:g} times those of the median client"
            rank_zero_info(f"Calibration {self.label}: {whose}, and {most}")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a likelihood without calibration, and messages that privacy keeps back, before anything runs."""
        self._compared = False
        check_by_example(pl_module, UNSCALED)
        federation = callback_of(trainer, FederatedBayes)
        privacy = None if federation is None else federation.settings.privacy
        examples = callback_of(trainer, ExamplePrivacy) is not None
        try:
            Door(privacy, self.epsilon, examples=examples).check(self.sends, self.epsilon)
        except NotSent:
            protects = "ExamplePrivacy" if privacy is None else "privacy=UpdatePrivacy(...)"
            sent = f"clients would send {EXACT[self.sends]}, exactly"
            raise FedBayesError(f"{type(self).__name__} beside {protects}: {sent}. {self.if_private}") from None

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calibrate on the validation data, before any checkpoint of these weights is written."""
        if trainer.sanity_checking:
            return

        def calibrate(found: Found) -> None:
            trained_on = getattr(trainer.train_dataloader, "dataset", None)
            if trainer.state.fn == "fit" and not self._compared and isinstance(trained_on, Dataset):
                self._compared = True
                check_apart(data_of(trainer.val_dataloaders)[0], trained_on)
            federation = callback_of(trainer, FederatedBayes)
            self.calibrate(trainer, found, 0 if federation is None else federation.settings.seed)
            label = evaluator_of(trainer).by("logits") + self.label
            pl_module.log_dict({f"val/{label}/{name}": value for name, value in self.figures().items()})

        self._run(trainer, pl_module, calibrate, raises=trainer.state.fn == "validate")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the calibrated predictions on the test data, and log the table of clients."""

        def score(found: Found) -> None:
            scores = self.score(found)
            summary = {name.removeprefix("clients/"): value for name, value in scores.summary().items()}
            if len(scores.names) == 1:  # its mean is its worst
                summary = {name: summary[name] for name in scores.values}
            label = evaluator_of(trainer).by("logits") + self.label
            pl_module.log_dict({f"test/{label}/{name}": value for name, value in summary.items()})
            log_table(trainer.loggers, f"test/{label}", *scores.table(), trainer.current_epoch)

        self._run(trainer, pl_module, score, raises=False)

    def _run(
        self, trainer: L.Trainer, module: L.LightningModule, use: Callable[[Found], None], *, raises: bool
    ) -> None:
        """Call ``use`` with the clients' predictions. A mistake ends no fit and no test."""
        try:
            found = evaluator_of(trainer).predictions(trainer, module)
            use({name: self.read(each) for name, each in found.items()})
        except FedBayesError as error:
            if raises:
                raise
            rank_zero_warn(f"{type(self).__name__} does nothing: {error}")


def state_of(callback: CalibrationCallback, state: Any) -> Mapping[str, Any]:
    """Return a callback's stored state. Raise FederationError unless it has all entries."""
    errors.check_kind("state_dict", state, Mapping, "give what state_dict() has returned")
    missing = [name for name in callback.state_dict() if name not in state]
    if missing:
        kind = type(callback).__name__
        raise FederationError(f"the state lacks {', '.join(missing)}: give what {kind}.state_dict() has returned")
    return state
