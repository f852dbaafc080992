"""Handwritten digits, a network of Bayesian layers: predictions of a federation beside those of pooled training."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.metrics.functional import calibration_diagram, mutual_information, negative_log_likelihood
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.partition import Partition

CLIENTS, ROUNDS, LOCAL_EPOCHS, BATCH, RATE, SAMPLES = 10, 20, 20, 32, 0.01, 100
SPLITS: dict[str, Partition] = {"Dirichlet(0.5)": fb.DirichletPartition(CLIENTS, alpha=0.5)}
POOLED = fb.IIDPartition(clients=1)
"""All data at one client, which trains as without a federation, as many epochs as all clients together."""


def run(partition: Partition, seed: int, rounds: int = ROUNDS, hidden: int = 50, **options: Any) -> dict[str, float]:
    """Train a federation and score its global posterior on the examples held out.

    Args:
        partition: of the clients.
        seed: of the split, the partition, the network and its training.
        rounds: number of rounds.
        hidden: width of the hidden layer.
        options: fusion rule and prior of the federation; everything else is its default.
    """
    L.seed_everything(seed, verbose=False)
    data = fb.DigitsDataModule(BATCH, seed=seed)
    module = fb.HybridBayesianClassifier(
        mlp(64, 10, [hidden]), bayesian_last=2, posterior_std=0.05, learning_rate=RATE, samples=SAMPLES
    )
    federation = fb.FederatedBayes(partition, local_epochs=LOCAL_EPOCHS, seed=seed, **options)
    trainer = L.Trainer(
        max_epochs=rounds, accelerator="cpu", logger=False, callbacks=[federation], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data)
    held = sum(each.get("sites/held_back", 0.0) for each in federation.history)
    return {**scores(module.eval(), data), "held_back": held}


@torch.no_grad()
def scores(module: fb.HybridBayesianClassifier, data: fb.DigitsDataModule) -> dict[str, float]:
    """Return accuracy, NLL, ECE and mutual information on the examples held out."""
    inputs, targets = data.validation.tensors
    probs = module.sample_probs(inputs)
    mean = probs.mean(0)
    return {
        "accuracy": float((mean.argmax(-1) == targets).float().mean()),
        "nll": float(negative_log_likelihood(mean, targets).mean()),
        "ece": float(calibration_diagram(mean, targets).ece),
        "mutual_information": float(mutual_information(probs).mean()),
    }
