"""Clients that each hold a part of the handwritten digits train one hybrid Bayesian network over Flower.

docs/flower.md says how to run it. To use it with your own data, let ``data`` return the client's data module, chosen by
the configuration of its node, and leave out the partition, which only divides the digits among the clients.
"""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import lightning_fedbayes as fb
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.transport.flower import FusionStrategy, client_app, initial_arrays


def network() -> fb.HybridBayesianClassifier:
    """Return the network, the same at every client and at the server."""
    torch.manual_seed(0)
    return fb.HybridBayesianClassifier(
        mlp(64, 10), bayesian_last=1, estimator="flipout", learning_rate=0.01, kl_weight=0.05
    )


def data(context: Context) -> fb.DigitsDataModule:
    """Return the data of the client that runs in ``context``."""
    return fb.DigitsDataModule()


client = client_app(
    network(),
    data,
    partition=fb.DirichletPartition(clients=2, alpha=0.5),
    local_epochs=2,
    trainer={"accelerator": "cpu"},
)

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Fuse, evaluate and save the federation, with the settings of ``flwr run --run-config``."""
    config = context.run_config
    strategy = FusionStrategy(
        "reverse_kl_barycenter",
        wait_for=int(config["clients"]),
        evaluate=bool(config["evaluate"]),
        checkpoint=str(config["checkpoint"]),
    )
    strategy.start(grid, initial_arrays(network()), int(config["rounds"]), timeout=float(config["timeout"]))
