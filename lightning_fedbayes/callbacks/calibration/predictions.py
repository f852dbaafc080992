"""Predictions of a module for each client's calibration data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fedbayes.callbacks.evaluator import Datasets, by_name
from lightning_fedbayes.clients.evaluation import Predicted, has_predict_step, predict_data, predicted, rows_by_outputs
from lightning_fedbayes.core.errors import LARGEST, FedBayesError, check_at_least, check_kind, listed
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
    draw; N are the examples, or their positions (:data:`~lightning_fedbayes.metrics.likelihoods.Rows`). For numbers the
    result is means, standard deviations and targets, vectors of shape (N · targets,).

    Args:
        predictive: a :class:`~lightning_fedbayes.PosteriorPredictive`, a Bayesian module or any other module. It is
            used in evaluation mode, on the device of its parameters.
        datasets: of inputs and targets, by client, with batches of any form that ``predictive`` takes.
        batch_size: examples at a time.
        seed: of the draws, which depend on the client's number, not on other clients; global generators stay unused.
        first: number of the first client.

    Raises:
        FedBayesError: no module, no data sets by name, a client without an example, examples that are no pairs.
    """
    return {name: scalable(each) for name, each in rows_of_clients(predictive, datasets, batch_size, seed, first)}


def scalable(found: Predicted) -> tuple[Tensor, ...]:
    """Return the parts that a temperature scales: logits and targets, or means, standard deviations and targets."""
    return numbers_of(found) if "mean" in found else logits_of(found)


def logits_of(found: Predicted) -> tuple[Tensor, Tensor]:
    """Return a client's logits and targets; raise FedBayesError without logits, as of a regressor."""
    if "logits" not in found:
        raise FedBayesError(
            'no logits are known: return "logits" beside "probs" and "target" from validation_step. A regressor has '
            "none: calibrate it by FederatedConformal(kind='interval')"
        )
    return found["logits"], found["target"]


def numbers_of(found: Predicted) -> tuple[Tensor, Tensor, Tensor]:
    """Return a client's means, standard deviations and targets, flat; raise FedBayesError if they are missing."""
    if "mean" not in found:
        raise FedBayesError(
            "the module predicts no mean and variance: give a regressor, or "
            "PosteriorPredictive(module, posterior, likelihood=fb.Gaussian(noise=...))"
        )
    return found["mean"].flatten(), found["variance"].sqrt().flatten(), found["target"].flatten()


def rows_of_clients(
    predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int, first: int = 0, *, numbers: bool = False
) -> Iterator[tuple[str, Predicted]]:
    """Yield each client's name and rows; see :func:`predictions_of`.

    With ``numbers`` mean and variance come from ``predict_step``, if there is one, perhaps exact; otherwise from draws.
    """
    check_kind("predictive", predictive, nn.Module, "give a torch.nn.Module", error=FedBayesError)
    check_by_example(predictive, UNSCALED)
    check_at_least("batch_size", batch_size, 1, error=FedBayesError)
    check_at_least("seed", seed, -LARGEST, error=FedBayesError)
    check_at_least("first", first, 0, error=FedBayesError)
    steps = numbers and isinstance(predictive, L.LightningModule) and has_predict_step(predictive)
    predict: Any = predicted if steps else rows_by_outputs

    def predict_batch(batch: Any) -> Predicted:
        return predict(predictive, batch)

    for number, (name, dataset) in enumerate(by_name(datasets).items(), first):
        client_seed = derive_seed(seed, "evaluation", client=number)
        yield name, predict_data(predictive, dataset, batch_size, client_seed, predict_batch)


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
        rank_zero_warn(
            f"{who} {listed(shared)}: {used_again} of {whose} {total} calibration examples were trained on, so what is "
            "calibrated is too confident; hold examples out before training"
        )


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
