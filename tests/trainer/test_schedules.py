"""Learning rates that move in every step: each client begins at the round's position, which the longest moves on."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from tests.federations import Plain, assert_equal, blobs, parameters, trainer

STEPS = 18
SCHEDULES = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=STEPS + 1),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / 5, max(0.0, (STEPS - step) / (STEPS - 5)))
    ),
    "one after the other": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


class Scheduled(Plain):
    """Notes the rate of every step, by client."""

    def __init__(self, schedule, optimizer="SGD", notes=True, **config):
        super().__init__()
        self.notes = notes
        self.schedule, self.kind, self.config = SCHEDULES[schedule], optimizer, {"interval": "step", **config}
        self.rates = {}

    def configure_optimizers(self):
        optimizer, self.client = OPTIMIZERS[self.kind](self.parameters()), "0"
        if self.notes:  # a stack takes no hooks
            optimizer.register_step_pre_hook(self.note)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), **self.config}}

    def note(self, optimizer, *_):
        self.rates.setdefault(self.client, []).append(optimizer.param_groups[0]["lr"])


class Told(Scheduled):
    """Knows whose step it is, so that clients train one after another."""

    def on_client_start(self, client):
        self.client = client.name


class Own(Told):
    """Moves its rate itself: by a schedule of its own, or by the Trainer's steps."""

    def __init__(self, where):
        super().__init__("warm-up")
        self.where = where

    def configure_optimizers(self):
        made = super().configure_optimizers()
        self.own = {"schedule": made["lr_scheduler"]["scheduler"]}
        return made["optimizer"]

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.where == "in the step":
            self.own["schedule"].step()
        elif self.where == "by the Trainer's steps":
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 9)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.where == "after the batch":
            self.own["schedule"].step()


def dealt(sizes):
    """Clients 0, 1, … of these sizes."""
    parts = torch.utils.data.random_split(blobs(sum(sizes)), sizes, torch.Generator().manual_seed(0))
    return fb.ClientDatasets({str(client): part for client, part in enumerate(parts)})


def fit(module, federation, sizes=(24,), rounds=3, ckpt_path=None, **options):
    callbacks = [] if federation is None else [federation]
    made = trainer(rounds, callbacks, **options)
    data = dealt(sizes).datasets[0] if federation is None else dealt(sizes)
    made.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return made


ALONE = [(partial(Scheduled, s, o, frequency=n), n) for s in SCHEDULES for o in OPTIMIZERS for n in (1, 2)]
ALONE += [(partial(Own, where), 1) for where in ("in the step", "after the batch", "by the Trainer's steps")]


@pytest.mark.parametrize(("make", "accumulate"), ALONE)
def test_one_client_trains_as_without_a_federation(make, accumulate):
    """Also where the module moves its rate itself."""
    made = [make(), make()]
    fit(made[0], None, accumulate_grad_batches=accumulate)
    fit(made[1], fb.FederatedBayes(keep=["optimizer"]), accumulate_grad_batches=accumulate)
    assert made[0].rates == made[1].rates
    assert len(set(made[0].rates["0"])) > 3
    assert_equal(parameters(made[0]), parameters(made[1]))


@pytest.mark.parametrize("where", ["of the Trainer", "in the step", "after the batch", "by the Trainer's steps"])
def test_each_client_begins_at_the_position_of_the_round_which_the_longest_moves_on(where):
    """Clients of 3, 5 and 9 batches, as in docs/what_works.md."""
    made = Told("warm-up") if where == "of the Trainer" else Own(where)
    fit(made, fb.FederatedBayes(), (12, 20, 36), rounds=2)
    (wanted,) = SCHEDULES["warm-up"](OPTIMIZERS["SGD"]([torch.zeros(1, requires_grad=True)])).lr_lambdas
    rates = [0.1 * (min(1.0, step / 9) if "steps" in where else wanted(step)) for step in range(STEPS)]
    for client, batches in {"0": 3, "1": 5, "2": 9}.items():
        assert made.rates[client] == pytest.approx([*rates[:batches], *rates[9 : 9 + batches]])


