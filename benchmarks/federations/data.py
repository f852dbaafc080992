"""The federations: who the clients are, and which of its own examples each trains with, chooses by and is tested on."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks.readers import read_images, standardisation_of
from lightning_fedbayes.core.seeding import generator

Task = Literal["classification", "regression", "survival"]
FEWEST = 5
"""Clients with fewer examples are left out: they cannot be divided into three parts."""
FEW, WHOLE = 20, 512
"""Whole values up to which a target is a class, and rows of a batch of survival, whose risk sets lie in a batch."""
HELD_OUT = 0.2
"""Share of a client's examples in its tuning and validation parts together, and as much in its test part."""


class Examples(NamedTuple):
    """Inputs (examples, *) and targets (examples,); of survival (examples, 2): event and time."""

    inputs: Tensor
    targets: Tensor

    def take(self, rows: Tensor | np.ndarray) -> Examples:
        """Return some of the examples."""
        rows = torch.as_tensor(rows)
        return Examples(self.inputs[rows], self.targets[rows])

    def dataset(self) -> TensorDataset:
        """Return them as a data set."""
        return TensorDataset(self.inputs, self.targets)


class Parts(NamedTuple):
    """A client's own examples.

    Attributes:
        train: for the parameters.
        tuning: for what is chosen within a method: settings, number of rounds, λ and thresholds.
        validation: for the choice of the method.
        test: for the scores.
    """

    train: Examples
    tuning: Examples
    validation: Examples
    test: Examples


class Federation(NamedTuple):
    """A federation and the size of its networks.

    Attributes:
        task: of all clients.
        clients: by name.
        outputs: of the network.
        hidden: widths of the hidden layers; empty for a linear model.
        batch: examples per step.
        local_epochs: of a round.
        rounds: numbers of rounds to choose from.
    """

    task: Task
    clients: dict[str, Parts]
    outputs: int
    hidden: tuple[int, ...] = ()
    batch: int = 32
    local_epochs: int = 5
    rounds: tuple[int, ...] = (2, 5, 10)


def divide(clients: Mapping[str, Examples], seed: int) -> dict[str, Parts]:
    """Divide each client's examples at random: 60 % training, 10 % tuning, 10 % validation, 20 % test.

    A client with fewer than :data:`FEWEST` examples is left out.
    """
    parts = {}
    for number, (name, own) in enumerate(clients.items()):
        size = len(own.targets)
        if size >= FEWEST:
            order = torch.randperm(size, generator=generator(seed, "partition", client=number))
            parts[name] = cut(own.take(order), number)
    return parts


def cut(own: Examples, number: int) -> Parts:
    """Divide the examples of a client by their order: the first 60 % are for training, the last 20 % for the test."""
    size = len(own.targets)
    held = max(1, round(HELD_OUT * size))
    rows = torch.arange(size)
    first, last = size - 2 * held, size - held
    return Parts(own.take(rows[:first]), *halves(own.take(rows[first:last]), number), own.take(rows[last:]))


def halves(held: Examples, number: int) -> tuple[Examples, Examples]:
    """Divide what is kept from training by its order, half for tuning and half for validation.

    Of an odd number, such as a single example, a client of even ``number`` has one more for tuning, one of odd number
    for validation. So a client may lack one of the two parts; over many clients they are of one size.
    """
    size = len(held.targets)
    rows, first = torch.arange(size), (size + 1 - number % 2) // 2
    return held.take(rows[:first]), held.take(rows[first:])


def standardised(clients: Mapping[str, Parts], targets: bool = False) -> dict[str, Parts]:
    """Standardise inputs, and targets if asked for, by the means and deviations of all training parts.

    Clients can compute these together from sums. A missing value (NaN) becomes 0.
    """
    scale = standardisation_of(torch.cat([parts.train.inputs for parts in clients.values()]).double())
    target = standardisation_of(torch.cat([parts.train.targets for parts in clients.values()]).double()[:, None])

    def apply(own: Examples) -> Examples:
        y = target.apply(own.targets.double()[:, None])[:, 0] if targets else own.targets
        return Examples(scale.apply(own.inputs.double()), y)

    return {name: Parts(*map(apply, parts)) for name, parts in clients.items()}


# -- tables ------------------------------------------------------------------------------------------------------------


