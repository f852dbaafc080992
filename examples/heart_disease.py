"""Heart disease at four hospitals: a natural federation, not one data set divided artificially."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.hub import download_url_to_file
from torch.utils.data import TensorDataset

from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.data.clients import ClientDatasets
from lightning_fedbayes.data.splits import SplitDataModule

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""Names of the clients; their files are ``processed.<name>.data``."""

SOURCE = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
"""Folder of the files at the UCI Machine Learning Repository."""

MISSING = -9.0
"""The number that means a missing value, besides the text ``?``, as the description of the data says."""


class Attribute(NamedTuple):
    """A column of the files.

    Attributes:
        name: as in the description of the data.
        levels: the values that it can take; empty for a measurement or a count.
        zero_is_missing: 0 is impossible, and stands for a missing value.
        always_there: it is never missing, so it gets no indicator.
    """

    name: str
    levels: tuple[int, ...] = ()
    zero_is_missing: bool = False
    always_there: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of its encoded columns: one for a number or a yes or no, else one for each level."""
        return tuple(f"{self.name}={level}" for level in self.levels) if len(self.levels) > 2 else (self.name,)


ATTRIBUTES = (
    Attribute("age", always_there=True),
    Attribute("sex", levels=(0, 1), always_there=True),
    Attribute("cp", levels=(1, 2, 3, 4), always_there=True),
    Attribute("trestbps", zero_is_missing=True),
    Attribute("chol", zero_is_missing=True),
    Attribute("fbs", levels=(0, 1)),
    Attribute("restecg", levels=(0, 1, 2)),
    Attribute("thalach", zero_is_missing=True),
    Attribute("exang", levels=(0, 1)),
    Attribute("oldpeak"),
    Attribute("slope", levels=(1, 2, 3)),
    Attribute("ca"),
    Attribute("thal", levels=(3, 6, 7)),
)
"""The thirteen attributes, in the order of the files."""

TARGET = Attribute("num", levels=(0, 1, 2, 3, 4), always_there=True)
"""The column after them: the diagnosis; 0 is no vessel narrowed by half or more."""


def read_patients(path: Path) -> tuple[Tensor, Tensor]:
    """Return a hospital's attributes, float64 of shape (patients, 13), NaN where missing, and labels, 1 if ill."""
    known = (*ATTRIBUTES, TARGET)
    table = torch.from_numpy(np.genfromtxt(path, delimiter=",", missing_values="?", ndmin=2))
    if table.shape[1] != len(known):
        raise ValueError(f"{path}: {table.shape[1]} columns instead of {len(known)}; give the processed files")
    missing = table.isnan() | (table == MISSING)
    for column, attribute in enumerate(known):
        values = table[:, column]
        if attribute.zero_is_missing:
            missing[:, column] |= values == 0
        if attribute.always_there and missing[:, column].any():
            raise ValueError(f"{path}: {attribute.name} is missing for some patients; leave out their lines")
        there = values[~missing[:, column]]
        if attribute.levels and not torch.isin(there, there.new_tensor(attribute.levels)).all():
            raise ValueError(f"{path}: {attribute.name} has values other than {attribute.levels}; correct the file")
    values = table.masked_fill(missing, torch.nan)
    return values[:, :-1], (values[:, -1] > 0).long()


COLUMNS = tuple(column for attribute in ATTRIBUTES for column in attribute.columns)
"""Names of the encoded columns, in order."""

INDICATORS = tuple(f"{attribute.name} missing" for attribute in ATTRIBUTES if not attribute.always_there)
"""Names of the columns that are 1 where an attribute is missing, in order."""


def encode(attributes: Tensor) -> Tensor:
    """Encode attributes: one column per number, per yes or no, and per level of any other attribute.

    Args:
        attributes: float64, shape (patients, 13), NaN where missing.

    Returns: float64, shape (patients, 22), in the order of :data:`COLUMNS`; NaN in all columns of a missing attribute.
    """
    columns = []
    for attribute, values in zip(ATTRIBUTES, attributes.split(1, dim=1), strict=True):
        if len(attribute.columns) > 1:
            levels = (values == values.new_tensor(attribute.levels)).double()
            columns.append(levels.masked_fill(values.isnan(), torch.nan))
        else:
            columns.append(values)
    return torch.cat(columns, dim=1)


def indicators(attributes: Tensor) -> Tensor:
    """Return 1 where an attribute that may be missing is missing, else 0; float32, shape (patients, 10)."""
    may_be_missing = torch.tensor([not attribute.always_there for attribute in ATTRIBUTES])
    return attributes[:, may_be_missing].isnan().float()


