"""Bounds on sites: what a lie can do, that honest clients count in full, and that both ends keep the same."""

import math
import statistics
from pathlib import Path

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import SignFlip
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.methods import Report, Shared
from lightning_fedbayes.methods.method import split
from lightning_fedbayes.server.guard import FEW, FEWEST
from lightning_fedbayes.server.site_guard import BEYOND, SiteGuard
from tests.federations import assert_close, bayesian, federate
from tests.methods.conjugate import GAUSSIAN, Conjugate, distance

SIZE, COUNT = 40, 9


def clients_of(examples=(20,) * COUNT, point: int = 0) -> Conjugate:
    """Clients whose gradients and precisions are proportional to their examples, and who are equally unlike."""
    draws = torch.Generator().manual_seed(1)
    n = torch.tensor(examples, dtype=torch.float64)[:, None]
    shape = 1 + torch.rand(SIZE + point, generator=draws, dtype=torch.float64)
    truth = torch.randn(SIZE + point, generator=draws, dtype=torch.float64)
    signs = torch.randn(len(examples), SIZE + point, generator=draws, dtype=torch.float64).sign()
    return Conjugate(n * shape, truth + 0.5 * signs, examples, point, effort=0.5)


def served(clients: Conjugate, **options) -> fb.Server:
    width = (30.0 * sum(clients.examples) / 20) ** -0.5  # of the posterior that comes, about
    return fb.Server(clients.posterior(variance=width**2), fusion="sites", **options)


def lie(gradient: float = 1.0, precision: float = 1.0, move: float = 1.0):
    def told(report: Report, shared: Shared) -> Report:
        mean = {
            name: shared.posterior.mean[name] + move * (value - shared.posterior.mean[name])
            for name, value in report.posterior.mean.items()
        }
        factors = {"gradient": gradient, "precision": precision}
        sent = {**report.sent, **{name: factor * report.sent[name] for name, factor in factors.items()}}
        return Report(fb.GaussianPosterior.point_mass(mean), report.kept, sent)

    return told


def assert_counted(clients: Conjugate, server: fb.Server) -> None:
    """What clients keep is what the server has counted of each, bit by bit, and adds up to what it has."""
    tensors = split(server.buffers)[1]
    totals = clients.totals()
    torch.testing.assert_close({name: tensors[name] for name in totals}, totals, rtol=1e-12, atol=1e-12)
    for client, kept in clients.kept.items():
        torch.testing.assert_close(dict(server.sites[client]), kept, rtol=0, atol=0)


@pytest.mark.parametrize("examples", [(20,) * COUNT, (3, 300, 20, 7, 100, 30, 10, 50, 200, 5), (20, 20, 20)])
@pytest.mark.parametrize("point", [0, 20])
def test_honest_clients_are_counted_bit_for_bit_as_sent(examples, point):
    clients, free = (clients_of(examples, point) for _ in range(2))
    servers = served(clients), served(free, safeguards=fb.Safeguards(max_influence=None))
    for _ in range(12):
        assert clients.round(servers[0])["outlying_clients"] == 0
        free.round(servers[1])
    assert_counted(clients, servers[0])
    assert not servers[0].untold
    assert not servers[1].sites
    assert_close(servers[0].posterior, servers[1].posterior)


LIES = {
    "gradient": lie(gradient=10),
    "precision": lie(precision=30),
    "move": lie(move=30),
    "flipped": lie(-10, 1, -10),
    "all": lie(30, 30, 30),
    "all, flipped": lie(-1e3, -1e3, -1e3),
}


