"""Whole federated rounds through the Trainer against a plain PyTorch loop that takes the same steps.

    python -m benchmarks.engine.run [--rounds 20] [--repeats 7]

Handwritten digits of scikit-learn, network 64-50-10, 10 IID clients, batch 16, SGD, one local epoch. Both sides are
timed in turn in one process; a round's time is that of a fit of ``rounds`` rounds, start-up included, divided by
``rounds``. The last column is the parity check: the training loss of the last round, which must agree up to the order
of the examples.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import lightning as L
import torch
from bayesian_torch.layers import LinearReparameterization as PeerLinear
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

CLIENTS, BATCH, RATE = 10, 16, 0.1


class Classifier(L.LightningModule):
    """A user's own module, without any code for federations."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class PeerNetwork(nn.Module):
    """The same mean-field network out of bayesian-torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = PeerLinear(64, 50), PeerLinear(50, 10)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden, kl_first = self.first(inputs)
        outputs, kl_last = self.last(hidden.relu())
        return outputs, kl_first + kl_last


def plain_loop(network: nn.Module, data: TensorDataset, parts: list[list[int]], rounds: int) -> float:
    """Run FedAvg as written by hand: a copy, an optimizer and a DataLoader per client. Return the last loss."""
    loss_sum = 0.0
    for _ in range(rounds):
        loss_sum, examples, states = 0.0, 0, []
        for part in parts:
            client = copy.deepcopy(network)
            optimizer = torch.optim.SGD(client.parameters(), lr=RATE)
            for inputs, targets in DataLoader(Subset(data, part), batch_size=BATCH, shuffle=True):
                output = client(inputs)
                kl = 0.0
                if isinstance(output, tuple):
                    output, kl = output[0], output[1] / len(part)
                loss = nn.functional.cross_entropy(output, targets) + kl
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += float(loss.detach()) * len(targets)
                examples += len(targets)
            states.append([p.detach() for p in client.parameters()])
        with torch.no_grad():
            for parameter, *values in zip(network.parameters(), *states, strict=True):
                parameter.copy_(torch.stack(values).mean(0))
        loss_sum /= examples
    return loss_sum


def federation(module: L.LightningModule, data: TensorDataset, rounds: int) -> float:
    """Run the same rounds through a Trainer. Return the loss of the last round."""
    callback = fb.FederatedBayes(fb.IIDPartition(CLIENTS), fusion="fedavg", engine="sequential")
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=True))
    return callback.history[-1]["train_loss"]


def compare(name: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int, repeats: int) -> list:
    """Run both sides in turn; return a row of the table with the medians of all repeats."""
    ours()
    theirs()
    times: list[tuple[float, float]] = []
    losses = (0.0, 0.0)
    for _ in range(repeats):
        start = time.perf_counter()
        their_loss = theirs()
        middle = time.perf_counter()
        our_loss = ours()
        times.append((time.perf_counter() - middle, middle - start))
        losses = (our_loss, their_loss)
    ratio = statistics.median(a / b for a, b in times)
    milliseconds = [1e3 * statistics.median(side) / rounds for side in zip(*times, strict=True)]
    parity = f"{losses[0]:.3f} / {losses[1]:.3f}"
    return [name, f"{milliseconds[0]:.1f}", f"{milliseconds[1]:.1f}", f"{ratio:.2f}", parity]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()

    digits = fb.DigitsDataModule(batch_size=BATCH)
    digits.setup("fit")
    parts = [part.tolist() for part in fb.IIDPartition(CLIENTS).split(digits.train.tensors[1], seed=0).indices]
    rounds, repeats = arguments.rounds, arguments.repeats
    rows = [
        compare(
            "deterministic",
            lambda: federation(Classifier(mlp(64, 10)), digits.train, rounds),
            lambda: plain_loop(mlp(64, 10), digits.train, parts, rounds),
            rounds,
            repeats,
        ),
        compare(
            "mean-field (reparameterization)",
            lambda: federation(
                fb.HybridBayesianClassifier(
                    mlp(64, 10),
                    bayesian_last=2,
                    estimator="reparameterization",
                    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
                ),
                digits.train,
                rounds,
            ),
            lambda: plain_loop(PeerNetwork(), digits.train, parts, rounds),
            rounds,
            repeats,
        ),
    ]
    columns = ("network 64-50-10", "federation, ms/round", "plain loop, ms/round", "ratio", "last loss, ours / loop")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {repeats}\n")
    print(markdown_table(columns, rows))
    print(
        "\nThe mean-field loop uses bayesian-torch's layers, whose KL is a mean: its loss is not comparable with ours."
    )


if __name__ == "__main__":
    with quietly():
        main()
