"""What a fit leaves behind in the user's objects, and settings that a hook changes during a fit."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.core.quiet import environment, quietly
from tests.federations import Plain, bayesian, clients, federate, loader, network, trainer


class Mine(L.Trainer):
    """A user's kind of Trainer."""


@pytest.mark.parametrize("fails", ["", "on_train_start", "on_train_epoch_end"])
def test_the_users_objects_are_as_they_were(fails, tmp_path):
    def fail():
        raise RuntimeError("no")

    module, checkpoints, saved = Plain(), ModelCheckpoint(tmp_path), []
    module.on_save_checkpoint = saved.append
    if fails:
        setattr(module, fails, fail)
    before, filters = {**vars(module), **vars(checkpoints)}, list(warnings.filters)
    made = trainer(1, [fb.FederatedBayes(fb.IIDPartition(3)), checkpoints], enable_checkpointing=True)
    made.__class__ = Mine
    with pytest.raises(RuntimeError, match="no") if fails else nullcontext():
        made.fit(module, loader())
        assert saved
    assert type(made) is Mine
    assert vars(module)["on_save_checkpoint"] == before["on_save_checkpoint"]
    assert checkpoints.save_last is before["save_last"] is None
    assert not {"log"} & vars(module).keys()
    assert [each for each in warnings.filters if each not in filters] == []


def test_environment_variables_are_as_they_were(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_SILENT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    federate(Plain(), fb.FederatedBayes(fb.IIDPartition(2)), 1)
    with quietly(), environment(MASTER_ADDR="here", PATH=""):
        assert os.environ["WANDB_SILENT"] == "true"
        assert (os.environ["MASTER_ADDR"], os.environ["PATH"]) == ("here", "")
    assert dict(os.environ) == before


class Fails(Plain):
    def training_step(self, batch, batch_idx):
        raise RuntimeError(self)


FITS = {
    "sites": (bayesian, {"engine": "sequential"}),
    "a stack": (bayesian, {"engine": "vectorized"}),
    "IVON": (lambda: Plain(optimizer=fb.IVON), {}),
    "Laplace": (Plain, {"posterior": fb.Laplace(prior_std=1.0)}),
    "personal": (Plain, {"fusion": "ditto", "keep": ["optimizer", "posterior"]}),
    "late": (Plain, {"schedule": fb.Asynchronous(2, 2)}),
    "refused": (Plain, {"fusion": "fedavg", "local_parameters": ["nothing"]}),
    "failed": (Fails, {}),
}


@pytest.mark.parametrize("kind", FITS)
def test_nothing_holds_a_module_a_trainer_or_a_federation_when_they_are_done(kind, tmp_path):
    make, options = FITS[kind]
    module, federation = make(), fb.FederatedBayes(fb.IIDPartition(3), **options)
    callbacks = [federation, fb.UncertaintyReport(), ModelCheckpoint(tmp_path / "files")]
    made = trainer(2, callbacks, enable_checkpointing=True, logger=CSVLogger(tmp_path / "log"))
    fb.check(made, module, loader())
    try:
        made.fit(module, loader(), loader(shuffle=False))
    except FedBayesError:
        assert kind in ("refused", "failed")
    held = [module, made, federation, *callbacks[1:], made.train_dataloader]
    held += [] if kind == "refused" else [federation.federation, federation.federation.engine]
    references = [weakref.ref(each) for each in held if each is not None]
    del module, made, federation, callbacks, held
    gc.collect()
    assert [each() for each in references if each() is not None] == []


CHANGES = {
    "gradient_clip_val": lambda trainer: 0.5,
    "accumulate_grad_batches": lambda trainer: 2,
    "optimizers": lambda trainer: [torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.1)],
    "optimizers in their list": lambda trainer: torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.1),
}


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_validation_end"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("setting", CHANGES)
def test_a_setting_that_a_hook_changes_ends_the_fit_by_name(setting, engine, hook):
    class Changes(fb.FederatedBayes.__mro__[1]):
        sees_stacks = True

    def change(self, trainer, pl_module, *_):
        if trainer.current_epoch == 1 and not trainer.sanity_checking:
            value = CHANGES[setting](trainer)
            if isinstance(value, torch.optim.SGD):
                trainer.optimizers[0] = value
            else:
                setattr(trainer, setting, value)

    setattr(Changes, hook, change)
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine=engine)
    with pytest.raises(FederationError, match=f"a hook has changed trainer.{setting.split()[0]}"):
        federate(Plain(), federation, 3, val=loader(shuffle=False), callbacks=[Changes()])


