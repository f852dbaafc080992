"""Bayesian logistic regression: distance of every round's posterior from the mean-field posterior of the pooled data.

The pooled posterior is exact: an example's expected loss is an integral over one Gaussian, its logit, and L-BFGS solves
the problem. Clients train by draws of their logits and Adam, as people do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.layers import LinearLocalReparameterization

CLIENTS = 10
RAGGED = (3, 5, 8, 12, 19, 31, 49, 79, 125, 238)
SPLITS: dict[str, Partition] = {
    "IID": fb.IIDPartition(CLIENTS),
    "3 to 238 examples": fb.SizesPartition(RAGGED),
    "one class each": fb.ClassPartition(CLIENTS, classes_per_client=1),
}
LOCAL_EPOCHS = 20
"""Passes of a client over its examples in a round, each one step."""
NODES = 32
"""Nodes of the Gauss-Hermite quadrature."""


class Distance(NamedTuple):
    """Distance of a posterior from the pooled one."""

    kl: float
    r"""KL(q ‖ pooled) in nats per parameter."""
    mean_error: float
    """Root mean square of the means' errors in pooled standard deviations."""
    variance_ratio: float
    """Mean of the variances over the pooled ones."""


def breast_cancer() -> TensorDataset:
    """Return 569 standardised examples with a column of ones, float64, shape (569, 31), and their classes, 0 or 1."""
    features, labels = load_breast_cancer(return_X_y=True)
    features = (features - features.mean(0)) / features.std(0)
    inputs = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels))


class LogisticRegression(L.LightningModule):
    """One Bayesian layer with the prior N(0, 1), which is also where it starts.

    Without a pooled posterior it is trained by its exact ELBO, with one by draws.

    Args:
        features: number of inputs.
        examples: number of training examples where no client says it.
        pooled: posterior that each round's is measured against, or None.
    """

    def __init__(self, features: int, examples: int, pooled: fb.GaussianPosterior | None = None) -> None:
        super().__init__()
        self.layer = LinearLocalReparameterization(features, 1, bias=False).double()
        fb.load_posterior(self, fb.read_posterior(self).unflatten(torch.zeros(features), torch.ones(features)))
        self.examples, self.pooled = examples, pooled
        self.distances: list[Distance] = []
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        self.nodes, self.weights = torch.from_numpy(nodes), torch.from_numpy(weights / math.sqrt(2 * math.pi))

    def on_client_start(self, client: Any) -> None:
        """Take the number of examples from the client whose turn it is."""
        self.examples = client.num_examples

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the negative ELBO per example."""
        inputs, labels = batch
        if self.pooled is not None:
            losses = softplus(-self.layer(inputs)[:, 0] * (2 * labels - 1))
            return losses.mean() + fb.kl_divergence(self) / self.examples
        gaussian = next(self.layer.gaussian_parameters())
        signed = inputs * (2 * labels - 1)[:, None]
        centre, spread = signed @ gaussian.mean[0], (signed.square() @ gaussian.variance[0]).sqrt()
        losses = softplus(-(centre[:, None] + spread[:, None] * self.nodes)) @ self.weights
        return losses.mean() + fb.kl_divergence(self) / self.examples

    def on_round_end(self, posterior: fb.GaussianPosterior, clients: list[fb.GaussianPosterior]) -> None:
        """Measure the round's posterior."""
        if self.pooled is not None:
            self.distances.append(distance(posterior, self.pooled))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return L-BFGS for the exact ELBO, which takes all of a problem in one step, and Adam for draws."""
        if self.pooled is not None:
            return torch.optim.Adam(self.parameters(), lr=0.03)
        return torch.optim.LBFGS(
            self.parameters(),
            max_iter=200,
            history_size=30,
            tolerance_grad=1e-6,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )


def distance(posterior: fb.GaussianPosterior, pooled: fb.GaussianPosterior) -> Distance:
    """Return the three figures of a row."""
    mean, variance = posterior.flatten()
    wanted_mean, wanted = pooled.flatten()
    return Distance(
        float(posterior.kl(pooled)) / len(mean),
        float(((mean - wanted_mean).square() / wanted).mean().sqrt()),
        float((variance / wanted).mean()),
    )


def fit(module: L.LightningModule, data: TensorDataset, epochs: int, callbacks: list[L.Callback]) -> None:
    """Train on whole batches."""
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=len(data)))


def pooled_posterior(data: TensorDataset) -> fb.GaussianPosterior:
    """Return the mean-field posterior of all examples, by the same module without a federation."""
    L.seed_everything(0, verbose=False)
    module = LogisticRegression(data.tensors[0].shape[1], len(data))
    fit(module, data, 10, [])
    return fb.read_posterior(module)


def run(
    data: TensorDataset, pooled: fb.GaussianPosterior, partition: Partition, rounds: int, seed: int, **options: Any
) -> dict[str, Any]:
    """Return the distance after every round.

    Args:
        data: all examples.
        pooled: posterior of all examples.
        partition: of the clients.
        rounds: number of rounds.
        seed: of the partition and of the first network.
        options: fusion rule and prior of the federation; everything else is its default.
    """
    L.seed_everything(seed, verbose=False)
    module = LogisticRegression(data.tensors[0].shape[1], len(data), pooled)
    federation = fb.FederatedBayes(partition, seed=seed, **{"local_epochs": LOCAL_EPOCHS, **options})
    fit(module, data, rounds, [federation])
    return dict(zip(Distance._fields, map(list, zip(*module.distances, strict=True)), strict=True))
