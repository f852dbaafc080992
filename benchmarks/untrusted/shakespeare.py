"""The next character of Shakespeare: a GRU, five genuine parties with roles of their own, five adversaries.

python -m benchmarks.untrusted.shakespeare --data DIR [--training epochs|gradients|stochastic_gradients]
                                           [--characters N ...] [--seeds 2] [--processes 1] [--out FOLDER]
"""

from __future__ import annotations

import functools
import html
import random
import re
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.untrusted.adversaries import GaussianVector, RandomUpdate, UpdateAttack
from benchmarks.untrusted.federation import Examples, Task, accuracy, cross_entropy, federate
from benchmarks.untrusted.report import PUBLISHED, options, panels, table, write
from benchmarks.untrusted.report import RULES as ALL_RULES
from lightning_fedbayes.core.quiet import quietly

SPEAKER_OR_LINE = re.compile(r'<a name="?(?:speech\d+"?><b>(.*?)</b>|[\d.]+"?>(.*?)</a>)', re.IGNORECASE | re.DOTALL)
LEAST_CHARACTERS = 1000
"""Minimum of a role; shorter ones are left out."""


def roles(directory: Path) -> list[str]:
    """Return one text per role of the plays with at least 1,000 characters.

    Args:
        directory: holds ``html.tar.xz``, an archive of the plays in HTML, one file each.
    """
    said: dict[tuple[str, str], list[str]] = {}
    with tarfile.open(directory / "html.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            speaker = ""
            for who, line in SPEAKER_OR_LINE.findall(file.read().decode("latin-1") if file else ""):
                speaker = who or speaker
                if line:
                    said.setdefault((member.name, speaker), []).append(html.unescape(line).strip())
    texts = ["\n".join(lines) + "\n" for lines in said.values()]
    return [text for text in texts if len(text) >= LEAST_CHARACTERS]


def deal(
    texts: list[str], parties: int, characters: int, test: int, length: int, seed: int
) -> tuple[list[Examples], Examples, int]:
    """Deal out whole roles to the parties, and keep the last fifth of each role for the test.

    Args:
        texts: of the roles.
        parties: number of parties.
        characters: of training text per party.
        test: characters of the test text, taken from all parties alike.
        length: of a sequence.
        seed: of the order in which roles are dealt out.

    Returns: training sequences of every party, test sequences, and the number of different characters.
    """
    alphabet = {character: i for i, character in enumerate(sorted(set("".join(texts))))}
    order = random.Random(seed).sample(texts, len(texts))
    hands = [order[party::parties] for party in range(parties)]
    train = ["".join(text[: len(text) * 4 // 5] for text in hand)[:characters] for hand in hands]
    held_out = ["".join(text[len(text) * 4 // 5 :] for text in hand)[: test // parties] for hand in hands]
    encoded = [sequences(text, alphabet, length) for text in train]
    return encoded, sequences("".join(held_out), alphabet, length), len(alphabet)


def sequences(text: str, alphabet: dict[str, int], length: int) -> Examples:
    """Return sequences of ``length`` characters and the character after each; shape (count, length) both."""
    codes: Tensor = torch.tensor([alphabet[character] for character in text])
    count = (len(codes) - 1) // length
    return codes[: count * length].view(count, length), codes[1 : count * length + 1].view(count, length)


PARTIES, ADVERSARIES = 5, 5
LENGTH = 50
EMBEDDING, HIDDEN = 16, 96
LEFT_OUT = ("icov_mle", "krum", "multi_krum", "trimmed_mean", "norm_clipping")
ORACLE = "oracle"
RULES = {rule: title for rule, title in ALL_RULES.items() if rule not in LEFT_OUT} | {
    ORACLE: "oracle: the average of the genuine parties"
}
"""Rules that the paper reports, and nearest-neighbour mixing: a run takes half a minute to a minute."""
ATTACKERS = list(range(PARTIES, PARTIES + ADVERSARIES))
ATTACKS = {
    "N(0, 1) in place of the parameters": GaussianVector(clients=ATTACKERS),
    "a random update of honest length": RandomUpdate(clients=ATTACKERS),
}


@dataclass(frozen=True)
class Training:
    """Training of the parties.

    Args:
        characters: of the training text of each party.
        test: characters of the test text.
        batch: sequences in a batch; None: all of a party.
        drawn: number of sequences that a party draws in every round; None: it uses all its sequences.
        rounds: number of rounds, of one local epoch each.
        optimizer: parameters → optimizer.
        attacks: names of the attacks.
        title: in words.
    """

    characters: Sequence[int]
    test: int
    batch: int | None
    drawn: int | None
    rounds: int
    optimizer: Callable[..., torch.optim.Optimizer]
    attacks: Sequence[str]
    title: str


TRAININGS = {
    "epochs": Training(
        [40_000] * PARTIES,
        50_000,
        16,
        None,
        8,
        functools.partial(torch.optim.Adam, lr=0.01),
        list(ATTACKS),
        "Adam 0.01, batches of 16, 8 rounds of one local epoch",
    ),
    "gradients": Training(
        [8_000] * PARTIES,
        20_000,
        None,
        None,
        150,
        functools.partial(torch.optim.SGD, lr=2.0),
        list(ATTACKS)[:1],
        "SGD 2.0, 150 rounds of one step on all of a party's text",
    ),
    "stochastic_gradients": Training(
        [40_000] * PARTIES,
        20_000,
        1,
        1,
        400,
        functools.partial(torch.optim.SGD, lr=4.0),
        list(ATTACKS)[:1],
        "SGD 4.0, 400 rounds of one step on one sequence, drawn at random",
    ),
}


class NextCharacter(nn.Module):
    """Embedding, GRU and linear layer: shape (batch, time) → (batch, time, characters)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, EMBEDDING)
        self.recurrent = nn.GRU(EMBEDDING, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, characters)

    def forward(self, codes: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(codes))[0])


def run(
    texts: list[str], sizes: Sequence[int], training: str, seed: int, attack_name: str, rule: str
) -> tuple[list[float], str]:
    """Return the test accuracy after every round, and the engine; ``sizes``: characters of the genuine parties."""
    torch.set_num_threads(1)  # the fastest for networks this small
    how, attack = TRAININGS[training], ATTACKS[attack_name]
    given: UpdateAttack | None = attack
    parties, test, characters = deal(texts, PARTIES + ADVERSARIES, max(sizes), how.test, LENGTH, seed)
    for party, size in enumerate(sizes):
        parties[party] = parties[party][0][: size // LENGTH], parties[party][1][: size // LENGTH]
    if isinstance(attack, GaussianVector):  # it discards its training: one sequence is enough
        parties[PARTIES:] = [(inputs[:1], targets[:1]) for inputs, targets in parties[PARTIES:]]
    if rule == ORACLE:
        parties, given, rule = parties[:PARTIES], None, "weighted_average"
    L.seed_everything(seed, verbose=False)
    task = Task(NextCharacter(characters), cross_entropy, accuracy, how.optimizer)
    with quietly():
        return federate(
            task,
            parties,
            test,
            rule,
            given,
            rounds=how.rounds,
            batch_size=how.batch or max(sizes) // LENGTH,
            seed=seed,
            drawn=how.drawn,
        )


def main() -> None:
    parser = options(__doc__, data=True, seeds=2)
    parser.add_argument("--training", choices=TRAININGS, default="epochs", help="how the parties train (epochs)")
    parser.add_argument(
        "--characters", type=int, nargs=PARTIES, metavar="N", help="of the training text of each genuine party"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at once (1)")
    arguments = parser.parse_args()
    training = arguments.training
    how = TRAININGS[training]
    sizes = arguments.characters or how.characters
    texts, engine = roles(arguments.data), ""
    curves = {name: {rule: [] for rule in RULES} for name in how.attacks}
    runs = [(seed, name, rule) for seed in range(arguments.seeds) for name in how.attacks for rule in RULES]
    with ProcessPoolExecutor(arguments.processes) as pool:
        results = pool.map(functools.partial(run, texts, sizes, training), *zip(*runs))
        for (seed, name, rule), result in zip(runs, tqdm(results, total=len(runs))):
            accuracies, engine = result
            curves[name][rule].append(accuracies)
            tqdm.write(f"seed {seed}, {name}, {RULES[rule]}: {accuracies[-1]:.3f}")
    last = {
        name: {rule: [each[-1] for each in seeds] for rule, seeds in rules.items()} for name, rules in curves.items()
    }
    settings = (
        f"Shakespeare's plays, {len(texts)} roles of at least 1,000 characters dealt out whole to {PARTIES} genuine "
        f"parties of {', '.join(f'{size:,}' for size in sizes)} characters and {ADVERSARIES} adversaries of "
        f"{max(sizes):,}, the last fifth of every role for the test ({how.test:,} characters); embedding {EMBEDDING}, "
        f"GRU {HIDDEN}, sequences of {LENGTH}; {how.title}; engine {engine}; seeds 0 to {arguments.seeds - 1}. "
        "Accuracy of the next character at every position of the test sequences after the last round."
    )
    figure = panels(curves, RULES, range(1, how.rounds + 1), "round", "accuracy of the next character")
    file = "shakespeare" if training == "epochs" else f"shakespeare_{training}"
    write(arguments.out, file, settings, [table("rule", RULES, PUBLISHED["shakespeare"], last, 3)], figure)


if __name__ == "__main__":
    main()