def stratified_split(labels: Tensor, fraction: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """Return indices, sorted, of a client's training and test examples, by a draw of ``seed`` and ``client``.

    Of each class, the nearest number to ``fraction`` is in test.
    """
    order = torch.randperm(len(labels), generator=generator(seed, "partition", client=client))
    classes = [order[labels[order] == label] for label in labels.unique()]
    test = torch.cat([examples[: round(fraction * len(examples))] for examples in classes])
    in_test = torch.zeros(len(labels), dtype=torch.bool).index_fill(0, test, True)
    return (~in_test).nonzero().flatten(), test.sort().values


class HospitalsDataModule(SplitDataModule):
    """Heart disease at four hospitals, one client each: 303 patients of Cleveland, 294 Hungarian, 123 Swiss, 200 of VA.

    A natural federation: 46, 36, 93 and 75 % of the patients are ill, and the hospitals recorded different attributes.
    Inputs are float32 of shape (batch, 32), labels int64, 1 if any vessel is narrowed by half or more (``num`` > 0).
    The training data are a :class:`~lightning_fedbayes.ClientDatasets`, so :class:`~lightning_fedbayes.FederatedBayes`
    takes no partition.

    A value is missing where the file has ``?`` or −9, and where a resting blood pressure, cholesterol or heart rate is
    0: in VA the blood pressure of one patient and the cholesterol of 49, in Switzerland everyone's cholesterol.
    Negative ``oldpeak`` (the ST segment was elevated) is a measurement. Attributes of three and more levels become one
    column per level; these 22 columns are standardised, and a missing value becomes 0, the mean, in all columns of its
    attribute. Ten more columns are 1 where an attribute (all but age, sex and chest pain) was missing, else 0. The
    columns are the same for all files and seeds. They nearly identify the hospital (vessels were hardly counted outside
    Cleveland), so a network can learn each hospital's share of ill patients from them: compare its accuracy with that
    of predicting each hospital's majority.

    Means and standard deviations are those of the present values in the training splits of all hospitals. For that,
    each hospital reveals counts, sums and sums of squares of every column, which it can send once, also under secure
    summation.

    Each hospital's patients are split into training and test with the same share of ill patients. The validation
    loader holds the test examples of all hospitals, in the order of ``test_sets``, so a choice made by validation
    scores has no independent test.

    Args:
        directory: holds ``processed.cleveland.data``, ``processed.hungarian.data``, ``processed.switzerland.data`` and
            ``processed.va.data``.
        batch_size: examples per batch.
        test_fraction: share of each hospital's patients that is held out, strictly between 0 and 1.
        seed: seed of the split.
        download: get the files that are missing from the UCI Machine Learning Repository, in ``prepare_data``.

    Attributes:
        train_sets, test_sets: hospital → its training and test examples; known after ``setup``.

    Raises:
        FileNotFoundError: a hospital's file is missing, and ``download`` is not set.
        ValueError: a file is malformed, or a hospital too small to be split.

    Source: A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, *Heart Disease*, UCI Machine Learning Repository, 1988.
    The authors ask publications to name these investigators.
    """

    num_features = len(COLUMNS) + len(INDICATORS)
    num_classes = 2

    train_sets: dict[str, TensorDataset]
    test_sets: dict[str, TensorDataset]

    def __init__(
        self,
        directory: str | Path,
        batch_size: int = 16,
        test_fraction: float = 0.2,
        seed: int = 0,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, seed)
        directory = str(directory)  # a path would keep checkpoints from loading with weights_only
        self.save_hyperparameters(logger=False)
        self.files = {hospital: Path(directory) / f"processed.{hospital}.data" for hospital in HOSPITALS}
        for hospital, path in self.files.items():
            if not download and not path.is_file():
                raise FileNotFoundError(
                    f"the patients of {hospital} are missing: there is no file {path}; give the directory that holds "
                    f"the four processed files, get them from {SOURCE}, or pass download=True"
                )
        self.test_fraction = test_fraction
        self.download = download

    def prepare_data(self) -> None:
        """Download the files that are missing, if ``download`` is set."""
        for path in self.files.values():
            if self.download and not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                download_url_to_file(f"{SOURCE}/{path.name}", str(path), progress=False)

    def setup(self, stage: str | None = None) -> None:
        """Read, check, split, encode and standardise the data, the same way for every stage."""
        train, test = {}, {}
        for client, (hospital, path) in enumerate(self.files.items()):
            attributes, labels = read_patients(path)
            parts = stratified_split(labels, self.test_fraction, self.seed, client)
            if not all(map(len, parts)):
                raise ValueError(
                    f"{hospital} has {len(labels)} patients: test_fraction={self.test_fraction} leaves none to "
                    f"{'train on' if not len(parts[0]) else 'test with'}; change it"
                )
            train[hospital], test[hospital] = ((attributes[part], labels[part]) for part in parts)
        known = torch.cat([encode(attributes) for attributes, _ in train.values()])
        mean = known.nanmean(0)
        std = (known - mean).square().nanmean(0).sqrt()

        def scaled(attributes: Tensor) -> Tensor:
            values = ((encode(attributes) - mean) / std.where(std > 0, 1)).nan_to_num(0).float()
            return torch.cat([values, indicators(attributes)], 1)

        self.train_sets, self.test_sets = (
            {hospital: TensorDataset(scaled(attributes), labels) for hospital, (attributes, labels) in part.items()}
            for part in (train, test)
        )
        self.train = ClientDatasets(self.train_sets)
        self.validation = self.test = ClientDatasets(self.test_sets)
