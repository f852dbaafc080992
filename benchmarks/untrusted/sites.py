"""Attacks on sites: handwritten digits, ten clients, two Bayesian layers, beside a run that the attacker never joins.

    python -m benchmarks.untrusted.sites [--seeds 3] [--out FOLDER]

The data ship with scikit-learn. Every cell (rule, split, rounds, attack, seed) is in results/sites.csv, and a command
that is cut off goes on there.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import (
    ALittleIsEnough,
    Attackers,
    Attacks,
    FalseVariance,
    GaussianVector,
    InnerProductManipulation,
    Knowledge,
    ScaledUpdate,
    SignFlip,
    UpdateAttack,
)
from benchmarks.untrusted.report import options, write
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.data.clients import clients_of
from lightning_fedbayes.modules import mlp

CLIENTS, LOCAL_EPOCHS, RATE, KL_WEIGHT = 10, 2, 0.01, 0.05
ROUNDS, SPLITS = (12, 60), ("Dirichlet(0.5)", "IID")
LATE = "sites without rounds"
IVON, ADAPTERS = "IVON + sites", "adapters + sites"
RULES = ("sites", IVON, ADAPTERS, "population", LATE)
SHORT = (IVON, ADAPTERS, "population", LATE)
"""Rules that run the first split alone."""
FUSIONS = 2
"""Fusions of five messages in a round of ten clients."""
AFTER = 20
"""Rounds after an attack has ended, or its client has been removed."""
RANK, STEPS = 8, 300
"""Rank of the adapter; steps that its frozen layer has been trained before, on the images turned by a right angle."""
NONE, UNGUARDED, NEVER = "none", "none, without guard", "never joined"
STOPS, REMOVED = "flipped × 10 for 12 rounds, then honest", "flipped × 10 for 12 rounds, then removed"
LATER = "never joined, as long"

Cell = tuple[str, str, int, str]
"""Rule, split, rounds, attack."""


@dataclass(frozen=True)
class Phased(UpdateAttack):
    """Base class of attacks that depend on the round, counted from 0 at each client's own calls."""

    clients: Attackers
    calls: dict[str, Any] = field(default_factory=lambda: {"round": -1}, compare=False)

    def send(self, posterior: GaussianPosterior, knowledge: Knowledge) -> GaussianPosterior:
        self.calls["round"] += 1
        return super().send(posterior, knowledge)


@dataclass(frozen=True)
class Oscillation(Phased):
    """Ten times the update, forwards and backwards in turn."""

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        return knowledge.previous + 10 * (-1) ** self.calls["round"] * (mean - knowledge.previous)


@dataclass(frozen=True)
class FlippedAtTimes(Phased):
    """The update flipped and ten times as long, in every second round, or up to a round."""

    until: int = 0

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        round = self.calls["round"]
        attacks = round < self.until if self.until else round % 2 == 0
        return knowledge.previous - 10 * (mean - knowledge.previous) if attacks else mean


@dataclass(frozen=True)
class Stale(Phased):
    """The message of the first round, again and again."""

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        return self.calls.setdefault("first", mean.clone())

    def send_beside(self, tensors: Mapping[str, Tensor], knowledge: Knowledge) -> dict[str, Tensor]:
        first = self.calls.setdefault("beside", dict(tensors))
        return {name: first[name] if value.numel() > 1 else value for name, value in tensors.items()}


@dataclass(frozen=True)
class Foreign(UpdateAttack):
    """The means of another network."""

    clients: Attackers

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        return mean[torch.randperm(len(mean), generator=torch.Generator().manual_seed(0))]


def attacks_of(clients: list[int]) -> dict[str, list[UpdateAttack]]:
    """Return the attacks of the table by ``clients``, title → what each of them applies one after the other."""
    flip = SignFlip(clients)
    return {
        "mean flipped": [flip],
        "flipped × 10": [SignFlip(clients, scale=10.0)],
        "update × 1e6": [ScaledUpdate(clients, factor=1e6)],
        "noise, σ = 1": [GaussianVector(clients)],
        "honest, σ² × 1e-6": [FalseVariance(clients, factor=1e-6)],
        "honest, σ² × 1e10": [FalseVariance(clients, factor=1e10)],
        "flipped, σ² × 0.5": [flip, FalseVariance(clients, factor=0.5)],
        "flipped, σ² × 1e-10": [flip, FalseVariance(clients, factor=1e-10)],
        "a little is enough": [ALittleIsEnough(clients, z=1.5)],
        "inner product": [InnerProductManipulation(clients)],
        "stale": [Stale(clients)],
        "foreign network": [Foreign(clients)],
        "oscillation × 10": [Oscillation(clients)],
        "every second round × 10": [FlippedAtTimes(clients)],
    }


