"""One evaluator for all reports and calibrations of a Trainer: each validation and test predicts once."""

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, SequentialSampler, default_collate

from lightning_fedbayes.callbacks.trainer.data import validate_batch
from lightning_fedbayes.clients import evaluation
from lightning_fedbayes.clients.evaluation import Predicted
from lightning_fedbayes.core.batches import unpacked
from lightning_fedbayes.core.errors import FedBayesError, shown
from lightning_fedbayes.core.posterior import GaussianPosterior, is_random
from lightning_fedbayes.core.run_file import BY_DRAWS
from lightning_fedbayes.core.seeding import derive_seed
from lightning_fedbayes.data.clients import ClientDatasets, check_dataset
from lightning_fedbayes.metrics import likelihoods
from lightning_fedbayes.modules.posterior_predictive import OUTPUT_DRAWS, PosteriorPredictive

C = TypeVar("C", bound=L.Callback)
Datasets = ClientDatasets | Mapping[str, Dataset]
"""Client name → its data set of (input, target)."""
BATCH_SIZE = 256
"""Examples at a time, where a loader does not say."""
MOST_LOST = 0.05
"""Share of the targets that draws may get wrong, where the mean is right, without a line in the log."""
DRAWS = 10
"""Draws of the parameters that calibrate a user's module, whatever a report draws."""


