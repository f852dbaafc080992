"""Truth by NUTS: federated posteriors beside draws from the exact one, on logistic regressions and small networks.

    python -m benchmarks.posterior.nuts [--only METHOD ...] [--out FOLDER]

Two data sets ship with scikit-learn, two are made on the spot. Each finished cell is one line of FOLDER/nuts.jsonl, and
no cell is run twice: delete the lines of a method to measure it anew. Those of NUTS need numpyro, and all others are
measured against them, so that without them the whole file has to go. The tables are written into NUTS.md.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from PIL import Image
from sklearn.datasets import load_wine, make_moons
from torch import Tensor
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.page import include
from benchmarks.posterior import rounds, truth
from lightning_fedbayes.core.plots import DPI, GRID, PALETTE
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.metrics.functional import mutual_information, negative_log_likelihood
from lightning_fedbayes.modules import mlp

HERE = Path(__file__).parent
CLIENTS, SEEDS, DRAWS = 5, 3, 2000
ROUNDS, LOOKS = 200, (30, 50, 100, 200, 400)
"""The round that is scored, and those of sites on a logistic regression whose distance is measured, to the last one."""
POINTS = 40
"""Quantiles of NUTS's draws that stand for them in the coverage, each example by itself."""
INTERVAL = 0.9
NUTS, MEAN_FIELD, FULL = "NUTS", "mean field, pooled", "full covariance, pooled"
FEDERATED: dict[str, dict[str, Any]] = {
    "sites": {"fusion": "sites"},
    "IVON + sites": {"fusion": "sites"},
    "Laplace + sites": {"fusion": "sites", "posterior": fb.Laplace()},
    "one client": {"fusion": "reverse_kl_barycenter", "keep": ["optimizer"]},
    "reverse_kl_barycenter": {"fusion": "reverse_kl_barycenter"},
}
"""Options of the federation; everything else is its default."""
PLAIN = ("IVON + sites", "Laplace + sites")
"""Methods whose network has no Bayesian layers."""
HEADS: dict[str, Literal["laplace", "variational"]] = {
    "exact head, Laplace": "laplace",
    "exact head, variational": "variational",
}
"""Inference of :class:`~lightning_fedbayes.BayesianHead` for the logistic regressions, one client for each class."""
METHODS = (NUTS, MEAN_FIELD, FULL, *FEDERATED, *HEADS)
RHAT_BAR = 1.02
RATIOS = (0.25, 0.5, 1, 2, 4, 8, 16)
"""Marks on the axis of mutual informations."""


class Problem(NamedTuple):
    """A data set and the sizes of its network."""

    data: Callable[[], rounds.SplitDataModule]
    sizes: tuple[int, ...]

    @property
    def is_linear(self) -> bool:
        """True of a logistic regression."""
        return len(self.sizes) == 2


class Cell(NamedTuple):
    """One federation, one training on pooled data, or the draws of NUTS."""

    problem: str
    method: str
    seed: int


Results = Mapping[Cell, dict[str, Any]]


def correlated_items() -> rounds.Table:
    """Return 400 examples of 25 items that share three factors (correlations up to 0.96), and two classes."""
    draw = np.random.default_rng(0)
    factors, loadings = draw.normal(size=(400, 3)), draw.normal(size=(3, 25))
    items = factors @ loadings + 0.5 * draw.normal(size=(400, 25))
    logits = items @ draw.normal(size=25) / 5
    return rounds.Table(items, (draw.random(400) < 1 / (1 + np.exp(-logits))).astype(int), 0)


def wine() -> rounds.Table:
    """Return all 178 rows."""
    inputs, classes = load_wine(return_X_y=True, as_frame=False)
    return rounds.Table(np.asarray(inputs), np.asarray(classes), 0)


def two_moons() -> rounds.Table:
    """Return 500 points of the plane."""
    inputs, classes = make_moons(500, noise=0.3, random_state=0)
    return rounds.Table(np.asarray(inputs), np.asarray(classes), 0)


