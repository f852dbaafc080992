"""How many iterations a rule needs to find the estimate of one round of logistic regression.

    python -m benchmarks.untrusted.convergence --data DIR [--seeds 2] [--out FOLDER]

The round is that of one_round.py on MNIST with pixels: five genuine parties and ten Gaussian adversaries.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import GaussianVector
from benchmarks.untrusted.images import deal, examples
from benchmarks.untrusted.one_round import GENUINE, LOCAL_EPOCHS, MOST, RATE, SIZE, score, updates_of
from benchmarks.untrusted.report import RULES, options, table, write
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.fusion.registry import get_rule

ITERATED = ("geometric_median", "ivar_vb", "ivar_mle", "icov_mle")
"""The rules with a bound of the number of iterations."""
ITERATIONS = (1, 2, 3, 5, 10, 100)


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
            make = type(get_rule(name))
            last = make(max_iterations=ITERATIONS[-1])  # type: ignore[call-arg]
            end = fb.fuse(last, posteriors, previous=previous).flatten()[0]
            for number in ITERATIONS:
                rule = make(max_iterations=number)  # type: ignore[call-arg]
                point = fb.fuse(rule, posteriors, previous=previous).flatten()[0]
                accuracies[number][name].append(score(rule, posteriors, previous, test))
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
