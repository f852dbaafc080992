"""Draw fusion.png, epoch.png, privacy.png and round.svg: ``python docs/images/draw.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning as L
import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.plots import DPI, INK, PALETTE

FOLDER = Path(__file__).parent
CLIENTS = {"client 1": (-1.0, 0.5), "client 2": (2.0, 1.0)}
"""Name → mean and standard deviation of one parameter."""
RULES = ("weighted_average", "weighted_sum", "linear_pool", "reverse_kl_barycenter", "conflation")
SIZES = (5, 3, 4)
"""Steps of three clients in a round."""
HOOKS = ("on_train_epoch_start", "_begin_batch", "train_batch", "_end_batch", "on_train_epoch_end")
"""Functions of the callback and of its engine in which a round happens."""
DEPTH = 2
"""Calls below a hook that the picture of a round shows."""


def fusion() -> Figure:
    """One parameter of two clients of equal weight, and what five rules make of it."""
    posteriors = [
        fb.GaussianPosterior({"w": torch.tensor([mean])}, {"w": torch.tensor([std**2])})
        for mean, std in CLIENTS.values()
    ]
    x = torch.linspace(-4, 6, 500)
    figure = Figure(figsize=(6.0, 4.6), dpi=1.5 * DPI, layout="constrained")
    places = figure.subplots(len(RULES), 1, sharex=True)
    for axes, rule in zip(places, RULES):
        for mean, std in CLIENTS.values():
            axes.fill_between(x, Normal(mean, std).log_prob(x).exp(), color=INK, alpha=0.13, linewidth=0)
        fused = fb.fuse(rule, posteriors)
        mean, std = fused.mean["w"].item(), fused.variance["w"].sqrt().item()
        axes.plot(x, Normal(mean, std).log_prob(x).exp(), color=PALETTE[0], linewidth=2)
        result = f"{rule}: {mean:.2f} ± {std:.2f}"
        axes.text(0.99, 0.84, result, transform=axes.transAxes, ha="right", va="top", color=INK)
        _bare(axes)
    places[-1].set_xlabel(
        "value of one parameter; grey: the two clients, "
        + ", ".join(f"{mean:g} ± {std:g}" for mean, std in CLIENTS.values())
    )
    return figure


def epoch() -> Figure:
    """The steps of three clients in one epoch under each engine and in two processes."""
    figure = Figure(figsize=(6.0, 4.1), dpi=1.5 * DPI, layout="constrained")
    one, stack, two = figure.subplots(3, 1, sharex=True, height_ratios=(1, 3, 2))
    start = 0
    for client, steps in enumerate(SIZES):
        _steps(one, 0, start, steps, client)
        _steps(stack, client, 0, steps, client)
        start += steps
    _steps(two, 0, 0, SIZES[0], 0)
    _steps(two, 1, 0, SIZES[1], 1)
    _steps(two, 1, SIZES[1], SIZES[2], 2)
    for axes, title, rows, end in (
        (one, '"sequential"', 1, sum(SIZES)),
        (stack, '"vectorized"', len(SIZES), max(SIZES)),
        (two, '"sequential",\n2 processes', 2, SIZES[1] + SIZES[2]),
    ):
        for offset, label, colour in ((0.1, "fuse", PALETTE[4]), (1.15, "validate", "#BBBBBB")):
            axes.barh((rows - 1) / 2, 0.95, left=end + offset, height=rows - 0.2, color=colour)
            axes.text(end + offset + 0.475, (rows - 1) / 2, label, ha="center", va="center", rotation=90, fontsize=8)
        axes.set(ylim=(rows - 0.5, -0.5), xlim=(0, sum(SIZES) + 2.5))
        axes.set_ylabel(title, rotation=0, ha="right", va="center")
        _bare(axes)
    two.set_xlabel("time within one epoch: every box is an optimizer step of one client")
    return figure


def privacy() -> Figure:
    """Accuracy by ε, of the tables in benchmarks/privacy/README.md; dotted: without privacy."""
    lines = (FOLDER.parents[1] / "benchmarks" / "privacy" / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    figure = Figure(figsize=(9.0, 3.4), dpi=DPI, layout="constrained")
    clients, examples = figure.subplots(1, 2, sharey=True)
    for axes, title, curves in (
        (clients, "UpdatePrivacy, 300 clients", (("log_variance_average", "no"), ("conflation", "yes"))),
        (examples, "ExamplePrivacy, five clients", (("Bayesian",), ("deterministic",))),
    ):
        for colour, (name, *widened) in zip(PALETTE, curves):
            found = [row for row in rows if row[0] == name and row[2] in (widened or row[2])]
            points = {row[-4]: float(row[-3].split()[0]) for row in found if row[-4] != "∞"}
            x = [float(epsilon) for epsilon in points]
            label = f"{name}, widened" if widened == ["yes"] else name
            axes.semilogx(x, [*points.values()], "o-", color=colour, label=label)
            axes.set_xticks(x, [*points])
            axes.set_xticks([], minor=True)
            (free,) = (row for row in rows if row[0] == name and row[1] == "no privacy")
            axes.axhline(float(free[-3].split()[0]), color=colour, linestyle=":")
        axes.set(title=title, xlabel="ε of the whole run", ylim=(0, 1))
        axes.legend(frameon=False, loc="lower right")
    clients.set_ylabel("accuracy, digits")
    return figure


def way() -> Figure:
    """Functions that a round of federated averaging calls below the hooks, each where it is first met."""
    found = _calls_of_a_round()
    figure = Figure(figsize=(9.0, 0.19 * len(found) + 0.3), dpi=DPI)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    rooms = list(dict.fromkeys(path.split("/")[0] for _, path in found.values()))
    for row, (code, (depth, path)) in enumerate(found.items()):
        colour = PALETTE[rooms.index(path.split("/")[0]) % len(PALETTE)]
        weight = "bold" if depth == 0 else "normal"
        axes.text(0.02 + 0.04 * depth, row, code.co_qualname, color=INK, fontsize=9, va="center", fontweight=weight)
        axes.text(0.72, row, path, color=colour, fontsize=9, va="center")
    axes.set(xlim=(0, 1), ylim=(len(found) - 0.3, -0.9))
    axes.set_axis_off()
    return figure


def _calls_of_a_round() -> dict[CodeType, tuple[int, str]]:
    """Return every function in the order of its first call → how far it is below a hook, and its file."""
    package = Path(fb.__file__).parent
    found: dict[CodeType, tuple[int, str]] = {}
    stack: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(package)) or "<" in code.co_name:
            return
        if event == "return" and stack:
            stack.pop()
        elif event == "call" and (stack or code.co_name in HOOKS):
            if len(stack) <= DEPTH and code not in found:
                found[code] = len(stack), Path(code.co_filename).relative_to(package).as_posix()
            stack.append(code)

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            sys.setprofile(note if trainer.current_epoch == 1 else None)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    federation = fb.FederatedBayes(fb.IIDPartition(3), fusion="fedavg", engine="sequential")
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", callbacks=[Watch(), federation], **options)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(30, 2)), batch_size=10))
    return found


def _steps(axes: Axes, row: int, start: int, steps: int, client: int) -> None:
    for step in range(steps):
        axes.barh(row, 0.92, left=start + step + 0.04, height=0.8, color=PALETTE[client])
    axes.text(
        start + steps / 2,
        row,
        f"client {client + 1}",
        ha="center",
        va="center",
        color="white",
        fontsize=9,
        bbox={"facecolor": PALETTE[client], "edgecolor": "none", "pad": 1.5},
    )


def _bare(axes: Axes) -> None:
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    fusion().savefig(FOLDER / "fusion.png")
    figure = epoch()
    for axes in figure.axes:
        axes.set_xticks([])
    figure.savefig(FOLDER / "epoch.png")
    privacy().savefig(FOLDER / "privacy.png")
    with mpl.rc_context({"svg.hashsalt": "round", "svg.fonttype": "none"}):
        way().savefig(FOLDER / "round.svg", metadata={"Date": None})
