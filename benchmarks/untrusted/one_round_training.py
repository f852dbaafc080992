"""Choice of the local training of one_round.py on held-out training images.

    python -m benchmarks.untrusted.one_round_training --data DIR [--seeds 3] [--out FOLDER]

DIR holds the folders mnist and fashion_mnist. The criterion: the learning rate and local epochs with which a single
party has the highest accuracy on the last 10,000 training images, in the mean over parties, seeds and both data sets. A
party could choose so for itself: the choice uses no fusion rule, no adversary and no test image. The parties train on
the other 50,000 images, with seeds that no result uses.
"""

from __future__ import annotations

import itertools
import statistics

import torch
from tqdm import tqdm

from benchmarks.untrusted.images import DATASETS, deal, read
from benchmarks.untrusted.one_round import BATCH, GENUINE, score, updates_of
from benchmarks.untrusted.report import options, table, write
from lightning_fedbayes.core.quiet import quietly

RATES, EPOCHS = (0.01, 0.03, 0.1), (20, 50)
HELD_OUT, SIZE, FIRST_SEED = 10_000, 10_000, 100
"""Last training images, examples of each party, first of the seeds."""


def main() -> None:
    arguments = options(__doc__, data=True, seeds=3).parse_args()
    torch.set_num_threads(1)  # the fastest for networks this small
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    titles = {f"{rate} {epochs}": f"{rate}, {epochs} epochs" for rate in RATES for epochs in EPOCHS}
    alone: dict[str, dict[str, list[float]]] = {name: {row: [] for row in titles} for name in DATASETS}
    average: dict[str, dict[str, list[float]]] = {name: {row: [] for row in titles} for name in DATASETS}
    for name, rate, epochs, seed in tqdm(list(itertools.product(DATASETS, RATES, EPOCHS, seeds))):
        inputs, targets = read(arguments.data / name, "train")
        held_out = inputs[-HELD_OUT:], targets[-HELD_OUT:]
        parties = deal((inputs[:-HELD_OUT], targets[:-HELD_OUT]), GENUINE, SIZE, seed)
        (sent, previous), _ = updates_of(parties, held_out, None, seed, rate, epochs)
        each = [score("weighted_average", [one], previous, held_out) for one in sent]
        alone[name][f"{rate} {epochs}"].append(statistics.fmean(each))
        average[name][f"{rate} {epochs}"].append(score("weighted_average", sent, previous, held_out))

    both = {
        row: [statistics.fmean(values) for values in zip(*(alone[name][row] for name in DATASETS))] for row in titles
    }
    chosen = max(titles, key=lambda row: statistics.fmean(both[row]))
    columns = {
        **{f"{title}, one party": alone[name] for name, title in DATASETS.items()},
        "both, one party": both,
        **{f"{title}, average of the five": average[name] for name, title in DATASETS.items()},
    }
    settings = (
        f"Accuracy on the last {HELD_OUT:,} training images after one round of {GENUINE} parties of {SIZE:,} others, "
        f"batches of {BATCH}, no adversaries; one party: mean of the {GENUINE}, each alone. Seeds {seeds[0]} to "
        f"{seeds[-1]}. Highest for one party in the mean over both data sets: **{titles[chosen]}**."
    )
    tables = [table("SGD, rate and local epochs", titles, None, columns, 4)]
    write(arguments.out, "one_round_training", settings, tables)


if __name__ == "__main__":
    with quietly():
        main()
