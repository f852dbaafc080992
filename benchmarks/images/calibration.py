"""Calibration after training, without moving data: temperature and conformal sets for FedAvg's LeNet on FashionMNIST.

``python -m benchmarks.images.calibration --data DIR`` trains the FedAvg cell of the study's short rounds for three
seeds and prints two tables. One image in ten is held out and dealt to the clients by their partition; the temperature
comes from these, the sets from random halves of the test images, which are dealt to the clients, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.images.cell import make_federation, make_network, make_partition
from benchmarks.images.data import make_data
from benchmarks.images.federation import Classifier, _quiet
from benchmarks.images.settings import Settings
from lightning_fedbayes.callbacks.calibration import class_scores, predictions_of
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.data.clients import clients_of
from lightning_fedbayes.metrics.functional import calibration_diagram, negative_log_likelihood

HELD_OUT, TRAINED_ON, SPLITS, LEVEL = 0.1, 12000, 200, 0.9
FEDAVG = Settings(
    dataset="fashion_mnist",
    examples=round(TRAINED_ON / (1 - HELD_OUT)),
    validation_fraction=HELD_OUT,
    bayesian_last=0,
    rounds=100,
    local_epochs=2,
    learning_rate=0.03,
)
"""The study's short rounds, with as many images to train on."""


def dealt(dataset: Dataset, settings: Settings) -> fb.ClientDatasets:
    """Return images as the clients' own, by the partition of the cell."""
    clients = clients_of(dataset, make_partition(settings), settings.seed)
    return fb.ClientDatasets({f"client {name}": part for name, part in zip(clients.names, clients.datasets)})


def trained(settings: Settings, folder: Path) -> tuple[Classifier, fb.ClientDatasets, fb.ClientDatasets]:
    """Return the network after its federation, and the clients' held-out and test images."""
    data = make_data(settings, folder)
    data.setup()
    L.seed_everything(settings.seed, verbose=False)
    module = Classifier(make_network(settings, data), settings)
    federation = make_federation(settings)
    trainer = L.Trainer(max_epochs=settings.rounds, callbacks=[federation], limit_val_batches=0, **_quiet())
    trainer.fit(module, datamodule=data)
    return module, dealt(data.validation, settings), dealt(data.test, settings)


def scores_of(logits: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """Return accuracy and ECE (15 bins) in percent, and NLL."""
    probs = logits.softmax(-1)
    accuracy = (probs.argmax(-1) == targets).double().mean()
    nll = negative_log_likelihood(probs, targets).mean()
    return 100 * float(accuracy), 100 * float(calibration_diagram(probs, targets).ece), float(nll)


def coverages(
    clients: dict[str, tuple[Tensor, Tensor]], *, per_client: bool, generator: torch.Generator
) -> tuple[float, float, float]:
    """Return coverage over all clients, the worst client's and the mean size of the sets, after a random split.

    Args:
        clients: name → probabilities and targets.
        per_client: a threshold for each client.
        generator: of the split.
    """
    calibration, rest = {}, {}
    for name, (probs, targets) in clients.items():
        order = torch.randperm(len(targets), generator=generator)
        half = order[: len(order) // 2]
        calibration[name] = class_scores(probs[half], targets[half])
        rest[name] = order[len(order) // 2 :]
    conformal = fb.FederatedConformal(LEVEL, per_client=per_client).fit(calibration)
    hits, sizes = {}, []
    for name, rows in rest.items():
        probs, targets = clients[name]
        sets = conformal.sets(probs[rows], name if per_client else None)
        hits[name] = sets.gather(1, targets[rows, None])[:, 0].double()
        sizes.append(sets.sum(1).double())
    worst = min(float(each.mean()) for each in hits.values())
    return float(torch.cat(list(hits.values())).mean()), worst, float(torch.cat(sizes).mean())


def main() -> None:
    """Train, calibrate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that contains FashionMNIST")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    temperatures, sets = [], []
    for seed in tqdm(arguments.seeds, desc="seeds"):
        module, held_out, test = trained(FEDAVG.but(seed=seed), arguments.data)
        predicted = predictions_of(module.network, test)
        logits, targets = (torch.cat(each) for each in zip(*predicted.values()))
        scaling = fb.FederatedTemperature().fit_from(module.network, held_out)
        before, after = scores_of(logits, targets), scores_of(scaling(logits), targets)
        assert scaling.temperature is not None
        temperatures.append([seed, scaling.temperature, scaling.exchanges, *before, *after[1:]])
        scaled = {name: (scaling(each).softmax(-1), truth) for name, (each, truth) in predicted.items()}
        for per_client in (False, True):
            generator = torch.Generator().manual_seed(seed)
            found = torch.tensor([coverages(scaled, per_client=per_client, generator=generator) for _ in range(SPLITS)])
            sets.append([seed, "each client's" if per_client else "pooled", *found.mean(0).tolist()])
    print(
        markdown_table(
            ["seed", "T", "exchanges", "accuracy, %", "ECE, %", "NLL", "ECE at T, %", "NLL at T"], temperatures
        )
    )
    print()
    print(markdown_table(["seed", "threshold", "coverage", "worst client", "classes in a set"], sets))


if __name__ == "__main__":
    main()
