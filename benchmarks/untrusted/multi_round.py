"""Many rounds of SGD on MNIST: one hidden layer of 100 units, five genuine parties, Gaussian adversaries.

python -m benchmarks.untrusted.multi_round --data DIR [--seeds 2] [--out FOLDER]
"""

from __future__ import annotations

import functools

import lightning as L
import torch
from tqdm import tqdm

from benchmarks.untrusted.adversaries import GaussianVector
from benchmarks.untrusted.federation import Examples, Task, accuracy, cross_entropy, federate
from benchmarks.untrusted.images import deal, read
from benchmarks.untrusted.report import RULES, options, panels, table, write
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.modules import mlp

GENUINE, ADVERSARIES, SIZE = 5, (0, 2, 5, 7), 1_000
ROUNDS, BATCH, RATE = 20, 50, 0.1


def run(train: Examples, test: Examples, rule: str, adversaries: int, seed: int) -> tuple[list[float], str]:
    """Return the test accuracy after every round, and the engine."""
    parties, attack = deal(train, GENUINE, SIZE, seed), None
    if adversaries:  # they discard their training: one example is enough
        inputs, targets = parties[0]
        parties = [*parties, *[(inputs[:1], targets[:1])] * adversaries]
        attack = GaussianVector(clients=list(range(GENUINE, GENUINE + adversaries)))
    L.seed_everything(seed, verbose=False)
    task = Task(mlp(784, 10, hidden=(100,)), cross_entropy, accuracy, functools.partial(torch.optim.SGD, lr=RATE))
    return federate(task, parties, test, rule, attack, rounds=ROUNDS, batch_size=BATCH, seed=seed)


def main() -> None:
    arguments = options(__doc__, data=True, seeds=2).parse_args()
    torch.set_num_threads(1)  # the fastest for networks this small
    train, test = read(arguments.data, "train"), read(arguments.data, "t10k")
    names, engine = {number: f"{number} adversaries" for number in ADVERSARIES}, ""
    curves = {name: {rule: [] for rule in RULES} for name in names.values()}
    runs = [(seed, number, rule) for seed in range(arguments.seeds) for number in ADVERSARIES for rule in RULES]
    for seed, number, rule in tqdm(runs):
        accuracies, engine = run(train, test, rule, number, seed)
        curves[names[number]][rule].append(accuracies)
    last = {
        name: {rule: [each[-1] for each in seeds] for rule, seeds in rules.items()} for name, rules in curves.items()
    }
    settings = (
        f"MNIST, all 10,000 test images; network 784-100-10; {GENUINE} genuine parties of {SIZE:,} examples, and "
        f"adversaries who send N(0, 1) in place of the parameters; {ROUNDS} rounds of one local epoch "
        f"({SIZE // BATCH} batches of {BATCH}), SGD, rate {RATE}; engine {engine}; seeds 0 to {arguments.seeds - 1} "
        "(parts, network, batches and attacks). Test accuracy after the last round."
    )
    figure = panels(curves, RULES, range(1, ROUNDS + 1), "round", "test accuracy")
    write(arguments.out, "multi_round", settings, [table("rule", RULES, None, last, 3)], figure)


if __name__ == "__main__":
    with quietly():
        main()
