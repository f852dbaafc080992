"""The state of an optimizer that a hook clears, loads or writes into, while clients train and between rounds."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import CannotVectorize, FederationError
from tests.federations import Plain, assert_equal, blobs, clients, federate, loader, parameters, trainer


def load(optimizer):
    state = {i: {"momentum_buffer": torch.full_like(p, 0.3)} for i, p in enumerate(optimizer.param_groups[0]["params"])}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def write(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.3)


def fade(optimizer):
    for entries in optimizer.state.values():
        entries["momentum_buffer"] *= 0.5


CHANGES = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "replace": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "fade": fade,
    "load": load,
    "write": write,
    "write of no parameter": lambda optimizer: optimizer.state.update({torch.zeros(1): {"momentum_buffer": 1.0}}),
}
EPOCH_HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end")
WITH_MOMENTUM = {"lr": 0.05, "momentum": 0.9}


def changing(where, how, *, rounds=range(9), at=None):
    """A module that changes its optimizer's state in the hook ``where``, of a batch at number ``at``."""

    class Changes(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), **WITH_MOMENTUM)

    def hook(self, *args):
        is_now = self.current_epoch in rounds and not self.trainer.sanity_checking
        if is_now and (at is None or args[-1] == at):
            CHANGES[how](self.trainer.optimizers[0])
        return Plain.training_step(self, *args) if where == "training_step" else None

    setattr(Changes, where, hook)
    return Changes()


def keeping(engine="sequential", *keep):
    return fb.FederatedBayes(engine=engine, fusion="weighted_average", keep=keep)


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("where", ["on_train_batch_start", "on_train_batch_end", "training_step"])
def test_while_a_client_trains_it_is_followed_from_the_next_step_on(where, how):
    """Batch 3 of the second round, and with Lightning alone of the second epoch."""
    made = [changing(where, how, rounds=(1,), at=3) for _ in range(2)]
    trainer(3).fit(made[0], loader(shuffle=False))
    federate(made[1], keeping("auto", "optimizer"), 3, loader(fb.ClientDatasets({"a": blobs()}), shuffle=False))
    assert_equal(parameters(made[0]), parameters(made[1]))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("where", EPOCH_HOOKS)
def test_between_rounds_it_is_refused_unless_every_client_would_begin_anew_anyway(where, how, engine):
    is_lost = how.startswith(("load", "write"))
    for keep in ([], ["optimizer"]):
        module = changing(where, how)
        options = {"train": loader(clients(20, 30)), "val": loader(shuffle=False), "num_sanity_val_steps": 0}
        if is_lost or keep:
            with pytest.raises(FederationError, match=r"the state of SGD was .* by a hook.*on_client_start"):
                federate(module, keeping(engine, *keep), 3, **options)
        else:
            without = changing("on_train_epoch_start", how, rounds=())
            federate(module, keeping(engine), 3, **options)
            federate(without, keeping(engine), 3, **options)
            assert_equal(parameters(module), parameters(without))


@pytest.mark.parametrize("how", ["replace", "load", "write of no parameter"])
def test_a_stack_refuses_a_step_that_changes_it(how):
    for at, says in ((0, "cannot be used: training_step writes into"), (2, "training_step writes into")):
        with pytest.raises(CannotVectorize, match=says):
            federate(changing("training_step", how, at=at), keeping("vectorized"), 2, loader(clients(30, 30)))


def test_one_that_is_loaded_before_training_is_refused_and_adagrads_first_one_is_not():
    class Loads(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), **WITH_MOMENTUM)
            load(optimizer)
            return optimizer

    for engine in ("sequential", "auto"):
        with pytest.raises(FederationError, match=r"the state of SGD was loaded or written into before training"):
            federate(Loads(), keeping(engine), 1, loader(clients(20, 30)))
    federate(Plain(optimizer=torch.optim.Adagrad), keeping("sequential", "optimizer"), 2, loader(clients(20, 30)))


def test_a_state_that_every_client_loads_is_no_clients_in_the_end():
    """torch's optimizers write into the tensors that they have loaded."""
    given = {i: {"momentum_buffer": torch.zeros_like(p)} for i, p in enumerate(Plain().parameters())}

    class Loads(changing("on_client_start", "clear").__class__):
        def on_client_start(self, client):
            own = self.trainer.optimizers[0]
            own.load_state_dict({**own.state_dict(), "state": given})

    federation = keeping("sequential", "optimizer")
    federate(Loads(), federation, 1, loader(clients(20, 30)))
    first, second = (federation.federation.engine.states.of(client).optimizers[0] for client in range(2))
    for i in given:
        assert not torch.equal(first[i]["momentum_buffer"], second[i]["momentum_buffer"])
