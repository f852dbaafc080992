"""Linear regression by five genuine parties with overlapping data and a noise level of their own each.

    python -m benchmarks.untrusted.synthetic [--seeds 20] [--out FOLDER]

Each party has a window of a sequence of examples; windows that overlap share examples. The label of an example has
noise that all its holders see, and noise that only party j sees, whose level differs from party to party. In every
round, all parties take one gradient step on all their data, and the steps are fused.

The oracles know the covariance of the parties' errors (eq. (5) of the paper plus their own noise) or its diagonal;
their result is the fixed point of fusing with the weights that follow from it, computed in closed form.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.untrusted.federation import Examples, Task, federate
from benchmarks.untrusted.report import PUBLISHED, RULES, options, panels, table, write
from lightning_fedbayes.core.quiet import quietly

PARTIES, FEATURES, SIZE = 5, 50, 250
SHARED_NOISE = 5.0
DOUBLING, SIMILAR = (1.0, 2.0, 4.0, 8.0, 16.0), (1.0, 2.0, 3.0, 4.0, 5.0)
"""Standard deviations of the noise that all holders of an example see, and of the parties' own."""
SETTINGS = {
    "overlap 50 %": (0.5, DOUBLING),
    "overlap 90 %": (0.9, DOUBLING),
    "overlap 50 %, similar noise": (0.5, SIMILAR),
}
"""Share of its examples that a party has in common with the next, and the parties' own noise."""
ORACLES = {"variances": "oracle: variances known", "covariances": "oracle: covariances known"}
ROUNDS, RATE, TEST = 25, 0.5, 2000


def make(overlap: float, noise: Sequence[float], seed: int) -> tuple[list[Examples], Examples, Tensor]:
    """Return the parties' data, test inputs with labels without noise, and the covariance of the parties' errors."""
    draws = torch.Generator().manual_seed(seed)
    begins = [party * round((1 - overlap) * SIZE) for party in range(PARTIES)]
    truth = torch.randn(FEATURES, 1, generator=draws)
    inputs = torch.randn(begins[-1] + SIZE, FEATURES, generator=draws)
    labels = inputs @ truth + SHARED_NOISE * torch.randn(len(inputs), 1, generator=draws)
    levels = torch.tensor(noise)[torch.randperm(PARTIES, generator=draws)]
    parties = []
    for begin, level in zip(begins, levels):
        window = slice(begin, begin + SIZE)
        parties.append((inputs[window], labels[window] + level * torch.randn(SIZE, 1, generator=draws)))
    fresh = torch.randn(TEST, FEATURES, generator=draws)
    places = torch.tensor(begins)
    common = (1 - (places[:, None] - places).abs() / SIZE).clamp_min(0)
    covariance = SHARED_NOISE**2 * common + torch.diag(levels**2)
    return parties, (fresh, fresh @ truth), covariance


def oracle(parties: Sequence[Examples], test: Examples, covariance: Tensor) -> float:
    """Return the prediction error where gradients, fused with generalised least-squares weights, are 0."""
    weights = torch.linalg.solve(covariance, torch.ones(PARTIES))
    curvature = sum(weight * inputs.T @ inputs for weight, (inputs, _) in zip(weights, parties))
    towards = sum(weight * inputs.T @ targets for weight, (inputs, targets) in zip(weights, parties))
    assert isinstance(curvature, Tensor)
    inputs, targets = test
    return float(nn.functional.mse_loss(inputs @ torch.linalg.solve(curvature, towards), targets))


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets) / 2


def task(rate: float) -> Task:
    """Return the linear regression from 0, trained by SGD at a rate."""
    network = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(network.weight)
    return Task(network, half_squared_error, nn.functional.mse_loss, functools.partial(torch.optim.SGD, lr=rate))


def run(rule: str, setting: str, seed: int) -> tuple[list[float], str]:
    """Return the prediction error after every round, and the engine."""
    parties, test, _ = make(*SETTINGS[setting], seed)
    return federate(task(RATE), parties, test, rule, None, rounds=ROUNDS, batch_size=SIZE, seed=seed)


def main() -> None:
    arguments = options(__doc__, data=False, seeds=20).parse_args()
    torch.set_num_threads(1)  # the fastest for networks this small
    engine, curves = "", {setting: {rule: [] for rule in RULES} for setting in SETTINGS}
    runs = [(seed, setting, rule) for seed in range(arguments.seeds) for setting in SETTINGS for rule in RULES]
    for seed, setting, rule in tqdm(runs):
        errors, engine = run(rule, setting, seed)
        curves[setting][rule].append(errors)
    last = {
        name: {rule: [each[-1] for each in seeds] for rule, seeds in rules.items()} for name, rules in curves.items()
    }
    for setting, windows in SETTINGS.items():
        made = [make(*windows, seed) for seed in range(arguments.seeds)]
        last[setting]["variances"] = [oracle(p, test, torch.diag(c.diagonal())) for p, test, c in made]
        last[setting]["covariances"] = [oracle(p, test, c) for p, test, c in made]
    doubling, similar = (", ".join(f"{level:g}" for level in levels) for levels in (DOUBLING, SIMILAR))
    settings = (
        f"{PARTIES} genuine parties with {SIZE} examples of {FEATURES} standard normal features each; every party "
        f"shares the overlap with the next one. Noise of the labels (standard deviations): {SHARED_NOISE:g} seen by "
        f"all holders of an example, and of the parties' own {doubling}, or similar: {similar}, in an order of its own "
        f"per seed. {ROUNDS} rounds of one full-batch gradient step, rate {RATE}; engine {engine}; seeds 0 to "
        f"{arguments.seeds - 1}. Error: mean squared error to the labels without noise of {TEST:,} fresh inputs."
    )
    figure = panels(curves, RULES, range(1, ROUNDS + 1), "round", "prediction error", log=True)
    shown = table("rule", RULES | ORACLES, PUBLISHED["synthetic"], last, 2)
    write(arguments.out, "synthetic", settings, [shown], figure)


if __name__ == "__main__":
    with quietly():
        main()
