"""Time of a validation with reports and calibrations, beside that of the same module alone.

    python -m benchmarks.speed.validation [--examples 5000] [--batch-size 128] [--repeats 5]

A LeNet whose last three layers are Bayesian, ten draws, ten clients, pictures of noise with a bright pixel for the
class, two epochs of training before. Alone and with all callbacks take turns; a figure is the median of the seconds of
processor time on one thread, without the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from benchmarks.networks import lenet
from lightning_fedbayes.core.tables import markdown_table

CLIENTS, CLASSES = 10, 10


def pictures(examples: int) -> fb.ClientDatasets:
    """Pictures of noise, with a bright pixel that tells the class."""
    x, y = torch.randn(examples, 1, 28, 28), torch.randint(CLASSES, (examples,))
    x[torch.arange(examples), 0, 2 * y, 2 * y] += 20
    size = examples // CLIENTS
    return fb.ClientDatasets(
        {str(number): TensorDataset(*part) for number, part in enumerate(zip(x.split(size), y.split(size)))}
    )


def readers() -> list[L.Callback]:
    """Return everything that reads a validation."""
    return [
        fb.UncertaintyReport(),
        fb.ClientReport(),
        fb.FederatedTemperature(),
        fb.FederatedConformal(),
        fb.FederatedConformal(kind="aps"),
    ]


def trainer(callbacks: list[L.Callback]) -> L.Trainer:
    """Return a Trainer that only trains and validates."""
    return L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def seconds(callbacks: list[L.Callback], module: L.LightningModule, loader: DataLoader) -> float:
    """Return the time of one validation."""
    made, start = trainer(callbacks), time.process_time()
    made.validate(module, loader, verbose=False)
    return time.process_time() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("examples", 5000), ("batch-size", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = pictures(given.examples)
    module = fb.HybridBayesianClassifier(lenet(), bayesian_last=3)
    trainer([]).fit(module, DataLoader(data, 32, shuffle=True))
    loader = DataLoader(data, given.batch_size)
    turns = [(seconds([], module, loader), seconds(readers(), module, loader)) for _ in range(given.repeats + 1)]
    alone, together = (statistics.median(each) for each in zip(*turns[1:]))
    head = ["a validation", "seconds", "times"]
    print(markdown_table(head, [["alone", alone, 1.0], ["with all that reads it", together, together / alone]]))


if __name__ == "__main__":
    main()