@pytest.mark.slow
@pytest.mark.parametrize("told", LIES.values(), ids=LIES)
def test_a_liar_is_scaled_back_and_both_ends_count_the_same(told):
    """Also when it is honest again; nothing is left of it after its removal."""
    clients = clients_of()
    server, others = served(clients), clients.pooled(clients=range(1, COUNT))
    for number in range(12):
        outlying = clients.round(server, lies={0: told})["outlying_clients"]
        assert outlying == 1 or number  # what it adds to a site that has been counted is less and less
        assert server.untold == ({0} if outlying else set())
        assert_counted(clients, server)
        assert float(server.sites[0]["precision"].min()) >= 0
    honest = clients_of()
    plain = served(honest)
    for _ in range(12):
        honest.round(plain)
    without = distance(fb.remove_client(plain, 0), others)
    assert distance(server.posterior, others) < 4 * distance(plain.posterior, others) + 1
    assert distance(fb.remove_client(server, 0), others) < without + 2
    for _ in range(60):
        figures = clients.round(server)
    goes_against = told in (LIES["gradient"], LIES["flipped"], LIES["all, flipped"])  # and stays out
    assert figures["outlying_clients"] == goes_against
    assert server.untold == ({0} if goes_against else set())
    assert distance(server.posterior, others if goes_against else clients.pooled()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("liars", [(0,), (2, 5), (0, 4, 8)], ids=str)
@pytest.mark.parametrize("signs", [(-1, -1, -1), (-1, 1, -1), (1, 1, -1)], ids=str)
def test_whoever_moves_against_the_others_does_not_count(liars, signs):
    """At their own honest size, of which no bound takes notice; the posterior is that of the others' data."""
    clients, flip = clients_of(), lie(*signs)  # of gradient, precision and move
    server, others = served(clients), [client for client in range(COUNT) if client not in liars]
    counted = []
    for _ in range(60):
        counted.append(clients.round(server, lies=dict.fromkeys(liars, flip))["outlying_clients"])
        assert_counted(clients, server)
    assert counted[0] == 0  # nobody knows yet where all go
    assert counted[20:] == [len(liars)] * 40
    assert distance(server.posterior, clients.pooled(clients=others)) < 1e-6
    tensors = split(server.buffers)[1]
    assert float(tensors["examples"]) == 20 * len(others)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [(20,) * COUNT, (3, 300, 20, 7, 100, 30, 10, 50, 200, 5), (9,) * 30])