def from_csv(
    files: Sequence[Path],
    client: str | None,
    target: str,
    seed: int,
    drop: Sequence[str] = (),
    squares: Sequence[str] = (),
    task: Task | None = None,
    event: str | None = None,
    **options: Any,
) -> Federation:
    """Make a federation of any table, in one file or several.

    A column whose values are all numbers is one feature; any other one becomes a column of zeros and ones for each of
    its values but the first. An empty cell is missing.

    Args:
        files: each with a head, which names the columns of the first.
        client: column that names the client of a row; None: each file is a client.
        target: column to predict; of survival the time.
        seed: of the division.
        drop: columns that are no features, such as numbers of rows.
        squares: columns whose squares are features, too.
        task: None: survival if there is an ``event``, classification if the target is text or has at most 20 different
            whole values, otherwise regression.
        event: column of survival, 1 where the event happened at the time, 0 where the row was only seen until then.
        options: of the :class:`Federation`.

    Raises:
        SystemExit: a file has no rows or lacks a column, or the target is not of the task.
    """
    own = [name for name in (client, target, event) if name is not None]
    rows, owners = list[dict[str, str]](), dict[str, list[int]]()
    for path in files:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = list(csv.DictReader(file))
        if not found:
            raise SystemExit(f"{path} has no rows")
        missing = [name for name in dict.fromkeys((*own, *(rows or found)[0])) if name not in found[0]]
        if missing:
            raise SystemExit(f"{path}: there is no column {', '.join(missing)}; its columns are {', '.join(found[0])}")
        for row in found:
            owners.setdefault(str(path) if client is None else row[client], []).append(len(rows))
            rows.append(row)
    columns = []
    for name in rows[0]:
        if name not in (*own, *drop):
            values = numbers([row[name] for row in rows])
            if values is None:
                levels = sorted({row[name] for row in rows} - {""})
                columns += [[float(row[name] == level) for row in rows] for level in levels[1:]]
            else:
                columns += [values, *([[value**2 for value in values]] if name in squares else [])]
    task, y, outputs = targets_of(rows, target, event, task)
    x = torch.tensor(columns, dtype=torch.float64).T
    clients = divide({name: Examples(x[own], y[own]) for name, own in owners.items()}, seed)
    if task == "survival":
        options = {"batch": WHOLE, **options}
    return Federation(task, standardised(clients, targets=task == "regression"), outputs, **options)


def targets_of(
    rows: Sequence[Mapping[str, str]], target: str, event: str | None, task: Task | None
) -> tuple[Task, Tensor, int]:
    """Return the task of a column, its targets, and the outputs of a network that predicts them.

    Raises:
        SystemExit: the column, or that of the events, is not of the task.
    """
    texts = [row[target] for row in rows]
    values = numbers(texts)
    known = sorted(set(texts), key=lambda text: (values[texts.index(text)], text) if values else (0, text))
    if task is None:
        few = values is None or (len(known) <= FEW and all(value.is_integer() for value in values))
        task = "survival" if event is not None else "classification" if few else "regression"
    if task == "classification":
        return task, torch.tensor([known.index(text) for text in texts]), len(known)
    if values is None or any(value != value for value in values):
        raise SystemExit(f"{target!r} is not a number in every row, which {task} needs; give another target or task")
    if task == "regression":
        return task, torch.tensor(values), 1
    happened = numbers([row[event] for row in rows]) if event is not None else None
    if happened is None or not set(happened) <= {0.0, 1.0} or min(values) < 0:
        raise SystemExit(f"survival needs times that are not negative ({target!r}) and events of 0 or 1 ({event!r})")
    return task, torch.tensor([happened, values]).T, 1


def numbers(texts: Sequence[str]) -> list[float] | None:
    """Return a column's numbers, NaN where it is empty; None if it holds anything else."""
    try:
        return [float(text) if text else math.nan for text in texts]
    except ValueError:
        return None


def exam(folder: Path, seed: int) -> Federation:
    """Exam scores of 4,059 pupils in 65 schools of London."""
    return from_csv([find(folder, "exam.csv")], "school", "normexam", seed, drop=("rownames", "student"))


def contraception(folder: Path, seed: int) -> Federation:
    """Use of contraception by 1,934 women in 60 districts of Bangladesh."""
    files = [find(folder, "contraception.csv")]
    return from_csv(files, "district", "use", seed, drop=("rownames", "woman"), squares=("age",))


# -- hospitals ---------------------------------------------------------------------------------------------------------


class Heart(NamedTuple):
    """A hospital's patients as FLamby has them, not yet standardised."""

    train: Examples
    test: Examples


