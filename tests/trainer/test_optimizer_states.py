"""The state of an optimizer that a hook reads, clears, loads or writes into, while clients train and between rounds."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, LambdaCallback
from lightning.pytorch.loggers import CSVLogger

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import CannotVectorize, FederationError
from tests.federations import Plain, assert_equal, bayesian, blobs, clients, federate, loader, parameters, trainer


def load(optimizer):
    state = {i: {"momentum_buffer": torch.full_like(p, 0.3)} for i, p in enumerate(optimizer.param_groups[0]["params"])}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def write(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.3)


def fade(optimizer):
    for entries in optimizer.state.values():
        entries["momentum_buffer"] *= 0.5


def clear_bias(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.dim() == 1:
            optimizer.state[parameter].clear()


def read(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter].get("momentum_buffer", torch.zeros(1)).norm().item()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.state.get(torch.zeros(1))


CLEARS = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "replace": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "clear in part": clear_bias,
}
CHANGES = {"fade": fade, "load": load, "write": write}
ALL = {**CLEARS, **CHANGES, "read": read}
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end", "training_step")
EPOCH_HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end")
ENGINES = ("sequential", "vectorized")


def changing(where, how, *, rounds=range(9), at=None, name="SGD"):
    """A module that changes its optimizer's state in the hook ``where``, of a batch at number ``at``."""

    class Changes(Plain):
        def configure_optimizers(self):
            return getattr(torch.optim, name)(self.parameters(), lr=0.05, momentum=0.9)

    def hook(self, *args):
        is_now = self.current_epoch in rounds and not self.trainer.sanity_checking
        if is_now and (at is None or args[-1] == at):
            ALL[how](self.trainer.optimizers[0])
        return Plain.training_step(self, *args) if where == "training_step" else None

    setattr(Changes, where, hook)
    return Changes()


def keeping(engine="sequential", *keep, **options):
    return fb.FederatedBayes(engine=engine, fusion="weighted_average", keep=keep, **options)


