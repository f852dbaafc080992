"""Rules that are not sums give the same whether one process has all clients or several, threads here, share them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_fedbayes import GaussianPosterior, fusion
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.exchange import Collective
from lightning_fedbayes.fusion.accumulator import fuse_distributed

from .strategies import RULES, assert_same

pytestmark = pytest.mark.slow

PROCESSES = 3
WHERE = [2, 0, 0, 2, 0, 2, 2]
"""Process of each client; process 1 has none."""
SHAPES = {"a": (4, 3), "b": (5,), "scalar": ()}
NUMBERS = (0, 1, 3, 4, 6, 7, 9)


class Threads(Collective):
    """One of several threads that meet at a barrier."""

    def __init__(self, rank, inbox, barrier):
        self.rank, self.size, self._inbox, self._barrier = rank, PROCESSES, inbox, barrier

    def all_to_all(self, values):
        self._inbox[self.rank] = list(values)
        self._barrier.wait(60)
        received = [self._inbox[other][self.rank] for other in range(self.size)]
        self._barrier.wait(60)
        return received


class Whole(fusion.FusionRule):
    """A rule that needs whole clients: the one of the smallest norm."""

    def fuse(self, posteriors, weights, previous):
        return min(posteriors, key=lambda posterior: float(posterior.flatten()[0].norm()))


CASES = {name: fusion.get_rule(name) for name in RULES if not isinstance(fusion.get_rule(name), fusion.SumRule)} | {
    "mixed median": fusion.NearestNeighbourMixing("coordinate_median"),
    "clipped icov_vb": fusion.NormClipping("icov_vb"),
    "reliable pool": fusion.Reliability("ivar_vb", then="linear_pool"),
    "reliable whole": fusion.Reliability("ivar_vb", then=Whole()),
    "whole": Whole(),
}


def clients():
    random = torch.Generator().manual_seed(0)
    for _ in range(len(WHERE) + 1):
        mean = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in SHAPES.items()}
        yield GaussianPosterior(mean, {name: torch.rand_like(value) for name, value in mean.items()})


def several(rule, cohort, state):
    """The result in each process."""
    inbox, barrier = [None] * PROCESSES, threading.Barrier(PROCESSES)

    def one(rank):
        own = [k for k, process in enumerate(WHERE) if process == rank]
        posteriors, names = [cohort.posteriors[k] for k in own], tuple(cohort.clients[k] for k in own)
        part = fusion.Cohort(posteriors, cohort.weights[own], cohort.previous, names)
        return fuse_distributed(rule, part, cohort.posteriors[0], state, Threads(rank, inbox, barrier))

    with ThreadPoolExecutor(PROCESSES) as pool:
        return [each.exception() or each.result() for each in [pool.submit(one, rank) for rank in range(PROCESSES)]]


def cohort_of(*posteriors, previous):
    weights = torch.arange(1.0, len(posteriors) + 1, dtype=torch.float64)
    return fusion.Cohort(posteriors, weights / weights.sum(), previous, NUMBERS)


@pytest.mark.parametrize("rule", CASES.values(), ids=CASES)
def test_fusion_does_not_depend_on_where_clients_are(rule):
    *posteriors, previous = clients()
    cohort, state = cohort_of(*posteriors, previous=previous), rule.init()
    for _ in range(2):  # the second with the state of the first
        expected = rule.apply(cohort, state)
        for result in several(rule, cohort, state):
            assert_same(result.posterior, expected.posterior, rtol=1e-6, atol=1e-12)
            assert result.reliability == pytest.approx(expected.reliability, rel=1e-6, abs=1e-12)
            assert result.excluded.keys() == expected.excluded.keys()
            torch.testing.assert_close(result.state, expected.state)
        state = expected.state


def test_an_error_in_one_shard_is_raised_in_every_process():
    """Only the last parameter, which the last process has, is less certain than the previous posterior."""
    *posteriors, previous = clients()
    for posterior in posteriors:
        posterior.variance["scalar"].fill_(50.0)
    variance = {"a": torch.full((4, 3), 1e3), "b": torch.full((5,), 1e3), "scalar": torch.tensor(10.0)}
    before = GaussianPosterior(previous.mean, {name: value.double() for name, value in variance.items()})
    errors = several(fusion.NearestNeighbourMixing("dwc"), cohort_of(*posteriors, previous=before), {})
    assert all(isinstance(error, FusionError) and "fused precision is not positive" in str(error) for error in errors)
