"""Attacks on means and variances against every kind of rule: handwritten digits, ten clients, two Bayesian layers.

    python -m benchmarks.untrusted.attacks [--seeds 3] [--out FOLDER]

The data ship with scikit-learn. Every cell (rule, attack, number of adversaries, seed) is in results/attacks.csv.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import (
    ALittleIsEnough,
    Attacks,
    FalseVariance,
    InnerProductManipulation,
    ScaledUpdate,
    SignFlip,
    UpdateAttack,
)
from benchmarks.untrusted.report import options, write
from lightning_fedbayes.core.plots import DPI
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.fusion import FusionRule, TrimmedMean
from lightning_fedbayes.modules import mlp

CLIENTS, ROUNDS, LOCAL_EPOCHS, BATCH, RATE, SAMPLES = 10, 8, 2, 32, 0.02, 5
COUNTS = (1, 3)
RULES: dict[str, str | FusionRule] = {
    "reverse-KL barycenter": "reverse_kl_barycenter",
    "weighted average": "weighted_average",
    "geometric median": "geometric_median",
    "coordinate median": "coordinate_median",
    "trimmed mean, 0.3": TrimmedMean(trim=0.3),
    "multi-Krum": "multi_krum",
    "nearest-neighbour mixing": "nearest_neighbour_mixing",
    "IVAR-VB": "ivar_vb",
    "IVAR-VB, then reverse-KL": fb.fusion.Reliability("ivar_vb", then="reverse_kl_barycenter"),
}


def attacks_of(clients: list[int]) -> dict[str, list[UpdateAttack]]:
    """Return the attacks of the table by ``clients``, title → what each of them applies one after the other."""
    flip = SignFlip(clients)
    return {
        "sign flipped × 10": [SignFlip(clients, scale=10.0)],
        "update × 1e6": [ScaledUpdate(clients, factor=1e6)],
        "a little is enough, z = 1.5": [ALittleIsEnough(clients, z=1.5)],
        "inner product, ε = 0.1": [InnerProductManipulation(clients)],
        "honest, σ² × 1e10": [FalseVariance(clients, factor=1e10)],
        "flipped, σ² = 0": [flip, FalseVariance(clients)],
        "flipped, σ² × 1e-10": [flip, FalseVariance(clients, factor=1e-10)],
        "flipped, σ² × 0.5": [flip, FalseVariance(clients, factor=0.5)],
        "flipped × 10, σ² × 1e-10": [SignFlip(clients, scale=10.0), FalseVariance(clients, factor=1e-10)],
    }


class Digits(fb.HybridBayesianClassifier):
    """A classifier that scores accuracy and NLL of the mean prediction after the last round only."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Draw networks and score their mean prediction."""
        if self.trainer.current_epoch < ROUNDS - 1:
            return {}
        inputs, targets = batch
        probs = torch.stack([self.network(inputs).softmax(-1) for _ in range(SAMPLES)]).mean(0)
        self.log("accuracy", (probs.argmax(-1) == targets).float().mean(), batch_size=len(inputs))
        self.log("nll", cross_entropy(probs.clamp_min(1e-12).log(), targets), batch_size=len(inputs))
        return {}


def run(
    rule: str | FusionRule, attacks: list[UpdateAttack], seed: int, **options: fb.Safeguards
) -> tuple[float, float]:
    """Return accuracy and NLL of the global model after the last round."""
    L.seed_everything(seed, verbose=False)
    module = Digits(mlp(64, 10), bayesian_last=2, learning_rate=RATE)
    federation = fb.FederatedBayes(
        fb.IIDPartition(CLIENTS),
        fusion=rule,
        weighting="equal",
        adversaries=Attacks(attacks),
        local_epochs=LOCAL_EPOCHS,
        engine="vectorized",
        seed=seed,
        **options,  # type: ignore[arg-type]
    )
    trainer = L.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=ROUNDS,
    )
    trainer.fit(module, datamodule=fb.DigitsDataModule(BATCH))
    figures = trainer.callback_metrics
    return float(figures["accuracy"]), float(figures["nll"])


Cells = dict[tuple[str, str, int], list[tuple[float, float]]]
"""(rule, attack, number of adversaries) → accuracy and NLL of every seed."""


