"""What clients keep from round to round, in memory."""

from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.states import ClientState, States, after_absence, with_counts
from tests.federations import Plain, federate


def test_a_client_that_keeps_nothing_takes_no_memory_and_one_that_ceases_to_is_forgotten():
    states = States()
    for kept in ({"head": torch.ones(2)}, {}):
        states.begin_round()
        states.keep(0, ClientState(local=kept))
        states.keep(1, ClientState())
        states.end_round(success=True)
        assert states.of(0).local.keys() == kept.keys()
        assert 1 not in states.memory


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


class Downhill(Plain):
    """The loss is the sum of the parameters: every gradient is 1, so that a step's size is its momentum."""

    def __init__(self, optimizer) -> None:
        super().__init__(nn.Linear(1, 1, bias=False), 1.0, optimizer)
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch, batch_idx):
        return self.net.weight.sum() + 0 * self(batch[0]).sum()


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_momentum_fades_with_every_step_that_its_client_has_missed(engine, epochs):
    module = Downhill(partial(torch.optim.SGD, momentum=0.8))
    data = DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1)
    federation = fb.FederatedBayes(
        fb.IIDPartition(3),
        local_epochs=epochs,
        fraction=0.3,
        seed=4,
        engine=engine,
        fusion="fedavg",
        keep=["optimizer"],
    )
    cohorts = []
    note = L.pytorch.callbacks.LambdaCallback(
        on_train_epoch_end=lambda *_: cohorts.append(federation.federation.engine.plan.cohort)
    )
    federate(module, federation, 12, data, callbacks=[note])
    expected, last, missed = 0.0, {}, []
    for number, (client,) in enumerate(cohorts):
        before, momentum = last.get(client, (number - 1, 0.0))
        missed += [number - before - 1]
        momentum *= 0.8 ** (epochs * missed[-1])
        for _ in range(epochs):
            momentum = 1 + 0.8 * momentum
            expected -= momentum
        last[client] = number, momentum
    assert len(last) == 3
    assert max(missed) > 2
    assert float(module.net.weight.detach()) == pytest.approx(expected, rel=1e-6)


def test_only_running_means_of_gradients_are_a_momentum():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    adam = torch.optim.Adam([{"params": [each], "betas": (decay, 0.9)} for each, decay in zip(parameters, (0.5, 0.25))])
    entries = {
        "step": torch.tensor(5.0),
        "exp_avg": torch.ones(2),
        "exp_avg_sq": torch.ones(2),
        "momentum_buffer": None,
    }
    found = after_absence(adam, {0: entries, 1: entries}, 3)
    for number, decay in ((0, 0.5), (1, 0.25)):
        assert torch.equal(found[number].pop("exp_avg"), torch.full((2,), decay**3))
        assert found[number] == {name: value for name, value in entries.items() if name != "exp_avg"}
    assert all(after_absence(adam, {0: entries}, missed)[0] is entries for missed in (0, -2))
