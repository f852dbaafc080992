"""The vectorized engine against the sequential one: the same numbers without noise, the same distribution with it."""

from functools import partial

import pytest
import torch
from bayesian_torch import layers as bt
from bayesian_torch.models.dnn_to_bnn import get_kl_loss
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

import lightning_fedbayes as fb
from lightning_fedbayes.clients.vectorized.optimizer import StackedOptimizer
from lightning_fedbayes.layers import LinearFlipout, LinearLocalReparameterization, LinearReparameterization
from lightning_fedbayes.methods import FedProx
from tests.clients.vectorized.modules import Convolutional, Late, Logging, Padded, PerClient, SkipsShort, images, words
from tests.federations import CLASSES, FEATURES, Made, Plain, blobs, federate, loader, network, of_bayesian_torch

PARTITIONS = [fb.IIDPartition(4), fb.DirichletPartition(5, alpha=0.5), fb.SizesPartition((1, 7, 30, 8, 44))]


def both(make, partition, rounds: int = 2, train=None, options=None, stack="vectorized", **settings):
    """The module and the federation after the same run by either engine; ``stack`` names the second."""
    results = []
    for engine in ("sequential", stack):
        module = make()
        federation = fb.FederatedBayes(partition, engine=engine, **settings)
        made = federate(module, federation, rounds, loader(batch_size=4) if train is None else train, **(options or {}))
        assert federation.federation.engine.name == ("sequential" if engine == "sequential" else "vectorized")
        assert federation.history[-1]["failed_clients"] == 0
        results.append((module, federation, made))
    return results


def assert_same(results, tolerance: float = 1e-5) -> None:
    (first, one, _), (second, other, _) = results
    torch.testing.assert_close(dict(first.state_dict()), dict(second.state_dict()), rtol=tolerance, atol=tolerance)
    for before, after in zip(one.history, other.history, strict=True):
        assert after == pytest.approx({**before, "seconds": after["seconds"]}, rel=1e-4, abs=1e-7)


class Momentum(Plain):
    def configure_optimizers(self):
        groups = [{"params": self.net[k].parameters(), "lr": lr} for k, lr in ((0, 0.1), (2, 0.01))]
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


