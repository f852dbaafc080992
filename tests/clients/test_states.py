"""What clients keep from round to round, in memory."""

import torch

from lightning_fedbayes.clients.client import ClientState
from lightning_fedbayes.clients.states import States
from lightning_fedbayes.server.plan import STRIDE


def test_a_client_that_keeps_nothing_takes_no_memory_and_one_that_ceases_to_is_forgotten():
    states = States()
    for kept in ({"head": torch.ones(2)}, {}):
        states.begin_round()
        states.keep(0, ClientState(local=kept))
        states.keep(1, ClientState())
        states.end_round(success=True)
        assert states.of(0).local.keys() == kept.keys()
        assert 1 not in states.memory


def test_a_client_keeps_something_if_one_of_its_problems_does():
    states = States()
    states.keep(3, ClientState())
    states.keep(3 + STRIDE, ClientState(kept={"own": torch.ones(1)}))
    states.end_round(success=True)
    assert states.clients() == {3}