PROBLEMS = {
    "logistic regression, breast cancer": Problem(lambda: rounds.SOURCES["breast cancer"].data(None, 0), (30, 2)),
    "logistic regression, correlated items": Problem(correlated_items, (25, 2)),
    "network, wine": Problem(wine, (13, 14, 3)),
    "network, two moons": Problem(two_moons, (2, 16, 2)),
}


def cells() -> list[Cell]:
    """Return all cells: NUTS first, which the others are compared with."""
    return [
        Cell(problem, method, seed)
        for method in METHODS
        for problem in PROBLEMS
        for seed in range(1 if method in (NUTS, *HEADS) else SEEDS)
        if PROBLEMS[problem].is_linear or method not in HEADS
    ]


# -- posteriors --------------------------------------------------------------------------------------------------------


class Looks(L.Callback):
    """Keeps the posterior after some of the rounds, and the decrement that is logged."""

    def __init__(self, numbers: Iterable[int], federation: fb.FederatedBayes) -> None:
        self.numbers, self.federation = set(numbers), federation
        self.found: dict[int, tuple[fb.GaussianPosterior, float]] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the posterior of this round."""
        number = trainer.current_epoch + 1
        if number in self.numbers:
            decrement = self.federation.history[-1].get("sites/decrement", math.nan)
            self.found[number] = self.federation.posterior.clone(), decrement


def module_of(problem: Problem, method: str) -> fb.HybridBayesianClassifier:
    """Return the module of a method: Adam at the demo's 0.01, or IVON; everything else is its default."""
    options: dict[str, Any] = {"bayesian_last": 0 if method in PLAIN else len(problem.sizes) - 1, "learning_rate": 0.01}
    if method == "IVON + sites":
        options["optimizer"] = fb.IVON
    if method == MEAN_FIELD:
        options["posterior_std"] = 0.1
    return fb.HybridBayesianClassifier(mlp(problem.sizes[0], problem.sizes[-1], problem.sizes[1:-1]), **options)


def federate(module: L.LightningModule, data: L.LightningDataModule, cell: Cell, looks: Sequence[int]) -> Looks:
    """Train a federation until the last of ``looks``."""
    partition = fb.IIDPartition(1) if cell.method == "one client" else fb.DirichletPartition(CLIENTS, alpha=0.5)
    federation = fb.FederatedBayes(partition, local_epochs=2, seed=cell.seed, **FEDERATED[cell.method])
    found = Looks(looks, federation)
    trainer = L.Trainer(
        max_epochs=max(looks),
        accelerator="cpu",
        logger=False,
        callbacks=[federation, found],
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=data)
    return found


