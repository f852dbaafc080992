"""Predictions of a module for each client's calibration data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fedbayes.callbacks.evaluator import Datasets
from lightning_fedbayes.clients.evaluation import batches_of, outputs_of
from lightning_fedbayes.core.errors import LARGEST, FedBayesError, check_at_least, check_kind, shown
from lightning_fedbayes.core.seeding import derive_seed
from lightning_fedbayes.data.clients import ClientDatasets, check_dataset
from lightning_fedbayes.layers import evaluation_mode
from lightning_fedbayes.modules.regressor import RegressionPrediction


@torch.no_grad()
def predictions_of(
    predictive: nn.Module, datasets: Datasets, batch_size: int = 256, seed: int = 0, first: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each client's logits and targets, by name.

    Logits are those of ``predictive.sample(inputs)`` if there is such a method, shape (samples, examples, classes),
    otherwise of ``predictive(inputs)``, shape (examples, classes).

    Args:
        predictive: a :class:`~lightning_fedbayes.PosteriorPredictive`, a Bayesian module or any other module. It is
            evaluated in evaluation mode, on the device of its parameters.
        datasets: of (input, target), by client.
        batch_size: examples at a time.
        seed: of the draws. A client's depend on its number, not on the other clients; global generators stay as they
            are.
        first: number of the first client.

    Raises:
        FedBayesError: no module, no data sets by name, a client without an example, examples that are no pairs.
    """
    return {
        name: (torch.cat([outputs_of(predictive, inputs) for inputs, _ in batches], -2), targets_of(batches))
        for name, batches in _batches(predictive, datasets, batch_size, seed, first)
    }


@torch.no_grad()
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
    found = {}
    for name, batches in _batches(predictive, datasets, batch_size, seed, first):
        predicted = [_regression(predictive, inputs) for inputs, _ in batches]
        mean = torch.cat([each.mean.flatten() for each in predicted])
        std = torch.cat([each.variance.sqrt().flatten() for each in predicted])
        found[name] = mean, std, targets_of(batches).flatten()
    return found


def targets_of(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the targets of all batches."""
    return torch.cat([targets for _, targets in batches])


def _regression(predictive: nn.Module, inputs: Tensor) -> RegressionPrediction:
    predict = getattr(predictive, "predict_step", None)
    prediction = predict([inputs, None], 0) if callable(predict) else None
    if not isinstance(prediction, RegressionPrediction):
        raise FedBayesError(
            f"{type(predictive).__name__}.predict_step gives no mean and variance: give a regressor, or "
            "PosteriorPredictive(module, posterior, task='regression')"
        )
    return prediction


def _batches(
    predictive: nn.Module, datasets: Datasets, batch_size: int, seed: int, first: int
) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """Yield each client's name and batches of (inputs, targets) on the module's device, the module in evaluation.

    The global generators are the client's own until the next one, and what they were at the end.
    """
    check_kind("predictive", predictive, nn.Module, "give a torch.nn.Module", error=FedBayesError)
    check_at_least("batch_size", batch_size, 1, error=FedBayesError)
    check_at_least("seed", seed, -LARGEST, error=FedBayesError)
    check_at_least("first", first, 0, error=FedBayesError)
    device = next((parameter.device for parameter in predictive.parameters()), torch.device("cpu"))
    with evaluation_mode(predictive), torch.random.fork_rng([device] if device.type == "cuda" else []):
        for number, (name, dataset) in enumerate(by_name(datasets).items(), first):
            torch.manual_seed(derive_seed(seed, "evaluation", client=number))
            yield name, [_pair(name, batch, device) for batch in batches_of(dataset, batch_size)]


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


def _pair(name: str, batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(each, Tensor) for each in batch):
        raise FedBayesError(
            f"client {name}: an example is no pair (input, target) but a {type(batch).__name__}; gather its logits and "
            "targets yourself and call fit"
        )
    return batch[0].to(device), batch[1].to(device)


def check_apart(datasets: Datasets, trained_on: Dataset | None) -> None:
    """Warn, by client, of calibration examples that were trained on, as far as data sets and indices of Subsets tell.

    Args:
        datasets: calibration data, by client.
        trained_on: training data, a ConcatDataset or ClientDatasets with all parts; None: not known, nothing is said.
    """
    if trained_on is None:
        return
    check_dataset("trained_on", trained_on)
    used = [_rows(part) for part in _parts(trained_on)]
    for name, dataset in by_name(datasets).items():
        shared = 0
        for part in _parts(dataset):
            base, rows = _rows(part)
            shared += len(set().union(*(rows & others for other, others in used if other is base)))
        if shared:
            rank_zero_warn(
                f"client {name}: {shared} of its {len(dataset)} calibration examples were trained on, so what is "  # pyright: ignore[reportArgumentType]
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
