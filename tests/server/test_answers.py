"""Answers of clients to changes of the model: who sends the opposite of its result is left out, nobody else."""

import copy
import math
from statistics import NormalDist

import pytest
import torch
from torch.distributed import HashStore

from lightning_fedbayes import ClientUpdate, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.core.exchange import ALONE
from lightning_fedbayes.core.gloo import GlooCollective
from lightning_fedbayes.core.messages import ClientFailure
from lightning_fedbayes.methods import Averaging
from lightning_fedbayes.server import aggregation, answers
from tests.core.test_gloo import everywhere
from tests.federations import assert_close

SIZE, CLIENTS = 60, 10
START = GaussianPosterior.point_mass({"a": torch.zeros(SIZE // 2, 1).double(), "b": torch.zeros(SIZE // 2).double()})
FLIPS = {0: -1.0}


def clients_of(seed, alike=0.0):
    """Curvatures A_k and optima o_k: a client has the loss (θ − o)ᵀA(θ − o) / 2, A of half rank and a common part."""
    draws = torch.Generator().manual_seed(seed)
    roots = torch.randn(CLIENTS, SIZE, SIZE // 2, dtype=torch.float64, generator=draws)
    common = torch.randn(SIZE, SIZE // 2, dtype=torch.float64, generator=draws)
    curvatures = ((1 - alike) * roots @ roots.mT + alike * common @ common.T) / SIZE
    return curvatures, torch.randn(CLIENTS, SIZE, dtype=torch.float64, generator=draws), draws


def run(seed, lies, rounds=20, noise=0.05, server=None, until=1000, scale=1.0, every=1, first=1.0):
    """Return client → rounds in which it is left out, and the server. ``lies``: client → factor of its moves."""
    curvatures, optima, draws = clients_of(seed, 0.5)
    server, out = server or Server(START, fusion="weighted_average"), {}
    for round in range(server.rounds, server.rounds + rounds):
        cohort = tuple(sorted(torch.randperm(CLIENTS, generator=draws)[: CLIENTS // every].tolist()))
        server.begin(RoundPlan(round, cohort, clients=CLIENTS))
        at = server.posterior.flatten()[0]
        for client in cohort:
            errors = noise * torch.randn(SIZE, dtype=torch.float64, generator=draws)
            move = scale * 0.5 * (-curvatures[client] @ (at - optima[client]) + errors)
            move *= lies.get(client, 1.0) if round < until else 1.0
            move *= first / lies[client] if first > 1 and client in lies and not round else 1.0
            server.admit(ClientUpdate(client, 10, server.posterior.unflatten(at + move, None)))
        for each in server.finish().outcomes:
            out.setdefault(each.client, []).append(round) if each.error is not None else None
    return out, server


@pytest.mark.parametrize("factor", [-1.0, -10.0, -1e6])
@pytest.mark.parametrize("seed", range(3))
def test_who_sends_the_opposite_is_left_out_within_five_rounds_and_nobody_else(seed, factor):
    out, _ = run(seed, {0: factor}, 60)
    assert out.keys() == {0}
    assert out[0][0] <= 4
    assert len(out[0]) >= 55
    assert run(seed, dict.fromkeys(range(3), factor))[0].keys() == {0, 1, 2}
    assert all(len(run(seed, {0: factor}, 60, first=first)[0][0]) >= 40 for first in (1e6, 1e14, 1e200))


@pytest.mark.parametrize("options", [{}, {"noise": 1.0}, {"scale": 1e-3}, {"scale": 2.0}, {"noise": 0.0}, {"every": 3}])
@pytest.mark.parametrize("seed", range(3))
def test_honest_unlike_clients_are_never_left_out(seed, options):
    """Also one whose moves are five times as long."""
    assert not run(seed, {3: 5.0}, 100, **options)[0]


@pytest.mark.parametrize("fusion", ["weighted_average", "coordinate_median"])
@pytest.mark.parametrize(("num", "at_once"), [(13, 0), (14, 0), (20, 2**16)])
def test_who_is_found_does_not_count_in_that_round_if_all_wait_for_one_another(fusion, num, at_once, monkeypatch):
    """Fewer than 14 wait, or of small networks more, and all for a median. Three processes find the same as one."""
    monkeypatch.setattr(aggregation, "MOST_MEASURED", at_once)
    (curvatures, optima, _), among = clients_of(0, 0.5), HashStore()

    def rounds(collective, until=20, fails=False):
        server, found = Server(START, fusion=fusion, collective=collective), []
        for round in range(until):
            at = server.begin(RoundPlan(round, tuple(range(num)))).posterior.flatten()[0]
            for k in range(collective.rank, num, collective.size):
                move = -0.5 * curvatures[k % CLIENTS] @ (at - optima[k % CLIENTS]) * FLIPS.get(k, 1.0)
                sent = ClientUpdate(k, 10, server.posterior.unflatten(at + move, None))
                server.admit(ClientFailure(k, ValueError()) if fails and not k and round == until - 1 else sent)
            found.append([each.client for each in server.finish().outcomes if each.error])
        return found, server.posterior

    found, fused = rounds(ALONE)
    first = found.index([0])
    assert first == 1 + (num == 14 and fusion == "weighted_average")
    for theirs, other in everywhere(lambda rank: rounds(GlooCollective(among, rank, 3)), range(3)):
        assert theirs == found
        assert_close(other, fused, 1e-9, 1e-12)
    assert torch.allclose(*(rounds(ALONE, first + 1, fails)[1].flatten()[0] for fails in (False, True)), 1e-9, 1e-12)


def test_who_stops_counts_again_and_who_begins_is_found():
    out, server = run(0, FLIPS, 90, until=10)
    assert 10 <= out[0][-1] < 80
    assert set(range(98, 190)) <= set(run(0, FLIPS, 100, server=server)[0][0])
    assert answers.opposed_of(run(0, FLIPS, 300, every=CLIENTS)[1].state_dict()["guard"]) == {0}  # alone in its rounds


def test_what_is_known_is_of_fading_sums():
    """By their definition: weighted means and covariances, by message. Client 0's moves are ten times as long."""
    draws = torch.Generator().manual_seed(0)
    messages = torch.randn(5, 8, 2, SIZE, dtype=torch.float64, generator=draws)
    messages[:, :, 0] /= messages[:, :, 0].norm(dim=2, keepdim=True)
    within, models = messages.unbind(2)
    moves, memory = within.clone(), {}
    moves[:, 0] *= 1 + math.log(10)
    messages = torch.stack([within, models], 2)
    messages[:, 0, 0] *= 10
    for each in messages:
        memory = answers.remembered("moves", memory, dict(enumerate(each)), 2.0)
    weights = (answers.DECAY ** torch.arange(4, -1, -1, dtype=torch.float64))[:, None, None]
    parts = [each - (weights * each).sum(0) / weights.sum() for each in (moves, models, within.sum(1, True) - within)]
    columns = answers.TO_MODEL, answers.TO_OTHERS, answers.OF_MOVES, answers.OF_MODEL, answers.OF_OTHERS
    for column, (x, y) in zip(columns, ((0, 1), (0, 2), (0, 0), (1, 1), (2, 2)), strict=True):
        expected = (weights * parts[x] * parts[y]).sum((0, 2))
        torch.testing.assert_close(memory["moves known"][:, column], expected, rtol=1e-5, atol=1e-6)
    few = answers.remembered("moves", memory, dict(enumerate(messages[0, :3])), 2.0)["moves known"][-3:, columns[-1]]
    assert torch.equal(few, answers.DECAY * memory["moves known"][:3, columns[-1]])  # too few others


def test_gradients_of_convex_losses_answer_against_the_model():
    curvatures, optima, draws = clients_of(1)
    models, memory = torch.randn(6, SIZE, dtype=torch.float64, generator=draws), {}
    for at in models:
        pairs = {k: torch.stack([-curvatures[k] @ (at - optima[k]), at]) for k in range(CLIENTS)}
        memory = answers.remembered("moves", memory, pairs, 2.0)
    assert bool((memory["moves known"][:, answers.TO_MODEL] < 0).all())


def test_a_resumed_server_leaves_out_the_same_and_order_and_processes_do_not_matter():
    _, server = run(0, FLIPS, 3)
    other = Server(START, fusion="weighted_average")
    other.load_state_dict(copy.deepcopy(server.state_dict()))
    assert run(0, FLIPS, 5, server=server)[0] == run(0, FLIPS, 5, server=other)[0] != {}
    heard = {k: torch.randn(2, SIZE, dtype=torch.float64) for k in range(9)}
    one, two = (answers.remembered("moves", {}, dict(each), 2.0) for each in (heard.items(), reversed(heard.items())))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_evidence_is_a_ratio_of_normal_densities_that_none_of_two_outvotes():
    """Log N(ρ; −m, s²) − log N(ρ; m, s²), twice, against b² log K. K = 9, and the middle ones have s = 1.4826 · 0.1."""
    known, means = torch.zeros(9, answers.OUT + 1).double(), torch.zeros(9, 3, 10**6)
    known[:, [answers.OF_MOVES, answers.OF_MODEL, answers.OF_OTHERS]] = 1.0
    known[:, answers.WEIGHT] = 5.0
    others = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.4, 0.5, 0.6, 0.3]).double()
    known[1:, answers.TO_MODEL], known[1:, answers.TO_OTHERS] = -others, others
    spread = 1.4826 * 0.1

    def evidence(correlation):
        opposite, honest = (NormalDist(sign * 0.3, spread).pdf(correlation) for sign in (-1, 1))
        return math.log(opposite / honest)

    def out(against, beside, bound, before=0.0):
        known[0, [answers.TO_MODEL, answers.TO_OTHERS]] = torch.tensor([against, beside]).double()
        known[0, answers.OUT] = before
        return bool(answers._judged(known, means, bound)[0])

    bound = math.sqrt((evidence(-0.1) + evidence(-0.2)) / math.log(9))
    assert out(0.1, -0.2, bound - 1e-6)
    assert not out(0.1, -0.2, bound + 1e-6)
    assert [out(-0.2, -0.9, 1.0, before) for before in (0.0, 1.0)] == [False, True]
    assert not out(-0.001, 0.001, 1.0, before=1.0)


class Sends(Averaging):
    sends, init = True, staticmethod(lambda posterior: dict(posterior.mean))


@pytest.mark.parametrize("wrong", [None, torch.zeros(3), torch.zeros(SIZE // 2).to_sparse(), torch.zeros(30) * 1j])
def test_what_a_method_sends_may_be_anything(wrong):
    server = Server(START, fusion=Sends("weighted_average"))
    server.begin(RoundPlan(0, tuple(range(9))))
    tensors = {"method/a": START.mean["a"]} | ({} if wrong is None else {"method/b": wrong})
    assert server.admit(ClientUpdate(0, 10, START, tensors)).error is not None
