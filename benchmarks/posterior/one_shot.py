"""One round on FashionMNIST: the average, Laplace posteriors, and FedFisher's own code on the same local networks.

    python -m benchmarks.posterior.one_shot --data DIR [--fedfisher CHECKOUT] [--seeds 3]

LeNet without biases, five clients, Dirichlet(0.1), 30 local epochs of SGD (rate 0.01, momentum 0.9, batches of 64) from
the same weights: the settings of FedFisher's code, and its split. It chooses by the accuracy on 500 of the training
images when to stop; our prior, or damping, is chosen by the same. CHECKOUT is a clone of Divyansh03/FedFisher, which
needs nngeometry 0.3. About 12 minutes per seed on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.readers import ImageDataModule
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.tables import markdown_table

CLIENTS, ALPHA, EPOCHS, BATCH, RATE, CHOSEN_ON, SPLIT_SEED = 5, 0.1, 30, 64, 0.01, 500, 3
DAMPINGS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
STDS = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def dealt(labels: Tensor) -> list[Tensor]:
    """Return each client's rows as FedFisher's code deals them: clients' proportions of classes, scaled by class."""
    random = np.random.RandomState(SPLIT_SEED)  # the generator of their code
    proportions = random.dirichlet([ALPHA] * 10, CLIENTS)
    parts: list[list[Tensor]] = [[] for _ in range(CLIENTS)]
    for label in range(10):
        rows = torch.from_numpy(random.permutation(np.flatnonzero(labels.numpy() == label)))
        ends = np.cumsum(proportions[:, label] / proportions[:, label].sum())[:-1] * len(rows)
        for part, own in zip(parts, rows.tensor_split(ends.astype(int).tolist())):
            part.append(own)
    return [torch.cat(part) for part in parts]


def lenet() -> nn.Sequential:
    """Return the LeNet of FedFisher's code."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120, bias=False),
        nn.ReLU(),
        nn.Linear(120, 84, bias=False),
        nn.ReLU(),
        nn.Linear(84, 10, bias=False),
    )


def trained(start: nn.Module, data: TensorDataset, what: str) -> nn.Module:
    """Return a client's network after its local epochs."""
    network = copy.deepcopy(start)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
    inputs, labels = data.tensors
    for _ in tqdm(range(EPOCHS), desc=what, leave=False):
        for rows in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    return network


