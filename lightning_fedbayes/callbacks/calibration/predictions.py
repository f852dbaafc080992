"""Predictions of a module for each client's calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fedbayes.callbacks.evaluator import Datasets
from lightning_fedbayes.clients.evaluation import Predicted, inputs_and_targets, outputs_of, predict_data
from lightning_fedbayes.core.errors import LARGEST, FedBayesError, check_at_least, check_kind, listed, shown
from lightning_fedbayes.core.seeding import derive_seed
from lightning_fedbayes.data.clients import ClientDatasets, check_dataset
from lightning_fedbayes.modules.regressor import RegressionPrediction


def predictions_of(
    predictive: nn.Module, datasets: Datasets, batch_size: int = 256, seed: int = 0, first: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each client's logits and targets, by name.

    Logits are those of ``predictive.sample(inputs)`` if there is such a method, shape (samples, examples, classes),
    otherwise of ``predictive(inputs)``, shape (examples, classes).

    Args:
        predictive: a :class:`~lightning_fedbayes.PosteriorPredictive`, a Bayesian module or any other module. It is
            evaluated in evaluation mode, on the device of its parameters.
        datasets: of inputs and targets, by client, whose batches have any form that ``predictive`` takes.
        batch_size: examples at a time.
        seed: of the draws. A client's depend on its number, not on the other clients; global generators stay as they
            are.
        first: number of the first client.

    Raises:
        FedBayesError: no module, no data sets by name, a client without an example, examples that are no pairs.
    """
    found = _by_client(predictive, datasets, batch_size, seed, first, _logits)
    return {name: (each["logits"], each["target"]) for name, each in found}


def moments_of(
    predictive: nn.Module, datasets: Datasets, batch_size: int = 256, seed: int = 0, first: int = 0
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return each client's predictive means, standard deviations and targets, vectors of shape (examples · targets,).

    Args:
        predictive: a regressor, whose ``predict_step`` returns a
            :class:`~lightning_fedbayes.modules.RegressionPrediction`.
        datasets, batch_size, seed, first: see :func:`predictions_of`.

    Raises:
        FedBayesError: as :func:`predictions_of`, or ``predictive`` is no regressor.
    """
    found = _by_client(predictive, datasets, batch_size, seed, first, _regression)
    return {name: (each["mean"].flatten(), each["std"].flatten(), each["target"].flatten()) for name, each in found}


def _logits(predictive: nn.Module, batch: Any) -> Predicted:
    inputs, targets = inputs_and_targets(predictive, batch)
    return {"logits": outputs_of(predictive, inputs), "target": targets}


def _regression(predictive: nn.Module, batch: Any) -> Predicted:
    targets, predict = inputs_and_targets(predictive, batch)[1], getattr(predictive, "predict_step", None)
    prediction = predict(batch, 0) if callable(predict) else None
    if not isinstance(prediction, RegressionPrediction):
        raise FedBayesError(
            f"{type(predictive).__name__}.predict_step gives no mean and variance: give a regressor, or "
            "PosteriorPredictive(module, posterior, task='regression')"
        )
    return {"mean": prediction.mean, "std": prediction.variance.sqrt(), "target": targets}


def _by_client(
    predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int, first: int,
    predict: Callable[[nn.Module, Any], Predicted],
) -> Iterator[tuple[str, Predicted]]:
    """Yield each client's name and what ``predict`` makes of its batches."""
    check_kind("predictive", predictive, nn.Module, "give a torch.nn.Module", error=FedBayesError)
    check_at_least("batch_size", batch_size, 1, error=FedBayesError)
    check_at_least("seed", seed, -LARGEST, error=FedBayesError)
    check_at_least("first", first, 0, error=FedBayesError)
    for number, (name, dataset) in enumerate(by_name(datasets).items(), first):
        yield name, predict_data(
            predictive, dataset, batch_size, derive_seed(seed, "evaluation", client=number),
            lambda batch: predict(predictive, batch),
        )


def by_name(datasets: Datasets) -> dict[str, Dataset]:
    """Return client name → data set; raise FedBayesError if there are none, or one is empty or not map-style."""
    if isinstance(datasets, ClientDatasets):
        named: dict[str, Dataset] = dict(zip(datasets.names, datasets.datasets, strict=True))
    elif isinstance(datasets, Mapping) and datasets:
        named = dict(datasets)
    else:
        raise FedBayesError(f"datasets={shown(datasets)}: give a ClientDatasets, or a dict, client name → data set")
    for name, dataset in named.items():
        check_dataset(f"the calibration data of client {name}", dataset)
        if len(dataset) == 0:  # pyright: ignore[reportArgumentType]
            raise FedBayesError(
                f"client {name} has no held-out example: leave it out, or hold some of its data out"
            )
    return named


def check_apart(datasets: Datasets, trained_on: Dataset | None) -> None:
    """Warn, in one line, of calibration examples that were trained on, as far as data sets and indices of Subsets tell.

    Args:
        datasets: calibration data, by client.
        trained_on: training data, a ConcatDataset or ClientDatasets with all parts; None: not known, nothing is said.
    """
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
        own, total = map(sum, zip(*shared.values()))
        who, whose = ("client", "its") if len(shared) == 1 else ("clients", "their")
        rank_zero_warn(
            f"{who} {listed(shared)}: {own} of {whose} {total} calibration examples were trained on, so what is "
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