def heart_patients(folder: Path) -> dict[str, Heart]:
    """Return the patients of Fed-Heart by hospital, with FLamby's columns and its division into training and test.

    The columns slope, ca and thal are left out, then rows with a missing value; chest pain and the resting
    electrocardiogram become one column for each value but the first; 13 features, labels 0 or 1.
    """
    rows = {}
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        lines = find(folder, f"processed.{hospital}.data").read_text().split()
        cells = [[cell for column, cell in enumerate(line.split(",")) if column not in (10, 11, 12)] for line in lines]
        rows[hospital] = np.array([line for line in cells if "?" not in line], dtype=np.float64)
    every = np.concatenate(list(rows.values()))
    levels = {column: np.unique(every[:, column])[1:] for column in (2, 6)}
    patients = {}
    for hospital, table in rows.items():
        rest = [column for column in range(10) if column not in levels]
        columns = [table[:, rest], *(table[:, [column]] == known for column, known in levels.items())]
        y = (table[:, 10] > 0).astype(np.int64)
        own = Examples(torch.from_numpy(np.concatenate(columns, 1)).float(), torch.from_numpy(y))
        enough = len(np.unique(y)) > 1 and min(np.bincount(y, minlength=2)) > 2
        train, test = train_test_split(
            np.arange(len(y)), test_size=1 - 0.66, train_size=0.66, random_state=43, stratify=y if enough else None
        )
        patients[hospital] = Heart(own.take(np.sort(train)), own.take(np.sort(test)))
    return patients


def scaled(own: Examples, like: Tensor) -> Examples:
    """Standardise by the mean and deviation of ``like``, as FLamby does."""
    return Examples((own.inputs - like.mean(0)) / (like.std(0) + 1e-9), own.targets)


def heart(folder: Path, seed: int) -> Federation:
    """Heart disease of 740 patients at four hospitals: FLamby's division, each hospital standardised by itself."""
    clients = {}
    for number, (hospital, own) in enumerate(heart_patients(folder).items()):
        train, test = (scaled(part, own.train.inputs) for part in own)
        clients[hospital] = kept_apart(train, test, seed, number)
    return Federation("classification", clients, 2)


def heart_one_scale(folder: Path, seed: int) -> Federation:
    """Fed-Heart with all hospitals standardised alike, by sums that they share, as FLamby's pooled test set is."""
    clients = {}
    for number, (hospital, own) in enumerate(heart_patients(folder).items()):
        clients[hospital] = kept_apart(*own, seed, number)
    return Federation("classification", standardised(clients), 2)


def kept_apart(train: Examples, test: Examples, seed: int, client: int) -> Parts:
    """Take the tuning and validation parts from a client's training examples where the test part is given."""
    order = torch.randperm(len(train.targets), generator=generator(seed, "partition", client=client))
    held = max(1, round(HELD_OUT * len(order)))
    return Parts(train.take(order[held:]), *halves(train.take(order[:held]), client), test)


def tcga_patients(folder: Path) -> list[Heart]:
    """Return the patients of Fed-TCGA-BRCA by region: 39 columns, event and time, in FLamby's division."""
    with find(folder, "brca.csv").open(newline="") as file:
        table = {row[0]: [float(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]}
    with find(folder, "train_test_split.csv").open(newline="") as file:
        part_of = {row["pid"]: row["fold2"] for row in csv.DictReader(file)}
    regions = []
    for region in range(6):
        parts = []
        for part in ("train", "test"):
            rows = torch.tensor([row for patient, row in table.items() if part_of.get(patient) == f"{part}_{region}"])
            parts.append(Examples(rows[:, :39], rows[:, 39:]))
        regions.append(Heart(*parts))
    return regions


def tcga_brca(folder: Path, seed: int) -> Federation:
    """Survival of 1,088 patients with breast cancer in six regions: FLamby's division; risk sets within a region."""
    clients = {}
    for number, (train, test) in enumerate(tcga_patients(folder)):
        train, test = (Examples(part.inputs, scaled_times(part.targets)) for part in (train, test))
        clients[f"region {number}"] = kept_apart(train, test, seed, number)
    return Federation("survival", standardised(clients), 1, batch=512, local_epochs=10)


def scaled_times(targets: Tensor) -> Tensor:
    """Return events and times in years."""
    return targets * torch.tensor([1.0, 1 / 365.25])


# -- people and pictures -----------------------------------------------------------------------------------------------

WINDOW = 128
"""Samples of a window, 2.56 s."""


def hapt(folder: Path, seed: int) -> Federation:
    """Activities of 30 people (six, and six changes of posture) from windows of a phone's sensors.

    Windows do not overlap. Of each person and activity the first 60 % are for training and the last 20 % for the test,
    so that neighbours in time are not on both sides. The seed changes only the networks.
    """
    data = np.load(find(folder, "hapt_int16.npz"))
    signal = np.concatenate([data["acc"] * data["acc_scale_g"], data["gyro"] * data["gyro_scale_rad_s"]], 1)
    label, user = data["label"], data["user"]
    group = np.stack([label, user, data["recording"]], 1)
    starts = np.flatnonzero(np.any(np.diff(group, axis=0, prepend=group[:1] - 1) != 0, axis=1))
    windows: dict[str, dict[int, list[np.ndarray]]] = {}
    for start, stop in zip(starts, [*starts[1:], len(label)], strict=True):
        if label[start] > 0:
            own = windows.setdefault(f"person {user[start]}", {}).setdefault(int(label[start]) - 1, [])
            own += [features(signal[at : at + WINDOW]) for at in range(start, stop - WINDOW + 1, WINDOW)]
    clients = {}
    for person, (name, by_label) in enumerate(windows.items()):
        parts = [
            cut(Examples(torch.from_numpy(np.stack(own)), torch.full((len(own),), number)), person + number)
            for number, own in sorted(by_label.items())
            if len(own) >= 3
        ]
        clients[name] = Parts(*(joined(part) for part in zip(*parts)))
    return Federation("classification", standardised(clients), 12, hidden=(32,))


def features(window: np.ndarray) -> np.ndarray:
    """Return simple statistics of a window, shape (samples, 6), of its axes and of the lengths of both vectors."""
    lengths = np.stack([np.linalg.norm(window[:, :3], axis=1), np.linalg.norm(window[:, 3:], axis=1)], 1)
    every = np.concatenate([window, lengths], 1)
    change = np.abs(np.diff(every, axis=0)).mean(0)
    quartiles = np.quantile(every, [0.25, 0.5, 0.75], axis=0).reshape(-1)
    drift = every[-16:].mean(0) - every[:16].mean(0)
    return np.concatenate([every.mean(0), every.std(0), every.min(0), every.max(0), change, quartiles, drift])


def joined(parts: Sequence[Examples]) -> Examples:
    """Join examples."""
    return Examples(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))


