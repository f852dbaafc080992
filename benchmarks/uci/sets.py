"""Regression benchmarks with published splits: the UCI data sets of Hernández-Lobato & Adams."""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.readers import read_table, standardisation_of
from lightning_fedbayes.core.errors import FederationError, check_at_least, check_choice, check_number, check_path
from lightning_fedbayes.data.splits import SplitDataModule


def available_datasets(directory: str | Path) -> tuple[str, ...]:
    """Names of the data sets in ``directory``, sorted: its folders with a file ``data/data.txt``.

    Raises:
        FederationError: there is no such directory, or no data set in it.
    """
    directory = check_path("directory", directory)
    if not directory.is_dir():
        raise FederationError(f"there is no directory {directory}; give the one that holds a folder per data set")
    names = tuple(sorted(path.parents[1].name for path in directory.glob("*/data/data.txt")))
    if not names:
        inside = ", ".join(sorted(path.name for path in directory.iterdir())[:20]) or "nothing"
        raise FederationError(
            f"{directory} holds no data set, but {inside}; give the directory that holds <data set>/data/data.txt"
        )
    return names


def read_indices(path: Path, stop: int, what: str) -> Tensor:
    """Read the integers in a file, int64, shape (number,): distinct and in [0, ``stop``), the number of ``what``.

    Raises:
        FederationError: the file cannot be read, or a number is fractional, out of range or repeated.
    """
    values = read_table(path).flatten()
    wrong = values[(values != values.floor()) | (values < 0) | (values >= stop)]
    if len(wrong):
        raise FederationError(
            f"{path} names {wrong[0].item():g} and {len(wrong) - 1} more that cannot be: data.txt has {stop} {what}, "
            f"numbered 0 to {stop - 1}; one of the two files is truncated or belongs to another data set"
        )
    indices = values.long()
    unique, counts = indices.unique(return_counts=True)
    if len(unique) < len(indices):
        raise FederationError(f"{path} names {unique[counts > 1][0].item()} twice; it belongs there once")
    return indices


def check_split(train: Tensor, test: Tensor, examples: int, where: str) -> None:
    """Raise FederationError unless every example is in exactly one part of the split."""
    times = torch.cat([train, test]).bincount(minlength=examples)
    if (times > 1).any():
        shared = times.gt(1).nonzero().flatten()
        raise FederationError(
            f"{where}: {len(shared)} examples are in training and in test, such as {shared[0].item()}; a score on "
            "examples that were trained on says nothing: get the index files anew"
        )
    if (times == 0).any():
        raise FederationError(
            f"{where}: {int((times == 0).sum())} of {examples} examples are neither in training nor in test; an index "
            "file is truncated, or belongs to another data.txt"
        )


