"""Learning rates that move in every step end over networks where they end in one process."""

import re

import pytest
import torch
from torch.optim import lr_scheduler

import lightning_fedbayes as fb
from lightning_fedbayes.transport.flower import FusionStrategy
from lightning_fedbayes.transport.schedules import believed
from tests.federations import Crash, Plain, assert_equal, crash, federate, loader
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid, SlowGrid
from tests.trainer.test_schedules import SCHEDULES, Own, Told, dealt
from tests.transport.federation import BlobData

RATES = {}
"""Client → rate and ``trainer.global_step`` of each of its steps."""


class Data(BlobData):
    """Clients of 3, 5 and 9 batches."""

    def __init__(self):
        super().__init__(dealt((12, 20, 36)))

    def train_dataloader(self):
        return loader(self.dataset, batch_size=4)


class Noted(Told):
    def note(self, optimizer, *_):
        RATES.setdefault(self.client, []).append((optimizer.param_groups[0]["lr"], self.trainer.global_step))


class Estimated(Noted):
    """A warm-up by steps and then a cosine, of all steps, and a decay by rounds, on one rate."""

    def __init__(self):
        super().__init__("cosine")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(self.note)
        self.warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        step = lr_scheduler.SequentialLR(optimizer, [self.warm, cosine], [4])
        rounds = lr_scheduler.ExponentialLR(optimizer, 1 - 1 / (3 * self.trainer.max_epochs))
        return [optimizer], [{"scheduler": step, "interval": "step"}, rounds]