@pytest.mark.parametrize("unlike", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("starts_there", [False, True])
def test_honest_clients_go_the_same_way_however_unlike_they_are(examples, unlike, starts_there):
    """Also from where training ends, where moves are the errors of control variates."""
    clients = Conjugate.drawn(examples, size=30, unlike=unlike, effort=0.5)
    start = clients.pooled() if starts_there else clients.posterior(variance=1 / sum(examples))
    server = fb.Server(start, fusion="sites")
    for _ in range(40):
        clients.round(server)
        _, agreed, expected, spread, _ = server._memory["agreed"].T
        assert bool(((4 * agreed >= expected) | (expected - agreed <= 2 * spread)).all())
    assert distance(server.posterior, clients.pooled()) < 0.01


def test_the_way_is_what_the_page_says():
    """Of each client weighted by that of the median one; few clients, and the first messages, tell nothing."""
    posterior, draws = clients_of().posterior(), torch.Generator().manual_seed(0)
    slope, memory, rounds, left_out = torch.ones(SIZE), {}, [], []
    for number in range(6):
        guard = SiteGuard(posterior, slope, 2.0, lambda client: {}, memory)
        sizes = torch.rand(COUNT, 5, 2, generator=draws, dtype=torch.float64) + 0.5
        sizes[:, 3] = 20.0
        usual = 0.9 if number % 2 else 0.1
        sizes[:, 4] = -usual - 0.02 * torch.rand(COUNT, 1, generator=draws, dtype=torch.float64)
        sizes[0, 4], sizes[1, 4] = 0.4, usual - 1.0  # 1 goes with the others where they hardly go
        limits = guard.limits(sizes, [20.0] * COUNT, range(COUNT)).of(dict.fromkeys(range(COUNT), 20.0))
        guard.remember(sizes, limits, range(COUNT))
        memory = guard.memory
        cosines = -sizes[:, 4, 0]
        middle = cosines.median()
        furthest = 1.4826 * (cosines - middle).abs().median() * math.sqrt(2 * math.log(COUNT))
        if number >= 2:
            rounds.append((middle * sizes[:, 0, -1].median(), middle, furthest, cosines))
        for client in range(COUNT):
            agreed = sum(way * cosine[client] for way, _, _, cosine in rounds)
            expected = sum(way * middle for way, middle, _, _ in rounds)
            is_out = agreed < expected / 4 and expected - agreed > 2 * sum(way.abs() * far for way, _, far, _ in rounds)
            assert bool((limits[client, 4] == (-torch.inf if is_out else torch.inf)).all())
        left_out.append([client for client in range(COUNT) if float(limits[client, 4, 0]) < 0])
    assert left_out == [[], [], [0], [0, 1], [0], [0, 1]]
    few = SiteGuard(posterior, slope, 2.0, lambda client: {}, memory)
    limits = few.limits(sizes[2:8], [20.0] * 6, range(2, 8)).of(dict.fromkeys(range(2, 8), 20.0))
    assert bool((limits[:, 4] == torch.inf).all())


@pytest.mark.parametrize("name", ["examples", "clients"])
@pytest.mark.parametrize("claim", [0.0, 2.0, 1e9, -1.0])
def test_a_site_is_of_one_client_and_of_its_message_s_examples(name, claim):
    """Both count at the server: how much is extrapolated to clients not heard, and each client's share."""

    def claims(report, shared):
        return Report(report.posterior, report.kept, {**report.sent, name: torch.tensor(claim)})

    clients = clients_of()
    server = served(clients)
    for _ in range(3):
        figures = clients.round(server, lies={0: claims})
        assert figures["valid_clients"] == COUNT - 1
    tensors = split(server.buffers)[1]
    assert float(tensors["clients"]) == COUNT - 1
    assert float(tensors["examples"]) == sum(clients.examples[1:])


@pytest.mark.parametrize("factor", [10.0, 1000.0])
def test_the_size_of_what_counts_is_what_the_page_says(factor):
    """Precisions are scaled back to the bound; what is s times too long otherwise counts with the weight 1 / s³."""
    found = []
    for told in ({}, {0: lie(factor, factor, factor)}):
        clients = clients_of()
        server = served(clients)
        shared = server.begin(fb.RoundPlan(0, tuple(range(COUNT)), clients=COUNT))
        reports = [clients.train(server.method, shared, client) for client in range(COUNT)]
        reports = [told[client](report, shared) if client in told else report for client, report in enumerate(reports)]
        for client, report in enumerate(reports):
            server.admit(report.update(client, 20))
        server.finish()
        found.append((server, reports))
    (honest, _), (server, reports) = found
    sizes = {
        "move": [float(report.posterior.mean[GAUSSIAN].norm()) for report in reports],
        "gradient": [float(report.sent["gradient"].double().norm()) for report in reports],
        "precision": [float(report.sent["precision"].double().sum()) for report in reports],
    }
    over = {name: sizes[name][0] / 2 / statistics.median(sizes[name]) for name in ("move", "gradient")}
    bound = 2 * FEW * statistics.median(sizes["precision"])
    assert float(server.sites[0]["precision"].sum()) == pytest.approx(bound * over["gradient"] ** -BEYOND, rel=1e-5)
    own = float(server.sites[0]["gradient"].norm())
    assert own == pytest.approx(sizes["gradient"][0] * over["gradient"] ** -BEYOND, rel=1e-6)
    start, mean = torch.zeros(SIZE).double(), server.posterior.mean[GAUSSIAN]
    moves = torch.stack([report.posterior.mean[GAUSSIAN] for report in reports])
    weights = torch.tensor([over["move"] ** -BEYOND, *[1.0] * (COUNT - 1)], dtype=torch.float64)
    torch.testing.assert_close(mean, start + weights @ moves / weights.sum(), rtol=1e-6, atol=1e-8)
    for client in range(1, COUNT):
        assert torch.equal(server.sites[client]["gradient"], honest.sites[client]["gradient"])


def test_few_clients_are_bounded_by_earlier_rounds():
    """And by the others' last sizes; in a first round of few nobody is, nor is one that is alone ever."""
    clients = clients_of()
    server = served(clients)
    for _ in range(3):
        clients.round(server)
    assert clients.round(server, (0, 1, 2), {0: lie(-1e3, 1e3, -1e3)})["outlying_clients"] == 1
    assert_counted(clients, server)
    for count in (1, 3, FEWEST - 1):
        few = clients_of((20,) * count)
        server = served(few)
        for number in range(3):
            found = few.round(server, lies={0: lie(10, 10, 10)})["outlying_clients"]
            assert found == 0 or (number and count > 1)


@pytest.mark.parametrize("count", [3, COUNT, 30])
def test_a_client_whose_means_are_absurd_is_left_out_and_not_counted(count):
    """Also where it is the last one to come, beside whom nobody waits."""
    clients = clients_of((20,) * count)
    server = served(clients)
    for _ in range(2):
        clients.round(server)
    shared = server.begin(fb.RoundPlan(2, tuple(range(count)), clients=count))
    for client in range(count):
        report = clients.train(server.method, shared, client)
        if client == count - 1:
            report = lie(move=1e30)(report, shared)
        else:
            clients.kept[client] = dict(report.kept)
        assert server.admit(report.update(client, 20)).error is None
    result = server.finish()
    assert "moves the means by more" in str(result.outcomes[-1].error)
    assert count - 1 not in result.weights
    assert server.accepted[count - 1] == 2
    assert_counted(clients, server)


RAGGED = (3, 5, 9, 17, 30, 60, 100, 150, 220, 300)


@pytest.mark.parametrize(("power", "scatter"), [(0.5, 3), (0.5, 30), (1.0, 30)], ids=["few entries", "noise", "unlike"])
def test_honest_clients_of_few_and_of_many_examples_are_within_the_bound(power, scatter):
    """Sums over n examples grow as √n where they are noise, as n where clients are unlike, and lengths scatter."""
    draws, rows = torch.Generator().manual_seed(0), torch.tensor(RAGGED).double()
    clients, beyond = clients_of(), 0
    for _ in range(300):
        guard = SiteGuard(clients.posterior(), torch.zeros(SIZE), 2.0, lambda client: {})
        noise = torch.randn(len(rows), scatter, generator=draws, dtype=torch.float64).norm(dim=1)
        sizes = (rows**power * noise)[:, None, None].repeat(1, 5, 2)
        sizes[:, 3] = rows[:, None]
        limits = guard.limits(sizes, RAGGED, range(len(rows))).of(dict(enumerate(RAGGED)))
        beyond += int((sizes > limits)[:, 1, -1].sum())
    assert beyond <= 0.005 * 300 * len(rows)


@pytest.mark.slow
def test_in_process_clients_keep_what_is_counted_in_memory_and_on_disk_by_both_engines(tmp_path: Path):
    """The sums of what clients keep are the server's, whatever they have sent."""
    found = {}
    for name, engine, keep in (
        ("memory", "sequential", ()),
        ("disk", "sequential", fb.Kept(folder=tmp_path / "s")),
        ("stack", "vectorized", fb.Kept(folder=tmp_path / "v")),
    ):
        options = {"adversaries": SignFlip([0], scale=10.0), "engine": engine, "keep": keep}
        made = fb.FederatedBayes(fb.IIDPartition(9), fusion="sites", **options)
        federate(bayesian(), made, 4)
        if name == "memory":
            tensors, sites = split(made.federation.server.buffers)[1], made.state_dict()["clients"]
            for part in ("gradient", "precision", "examples", "clients"):
                first, *others = (sites[client]["kept"][part] for client in range(9))
                torch.testing.assert_close(sum(others, first), tensors[part], rtol=0, atol=1e-12)
        found[name] = made.posterior, fb.remove_client(made, 0)
    for ours, theirs in zip(found["memory"], found["disk"], strict=True):
        assert_close(ours, theirs)
    for ours, theirs in zip(found["memory"], found["stack"], strict=True):
        torch.testing.assert_close(ours.flatten()[0], theirs.flatten()[0], rtol=0, atol=0.1)


def test_a_checkpoint_without_a_clients_site_is_refused(tmp_path: Path):
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="sites")
    trainer = federate(bayesian(), made, 2)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    (state,) = (each for each in content["callbacks"].values() if "rule_states" in each)
    del state["clients"][1]
    torch.save(content, path)
    with pytest.raises(FederationError, match="no state of 1, and each keeps its site"):
        federate(bayesian(), fb.FederatedBayes(fb.IIDPartition(3), fusion="sites"), 3, ckpt_path=path)
