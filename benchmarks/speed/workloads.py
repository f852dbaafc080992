"""The data, networks and losses of the workloads. Needs torch (and scikit-learn for the digits) alone."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.speed.settings import SEED, WORKLOADS, Workload

Examples = tuple[Tensor, Tensor]
"""Inputs and targets."""


@functools.cache
def client_data(name: str, data: str | None = None) -> list[Examples]:
    """Return every client's examples, the same for all sides.

    Args:
        name: of the workload.
        data: directory with FashionMNIST's gzipped training files; None makes images of their shape.
    """
    workload = WORKLOADS[name]
    generator = torch.Generator().manual_seed(SEED)
    inputs, targets = _examples(workload, workload.clients * workload.examples, data, generator)
    order = torch.randperm(len(inputs), generator=generator)[: workload.clients * workload.examples]
    parts = order.split(workload.examples)
    return [(inputs[part].contiguous(), targets[part].contiguous()) for part in parts]


def _examples(workload: Workload, count: int, data: str | None, generator: torch.Generator) -> Examples:
    """At least ``count`` examples."""
    if workload.data == "digits":
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    if workload.data == "images":
        return fashion_mnist(Path(data), count) if data else _made_images(count, generator)
    features, outputs = workload.widths[0], workload.widths[-1]
    inputs = torch.randn(count, features, generator=generator)
    scores = inputs @ torch.randn(features, outputs, generator=generator) / features**0.5
    if workload.data == "teacher":
        return inputs, scores.argmax(-1)
    return inputs, scores + 0.3 * torch.randn(scores.shape, generator=generator)


def _made_images(count: int, generator: torch.Generator) -> Examples:
    """Make images of ten smooth patterns with noise of the same variance."""
    patterns = nn.functional.interpolate(torch.randn(10, 1, 7, 7, generator=generator), size=28, mode="bilinear")
    targets = torch.randint(10, (count,), generator=generator)
    return patterns[targets] + torch.randn(count, 1, 28, 28, generator=generator), targets


def fashion_mnist(directory: Path, count: int) -> Examples:
    """The first ``count`` of FashionMNIST's training set, pixels of mean 0 and variance 1.

    Args:
        directory: holds ``train-images-idx3-ubyte.gz`` and ``train-labels-idx1-ubyte.gz``.
        count: number of examples, at most 60,000.
    """
    images = bytearray(gzip.decompress((directory / "train-images-idx3-ubyte.gz").read_bytes()))
    labels = bytearray(gzip.decompress((directory / "train-labels-idx1-ubyte.gz").read_bytes()))
    pixels = torch.frombuffer(images, dtype=torch.uint8, count=count * 784, offset=16).reshape(count, 1, 28, 28)
    return (pixels / 255 - 0.286) / 0.353, torch.frombuffer(labels, dtype=torch.uint8, count=count, offset=8).long()


def network(workload: Workload) -> nn.Sequential:
    """The deterministic network at its initial values, the same for all sides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if not workload.widths:
            return _lenet()
        features, hidden, outputs = workload.widths
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood: cross-entropy of classes, half the squared error of numbers."""
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs, targets) / 2
    return nn.functional.cross_entropy(outputs, targets)


def batches(inputs: Tensor, targets: Tensor, size: int) -> Iterator[Examples]:
    """Return a shuffled pass over a client's examples in slices of tensors."""
    order = torch.randperm(len(inputs), device=inputs.device)
    return zip(inputs[order].split(size), targets[order].split(size), strict=True)


# -- mean-field networks, ours and bayesian-torch's, whose parameters have the same names ------------------------------

POSTERIOR_STD = 0.0486
"""Initial standard deviation of every parameter: softplus(−3), as bayesian-torch has it."""

KL_WEIGHT = 1e-3
"""So small that the KL hardly matters: bayesian-torch's is a mean over the parameters, ours a sum."""


def means(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the deterministic network in its order: all but the standard deviations."""
    return [parameter for name, parameter in module.named_parameters() if "rho_" not in name]


@torch.no_grad()
def set_means(module: nn.Module, values: Iterable[Tensor]) -> None:
    """Copy ``values`` into the :func:`means` of ``module``."""
    for parameter, value in zip(means(module), values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def final_loss(name: str, parameters: Sequence[Tensor], data: str | None) -> float:
    """Return the loss of the global network (at its posterior mean) on all clients' examples, as a parity check."""
    deterministic = network(WORKLOADS[name])
    set_means(deterministic, parameters)
    return sum(float(loss(deterministic(x), y)) for x, y in client_data(name, data)) / WORKLOADS[name].clients
