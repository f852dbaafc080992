"""What clients keep from round to round, in memory, and the personal posteriors that are made of it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.states import ClientState, States, after_absence, with_counts
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_close, bayesian, federate, hears, loader
from tests.refusals import refusals


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
    one = torch.ones(2)
    state = ClientState(local={"head": one}, optimizers=[{0: entries}], kept={"shift": one}, own={"mean": {"w": one}})
    states.load_state_dict({3: vars(state)})
    found = states.of(3)
    (kept,) = found.optimizers
    devices = {name: value.device for name, value in kept[0].items()}
    assert devices == {"step": torch.device("cpu"), "exp_avg": META, "signal": META}
    assert [found.local["head"].device, found.kept["shift"].device, found.own["mean"]["w"].device] == [META] * 3


@pytest.mark.parametrize(("options", "device"), [({}, "cpu"), ({"fused": 1}, "meta"), ({"capturable": 1}, "meta")])
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
    options = {"local_epochs": epochs, "fraction": 0.3, "seed": 4, "fusion": "fedavg", "keep": ["optimizer"]}
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine=engine, **options)
    cohorts = []
    note = LambdaCallback(on_train_epoch_end=lambda *_: cohorts.append(federation.federation.engine.plan.cohort))
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


def federation(module=None, rounds=2, **options) -> fb.FederatedBayes:
    made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), keep=["posterior"], **options)
    federate(bayesian() if module is None else module, made, rounds, loader())
    return made


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_ends_are_the_global_posterior_and_the_one_that_the_client_has_sent(engine):
    module = bayesian()
    sent = hears(module)
    made = federation(module, fusion="rklb", engine=engine)
    for number, own in enumerate(sent):
        for personal, end in ((made.posterior_of(number), own), (made.posterior_of(number, 0.0), made.posterior)):
            assert_close(personal, end)


def test_between_the_ends_natural_parameters_are_interpolated():
    made = federation()
    own, shared, personal = made.posterior_of("1"), made.posterior, made.posterior_of(1, 0.3)
    for name, variance in personal.variance.items():
        precision = torch.zeros_like(variance)
        if not variance.any():
            torch.testing.assert_close(personal.mean[name], 0.7 * shared.mean[name] + 0.3 * own.mean[name])
            continue
        shift = torch.zeros_like(variance)
        for part, weight in ((shared, 0.7), (own, 0.3)):
            precision += weight / part.variance[name]
            shift += weight * part.mean[name] / part.variance[name]
        torch.testing.assert_close(variance, 1 / precision, rtol=1e-5, atol=0)
        torch.testing.assert_close(personal.mean[name], shift / precision, rtol=1e-4, atol=1e-6)


def test_with_sites_the_own_posterior_is_that_of_the_local_problem():
    """Not the means alone that are sent: those that it has trained, with the width of the global one it began with."""
    module = bayesian()
    before = fb.read_posterior(module)
    made = federation(module, 1, fusion="sites", engine="sequential")
    own = made.posterior_of(0)
    for name, variance in own.variance.items():
        torch.testing.assert_close(variance, before.variance[name], rtol=1e-5, atol=0)
        assert not torch.equal(own.mean[name], before.mean[name])
        assert not torch.equal(own.mean[name], made.posterior.mean[name])


@pytest.mark.parametrize("kind", [Plain, bayesian])
def test_local_parameters_are_the_clients_own(kind):
    module = kind()
    made = federation(module, local_parameters=["net*.2.*"])
    whole = fb.read_posterior(module)
    assert made.posterior_of(0).names == whole.names
    heads = [name for name in whole.names if ".2." in name]
    assert heads
    assert made.posterior.mean.keys().isdisjoint(heads)
    for name in heads:
        values = {float(made.posterior_of(k, 0.5).mean[name].flatten()[0]) for k in range(3)}
        assert len(values) == 3, "a head of its own, whatever the weight"
        assert bool(whole.variance[name].any()) == bool(made.posterior_of(0).variance[name].any())
    fb.load_posterior(module, made.posterior_of(2))


def test_a_client_that_has_not_trained_has_the_global_posterior():
    made = federation(fraction="turns")
    torch.testing.assert_close(dict(made.posterior_of(2).mean), dict(made.posterior.mean), rtol=0, atol=0)
    name = made.posterior.names[0]
    assert not torch.equal(made.posterior_of(0).mean[name], made.posterior.mean[name])


test_what_is_no_client_or_weight_is_refused = refusals(
    FederationError,
    (3, 1.0, "client=3: give a number below 3 or a name"),
    ("nobody", 1.0, "Known: 0, 1, 2"),
    (0, 1.5, "weight=1.5"),
    (True, 0.5, "client=True"),
    call=federation().posterior_of,
)


def test_clients_that_keep_nothing_have_no_posterior_of_their_own():
    made = fb.FederatedBayes(fb.IIDPartition(3))
    federate(bayesian(), made, 1, loader())
    with pytest.raises(FederationError, match=r"keep=\['posterior'\]"):
        made.posterior_of(0)


@pytest.mark.parametrize(("on_disk", "engine"), [(False, "vectorized"), (True, "sequential")])
def test_a_checkpoint_of_a_complete_federation_holds_them(engine, on_disk, tmp_path):
    keep = fb.Kept(("posterior",), tmp_path / "clients") if on_disk else ["posterior"]

    def callback():
        return fb.FederatedBayes(fb.IIDPartition(3), engine=engine, keep=keep)

    first, again, longer = callback(), callback(), callback()
    federate(bayesian(), first, 2).save_checkpoint(tmp_path / "done.ckpt")
    module = bayesian(seed=1)
    federate(module, again, 2, ckpt_path=tmp_path / "done.ckpt").save_checkpoint(tmp_path / "again.ckpt")
    assert_close(first.posterior_of(1, 0.5), again.posterior_of(1, 0.5))
    with again.federation.holding(1) as held:
        assert_close(first.posterior_of(1, 1.0), held)
    federate(bayesian(), longer, 3, ckpt_path=tmp_path / "again.ckpt")
    assert longer.history[:2] == first.history
