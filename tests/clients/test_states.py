"""What clients keep from round to round, in memory."""

from types import SimpleNamespace

import pytest
import torch

from lightning_fedbayes.clients.client import ClientState
from lightning_fedbayes.clients.optimizers import with_counts
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


META = torch.device("meta")
"""In the place of a GPU."""


def test_states_of_a_checkpoint_come_to_the_device_and_counts_stay_where_optimizers_have_them():
    entries = {"step": torch.ones(()), "exp_avg": torch.ones(2), "signal": torch.ones(())}
    states = States(device=META)
    states.load_state_dict(
        {
            3: vars(
                ClientState(
                    local={"head": torch.ones(2)},
                    optimizers=[{0: entries}],
                    kept={"shift": torch.ones(2)},
                    own={"mean": {"w": torch.ones(2)}},
                )
            )
        }
    )
    found = states.of(3)
    (kept,) = found.optimizers
    assert {name: value.device for name, value in kept[0].items()} == {
        "step": torch.device("cpu"),
        "exp_avg": META,
        "signal": META,
    }
    assert [found.local["head"].device, found.kept["shift"].device, found.own["mean"]["w"].device] == [META] * 3


@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_counts_of_fused_steps_lie_beside_the_parameters(options, device):
    optimizer = SimpleNamespace(param_groups=[{"params": [torch.empty(2, device=META)], **options}])
    (entries,) = with_counts(optimizer, {0: {"step": torch.ones(()), "exp_avg": torch.ones(2)}}).values()
    assert entries["step"].device.type == device
    assert entries["exp_avg"].device.type == "cpu"
