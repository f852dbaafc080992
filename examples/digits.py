"""Ten clients learn handwritten digits: FedAvg, two other fusions and sites, beside training on the pooled data.

Run it with ``make demo``, or ``python examples/digits.py --help``. The data are the 1,797 digits that ship with
scikit-learn. Writes a table, pictures and one offline W&B run per fusion rule to ``--output``.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import WandbLogger

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

RULES = ("weighted_average", "reverse_kl_barycenter", "conflation", "sites")
POOLED = "pooled data"
COLUMNS = ("fusion", "accuracy", "ECE", "NLL", "worst client", "mutual information", "median σ", "seconds")


class Curves(L.Callback):
    """Keeps a metric of every round."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics[self.metric]))


def federate(fusion: str, arguments: argparse.Namespace) -> tuple[list[float], list[float], fb.FederatedBayes]:
    """Train a federation with one rule. Returns its table row, its NLL by round and its callback."""
    L.seed_everything(arguments.seed, verbose=False)
    model = fb.HybridBayesianClassifier(
        mlp(64, 10), bayesian_last=2, estimator="flipout", learning_rate=0.01, kl_weight=0.05
    )
    pooled = fusion == POOLED  # one client that has all data
    federation = fb.FederatedBayes(
        fb.IIDPartition(clients=1) if pooled else fb.DirichletPartition(clients=arguments.clients, alpha=0.5),
        local_epochs=2,
        fusion="weighted_average" if pooled else fusion,
        seed=arguments.seed,
    )
    curve = Curves("val/nll")
    logger = WandbLogger(
        project="fedbayes",
        group="digits",
        job_type="fit",
        name=fusion,
        save_dir=arguments.output,
        offline=True,
        version=f"{arguments.started}-{fusion.replace(' ', '-')}",
    )
    trainer = L.Trainer(
        max_epochs=arguments.rounds,
        accelerator="cpu",
        logger=logger,
        callbacks=[federation, curve, TQDMProgressBar(refresh_rate=20)],
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    start = time.perf_counter()
    trainer.fit(model, datamodule=fb.DigitsDataModule())
    seconds = time.perf_counter() - start
    logger.experiment.finish()
    score = {name.removeprefix("val/"): float(value) for name, value in trainer.callback_metrics.items()}
    names = ("accuracy", "ece", "nll", "worst_client_accuracy", "epistemic")
    widths = torch.cat([variance.sqrt().flatten() for variance in federation.posterior.variance.values()])
    return [*(score[name] for name in names), float(widths.median()), seconds], curve.values, federation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/digits"))
    arguments = parser.parse_args()
    arguments.started = time.strftime("digits-%Y%m%d-%H%M%S")  # in the names of the runs
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # threads cost a network this small more than they gain

    rows, curves, counts = [], {}, None
    names = (POOLED, *RULES)
    for number, fusion in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {fusion}", flush=True)
        row, curves[fusion], federation = federate(fusion, arguments)
        rows.append([fusion, *row])
        assert federation.clients is not None
        counts = federation.clients

    assert counts is not None
    assert counts.counts is not None
    plots.rounds(curves, "validation NLL (nats)").savefig(arguments.output / "nll_by_round.png")
    plots.client_heatmap(counts.counts, counts.classes).savefig(arguments.output / "clients.png")
    setting = (
        f"Handwritten digits of scikit-learn, {arguments.clients} clients, Dirichlet(0.5), network 64-50-10 fully "
        f"Bayesian (Flipout, KL weight 0.05), Adam 0.01, {arguments.rounds} rounds of 2 local epochs, seed "
        f"{arguments.seed}. Pooled training has as many epochs, and has not converged: after 10,000 steps its NLL is "
        f"0.07, its mutual information 0.036 nats (benchmarks/posterior/ROUNDS.md). torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}."
    )
    table = markdown_table(COLUMNS, rows)
    (arguments.output / "table.md").write_text(f"{setting}\n\n{table}\n")
    print(f"\n{setting}\n\n{table}\n\nPictures, table and W&B runs: {arguments.output}")
    runs = f"{arguments.output}/wandb/offline-run-*-{arguments.started}"
    print(f"View the runs with an account: wandb sync {runs}-*\nor without: fedbayes report {runs}-sites")


if __name__ == "__main__":
    with quietly():
        main()