def run(cell: Cell, exact: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a cell is remembered by; every cell but that of NUTS needs what that one gave."""
    started = time.monotonic()
    L.seed_everything(cell.seed, verbose=False)
    problem = PROBLEMS[cell.problem]
    data = problem.data()
    data.setup("fit")
    inputs, targets = data.validation.tensors
    if cell.method == NUTS:
        found = described(truth.nuts(data.train, problem.sizes), data, problem.sizes)
        return {**found, "seconds": time.monotonic() - started}
    assert exact is not None, "NUTS comes first"
    more: dict[str, Any] = {}
    if cell.method == FULL:
        mean, root = truth.full_covariance(data.train, problem.sizes)
        more["bound"] = float(truth.bound(mean, root, data.train, problem.sizes, DRAWS))
        outputs = truth.outputs(mean + torch.randn(DRAWS, len(mean)) @ root.T, inputs, problem.sizes)
    elif cell.method in HEADS:
        x, y = data.train.tensors
        head = fb.BayesianHead(2, prior_std=1.0, inference=HEADS[cell.method])
        fit = head.fit_clients([(x[y == label], y[y == label]) for label in (0, 1)])
        more["exchanges"] = fit.exchanges
        outputs = fb.PosteriorPredictive(fit.linear(), fit.posterior, DRAWS).sample(inputs)
    else:
        module = module_of(problem, cell.method)
        if cell.method == MEAN_FIELD:
            rounds.train_pooled(module, data.train)
            posterior = fb.read_posterior(module)
            mean, variance = (each.float() for each in posterior.flatten())
            more["bound"] = float(truth.bound(mean, variance.sqrt().diag(), data.train, problem.sizes, DRAWS))
            if problem.is_linear:
                more["to_mean_field"] = distances(posterior, best(posterior, data.train))["to_mean_field"]
        else:
            measured = problem.is_linear and cell.method == "sites"
            looks = federate(module, data, cell, LOOKS if measured else (ROUNDS,)).found
            posterior = looks[ROUNDS][0]
            if measured:
                more["distances"] = trail(looks, best(posterior, data.train))
        outputs = fb.PosteriorPredictive(module, posterior, DRAWS).sample(inputs)
    return {**compared(outputs, targets, exact), **more, "seconds": time.monotonic() - started}


def best(like: fb.GaussianPosterior, data: TensorDataset) -> fb.GaussianPosterior:
    """Return the mean-field posterior of a logistic regression, with the names of ``like``."""
    return like.unflatten(*truth.mean_field(data))


def trail(
    looks: Mapping[int, tuple[fb.GaussianPosterior, float]], pooled: fb.GaussianPosterior
) -> dict[str, dict[str, float]]:
    """Return decrements and true distances by round; the last round is the end."""
    end = looks[max(looks)][0]
    return {
        str(number): {"decrement": decrement, **distances(posterior, pooled), "to_end": per_parameter(posterior, end)}
        for number, (posterior, decrement) in looks.items()
        if number < max(looks)
    }


def distances(posterior: fb.GaussianPosterior, pooled: fb.GaussianPosterior) -> dict[str, float]:
    """Return KL(posterior ‖ pooled) per parameter, and the median σ over the pooled one's."""
    widths = [each.flatten()[1].sqrt().median() for each in (posterior, pooled)]
    return {"to_mean_field": per_parameter(posterior, pooled), "width": float(widths[0] / widths[1])}


def per_parameter(posterior: fb.GaussianPosterior, other: fb.GaussianPosterior) -> float:
    """Return KL(posterior ‖ other) in nats per parameter."""
    return float(posterior.kl(other)) / posterior.num_parameters


# -- predictions -------------------------------------------------------------------------------------------------------


def described(chains: Tensor, data: rounds.SplitDataModule, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the predictive distribution of draws of NUTS on the examples held out, and their largest R-hat.

    Args:
        chains: parameters, shape (chains, draws, P).
        data: of the problem.
        sizes: of the network.
    """
    inputs, targets = data.validation.tensors
    probs = truth.outputs(chains.flatten(0, 1), inputs, sizes).double().softmax(-1)
    levels = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    points = of_true_class(probs, targets).quantile(levels, 0).logit().T
    return {
        "rhat": float(truth.split_rhat(probs.unflatten(0, chains.shape[:2])).max()),
        "draws": len(probs),
        **scores(probs, targets),
        "probs": [[float(f"{each:.5g}") for each in row] for row in probs.mean(0).tolist()],
        "points": [[round(each, 3) for each in row] for row in points.tolist()],
    }


def scores(probs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return accuracy, NLL and mutual information of sampled probabilities, shape (draws, batch, classes)."""
    mean = probs.mean(0)
    return {
        "accuracy": float((mean.argmax(-1) == targets).double().mean()),
        "nll": float(negative_log_likelihood(mean, targets).mean()),
        "mutual_information": float(mutual_information(probs).mean()),
    }


def compared(outputs: Tensor, targets: Tensor, exact: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of sampled logits, and how far they are from the draws of NUTS.

    Args:
        outputs: shape (draws, batch, classes).
        targets: classes, shape (batch,).
        exact: what :func:`described` gave.

    Returns: as :func:`scores`, the total variation between the mean predictives, and the coverage: the share of NUTS's
        draws whose probability of the true class lies in the central 90 % interval of these draws, example by example.
    """
    probs = outputs.double().softmax(-1)
    edges = torch.tensor([(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], dtype=torch.float64)
    low, high = of_true_class(probs, targets).quantile(edges, 0).logit().unsqueeze(-1)
    points = torch.tensor(exact["points"], dtype=torch.float64)
    wanted = torch.tensor(exact["probs"], dtype=torch.float64)
    return {
        **scores(probs, targets),
        "total_variation": float((probs.mean(0) - wanted).abs().sum(-1).mean() / 2),
        "coverage": float(((points >= low) & (points <= high)).double().mean()),
    }


def of_true_class(probs: Tensor, targets: Tensor) -> Tensor:
    """Return the sampled probabilities of the true classes, shape (draws, batch)."""
    return probs.gather(-1, targets.expand(len(probs), -1).unsqueeze(-1)).squeeze(-1)


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(done: Results) -> str:
    """Return all tables as Markdown."""
    exact = {cell.problem: found for cell, found in done.items() if cell.method == NUTS}
    parts = ["## Truth", truths(exact)]
    for problem in exact:
        parts += [f"## {problem[0].upper()}{problem[1:]}", table(done, problem)]
    if any("bound" in found for found in done.values()):
        parts += ["## Bounds of the pooled Gaussians", bounds(done)]
    if any("distances" in found for found in done.values()):
        parts += ["## Decrement and true distance", estimates(done)]
    return "\n\n".join(parts)


def truths(exact: Mapping[str, Mapping[str, Any]]) -> str:
    """Return size and scores of every problem, and whether the chains agree."""
    rows = []
    for problem, found in exact.items():
        sizes = PROBLEMS[problem].sizes
        rows.append(
            [
                problem,
                "-".join(map(str, sizes)),
                truth.size(sizes),
                len(found["probs"]),
                found["draws"],
                f"{found['rhat']:.4f}{'' if found['rhat'] <= RHAT_BAR else ' (**too large**)'}",
                found["nll"],
                found["accuracy"],
                found["mutual_information"],
            ]
        )
    heads = [
        "problem",
        "sizes",
        "parameters",
        "examples held out",
        "draws",
        "largest R̂",
        "NLL",
        "accuracy",
        "mutual information",
    ]
    return markdown_table(heads, rows)


def table(done: Results, problem: str) -> str:
    """Return how far every method is from NUTS: means over the seeds, with the range of the mutual information."""
    exact = done[Cell(problem, NUTS, 0)]
    rows = []
    for method in METHODS[1:]:
        found = of(done, problem, method)
        if not found:
            continue
        if method == FULL and not has_converged(done, problem):
            rows.append([method, len(found), "did not converge", "", "", ""])
            continue
        ratios = [each["mutual_information"] / exact["mutual_information"] for each in found]
        nll, variation, coverage = (
            statistics.fmean(each[key] for each in found) for key in ("nll", "total_variation", "coverage")
        )
        rows.append(
            [
                method,
                len(found),
                f"{nll - exact['nll']:+.4f}",
                f"{variation:.4f}",
                f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{coverage:.2f}",
            ]
        )
    heads = [
        "method",
        "seeds",
        "NLL − NUTS's",
        "total variation",
        "mutual information / NUTS's (its range)",
        "coverage of 90 %",
    ]
    return markdown_table(heads, rows)


def of(done: Results, problem: str, method: str) -> list[dict[str, Any]]:
    """Return what the seeds of a method gave."""
    return [found for cell, found in done.items() if (cell.problem, cell.method) == (problem, method)]


def has_converged(done: Results, problem: str) -> bool:
    """Return whether every full covariance has the larger bound: mean-field Gaussians are among its family."""
    full, diagonal = ([each["bound"] for each in of(done, problem, method)] for method in (FULL, MEAN_FIELD))
    return min(full) >= max(diagonal, default=-math.inf)


def bounds(done: Results) -> str:
    """Return the bounds of both families, the lowest and the highest of the seeds."""
    rows = []
    for problem in PROBLEMS:
        both = [[each["bound"] for each in of(done, problem, method)] for method in (MEAN_FIELD, FULL)]
        if all(both):
            shown = [f"{min(each):.2f} to {max(each):.2f}" for each in both]
            apart = [each["to_mean_field"] for each in of(done, problem, MEAN_FIELD) if "to_mean_field" in each]
            rows.append(
                [
                    problem,
                    *shown,
                    "yes" if has_converged(done, problem) else "**no**",
                    f"{max(apart):.2g}" if apart else "",
                ]
            )
    heads = ["problem", "mean field", "full covariance", "full covariance is ahead", "KL of mean field to the solution"]
    return markdown_table(heads, rows)


def estimates(done: Results) -> str:
    """Return the Newton decrement of sites beside the true distances: means over the seeds."""
    rows = []
    sites = [(cell.problem, found["distances"]) for cell, found in done.items() if "distances" in found]
    for problem, group in groupby(sites, key=lambda each: each[0]):
        seeds = [found for _, found in group]
        for number in seeds[0]:
            means = {key: statistics.fmean(each[number][key] for each in seeds) for key in seeds[0][number]}
            least = min(each[number]["width"] for each in seeds)
            rows.append(
                [
                    problem,
                    number,
                    len(seeds),
                    *(f"{means[key]:.2g}" for key in ("decrement", "to_end", "to_mean_field")),
                    f"{means['width']:.2f} ({least:.2f})",
                ]
            )
    heads = [
        "problem",
        "round",
        "seeds",
        "decrement",
        f"KL to round {LOOKS[-1]}",
        "KL to mean field, pooled",
        "median σ over mean field's (smallest)",
    ]
    return markdown_table(heads, rows)


def draw(done: Results, file: Path) -> None:
    """Draw mutual information and total variation of every seed, one panel for each problem."""
    problems = [problem for problem in PROBLEMS if any(of(done, problem, method) for method in METHODS[1:])]
    if not problems:
        return
    figure = Figure(figsize=(3.1 * len(problems), 3.4), dpi=DPI, layout="constrained")
    grid = figure.subplots(1, len(problems), sharex=True, sharey=True, squeeze=False)[0]
    for axes, problem in zip(grid, problems, strict=True):
        exact = done[Cell(problem, NUTS, 0)]["mutual_information"]
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.axvline(1, color="#777777", linewidth=0.8)
        for number, method in enumerate(METHODS[1:]):
            if method == FULL and not (of(done, problem, FULL) and has_converged(done, problem)):
                continue
            found = of(done, problem, method)
            axes.plot(
                [each["mutual_information"] / exact for each in found],
                [each["total_variation"] for each in found],
                "osD^vPX*<"[number],
                color=PALETTE[number % len(PALETTE)],
                markersize=5,
                label=method,
                alpha=0.8,
            )
        axes.set_title(problem, fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="mutual information / NUTS's")
        axes.xaxis.set(major_locator=FixedLocator(RATIOS), major_formatter="{x:g}", minor_locator=NullLocator())
    grid[0].set_ylabel("total variation")
    shown = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels())}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", frameon=False, fontsize=8, ncols=5)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=90)
    Image.open(picture).convert("RGB").quantize(256).save(file, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="METHOD", help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    file = options.out / "nuts.jsonl"
    done = study.in_order(study.read(file, Cell), cells())
    todo = [cell for cell in cells() if cell not in done and cell.method in (options.only or METHODS)]

    def result_of(cell: Cell) -> dict[str, Any]:
        done[cell] = run(cell, done.get(Cell(cell.problem, NUTS, 0)))
        return done[cell]

    study.run(file, todo, result_of)
    done = study.in_order(study.read(file, Cell), cells())
    text = tables(done)
    draw(done, options.out / "nuts.png")
    if options.out == HERE / "results":
        include(HERE / "NUTS.md", text)
    print(text)


if __name__ == "__main__":
    with quietly():
        main()
