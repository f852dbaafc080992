"""Collective operations of processes, which are threads of this one."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from lightning_fedbayes import GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.exchange import ALONE, Reduction, merge_statistics
from lightning_fedbayes.core.gloo import GlooCollective
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.fusion import FusionRule, NearestNeighbourMixing, NormClipping, Reliability, SumRule, get_rule
from lightning_fedbayes.server.aggregation import Aggregation
from tests.federations import assert_close
from tests.fusion.strategies import RULES

COUNT = 3


@pytest.fixture(name="here")
def processes():
    store = HashStore()
    return everywhere(lambda rank: GlooCollective(store, rank, COUNT), range(COUNT))


def everywhere(action, these):
    """Return the result of ``action`` in each process, all at once."""
    with ThreadPoolExecutor(len(these)) as threads:
        return list(threads.map(action, these))


def test_each_process_receives_the_value_for_it(here):
    received = everywhere(lambda process: process.all_to_all([(process.rank, other) for other in range(COUNT)]), here)
    assert received == [[(other, rank) for other in range(COUNT)] for rank in range(COUNT)]


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_arrays_arrive_bit_by_bit(here, size):
    arrays = [np.random.default_rng(rank).normal(size=(2, size)) for rank in range(COUNT)]
    gathered = everywhere(lambda process: process.all_gather({"x": arrays[process.rank], "of": process.rank}), here)
    for received in gathered:
        assert [each["of"] for each in received] == list(range(COUNT))
        for each, array in zip(received, arrays, strict=True):
            assert np.array_equal(each["x"], array)
            assert each["x"].flags.writeable


def test_sums_are_the_same_bits_everywhere(here):
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(COUNT)]
    for total in everywhere(lambda process: process.all_reduce(parts[process.rank]), here):
        torch.testing.assert_close(total, parts[0] + parts[1] + parts[2], rtol=0, atol=0)
    assert parts[0].eq(ALONE.all_reduce(parts[0])).all()


def add(statistics, other):
    for name, value in other.items():
        statistics[name] = statistics[name] + value if name in statistics else value


@pytest.mark.parametrize("totals_only", [False, True])
def test_merged_statistics_are_sums_over_all_processes_in_two_calls(here, totals_only):
    """Process 2 has no client; "zero" is 0 everywhere and not sent."""
    parts = [
        {
            "weight": torch.tensor(1.0 + rank, dtype=torch.float64),
            "vector": torch.arange(7, dtype=torch.float64) * (1 + rank),
            "zero": torch.zeros(7, dtype=torch.float64),
        }
        for rank in range(2)
    ] + [{}]
    other = [{"short": torch.full((2,), 1.0 + rank, dtype=torch.float64)} for rank in range(COUNT)]
    before = here[0].calls
    merged = everywhere(
        lambda process: merge_statistics(
            [Reduction(parts[process.rank], 7, add, totals_only), Reduction(other[process.rank], 2, add)], process
        ),
        here,
    )
    assert here[0].calls - before == 2
    for first, second in merged:
        assert float(first["weight"]) == 3
        vector = 3 * torch.arange(7, dtype=torch.float64)
        torch.testing.assert_close(first["vector"], vector.sum() if totals_only else vector, rtol=0, atol=0)
        assert not first["zero"].any()
        torch.testing.assert_close(second["short"], torch.full((2,), 6.0, dtype=torch.float64), rtol=0, atol=0)


SUMS = ("weighted_average", "linear_pool", "gaussian_fit", "dwc", "fedadam")
OTHERS = [name for name in RULES if not isinstance(get_rule(name), SumRule)]
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
    yield from ((name, get_rule(name)) for name in (*SUMS, *OTHERS))
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
    previous = GaussianPosterior(posterior(99).mean, {k: 10 * width * torch.ones(SHAPES[k]) for k, width in WIDTHS})
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


CASES = [(name, i) for name, rule in rules() for i in range(len(WEIGHTINGS) if rule.uses_weights else 1)]


@pytest.fixture(scope="module", params=SPREADS)
def both(request):
    """Results of every rule in one process, and in each of several."""
    spread, store = SPREADS[request.param], HashStore()
    size = max(spread) + 1
    several = everywhere(lambda rank: everything(GlooCollective(store, rank, size), spread), range(size))
    return everything(ALONE, spread), several


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weighting"), CASES)
def test_fusion_does_not_depend_on_where_clients_are(both, name, weighting):
    alone, several = both
    expected = alone[name, weighting]
    for results in several:
        result = results[name, weighting]
        assert_close(result.posterior, expected.posterior, 1e-6, 1e-9)
        torch.testing.assert_close(result.buffers, expected.buffers, rtol=1e-6, atol=1e-9)
        assert result.weights == pytest.approx(expected.weights, rel=1e-6, abs=1e-12)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-12)
        assert (result.inferred, result.excluded.keys()) == (expected.inferred, expected.excluded.keys())
        torch.testing.assert_close(result.state, expected.state, rtol=1e-5, atol=1e-7)


def test_numbers_of_examples_are_bounded_alike_in_every_process(here):
    said = {update.client: update.num_examples for update in updates(8)}  # whose lower median is 14

    def round_of(collective):
        buffers = {"count": torch.tensor(0), "mean": torch.zeros(2)}
        server = Server(posterior(99), buffers, fusion="weighted_average", collective=collective)
        server.begin(RoundPlan(0, tuple(said)))
        server.hear(said)
        for update in updates(8):
            if collective.size == 1 or update.client % COUNT == collective.rank:
                server.admit(update)
        return server.finish().weights, server.state_dict()["guard"]["claims"].tolist()

    weights = {client: min(number, 28) / 139 for client, number in said.items()}
    assert [round_of(ALONE), *everywhere(round_of, here)] == [(pytest.approx(weights), [*said.values()])] * 4


def test_an_error_in_one_shard_is_raised_in_every_process(here):
    """Only the last parameter, which the last process has, is less certain than the previous posterior."""
    like = posterior(99)
    variance = {name: torch.full(shape, 1e3) for name, shape in SHAPES.items()}
    previous = GaussianPosterior(like.mean, variance | {"scalar": torch.tensor(10.0)})
    sent = GaussianPosterior(like.mean, {**like.variance, "point": torch.ones(2), "scalar": torch.tensor(50.0)})

    def one(process):
        fusion = Aggregation(NearestNeighbourMixing("dwc"), "equal", previous, {}, {}, process)
        for client in range(process.rank, 7, COUNT):
            fusion.add(ClientUpdate(client, 10, sent))
        with pytest.raises(FusionError, match="fused precision is not positive"):
            fusion.finish()
        return True

    assert everywhere(one, here) == [True] * COUNT
