"""Worker: the same rounds by pfl-research, its FederatedAveraging on its SimulatedBackend."""

from __future__ import annotations

import os

import pfl  # pyright: ignore[reportMissingImports]
import torch
from pfl.aggregate.simulate import SimulatedBackend  # pyright: ignore[reportMissingImports]
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams  # pyright: ignore[reportMissingImports]
from pfl.callback.base import TrainingProcessCallback  # pyright: ignore[reportMissingImports]
from pfl.data import FederatedDataset  # pyright: ignore[reportMissingImports]
from pfl.data.pytorch import PyTorchTensorDataset  # pyright: ignore[reportMissingImports]
from pfl.data.sampling import get_user_sampler  # pyright: ignore[reportMissingImports]
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # pyright: ignore[reportMissingImports]
from pfl.metrics import Metrics, Weighted  # pyright: ignore[reportMissingImports]
from pfl.model.pytorch import PyTorchModel  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from benchmarks.speed import workloads
from benchmarks.speed.gate import Gate, start
from benchmarks.speed.settings import WORKLOADS, Order


class Network(nn.Module):
    """The workload's network with the two methods that pfl requires."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return workloads.loss(self.network(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, targets: Tensor) -> dict:
        return {"loss": Weighted(float(self.loss(inputs, targets)) * len(targets), len(targets))}


class AtTheGate(TrainingProcessCallback):
    """Callback that calls the gate after every round."""

    def __init__(self, gate: Gate, network: nn.Module) -> None:
        self.gate = gate
        self.network = network

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration: int) -> tuple:
        return not self.gate(lambda: list(self.network.parameters())), Metrics()


def main(order: Order) -> None:
    """Run all rounds in one run of the algorithm; it evaluates only in the first, which is not timed."""
    workload = WORKLOADS[order.workload]
    clients = [
        PyTorchTensorDataset((inputs.to(order.device), targets.to(order.device)), user_id=str(k))
        for k, (inputs, targets) in enumerate(workloads.client_data(order.workload, order.data))
    ]
    sampler = get_user_sampler("minimize_reuse", list(range(workload.clients)))
    data = FederatedDataset(clients.__getitem__, sampler)
    network = Network(workloads.network(workload))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    gate = Gate(order, {"pfl": pfl.__version__})
    if gate(lambda: list(network.parameters())):
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=order.rounds + 1,
                evaluation_frequency=order.rounds + 1,
                train_cohort_size=workload.clients,
                val_cohort_size=None,
            ),
            SimulatedBackend(training_data=data, val_data=data),
            model,
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.rate, local_batch_size=workload.batch),
            NNEvalHyperParams(local_batch_size=None),
            callbacks=[AtTheGate(gate, network)],
            send_metrics_to_platform=False,
        )


if __name__ == "__main__":
    os.environ["PFL_PYTORCH_DEVICE"] = (order := start()).device
    main(order)
