"""Width and accuracy that IVON learns on digits, by squared gradients and as published, from several first widths.

    python -m benchmarks.layers.width [--epochs 400] [--mnist FOLDER]

A network of 64-50-10 on 1,200 digits, batches of 16, the prior N(0, 1); accuracy is that of the mean on 597 others.
With a folder that has MNIST's train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz: a LeNet on 3,000 of them,
batches of 32, 30 epochs, accuracy on 1,000 others, at several temperatures and priors.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from lightning_fedbayes.modules.networks import lenet
from lightning_fedbayes.optim import IVON
from lightning_fedbayes.tables import markdown_table

KINDS: dict[str, dict[str, Any]] = {
    "squares": {"curvature": "squares"},
    "ivon, 0.999": {"curvature": "ivon", "betas": (0.9, 0.999)},
    "ivon, 0.99999": {"curvature": "ivon", "betas": (0.9, 0.99999)},
}
"""Name → options of the optimizer."""
EPOCHS = (20, 40, 60, 200, 400)


def train(options: dict[str, Any], epochs: int, seed: int = 0) -> dict[int, tuple[float, float]]:
    """Return accuracy of the mean and the median standard deviation after each of :data:`EPOCHS`."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    random = torch.Generator().manual_seed(seed)
    train, test = torch.randperm(len(x), generator=random).split([1200, len(x) - 1200])
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    optimizer = IVON(network.parameters(), num_examples=1200, **options)
    found = {}
    for epoch in range(1, epochs + 1):
        for batch in train[torch.randperm(1200, generator=random)].split(16):
            with optimizer.sampled():
                F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
        if epoch in EPOCHS:
            variances = [each.flatten() for each in optimizer.posterior(network).variance.values()]
            with torch.no_grad():
                accuracy = (network(x[test]).argmax(1) == y[test]).float().mean()
            found[epoch] = float(accuracy), float(torch.cat(variances).sqrt().median())
    return found


def train_lenet(folder: Path, epochs: int, temperature: float, prior_std: float) -> tuple[float, float]:
    """Return the best accuracy of the mean over the epochs, and that after the last."""
    images = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:16 + 4000 * 784]
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())[8:8 + 4000]
    x = (torch.frombuffer(bytearray(images), dtype=torch.uint8).view(4000, 1, 28, 28) / 255 - 0.13) / 0.31
    y = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    torch.manual_seed(0)
    network, accuracies = lenet(), []
    optimizer = IVON(network.parameters(), num_examples=3000, temperature=temperature, prior_std=prior_std)
    for _ in range(epochs):
        for batch in torch.randperm(3000).split(32):
            with optimizer.sampled():
                F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracies.append(float((network(x[3000:]).argmax(1) == y[3000:]).float().mean()))
    return max(accuracies), accuracies[-1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--mnist", type=Path)
    arguments = parser.parse_args()
    epochs = arguments.epochs
    if arguments.mnist is not None:
        rows = []
        for temperature, prior_std in ((1.0, 1.0), (1.0, 0.1), (0.1, 1.0), (0.05, 1.0)):
            found = train_lenet(arguments.mnist, min(epochs, 30), temperature, prior_std)
            rows.append([f"{temperature:g}", f"{prior_std:g}", *(f"{accuracy:.3f}" for accuracy in found)])
        print(markdown_table(["temperature", "prior_std", "best epoch", "last epoch"], rows))
        return
    rows = []
    for name, options in KINDS.items():
        for first in (None, 0.1, 1.0, 10.0):
            found = train({**options, "hessian_init": first}, epochs if first is None else min(epochs, 60))
            cells = ["{:.3f} / {:.3f}".format(*found[each]) if each in found else "" for each in EPOCHS]
            rows.append([name, "left out" if first is None else f"{first:g}", *cells])
    print(markdown_table(["curvature", "hessian_init", *(f"{epoch} epochs" for epoch in EPOCHS)], rows))


if __name__ == "__main__":
    main()
