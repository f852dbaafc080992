"""The guard of a round: impossible variances are refused, and no client counts as much more than the median one."""

import copy
import math
import re

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes import ClientUpdate, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.methods import FedBuff
from lightning_fedbayes.server.guard import Guard
from tests.federations import assert_close

SHAPES = {"body": (40,), "head": (20,)}
SIZE = 400
ZEROS = {n: torch.zeros(s) for n, s in SHAPES.items()}
START = GaussianPosterior(ZEROS, {**ZEROS, "body": torch.full((40,), 0.01)})
DIRECTION = {n: torch.randn(s, generator=torch.Generator().manual_seed(len(n))) for n, s in SHAPES.items()}
AVERAGES = ("weighted_average", "weighted_sum", "linear_pool", "wasserstein_barycenter", "log_variance_average")
SUMS = ("reverse_kl_barycenter", "conflation", "weighted_conflation", *AVERAGES)


def honest(client, examples=10):
    """An update along a common direction, with noise; variances shrink by a little."""
    draws = torch.Generator().manual_seed(100 + client)
    mean = {n: DIRECTION[n] + 0.1 * torch.randn(s, generator=draws) for n, s in SHAPES.items()}
    body = 0.009 * (1 + 0.1 * torch.rand(40, generator=draws))
    return ClientUpdate(client, examples, GaussianPosterior(mean, {"body": body, "head": torch.zeros(20)}))


def lie(client, mean=1.0, variance=1.0, examples=10):
    """An honest update with means and variances multiplied."""
    q = honest(client).posterior
    means, variances = {n: m * mean for n, m in q.mean.items()}, {n: v * variance for n, v in q.variance.items()}
    return ClientUpdate(client, examples, GaussianPosterior(means, variances))


def round_of(rule, updates, start=START, **options):
    """The result, and what became of the updates, whose tensors are overwritten once they are admitted."""
    server = Server(start, fusion=rule, **options)
    server.begin(RoundPlan(0, tuple(update.client for update in updates)))
    outcomes = []
    for sent in copy.deepcopy(updates):
        outcomes.append(server.admit(sent))
        for tensor in (*sent.posterior.mean.values(), *sent.posterior.variance.values()):
            tensor.fill_(7.0)
    return server.finish(), outcomes


def fuse(*arguments, **options):
    """The posterior of a round, and what became of its updates."""
    result, outcomes = round_of(*arguments, **options)
    return result.posterior, outcomes


def length(posterior, name):
    return float((posterior.mean[name] @ DIRECTION[name]) / (DIRECTION[name] @ DIRECTION[name]))


IMPOSSIBLE = {
    "none": (0.0, "variance of 'body' is 0, where the global posterior has 0.01.*factor of 1e.12.*max_influence=None"),
    "tiny": (1e-20, "variance of 'body' is 9.*e-23"),
    "huge": (1e20, "variance of 'body' is 9"),
}


