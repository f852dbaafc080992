"""The linear regression of synthetic.py with some of the parties in a round, and a batch of their data.

    python -m benchmarks.untrusted.participation [--seeds 2] [--out FOLDER]

In every round, the parties that take part draw a batch of their examples, take one gradient step on it, and the steps
are fused. The rate is stable for every batch: the largest eigenvalue of the curvature is near
(1 + √(features / batch))², at most 4 here, and a step is stable below 2 over it.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

from benchmarks.untrusted.federation import federate
from benchmarks.untrusted.report import RULES, options, panels, table, write
from benchmarks.untrusted.synthetic import DOUBLING, PARTIES, SIZE, make, task
from lightning_fedbayes.core.quiet import quietly

TITLES = {rule: title for rule, title in RULES.items() if rule.endswith(("average", "median", "vb", "mle"))}
"""The rules of the paper."""
OVERLAP = 0.5
CELLS = {f"{count} parties, batch {batch}": (count, batch) for count in (5, 3) for batch in (SIZE, 50)}
"""Title → parties that take part in a round, and the examples that each of them draws."""
ROUNDS, RATE = 60, 0.2


def run(rule: str, taking_part: int, batch: int, seed: int) -> tuple[list[float], str]:
    """Return the prediction error after every round, and the engine."""
    parties, test, _ = make(OVERLAP, DOUBLING, seed)
    return federate(
        task(RATE),
        parties,
        test,
        rule,
        None,
        rounds=ROUNDS,
        batch_size=batch,
        seed=seed,
        drawn=None if batch == SIZE else batch,
        fraction=taking_part / PARTIES,
    )


def main() -> None:
    arguments = options(__doc__, data=False, seeds=2).parse_args()
    torch.set_num_threads(1)  # the fastest for networks this small
    engine, curves = "", {name: {rule: [] for rule in TITLES} for name in CELLS}
    runs = [(seed, name, rule) for seed in range(arguments.seeds) for name in CELLS for rule in TITLES]
    for seed, name, rule in tqdm(runs):
        errors, engine = run(rule, *CELLS[name], seed)
        curves[name][rule].append(errors)
    last = {
        name: {rule: [each[-1] for each in seeds] for rule, seeds in rules.items()} for name, rules in curves.items()
    }
    levels = ", ".join(f"{level:g}" for level in DOUBLING)
    settings = (
        f"{PARTIES} genuine parties as in synthetic.py, with an overlap of {OVERLAP:.0%} and own noise of {levels}. Of "
        f"them so many take part in a round, drawn anew in every round, and take one step on so many of their {SIZE} "
        f"examples, drawn anew, too ({SIZE}: all of them). {ROUNDS} rounds, rate {RATE}; engine {engine}; seeds 0 to "
        f"{arguments.seeds - 1}. Error: mean squared error to the labels without noise of fresh inputs, after the last "
        "round."
    )
    figure = panels(curves, TITLES, range(1, ROUNDS + 1), "round", "prediction error", log=True)
    write(arguments.out, "participation", settings, [table("rule", TITLES, None, last, 2)], figure)


if __name__ == "__main__":
    with quietly():
        main()