@pytest.mark.parametrize("options", [{}, {"local_epochs": 2}, {"fraction": 0.67}, {"keep": ["optimizer"]}])
@pytest.mark.parametrize("schedule", ["one cycle", "warm-up"])
def test_a_stack_of_clients_trains_as_one_after_another(schedule, options):
    made = {engine: Scheduled(schedule, "AdamW", notes=False) for engine in ("sequential", "vectorized", 2)}
    for engine, module in made.items():
        rounds = 1 if "local_epochs" in options else 2
        fit(module, fb.FederatedBayes(engine=engine, **options), (12, 20, 28), rounds=rounds)
    for engine in ("vectorized", 2):
        for one, other in zip(made["sequential"].parameters(), made[engine].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("module", [lambda: Scheduled("one cycle"), lambda: Own("by the Trainer's steps")])
def test_a_resumed_fit_goes_on_at_its_position(module, tmp_path):
    whole, parts = module(), [module(), module()]
    fit(whole, fb.FederatedBayes(engine="sequential"), (12, 20), rounds=3)
    made = fit(parts[0], fb.FederatedBayes(engine="sequential"), (12, 20), rounds=1)
    made.save_checkpoint(tmp_path / "one.ckpt")
    fit(parts[1], fb.FederatedBayes(engine="sequential"), (12, 20), ckpt_path=tmp_path / "one.ckpt")
    assert_equal(parameters(whole), parameters(parts[1]))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_estimated_steps_are_those_that_a_schedule_ends_at(fraction):
    class Asks(Told):
        def configure_optimizers(self):
            self.estimated = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    made = Asks("cosine")
    done = fit(made, fb.FederatedBayes(fraction=fraction), (8, 12, 20, 36), rounds=4)
    assert made.estimated == done.lr_scheduler_configs[0].scheduler.last_epoch


class Kept(Plain):
    """Keeps its schedulers where a hook could step them, too."""

    def __init__(self, interval):
        super().__init__()
        self.interval = interval

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.StepLR(optimizer, 2, 0.5)]
        self.kept = lr_scheduler.SequentialLR(optimizer, self.parts, [4])
        return [optimizer], [{"scheduler": self.kept, "interval": self.interval}]


@pytest.mark.parametrize(("interval", "steps"), [("epoch", 3), ("step", 27)])
def test_a_scheduler_that_the_module_keeps_moves_no_more_often(interval, steps):
    made = {engine: Kept(interval) for engine in ("sequential", "vectorized")}
    for engine, module in made.items():
        fit(module, fb.FederatedBayes(engine=engine), (12, 20, 36))
        assert module.kept.last_epoch == steps
    for one, other in zip(*(module.parameters() for module in made.values()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("by", ["a schedule", "the module"])
def test_a_rate_in_a_tensor_goes_back_with_the_client(by):
    class InTensor(Told):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            if self.kind == "AdamW":
                group = made["optimizer"].param_groups[0]
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
            return made if by == "a schedule" else made["optimizer"]

        def training_step(self, batch, batch_idx):
            if by == "the module":
                self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9  # of a tensor: in its place
            return super().training_step(batch, batch_idx)

        def note(self, optimizer, *_):
            self.rates.setdefault(self.client, []).append(float(optimizer.param_groups[0]["lr"]))

    made = [InTensor("warm-up", kind) for kind in OPTIMIZERS]
    for module in made:
        module.schedule = lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)
        fit(module, fb.FederatedBayes(), (12, 20, 36), rounds=2)
    for client, rates in made[0].rates.items():
        assert made[1].rates[client] == pytest.approx(rates)


def test_the_script_of_the_page_is_the_plain_one_but_for_two_lines_and_ends_where_it_does_with_one_client():
    text = (Path(__file__).parents[2] / "docs/fine_tuning.md").read_text().partition("## A script with two groups")[2]
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    for old, new in (("shuffle=True", "shuffle=False"), ("dropout=0.1", "dropout=0.0"), ("clients=4", "clients=1")):
        assert script.count(old) == 1
        script = script.replace(old, new)
    lines = [line for line in script.splitlines() if not line.endswith("# new")]
    plain = "\n".join("federation = []" if line.endswith("# changed") else line for line in lines)
    assert (script.count("fb"), plain.count("fb")) == (3, 0)
    ends = []
    for each in (plain, script):
        exec(compile(each, "script", "exec"), found := {"__name__": __name__})
        ends.append(parameters(found["module"]))
        assert found["trainer"].lr_scheduler_configs[0].scheduler.last_epoch == 30
    assert_equal(*ends)
