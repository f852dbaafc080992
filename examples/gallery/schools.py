"""Sixty schools, few pupils each: how much does a point at entry count at this school?

    python examples/gallery/schools.py [--output DIR]

Data made on the spot, like the Exam data of London: every school has an intercept and a slope of its own, drawn from a
population. Each school sends sums over its pupils once. Look at the error of a school's slope beside the truth: by its
own pupils alone, one for all schools, and its posterior given all of them, which trusts own pupils where they are many.
Its intervals take the estimated spread of the schools as known, and so are somewhat narrow.
"""

import argparse
from pathlib import Path

import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.tables import markdown_table

NOISE, MEAN, SPREAD = 0.75, torch.tensor([0.0, 0.55]), torch.tensor([0.3, 0.12])
"""Standard deviation of pupils, mean of the schools' intercepts and slopes, and their standard deviations."""


def main(output: Path, schools: int = 60) -> dict[str, float]:
    torch.manual_seed(0)
    sizes = torch.randint(5, 80, (schools,)).sort().values
    true = MEAN + SPREAD * torch.randn(schools, 2)
    sent = {}
    for number, (size, (intercept, slope)) in enumerate(zip(sizes, true)):  # each school does this by itself
        entry = torch.randn(int(size), 1)
        exam = intercept + slope * entry[:, 0] + NOISE * torch.randn(len(entry))
        sent[f"school {number}"] = fb.modules.LinearStatistics.of(entry, exam)

    fit = fb.HierarchicalLinearRegression(random=(0, 1)).fit(sent)
    posteriors = [fit.posterior_of(name) for name in sent]
    slopes = {
        "school alone": torch.stack([torch.linalg.solve(own.gram, own.moment)[1] for own in sent.values()]),
        "one for all": fit.fixed[1].expand(schools),
        "posterior of the school": torch.stack([mean[1] for mean, _ in posteriors]),
    }
    width = 1.645 * torch.stack([covariance[1, 1] for _, covariance in posteriors]).sqrt()
    parts = sizes < 30, sizes >= 30
    errors = {name: (found - true[:, 1]).abs() for name, found in slopes.items()}
    rows = [[name, *(float(e[part].square().mean().sqrt()) for part in parts)] for name, e in errors.items()]
    print(markdown_table(["error of the slope (RMSE)", "schools below 30 pupils", "larger ones"], rows))
    inside = float((errors["posterior of the school"] <= width).double().mean())
    print(
        f"\nTruth in {inside:.0%} of the 90 % intervals. Found: a mean slope of {fit.fixed[1]:.2f}, and a spread of "
        f"{fit.random_covariance[1, 1].sqrt():.2f}; true are {MEAN[1]:.2f} and {SPREAD[1]:.2f}."
    )

    figure, order = plots.empty_figure(10, 3.75), torch.arange(schools)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    alone, _, shrunk = slopes.values()
    left.plot(order, alone, "o", color=plots.PALETTE[1], markersize=4, label="school alone")
    left.errorbar(order, shrunk, width, fmt="o", color=plots.PALETTE[0], markersize=4, linewidth=1, label="posterior")
    left.plot(order, true[:, 1], "_", color=plots.INK, markersize=8, label="truth")
    left.axhline(float(fit.fixed[1]), color=plots.GRID, zorder=0)
    left.set(xlabel="school, from the smallest to the largest", ylabel="slope")
    for (name, *scores), color in zip(rows, (plots.PALETTE[1], plots.PALETTE[2], plots.PALETTE[0])):
        right.plot(["5 to 29", "30 to 79"], scores, "o-", color=color, label=name)
    right.set(xlabel="pupils of the school", ylabel="error of the slope (RMSE)", ylim=(0, None))
    left.legend(frameon=False)
    right.legend(frameon=False)
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "schools.png")
    names = ("alone", "one", "posterior")
    return {"inside": inside} | {name: float(e.square().mean().sqrt()) for name, e in zip(names, errors.values())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/schools"))
    main(parser.parse_args().output)
