"""Uncertainty of a regression from seven models in one table, on data that need no download.

Run it with ``python examples/regression.py``. Ten clients share the 442 diabetes patients of scikit-learn; scores are
of a held-out fifth and in original units. Learning rates and epochs were chosen on a part of the training data. Writes
the table, a picture of the intervals and one of the toy problem of [FedAG] Figure 2 to ``--output``: y = x³ + N(0, 3²),
ten workers of 16 points in [-4, 4], predicted in [-6, 6].
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import lightning as L
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.metrics.functional import gaussian_crps, gaussian_nll, interval_coverage
from lightning_fedbayes.modules import LikelihoodModule, RegressionPrediction, mlp

Predict = Callable[[Tensor], RegressionPrediction]

CLIENTS, HIDDEN, MEMBERS, LEVEL = 10, 50, 5, 0.9
PARTITION = fb.IIDPartition(CLIENTS)
SCORES = ("RMSE", "NLL", "CRPS", "90 % coverage")
DIGITS = (1, 2, 1, 2)
SHOWN = "mean-field VI, reverse KL barycenter"


def federate(
    model: LikelihoodModule, train: TensorDataset, fusion: str, rounds: int, epochs: int, batch_size: int, seed: int
) -> Predict:
    """Train some rounds and return the prediction of the global model."""
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[fb.FederatedBayes(PARTITION, fusion=fusion, local_epochs=epochs, seed=seed)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(train, batch_size, shuffle=True))
    return model.eval().predict_step


def sgd(learning_rate: float) -> partial[torch.optim.SGD]:
    return partial(torch.optim.SGD, lr=learning_rate)


def pooled_linear(train: TensorDataset, seed: int) -> Predict:
    inputs, targets = train.tensors
    return fb.BayesianLinearRegression.fit(inputs, targets).predict


def federated_linear(train: TensorDataset, seed: int) -> Predict:
    inputs, targets = train.tensors
    parts = PARTITION.split(targets, seed).indices
    clients = [fb.BayesianLinearRegression.fit(inputs[part], targets[part]) for part in parts]
    return fb.BayesianLinearRegression.conflate(clients).predict


def fedag_linear(train: TensorDataset, seed: int) -> Predict:
    network = nn.Linear(train.tensors[0].shape[1], 1)
    model = fb.HybridBayesianRegressor(network, noise="residual", predictive="closed_form", optimizer=sgd(0.005))
    return federate(model, train, "gaussian_fit", rounds=1, epochs=10, batch_size=1, seed=seed)


def fedag_network(train: TensorDataset, seed: int, noise: Literal["none", "residual"]) -> Predict:
    network = mlp(train.tensors[0].shape[1], 1, (HIDDEN,))
    model = fb.HybridBayesianRegressor(network, noise=noise, predictive="bootstrap", optimizer=sgd(0.005))
    return federate(model, train, "gaussian_fit", rounds=5, epochs=3, batch_size=1, seed=seed)


def mean_field(train: TensorDataset, seed: int) -> Predict:
    network = mlp(train.tensors[0].shape[1], 1, (HIDDEN,))
    model = fb.HybridBayesianRegressor(network, bayesian_last=2, learning_rate=0.003, samples=100)
    return federate(model, train, "reverse_kl_barycenter", rounds=10, epochs=5, batch_size=8, seed=seed)


def deep_ensemble(train: TensorDataset, seed: int) -> Predict:
    networks = [mlp(train.tensors[0].shape[1], 2, (HIDDEN,)) for _ in range(MEMBERS)]
    model = fb.modules.DeepEnsembleRegressor(networks, learning_rate=0.003)
    return federate(model, train, "weighted_average", rounds=5, epochs=2, batch_size=8, seed=seed)


METHODS: dict[str, Callable[[TensorDataset, int], Predict]] = {
    "Bayesian linear regression, pooled data": pooled_linear,
    "the same, conflated from clients": federated_linear,
    "FedAG, linear, closed form": fedag_linear,
    "FedAG, network, bootstrap, no noise": partial(fedag_network, noise="none"),
    "FedAG, network, bootstrap, residual noise": partial(fedag_network, noise="residual"),
    "mean-field VI, reverse KL barycenter": mean_field,
    "deep ensemble, weighted average": deep_ensemble,
}


def in_original_units(prediction: RegressionPrediction, mean: float, std: float) -> RegressionPrediction:
    """Turn a prediction of z = (y − mean) / std into one of y."""
    return RegressionPrediction(
        mean=mean + std * prediction.mean,
        variance=std**2 * prediction.variance,
        aleatoric=std**2 * prediction.aleatoric,
        epistemic=std**2 * prediction.epistemic,
        samples=mean + std * prediction.samples,
    )


def scores(prediction: RegressionPrediction, target: Tensor) -> Tensor:
    """Compute the scores, in the order of SCORES."""
    mean, variance = prediction.mean, prediction.variance
    return torch.stack(
        [
            (mean - target).square().mean().sqrt(),
            gaussian_nll(mean, variance, target).mean(),
            gaussian_crps(mean, variance, target).mean(),
            interval_coverage(mean, variance, target, LEVEL).mean(),
        ]
    )


@torch.no_grad()
def predictions_of(method: str, seed: int) -> tuple[RegressionPrediction, Tensor]:
    """Return a method's prediction for the held-out patients and their targets, in original units."""
    data = fb.data.DiabetesDataModule(seed=seed)
    data.setup()
    L.seed_everything(seed, verbose=False)
    with torch.enable_grad():
        predict = METHODS[method](data.train, seed)
    inputs, target = data.validation.tensors
    prediction = in_original_units(predict(inputs), data.target_mean, data.target_std)
    return prediction, data.target_mean + data.target_std * target


