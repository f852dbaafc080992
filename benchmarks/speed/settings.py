"""Workloads, opponents, and the ratio that each workload must reach. Needs nothing but Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

SEED = 0
"""Seed of the data, the initial networks and the orders of the examples."""

WARM_UP = 2
"""Rounds that every side runs before the first that is timed."""

TOLERANCE = 0.05
"""Relative difference of the final losses above which a row is marked."""

OPPONENTS: dict[str, str] = {
    "dataloader": "plain loop, a DataLoader per client",
    "loop": "plain loop, batches sliced from tensors",
    "lightning": "one Lightning Trainer on all data, no federation",
    "pfl": "pfl-research",
    "flower": "Flower simulation",
}
"""Opponent → its name in the table, in the order of a repeat; ours comes after the loop."""


@dataclass(frozen=True)
class Workload:
    """A federated task: every client takes one pass over its examples with SGD, then the networks are averaged.

    Args:
        title: its name in the table.
        data: "linear" (noisy linear regression), "digits" (of scikit-learn), "teacher" (classes given by a random
            linear map) or "images" (of the shape of FashionMNIST).
        widths: of a fully connected network from inputs to outputs; empty for LeNet.
        clients: number of clients, all of which take part in every round.
        examples: per client.
        batch: examples per step.
        rate: learning rate.
        rounds: rounds of a burst, which is timed as a whole; several, because a stopped process starts slowly.
        bars: opponent → required ratio of its time to ours; None: nothing is required.
        bayesian: all layers are mean-field Gaussian, with one draw per step.
    """

    title: str
    data: Literal["linear", "digits", "teacher", "images"]
    widths: tuple[int, ...]
    clients: int
    examples: int
    batch: int
    rate: float
    rounds: int
    bars: Mapping[str, float | None]
    bayesian: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps of a round, all clients together."""
        return self.clients * -(-self.examples // self.batch)


def regression(clients: int, rounds: int, bar: float, bayesian: bool = False) -> Workload:
    """The network 13-50-1 with batches of one example, where the overhead per step dominates."""
    kind = "mean-field" if bayesian else "deterministic"
    bars: dict[str, float | None] = {"dataloader": None, "loop": bar}
    return Workload(
        title=f"13-50-1 {kind}, {clients} clients × 50, batch 1",
        data="linear",
        widths=(13, 50, 1),
        clients=clients,
        examples=50,
        batch=1,
        rate=0.01,
        rounds=rounds,
        bars=bars if bayesian else {**bars, "pfl": None},
        bayesian=bayesian,
    )


WORKLOADS: dict[str, Workload] = {
    "regression-10": regression(10, 10, 1.6),
    "regression-10-mean-field": regression(10, 8, 6.0, bayesian=True),
    "regression-100": regression(100, 4, 10.0),
    "regression-100-mean-field": regression(100, 4, 30.0, bayesian=True),
    "digits": Workload(
        title="digits 64-50-10, 10 clients × 179, batch 16",
        data="digits",
        widths=(64, 50, 10),
        clients=10,
        examples=179,
        batch=16,
        rate=0.1,
        rounds=20,
        bars={"dataloader": None, "loop": 2.0, "lightning": None, "pfl": None},
    ),
    "dense-50k": Workload(
        title="784-64-10, 10 clients × 500, batch 32",
        data="teacher",
        widths=(784, 64, 10),
        clients=10,
        examples=500,
        batch=32,
        rate=0.05,
        rounds=5,
        bars={"dataloader": None, "loop": 1 / 0.9, "pfl": 1.0, "flower": 5.0},
    ),
    "lenet": Workload(
        title="LeNet 28×28, 10 clients × 500, batch 64",
        data="images",
        widths=(),
        clients=10,
        examples=500,
        batch=64,
        rate=0.05,
        rounds=2,
        bars={"dataloader": None, "loop": 1 / 1.1, "pfl": None},
    ),
}
"""All workloads by name."""


@dataclass(frozen=True)
class Order:
    """Order to a worker, given on its command line.

    Args:
        workload: name of the workload.
        side: "ours" or an opponent.
        rounds: number of rounds in all.
        device: "cpu" or "cuda".
        engine: of ours.
        data: directory with the files of FashionMNIST; None makes images.
    """

    workload: str
    side: str
    rounds: int
    device: str
    engine: str
    data: str | None

    def dumps(self) -> str:
        """Return the order as one argument of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Order:
        """Read an order from the text of :meth:`dumps`."""
        return Order(**json.loads(text))