class Reader(L.Callback):
    """Reads the predictions of a validation or a test from the Trainer's :class:`Evaluator`."""

    is_given = True  # by a user, so that training is refused where it would be in vain
    by_client = False  # needs validation data of clients
    calibrates = False  # needs the predictions of every client, also where the module's steps return none
    needs_logits = False  # of every draw: mean probabilities do not suffice

    def asks(self, module: L.LightningModule, posterior: GaussianPosterior | None, *, has_clients: bool) -> bool:
        """Return True if ``module`` is to predict once more where its steps return no predictions."""
        return self.calibrates

    def see(self, found: Predicted) -> None:
        """Receive the predictions of one batch."""

    def read(self, found: Predicted) -> tuple[Tensor, ...]:
        """Return the parts of a client's predictions to keep. Raise FedBayesError if it cannot use them."""
        return ()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check a batch, once for each module, if Lightning's sanity check has validated none. Leave no trace."""
        evaluator = evaluator_of(trainer)
        if self.is_given and evaluator.checked is not pl_module:
            evaluator.checked = pl_module
            ours = [each for each in callbacks_of(trainer) if isinstance(each, Reader) or hasattr(each, "posterior_of")]
            validate_batch(trainer, pl_module, ours)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the last predictions."""
        evaluator_of(trainer).begin()

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the last predictions."""
        self.on_validation_epoch_start(trainer, pl_module)

    def on_validation_batch_end(self, trainer: L.Trainer, *batch: Any, **options: Any) -> None:
        """Let the evaluator see a batch. Of several readers the first one does."""
        evaluator_of(trainer).collect(trainer, *batch, **options)

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Release the predictions."""
        evaluator_of(trainer).begin()

    on_test_end = on_validation_end


class Evaluator:
    r"""Collects what a module predicts in one validation or test, for every :class:`Reader` of the Trainer.

    ``validation_step`` (``test_step``) returns a dict with "target", (batch, \*positions), and "probs", (batch,
    classes, \*positions), perhaps with draws first and with "logits" of that shape, or with "mean", "variance" and
    "target", (batch, targets) each. Where it does not, the module predicts once more, batch by batch, if a reader asks:
    by draws from the federation's posterior, its ``sample``, ``predict_step`` or ``forward``. Generators stay as is.

    Where a loader gives all examples in order, their positions tell the clients. Elsewhere it takes one further pass.
    """

    def __init__(self) -> None:
        self._predictive: PosteriorPredictive | None = None
        self._samples = DRAWS
        self._right, self._has_said = [0, 0, 0], False
        self._train_loss: float | None = None  # of the first round; infinity once it has been compared
        self.checked: L.LightningModule | None = None
        self._again, self._can_draw = set[str](), False
        self.begin()

    def by(self, what: str) -> str:
        """Return the prefix of figures: :data:`BY_DRAWS` if the package has drawn their predictions, otherwise "".

        ``what`` names the predictions of the last validation or test: "batches" as readers see them, those by "client",
        their "logits", or those by the clients' "own" posteriors.
        """
        return BY_DRAWS if self._can_draw and what in self._again else ""

    def has_clients(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Return True if the data are the clients': a ClientDatasets, or a loader for each of the federation's."""
        return not trainer.sanity_checking and bool(self._open(trainer, module)) and self._has_clients

    def begin(self) -> None:
        """Forget the last validation or test."""
        self._tell()
        self._readers: list[Reader] | None = None
        self._kept: dict[int, list[Predicted]] = defaultdict(list)
        self._last: tuple[int, int] | None = None
        self._found: dict[str, Predicted] | FedBayesError | None = None
        self._error: FedBayesError | None = None
        self._has_given = False

    def _open(self, trainer: L.Trainer, module: L.LightningModule) -> list[Reader]:
        """Return the readers. At the first call find out what they need and how the data come."""
        if self._readers is not None:
            return self._readers
        callbacks = callbacks_of(trainer)
        readers = [each for each in callbacks if isinstance(each, Reader)]
        federation = next((each for each in callbacks if hasattr(each, "posterior_of")), None)
        self._seed = 0 if federation is None else federation.settings.seed
        loaders: Any = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        self.loaders = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
        self.collate_fn = getattr(self.loaders[0], "collate_fn", None)
        self.batch_size: int = getattr(self.loaders[0], "batch_size", None) or BATCH_SIZE
        numbers = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        numbers = numbers if isinstance(numbers, list) else [numbers]
        clients = max((len(getattr(reader, "client_sizes", ())) for reader in readers), default=0)
        data = getattr(self.loaders[0], "dataset", None) if len(self.loaders) == 1 else None
        self._has_clients = isinstance(data, ClientDatasets) or 1 < len(self.loaders) == clients
        self._in_order = len(numbers) == len(self.loaders) and all(
            gives_all(loader, number, together=isinstance(data, ConcatDataset))
            for loader, number in zip(self.loaders, numbers)
        )
        if trainer.sanity_checking:  # only readers that would be in vain without predictions
            readers = [each for each in readers if each.is_given and (self._has_clients or not each.by_client)]
        self._readers = readers
        self._calibrates = any(reader.calibrates for reader in readers)
        self._needs_logits = any(reader.needs_logits for reader in readers)
        self._keeps = self._calibrates or self._has_clients
        posterior: GaussianPosterior | None = None
        if federation is not None:
            with suppress(FedBayesError):  # there is none yet
                posterior = GaussianPosterior.point_mass({}) if trainer.sanity_checking else federation.posterior
        self._asks = any(reader.asks(module, posterior, has_clients=self._has_clients) for reader in readers)
        if self._train_loss is None and "federation/train_loss" in trainer.callback_metrics:
            self._train_loss = float(trainer.callback_metrics["federation/train_loss"])
        samples = next((n for n in (getattr(reader, "samples", None) for reader in readers) if n), None)
        self._samples, self._takes_outputs = samples or DRAWS, self._calibrates or samples is not None
        samples_itself = callable(getattr(module, "sample", None))
        is_wide = posterior is not None and any(is_random(each) for each in posterior.variance.values())
        self._posterior = posterior if is_wide and not samples_itself else None
        self._can_draw = is_wide or samples_itself
        return readers

    def collect(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take the predictions of a batch, once, and give them to all readers."""
        if trainer.sanity_checking:
            self._try(trainer, module, outputs, batch)
            return
        readers, number, loader = self._open(trainer, module), batch_idx, dataloader_idx
        if not readers or self._last == (loader, number):
            return
        if self._last is None:
            self._again = set() if self._posterior is None else {"own"}
        self._last = loader, number
        found = returned(outputs, module)
        if self._lacks(found) and self._asks and (self._in_order or not self._keeps):
            lacks = {"logits"} if found else {"batches", "client", "logits", "own"}
            seed = derive_seed(self._seed, "evaluation", client=loader, step=number)
            try:
                with evaluation.drawing(module.device, seed):
                    found = {**self._predict(module, batch), **(found or {})}
                self._again |= lacks
            except FedBayesError as error:
                self._asks, self._error = False, error if found is None else None
        if found is not None:
            self._give(found)
            if self._keeps and self._in_order:
                self._kept[loader].append(self._keep(found))

    def _lacks(self, found: Predicted | None) -> bool:
        """Return True if a module has to predict once more, in addition to what its step has returned."""
        return found is None or (self._needs_logits and "probs" in found and "logits" not in found)

    def _try(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any) -> None:
        """Check a batch before training. Raise FedBayesError if readers would get no predictions."""
        readers = self._open(trainer, module)
        self.checked = module
        if self._calibrates:
            by_name(data_of(self.loaders)[0])
        found = returned(outputs, module)
        if self._lacks(found) and self._asks:
            with evaluation.drawing(module.device, 0):
                try:
                    found = {**self._predict(module, batch), **(found or {})}
                except FedBayesError:
                    if found is None:
                        raise
        if found is not None:
            for reader in readers:
                reader.read(self._keep(found))

    def _give(self, found: Predicted) -> None:
        self._has_given = True
        for reader in self._readers or ():
            reader.see(found)

    def _keep(self, found: Predicted) -> Predicted:
        """Return, on the CPU, what readers need of a batch after the last one."""
        kept = evaluation.means_of(found)
        if self._calibrates and "logits" in found and (self._needs_logits or "probs" not in found):
            kept["logits"] = found["logits"]
        elif self._calibrates and "probs" in found and not self._needs_logits:  # the mean is all that sets need
            mean = evaluation.mean_probs(found["logits"]) if "logits" in found else found["probs"].double().mean(0)
            kept["logits"] = mean.log()
        return {name: value.detach().cpu() for name, value in kept.items()}

    @torch.no_grad()
    def _predict(self, module: L.LightningModule, batch: Any) -> Predicted:
        """Return the predictions of a batch that the module's step has not returned."""
        if self._posterior is not None:
            predictive = self.predictive(module, self._posterior)
            return self._draw(predictive, *unpacked(batch, predictive, needs_targets=True))
        target, known = unpacked(batch, module, needs_targets=True)[1], likelihoods.said_by(module)
        are_numbers = target.is_floating_point() if known is None else not known.of_classes
        if evaluation.has_predict_step(module) and (are_numbers or not self._needs_logits):
            try:
                return evaluation.predicted(module, batch)
            except FedBayesError:  # of a user's own predictions; readers other than a ClientReport can use outputs
                if not self._takes_outputs:
                    raise
        try:
            return evaluation.rows_by_outputs(module, batch)
        except NotImplementedError:
            name = type(module).__name__
            raise FedBayesError(f"{name} has no forward that gives logits: {evaluation.REMEDY}") from None

    def _draw(self, predictive: PosteriorPredictive, inputs: Any, target: Tensor) -> Predicted:
        """Return predictions by draws: as many as a report asks for, and :data:`DRAWS` logits for a calibration."""
        is_first = predictive.is_linearised or not self._calibrates
        draws = predictive.sample(inputs, DRAWS if not is_first else OUTPUT_DRAWS if self._calibrates else None)
        known = predictive.likelihood_for(draws[0], target)
        found = first = known.rows(draws, target)
        if not is_first:
            more = [predictive.sample(inputs, self._samples - DRAWS)] if self._samples > DRAWS else []
            found = known.rows(torch.cat([draws, *more])[: self._samples], target)
        if known.of_classes and not self._has_said:
            outputs = predictive.at_mean(inputs)
            at = known.rows(outputs[None], target)
            right = [int((each["probs"].mean(0).argmax(-1) == each["target"]).sum()) for each in (at, found)]
            self._right = [sum(pair) for pair in zip(self._right, (*right, len(found["target"])))]
            self._compare(known.loss(outputs, target), target.numel() // max(1, len(target)))
        return found | {name: first[name] for name in ("logits",) if name in first}

    def _compare(self, loss: Tensor, targets: int) -> None:
        """Say once if training's loss is nearer to the mean over an example's targets than to their sum, ``loss``."""
        known = self._train_loss
        if known is None:
            return
        if targets > 1 and known * math.sqrt(targets) < float(loss):
            what = f"training_step returns {known:.3g}, it seems the mean over an example's {targets} targets"
            why = f"the prior is weighed against their sum, {float(loss):.3g}, and counts too much so"
            rank_zero_info(f"{what}; {why}: multiply the loss by {targets}.")
        self._train_loss = math.inf

    def _tell(self) -> None:
        """Say once if draws of the posterior get many fewer targets of a validation right than its mean does."""
        mean, draws, count = self._right
        self._right = [0, 0, 0]
        if mean - draws > MOST_LOST * count + 2:  # two may be chance
            self._has_said = True
            right = f"the posterior's mean gets {mean / count:.1%} right, and draws from it {draws / count:.1%}"
            remedy = "it is too wide for the network. A smaller prior_std or temperature makes it narrower."
            rank_zero_info(f"Of {count} targets of the validation {right}: {remedy}")

    def predictive(self, module: L.LightningModule, posterior: GaussianPosterior) -> PosteriorPredictive:
        """Return the predictions of a module by ``posterior``. One object, which warns once."""
        if self._predictive is None or self._predictive.network is not module:
            self._predictive = PosteriorPredictive(module, posterior)
        self._predictive.samples = self._samples
        self._predictive.posterior = posterior
        return self._predictive.eval()

    def predictor(self, module: L.LightningModule, posterior: GaussianPosterior) -> L.LightningModule:
        """Return a predictor by a client's ``posterior``, which the module holds."""
        return module if self._posterior is None else self.predictive(module, posterior)

    def complete(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Predict if readers have asked for predictions and have none."""
        if not trainer.sanity_checking and self._open(trainer, module) and self._asks and not self._has_given:
            with suppress(FedBayesError):
                self.predictions(trainer, module)

    def predictions(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Predicted]:
        """Return each client's or loader's predictions by name, on the CPU. Raise FedBayesError if there are none."""
        if self._found is None:
            self._open(trainer, module)
            try:
                self._found = self._by_client(module)
            except FedBayesError as error:
                self._found = error
        if isinstance(self._found, FedBayesError):
            raise self._found
        return self._found

    def _by_client(self, module: L.LightningModule) -> dict[str, Predicted]:
        """Divide what has been collected, or predict the clients' data sets."""
        if self._error is not None:
            raise self._error
        datasets, batch_size = data_of(self.loaders)
        named = by_name(datasets)
        sizes = {name: len(dataset) for name, dataset in named.items()}  # pyright: ignore[reportArgumentType]
        whole = [evaluation.joined(self._kept[loader]) for loader in sorted(self._kept)]
        parts = whole if len(self.loaders) > 1 else [p for each in whole for p in _parts(each, list(sizes.values()))]
        self._kept.clear()
        if [likelihoods.examples_in(each) for each in parts] == list(sizes.values()):
            return dict(zip(named, parts))
        if not self._asks:
            shuffled = "cannot map the examples of a batch to clients: give a loader that does not shuffle"
            none = f"{type(module).__name__} returns no predictions from its steps: {evaluation.REMEDY}"
            raise FedBayesError(shuffled if self._has_given else none)
        are_new, predictions = not self._has_given, dict[str, Predicted]()
        if are_new or self._posterior is not None:  # else the module's steps predict likewise
            self._again |= {"client", "logits", "own", *(["batches"] if are_new else [])}

        def predict(batch: Any) -> Predicted:
            found = self._predict(module, batch)
            if are_new:
                self._give(found)
            return self._keep(found)

        for number, (name, dataset) in enumerate(named.items()):  # one more pass
            seed = derive_seed(self._seed, "evaluation", client=number)
            predictions[name] = evaluation.predict_data(module, dataset, batch_size, seed, predict, self.collate_fn)
        return predictions


def by_name(datasets: Datasets) -> dict[str, Dataset]:
    """Return client name → data set. Raise FedBayesError for no, an empty or an iterable data set."""
    if isinstance(datasets, ClientDatasets):
        named: dict[str, Dataset] = dict(zip(datasets.names, datasets.datasets, strict=True))
    elif isinstance(datasets, Mapping) and datasets:
        named = dict(datasets)
    else:
        raise FedBayesError(f"datasets={shown(datasets)}: give a ClientDatasets, or a dict, client name → data set")
    for name, dataset in named.items():
        check_dataset(f"the calibration data of client {name}", dataset)
        if len(dataset) == 0:  # pyright: ignore[reportArgumentType]
            raise FedBayesError(f"client {name} has no held-out example: leave it out, or hold some of its data out")
    return named


def callbacks_of(trainer: L.Trainer) -> list[Any]:
    """Return the Trainer's callbacks, in their order."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def callback_of(trainer: L.Trainer, kind: type[C]) -> C | None:
    """Return the Trainer's first callback of a kind, if it has one."""
    return next((each for each in callbacks_of(trainer) if isinstance(each, kind)), None)


def evaluator_of(trainer: L.Trainer) -> Evaluator:
    """Return the evaluator of a Trainer, which all its callbacks share."""
    return vars(trainer).setdefault("fedbayes_evaluator", Evaluator())


def returned(outputs: Any, module: L.LightningModule) -> Predicted | None:
    """Return the rows of the predictions that a module's step has returned. None if it has returned none."""
    if not isinstance(outputs, dict):
        return None
    if isinstance(outputs.get("counts"), Tensor):  # rows, of a module of this package
        return outputs
    target, probs, logits = (outputs.get(name) for name in ("target", "probs", "logits"))
    if isinstance(probs, Tensor) and isinstance(target, Tensor) and not target.is_floating_point():
        known = likelihoods.said_by(module) or next(
            (
                each
                for each in (likelihoods.Categorical(), likelihoods.Bernoulli(), likelihoods.Categorical(channels=-1))
                for draws in (probs, probs[:1].squeeze(0))
                if draws.ndim and not each.unfit(draws, target)
            ),
            None,
        )
        if isinstance(known, likelihoods.Categorical | likelihoods.Bernoulli):
            draws = probs if not known.unfit(probs[0], target) else probs.unsqueeze(0)
            found = known.rows_of_probs(draws, target)
            if isinstance(logits, Tensor) and logits.shape == probs.shape:
                found["logits"] = known.rows(logits if draws is probs else logits.unsqueeze(0), target)["logits"]
            return found
    mean, variance = outputs.get("mean"), outputs.get("variance")
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor) and isinstance(target, Tensor)):
        return None
    if not mean.numel() == variance.numel() == target.numel():
        return None
    mean = mean.unsqueeze(-1) if mean.ndim == 1 else mean
    found = likelihoods.RegressionPrediction(mean, variance.reshape(mean.shape), *3 * [mean.new_zeros(())])
    return likelihoods.Gaussian(0.0).rows_of(found, target)


def gives_all(loader: Any, batches: float, *, together: bool) -> bool:
    """Return True if ``batches`` of a loader are all its examples in order. ``together``: of several clients."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    plain = type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler and not sampler.drop_last
    plain = plain and getattr(loader, "in_order", True)  # of its workers
    return plain and batches == len(sampler) and not (together and loader.collate_fn is not default_collate)


def data_of(loaders: Any) -> tuple[Datasets, int]:
    """Return the clients' data sets behind the loaders, and the batch size. Raise FedBayesError if one lacks it."""
    several = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
    datasets = [getattr(loader, "dataset", None) for loader in several]
    if not several or any(dataset is None for dataset in datasets):
        raise FedBayesError("there are no validation data sets: give a DataLoader over a ClientDatasets")
    batch_size = getattr(several[0], "batch_size", None) or BATCH_SIZE
    if len(datasets) == 1 and isinstance(datasets[0], ClientDatasets):
        return datasets[0], batch_size
    if len(datasets) == 1 and isinstance(datasets[0], ConcatDataset):
        datasets = datasets[0].datasets
    named: dict[str, Dataset] = {str(number): dataset for number, dataset in enumerate(datasets)}  # pyright: ignore[reportAssignmentType]
    return (named if len(named) > 1 else {"all": next(iter(named.values()))}), batch_size


def _parts(whole: Predicted, sizes: list[int]) -> list[Predicted]:
    """Return each client's consecutive predictions. Empty if there are more or fewer examples."""
    if not whole or likelihoods.examples_in(whole) != sum(sizes):
        return []
    rows = [int(each.sum()) for each in whole["counts"].split(sizes)]
    pieces = {
        name: value.split(sizes if name == "counts" else rows, -2 if name in evaluation.OF_DRAWS else 0)
        for name, value in whole.items()
    }
    return [{name: piece[number] for name, piece in pieces.items()} for number in range(len(sizes))]
