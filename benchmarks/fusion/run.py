"""Time and memory of the sum-type fusion rules beside a plain mean over stacked clients.

    python -m benchmarks.fusion.run --clients 100 --parameters 1000000 --repeats 5

prints two Markdown tables, of Gaussian and of deterministic clients (see README.md).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from lightning_fedbayes import ClientUpdate, GaussianPosterior, RoundPlan, Server, fuse
from lightning_fedbayes.fusion import SumRule, available_fusions, get_rule

FEW = 20
"""Clients of the smaller memory measurement."""
DETERMINISTIC = 16
"""Deterministic clients, each of ResNet-18's size."""


def client(number: int, parameters: int) -> GaussianPosterior:
    """A probabilistic client in single precision."""
    draws = torch.Generator().manual_seed(number)
    variance = torch.rand(parameters, generator=draws).mul_(0.1).add_(0.01)
    return GaussianPosterior({"w": torch.randn(parameters, generator=draws)}, {"w": variance})


def previous_posterior(parameters: int) -> GaussianPosterior:
    """A global posterior with a larger variance than every client."""
    return GaussianPosterior({"w": torch.zeros(parameters)}, {"w": torch.full((parameters,), 10.0)})


def stack_mean(posteriors: list[GaussianPosterior]) -> tuple[torch.Tensor, torch.Tensor]:
    """The baseline: mean over clients of the stacked means and of the stacked variances."""
    return (
        torch.stack([each.mean["w"] for each in posteriors]).mean(0),
        torch.stack([each.variance["w"] for each in posteriors]).mean(0),
    )


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_times(rules: list[str], clients: int, parameters: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Median seconds of the baseline and of every rule, all measured in turn ``repeats`` times."""
    posteriors = [client(k, parameters) for k in range(clients)]
    previous = previous_posterior(parameters)
    weights = [1.0 + k % 7 for k in range(clients)]
    contestants: dict[str, Callable[[], object]] = {"": lambda: stack_mean(posteriors)}
    for rule in rules:
        contestants[rule] = lambda rule=rule: fuse(rule, iter(posteriors), weights, previous)
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for function in contestants.values():  # the first calls pay for the pages that later ones find mapped
        function()
    for _ in range(repeats):
        for name, function in contestants.items():
            taken[name].append(seconds(function))
    medians = {name: median(values) for name, values in taken.items()}
    return medians.pop(""), medians


def resnet18_shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the 62 parameters of ResNet-18, 11,689,512 numbers."""
    convolutions = [(64, 3, 7, 7)]
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        convolutions += [(outputs, inputs, 3, 3), *3 * [(outputs, outputs, 3, 3)]]
        if inputs != outputs:
            convolutions.append((outputs, inputs, 1, 1))
    shapes = [shape for kernel in convolutions for shape in (kernel, kernel[:1], kernel[:1])]
    return {str(k): shape for k, shape in enumerate([*shapes, (1000, 512), (1000,)])}


def state_dict_mean(states: list[dict[str, torch.Tensor]], weights: list[float]) -> dict[str, torch.Tensor]:
    """The plain weighted mean of state dicts in single precision."""
    total = sum(weights)
    mean = {name: value * (weights[0] / total) for name, value in states[0].items()}
    for state, weight in zip(states[1:], weights[1:], strict=True):
        for name, value in state.items():
            mean[name].add_(value, alpha=weight / total)
    return mean


def serve(rule: str, posteriors: list[GaussianPosterior], weights: list[float]) -> None:
    """One round of a server whose clients train a deterministic network."""
    server = Server(posteriors[0], fusion=rule)
    server.begin(RoundPlan(0, tuple(range(len(posteriors)))))
    for k, (posterior, weight) in enumerate(zip(posteriors, weights, strict=True)):
        server.admit(ClientUpdate(k, int(weight), posterior))
    server.finish()


def measure_deterministic(rules: list[str], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds per client of the plain mean (as "") and of every rule, in turn; and multiples of the plain mean.

    Of each rule: clients of a list, clients of a generator, clients of a server.
    """
    draws = torch.Generator().manual_seed(0)
    states = [
        {name: torch.randn(shape, generator=draws) for name, shape in resnet18_shapes().items()}
        for _ in range(DETERMINISTIC)
    ]
    posteriors = [GaussianPosterior.point_mass(state) for state in states]
    weights = [1.0 + k % 7 for k in range(DETERMINISTIC)]
    contestants: dict[tuple[str, int], Callable[[], object]] = {("", 0): lambda: state_dict_mean(states, weights)}
    for rule in rules:
        contestants[rule, 0] = lambda rule=rule: fuse(rule, posteriors, weights, posteriors[0])
        contestants[rule, 1] = lambda rule=rule: fuse(rule, iter(posteriors), weights, posteriors[0])
        contestants[rule, 2] = lambda rule=rule: serve(rule, posteriors, weights)
    taken: dict[tuple[str, int], list[float]] = {name: [] for name in contestants}
    for _ in range(repeats + 1):
        for name, function in contestants.items():
            start = time.process_time()
            function()
            taken[name].append((time.process_time() - start) / DETERMINISTIC)
    found: dict[str, list[tuple[float, float]]] = {}
    for (rule, _), values in taken.items():
        ratios = [a / b for a, b in zip(values[1:], taken["", 0][1:], strict=True)]
        found.setdefault(rule, []).append((median(values[1:]), median(ratios)))
    return found


def peak_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def extra_memory(rule: str, clients: int, parameters: int) -> int:
    """Growth of the peak memory, in bytes, while clients are drawn and fused one by one; call it in a fresh process."""
    torch.set_num_threads(1)
    drawn: Iterator[GaussianPosterior] = (client(k, parameters) for k in range(clients))
    previous = previous_posterior(parameters)
    before = peak_bytes()
    fuse(rule, drawn, [1.0] * clients, previous)
    return peak_bytes() - before


def measure_memory(rules: list[str], counts: tuple[int, ...], parameters: int) -> dict[str, list[int]]:
    """Extra memory of every rule for each number of clients, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_fedbayes.fusion"])
    found = {}
    with context.Pool(processes=1, maxtasksperchild=1) as pool:
        for rule in rules:
            found[rule] = [pool.apply(extra_memory, (rule, count, parameters)) for count in counts]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    rules = [name for name in available_fusions() if isinstance(get_rule(name), SumRule)]
    counts = (FEW, options.clients)
    memory = measure_memory(rules, counts, options.parameters)
    baseline, times = measure_times(rules, options.clients, options.parameters, options.repeats)

    print(
        f"{options.clients} clients × {options.parameters:,} parameters (mean and variance, float32), median of "
        f"{options.repeats}; {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}.\n"
    )
    print(f"| rule | seconds | × stack | extra MiB, {counts[0]} clients | extra MiB, {counts[1]} clients |")
    print("|---|---:|---:|---:|---:|")
    message = 2 * 4 * options.parameters / 2**20
    print(
        f"| `torch.stack(...).mean(0)` | {baseline:.3f} | 1.0 | ≥ {counts[0] * message:.0f} | "
        f"≥ {counts[1] * message:.0f} |"
    )
    for rule in rules:
        few, many = (value / 2**20 for value in memory[rule])
        print(f"| {rule} | {times[rule]:.3f} | {times[rule] / baseline:.1f} | {few:.0f} | {many:.0f} |")

    print(f"\n{DETERMINISTIC} deterministic clients of ResNet-18's size, CPU time per client.\n")
    print("| rule | list, ms | × mean | one by one, ms | × mean | server, ms | × mean |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for rule, figures in measure_deterministic(rules, options.repeats).items():
        cells = " | ".join(f"{1e3 * taken:.1f} | {ratio:.1f}" for taken, ratio in figures)
        print(f"| {rule or 'mean of state dicts in float32'} | {cells} |{'' if rule else ' | | | |'}")


if __name__ == "__main__":
    main()
