"""Genuine parties and adversaries in one Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import UpdateAttack
from lightning_fedbayes.fusion import FusionRule

Examples = tuple[Tensor, Tensor]
"""Inputs and targets."""

EVALUATION_BATCH = 1000


class Task(L.LightningModule):
    """Module with a network, a loss, a score and an optimizer.

    Args:
        network: the trained network.
        loss: (outputs, targets) → mean loss.
        score: (outputs, targets) → mean score of the validation examples.
        optimizer: parameters → optimizer.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        score: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.score = score
        self.optimizer = optimizer

    def training_step(self, batch: Examples, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return self.loss(self.network(inputs), targets)

    def validation_step(self, batch: Examples, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("score", self.score(self.network(inputs), targets), batch_size=len(inputs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Curve(L.Callback):
    """Record of the score of every round."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["score"]))


class Drawn(Dataset[tuple[Tensor, ...]]):
    """Examples drawn anew at every access, so that every round has a stochastic gradient of its own.

    They are drawn with torch's global generator, which a federation seeds by round and client before it loads data.

    Args:
        examples: to draw from, with replacement.
        count: number of examples of a local epoch.
    """

    def __init__(self, examples: Examples, count: int) -> None:
        self.examples = examples
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        place = int(torch.randint(len(self.examples[0]), ()))
        return tuple(each[place] for each in self.examples)


def federate(
    task: Task,
    parties: Sequence[Examples],
    validation: Examples,
    rule: str | FusionRule,
    attack: UpdateAttack | None,
    *,
    rounds: int,
    local_epochs: int = 1,
    batch_size: int,
    seed: int,
    drawn: int | None = None,
    fraction: float = 1.0,
) -> tuple[list[float], str]:
    """Train a federation of ``parties`` with equal weights.

    Args:
        task: the trained module; it is the global model afterwards.
        parties: data of the genuine parties and of the adversaries.
        validation: examples on which the global model is scored after every round.
        rule: the fusion rule.
        attack: attack of some of the parties, or None.
        rounds, local_epochs, batch_size, seed: of the federation.
        drawn: number of examples that a party draws in every local epoch; None: it uses all its examples.
        fraction: share of the parties that take part in a round, drawn anew in every round.

    Returns: the score after every round, and the name of the engine.
    """
    datasets = [TensorDataset(*each) if drawn is None else Drawn(each, drawn) for each in parties]
    data = fb.ClientDatasets({f"party {k}": dataset for k, dataset in enumerate(datasets)})
    batches = list(zip(*(each.split(EVALUATION_BATCH) for each in validation)))
    federation, curve = (
        fb.FederatedBayes(
            local_epochs=local_epochs,
            fraction=fraction,
            fusion=rule,
            weighting="equal",
            engine="auto",
            adversaries=attack,
            seed=seed,
            safeguards=fb.Safeguards(max_influence=None),  # the rules themselves are compared
        ),
        Curve(),
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation, curve],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(data, batch_size, shuffle=True), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return curve.values, str(federation.described()["engine"])


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of correct predictions: outputs of shape (..., classes), targets of shape (...)."""
    return (outputs.argmax(-1) == targets).float().mean()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all predictions: outputs of shape (..., classes), targets of shape (...)."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
