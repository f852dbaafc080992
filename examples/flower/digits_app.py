"""Sites that each hold a part of the handwritten digits train one hybrid Bayesian network over Flower.

docs/flower.md says how to run it. To use it with data of your own, let ``data`` return the data module of the site, by
what its node's configuration says, and leave out the partition, which only deals out the digits.
"""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import lightning_fedbayes as fb
from lightning_fedbayes.flower import FusionStrategy, client_app, initial_arrays
from lightning_fedbayes.modules import mlp


def network() -> fb.HybridBayesianClassifier:
    """The same at every site and at the server."""
    torch.manual_seed(0)
    return fb.HybridBayesianClassifier(
        mlp(64, 10), bayesian_last=1, estimator="flipout", learning_rate=0.01, kl_weight=0.05
    )


def data(context: Context) -> fb.DigitsDataModule:
    """The data of the site that ``context`` is of."""
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
    """Fuse, evaluate and keep the federation, by the settings of ``flwr run --run-config``."""
    config = context.run_config
    strategy = FusionStrategy(
        "reverse_kl_barycenter",
        wait_for=int(config["clients"]),
        evaluate=bool(config["evaluate"]),
        checkpoint=str(config["checkpoint"]),
    )
    strategy.start(grid, initial_arrays(network()), int(config["rounds"]), timeout=float(config["timeout"]))
