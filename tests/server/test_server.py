"""The server by itself, driven by hand: no Trainer, no engine."""

import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes import ClientUpdate, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.core.errors import FusionError, PosteriorError
from lightning_fedbayes.core.messages import ClientFailure
from lightning_fedbayes.fusion import AutoFusion, Reliability
from tests.federations import assert_close

START = GaussianPosterior({"w": torch.zeros(3)}, {"w": torch.ones(3)})


def update(client, value=None, variance=0.5, examples=10, **options):
    mean = torch.full((3,), float(client if value is None else value))
    return ClientUpdate(client, examples, GaussianPosterior({"w": mean}, {"w": torch.full((3,), variance)}), **options)


def round_of(server, *updates, number=0, cohort=(0, 1, 2), **options):
    server.begin(RoundPlan(number, cohort))
    outcomes = [server.admit(each) for each in updates]
    return server.finish(**options), outcomes


def test_fedavg_is_the_mean_weighted_by_examples():
    server = Server(START, fusion="weighted_average")
    result, _ = round_of(server, update(0, examples=10), update(1, examples=10), update(2, examples=20))
    torch.testing.assert_close(server.posterior.mean["w"], torch.full((3,), 1.25))
    assert result.posterior is server.posterior
    assert result.weights == {0: 0.25, 1: 0.25, 2: 0.5}
    assert result.success
    assert server.rounds == 1
    assert server.accepted == {0: 1, 1: 1, 2: 1}


UNUSABLE = {
    "failed": (lambda: ClientFailure(2, RuntimeError("the disk is full")), "the disk is full"),
    "not finite": (lambda: update(2, value=math.nan), "mean of 'w' is not finite"),
    "of another network": (
        lambda: ClientUpdate(2, 10, GaussianPosterior.point_mass({"v": torch.zeros(3)})),
        "different parameters",
    ),
    "of a stranger": (lambda: update(7), "client 7 is not in the cohort"),
    "a second one": (lambda: update(1, value=9.0), "client 1 has been heard"),
}


@pytest.mark.parametrize(("make", "says"), UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("fusion", ["reverse_kl_barycenter", "coordinate_median"])
def test_an_unusable_update_is_left_out_and_the_result_is_that_of_the_others_alone(make, says, fusion):
    server, others = Server(START, fusion=fusion), Server(START, fusion=fusion)
    result, outcomes = round_of(server, update(0), update(1), make())
    assert [outcome.error is None for outcome in outcomes] == [True, True, False]
    assert says in str(outcomes[2].error)
    expected, _ = round_of(others, update(0), update(1))
    assert_close(result.posterior, expected.posterior)
    assert result.weights == expected.weights
    assert result.figures["valid_clients"] == 2


@pytest.mark.parametrize("fusion", ["weighted_average", "geometric_median", "coordinate_median"])
def test_tensors_of_an_update_may_be_overwritten_once_admitted(fusion):
    def with_buffer(client):
        return update(client, buffers={"mean": torch.full((2,), float(client))})

    begun = {"mean": torch.zeros(2)}
    server, untouched = Server(START, begun, fusion=fusion), Server(START, begun, fusion=fusion)
    expected, _ = round_of(untouched, *map(with_buffer, range(3)))
    server.begin(RoundPlan(0, (0, 1, 2)))
    for client in range(3):
        sent = with_buffer(client)
        server.admit(sent)
        sent.posterior.mean["w"].fill_(99.0)
        sent.buffers["mean"].fill_(99.0)
    result = server.finish()
    assert_close(result.posterior, expected.posterior)
    assert torch.equal(result.buffers["mean"], expected.buffers["mean"])


def test_fewer_clients_than_the_quorum_leave_the_posterior():
    server = Server(START, safeguards=fb.Safeguards(min_clients=2))
    result, _ = round_of(server, update(0), ClientFailure(1, RuntimeError("gone")))
    assert not result.success
    assert server.posterior is START
    assert (server.failed_rounds, server.rounds, server.accepted) == (1, 1, {})
    result, _ = round_of(server, update(0), update(1), number=1)
    assert result.success
    assert [row["failed_rounds"] for row in server.history] == [1, 0]


@pytest.mark.parametrize("fusion", ["ivar_vb", AutoFusion(["ivar_vb", "linear_pool"])])
def test_a_restored_server_goes_on_as_the_first_would_have(fusion, tmp_path):
    def some(number):
        return [update(client, value=client + number * (client == 2)) for client in range(3)]

    def loss(candidate, notes):
        return float(candidate.posterior.mean["w"].sum())

    whole = Server(START, fusion=fusion)
    for number in range(3):
        round_of(whole, *some(number), number=number, score=loss)
    first, again = Server(START, fusion=fusion), Server(START, fusion=fusion)
    for number in range(2):
        round_of(first, *some(number), number=number, score=loss)
    torch.save(first.state_dict(), tmp_path / "server.pt")
    again.load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
    round_of(again, *some(2), number=2, score=loss)
    assert_close(again.posterior, whole.posterior)
    assert again.accepted == whole.accepted
    assert [row["round"] for row in again.history] == [1, 2, 3]


def test_of_several_rules_the_one_of_the_least_finite_loss_is_taken():
    fusion = AutoFusion(["weighted_average", "weighted_sum", "linear_pool"])
    losses = {"weighted_average": math.nan, "weighted_sum": 2.0, "linear_pool": 1.0}
    server, order = Server(START, fusion=fusion), iter(losses.values())
    result, _ = round_of(server, update(0), update(2), score=lambda candidate, notes: next(order))
    expected = fb.fuse("linear_pool", [update(0).posterior, update(2).posterior])
    assert_close(result.posterior, expected)
    held_out = {name: value for name, value in result.figures.items() if name.startswith("held_out_loss/")}
    assert {name.removeprefix("held_out_loss/") for name in held_out} == set(losses)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["weighted_average", "rklb", "sites", "coordinate_median"])
