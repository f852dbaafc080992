"""How many iterations a rule needs to find the estimate of one round of logistic regression.

    python -m benchmarks.untrusted.convergence --data DIR [--seeds 2] [--out FOLDER]

The round is that of one_round.py on MNIST with pixels: five genuine parties and ten Gaussian adversaries.
"""

from __future__ import annotations

from typing import Any

import torch
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import GaussianVector
from benchmarks.untrusted.images import deal, examples
from benchmarks.untrusted.one_round import GENUINE, LOCAL_EPOCHS, MOST, RATE, SIZE, score, updates_of
from benchmarks.untrusted.report import RULES, options, table, write
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.fusion import robust
from lightning_fedbayes.fusion.registry import get_rule

ITERATED = ("geometric_median", "ivar_vb", "ivar_mle", "icov_mle")
"""The rules that iterate."""
ITERATIONS = (1, 2, 3, 5, 10, 100)
MOST_OF_MEDIAN = robust.ITERATIONS


def limited(name: str, iterations: int) -> Any:
    """Return a rule that stops after so many iterations; the others begin at a geometric median that has all of its."""
    rule: Any = get_rule(name)
    rule.max_iterations = iterations
    robust.ITERATIONS = iterations if name == "geometric_median" else MOST_OF_MEDIAN
    return rule


def main() -> None:
    arguments = options(__doc__, data=True, seeds=2).parse_args()
    torch.set_num_threads(1)  # the fastest for networks this small
    train, test = examples(arguments.data, "pixels")
    accuracies = {each: {rule: [] for rule in ITERATED} for each in ITERATIONS}
    distances = {each: {rule: [] for rule in ITERATED} for each in ITERATIONS}
    engine = ""
    for seed in tqdm(range(arguments.seeds)):
        parties = deal(train, GENUINE, SIZE, seed)
        inputs, targets = parties[0]
        noise = [(inputs[:1], targets[:1])] * MOST  # they discard their training: one example is enough
        attack = GaussianVector(clients=list(range(GENUINE, GENUINE + MOST)))
        (posteriors, previous), engine = updates_of([*parties, *noise], test, attack, seed, RATE, LOCAL_EPOCHS)
        start = previous.flatten()[0]
        for name in ITERATED:
            points = {}
            for number in ITERATIONS:
                rule = limited(name, number)
                points[number] = fb.fuse(rule, posteriors, previous=previous).flatten()[0]
                accuracies[number][name].append(score(rule, posteriors, previous, test))
            end = points[ITERATIONS[-1]]
            for number, point in points.items():
                distances[number][name].append(float((point - end).norm() / (end - start).norm()))
    titles = {rule: RULES[rule] for rule in ITERATED}
    settings = (
        f"MNIST, all 10,000 test images; {GENUINE} genuine parties of {SIZE:,} examples and {MOST} adversaries who "
        f"send N(0, 1) in place of the parameters; SGD, rate {RATE}, {LOCAL_EPOCHS} local epochs, one round; engine "
        f"{engine}; seeds 0 to {arguments.seeds - 1}. First table: test accuracy after so many iterations. Second "
        "table: distance to the rule's estimate after the most iterations, divided by that estimate's length."
    )
    tables = [
        table("rule", titles, None, {_head(number): columns for number, columns in scores.items()}, digits)
        for scores, digits in ((accuracies, 4), (distances, 5))
    ]
    write(arguments.out, "convergence", settings, tables)


def _head(iterations: int) -> str:
    return "1 iteration" if iterations == 1 else f"{iterations} iterations"


if __name__ == "__main__":
    with quietly():
        main()
