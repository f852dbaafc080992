"""Handwritten digits and FashionMNIST: predictions of a federation beside those of pooled training."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lightning_fedbayes as fb
from benchmarks.networks import lenet
from benchmarks.readers import ImageDataModule
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.data.splits import SplitDataModule
from lightning_fedbayes.metrics.functional import calibration_diagram, mutual_information, negative_log_likelihood
from lightning_fedbayes.modules import mlp

CLIENTS, BATCH, STD = 10, 32, 0.05
"""The set-up of both data sets; STD is the initial σ."""
IMAGES = 10_000
"""Training images of FashionMNIST, of 60,000."""
SPLITS: dict[str, Partition] = {
    "Dirichlet(0.5)": fb.DirichletPartition(CLIENTS, alpha=0.5),
    "Dirichlet(0.1)": fb.DirichletPartition(CLIENTS, alpha=0.1),
    "IID": fb.IIDPartition(CLIENTS),
}
POOLED = fb.IIDPartition(clients=1)
"""All data at one client, which trains as without a federation, as many epochs as all clients together."""


class Study(NamedTuple):
    """A data set, its network and the size of its federations.

    Attributes:
        data: makes the data module from a folder and the seed of the split.
        network: makes the deterministic network.
        bayesian_last: number of its last layers that are Bayesian.
        rounds: number of rounds.
        local_epochs: of a round.
        rate: of Adam.
        samples: Monte Carlo samples of a prediction.
        kl_weight: of the loss; 1 is the ELBO.
    """

    data: Callable[[Path | None, int], SplitDataModule]
    network: Callable[[], nn.Module]
    bayesian_last: int
    rounds: int
    local_epochs: int
    rate: float
    samples: int
    kl_weight: float = 1.0


def fashion_mnist(folder: Path | None, seed: int) -> SplitDataModule:
    """Return some of the training images and all test images."""
    assert folder is not None
    return ImageDataModule("fashion_mnist", folder, BATCH, None, IMAGES, seed)


STUDIES = {
    "digits": Study(
        lambda _, seed: fb.DigitsDataModule(BATCH, seed=seed),
        lambda: mlp(64, 10, [50]),
        bayesian_last=2,
        rounds=20,
        local_epochs=20,
        rate=0.01,
        samples=100,
    ),
    "fashion_mnist": Study(fashion_mnist, lenet, bayesian_last=3, rounds=60, local_epochs=1, rate=0.003, samples=20),
}
STUDIES["digits_hybrid"] = STUDIES["digits"]._replace(bayesian_last=1, local_epochs=5)
STUDIES["fashion_mnist_tempered"] = STUDIES["fashion_mnist"]._replace(kl_weight=0.1)


def run(
    study: Study,
    partition: Partition,
    seed: int,
    folder: Path | None = None,
    bayesian: bool = True,
    batches: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a federation and score its global posterior on the examples held out.

    Args:
        study: data, network and local training.
        partition: of the clients.
        seed: of the split, the partition, the network and its training.
        folder: with the files of the images.
        bayesian: False: the deterministic network.
        batches: of a client in a local epoch at most; None: all.
        options: fusion rule, prior and treatment of optimizers; everything else is the federation's default.
    """
    L.seed_everything(seed, verbose=False)
    data = study.data(folder, seed)
    layers: dict[str, Any] = (
        {"bayesian_last": study.bayesian_last, "posterior_std": STD} if bayesian else {"bayesian_last": 0}
    )
    module = fb.HybridBayesianClassifier(
        study.network(), learning_rate=study.rate, samples=study.samples, kl_weight=study.kl_weight, **layers
    )
    federation = fb.FederatedBayes(partition, local_epochs=study.local_epochs, seed=seed, **options)
    trainer = L.Trainer(
        max_epochs=study.rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        limit_train_batches=batches,
    )
    trainer.fit(module, datamodule=data)
    history = federation.history
    return {
        **scores(module.eval(), data.validation),
        "megabytes": statistics.fmean(each["megabytes_up"] for each in history),
        "engine": federation.described()["engine"],
    }


@torch.no_grad()
def scores(module: fb.HybridBayesianClassifier, held_out: Dataset[Any]) -> dict[str, float]:
    """Return accuracy, NLL, ECE and mutual information on examples held out."""
    assert isinstance(held_out, TensorDataset)
    inputs, targets = held_out.tensors
    probs = torch.cat([module.sample(part).softmax(-1) for part in inputs.split(2000)], 1)
    mean = probs.mean(0)
    return {
        "accuracy": float((mean.argmax(-1) == targets).float().mean()),
        "nll": float(negative_log_likelihood(mean, targets).mean()),
        "ece": float(calibration_diagram(mean, targets).ece),
        "mutual_information": float(mutual_information(probs).mean()),
    }
