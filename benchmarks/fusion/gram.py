"""Time of the rules that work on the clients' Gram matrix beside the one matrix product that they need.

    OMP_NUM_THREADS=2 python -m benchmarks.fusion.gram --clients 100 --parameters 1000000 --repeats 5

prints a Markdown table (see README.md).
"""

from __future__ import annotations

import argparse
import os
import platform
from statistics import median

import torch

from benchmarks.fusion.run import client, previous_posterior, seconds
from lightning_fedbayes.fusion import Cohort, Preaggregation, ReliabilityRule, available_fusions, get_rule


def measure(rules: list[str], clients: int, parameters: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Median seconds of the matrix product and of every rule, all measured in turn ``repeats`` times."""
    cohort = Cohort(
        [client(k, parameters) for k in range(clients)],
        torch.full((clients,), 1 / clients, dtype=torch.float64),
        previous_posterior(parameters),
        tuple(range(clients)),
    )
    matrix = torch.stack([each.mean["w"] for each in cohort.posteriors]).to(torch.float64)
    product: list[float] = []
    taken: dict[str, list[float]] = {rule: [] for rule in rules}
    for _ in range(repeats + 1):
        product.append(seconds(lambda: matrix @ matrix.T))
        for rule in rules:
            fusion = get_rule(rule)
            taken[rule].append(seconds(lambda fusion=fusion: fusion.apply(cohort, fusion.init())))
    return median(product[1:]), {rule: median(values[1:]) for rule, values in taken.items()}  # the first warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    rules = [name for name in available_fusions() if isinstance(get_rule(name), ReliabilityRule | Preaggregation)]
    baseline, taken = measure(rules, options.clients, options.parameters, options.repeats)
    print(
        f"{options.clients} clients × {options.parameters:,} parameters (mean and variance, float32), median of "
        f"{options.repeats}; {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}.\n"
    )
    print("| rule | seconds | × product |")
    print("|---|---:|---:|")
    print(f"| one product X Xᵀ in float64 | {baseline:.3f} | 1.0 |")
    for rule in rules:
        print(f"| {rule} | {taken[rule]:.3f} | {taken[rule] / baseline:.1f} |")


if __name__ == "__main__":
    main()