def fill(seeds: int, path: Path) -> Cells:
    """Run every cell of the table; after every seed the cells so far are stored at ``path``."""
    cells: Cells = {}
    with tqdm(total=seeds * len(RULES) * (2 + len(COUNTS) * len(attacks_of([0])))) as bar:
        for seed in range(seeds):
            for title, rule in RULES.items():
                unbounded = {"safeguards": fb.Safeguards(max_influence=None)}
                runs: list[tuple[str, int, list[UpdateAttack], dict[str, fb.Safeguards]]] = [
                    ("none", 0, [], {}),
                    ("none, without guard", 0, [], unbounded),
                ]
                runs += [(name, m, attack, {}) for m in COUNTS for name, attack in attacks_of(list(range(m))).items()]
                for name, count, attack, options in runs:
                    cells.setdefault((title, name, count), []).append(run(rule, attack, seed, **options))
                    bar.update()
            store(cells, path)
    return cells


def store(cells: Cells, path: Path) -> None:
    """Write one line per cell and seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["rule", "attack", "adversaries", "seed", "accuracy", "nll"])
        for (rule, title, count), scores in cells.items():
            rows.writerows([rule, title, count, k, f"{a:.4f}", f"{n:.4f}"] for k, (a, n) in enumerate(scores))


def accuracies(cells: Cells) -> dict[tuple[str, str, int], float]:
    """Return the mean accuracy over seeds of every cell."""
    return {key: statistics.fmean(accuracy for accuracy, _ in scores) for key, scores in cells.items()}


def losses(means: Mapping[tuple[str, str, int], float], rule: str, count: int) -> dict[str, float]:
    """Return attack → accuracy that ``count`` adversaries cost the rule."""
    honest = means[rule, "none", 0]
    return {title: honest - value for (name, title, m), value in means.items() if name == rule and m == count > 0}


def tables(cells: Cells) -> list[str]:
    """Return a table of accuracies per number of adversaries, the worst losses, and the cost of the guard."""
    means, text = accuracies(cells), []
    for count in COUNTS:
        titles = ["none", *attacks_of([0])]
        rows = [
            [title, *(f"{means[rule, title, count if title != 'none' else 0]:.3f}" for rule in RULES)]
            for title in titles
        ]
        rows.append(["largest loss", *(f"{max(losses(means, rule, count).values()):.3f}" for rule in RULES)])
        head = f"{count} of {CLIENTS} clients attack" if count > 1 else f"One of {CLIENTS} clients attacks"
        text.append(f"{head}; accuracy:\n\n" + markdown_table(["attack", *RULES], rows))
    rows = []
    for rule in RULES:
        pairs = list(zip(cells[rule, "none", 0], cells[rule, "none, without guard", 0], strict=True))
        change = [on[1] - off[1] for on, off in pairs]
        error = statistics.stdev(change) / math.sqrt(len(change)) if len(change) > 1 else math.nan
        accuracy = statistics.fmean(on[0] - off[0] for on, off in pairs)
        rows.append([rule, f"{accuracy:+.4f}", f"{statistics.fmean(change):+.4f} ± {error:.4f}"])
    cost = markdown_table(["rule", "accuracy", "NLL"], rows)
    return [*text, f"Without adversaries: figures with the guard less those without it:\n\n{cost}"]


def picture(cells: Cells) -> Figure:
    """Draw the accuracies as a heat map per number of adversaries."""
    means, titles = accuracies(cells), list(attacks_of([0]))
    figure = Figure(figsize=(11.5, 5.2), dpi=DPI, layout="constrained")
    grid = figure.subplots(1, len(COUNTS), sharey=True)
    image = None
    for axes, count in zip(grid, COUNTS, strict=True):
        values = [[means[rule, title, count] for rule in RULES] for title in titles]
        image = axes.imshow(values, vmin=0.1, vmax=0.95, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(RULES)), list(RULES), rotation=60, ha="right", fontsize=7)
        axes.set_yticks(range(len(titles)), titles, fontsize=7)
        axes.set_title(f"{count} of {CLIENTS} clients", fontsize=9)
    assert image is not None
    figure.colorbar(image, ax=grid, label="accuracy")
    return figure


def main() -> None:
    arguments = options(__doc__, data=False, seeds=3).parse_args()
    torch.set_num_threads(1)  # the fastest for networks this small
    cells = fill(arguments.seeds, arguments.out / "attacks.csv")
    settings = (
        f"Handwritten digits of scikit-learn, {CLIENTS} clients IID, equal weights, network 64-50-10 with two Bayesian "
        f"layers, {ROUNDS} rounds of {LOCAL_EPOCHS} local epochs in batches of {BATCH}, Adam, rate {RATE}, {SAMPLES} "
        f"samples of the prediction; seeds 0 to {arguments.seeds - 1}. Means over the seeds. Rules and the guard "
        "(`max_influence`) have their defaults."
    )
    write(arguments.out, "attacks", settings, tables(cells), picture(cells), over_seeds=False)


if __name__ == "__main__":
    with quietly():
        main()
