"""A round's adversaries: their draws, and the memory that honest clients take."""

from __future__ import annotations

import weakref

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.clients.adversaries import (
    ALittleIsEnough,
    GaussianVector,
    InnerProductManipulation,
    LabelFlip,
    RandomUpdate,
    SignFlip,
)
from lightning_fedbayes.clients.attacks import RoundAdversaries, held_back
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.server.plan import RoundPlan


def posterior(value: float, name: str = "w") -> fb.GaussianPosterior:
    return fb.GaussianPosterior({name: torch.full((5,), value)}, {name: torch.full((5,), 0.1)})


def adversaries(attacks, round: int = 0, seed: int = 0) -> RoundAdversaries:
    return RoundAdversaries(attacks, RoundPlan(round, (0, 1, 2, 3), (0, 1, 2, 3, 4)), posterior(0.0), seed)


def sent(attack=None, round: int = 0, client: int = 0, seed: int = 0) -> torch.Tensor:
    made = adversaries({client: (RandomUpdate([client]) if attack is None else attack,)}, round, seed)
    return made.send(ClientUpdate(client, 8, posterior(1.0))).posterior.mean["w"]


def test_draws_belong_to_seed_round_client_and_attack():
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    assert torch.equal(sent(), sent())
    noise = GaussianVector([0])
    draws = [sent(), sent(round=1), sent(client=1), sent(seed=1), sent(noise), sent(noise, round=1)]
    directions = torch.stack([draw / draw.norm() for draw in draws])
    similarity = directions @ directions.T - torch.eye(len(draws))
    assert similarity.abs().max() < 0.999
    assert torch.equal(torch.random.get_rng_state(), state)


def test_honest_clients_send_what_they_have():
    update = ClientUpdate(2, 8, posterior(1.0))
    assert adversaries({1: (SignFlip([1]),)}).send(update) is update


def test_nothing_is_kept_of_honest_clients():
    made = adversaries({0: (ALittleIsEnough([0], z=1.0),)})
    updates = [ClientUpdate(client, 8, posterior(float(client))) for client in (1, 2, 3)]
    kept = [weakref.ref(update.posterior) for update in updates]
    while updates:
        made.observe(updates.pop())
    assert all(reference() is None for reference in kept)
    crafted = made.send(ClientUpdate(0, 8, posterior(9.0))).posterior.mean["w"]
    torch.testing.assert_close(crafted, torch.full((5,), 2.0 - (2 / 3) ** 0.5))


def test_other_adversaries_are_not_honest():
    made = adversaries({0: (InnerProductManipulation([0], epsilon=1.0),), 1: (LabelFlip([1]),)})
    for client in (1, 2):
        made.observe(ClientUpdate(client, 8, posterior(float(client))))
    crafted = made.send(ClientUpdate(0, 8, posterior(9.0))).posterior.mean["w"]
    torch.testing.assert_close(crafted, torch.full((5,), -2.0))


def test_only_those_wait_whose_attack_needs_the_honest():
    made = adversaries({0: (SignFlip([0]),), 1: (SignFlip([1]), ALittleIsEnough([1])), 7: (SignFlip([7]),)})
    assert [client for client in range(8) if made.waits(client)] == [1]


def test_updates_held_back_share_no_memory():
    update = ClientUpdate(0, 8, posterior(1.0), {"count": torch.ones(3)})
    held = held_back(update)
    update.posterior.mean["w"].zero_()
    update.posterior.variance["w"].zero_()
    update.buffers["count"].zero_()
    assert held.posterior.mean["w"].all()
    assert held.posterior.variance["w"].all()
    assert held.buffers["count"].all()


def test_another_network_is_refused():
    with pytest.raises(FusionError, match="client 0"):
        adversaries({0: (SignFlip([0]),)}).send(ClientUpdate(0, 8, posterior(1.0, "v")))