SETTINGS = {
    "kept momentum": {"keep": ["optimizer"]},
    "one at a time": {"stack": 1},
    "three at a time": {"stack": 3, "local_epochs": 2},
    "a third of the clients": {"fraction": 0.34},
    "one client after the other": {"fraction": "turns"},
    "personal head": {"local_parameters": ["net.2.*"]},
    "proximal": {"fusion": FedProx(0.5), "local_epochs": 2, "local_parameters": ["net.2.*"]},
    "drawn together": {"fusion": "conflation", "weighting": "max_discrepancy"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_engines_agree_under_every_setting_of_the_federation(setting):
    assert_same(both(Momentum, PARTITIONS[2], rounds=3, **SETTINGS[setting]))


@pytest.mark.parametrize(("keep", "seed"), [("optimizer", 0), ("optimizer", 1), ((), 2)])
def test_kept_states_of_adam_may_differ_in_their_number_of_steps(keep, seed):
    """Wherever those that are new stand in the stack."""
    options = {"rounds": 4, "fraction": 0.5, "local_epochs": 2, "keep": keep, "seed": seed}
    assert_same(both(lambda: Plain(optimizer=torch.optim.Adam, lr=0.01), fb.IIDPartition(8), **options))


def test_clients_with_unlike_numbers_of_kept_steps_step_together(monkeypatch):
    """A round takes the steps of the longest client, 12, not those of all clients together, 23."""
    sizes = []
    step_of = StackedOptimizer.step
    monkeypatch.setattr(StackedOptimizer, "step", lambda self: (sizes.append(len(self._selected)), step_of(self)))
    federation = fb.FederatedBayes(fb.SizesPartition((48, 32, 12)), engine="vectorized", keep=["optimizer"])
    federate(Plain(optimizer=torch.optim.Adam), federation, 3, loader(blobs(92), batch_size=4))
    assert sizes == ([3] * 3 + [2] * 5 + [1] * 4) * 3


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_batch_norm_keeps_statistics_of_every_client(buffers):
    sizes = fb.SizesPartition((50, 28, 12))
    assert_same(both(lambda: Plain(network(batch_norm=True)), sizes, rounds=3, buffers=buffers))


@pytest.mark.parametrize("keep", [(), "optimizer"])
def test_networks_of_all_sorts_of_parameters(keep):
    class Adam(Convolutional):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    results = both(Adam, fb.SizesPartition((27, 20, 13)), rounds=3, train=loader(images()), keep=keep)
    assert_same(results)


@pytest.mark.parametrize(("make", "data"), [(Padded, words), (Late, blobs)])
def test_paddings_and_a_buffer_that_changes_late(make, data):
    assert_same(both(make, PARTITIONS[0], train=loader(data())))


def slow(examples: int) -> Made:
    """Examples one at a time, with a random transform: not tensors in memory."""
    x, y = blobs(examples).tensors
    return Made(lambda index: (x[index] + 0.1 * torch.randn(FEATURES), y[index]), count=examples)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_are_loaded_one_by_one(workers):
    train = loader(fb.ClientDatasets({"a": slow(30), "b": slow(18), "c": slow(9)}), num_workers=workers)
    assert_same(both(Plain, None, train=train, local_epochs=2))


def test_padded_batches_of_different_lengths_train_in_parts():
    def collate(examples):
        """Sequences cut to a length that depends on the batch."""
        length = 2 + int(sum(y for _, y in examples)) % 3
        return torch.stack([x[:length].mean(0, keepdim=True).expand(FEATURES) for x, _ in examples]).unsqueeze(
            1
        ).expand(-1, length, -1), torch.stack([y for _, y in examples])

    class Sequence(Plain):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self(x).mean(1), y)

    assert_same(both(Sequence, PARTITIONS[0], train=loader(collate_fn=collate, batch_size=5)))


def test_what_a_client_is_told_reaches_its_own_step():
    """A proximal term, as FedProx has it, and a personal head: the anchor is the client's own start."""
    assert_same(both(PerClient, PARTITIONS[1], rounds=3, local_parameters=["net.2.*"]))


@pytest.mark.parametrize("keep", [(), "optimizer"])
def test_clients_that_skip_a_step_keep_their_own_number_of_steps(keep):
    make = partial(SkipsShort, optimizer=torch.optim.Adam, lr=0.01)
    assert_same(both(make, fb.SizesPartition((50, 26, 14)), rounds=3, local_epochs=3, keep=keep))


class TwoPasses(Plain):
    """Looks at the network without gradient before it trains it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(LinearReparameterization(FEATURES, CLASSES, posterior_rho_init=-30.0))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self(batch[0])
        return super().training_step(batch, batch_idx) + 0.01 * self.net.kl_loss()


def test_a_pass_without_gradient_takes_none_from_the_next():
    results = both(TwoPasses, PARTITIONS[2], fusion="rklb")
    assert_same(results, 1e-4)
    assert (results[1][0].net.rho_weight.detach() + 30).abs().min() > 1e-3


def test_logged_values_agree():
    seen = {}
    outputs = LambdaCallback(on_train_batch_end=lambda made, module, outputs, *_: seen.update(outputs))
    outputs.sees_stacks = True
    (_, _, first), (_, _, second) = both(Logging, PARTITIONS[1], options={"callbacks": [outputs]})
    for name in ("mean", "greatest", "constant"):
        torch.testing.assert_close(second.callback_metrics[name], first.callback_metrics[name], rtol=1e-5, atol=1e-6)
    assert "default" in second.callback_metrics
    assert seen["note"] == "kept"
    assert seen["logits"].dim() == 3


class Noisy(Plain):
    def __init__(self, layer: type[nn.Module]) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Dropout(0.2), layer(FEATURES, CLASSES, posterior_rho_init=0.0)), lr=0.3)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.01 * self.net[1].kl_loss()


class Converted(bt.LinearReparameterization):
    """As ``dnn_to_bnn`` leaves it: the output alone."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.dnn_to_bnn_flag = True


@pytest.mark.parametrize("kind", ["Reparameterization", "Flipout"])
def test_networks_of_bayesian_torch_end_equal_where_their_noise_vanishes(kind):
    class WithKL(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 1e-3 * get_kl_loss(self.net)

    def make():
        return WithKL(of_bayesian_torch(network(), kind, -16.0), lr=0.02)

    assert_same(both(make, PARTITIONS[2], rounds=3, fusion="weighted_average"))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [LinearReparameterization, LinearLocalReparameterization, LinearFlipout, Converted])
def test_noise_is_independent_between_clients_and_has_the_same_moments(layer):
    """200 clients with the same data in the same order: what they send differs by their noise alone."""
    clients = 200
    data = blobs(12)
    moments = []
    for engine in ("sequential", "vectorized"):
        sent: list[Tensor] = []

        def record(facts, sent=sent):
            sent.extend(torch.cat([each.posterior.flatten()[0], each.posterior.flatten()[1]]) for each in facts)
            return [1.0] * len(facts)

        federation = fb.FederatedBayes(engine=engine, weighting=record)
        train = loader(fb.ClientDatasets({str(i): data for i in range(clients)}), batch_size=4, shuffle=False)
        federate(Noisy(layer), federation, 1, train)
        moments.append(torch.stack(sent).double())
    first, second = moments
    scale = ((first.var(0) + second.var(0)) / clients).sqrt()
    z = (first.mean(0) - second.mean(0)) / scale.clamp_min(1e-9)
    assert z.abs().max() < 5
    assert 0.5 < z.square().mean() < 2
    spread = (second.std(0) / first.std(0)).log()  # standard error about sqrt(1/400 + 1/400) = 0.07
    assert spread.abs().max() < 0.4
    assert spread.square().mean().sqrt() < 0.12
    # noise shared by the clients would leave no spread at all; noise shared by two halves, a correlation
    left, right = second[: clients // 2], second[clients // 2 :]
    left, right = left - left.mean(0), right - right.mean(0)
    correlation = (left * right).mean(0) / (left.std(0) * right.std(0))
    assert correlation.square().mean().sqrt() < 0.2
