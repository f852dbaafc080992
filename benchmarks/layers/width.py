"""Width and accuracy that IVON learns: from several first widths, and over 200 epochs on four data sets.

    python -m benchmarks.layers.width [--epochs 400]
    python -m benchmarks.layers.width --data DIR [--epochs 200]

The first: a network of 64-50-10 on 1,200 digits, batches of 16, the prior N(0, 1), by squared gradients and as
published; accuracy of the mean on 597 others, and the median standard deviation, over epochs. The second: the same
network, or LeNet for pictures, at IVON's defaults and several temperatures, beside Adam and mean-field variational
inference; accuracy of the mean in the best epoch and in the last. Then how far the width moves with ``hessian_init``.
Wine and digits ship with scikit-learn; DIR holds uci_regression/kin8nm/data.txt (the target in four classes) and
FashionMNIST/raw.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits, load_wine
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.networks import lenet
from benchmarks.readers import read_images
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.layers import mean_only
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.modules.sources.ivon import IVON

KINDS: dict[str, dict[str, Any]] = {
    "squares": {"curvature": "squares"},
    "ivon, 0.999": {"curvature": "ivon", "betas": (0.9, 0.999)},
    "ivon, 0.99999": {"curvature": "ivon", "betas": (0.9, 0.99999)},
}
"""Name → options of the optimizer."""
EPOCHS = (20, 40, 60, 200, 400)
TRAININGS: dict[str, dict[str, Any] | None] = {
    "IVON": {"temperature": 1.0},
    "IVON, temperature 0.1": {"temperature": 0.1},
    "Adam": None,
    "mean field": None,
}
"""Name → options of IVON, if that trains."""
SEEDS = 3


class Problem(NamedTuple):
    """Training and test examples, a network, and the size of a batch."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    network: Callable[[], nn.Module]
    batch: int


def digits(_: Path | None = None) -> Problem:
    """Return the digits, 1,200 of them to train."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order.split([1200, len(x) - 1200])
    return Problem(x[train], y[train], x[test], y[test], lambda: mlp(64, 10, [50]), 16)


def wine(_: Path | None = None) -> Problem:
    """Return scikit-learn's wines, 120 of them to train."""
    inputs, classes = load_wine(return_X_y=True)
    return table(inputs, classes, 120)


def kin8nm(folder: Path) -> Problem:
    """Return 2,000 rows of kin8nm, and 500 to test, with the quartile of the target as class."""
    rows = np.loadtxt(folder / "uci_regression" / "kin8nm" / "data.txt")[:2500]
    return table(rows[:, :-1], np.searchsorted(np.quantile(rows[:, -1], (0.25, 0.5, 0.75)), rows[:, -1]), 2000)


def fashion_mnist(folder: Path) -> Problem:
    """Return 10,000 images to train, and 2,000 of the test part."""
    (x, y), (new, labels) = [
        ((part.images[:count].float() / 255 - 0.286) / 0.353, part.labels[:count].long())
        for part, count in zip(read_images("fashion_mnist", folder), (10_000, 2_000), strict=True)
    ]
    return Problem(x, y, new, labels, lenet, 64)