class UCIDataModule(SplitDataModule):
    """One regression data set of a folder in the layout of Hernández-Lobato & Adams (2015), with its published splits.

    ``directory/dataset/data/`` holds ``data.txt`` (one example per line, columns apart by white space),
    ``index_features.txt`` and ``index_target.txt`` (columns, counted from 0), ``n_splits.txt``, and for each split i
    ``index_train_i.txt`` and ``index_test_i.txt`` (rows, counted from 0). Every data set of that layout works.

    Inputs are float32 of shape (batch, ``num_features``), targets float32 of shape (batch, 1). Both are standardised
    in double precision with the mean and standard deviation of the training examples; a feature that is constant there
    becomes 0. To score in original units: y = ``target_mean`` + ``target_std``·z, a variance times ``target_std``²,
    a Gaussian NLL plus log ``target_std``, a CRPS times ``target_std``.

    The published protocol has no validation split: it trains on the training split for a number of epochs fixed
    beforehand and scores the test split once. So the validation loader is over the test split, unless
    ``validation_fraction`` is given. Give it whenever a decision (a hyperparameter, early stopping, which checkpoint)
    depends on what is validated: it is then a share of the training split, and the test split stays unseen.

    Args:
        directory: holds a folder per data set; see :func:`available_datasets`.
        dataset: name of one of its folders, such as "bostonHousing".
        split: number of the split, from 0.
        batch_size: examples per batch.
        validation_fraction: share of the training split to hold out, strictly between 0 and 1; None validates with
            the test split.
        seed: seed of that share.

    Attributes:
        num_features: columns of the inputs.
        num_splits: number of splits.

    Raises:
        FederationError: the folder, a file or the split does not exist; a file is truncated, not numeric or not finite
            (with line and column); an index is out of range; training and test overlap or leave an example out; there
            is not exactly one target, or it is a feature too, or is constant in training (there is nothing to learn).
            All before training: the folder at once, ``data.txt`` in ``setup``.

    Source: Hernández-Lobato & Adams (2015), *Probabilistic Backpropagation*; used by [FedAG] §4.
    """

    num_targets = 1

    target_mean: float
    """Mean target of the training examples, in original units; known after ``setup``."""
    target_std: float
    """Standard deviation of the target in the training examples, in original units; known after ``setup``."""

    def __init__(
        self,
        directory: str | Path,
        dataset: str,
        split: int = 0,
        batch_size: int = 16,
        validation_fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed)
        known = available_datasets(directory)
        check_choice("dataset", dataset, known)
        if validation_fraction is not None:
            why = "None validates with the test split"
            check_number("validation_fraction", validation_fraction, "(0, 1)", why=why)
        directory = str(directory)  # a path would keep checkpoints from loading with weights_only
        self.save_hyperparameters(logger=False)
        self.folder = Path(directory) / dataset / "data"
        self.num_features = read_table(self.folder / "index_features.txt").numel()
        self.num_splits = int(read_table(self.folder / "n_splits.txt").flatten()[0])
        check_at_least("split", split, 0)
        if split not in range(self.num_splits):
            raise FederationError(
                f"split={split}: {dataset} has {self.num_splits} splits, numbered 0 to {self.num_splits - 1}"
            )
        self.split = split
        self.validation_fraction = validation_fraction

    def setup(self, stage: str | None = None) -> None:
        """Read, check, split and standardise the data, the same way for every stage."""
        data = read_table(self.folder / "data.txt")
        inputs, targets = self._inputs_and_targets(data)
        train, test = (
            read_indices(self.folder / f"index_{part}_{self.split}.txt", len(data), "examples")
            for part in ("train", "test")
        )
        check_split(train, test, len(data), f"{self.folder}, split {self.split}")
        validation = test
        if self.validation_fraction is not None:
            train, validation = train_test_split(train, test_size=self.validation_fraction, random_state=self.seed)
        of_inputs, of_targets = standardisation_of(inputs[train]), standardisation_of(targets[train])
        self.target_mean, self.target_std = of_targets.mean.item(), of_targets.std.item()
        if self.target_std == 0:
            raise FederationError(
                f"{self.folder}: the target is {targets[train[0]].item():g} in all {len(train)} training examples, so "
                "there is nothing to learn; does index_target.txt name the right column?"
            )
        x, y = of_inputs.apply(inputs), of_targets.apply(targets)
        self.train, self.validation, self.test = (TensorDataset(x[part], y[part]) for part in (train, validation, test))

    def _inputs_and_targets(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the features, shape (examples, num_features), and of the target, shape (examples, 1)."""
        features, target = (
            read_indices(self.folder / f"index_{part}.txt", data.shape[1], "columns") for part in ("features", "target")
        )
        if len(target) != self.num_targets:
            raise FederationError(
                f"{self.folder / 'index_target.txt'} names {len(target)} columns; name the one that is to be predicted"
            )
        if target in features:
            raise FederationError(
                f"{self.folder}: column {target.item()} is the target and a feature; take it out of index_features.txt"
            )
        return data[:, features], data[:, target]