def cube(seed: int) -> Figure:
    """Draw [FedAG] Figure 2: network of 100 hidden units, mean and spread of ten workers."""
    L.seed_everything(seed, verbose=False)
    x = 8 * torch.rand(16 * CLIENTS, 1) - 4
    y = x**3 + 3 * torch.randn_like(x)
    data = TensorDataset(x / x.std(), y / y.std())
    network = mlp(1, 1, (100,))
    model = fb.HybridBayesianRegressor(network, noise="none", predictive="bootstrap", optimizer=sgd(0.03))
    predict = federate(model, data, "gaussian_fit", rounds=5, epochs=40, batch_size=1, seed=seed)
    at = torch.linspace(-6, 6, 200).unsqueeze(1)
    with torch.no_grad():
        prediction = in_original_units(predict(at / x.std()), 0.0, float(y.std()))
    columns = (at, prediction.mean, prediction.variance.sqrt(), x, y)
    at, mean, std, x, y = (column.squeeze(1) for column in columns)
    return drawn(at, mean, std, x, y)


def drawn(at: Tensor, mean: Tensor, std: Tensor, x: Tensor, y: Tensor) -> Figure:
    """Draw predictive mean and intervals of one and two standard deviations at ascending inputs, and data (x, y)."""
    inputs, middle, width = (column.numpy() for column in (at, mean, std))
    figure = plots.empty_figure(5, 3.75)
    axes = figure.add_subplot()
    for widths, alpha in ((2, 0.18), (1, 0.3)):
        axes.fill_between(
            inputs,
            middle - widths * width,
            middle + widths * width,
            color=plots.PALETTE[0],
            alpha=alpha,
            linewidth=0,
            label=f"± {widths} sd",
        )
    axes.plot(inputs, middle, color=plots.PALETTE[0], linewidth=1.8, label="predictive mean")
    axes.scatter(x.numpy(), y.numpy(), s=10, color=plots.INK, zorder=3, label="data")
    axes.set(xlabel="input x", ylabel="target y", title="Predictive distribution", xlim=(inputs[0], inputs[-1]))
    axes.legend()
    return figure


def intervals(mean: Tensor, low: Tensor, high: Tensor, target: Tensor) -> Figure:
    """Draw interval and target of every example, in ascending order of the predicted mean."""
    order = mean.flatten().argsort()
    middle, below, above, truth = (column.flatten()[order].numpy() for column in (mean, low, high, target))
    rank, inside = np.arange(1, len(order) + 1), (below <= truth) & (truth <= above)
    figure = plots.empty_figure(5, 3.75)
    axes = figure.add_subplot()
    axes.vlines(rank, below, above, color=plots.PALETTE[5], alpha=0.6, linewidth=max(1.0, min(6.0, 200 / len(order))))
    axes.plot(rank, middle, color=plots.PALETTE[0], linewidth=1.8, label="predictive mean")
    for chosen, color, label in ((inside, plots.INK, "inside"), (~inside, plots.PALETTE[1], "outside")):
        axes.scatter(rank[chosen], truth[chosen], s=10, color=color, zorder=3, label=f"target {label}")
    axes.set(
        xlabel="example, by predicted mean",
        ylabel="target y",
        title=f"Prediction intervals ({inside.mean():.0%} of targets inside)",
    )
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/regression"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # threads cost a network this small more than they gain

    start = time.perf_counter()
    results = torch.empty(len(METHODS), arguments.seeds, len(SCORES))
    with tqdm(total=results[..., 0].numel() + 1) as bar:
        for row, method in enumerate(METHODS):
            bar.set_description(method)
            for seed in range(arguments.seeds):
                prediction, target = predictions_of(method, seed)
                results[row, seed] = scores(prediction, target)
                if seed == 0 and method == SHOWN:
                    figure = intervals(prediction.mean, *prediction.interval(LEVEL), target)
                    figure.savefig(arguments.output / "intervals.png")
                bar.update()
        bar.set_description("toy data")
        cube(seed=0).savefig(arguments.output / "cube.png")
        bar.update()

    mean, error = results.mean(1), results.std(1) / arguments.seeds**0.5
    setting = (
        f"Diabetes data of scikit-learn, {CLIENTS} clients of equal size, networks of one layer of {HIDDEN} units, "
        f"{MEMBERS} members; mean ± standard error of {arguments.seeds} seeds (split, initial network and noise); "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread, {platform.machine()}, "
        f"{time.perf_counter() - start:.0f} s."
    )
    rows = [
        [method, *(f"{m:.{digits}f} ± {e:.{digits}f}" for m, e, digits in zip(mean[row], error[row], DIGITS))]
        for row, method in enumerate(METHODS)
    ]
    table = markdown_table(("method", *SCORES), rows)
    (arguments.output / "table.md").write_text(f"{setting}\n\n{table}\n")
    print(f"\n{setting}\n\n{table}\n\nTable and pictures: {arguments.output}")


if __name__ == "__main__":
    with quietly():
        main()
