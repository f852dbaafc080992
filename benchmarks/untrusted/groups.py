"""Parties with a common error: ICOV-VB beside the average, and the best linear estimate with known covariances.

    python -m benchmarks.untrusted.groups [--seeds 8] [--out FOLDER]

Two settings. *Once*: eight parties send a truth of variance 1 with noise of their own; four of them have one error in
common. *Regression*: linear regression by five parties, of whom three hold the same examples, and so the same noise of
the labels; every party sees noise of its own besides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.untrusted.report import RULES, options, table, write
from benchmarks.untrusted.synthetic import FEATURES, SIZE
from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.fusion import Cohort, FusionRule, get_rule
from lightning_fedbayes.fusion.inverse_covariance import least_squares

TITLES = {rule: RULES[rule] for rule in ("weighted_average", "geometric_median", "ivar_vb", "icov_vb")}
ORACLE = {"oracle": "oracle: covariances known"}
OWN = torch.linspace(0.1, 0.5, 8, dtype=torch.float64)
"""Variances of the parties' own noise, once."""
LEVELS = torch.arange(1.0, 6.0, dtype=torch.float64)
"""Standard deviations of the parties' own noise, in regression."""
VARIANCES, PARAMETERS = (0.5, 1.0, 2.0), (300, 3000)
NOISES, BEGINS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0), (0, 0, 0, 250, 500)
"""Standard deviations of the labels' noise, and where the parties' windows of examples begin."""
ROUNDS, RATE = 8, 0.5


def cohort(sent: Tensor, previous: Tensor) -> Cohort:
    """Return updates, shape (K, P), as a round's posteriors without variance."""
    posteriors = [GaussianPosterior.point_mass({"w": each}) for each in sent]
    equal = torch.full((len(sent),), 1 / len(sent), dtype=torch.float64)
    return Cohort(posteriors, equal, GaussianPosterior.point_mass({"w": previous}), tuple(range(len(sent))))


def once(rule: FusionRule | None, variance: float, size: int, seed: int) -> float:
    """Return the mean squared error of a fusion; ``rule`` None: the best linear estimate."""
    draws = torch.Generator().manual_seed(seed)
    truth, shared, own = (torch.randn(n, size, generator=draws, dtype=torch.float64) for n in (1, 1, 8))
    group = (torch.arange(8) < 4).to(torch.float64)
    sent = truth + variance**0.5 * group[:, None] * shared + OWN.sqrt()[:, None] * own
    if rule is None:
        fused = least_squares(variance * torch.outer(group, group) + torch.diag(OWN)) @ sent
    else:
        fused = rule.apply(cohort(sent, torch.zeros(size, dtype=torch.float64)), rule.init()).posterior.mean["w"]
    return float((fused - truth).square().mean())


def regression(rule: FusionRule | None, noise: float, seed: int) -> float:
    """Return the squared error of the coefficients after the last round; ``rule`` None: weights of eq. (3)."""
    draws = torch.Generator().manual_seed(seed)
    inputs, own = (torch.randn(*shape, generator=draws, dtype=torch.float64) for shape in ((750, FEATURES), (5, SIZE)))
    truth, common = (torch.randn(n, generator=draws, dtype=torch.float64) for n in (FEATURES, 750))
    windows = [slice(begin, begin + SIZE) for begin in BEGINS]
    parties = [
        (inputs[window], inputs[window] @ truth + noise * common[window] + level * each)
        for window, level, each in zip(windows, LEVELS, own, strict=True)
    ]
    if rule is None:
        same = torch.tensor([[float(one == other) for other in BEGINS] for one in BEGINS], dtype=torch.float64)
        weights = least_squares(noise**2 * same + torch.diag(LEVELS.square()))
        curvature = torch.stack([w * x.T @ x for w, (x, _) in zip(weights, parties, strict=True)]).sum(0)
        towards = torch.stack([w * x.T @ y for w, (x, y) in zip(weights, parties, strict=True)]).sum(0)
        return float((torch.linalg.solve(curvature, towards) - truth).square().sum())
    at, state = torch.zeros_like(truth), rule.init()
    for _ in range(ROUNDS):
        sent = torch.stack([at - RATE * x.T @ (x @ at - y) / SIZE for x, y in parties])
        fused = rule.apply(cohort(sent, at), state)
        at, state = fused.posterior.mean["w"], fused.state
    return float((at - truth).square().sum())


def main() -> None:
    arguments = options(__doc__, data=False, seeds=8).parse_args()
    torch.set_num_threads(1)  # the fastest for matrices this small
    cells: dict[str, Callable[[FusionRule | None, int], float]] = {
        f"{size} parameters, variance {variance:g}": lambda rule, seed, v=variance, s=size: once(rule, v, s, seed)
        for size in PARAMETERS
        for variance in VARIANCES
    }
    loops: dict[str, Callable[[FusionRule | None, int], float]] = {
        f"noise {noise:g}": lambda rule, seed, n=noise: regression(rule, n, seed) for noise in NOISES
    }
    scores: dict[str, dict[str, list[float]]] = {name: {rule: [] for rule in TITLES | ORACLE} for name in cells | loops}
    runs = [(name, rule, seed) for name in scores for rule in scores[name] for seed in range(arguments.seeds)]
    for name, rule, seed in tqdm(runs):
        made = None if rule in ORACLE else get_rule(rule)
        scores[name][rule].append((cells | loops)[name](made, seed))
    settings = (
        "Once: eight parties, a truth of variance 1, own noise of variance 0.1 to 0.5, an error of the given variance "
        f"that four of them share; mean squared error. Regression: {FEATURES} coefficients, five parties of {SIZE} "
        "examples of which three hold the same; noise of the labels with the given standard deviation, and 1 to 5 of "
        f"the parties' own; {ROUNDS} rounds of one full-batch step, rate {RATE}; squared error of the coefficients. "
        f"Seeds 0 to {arguments.seeds - 1}."
    )
    shown = [
        table("once", TITLES | ORACLE, None, {name: scores[name] for name in cells}, 3),
        table("regression", TITLES | ORACLE, None, {name: scores[name] for name in loops}, 2),
    ]
    write(arguments.out, "groups", settings, shown)


if __name__ == "__main__":
    with quietly():
        main()
