"""What a client and a parameter cost a server, and from that the cost of federations that do not fit on this machine.

    python -m benchmarks.engine.scale [--repeats 5]

A server reads each client's message as Flower brings it (bytes to tensors, checks), admits the update, and fuses when
all have come. Its time is a straight line in clients and in clients × parameters; the two slopes come from rounds of
many clients with few parameters and of few clients with many. Bytes are those that the server counts. One thread.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import lightning_fedbayes as fb
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.transport.messages import posterior_in, tensors_of

RULES = {"averages": "weighted_average", "Gaussians": "reverse_kl_barycenter", "median": "geometric_median"}
KEPT = {"averages": (8, 0), "Gaussians": (16, 0), "median": (8, 4)}
"""Bytes per parameter that a round needs at the server once (sums in float64), and for every client in the round."""
MANY, LARGE = (2000, 1000), (20, 2_000_000)
"""Clients and parameters of the two rounds."""
WIDE, LONG = 125e6, 1.25e9
"""Bytes a second of a client's line (1 Gbit/s) and of the server's (10 Gbit/s)."""
MEMORY = 128
"""GB that the server has."""
FEDERATIONS = {
    "10,000 hospitals × 25 M parameters": (10_000, 25_000_000, 10_000),
    "1 M phones × 100,000 parameters, all": (1_000_000, 100_000, 1_000_000),
    "1 M phones × 100,000 parameters, 10,000 a round": (1_000_000, 100_000, 10_000),
}
"""Clients, parameters, and clients in a round."""


class Round(NamedTuple):
    """Seconds of the server, and bytes of one client in each direction."""

    seconds: float
    up: float
    down: float


def packed(posterior: fb.GaussianPosterior) -> dict[str, bytes]:
    """Return the arrays of a message as Flower sends them: those that numpy would write."""
    files = {key: io.BytesIO() for key in tensors_of(posterior, {})}
    for key, tensor in tensors_of(posterior, {}).items():
        np.save(files[key], tensor.numpy())
    return {key: file.getvalue() for key, file in files.items()}


def unpacked(message: dict[str, bytes]) -> dict[str, Tensor]:
    """Return the tensors of a message."""
    return {key: torch.from_numpy(np.load(io.BytesIO(array))) for key, array in message.items()}


def a_round(rule: str, clients: int, parameters: int) -> Round:
    """Return the cost of one round in which every client sends a message of its own."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(parameters, generator=generator)
    if rule == "reverse_kl_barycenter":
        start = fb.GaussianPosterior({"w": mean}, {"w": torch.full_like(mean, 0.01)})
    else:
        start = fb.GaussianPosterior.point_mass({"w": mean})
    server = fb.Server(start, fusion=rule)
    server.begin(fb.RoundPlan(0, tuple(range(clients))))
    moved = [fb.GaussianPosterior({"w": mean + 0.01 * i}, start.variance) for i in range(5)]
    messages, seconds = [packed(each) for each in moved], 0.0
    for client in range(clients):
        began = time.perf_counter()
        posterior, buffers = posterior_in(unpacked(messages[client % 5]), f"client {client}")
        server.admit(fb.ClientUpdate(client, 10, posterior, buffers=buffers))
        seconds += time.perf_counter() - began
    began = time.perf_counter()
    result = server.finish()
    seconds += time.perf_counter() - began
    return Round(seconds, *(1e6 * result.figures[f"megabytes_{way}"] / clients for way in ("up", "down")))


def slopes(rule: str, repeats: int) -> tuple[float, float, float, float]:
    """Return seconds per client, seconds per client and parameter, and bytes per parameter, up and down."""
    many = [a_round(rule, *MANY) for _ in range(repeats)]
    large = [a_round(rule, *LARGE) for _ in range(repeats)]
    slow, wide = (statistics.median(each.seconds for each in rounds) for rounds in (many, large))
    table = torch.tensor([[MANY[0], MANY[0] * MANY[1]], [LARGE[0], LARGE[0] * LARGE[1]]], dtype=torch.float64)
    client, parameter = torch.linalg.solve(table, torch.tensor([slow, wide], dtype=torch.float64)).tolist()
    return client, parameter, large[0].up / LARGE[1], large[0].down / LARGE[1]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with quietly():
        measured = {name: slopes(rule, repeats) for name, rule in RULES.items()}
    rows = [
        [name, f"{up:.0f}", f"{down:.0f}", f"{1e6 * client:.0f}", f"{1e9 * parameter:.2f}"]
        for name, (client, parameter, up, down) in measured.items()
    ]
    print(f"torch {torch.__version__}, one thread, medians of {repeats}\n")
    head = ["fusion", "bytes per parameter, up", "down", "server, µs per client", "ns per client and parameter"]
    print(markdown_table(head, rows) + "\n")
    rows = []
    for what, (_, parameters, cohort) in FEDERATIONS.items():
        for name, (client, parameter, up, down) in measured.items():
            seconds = {
                "a client's line": parameters * (up + down) / WIDE,
                "the server's line": cohort * parameters * (up + down) / LONG,
                "its processor": cohort * (client + parameters * parameter),
            }
            memory = parameters * (KEPT[name][0] + cohort * KEPT[name][1]) / 1e9
            first = "its memory" if memory > MEMORY else max(seconds, key=seconds.__getitem__)
            sent = f"{parameters * up / 1e6:,.1f}", f"{cohort * parameters * up / 1e9:,.0f}"
            rows.append([what, name, *sent, *(f"{each:,.1f}" for each in (*seconds.values(), memory)), first])
    head = ["federation", "fusion", "MB up, a client", "GB up, a round", "client's line, s", "server's line, s"]
    print(markdown_table([*head, "server's processor, s", "its memory, GB", "binds first"], rows))


if __name__ == "__main__":
    main()
