"""AFL's own code beside the exact head, on the same features and splits.

    git clone https://github.com/ZHUANGHP/Analytic-federated-learning CHECKOUT
    python -m benchmarks.foundation.peers --features FOLDER --afl CHECKOUT [--seeds 3]

AFL (He et al. 2025) takes one exchange, too: each client solves a ridge regression of one-hot labels, and the server
joins the solutions. The checkout has no licence, so none of it is here; its calls of ``.cuda()`` do nothing. Scores are
cells of results/heads.jsonl, for ``python -m benchmarks.foundation.run``. Printed is how far AFL's weights are from
those of the ridge regression by sums.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.foundation.features import kept
from benchmarks.foundation.run import AFL, FILE, Cell, Task, cells_of, cifar, scored

RIDGE = 1.0
"""λ of each client, their default on CIFAR-10."""


def theirs(afl: Any, task: Task) -> Tensor:
    """Return AFL's weights, shape (features, classes), of the sum of the clients' ridges."""
    width = task.train[0].shape[1]
    options = Namespace(feat_size=width, num_classes=task.classes, rg=RIDGE, gpu=None)
    head, found = afl.LinearAnalytic(width, task.classes), []
    for client in task.clients.unique().tolist():
        own = TensorDataset(*(each[task.clients == client] for each in task.train))
        found.append(afl.local_update(DataLoader(own, 512), nn.Identity(), head, options))
    weights, _, _ = afl.aggregation(*(list(each) for each in zip(*found)), options)
    return weights


def ours(task: Task) -> Tensor:
    """Return the ridge regression by the sums of an exact head's clients, without its bias, at the same λ."""
    head, parts = fb.BayesianHead(task.classes, "one_hot"), task.clients.unique().tolist()
    sums = [head.sums(*(each[task.clients == client] for each in task.train)) for client in parts]
    every = sum(sums[1:], sums[0])
    gram, moment = every.gram[:-1, :-1], every.moment[:-1]
    return torch.linalg.solve(gram + len(parts) * RIDGE * torch.eye(len(gram)).double(), moment)


def here(self: Any, *_: Any, **__: Any) -> Any:
    """Return what was to be moved, unmoved."""
    return self


def run(afl: Any, task: Task) -> tuple[dict[str, float], float, int]:
    """Return the scores of AFL, the largest difference of its weights from ours relative to the largest weight, and how
    many test images the two put into different classes.
    """
    with (
        patch.object(torch.Tensor, "cuda", here),
        patch.object(nn.Module, "cuda", here),
        patch.object(np, "mat", np.asmatrix, create=True),  # gone since NumPy 2
    ):
        started = time.perf_counter()
        weights = theirs(afl, task)
        seconds = time.perf_counter() - started
    logs = {
        name: (features.double() @ weights).float().log_softmax(-1)
        for name, features in (("calibration", task.calibration[0]), ("test", task.test[0]), ("outside", task.outside))
    }
    width = len(weights)
    costs = {"seconds": seconds, "exchanges": 1, "megabytes": 8e-6 * (2 * width**2 + width * task.classes)}
    same = ours(task)
    others = int((logs["test"].argmax(1) != (task.test[0].double() @ same).argmax(1)).sum())
    return scored(task, logs, costs), float((weights - same).abs().max() / same.abs().max()), others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--afl", type=Path, required=True, help="checkout of AFL's repository")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(arguments.afl))
    afl = import_module("afl")
    found = {**kept(arguments.features, "cifar", dict), **kept(arguments.features, "outside", dict)}
    done = study.read(FILE, Cell)
    for cell in cells_of(arguments.seeds, done):
        if cell.method != AFL or cell in done:
            continue
        scores, difference, others = run(afl, cifar(found, cell))
        study.keep(FILE, cell, scores)
        print(
            f"{cell.examples} images, {cell.split}, seed {cell.seed}: accuracy {scores['accuracy']:.4f}, "
            f"weights differ by {difference:.1e}, classes of {others} test images",
            flush=True,
        )


if __name__ == "__main__":
    main()
