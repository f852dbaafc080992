"""Fuses cohorts by every rule in one of several processes: ``python fusions.py RANK FOLDER``."""

import sys
from pathlib import Path

import torch
from torch.distributed import FileStore

from lightning_fedbayes import GaussianPosterior
from lightning_fedbayes.core.gloo import GlooCollective
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.fusion import (
    FusionRule,
    NearestNeighbourMixing,
    NormClipping,
    Reliability,
    SumRule,
    get_rule,
)
from lightning_fedbayes.server.aggregation import Aggregation

KINDS = ("weighted_average", "linear_pool", "gaussian_fit", "dwc", "coordinate_median", "krum", "icov_vb", "fedadam")
WEIGHTINGS = ("train_size", "distance", "max_discrepancy", lambda facts: [1 + fact.num_examples for fact in facts])
SPREADS = {"uneven": [0, 0, 1, 0, 0, 1, 0], "one without": [2, 2, 0, 2, 2, 2, 2], "one each": [0, 1]}
"""The process of each client."""


SHAPES = {"a": (4, 3), "b": (5,), "point": (2,), "scalar": ()}
WIDTHS = (("a", 0.1), ("b", 0.1), ("point", 0.0), ("scalar", 0.1))


class Whole(FusionRule):
    """A user's rule that needs whole clients: the one of the smallest norm."""

    def fuse(self, posteriors, weights, previous):
        return min(posteriors, key=lambda posterior: float(posterior.flatten()[0].norm()))


class Largest(SumRule):
    """A user's rule with a way of its own to add up: the largest of the clients."""

    def update(self, statistics, mean, variance, weight):
        self.merge(statistics, {"largest": mean})

    def merge(self, statistics, other):
        largest = other["largest"]
        statistics["largest"] = torch.maximum(statistics.get("largest", largest), largest)

    def compute(self, statistics, like, previous):
        return statistics["largest"], torch.zeros_like(statistics["largest"])


def rules():
    yield from ((name, get_rule(name)) for name in KINDS)
    yield from (
        ("mixed median", NearestNeighbourMixing("coordinate_median")),
        ("clipped conflation", NormClipping("conflation")),
        ("clipped icov_vb", NormClipping("icov_vb")),
        ("reliable pool", Reliability("ivar_vb", then="linear_pool")),
        ("reliable whole", Reliability("ivar_vb", then=Whole())),
        ("whole", Whole()),
        ("largest", Largest()),
    )


def posterior(seed):
    random = torch.Generator().manual_seed(seed)
    mean = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return GaussianPosterior(mean, {name: width * torch.rand(SHAPES[name], generator=random) for name, width in WIDTHS})


def updates(clients):
    for client in range(clients):
        buffers = {"count": torch.tensor(client), "mean": torch.full((2,), float(client))}
        yield ClientUpdate(client, 5 + client**2, posterior(client), buffers)


def fused(rule, weighting, collective, spread):
    """Result of two rounds, so that rules with a state use it."""
    state = rule.init()
    previous = GaussianPosterior(
        posterior(99).mean, {key: 10 * width * torch.ones(SHAPES[key]) for key, width in WIDTHS}
    )
    result = None
    for _ in range(2):
        buffers = {"count": torch.tensor(0), "mean": torch.zeros(2)}
        fusion = Aggregation(rule, weighting, previous, buffers, state, collective)
        for update in updates(len(spread)):
            if collective.size == 1 or spread[update.client] == collective.rank:
                fusion.add(update)
        result = fusion.finish()
        state = result.state
    return result


def everything(collective, spread):
    results = {}
    for name, rule in rules():
        for number, weighting in enumerate(WEIGHTINGS if rule.uses_weights else WEIGHTINGS[:1]):
            results[name, number] = fused(rule, weighting, collective, spread)
    return results


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    for name, spread in SPREADS.items():
        size = max(spread) + 1
        if rank < size:
            here = GlooCollective(FileStore(str(folder / f"{name}.store"), size), rank, size)
            torch.save(everything(here, spread), folder / f"{name}.{rank}.pt")
