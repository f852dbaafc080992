"""Assignment of attacks to clients by shares, numbers and names; moments of the honest clients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.clients.adversaries import (
    GaussianVector,
    HonestMoments,
    LabelFlip,
    NotANumber,
    RandomUpdate,
    ScaledUpdate,
    SignFlip,
    assign,
)
from lightning_fedbayes.core.errors import FederationError

NAMES = ("north", "south", "east", "west")


def numbered(clients: int) -> list[str]:
    return [str(client) for client in range(clients)]


@given(clients=st.integers(1, 60), share=st.floats(0.02, 1.0), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_a_share_is_that_many_clients(clients, share, seed):
    count = int(share * clients + 0.5)
    if count == 0:
        with pytest.raises(FederationError, match="none of them"):
            assign([SignFlip(share)], numbered(clients), seed)
    else:
        chosen = assign([SignFlip(share)], numbered(clients), seed)
        assert len(chosen) == count
        assert set(chosen) <= set(range(clients))
        assert chosen == assign([SignFlip(share)], numbered(clients), seed)


def test_the_draw_is_uniform_over_seeds():
    counts = [0] * 10
    for seed in range(1000):
        for client in assign([SignFlip(0.3)], numbered(10), seed):
            counts[client] += 1
    assert all(abs(count - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5 for count in counts)


def test_shares_are_disjoint():
    flip, noise = SignFlip(0.3), GaussianVector(0.5)
    assigned = assign([flip, noise], numbered(10), seed=1)
    assert sorted(map(str, assigned.values())) == sorted(map(str, [(flip,)] * 3 + [(noise,)] * 5))
    first = {client for client, attacks in assigned.items() if attacks == (flip,)}
    assert first == set(assign([flip], numbered(10), seed=1)), "those of the first do not depend on the second"


def test_everybody_may_attack():
    assert set(assign([SignFlip(1.0)], numbered(7), 0)) == set(range(7))
    assert set(assign([SignFlip(0.5), NotANumber(0.5)], numbered(8), 0)) == set(range(8))


def test_names_and_numbers():
    flip = SignFlip(["west", 0, "north"])
    assert assign([flip], NAMES, 0) == {3: (flip,), 0: (flip,)}


def test_attacks_that_name_the_same_client_follow_each_other():
    flip, scale, noise = SignFlip(["east"]), ScaledUpdate([2, 1]), RandomUpdate(["south"])
    assert assign([flip, scale, noise], NAMES, 0) == {2: (flip, scale), 1: (scale, noise)}
    every = NotANumber(1.0)
    assert assign([flip, every], NAMES, 0)[2] == (flip, every)


@pytest.mark.parametrize(
    ("attacks", "message"),
    [
        ([SignFlip(["nroth"])], "did you mean 'north'"),
        ([SignFlip([4])], "no client 4; clients are numbered 0 to 3"),
        ([SignFlip([-1])], "no client -1"),
        ([SignFlip(0.1)], "none of them; give at least 0.125"),
        ([SignFlip(0.75), NotANumber(0.5)], "2 of 4 clients, and the attacks before it leave 1"),
    ],
)
def test_what_cannot_be_assigned_is_refused(attacks, message):
    with pytest.raises(FederationError, match=message):
        assign(attacks, NAMES, 0)


@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20),
    offset=st.sampled_from([0.0, 1e6]),
)
@settings(deadline=None)
def test_running_moments_are_those_of_all_at_once(values, offset):
    vectors = torch.tensor(values, dtype=torch.float64)[:, None] + offset
    moments = HonestMoments(vectors[0])
    for each in vectors:
        moments.add(each)
    torch.testing.assert_close(moments.mean, vectors.mean(0), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(moments.std, vectors.std(0, correction=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clients", [0.0, -0.1, 1.5, float("nan"), 1, 0, "north", [], (), [0.5], [True], [None], None])
@pytest.mark.parametrize("attack", [SignFlip, LabelFlip])
def test_invalid_clients_are_refused(attack, clients):
    with pytest.raises(FederationError, match=attack.__name__):
        attack(clients)