def momenta(federation):
    """The clients' kept momentum of the first parameter."""
    states = federation.federation.engine.states
    return [states.of(client).optimizers[0].get(0, {}).get("momentum_buffer") for client in sorted(states.clients())]


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("where", [*BATCH_HOOKS, *EPOCH_HOOKS])
def test_one_client_follows_it_as_lightning_does(where, how):
    """From the next step on: at batch 3 of the second round, or between rounds."""
    when = {"rounds": (1,), "at": 3} if where in BATCH_HOOKS else {"rounds": (0, 2)}
    made, val = [changing(where, how, **when) for _ in range(2)], loader(shuffle=False)
    trainer(4, num_sanity_val_steps=0).fit(made[0], loader(shuffle=False), val)
    one = loader(fb.ClientDatasets({"a": blobs()}), shuffle=False)
    federate(made[1], keeping("auto", "optimizer"), 4, one, val, num_sanity_val_steps=0)
    assert_equal(parameters(made[0]), parameters(made[1]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("where", EPOCH_HOOKS)
def test_between_rounds_it_is_cleared_for_all_clients_and_no_other_change_is_let_pass(where, how, engine):
    """Cleared in every round, it is as if clients kept no state."""
    options = {"train": loader(clients(20, 30)), "val": loader(shuffle=False), "num_sanity_val_steps": 0}
    for keep in ([], ["optimizer"]):
        module, federation = changing(where, how), keeping(engine, *keep)
        if how in CHANGES and (how != "fade" or (keep and where != "on_train_start")):
            with pytest.raises(FederationError, match=r"the state of SGD was .* by a hook.*on_client_start"):
                federate(module, federation, 3, **options)
            continue
        federate(module, federation, 3, **options)
        like = changing(where, "read")
        is_cleared = how in ("clear", "replace") and where != "on_train_start"
        federate(like, keeping(engine, *(() if is_cleared else keep)), 3, **options)
        if how != "clear in part" or where == "on_train_start" or not keep:
            assert_equal(parameters(module), parameters(like))
        else:
            assert not torch.equal(module.net[0].bias, like.net[0].bias)
            assert all(each is not None for each in momenta(federation))  # of the weights


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("folder", [False, True])
def test_a_clear_goes_on_over_a_checkpoint_and_through_a_folder(tmp_path, folder, engine):
    """Cleared after the second round, and killed there: the run that goes on has not forgotten it."""

    def after_the_second(trainer, module):
        if trainer.current_epoch == 1:
            trainer.optimizers[0].state.clear()
            trainer.save_checkpoint(tmp_path / "two.ckpt")

    def run(rounds, name, path=None):
        keep = fb.Kept("optimizer", folder=tmp_path / name) if folder else ["optimizer"]
        federation = fb.FederatedBayes(engine=engine, fusion="weighted_average", keep=keep, fraction=0.6)
        module, callbacks = changing("on_fit_start", "read"), [LambdaCallback(on_train_epoch_end=after_the_second)]
        federate(module, federation, rounds, loader(clients(20, 30, 25)), ckpt_path=path, callbacks=callbacks)
        return module

    whole = run(4, "whole")
    run(2, "parts")
    assert_equal(parameters(whole), parameters(run(4, "parts", tmp_path / "two.ckpt")))


def test_callbacks_that_read_find_the_state_of_a_client_and_change_nothing(tmp_path):
    found = []

    def look(trainer, module):
        read(trainer.optimizers[0])
        found.append(len(trainer.optimizers[0].state_dict()["state"]))

    for make, fusion in ((lambda: changing("on_fit_start", "read"), "weighted_average"), (bayesian, "sites")):
        runs = []
        for callbacks in ([], [LambdaCallback(on_train_epoch_start=look), DeviceStatsMonitor(cpu_stats=False)]):
            module = make()
            federation = fb.FederatedBayes(fusion=fusion, keep=["optimizer"])
            logger = CSVLogger(tmp_path)
            federate(module, federation, 3, loader(clients(20, 30)), callbacks=callbacks, logger=logger)
            runs.append(parameters(module))
        assert_equal(*runs)
    assert all(found[1:3])


def test_ivons_state_is_the_global_posterior_between_rounds_and_is_not_cleared():
    class Drawn(Plain):
        def configure_optimizers(self):
            return fb.IVON(self.parameters(), lr=0.1, num_examples=90)

        def on_train_epoch_end(self):
            with self.trainer.optimizers[0].sampled():
                found.append(self.trainer.optimizers[0].posterior(self))

    class Clears(Drawn):
        def on_train_epoch_end(self):
            self.trainer.optimizers[0].state.clear()

    for engine in ENGINES:
        for fusion in ("sites", "reverse_kl_barycenter"):
            found, federation = [], fb.FederatedBayes(engine=engine, fusion=fusion)
            federate(Drawn(), federation, 2, loader(clients(20, 30)))
            for name, variance in federation.posterior.variance.items():
                torch.testing.assert_close(found[-1].variance[name], variance)
            with pytest.raises(FederationError, match=r"the state of IVON was cleared by a hook"):
                federate(Clears(), fb.FederatedBayes(engine=engine, fusion=fusion), 2, loader(clients(20, 30)))


@pytest.mark.parametrize("where", ["training_step", "on_client_start"])
@pytest.mark.parametrize("how", ["replace", "load", "write", "clear"])
def test_a_stack_refuses_what_it_would_not_follow(how, where):
    """Cleared in a step of all, it is so for each of them."""

    class Starts(Plain):
        def on_client_start(self, client):
            self.mark = client.num_examples * 1.0
            ALL[how](self.trainer.optimizers[0])

    module = Starts(optimizer=torch.optim.SGD) if where == "on_client_start" else changing(where, how, at=0)
    if where == "training_step" and how in ("write", "clear"):
        return
    with pytest.raises(CannotVectorize, match=f"{where} (writes into|changes) the optimizer's state"):
        federate(module, keeping("vectorized", "optimizer"), 2, loader(clients(30, 30)))
    federate(module, keeping("sequential", "optimizer"), 2, loader(clients(30, 30)))


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")
def test_one_that_is_loaded_before_training_is_refused_and_adagrads_first_one_is_not():
    class Loads(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            load(optimizer)
            return optimizer

    for engine in ("sequential", "auto"):
        with pytest.raises(FederationError, match=r"the state of SGD was loaded or written into before training"):
            federate(Loads(), keeping(engine), 1, loader(clients(20, 30)))
    for optimizer in (torch.optim.Adagrad, lambda parameters, lr: None):
        federate(Plain(optimizer=optimizer), keeping("sequential", "optimizer"), 2, loader(clients(20, 30)))


def test_a_state_that_every_client_loads_is_no_clients_in_the_end():
    """torch's optimizers write into the tensors that they have loaded."""
    given = {i: {"momentum_buffer": torch.zeros_like(p)} for i, p in enumerate(Plain().parameters())}

    class Loads(changing("on_client_start", "clear").__class__):
        def on_client_start(self, client):
            own = self.trainer.optimizers[0]
            own.load_state_dict({**own.state_dict(), "state": given})

    federation = keeping("sequential", "optimizer")
    federate(Loads(), federation, 1, loader(clients(20, 30)))
    assert not torch.equal(*momenta(federation))