def scores(network: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Return accuracy, in percent, and NLL."""
    inputs, labels = data.tensors
    with torch.no_grad():
        logits = network(inputs)
    accuracy = 100 * (logits.argmax(1) == labels).float().mean()
    return float(accuracy), float(nn.functional.cross_entropy(logits, labels))


def with_values(network: nn.Module, values: Tensor | dict[str, Tensor]) -> nn.Module:
    """Return a copy of a network with other parameters."""
    found = copy.deepcopy(network)
    if isinstance(values, Tensor):
        vector_to_parameters(values, found.parameters())
    else:
        found.load_state_dict(values)
    return found


def ours(networks: Sequence[nn.Module], clients: Sequence[TensorDataset], chosen_on: TensorDataset) -> dict[str, Any]:
    """Return the fused networks: the average, the product of diagonal Laplace posteriors, the sum of Kronecker sites.

    Of a posterior its mean predicts, as the source's does.
    """
    sizes = [len(each) for each in clients]
    loaders = [DataLoader(each, 256) for each in clients]
    points = [GaussianPosterior.point_mass(dict(each.named_parameters())) for each in networks]
    averaged = fb.fuse("weighted_average", points, sizes)
    sites = [fb.KroneckerLaplace().site(*each) for each in zip(networks, tqdm(loaders, desc="factors", leave=False))]
    precisions = [
        {name: 1 / variance - 1 for name, variance in fb.Laplace().posterior(*each).variance.items()}
        for each in zip(networks, tqdm(loaders, desc="diagonals", leave=False))
    ]
    found: dict[str, dict[float, nn.Module]] = {
        "fb.Laplace, product, s": {},
        "fb.KroneckerLaplace, s": {},
        "fb.KroneckerLaplace, damping": {},
    }
    for damping in DAMPINGS:
        one_shot = fb.KroneckerLaplace(fb.Laplace(prior_std=1.0), damping)
        found["fb.KroneckerLaplace, damping"][damping] = with_values(networks[0], dict(one_shot.fuse(sites).mean))
    for std in STDS:
        one_shot = fb.KroneckerLaplace(fb.Laplace(prior_std=std))
        found["fb.KroneckerLaplace, s"][std] = with_values(networks[0], dict(one_shot.fuse(sites).mean))
        shares = [size / sum(sizes) for size in sizes]
        posteriors = [
            GaussianPosterior(dict(each.named_parameters()), {n: 1 / (f + w / std**2) for n, f in precision.items()})
            for each, precision, w in zip(networks, precisions, shares)
        ]
        product = fb.fuse("conflation", posteriors)
        found["fb.Laplace, product, s"][std] = with_values(networks[0], dict(product.mean))
    best = {
        name: max(candidates.items(), key=lambda each: scores(each[1], chosen_on)[0])
        for name, candidates in found.items()
    }
    chosen = {f"{name} = {value:g}": network for name, (value, network) in best.items()}
    return {"average": with_values(networks[0], dict(averaged.mean)), **chosen}


def fedfisher(
    checkout: Path, networks: Sequence[nn.Module], clients: Sequence[TensorDataset], chosen_on: TensorDataset
) -> dict[str, nn.Module]:
    """Return what FedFisher's own code makes of the local networks, as its ``main.py`` calls it."""
    sys.path.insert(0, str(checkout))
    for other in ("otfusion", "dense", "pfnm", "regmean"):  # other methods, which need other packages
        stand_in: Any = ModuleType(f"algs.{other}")
        stand_in.__getattr__ = lambda name: None
        sys.modules[f"algs.{other}"] = stand_in
    one_shot = importlib.import_module("run_one_shot_algs")
    compress: Any = importlib.import_module("utils.compress_fisher")
    metrics, objects = importlib.import_module("nngeometry.metrics"), importlib.import_module("nngeometry.object")
    on_cpu = lambda *args, **options: metrics.FIM(*args, **{**options, "device": "cpu"})  # noqa: E731
    compress.FIM = on_cpu
    shares = [len(each) / sum(map(len, clients)) for each in clients]
    vectors = [parameters_to_vector(each.parameters()) for each in networks]
    factors, diagonals = [], []
    for network, data, share in zip(networks, clients, tqdm(shares, desc="FedFisher", leave=False)):
        loader = DataLoader(data, BATCH, shuffle=True)
        kfac = on_cpu(model=network, loader=loader, representation=objects.PMatKFAC, n_output=10)
        for layer, pair in kfac.data.items():
            kfac.data[layer] = [each * share for each in pair]
        factors.append(kfac)
        diagonal = on_cpu(model=network, loader=loader, representation=objects.PMatDiag, n_output=10)
        diagonals.append(diagonal.get_diag() * share)
    options = {"bs": BATCH, "device": "cpu", "n_c": 10, "dataset": "FashionMNIST", "model": "LeNet"}
    count, start = len(networks), copy.deepcopy(networks[0])
    size = len(vectors[0])
    return {
        "FedFisher's code, diagonal": one_shot.get_fisher_diag_model(
            size, count, shares, options, start, vectors, diagonals, chosen_on
        ),
        "FedFisher's code, K-FAC": one_shot.get_fisher_kfac_model(
            size, count, shares, options, start, networks, vectors, factors, chosen_on, clients
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the FashionMNIST files")
    parser.add_argument("--fedfisher", type=Path, default=None, help="clone of Divyansh03/FedFisher")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    data = ImageDataModule("fashion_mnist", arguments.data, validation_fraction=None)
    data.setup()
    assert isinstance(data.train, TensorDataset)
    assert isinstance(data.test, TensorDataset)
    inputs, labels = data.train.tensors
    clients = [TensorDataset(inputs[part], labels[part]) for part in dealt(labels)]
    rows: list[list[str]] = []
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        chosen = torch.randperm(len(labels))[:CHOSEN_ON]
        chosen_on = TensorDataset(inputs[chosen], labels[chosen])
        start = lenet()
        networks = [trained(start, each, f"seed {seed}, client {i}") for i, each in enumerate(clients)]
        fused = ours(networks, clients, chosen_on)
        if arguments.fedfisher is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                fused |= fedfisher(arguments.fedfisher, networks, clients, chosen_on)
        for name, network in fused.items():
            accuracy, nll = scores(network, data.test)
            found.setdefault(name.partition(" = ")[0], []).append((accuracy, nll))
            rows.append([str(seed), name, f"{accuracy:.2f}", f"{nll:.3f}"])
            print(*rows[-1])
    for name, each in found.items():
        parts = [list(part) for part in zip(*each)]
        errors = [statistics.stdev(part) / len(part) ** 0.5 if len(part) > 1 else float("nan") for part in parts]
        means = [statistics.mean(part) for part in parts]
        rows.append(["mean", name, f"{means[0]:.2f} ± {errors[0]:.2f}", f"{means[1]:.3f} ± {errors[1]:.3f}"])
    print(markdown_table(("seed", "one round", "accuracy, %", "NLL"), rows))


if __name__ == "__main__":
    main()