def test_a_users_recurrent_layer_shares_nothing(caplog):
    class Own(nn.LSTM):
        pass

    class Module(Plain):
        def __init__(self):
            super().__init__()
            self.recurrent = Own(6, 4, batch_first=True)

        def forward(self, x):
            return self.net(x) + self.recurrent(x[:, None])[0][:, -1, :3]

    federate(Module(), fb.FederatedBayes(fb.IIDPartition(3), engine="sequential"))
    assert "Clients share" not in caplog.text


@pytest.mark.parametrize("engine", ["sequential", "vectorized", 2])
@pytest.mark.parametrize(("epochs", "precision"), [(1, "32-true"), (2, "32-true"), (1, "bf16-true")])
def test_the_training_loss_is_the_mean_over_examples(engine, epochs, precision):
    """Clients of 5, 9 and 4 examples in batches of 4: last ones are short. In half precision 5 · 300 would be 1504."""

    class Mean(Plain):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean() * 0 + batch[0].mean()

    values = torch.randn(18, 6) if precision == "32-true" else torch.full((18, 6), 300.0)
    parts = dict(zip("abc", values.split([5, 9, 4])))
    data = fb.ClientDatasets({name: TensorDataset(part, torch.zeros(len(part))) for name, part in parts.items()})
    federation = fb.FederatedBayes(engine=engine, local_epochs=epochs)
    federate(Mean(), federation, 1, DataLoader(data, batch_size=4), precision=precision)
    assert federation.history[0]["train_loss"] == pytest.approx(float(values.mean()), abs=1e-6)


class Parts(fb.HybridBayesianClassifier):
    """Logs the loss that it returns, whose divergence the method replaces."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("whole", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss


class Near(Plain):
    """Logs its loss, and the distance from the global model that FedProx adds to it."""

    def __init__(self):
        super().__init__(lr=0.5)
        self.on_train_epoch_start()

    def on_train_epoch_start(self):
        self.start = [parameter.detach().clone() for parameter in self.parameters()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        term = sum(((p - start) ** 2).sum() for p, start in zip(self.parameters(), self.start))
        figures = {"train/nll": loss, "whole": loss + term.detach() / 2}
        self.log_dict(figures, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss


PARTS = {
    "sites": (lambda: Parts(network(), bayesian_last=2, learning_rate=0.1), "sites"),
    "FedProx": (Near, fb.methods.FedProx(1.0)),
    "neither": (Near, "fedavg"),
}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("kind", PARTS)
def test_the_loss_is_told_as_its_parts(kind, engine, options):
    if options and engine == "vectorized":
        return
    make, fusion = PARTS[kind]
    federation = fb.FederatedBayes(engine=engine, fusion=fusion)
    made = federate(make(), federation, 3, loader(clients(20, 31, 9)), **options)
    told, last = made.callback_metrics, federation.history[-1]
    assert last["train_loss"] == pytest.approx(float(told["train/nll"]), rel=1e-5)
    if kind == "neither":
        assert "added_loss" not in last
    else:
        assert last["added_loss"] == pytest.approx(float(told["whole"] - told["train/nll"]), rel=1e-3)
        assert abs(last["added_loss"]) > 1e-4