def dealt(data: Examples, partition: Any, seed: int) -> dict[str, Parts]:
    """Deal examples out to clients, and divide those of each."""
    rows = partition.split(data.targets, seed).indices
    return divide({f"client {number}": data.take(own) for number, own in enumerate(rows)}, seed)


def digits(folder: Path, seed: int) -> Federation:
    """Handwritten digits, ten clients, Dirichlet(0.3)."""
    x, y = load_digits(return_X_y=True)
    data = Examples(torch.from_numpy(x).float() / 16, torch.from_numpy(y))
    clients = dealt(data, fb.DirichletPartition(10, alpha=0.3), seed)
    return Federation("classification", clients, 10, hidden=(32,))


IMAGES = 5000
"""Pictures of FashionMNIST."""


def fashion_mnist(folder: Path, seed: int) -> Federation:
    """5,000 pictures of FashionMNIST, twenty clients, Dirichlet(0.3)."""
    images = read_images("fashion_mnist", folder)[0]
    rows = torch.randperm(len(images.labels), generator=generator(seed, "partition"))[:IMAGES]
    x, y = images.images[rows].float() / 255, images.labels[rows].long()
    clients = dealt(Examples(x.flatten(1), y), fb.DirichletPartition(20, alpha=0.3), seed)
    return Federation("classification", clients, 10, hidden=(32,), local_epochs=2)


def breast_cancer(folder: Path, seed: int) -> Federation:
    """Breast cancer (569 examples of scikit-learn), eight clients, Dirichlet(0.3) over the two classes."""
    x, y = load_breast_cancer(return_X_y=True)
    data = Examples(torch.from_numpy(x), torch.from_numpy(y).long())
    clients = dealt(data, fb.DirichletPartition(8, alpha=0.3), seed)
    return Federation("classification", standardised(clients), 2)


def diabetes(folder: Path, seed: int) -> Federation:
    """Progress of diabetes (442 examples of scikit-learn), eight clients sorted by body-mass index: a feature skew."""
    x, y = map(np.asarray, load_diabetes(return_X_y=True))
    order = torch.from_numpy(x[:, 2]).argsort(stable=True)  # pyright: ignore
    data = Examples(torch.from_numpy(x), torch.from_numpy(y)).take(order)
    rows = torch.arange(len(y)).tensor_split(8)
    clients = divide({f"client {number}": data.take(own) for number, own in enumerate(rows)}, seed)
    return Federation("regression", standardised(clients, targets=True), 1)


def find(folder: Path, name: str) -> Path:
    """Return the file of a name anywhere below a folder."""
    found = sorted(folder.rglob(name))
    if not found:
        raise FileNotFoundError(name)
    return found[0]


FEDERATIONS: dict[str, Callable[[Path, int], Federation]] = {
    "Fed-Heart": heart,
    "Fed-Heart (one scale)": heart_one_scale,
    "TCGA-BRCA": tcga_brca,
    "hapt": hapt,
    "Exam": exam,
    "Contraception": contraception,
    "digits": digits,
    "FashionMNIST": fashion_mnist,
    "breast cancer": breast_cancer,
    "diabetes": diabetes,
}
