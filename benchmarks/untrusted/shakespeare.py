"""The next character of Shakespeare: a GRU, five genuine parties with roles of their own, five adversaries.

    python benchmarks/untrusted/shakespeare.py --data DIR [--characters N ...] [--seeds 2] [--out FOLDER]
"""

from __future__ import annotations

import functools

import lightning as L
import torch
from federation import Task, accuracy, cross_entropy, federate
from figures import panels
from report import options, table, write
from rules import PUBLISHED
from rules import RULES as ALL_RULES
from text import deal, roles
from torch import Tensor, nn
from tqdm import tqdm

import lightning_fedbayes as fb
from lightning_fedbayes.adversaries import Attack
from lightning_fedbayes.quiet import quietly

PARTIES, ADVERSARIES = 5, 5
LENGTH, TEST = 50, 50_000
CHARACTERS = [40_000] * PARTIES
"""Of the training text of each genuine party."""
EMBEDDING, HIDDEN = 16, 96
ROUNDS, BATCH, RATE = 8, 16, 0.01
LEFT_OUT = ("icov_mle", "krum", "multi_krum", "trimmed_mean", "norm_clipping")
ORACLE = "oracle"
RULES = {rule: title for rule, title in ALL_RULES.items() if rule not in LEFT_OUT} | {
    ORACLE: "oracle: the average of the genuine parties"
}
"""Those that the paper reports, and one of the field's: a run takes half a minute to a minute."""
ATTACKERS = range(PARTIES, PARTIES + ADVERSARIES)
ATTACKS = {
    "N(0, 1) in place of the parameters": fb.GaussianVector(clients=list(ATTACKERS)),
    "a random update of honest length": fb.RandomUpdate(clients=list(ATTACKERS)),
}


class NextCharacter(nn.Module):
    """Embedding, GRU, linear: shape (batch, time) → (batch, time, characters)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, EMBEDDING)
        self.recurrent = nn.GRU(EMBEDDING, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, characters)

    def forward(self, codes: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(codes))[0])


def run(
    texts: list[str], rule: str, attack: fb.GaussianVector | fb.RandomUpdate, sizes: list[int], seed: int
) -> tuple[list[float], str]:
    """Test accuracy after every round, and the engine; ``sizes`` are the characters of the genuine parties."""
    given: Attack | None = attack
    parties, test, characters = deal(texts, PARTIES + ADVERSARIES, max(sizes), TEST, LENGTH, seed)
    for party, size in enumerate(sizes):
        parties[party] = parties[party][0][: size // LENGTH], parties[party][1][: size // LENGTH]
    if isinstance(attack, fb.GaussianVector):  # it throws away what it has trained: one sequence will do
        parties[PARTIES:] = [(inputs[:1], targets[:1]) for inputs, targets in parties[PARTIES:]]
    if rule == ORACLE:
        parties, given, rule = parties[:PARTIES], None, "weighted_average"
    L.seed_everything(seed, verbose=False)
    optimizer = functools.partial(torch.optim.Adam, lr=RATE)
    task = Task(NextCharacter(characters), cross_entropy, accuracy, optimizer)
    return federate(task, parties, test, rule, given, rounds=ROUNDS, batch_size=BATCH, seed=seed)


def main() -> None:
    parser = options(__doc__, data=True, seeds=2)
    parser.add_argument("--characters", type=int, nargs=PARTIES, default=CHARACTERS, metavar="N",
                        help=f"of the training text of each genuine party ({CHARACTERS[0]} each)")
    arguments = parser.parse_args()
    sizes = arguments.characters
    torch.set_num_threads(1)  # which networks this small want
    texts, engine = roles(arguments.data), ""
    curves = {name: {rule: [] for rule in RULES} for name in ATTACKS}
    runs = [(seed, name, rule) for seed in range(arguments.seeds) for name in ATTACKS for rule in RULES]
    for seed, name, rule in tqdm(runs):
        accuracies, engine = run(texts, rule, ATTACKS[name], sizes, seed)
        curves[name][rule].append(accuracies)
        tqdm.write(f"seed {seed}, {name}, {RULES[rule]}: {accuracies[-1]:.3f}")
    last = {name: {rule: [each[-1] for each in seeds] for rule, seeds in rules.items()}
            for name, rules in curves.items()}
    settings = (
        f"Shakespeare's plays, {len(texts)} roles of at least 1,000 characters dealt out whole to {PARTIES} genuine "
        f"parties of {', '.join(f'{size:,}' for size in sizes)} characters and {ADVERSARIES} adversaries of "
        f"{max(sizes):,}, the last fifth of every role for the test ({TEST:,} characters); embedding {EMBEDDING}, GRU "
        f"{HIDDEN}, sequences of {LENGTH}; Adam {RATE}, batches of {BATCH}, {ROUNDS} rounds of one local epoch; engine "
        f"{engine}; seeds 0 to "
        f"{arguments.seeds - 1}. Accuracy of the next character at every position of the test sequences after the "
        "last round."
    )
    figure = panels(curves, RULES, range(1, ROUNDS + 1), "round", "accuracy of the next character")
    write(arguments.out, "shakespeare", settings, [table("rule", RULES, PUBLISHED["shakespeare"], last, 3)], figure)


if __name__ == "__main__":
    with quietly():
        main()