@pytest.mark.parametrize(("factor", "says"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("rule", ["reverse_kl_barycenter", "coordinate_median", "ivar_vb"])
def test_an_impossible_variance_is_refused_and_the_others_are_fused(rule, factor, says):
    others = [honest(k) for k in range(4)]
    fused, outcomes = fuse(rule, [*others, lie(4, variance=factor)])
    assert [outcome.error is None for outcome in outcomes] == [True] * 4 + [False]
    assert re.search(says, str(outcomes[4].error))
    expected, _ = fuse(rule, others)
    assert torch.equal(fused.mean["body"], expected.mean["body"])


def test_a_variance_where_the_network_has_none_is_refused():
    sent = honest(2).posterior
    sent = GaussianPosterior(sent.mean, {**sent.variance, "head": torch.full((20,), 0.1)})
    _, outcomes = fuse("reverse_kl_barycenter", [honest(0), honest(1), ClientUpdate(2, 10, sent)])
    assert "'head' has a variance" in str(outcomes[2].error)
    assert "deterministic in the global model" in str(outcomes[2].error)


@pytest.mark.parametrize("rule", SUMS)
@pytest.mark.parametrize("sizes", [[10] * 10, [600, 200, 100, 50, 50, 30, 30, 20, 20, 10]], ids=["equal", "skewed"])
def test_honest_clients_are_fused_bit_for_bit(rule, sizes):
    updates = [honest(k, size) for k, size in enumerate(sizes)]
    guarded, _ = fuse(rule, updates)
    plain, _ = fuse(rule, updates, safeguards=fb.Safeguards(max_influence=None))
    assert_close(guarded, plain)


LIES = {f"mean × {m:g}, variance × {v:g}": (m, v) for m in (1.0, -1.0, -10.0, 1e30) for v in (1e-9, 1.0, 1e9)}


@pytest.mark.parametrize(("mean", "variance"), LIES.values(), ids=LIES)
@pytest.mark.parametrize(("rule", "place"), list(zip(SUMS, [0, 9] * len(SUMS))))
def test_one_client_of_ten_moves_no_sum_far(rule, mean, variance, place):
    """9 honest updates of length 1, one of at most 2 · (1 + 2/√n) against them, at a share of at most 2.2 / 11.2."""
    updates = [honest(k) for k in range(10)]
    updates[place] = lie(place, mean, variance)
    fused, outcomes = fuse(rule, updates)
    assert all(outcome.error is None for outcome in outcomes)
    expected, _ = fuse(rule, [update for update in updates if update.client != place])
    for name in SHAPES:
        assert 0.4 < length(fused, name) < 1.6
        assert float((fused.mean[name] - expected.mean[name]).norm() / expected.mean[name].norm()) < 0.6
    if rule != "linear_pool":  # whose variance contains the clients' disagreement
        ratio = fused.variance["body"] / expected.variance["body"]
        assert 0.5 < float(ratio.min()) <= float(ratio.max()) < 1.5
    unguarded, _ = fuse(rule, updates, safeguards=fb.Safeguards(max_influence=None))
    if mean == -10 and variance == 1:
        assert length(unguarded, "body") < 0.1, "without the guard the bound above is broken"


def test_every_variance_is_clipped_at_the_end_of_the_limits_that_it_exceeds():
    """Sureness 4 and vagueness 5 allow a quarter to five times the global variance."""
    body = 0.01 * torch.tensor([1e-3, 0.5, 1.0, 3.0, 1e3]).repeat(8)
    update = ClientUpdate(0, 10, GaussianPosterior(ZEROS, {**ZEROS, "body": body}))
    guard, limits = Guard(START, {"body"}, 2.0), torch.tensor([[1e9], [1e9], [4.0], [5.0]]).double().expand(4, 2)
    _, variance = guard.clip(update, limits, guard.sizes_of([update])[0])
    expected = 0.01 * torch.tensor([0.25, 0.5, 1.0, 3.0, 5.0], dtype=torch.float64).repeat(8)
    torch.testing.assert_close(variance[:40], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("rule", ["weighted_average", "reverse_kl_barycenter"])
def test_few_clients_are_bounded_by_the_rounds_before(rule, count):
    """Honest updates of length 1, .9, .9², …: one of length 10 in the fourth round counts as 4 · .9²."""
    start = GaussianPosterior.point_mass({"w": torch.zeros(SIZE, dtype=torch.float64)})
    server, one = Server(start, fusion=rule), torch.full((SIZE,), SIZE**-0.5, dtype=torch.float64)
    for number in range(4):
        server.begin(RoundPlan(number, tuple(range(count))))
        before = server.posterior.mean["w"]
        for client in range(count):
            length = 10.0 if number == 3 and client == 0 else 0.9**number
            server.admit(ClientUpdate(client, 10, GaussianPosterior.point_mass({"w": before + length * one})))
        resumed = server.state_dict()
        result = server.finish()
        assert result.aggregate.outlying == ((0,) if number == 3 else ())
        assert result.figures["outlying_clients"] == (number == 3)
        if number == 1:  # what is usual outlives the server
            state, server = server.state_dict(), Server(start, fusion=rule)
            server.load_state_dict(state)
    assert resumed["guard"]["sizes"].shape == (2,)
    moved = (result.posterior.mean["w"] - before).norm()
    assert float(moved) == pytest.approx(((count - 1) * 0.9**3 + 4 * 0.9**2) / count, rel=1e-6)


ALLOWED = 2 * (1 + 2 / math.sqrt(10_000))


@pytest.mark.parametrize(
    ("sent", "length"),
    [
        ([(1, 10)] * 6 + [(100, 10)], (6 + ALLOWED) / 7),  # twice the median one
        ([(1, 10)] * 5 + [(100, 10)], (5 + 4) / 6),  # four times the second largest of six
        ([(1, 10), (100, 10)], 101 / 2),  # nobody knows which of two is usual
        # what counts is size times weight: the mean weight is 9.5
        ([(1, 10)] * 8 + [(100, 5), (100, 10)], (80 + 5 * 1.9 * ALLOWED + 10 * ALLOWED) / 95),
    ],
    ids=["seven", "six", "two", "a light one"],
)
def test_a_longer_update_is_clipped_to_twice_the_median_one(sent, length):
    """The closed form, of clients of some (size, examples)."""
    start = GaussianPosterior.point_mass({"w": torch.zeros(10_000, dtype=torch.float64)})
    step = torch.ones(10_000, dtype=torch.float64)
    points = [GaussianPosterior.point_mass({"w": step * size}) for size, _ in sent]
    updates = [ClientUpdate(k, sent[k][1], point) for k, point in enumerate(points)]
    fused, _ = fuse("weighted_average", updates, start)
    torch.testing.assert_close(fused.mean["w"], step * length)


@pytest.mark.parametrize("wrong", [0.5, -1.0, math.nan, "much"])
def test_a_bound_below_one_is_refused(wrong):
    with pytest.raises(FederationError, match=r"max_influence=.*None turns the guard off"):
        fb.Safeguards(max_influence=wrong)


@pytest.mark.parametrize("count", [6, 20])
@pytest.mark.parametrize("attacked", [(), (0, 9)])
def test_a_large_network_is_judged_like_a_small_one(monkeypatch, count, attacked):
    """A large client is measured at once, and a copy of it waits; small ones are measured in groups."""
    updates = [lie(k, -1e6) if k in attacked else honest(k) for k in range(count)]
    expected, _ = fuse("linear_pool", updates)
    monkeypatch.setattr("lightning_fedbayes.server.aggregation.MOST_AT_ONCE", 10)
    fused, _ = fuse("linear_pool", updates)
    assert_close(fused, expected)


WIDE = {"body": (300, 500), "bias": (7,), "empty": (0,), "head": (140_000,)}
DETERMINISTIC = GaussianPosterior.point_mass({n: torch.ones(s) for n, s in WIDE.items()})


def wide(client, factor=1.0):
    draws = torch.Generator().manual_seed(client)
    mean = {n: 1 + factor * (1 + torch.randn(s, generator=draws)) for n, s in WIDE.items()}
    return ClientUpdate(client, 10 + client, GaussianPosterior.point_mass(mean))


@pytest.mark.parametrize("count", [5, 17])
@pytest.mark.parametrize("attacked", [(), (0, 9)])
@pytest.mark.parametrize("rule", ["reverse_kl_barycenter", "linear_pool"])
def test_a_large_deterministic_network_is_fused_in_pieces_as_in_one_vector(monkeypatch, rule, attacked, count):
    updates = [wide(k, -50.0 if k in attacked else 1.0) for k in range(count)]
    result, outcomes = round_of(rule, updates, DETERMINISTIC)
    assert all(outcome.error is None for outcome in outcomes)
    monkeypatch.setattr("lightning_fedbayes.server.aggregation.PIECE", 10**9)  # each client is copied into one vector
    expected, _ = round_of(rule, updates, DETERMINISTIC)
    assert result.figures["disagreement"] == pytest.approx(expected.figures["disagreement"], rel=1e-9)
    assert result.figures["outlying_clients"] == expected.figures["outlying_clients"]
    assert (result.figures["outlying_clients"] > 0) == bool(attacked)
    tolerance = 1e-7 if attacked else 0
    assert_close(result.posterior, expected.posterior, tolerance, tolerance)


def test_a_tensor_that_most_clients_do_not_move_may_move_as_far_per_entry_as_the_whole_network():
    """Of 60 entries the head has 20: twice the median whole length times the root of a third, and 1 + 2/√20."""
    still = []
    for client in range(9):
        q = honest(client).posterior
        still.append(ClientUpdate(client, 10, GaussianPosterior({**q.mean, "head": torch.zeros(20)}, q.variance)))
    moved, draw = 50 * DIRECTION["head"], still[0].posterior
    still[0] = ClientUpdate(0, 10, GaussianPosterior({**draw.mean, "head": moved}, draw.variance))
    whole = sorted(float(torch.cat([*each.posterior.mean.values()]).norm()) for each in still)[4]
    found, _ = fuse("weighted_average", still)
    bound = 2 * whole * (20 / 60) ** 0.5 * (1 + 2 / 20**0.5)
    assert 9 * float(found.mean["head"].norm()) == pytest.approx(bound, rel=1e-5)


def without_rounds(order, mean=1.0, variance=1.0):
    """Moves, the first of seven clients, and log2 of the change of variances. All but client 0 send 1 and 0 of them."""
    one, before = torch.full((SIZE,), SIZE**-0.5, dtype=torch.float64), torch.full((SIZE,), 0.01).double()
    server = Server(GaussianPosterior({"w": 0 * one}, {"w": before}), fusion="weighted_average", late=FedBuff())
    moves = []
    for number, cohort in enumerate([tuple(range(7)), *((client,) for client in order)]):
        server.begin(RoundPlan(number, cohort, clients=10))
        at, width = server.posterior.mean["w"], server.posterior.variance["w"]
        for client in cohort:
            move, factor = (1.0, 1.0) if client else (mean, variance)
            sent = GaussianPosterior({"w": at + move * one}, {"w": factor * width})
            assert server.admit(ClientUpdate(client, 10, sent), number).error is None
        server.finish()
        moves.append(float((server.posterior.mean["w"] - at) @ one))
    return moves[1:], float((server.posterior.variance["w"] / before).log2().mean())


LAPS, MOST, ALL = 6, 2 * (1 + 2 / SIZE**0.5), range(1, 10)
OFTEN = [each for _ in range(LAPS) for client in ALL for each in (0, client)]


@pytest.mark.parametrize(("mean", "factor"), [(-100.0, 1.0), (100.0, 1.0), (1.0, 1.0), (1.0, 1e-9), (1.0, 1e9)])
def test_a_client_that_is_heard_nine_times_as_often_counts_as_one_message_may(mean, factor):
    """In each lap of the others, whatever its length and variances, and twice at first; the others count in full."""
    moves, change = without_rounds(OFTEN, mean, factor)
    assert moves[1::2] == pytest.approx([1.0] * (9 * LAPS))
    found, sign = (sum(moves[::2]) / MOST, mean) if factor == 1 else (change, factor - 1)
    assert LAPS - 1 < found * math.copysign(1, sign) < 1.03 * (LAPS + 2)


def test_what_a_client_has_missed_it_cannot_make_up_for():
    assert -1.02 * 2 * MOST < sum(without_rounds([*ALL] * LAPS + [0] * 20, -100.0)[0][-20:]) < -MOST


@pytest.mark.parametrize("order", [[0, *ALL[:5], 0, *ALL[5:]] * LAPS, [*ALL] * 2 + [1, 2, 3] * 60])
def test_honest_clients_count_in_full_in_the_end(order):
    """Twice as fast as the others, and the last ones where most have left."""
    moves, _ = without_rounds(order)
    assert min(moves) > (0 if len(order) > 100 else 0.999)
    assert moves[-30:] == pytest.approx([1.0] * 30)


SAID = [3, 40, 20, 300_000_000, 10, 50, 21, 2]


def counted(order, server, told=True, send=honest, said=SAID, beside=lambda client: {}):
    """The result of a round of clients who say these numbers of examples."""
    server.begin(RoundPlan(server.rounds, tuple(sorted(order)), clients=len(said)))
    if told:
        server.hear({client: said[client] for client in order})
    for client in order:
        assert server.admit(ClientUpdate(client, said[client], send(client).posterior, beside(client))).error is None
    return server.finish()


def sizes(client):
    return {"size": torch.tensor(float(SAID[client]))}


@pytest.mark.parametrize("fusion", ["weighted_average", "reverse_kl_barycenter", "geometric_median", "fedadam"])
@pytest.mark.parametrize("order", [[*range(8)], [3, 1, 7, 0, 6, 2, 5, 4]])
def test_no_number_of_examples_counts_as_more_than_twice_the_median_one(fusion, order):
    """Of eight clients the lower median is 20. Buffers count alike. Who was told once is told no more."""
    trusting = {"weighting": lambda facts: [each.num_examples for each in facts]}
    bounded, believed, asked = (
        Server(START, {"size": torch.zeros(())}, fusion=fusion, **options)
        for options in ({}, {"safeguards": fb.Safeguards(max_influence=None)}, trusting)
    )
    result = counted(order, bounded, beside=sizes)
    expected = counted(order, believed, said=[min(each, 40) for each in SAID], beside=sizes)
    assert result.bounded == {3: "says 300,000,000, counts as 40", 5: "says 50, counts as 40"}
    assert result.weights == pytest.approx(expected.weights)
    assert_close(bounded.posterior, believed.posterior, 1e-5, 1e-7)
    torch.testing.assert_close(bounded.buffers["size"], believed.buffers["size"])
    assert [counted(order, each, beside=sizes).bounded for each in (bounded, asked)] == [{}, {}]


@pytest.mark.parametrize("late", [None, FedBuff()])
@pytest.mark.parametrize("told", [True, False])
def test_numbers_of_few_clients_are_compared_with_what_all_have_said_last(late, told):
    """4 clients of 8, the others, and 2 of them, at a server that was stored, too. Seven have a median of their own."""
    servers = [Server(START, fusion="weighted_average", late=late) for _ in range(2)]
    assert counted([4, 5, 6, 7], servers[0]).bounded == {}
    assert ("counts as 40" in counted([0, 1, 2, 3], servers[0], told).bounded.get(3, "")) == told
    servers[1].load_state_dict(servers[0].state_dict())
    for server in servers:
        assert counted([5, 3], server, told).weights == {3: 0.5, 5: 0.5}
    assert torch.equal(*(server.state_dict()["guard"]["claims"] for server in servers))
    seven = counted(range(1, 8), servers[0], told).weights
    assert seven[3] / seven[1] == pytest.approx(42 / 40 if told and late is None else 1)
    servers[0].begin(RoundPlan(4, (0,)))
    servers[0].admit(honest(0))
    with pytest.raises(FederationError, match="between begin and the first admit"):
        servers[0].hear({})


@pytest.mark.parametrize("rule", SUMS)
def test_a_client_that_claims_a_million_times_its_examples_and_moves_as_far_counts_twice(rule):
    """In the first round: 9 of length 1, and one of at most 2 · (1 + 2/√20) against them at a share of 2 / 11."""
    server = Server(START, fusion=rule)
    counted(range(10), server, send=lambda k: honest(k) if k else lie(k, -1e6), said=[10**7, *[10] * 9])
    assert all(0.25 < length(server.posterior, name) < 1 for name in SHAPES)


@pytest.mark.parametrize(
    ("weighting", "most"), [("train_size", (90 * 5 + 20 * 60) / 110), ("equal", (9 * 5 + 60) / 10)]
)
def test_steps_of_examples_that_do_not_count_do_not_count(weighting, most):
    """5 steps of 10 examples, and a million times as many; a number may be 2 · (1 + 2) times as large by example."""
    server = Server(START, fusion="fednova", weighting=weighting)
    said = [10**7, *[10] * 9]
    counted(range(10), server, said=said, beside=lambda k: {"method/steps": torch.tensor(said[k] / 2)})
    assert float(server.buffers["method/steps"]) == pytest.approx(most)
