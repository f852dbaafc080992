"""Cost of differential privacy on digits, with and without the variance of the noise in the posterior.

    python -m benchmarks.privacy.run --seeds 5

prints two Markdown tables: clients as a whole (UpdatePrivacy), and single examples (ExamplePrivacy).
"""

from __future__ import annotations

import argparse
import logging
import platform
import warnings
from collections.abc import Callable, Iterator
from statistics import mean, stdev
from typing import NamedTuple

import lightning as L
import torch
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes import ExamplePrivacy, UpdatePrivacy
from lightning_fedbayes.modules import mlp

SCORES = ("accuracy", "nll", "ece")
RULES = ("log_variance_average", "conflation", "reverse_kl_barycenter")
UPDATE_NOISES = (0.1, 0.3, 1.0)
EXAMPLE_NOISES = (0.5, 1.0, 2.0)


class Score(NamedTuple):
    """Result of a run: accuracy, NLL and ECE of the global posterior on the validation digits, and the ε of the run."""

    scores: tuple[float, ...]
    epsilon: float


def fit(model: L.LightningModule, callbacks: list[L.Callback], rounds: int, batch_size: int, figure: str) -> Score:
    """Train a federation and score its global posterior."""
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=fb.DigitsDataModule(batch_size=batch_size))
    found = trainer.callback_metrics
    epsilon = float(found[figure]) if figure in found else float("inf")
    return Score(tuple(float(found[f"val/{name}"]) for name in SCORES), epsilon)


def whole_clients(rule: str, privacy: UpdatePrivacy | None, seed: int) -> Score:
    """Train 300 clients of four or five digits each; a Bayesian softmax regression, 650 means and 650 variances."""
    torch.manual_seed(seed)
    model = fb.HybridBayesianClassifier(
        nn.Linear(64, 10), bayesian_last=1, learning_rate=0.03, kl_weight=0.05, posterior_std=0.1, samples=20
    )
    federation = fb.FederatedBayes(
        fb.IIDPartition(clients=300), local_epochs=5, fusion=rule, weighting="equal", privacy=privacy, seed=seed
    )
    return fit(model, [federation], rounds=10, batch_size=16, figure="privacy/epsilon")


def single_examples(bayesian: bool, privacy: ExamplePrivacy | None, seed: int) -> Score:
    """Train five clients of 287 or 288 digits each; a network 64-32-10 with two Bayesian layers, or none."""
    torch.manual_seed(seed)
    model = fb.HybridBayesianClassifier(
        mlp(64, 10, hidden=[32]),
        bayesian_last=2 if bayesian else 0,
        estimator="flipout",
        learning_rate=0.01,
        kl_weight=0.05,
    )
    federation = fb.FederatedBayes(
        fb.IIDPartition(clients=5),
        fusion="reverse_kl_barycenter",
        local_epochs=2,
        engine="sequential",
        weighting="equal",
        seed=seed,
    )
    callbacks: list[L.Callback] = [federation, *([privacy] if privacy else [])]
    return fit(model, callbacks, rounds=10, batch_size=32, figure="privacy/simulated_example_epsilon")


def row(name: list[str], score: Callable[[int], Score], seeds: int) -> str:
    """Return a line of a table: mean ± standard error over seeds of each score."""
    runs = [score(seed) for seed in range(seeds)]
    cells = [f"{runs[0].epsilon:.3g}" if runs[0].epsilon < float("inf") else "∞"]
    for values in zip(*(each.scores for each in runs)):
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        cells.append(f"{mean(values):.3f} ± {error:.3f}")
    return "| " + " | ".join([*name, *cells]) + " |"


def client_rows(clip: float, seeds: int) -> Iterator[str]:
    """The table of UpdatePrivacy."""
    yield "| rule | z | widened | ε | accuracy | NLL | ECE |"
    yield "|---|---|---|---|---|---|---|"
    for rule in RULES:
        yield row([rule, "no privacy", ""], lambda seed, rule=rule: whole_clients(rule, None, seed), seeds)
        for noise, widen in [(0.0, False), *((z, w) for z in UPDATE_NOISES for w in (False, True))]:
            privacy = UpdatePrivacy(clip, noise, widen_posterior=widen)
            name = [rule, f"{noise:g}", "yes" if widen else "no"]
            yield row(name, lambda seed, rule=rule, privacy=privacy: whole_clients(rule, privacy, seed), seeds)


def example_rows(clip: float, seeds: int) -> Iterator[str]:
    """The table of ExamplePrivacy."""
    yield "| layers | z | ε | accuracy | NLL | ECE |"
    yield "|---|---|---|---|---|---|"
    for bayesian, name in ((True, "Bayesian"), (False, "deterministic")):
        yield row([name, "no privacy"], lambda seed, b=bayesian: single_examples(b, None, seed), seeds)
        for noise in (0.0, *EXAMPLE_NOISES):
            yield row(
                [name, f"{noise:g}"],
                lambda seed, b=bayesian, z=noise: single_examples(b, ExamplePrivacy(clip, z, seed=seed), seed),
                seeds,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--client-clip", type=float, default=2.0)
    parser.add_argument("--example-clip", type=float, default=1.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"{platform.machine()}, torch {torch.__version__}, {arguments.seeds} seeds (mean ± standard error), δ = 1e-5")
    print(f"\nClients as a whole, C = {arguments.client_clip:g}\n")
    for line in client_rows(arguments.client_clip, arguments.seeds):
        print(line, flush=True)
    print(f"\nSingle examples, C = {arguments.example_clip:g}\n")
    for line in example_rows(arguments.example_clip, arguments.seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