def test_updates_of_several_threads_are_those_of_one(fusion):
    """Eight threads bring two thousand clients, who wait, stand out, are clipped: the same result but for rounding."""
    clients, random = 2000, torch.Generator().manual_seed(0)
    values = torch.randn(clients, generator=random).tolist()

    def message(server, client):
        sent = {
            f"method/{name}": torch.full_like(server.buffers[f"method/{name}"], abs(values[client])).float()
            for name in server.method.sent
        }
        if sent:
            sent |= {"method/examples": torch.tensor(10.0), "method/clients": torch.tensor(1.0)}
        return update(client, values[client], 0.0 if sent else 0.5, buffers=sent)

    results = []
    for threads in (1, 8):
        server = Server(START, fusion=fusion, weighting="equal")
        server.begin(RoundPlan(0, tuple(range(clients))))
        with ThreadPoolExecutor(threads) as pool:
            outcomes = list(pool.map(lambda client, s=server: s.admit(message(s, client)), range(clients)))
        assert not [each.error for each in outcomes if each.error is not None]
        result = server.finish()
        assert result.figures["valid_clients"] == clients
        results.append(server.posterior)
    assert_close(*results, 1e-5, 1e-7)
    assert pickle.loads(pickle.dumps(server)).admit is not None


WITH_STATE = {
    "fedavgm": "optimizer momentum",
    "fedadam": "optimizer square",
    "fedyogi": "optimizer momentum",
    "ivar_vb": "counts",
    "icov_mle": "along",
    "ivar_mle": "clients",
    "icov_vb": "rounds",
}
"""Rule → a part of its state."""
DAMAGE = {
    "missing": None,
    "a word": "x",
    "empty": torch.zeros(0),
    "another shape": torch.zeros(7, 7, 7),
    "not finite": torch.tensor(math.nan),
    "a list of lists": [[]],
}


def trained(rule, rounds=2):
    server = Server(update(0).posterior, fusion=rule)
    for number in range(rounds):
        round_of(server, update(0, 1.0), update(1, 2.0 + number), update(2, 4.0), number=number)
    return server


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("make", "rule"),
    [
        *((fb.fusion.get_rule, rule) for rule in WITH_STATE),
        (Reliability, "ivar_vb"),
        (Reliability, "icov_mle"),
        (lambda rule: fb.fusion.NearestNeighbourMixing(rule, byzantine=1), "ivar_vb"),
    ],
)
def test_a_damaged_state_of_a_rule_is_refused_when_it_is_given(make, rule, damage):
    whole = make(rule)
    server = trained(whole)
    state = server.state_dict()
    again = Server(update(0).posterior, fusion=whole)
    again.load_state_dict(state)
    (part,) = (dict(each) for each in state["rule_states"].values())
    path = [*(["by"] if make is Reliability else []), *WITH_STATE[rule].split()]
    broken = part
    for name in path[:-1]:
        broken[name] = broken = dict(broken[name])
    broken[path[-1]] = DAMAGE[damage]
    if damage == "missing":
        del broken[path[-1]]
    before = server.state_dict()
    with pytest.raises(FusionError, match=rf"{path[-1]}.*(damaged|finite number)"):
        server.load_state_dict({**state, "rule_states": dict.fromkeys(state["rule_states"], part)})
    assert server.state_dict() == before


def test_a_state_of_another_network_is_refused():
    server = trained("weighted_average")
    for other in ({"w": torch.zeros(9)}, {"another": torch.zeros(3)}):
        state = Server(GaussianPosterior.point_mass(other)).state_dict()
        with pytest.raises(PosteriorError, match=r"of another network: it has '(w|another)' \(\d,\), and this one '"):
            server.load_state_dict(state)