class Stepping(Own, Noted):
    """Steps its schedule, or sets its rate, itself."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.where == "before the step":
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 20)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


MODULES = {
    **{name: lambda name=name: Noted(name) for name in SCHEDULES},
    "every second": lambda: Noted("cosine", frequency=2),
    "of the estimated steps": Estimated,
    **{where: lambda where=where: Stepping(where) for where in ("in the step", "after the batch", "before the step")},
}
LONGER = {"local_epochs": 2, "fraction": 0.67}


def alone(make, rounds=2, accumulate_grad_batches=1, **options):
    """Rates and posterior of one process."""
    RATES.clear()
    federation = fb.FederatedBayes(engine="sequential", seed=3, fusion="rklb", **options)
    data = Data().train_dataloader()
    federate(make(), federation, rounds, data, accumulate_grad_batches=accumulate_grad_batches)
    return dict(RATES), federation.posterior.mean


def over_flower(make, rounds=2, shared=True, grid=LocalGrid, change=None, client=None, kinds=("train",), **options):
    RATES.clear()
    apps = client_apps(3, make, shared, Data, partition=None, **(client or {}))
    strategy, made = FusionStrategy(wait_for=3, seed=3, **options), grid(apps, change)
    made.kinds = kinds
    run(made, strategy, rounds, make)
    return strategy, made


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("shared", [True, False], ids=["simulation", "deployment"])
def test_rates_steps_and_weights_are_those_of_one_process(make, shared):
    rates, wanted = alone(make)
    strategy, _ = over_flower(make, shared=shared)
    assert rates == RATES
    assert {client: len(found) for client, found in RATES.items()} == {"0": 6, "1": 10, "2": 18}
    assert len({rate for rate, _ in RATES["2"]}) > 4
    assert_equal(strategy.server.posterior.mean, wanted)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_cohorts_of_several_epochs_and_a_server_that_dies_end_as_one_process(accumulate, tmp_path):
    rates, wanted = alone(Estimated, 3, accumulate_grad_batches=accumulate, **LONGER)
    client = {"local_epochs": 2, "trainer": {"accelerator": "cpu", "accumulate_grad_batches": accumulate}}
    options = {"client": client, "fraction": LONGER["fraction"], "checkpoint": tmp_path / "a.pt"}
    seen = []

    def dies(reply):
        seen.append(reply)
        return crash() if len(seen) == 3 else reply

    with pytest.raises(Crash):
        over_flower(Estimated, 3, change=dict.fromkeys(range(3), dies), **options)
    strategy, grid = over_flower(Estimated, 3, **options)
    assert len(grid.of("train")) == 4
    for name, found in RATES.items():
        assert found == rates[name][-len(found) :]
    assert_equal(strategy.server.posterior.mean, wanted)


def test_the_steps_of_all_rounds_are_asked_for_once_and_stay_in_the_checkpoint(tmp_path):
    asked = [over_flower(Estimated, rounds, checkpoint=tmp_path / "a.pt")[1] for rounds in (1, 2)]
    assert [len(grid.of("query.once")) for grid in asked] == [3, 0]
    for *_, reply in asked[0].of("query.once"):
        assert set(reply.content) == {"config", "metrics"}
        assert set(reply.content["metrics"]) == {"num-examples", "steps"}
    for *_, reply in asked[1].of("train"):
        assert set(reply.content["metrics"]) == {"num-examples", "train_loss", "schedule/steps", "schedule/moves"}
    assert not over_flower(Plain)[1].of("query.once")


def lying(reply):
    told = reply.content.get("metrics", {})
    for name in told.keys() & {"steps", "schedule/steps", "schedule/moves"}:
        told[name] = 1e9
    return reply


@pytest.mark.parametrize("make", [lambda: Noted("warm-up"), Estimated])
def test_a_client_that_lies_about_its_steps_moves_the_schedule_no_further_than_the_bound(make, caplog):
    """Client 0 has 12 examples, the others 20 and 36: the median of what it could have done is 9 steps."""
    caplog.set_level("INFO")
    strategy, _ = over_flower(make, change={0: lying}, kinds=None)
    assert strategy.steps.moved == [36, 36] * 2
    assert strategy.steps.total(2, 1.0, 3) == (72 if make is Estimated else 0)
    assert "client 0 says that it has made 1000000000 steps" in caplog.text


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch", [1, 7, 32])
@pytest.mark.parametrize("sizes", [(3, 5, 9), (1, 1, 1, 900), (50, 50, 1), (400, 7), (31, 32, 33, 3000)])
def test_clients_alike_of_any_sizes_are_believed(sizes, batch, epochs):
    claims = {client: [size, *[epochs * -(-size // batch)] * 2] for client, size in enumerate(sizes)}
    assert max(sizes) > 100 or believed(claims, 1.0) == {client: each[1:] for client, each in claims.items()}
    most = {client: [10**9, 10**9, 0] if client == 0 else each for client, each in claims.items()}
    if len(sizes) > 2:
        middle = sorted(each[1] for each in claims.values())[-1]
        assert believed(most, 2.0)[0][0] <= 4 * 100 * middle
    assert believed(most, None)[0] == [10**6, 0]


class Late(Noted):
    """Asks where the server does not."""

    def on_train_start(self):
        assert self.trainer.max_epochs == 4
        assert self.trainer.estimated_stepping_batches


class Apart(Stepping):
    """Steps its schedule once in a round as well."""

    def on_train_epoch_end(self):
        self.own["schedule"].step()


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (lambda: Stepping("by the Trainer's steps"), {}, r'a hook sets lr after a step.*"interval": "step"}'),
        (lambda: Apart("in the step"), {}, r'steps its schedules now and then.*"interval": "step"}'),
        (lambda: Late("cosine"), {}, "give the module an argument total_steps"),
        (
            lambda: Noted("cosine"),
            {"schedule": fb.Asynchronous(buffer=2), "grid": SlowGrid},
            "does not count the steps of its rounds.*use interval='epoch'",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_line_to_write(make, options, says, caplog):
    caplog.set_level("INFO")
    with pytest.raises(fb.core.errors.FederationError):
        over_flower(make, 4, **options)
    texts = [each.getMessage() for each in caplog.records if each.name == "lightning_fedbayes.transport.client"]
    assert texts
    for text in texts:
        assert re.search(says, text, re.DOTALL), text


@pytest.mark.parametrize("make", [Plain, lambda: Noted("cosine"), Estimated])
def test_under_privacy_steps_leave_as_far_as_sizes_say_them(make, tmp_path):
    private = {"privacy": fb.UpdatePrivacy(1.0, 1.0), "state_folder": tmp_path}
    told = [reply.content["metrics"] for *_, reply in over_flower(make, client=private)[1].of("train")]
    steps = {"schedule/steps", "schedule/moves"} if make is not Plain else set()
    assert [set(each) for each in told] == [{"num-examples", "privacy/epsilon"} | steps] * 6


class ByLoss(Stepping):
    """Moves its schedule where the loss is large: how often tells of the data."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs["loss"] > 1:
            self.own["schedule"].step()


def test_under_privacy_a_schedule_that_moves_by_the_data_is_not_told(tmp_path, caplog):
    private = {"privacy": fb.UpdatePrivacy(1.0, 1.0), "state_folder": tmp_path}
    over_flower(lambda: ByLoss("by the loss"), client=private)
    assert "how often its schedule moves may depend on them" in caplog.text
