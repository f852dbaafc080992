"""Predictions of a federated Laplace posterior, and of the best that Laplace can do with the pooled data.

    python -m benchmarks.posterior.laplace [--seeds 3]

Two federations of digits: the example of docs/uncertainty.md (five IID clients, sites, ten rounds), and the classes 0
to 7 under Dirichlet(0.5), ten clients, averaged, 20 rounds. Every row predicts by the network linearised at the mean
of the last round. "pooled, full" keeps all correlations between the parameters and chooses its prior by the evidence;
no federation has it. About a minute per seed on one core.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.modules.sources.curvature import draws_of_outputs, linearised_outputs
from lightning_fedbayes.modules.sources.curvature.systems import chosen_precision

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
DRAWS = 1024

Data = tuple[TensorDataset, TensorDataset]


class Own(L.LightningModule):
    """The module of the page."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def whole_digits(seed: int) -> Data:
    """Return the training and the validation data of the page, the same for all seeds."""
    data = fb.DigitsDataModule()
    data.prepare_data()
    data.setup("fit")
    assert isinstance(data.train, TensorDataset)
    assert isinstance(data.validation, TensorDataset)
    return data.train, data.validation


def digits_to_seven(seed: int) -> Data:
    """Return four fifths of the digits 0 to 7, as they are in the file, and the rest."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images[labels < 8]).float(), torch.tensor(labels[labels < 8])
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    held_out, train = order.split([len(targets) // 5, len(targets) - len(targets) // 5])
    return TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[held_out], targets[held_out])


STUDIES: dict[str, tuple[Callable[[int], Data], Callable[[], nn.Module], fb.Partition, str, int]] = {
    "digits, 5 IID clients, sites": (
        whole_digits,
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        fb.IIDPartition(clients=5),
        "sites",
        10,
    ),
    "digits 0 to 7, 10 clients, Dirichlet(0.5), averaged": (
        digits_to_seven,
        partial(mlp, 64, 8),
        fb.DirichletPartition(clients=10, alpha=0.5),
        "reverse_kl_barycenter",
        20,
    ),
}


def scores(probs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return accuracy and NLL."""
    return float((probs.argmax(1) == labels).float().mean()), float(nn.functional.nll_loss(probs.log(), labels))


def averaged(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return the average softmax of draws."""
    return draws_of_outputs(mean, covariance, DRAWS).softmax(-1).mean(0)


def jacobians(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the derivatives of the logits by all parameters, shape (batch, classes, parameters)."""
    values = {name: p.detach() for name, p in module.named_parameters()}

    def logits(values: dict[str, Tensor], example: Tensor) -> Tensor:
        return torch.func.functional_call(module, values, (example[None],))[0]

    each = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))(values, inputs)
    return torch.cat([part.flatten(2) for part in each.values()], 2)


@torch.no_grad()
def pooled_full(module: nn.Module, train: Tensor, test: Tensor) -> Tensor:
    """Return the probabilities of the full Laplace approximation, with the prior of the largest evidence."""
    information: Tensor | float = 0.0
    for part in train.split(200):
        probs = module(part).softmax(-1)
        root = torch.diag_embed(probs.sqrt()) - probs[:, :, None] * probs[:, None].sqrt()
        rows = torch.einsum("nck,ncp->nkp", root, jacobians(module, part)).flatten(0, 1)
        information = information + (rows.T @ rows).double()
    assert isinstance(information, Tensor)
    values, vectors = torch.linalg.eigh(information)
    values = values.clamp_min(0)
    precision = chosen_precision([values], module.parameters())
    white = jacobians(module, test) @ vectors.float() / (values + precision).sqrt().float()
    return averaged(module(test), white @ white.mT)


def rows_of(study: str, seed: int) -> Iterable[tuple[str, float, float]]:
    """Train a federation, and yield name, accuracy and NLL of its predictives."""
    made, network, partition, rule, rounds = STUDIES[study]
    train, test = made(seed)
    inputs, labels = train.tensors
    x, y = test.tensors
    L.seed_everything(seed, verbose=False)
    module = Own(network())
    federation = fb.FederatedBayes(partition, fusion=rule, local_epochs=5, posterior=fb.Laplace(), seed=seed)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    L.Trainer(max_epochs=rounds, callbacks=[federation], **QUIET).fit(module, loader)
    module.eval()
    with torch.no_grad():
        yield "the mean alone", *scores(module(x).softmax(-1), y)
    clients = [[(inputs[part], labels[part])] for part in partition.split(labels, seed=seed).indices]
    posteriors = {"federation.posterior": federation.posterior}
    for std in (1.0, None):
        laplace = fb.Laplace(prior_std=std)
        sites = [laplace.site(module, batches) for batches in clients]
        posteriors[f"Laplace(prior_std={std}).fuse"] = laplace.fuse(module, sites)
    for name, posterior in posteriors.items():
        torch.manual_seed(0)
        yield name, *scores(averaged(*linearised_outputs(module, posterior, x)), y)
    torch.manual_seed(0)
    yield "pooled, full, by the evidence", *scores(pooled_full(module, inputs, x), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    rows: list[list[str]] = []
    for study in STUDIES:
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in seeds:
            for name, *each in rows_of(study, seed):
                found.setdefault(name, []).append((each[0], each[1]))
        for name, each in found.items():
            parts = [f"{statistics.mean(part):.3f} ({', '.join(f'{v:.3f}' for v in part)})" for part in zip(*each)]
            rows.append([study, name, *parts])
    print(markdown_table(("federation", "predictive", "accuracy", "NLL"), rows))


if __name__ == "__main__":
    main()
