"""Readings of [FedAG]'s set-up that could make its networks' predictions wider, side by side on training data alone.

    python -m benchmarks.uci.readings --data DIR [--dataset wine-quality-red] [--splits 5] [--local-epochs 40]
                                      [--learning-rate RATE ...] [--seed 0] [--out FOLDER]

A fifth of the training examples of the first splits is held out, and scores there; test examples are not looked at. All
readings train at once: start by PyTorch's defaults or by Glorot's, target centred or as it is. Every one is scored by
four predictions: the clients' networks (bootstrap) or draws from the fitted Gaussian, without noise or with it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.uci.data import Splits, read_splits
from benchmarks.uci.network import networks
from benchmarks.uci.plans import LOCAL_EPOCHS, plan_of
from benchmarks.uci.rates import VALIDATION
from benchmarks.uci.scores import scores_of
from benchmarks.uci.sets import UCIDataModule
from benchmarks.uci.training import Plan, federate, predictions, regressor
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules.sampling import Predictive

PREDICTIONS: dict[Predictive, str] = {"bootstrap": "clients' networks", "omc": "draws"}
STARTS, TARGETS = ("PyTorch's start", "Glorot's start"), ("centred target", "target as it is")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a folder per data set")
    parser.add_argument("--dataset", default="wine-quality-red", help="name of its folder")
    parser.add_argument("--splits", type=int, default=5, help="the first N splits")
    parser.add_argument("--local-epochs", type=int, default=LOCAL_EPOCHS)
    parser.add_argument("--learning-rate", type=float, nargs="+", help="in place of the chosen one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    splits = read_splits(arguments.data, arguments.dataset, arguments.splits, VALIDATION)
    plan, _ = plan_of(arguments.dataset, "network", 5, arguments.local_epochs, None)
    rates = arguments.learning_rate or [float(plan.rate)]
    first = UCIDataModule(arguments.data, arguments.dataset, validation_fraction=VALIDATION)
    first.setup()
    torch.manual_seed(arguments.seed)
    table = compare(splits, first.target_mean / first.target_std, rates, plan._replace(seed=arguments.seed))
    given = f"--dataset {arguments.dataset} --splits {arguments.splits} --local-epochs {arguments.local_epochs} "
    given += f"--learning-rate {' '.join(f'{rate:g}' for rate in rates)} --seed {arguments.seed}"
    text = f"`python -m benchmarks.uci.readings --data DIR {given}`\n\n{table}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "readings.md").open("a") as page:
        page.write(f"\n{text}\n")
    print(f"\n{text}")


def compare(splits: Splits, offset: float, rates: list[float], plan: Plan) -> str:
    """Train all readings side by side and return their validation scores as a table.

    Args:
        offset: mean of the target, in its standard deviations.
    """
    cases = list(product(rates, STARTS, TARGETS))
    copies = splits.repeated(len(cases))
    shift = torch.tensor([offset * (target == TARGETS[1]) for *_, target in cases]).repeat_interleave(splits.number)
    copies = copies._replace(train=(copies.train[0], copies.train[1] + shift))
    plan = plan._replace(rate=torch.tensor([rate for rate, *_ in cases]).repeat_interleave(splits.number))
    module = regressor(networks(copies.number, copies.features, plan.hidden), copies, plan)
    is_glorot = torch.tensor([start == STARTS[1] for _, start, _ in cases]).repeat_interleave(splits.number)
    start_by_glorot(module.network, is_glorot)
    federate(module, copies, plan)
    rows = []
    for predictive, title in PREDICTIONS.items():
        module.predictive, module.samples = predictive, 50
        mean, noise, spread = predictions(module, copies.test[0])
        for variance, with_noise in ((spread, ""), (spread + noise, " + residual noise")):
            scores = scores_of(mean - shift, variance, copies.test[1], copies.target_std)
            for place, case in enumerate(cases):
                part = slice(place * splits.number, (place + 1) * splits.number)
                found = [statistics.fmean(scores[name][part]) for name in ("nll", "rmse", "sharpness")]
                error = statistics.stdev(scores["nll"][part]) / math.sqrt(splits.number)
                rows.append(
                    [
                        f"{case[0]:g}",
                        *case[1:],
                        title + with_noise,
                        f"{found[0]:.3f} ± {error:.3f}",
                        *(f"{value:.3f}" for value in found[1:]),
                    ]
                )
    return markdown_table(["rate", "start", "target", "prediction", "NLL", "RMSE", "DS"], rows)


@torch.no_grad()
def start_by_glorot(network: nn.Module, where: Tensor) -> None:
    """Give the copies of ``where``, shape (copies,), the start of Glorot and Bengio (2010), and biases of 0.

    Weights are uniform on ±√(6 / (fan in + fan out)).
    """
    for path, parameter in network.named_parameters():
        fans = (*parameter.shape[1:], 1)[:2]
        bound = 0.0 if path.endswith("bias") else math.sqrt(6 / sum(fans))
        drawn = torch.empty_like(parameter).uniform_(-bound, bound)
        parameter[where] = drawn[where]


if __name__ == "__main__":
    with quietly():
        main()