class Adapter(nn.Module):
    """A frozen layer whose weights gain BA of low rank (LoRA); B begins at 0, and alone is trained."""

    down: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.register_buffer("down", torch.randn(RANK, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


def adapted(dataset: Any) -> nn.Sequential:
    """Return a network whose first layer was trained on turned images and has an adapter; its head begins at 0."""
    network = mlp(64, 10)
    images, labels = (torch.stack([torch.as_tensor(each) for each in part]) for part in zip(*dataset))
    turned = images.view(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(turned), labels).backward()
        optimizer.step()
    for each in network[2].parameters():
        nn.init.zeros_(each)
    return nn.Sequential(Adapter(network[0]), *network[1:])


def run(
    rule: str,
    split: str,
    rounds: int,
    seed: int,
    attacks: Sequence[UpdateAttack] = (),
    *,
    without: bool = False,
    start: GaussianPosterior | None = None,
    **settings: Any,
) -> tuple[float, float, fb.FederatedBayes]:
    """Return accuracy and NLL after the last round, and the federation.

    Args:
        rule, split, rounds, seed: of the federation.
        attacks: of its clients.
        without: the first client never joins.
        start: posterior to begin with.
        settings: more of the federation.
    """
    L.seed_everything(seed, verbose=False)
    digits = fb.DigitsDataModule()
    digits.prepare_data()
    digits.setup("fit")
    loader = digits.train_dataloader()
    partition = fb.IIDPartition(CLIENTS) if split == "IID" else fb.DirichletPartition(clients=CLIENTS, alpha=0.5)
    clients = clients_of(loader.dataset, partition, seed)
    parts = dict(zip(clients.names, clients.datasets, strict=True))
    if without:
        del parts[clients.names[0]]
    own: dict[str, Any] = {"estimator": "flipout", "learning_rate": RATE, "kl_weight": KL_WEIGHT}
    if rule in (IVON, ADAPTERS):
        own = {"optimizer": fb.IVON}
    network = adapted(loader.dataset) if rule == ADAPTERS else mlp(64, 10)
    module = fb.HybridBayesianClassifier(network, bayesian_last=0 if rule in (IVON, ADAPTERS) else 2, **own)
    if start is not None:
        fb.load_posterior(module, start)
    if rule == LATE:
        settings["schedule"] = fb.Asynchronous(buffer=CLIENTS // FUSIONS)
        rounds *= FUSIONS
    federation = fb.FederatedBayes(
        local_epochs=LOCAL_EPOCHS,
        fusion="sites" if rule in (LATE, IVON, ADAPTERS) else rule,
        adversaries=Attacks(attacks),
        seed=seed,
        **settings,
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=rounds,
    )
    trainer.fit(module, DataLoader(fb.ClientDatasets(parts), loader.batch_size, shuffle=True), digits.val_dataloader())
    figures = trainer.callback_metrics
    return float(figures["val/accuracy"]), float(figures["val/nll"]), federation


def cells_of() -> Iterator[Cell]:
    """Yield all cells."""
    for rule, split, rounds in itertools.product(RULES, SPLITS, ROUNDS):
        if rule in SHORT and split != SPLITS[0]:
            continue
        for title in (NEVER, NONE, UNGUARDED, *attacks_of([0])):
            yield rule, split, rounds, title
        if rounds == ROUNDS[0] and rule != LATE:
            after = [STOPS, LATER] if rule == "population" else [STOPS, REMOVED, LATER]  # it has no sites to remove
            yield from ((rule, split, rounds + AFTER, title) for title in after)
            yield from ((rule, split, rounds, f"{title}, by three") for title in attacks_of([0]))


def measure(cell: Cell, seed: int) -> tuple[float, float]:
    """Return accuracy and NLL of a cell."""
    rule, split, rounds, title = cell
    if title in (NEVER, LATER):
        return run(rule, split, rounds, seed, without=True)[:2]
    if title in (NONE, UNGUARDED):
        guard = fb.Safeguards() if title == NONE else fb.Safeguards(max_influence=None)
        return run(rule, split, rounds, seed, safeguards=guard)[:2]
    if title == STOPS:
        return run(rule, split, rounds, seed, [FlippedAtTimes([0], until=ROUNDS[0])])[:2]
    if title == REMOVED:
        attacked = run(rule, split, ROUNDS[0], seed, [FlippedAtTimes([0], until=ROUNDS[0])])[2]
        return run(rule, split, AFTER, seed, without=True, start=fb.remove_client(attacked, 0))[:2]
    attackers = [0, 1, 2] if title.endswith(", by three") else [0]
    return run(rule, split, rounds, seed, attacks_of(attackers)[title.removesuffix(", by three")])[:2]


def fill(seeds: int, path: Path, rules: list[str]) -> dict[Cell, list[tuple[float, float]]]:
    """Run every cell that is not yet at ``path``, and store it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored: dict[tuple[Cell, int], tuple[float, float]] = {}
    if path.exists():
        with path.open(newline="") as file:
            for rule, split, rounds, title, seed, accuracy, nll in itertools.islice(csv.reader(file), 1, None):
                stored[(rule, split, int(rounds), title), int(seed)] = float(accuracy), float(nll)
    else:
        path.write_text("rule,split,rounds,attack,seed,accuracy,nll\n")
    todo = [(cell, seed) for seed in range(seeds) for cell in cells_of() if (cell, seed) not in stored]
    for cell, seed in tqdm([each for each in todo if each[0][0] in rules]):
        stored[cell, seed] = scores = measure(cell, seed)
        with path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*cell, seed, *(f"{score:.4f}" for score in scores)])
    cells: dict[Cell, list[tuple[float, float]]] = {}
    for (cell, _), scores in sorted(stored.items(), key=lambda each: each[0][1]):
        cells.setdefault(cell, []).append(scores)
    return cells


def tables(cells: dict[Cell, list[tuple[float, float]]]) -> list[str]:
    """Return a table of accuracies and NLLs for each rule, and one of the cost without attackers."""
    text, columns = [], list(itertools.product(SPLITS, ROUNDS))
    for rule in [rule for rule in RULES if any(cell[0] == rule for cell in cells)]:
        rows = []
        for suffix in ("", ", by three"):
            for title in (NEVER, NONE, *attacks_of([0])) if not suffix else attacks_of([0]):
                found = [cells.get((rule, split, rounds, title + suffix), []) for split, rounds in columns]
                if any(found):
                    rows.append([title + suffix, *map(shown, found)])
        heads = [f"{split}, {rounds} rounds" for split, rounds in columns]
        counts = {len(found) for cell, found in cells.items() if cell[0] == rule}
        seeds = "seed 0" if counts == {1} else f"means over {' or '.join(map(str, sorted(counts)))} seeds"
        text.append(
            f"`{rule}`, one of ten clients attacks, or three; accuracy / NLL; {seeds}:\n\n"
            + markdown_table(["attack", *heads], rows)
        )
        rows = [
            [title, *(shown(cells.get((rule, split, ROUNDS[0] + AFTER, title), [])) for split in SPLITS)]
            for title in (LATER, STOPS, REMOVED)
        ]
        text.append(f"`{rule}` after the attack, {AFTER} rounds later:\n\n" + markdown_table(["", *SPLITS], rows))
    rows = []
    for rule, split, rounds in itertools.product(RULES, SPLITS, ROUNDS):
        on, off = (cells.get((rule, split, rounds, title), []) for title in (NONE, UNGUARDED))
        if len(on) > 1:
            changes = [[a[i] - b[i] for a, b in zip(on, off, strict=True)] for i in (0, 1)]
            errors = [statistics.stdev(each) / math.sqrt(len(each)) for each in changes]
            rows.append(
                [
                    rule,
                    split,
                    str(rounds),
                    *(
                        f"{statistics.fmean(change):+.4f} ± {error:.4f}"
                        for change, error in zip(changes, errors, strict=True)
                    ),
                ]
            )
    cost = markdown_table(["rule", "split", "rounds", "accuracy", "NLL"], rows)
    return [*text, f"Without attackers: figures with the bound less those without it:\n\n{cost}"]


def shown(scores: list[tuple[float, float]]) -> str:
    """Return means over the seeds."""
    return " / ".join(f"{statistics.fmean(each):.3f}" for each in zip(*scores, strict=True)) if scores else ""


def main() -> None:
    parser = options(__doc__, data=False, seeds=3)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="those to run now")
    arguments: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)  # the fastest for networks this small
    cells = fill(arguments.seeds, arguments.out / "sites.csv", arguments.rules)
    settings = (
        f"Handwritten digits of scikit-learn, {CLIENTS} clients, of whom the first attacks, or three; network "
        f"64-50-10 with two Bayesian layers (flipout, Adam, rate {RATE}, KL weight {KL_WEIGHT}), or fb.IVON with its "
        f"defaults, of all weights, or of a head and an adapter of rank {RANK} of a frozen layer that has learnt "
        f"the images turned by a right angle; {LOCAL_EPOCHS} local epochs. Rules and the guard (`max_influence`) have "
        "their defaults."
    )
    write(arguments.out, "sites", settings, tables(cells), None, over_seeds=False)


if __name__ == "__main__":
    with quietly():
        main()
