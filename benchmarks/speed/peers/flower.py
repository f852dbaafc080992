"""Worker: the same rounds by Flower's simulation, its FedAvg over clients in Ray actors of one core each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

os.environ |= {
    "FLWR_HOME": str(Path(sys.prefix) / "home"),
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

import torch
from flwr.app import (  # pyright: ignore[reportMissingImports]
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp.strategy import FedAvg  # pyright: ignore[reportMissingImports]
from flwr.simulation import run_simulation  # pyright: ignore[reportMissingImports]

from benchmarks.speed import workloads
from benchmarks.speed.gate import Gate, start
from benchmarks.speed.settings import WORKLOADS, Order


def client_app(order: Order) -> ClientApp:
    """A client: it receives the global parameters, makes one pass with SGD and returns its parameters."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        workload = WORKLOADS[order.workload]
        inputs, targets = workloads.client_data(order.workload, order.data)[int(context.node_config["partition-id"])]
        network = workloads.network(workload)
        network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(network.parameters(), lr=workload.rate)
        for x, y in workloads.batches(inputs, targets, workload.batch):
            optimizer.zero_grad()
            workloads.loss(network(x), y).backward()
            optimizer.step()
        update = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(inputs)})}
        return Message(content=RecordDict(update), reply_to=message)

    return app


class AtTheGate(FedAvg):
    """FedAvg that calls the gate before every round."""

    def __init__(self, gate: Gate, clients: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self.gate = gate

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self.gate(lambda: list(arrays.to_torch_state_dict().values())):
            return super().configure_train(server_round, arrays, config, grid)
        return []


def main(order: Order) -> None:
    """Run all rounds in one simulation, and an empty one after the report."""
    workload = WORKLOADS[order.workload]
    gate = Gate(order, {"flwr": version("flwr"), "ray": version("ray")})
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        initial = ArrayRecord(workloads.network(workload).state_dict())
        AtTheGate(gate, workload.clients).start(grid, initial, num_rounds=order.rounds + 1)

    run_simulation(server, client_app(order), workload.clients, backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    main(start())
