"""Worker: rounds of a FederatedBayes through one Trainer and one ``fit``, or epochs of a Trainer without it."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import lightning_fedbayes as fb
from benchmarks.speed import workloads
from benchmarks.speed.gate import Gate, start
from benchmarks.speed.settings import WORKLOADS, Order, Workload
from lightning_fedbayes.core.quiet import quietly


class Plain(L.LightningModule):
    """A user's own module, without any code for federations."""

    def __init__(self, network: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.network = network
        self.rate = workload.rate
        self.kl_factor = workloads.KL_WEIGHT / workload.examples if workload.bayesian else 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = workloads.loss(self.network(inputs), targets)
        return loss + self.kl_factor * fb.kl_divergence(self.network) if self.kl_factor else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def network(workload: Workload) -> nn.Module:
    """Return the workload's network, deterministic or with our mean-field layers."""
    deterministic = workloads.network(workload)
    if not workload.bayesian:
        return deterministic
    bayesian = fb.bayesianize(
        deterministic, last=2, estimator="reparameterization", posterior_std=workloads.POSTERIOR_STD
    )
    workloads.set_means(bayesian, deterministic.parameters())
    return bayesian


class AtTheGate(L.Callback):
    """Callback that calls the gate before every epoch; it precedes FederatedBayes and so sees the global network."""

    def __init__(self, gate: Gate, federation: fb.FederatedBayes | None) -> None:
        self.gate = gate
        self.federation = federation

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        network = pl_module.network
        assert isinstance(network, nn.Module)
        chosen = self.federation
        facts = dict if chosen is None else lambda: {"engine": chosen.described()["engine"]}
        if not self.gate(lambda: workloads.means(network), facts):
            trainer.should_stop = True


def federation(order: Order) -> None:
    """Run all rounds, and one more after the report, because Lightning completes an epoch that has begun."""
    workload = WORKLOADS[order.workload]
    clients = {str(k): TensorDataset(*each) for k, each in enumerate(workloads.client_data(order.workload, order.data))}
    engine: str = order.engine
    dataset: Dataset = ConcatDataset(clients.values()) if order.side == "lightning" else fb.ClientDatasets(clients)
    loader = DataLoader(dataset, batch_size=workload.batch, shuffle=True)
    callback = None
    if order.side == "ours":
        callback = fb.FederatedBayes(fusion="fedavg", engine=engine, seed=workloads.SEED)  # pyright: ignore[reportArgumentType]
    gate = Gate(order, {"lightning": L.__version__})
    trainer = L.Trainer(
        max_epochs=order.rounds + 1,
        accelerator="gpu" if order.device == "cuda" else "cpu",
        devices=1,
        callbacks=[AtTheGate(gate, callback), *([] if callback is None else [callback])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Plain(network(workload), workload), loader)


if __name__ == "__main__":
    with quietly():
        federation(start())
