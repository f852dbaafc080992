"""Wrong labels: sites with the robust loss of FedGVI, handwritten digits, ten IID clients.

    python -m benchmarks.posterior.label_noise [--seeds 3] [--out FILE]

A share of all training labels is mirrored, y → 9 − y, as Mildner et al. 2025 map each class to one other; held out are
right ones. The exponent 0.8 is theirs. The table is also in FILE.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.utils.data import TensorDataset
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks.posterior.images import scores
from benchmarks.untrusted.adversaries import flip_labels
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

HERE = Path(__file__).parent
CLIENTS, ROUNDS, LOCAL_EPOCHS, BATCH, RATE, SAMPLES, SHARES = 10, 10, 20, 32, 0.01, 100, (0.0, 0.2, 0.4)
GCE = 0.8
SCORES = ("accuracy", "nll", "ece")


class Method(NamedTuple):
    """A fusion rule with its layers and loss."""

    fusion: Any
    bayesian_last: int
    robustness: float


METHODS = {
    "FedAvg": Method("weighted_average", 0, 0.0),
    "FedAvg, GCE": Method("weighted_average", 0, GCE),
    "sites": Method("sites", 2, 0.0),
    "sites, GCE": Method("sites", 2, GCE),
}


class NoisyDigits(fb.DigitsDataModule):
    """Digits of which a share of the training labels is mirrored; those held out are right.

    Args:
        share: of the labels.
        seed: of the split and of the choice.
    """

    def __init__(self, share: float, seed: int) -> None:
        super().__init__(BATCH, seed=seed)
        self.share = share

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data, and mirror the labels."""
        super().setup(stage)
        inputs, labels = self.train.tensors
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        wrong = order[: round(self.share * len(labels))]
        labels = labels.clone()
        labels[wrong] = flip_labels(labels[wrong], range(10))
        self.train = TensorDataset(inputs, labels)


def run(method: Method, share: float, seed: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Train a federation with wrong labels and score its global posterior.

    Args:
        method: a value of METHODS.
        share: of the labels that are mirrored.
        seed: of the data, the network and its training.
        rounds: number of rounds.
    """
    L.seed_everything(seed, verbose=False)
    data = NoisyDigits(share, seed)
    module = fb.HybridBayesianClassifier(
        mlp(64, 10, [50]),
        bayesian_last=method.bayesian_last,
        posterior_std=0.05 if method.bayesian_last else None,
        learning_rate=RATE,
        samples=SAMPLES,
        robustness=method.robustness,
    )
    federation = fb.FederatedBayes(fb.IIDPartition(CLIENTS), fusion=method.fusion, local_epochs=LOCAL_EPOCHS, seed=seed)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data)
    return scores(module.eval(), data.validation)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "label_noise.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the fastest for models this small
    lines = []
    with tqdm(total=len(METHODS) * len(SHARES) * options.seeds) as bar:
        for name, method in METHODS.items():
            line = [name]
            for share in SHARES:
                cells = []
                for seed in range(options.seeds):
                    cells.append(run(method, share, seed))
                    bar.update()
                line.append(" / ".join(f"{statistics.fmean(cell[key] for cell in cells):.3f}" for key in SCORES))
            lines.append(line)
            bar.write(str(line))  # a run that is killed has told something
    text = markdown_table(["", *(f"{share:.0%} wrong: {', '.join(SCORES)}" for share in SHARES)], lines)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(f"{text}\n")
    print(f"\n{text}\n\nMeans of {options.seeds} seeds; written to {options.out}")


if __name__ == "__main__":
    with quietly():
        main()
