"""One round of logistic regression: five genuine parties and up to ten adversaries, and other attacks.

    python -m benchmarks.untrusted.one_round --data DIR [--dataset mnist|fashion_mnist]
                                             [--features pixels|oriented_gradients] [--rate 0.1] [--local_epochs 50]
                                             [--seeds 5] [--out FOLDER]

All rules fuse the same updates: a round is trained once per seed and the updates are kept; r Gaussian adversaries are
the first r of the same ten. The results are those of one federation per rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import ALittleIsEnough, GaussianVector, SignFlip, UpdateAttack
from benchmarks.untrusted.federation import Examples, Task, accuracy, cross_entropy, federate
from benchmarks.untrusted.images import DATASETS, FEATURES, deal, examples
from benchmarks.untrusted.report import PUBLISHED, RULES, cell, options, panels, table, write
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.fusion import FusionRule

GENUINE, MOST, SIZE = 5, 10, 12_000
"""Parties, largest number of Gaussian adversaries, examples of each party."""
MAJORITY, MINORITY, SHARE = 7, 3, 6_000
"""Honest parties, adversaries and examples of each in the second table."""
BATCH, RATE, LOCAL_EPOCHS = 100, 0.1, 50
"""Settings of the parties' SGD; one_round_training.py chooses rate and epochs."""
ATTACKERS = list(range(MAJORITY, MAJORITY + MINORITY))
ATTACKS = {
    "sign flipped": SignFlip(clients=ATTACKERS),
    "a little is enough": ALittleIsEnough(clients=ATTACKERS),
    "a little is enough, z = 1.5": ALittleIsEnough(clients=ATTACKERS, z=1.5),
}

Updates = tuple[list[fb.GaussianPosterior], fb.GaussianPosterior]
"""Posteriors that the clients of a round send, and the global posterior that they started from."""


class Keep(FusionRule):
    """Rule that keeps the updates of the last round; the global model is that of the first client."""

    def __init__(self) -> None:
        self.updates: Updates | None = None

    def fuse(
        self, posteriors: Sequence[fb.GaussianPosterior], weights: Tensor, previous: fb.GaussianPosterior | None
    ) -> fb.GaussianPosterior:
        assert previous is not None
        self.updates = list(posteriors), previous
        return posteriors[0]


def logistic_regression(inputs: int) -> nn.Linear:
    """Return a network inputs → 10 with parameters 0: the loss is convex, so the start does not matter."""
    network = nn.Linear(inputs, 10)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    return network


def updates_of(
    parties: Sequence[Examples], test: Examples, attack: UpdateAttack | None, seed: int, rate: float, local_epochs: int
) -> tuple[Updates, str]:
    """Train one round; return what the parties send, in their order, and the engine."""
    keep, optimizer = Keep(), functools.partial(torch.optim.SGD, lr=rate)
    task = Task(logistic_regression(test[0].shape[1]), cross_entropy, accuracy, optimizer)
    _, engine = federate(
        task, parties, test, keep, attack, rounds=1, local_epochs=local_epochs, batch_size=BATCH, seed=seed
    )
    assert keep.updates is not None
    return keep.updates, engine


def score(
    rule: str | FusionRule, posteriors: Sequence[fb.GaussianPosterior], previous: fb.GaussianPosterior, test: Examples
) -> float:
    """Return the test accuracy of the fused network."""
    fused, (inputs, targets) = fb.fuse(rule, posteriors, previous=previous), test
    return float(accuracy(inputs @ fused.mean["network.weight"].T + fused.mean["network.bias"], targets))


def main() -> None:
    parser = options(__doc__, data=True, seeds=5)
    parser.add_argument("--dataset", choices=DATASETS, default="mnist", help="what --data holds")
    parser.add_argument("--features", choices=FEATURES, default="pixels", help="of an image (pixels)")
    parser.add_argument("--rate", type=float, default=RATE, help=f"learning rate of the parties ({RATE})")
    parser.add_argument("--local_epochs", type=int, default=LOCAL_EPOCHS, help=f"of the parties ({LOCAL_EPOCHS})")
    arguments = parser.parse_args()
    rate, epochs = arguments.rate, arguments.local_epochs
    torch.set_num_threads(1)  # the fastest for networks this small
    train, test = examples(arguments.data, arguments.features)
    seeds, numbers, engine = range(arguments.seeds), range(MOST + 1), ""
    gaussian: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    others: dict[str, dict[str, list[float]]] = {name: {rule: [] for rule in RULES} for name in ("none", *ATTACKS)}
    alone: list[float] = []
    for seed in tqdm(seeds):
        parties = deal(train, GENUINE, SIZE, seed)
        inputs, targets = parties[0]
        noise = [(inputs[:1], targets[:1])] * MOST  # they discard their training: one example is enough
        attack = GaussianVector(clients=list(range(GENUINE, GENUINE + MOST)))
        (posteriors, previous), engine = updates_of([*parties, *noise], test, attack, seed, rate, epochs)
        alone.append(score("weighted_average", posteriors[:1], previous, test))
        for rule in RULES:
            gaussian[rule].append([score(rule, posteriors[: GENUINE + r], previous, test) for r in numbers])
        parties = deal(train, MAJORITY + MINORITY, SHARE, seed)
        for name, attack in ATTACKS.items():
            (posteriors, previous), engine = updates_of(parties, test, attack, seed, rate, epochs)
            for rule in RULES:
                others[name][rule].append(score(rule, posteriors, previous, test))
        for rule in RULES:
            others["none"][rule].append(score(rule, posteriors[:MAJORITY], previous, test))

    shown = {
        f"{r} adversaries": {rule: [each[r] for each in gaussian[rule]] for rule in RULES} for r in (0, 2, 5, 7, 10)
    }
    plain = shown["0 adversaries"]
    losses = {rule: [a - b for a, b in zip(plain["weighted_average"], plain[rule])] for rule in RULES}
    worst = max(losses, key=lambda rule: sum(losses[rule]))
    published = PUBLISHED["mnist"] if (arguments.dataset, arguments.features) == ("mnist", "pixels") else None
    settings = (
        f"{arguments.dataset}, all 10,000 test images. Logistic regression from 0 on {FEATURES[arguments.features]}; "
        f"SGD, rate {rate}, batches of {BATCH}, {epochs} local epochs, one round; engine {engine}; seeds 0 to "
        f"{arguments.seeds - 1} (parts, batches and attacks). First table: {GENUINE} genuine parties of {SIZE:,} "
        "examples and adversaries who send N(0, 1) in place of the parameters; published: the paper's MNIST, 5 "
        f"adversaries. Second table: {MAJORITY} honest parties and {MINORITY} adversaries of {SHARE:,} examples each. "
        f"One party alone: {sum(alone) / len(alone):.4f}. Without adversaries {RULES[worst]} is farthest below the "
        f"uniform average, by {cell(losses[worst], 4)}, seed by seed."
    )
    title = f"{arguments.dataset}, {GENUINE} genuine parties"
    figure = panels({title: gaussian}, RULES, numbers, "adversaries", "test accuracy")
    tables = [table("rule", RULES, published, shown, 4), table("rule", RULES, None, others, 4)]
    file = f"one_round_{arguments.dataset}" + ("" if arguments.features == "pixels" else f"_{arguments.features}")
    write(arguments.out, file, settings, tables, figure)


if __name__ == "__main__":
    with quietly():
        main()
