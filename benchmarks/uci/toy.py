"""Figure 2 of [FedAG]: y = x³ + N(0, 3²), ten workers of 16 points on [−4, 4], predictions on [−6, 6].

python -m benchmarks.uci.toy [--learning-rate 0.03] [--predictive bootstrap] [--local-epochs 40] [--seed 0]
                                 [--out FOLDER]
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.plots import DPI, GRID, INK, PALETTE
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.modules import mlp

WORKERS, POINTS, NOISE, HIDDEN = 10, 16, 3.0, 100
SHOWN = (1, 3, 5)
"""Rounds in the figure."""


def cubes(seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all workers, shape (160, 1) each."""
    source = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(WORKERS * POINTS, 1, generator=source) - 4
    return x, x**3 + NOISE * torch.randn(x.shape, generator=source)


class Snapshots(L.Callback):
    """Predictive mean and standard deviation on ``grid`` after some rounds."""

    def __init__(self, grid: Tensor) -> None:
        self.grid = grid
        self.of_round: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch + 1 in SHOWN:
            prediction = pl_module.predict_step(self.grid)
            self.of_round[trainer.current_epoch + 1] = prediction.mean[:, 0], prediction.variance[:, 0].sqrt()


def picture(x: Tensor, y: Tensor, grid: Tensor, snapshots: dict[int, tuple[Tensor, Tensor]]) -> Figure:
    """Draw a panel per round: truth, data, mean and ± three standard deviations, in original units."""
    figure = Figure(figsize=(10, 3.4), dpi=DPI, layout="constrained")
    row = figure.subplots(1, len(snapshots), sharey=True)
    for axes, (number, (mean, std)) in zip(row, snapshots.items()):
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = ((mean + sign * 3 * std).tolist() for sign in (-1, 1))
        axes.fill_between(grid.tolist(), low, high, color="#BBBBBB", linewidth=0, label="± 3 standard deviations")
        axes.plot(grid, grid**3, color=PALETTE[0], label="truth")
        axes.plot(grid, mean, color=INK, label="mean")
        axes.plot(x, y, ".", color=PALETTE[1], markersize=4, label="data")
        axes.set(title=f"round {number}", xlabel="x", ylim=(-220, 220))
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure


def figures(grid: Tensor, snapshots: dict[int, tuple[Tensor, Tensor]]) -> str:
    """Describe each round: RMSE of the mean, mean standard deviation and coverage, inside and outside of the data."""
    lines = []
    for number, (mean, std) in snapshots.items():
        parts = []
        for name, where in (("|x| ≤ 4", grid.abs() <= 4), ("4 < |x| ≤ 6", grid.abs() > 4)):
            error = (mean - grid**3)[where]
            covered = (error.abs() <= 3 * std[where]).float().mean()
            parts.append(
                f"{name}: RMSE {error.square().mean().sqrt():.1f}, mean standard deviation "
                f"{std[where].mean():.1f}, truth within ± 3: {covered:.0%}"
            )
        lines.append(f"Round {number}. " + "; ".join(parts) + ".")
    return "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning-rate", type=float, default=0.03, help="of SGD")
    parser.add_argument("--predictive", choices=("bootstrap", "omc"), default="bootstrap")
    parser.add_argument("--local-epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    x, y = cubes(arguments.seed)
    grid = torch.linspace(-6, 6, 241)
    snapshots = Snapshots((grid.unsqueeze(1) - x.mean()) / x.std())
    module = fb.HybridBayesianRegressor(
        mlp(1, 1, (HIDDEN,)),
        noise="none",
        predictive=arguments.predictive,
        scaler=False,
        optimizer=functools.partial(torch.optim.SGD, lr=arguments.learning_rate),
    )
    workers = zip(((x - x.mean()) / x.std()).split(POINTS), ((y - y.mean()) / y.std()).split(POINTS))
    data = fb.ClientDatasets({f"worker {k}": TensorDataset(*examples) for k, examples in enumerate(workers)})
    federation = fb.FederatedBayes(local_epochs=arguments.local_epochs, fusion="gaussian_fit", seed=arguments.seed)
    trainer = L.Trainer(
        max_epochs=max(SHOWN),
        accelerator="cpu",
        logger=False,
        callbacks=[federation, snapshots],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=1, shuffle=True))
    original = {
        number: (y.mean() + y.std() * mean, y.std() * std) for number, (mean, std) in snapshots.of_round.items()
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    picture(x, y, grid, original).savefig(arguments.out / "toy.png", dpi=70)
    given = (
        f"--learning-rate {arguments.learning_rate:g} --predictive {arguments.predictive} "
        f"--local-epochs {arguments.local_epochs} --seed {arguments.seed}"
    )
    text = f"`python -m benchmarks.uci.toy {given}`\n\n{figures(grid, original)}"
    (arguments.out / "toy.md").write_text(f"# Toy regression\n\n{text}\n")
    print(f"\n{text}\n\nWritten to {arguments.out}: toy.md, toy.png")


if __name__ == "__main__":
    with quietly():
        main()