def table(inputs: np.ndarray, classes: np.ndarray, count: int) -> Problem:
    """Return the rows of a table in a random order, standardised by the first ``count``, which are to train."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(inputs, dtype=torch.float32)[order], torch.tensor(classes).long()[order]
    x = (x - x[:count].mean(0)) / x[:count].std(0)
    sizes = x.shape[1], int(y.max()) + 1
    return Problem(x[:count], y[:count], x[count:], y[count:], lambda: mlp(*sizes, [50]), 16)


PROBLEMS: dict[str, Callable[[Path], Problem]] = {
    "digits": digits,
    "wine": wine,
    "kin8nm": kin8nm,
    "FashionMNIST": fashion_mnist,
}


def train(problem: Problem, options: dict[str, Any], epochs: int, seed: int = 0) -> Iterator[tuple[float, float]]:
    """Yield accuracy of the mean and the median standard deviation after each epoch of IVON."""
    torch.manual_seed(seed)
    network = problem.network()
    optimizer = IVON(network.parameters(), num_examples=len(problem.x), **options)
    for _ in range(epochs):
        for rows in torch.randperm(len(problem.x)).split(problem.batch):
            with optimizer.sampled():
                F.cross_entropy(network(problem.x[rows]), problem.y[rows]).backward()
            optimizer.step()
        yield accuracy(network, problem), width(optimizer.posterior(network))


def train_reference(problem: Problem, name: str, epochs: int, seed: int) -> Iterator[tuple[float, float]]:
    """Yield accuracy of the mean and the median standard deviation after each epoch of Adam or "mean field".

    Adam trains the network itself at its usual rate of 1e-3; "mean field" its Bayesian layers under the prior N(0, 1),
    at rates from 1e-2 to 1e-4, so that it arrives.
    """
    torch.manual_seed(seed)
    network, is_bayesian = problem.network(), name == "mean field"
    if is_bayesian:
        network = fb.bayesianize(network, types=[nn.Linear, nn.Conv2d], posterior_std=0.1)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2 if is_bayesian else 1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / epochs) if is_bayesian else 1.0)
    for _ in range(epochs):
        for rows in torch.randperm(len(problem.x)).split(problem.batch):
            loss = F.cross_entropy(network(problem.x[rows]), problem.y[rows])
            optimizer.zero_grad()
            (loss + fb.kl_divergence(network) / len(problem.x) if is_bayesian else loss).backward()
            optimizer.step()
        schedule.step()
        with mean_only(network):
            found = accuracy(network, problem)
        yield found, width(fb.read_posterior(network)) if is_bayesian else 0.0


@torch.no_grad()
def accuracy(network: nn.Module, problem: Problem) -> float:
    """Return the share of test examples that the network has right."""
    return float((network(problem.test_x).argmax(1) == problem.test_y).float().mean())


def width(posterior: fb.GaussianPosterior) -> float:
    """Return the median standard deviation."""
    return float(torch.cat([each.flatten() for each in posterior.variance.values()]).sqrt().median())


def over_starts(epochs: int) -> str:
    """Return accuracy and width on digits over epochs, by kind of curvature and ``hessian_init``."""
    rows = []
    for name, options in tqdm(KINDS.items()):
        for first in (None, 0.1, 1.0, 10.0):
            found = train(digits(), {**options, "hessian_init": first}, epochs if first is None else min(epochs, 60))
            looks = dict(enumerate(found, 1))
            cells = ["{:.3f} / {:.3f}".format(*looks[each]) if each in looks else "" for each in EPOCHS]
            rows.append([name, "left out" if first is None else f"{first:g}", *cells])
    return markdown_table(["curvature", "hessian_init", *(f"{epoch} epochs" for epoch in EPOCHS)], rows)


def over_data(folder: Path, epochs: int) -> str:
    """Return accuracy in the best and in the last epoch by data set and training, over the seeds."""
    rows = []
    for data, name in tqdm([(data, name) for data in PROBLEMS for name in TRAININGS]):
        problem, options, bests, lasts, widths = PROBLEMS[data](folder), TRAININGS[name], [], [], []
        for seed in range(SEEDS):
            found = list(
                train(problem, options, epochs, seed) if options else train_reference(problem, name, epochs, seed)
            )
            bests.append(max(each for each, _ in found))
            lasts.append(found[-1][0])
            widths.append(found[-1][1])
        falls = [best - last for best, last in zip(bests, lasts)]
        rows.append(
            [
                data,
                name,
                f"{fmean(bests):.3f}",
                f"{fmean(lasts):.3f}",
                f"{fmean(falls):.3f} ± {stdev(falls) / SEEDS**0.5:.3f}",
                f"{fmean(widths):.3f}",
            ]
        )
    return markdown_table(["data", "training", "best epoch", f"epoch {epochs}", "fall", "median σ"], rows)


def over_first_curvatures(folder: Path, epochs: int) -> str:
    """Return the width in the last epoch from three first curvatures, by data set and temperature."""
    rows = []
    for data, name in tqdm([(data, name) for data in PROBLEMS for name, options in TRAININGS.items() if options]):
        widths = []
        for first in (None, 1.0, 100.0):
            *_, (_, last) = train(PROBLEMS[data](folder), {**(TRAININGS[name] or {}), "hessian_init": first}, epochs)
            widths.append(last)
        rows.append([data, name, *(f"{each:.3f}" for each in widths), f"{max(widths) / min(widths):.2f}"])
    columns = ["data", "training", "median σ", "from hessian_init=1", "from 100", "largest / smallest"]
    return markdown_table(columns, rows)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.data is not None:
        print(over_data(arguments.data, arguments.epochs or 200))
        print()
        print(over_first_curvatures(arguments.data, arguments.epochs or 200))
    else:
        print(over_starts(arguments.epochs or 400))


if __name__ == "__main__":
    main()
