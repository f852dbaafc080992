"""Clipped and noised gradients of single examples inside a federation."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import ExamplePrivacy
from lightning_fedbayes.clients.privacy.accountant import epsilon_spent
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.seeding import private_normal
from lightning_fedbayes.layers import LinearFlipout, Reparameterized, kl_divergence
from tests.federations import Plain, assert_equal, bayesian, federate, loader, network, parameters, trainer
from tests.refusals import refusals

pytest.importorskip("opacus")

ESTIMATORS = ("flipout", "local_reparameterization", "reparameterization")


class Gradients(L.Callback):
    """Notes parameters, batch and gradient of every step; stands after the privacy."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch = batch

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = {name: p.grad.clone() for name, p in pl_module.named_parameters()}
        self.steps.append((parameters(pl_module), self.batch, gradients))


def run(module, privacy=None, rounds=2, clients=3, callbacks=(), **options):
    options = {"fusion": "rklb", **options}  # as for sites, which do not go with it, where there is none
    federation = fb.FederatedBayes(fb.IIDPartition(clients), engine="sequential", seed=4, **options)
    privacies = [privacy] if privacy else []
    return federate(module, federation, rounds, callbacks=[*privacies, *callbacks]), federation


def clipped_by_hand(at, batch, clip):
    """Mean over the batch of g_i min(1, C/‖g_i‖), with autograd on one example after the other."""
    module = Plain()
    module.load_state_dict(at)
    total = {name: torch.zeros_like(value) for name, value in at.items()}
    norms = []
    for x, y in zip(*batch):
        loss = nn.functional.cross_entropy(module(x[None]), y[None])
        gradient = dict(zip(at, torch.autograd.grad(loss, list(module.parameters()))))
        norm = torch.cat([each.flatten() for each in gradient.values()]).norm()
        norms.append(float(norm))
        for name, each in gradient.items():
            total[name] += each * min(1.0, clip / float(norm))
    return {name: value / len(batch[0]) for name, value in total.items()}, norms


class Stumbles(Plain):
    """Client 1 fails between forward and backward, in every step."""

    def on_client_start(self, client):
        self.client = client.number

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.client == 1:
            raise RuntimeError("out of order")
        return loss


@pytest.mark.parametrize(("module", "rounds", "failed"), [(Plain(), 2, 0), (Stumbles(), 1, 1)])
def test_without_noise_the_gradient_is_the_mean_of_clipped_gradients(module, rounds, failed):
    """Also after a client that fails, which leaves nothing to the next."""
    noted, clip, norms = Gradients(), 1.2, []
    _, federation = run(module, ExamplePrivacy(clip, 0.0), rounds, callbacks=[noted])
    assert federation.history[0]["failed_clients"] == failed
    batches = 4  # of 8, and the last of 6, of 30 examples of each of three clients
    assert len(noted.steps) == rounds * (3 - failed) * batches
    for at, batch, gradient in noted.steps:
        expected, found = clipped_by_hand(at, batch, clip)
        norms += found
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    assert min(norms) < clip < max(norms), "some are clipped, some are not"


@pytest.mark.parametrize("seed", [4, None])
def test_the_noise_comes_from_seed_round_client_and_step_or_from_a_secret(seed):
    """Whoever knows the federation's seed, 4, cannot draw a secret one again: what is left is as wide as the noise."""
    noted, clip, z = Gradients(), 0.6, 1.5
    made, _ = run(Plain(), ExamplePrivacy(clip, z, seed=seed), callbacks=[noted])
    assert ("privacy/simulated_example_epsilon" in made.callback_metrics) is (seed is not None)
    noises, left = [], []
    for number, (at, batch, gradient) in enumerate(noted.steps):
        expected, _ = clipped_by_hand(at, batch, clip)
        round, rest = divmod(number, 12)
        for place, (name, value) in enumerate(expected.items()):
            noise = (gradient[name] - value) * len(batch[0]) / (z * clip)
            drawn = private_normal(4, value, "gradient", round, *divmod(rest, 4), place)
            noises.append(noise.flatten())
            left.append((noise - drawn).flatten())
    noise, left = torch.cat(noises), torch.cat(left)
    assert float(left.abs().max()) < 1e-3 if seed == 4 else float(left.std()) == pytest.approx(2**0.5, rel=0.1)
    assert float(noise.std()) == pytest.approx(1.0, abs=5 / (2 * len(noise)) ** 0.5)


def mixed():
    torch.manual_seed(0)
    return Plain(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), LinearFlipout(6, 3)))


@pytest.mark.parametrize("make", [Plain, mixed, *(lambda e=e: bayesian(estimator=e) for e in ESTIMATORS)])
def test_no_noise_and_no_clipping_is_ordinary_training(make):
    """The KL of a Bayesian module included."""
    plain, private = make(), make()
    run(plain)
    run(private, ExamplePrivacy(1e6, 0.0))
    torch.testing.assert_close(parameters(private), parameters(plain), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_prior_is_neither_clipped_nor_noised():
    """With almost nothing let through of the data, a Bayesian module moves by its KL alone."""
    noted, module = Gradients(), bayesian(kl_weight=30.0)
    run(module, ExamplePrivacy(1e-12, 1.0), rounds=1, callbacks=[noted])
    at, _, gradient = noted.steps[0]
    module.load_state_dict(at, strict=False)
    loss = 30 / 30 * kl_divergence(module.network)
    expected = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)
    for found, value in zip(gradient.values(), expected, strict=True):
        torch.testing.assert_close(found, value)


def test_epsilon_counts_each_clients_steps():
    privacy = ExamplePrivacy(1.0, 1.2, delta=1e-4)
    federation = fb.FederatedBayes(fb.SizesPartition([60, 30]), engine="sequential", local_epochs=2)
    made = federate(Plain(), federation, 3, callbacks=[privacy])
    of_large = epsilon_spent([(1.2, 8 / 60, 42), (1.2, 4 / 60, 6)], 1e-4)
    of_small = epsilon_spent([(1.2, 8 / 30, 18), (1.2, 6 / 30, 6)], 1e-4)
    assert privacy.epsilons == pytest.approx({0: of_large, 1: of_small})
    assert of_small > of_large
    assert float(made.callback_metrics["privacy/example_epsilon"]) == pytest.approx(of_small)


@pytest.mark.parametrize("first", [True, False])
def test_the_order_of_the_callbacks_does_not_matter(first):
    module, federation, privacy = Plain(), fb.FederatedBayes(fb.IIDPartition(3), seed=4), ExamplePrivacy(seed=0)
    callbacks = [privacy, federation] if first else [federation, privacy]
    trainer(2, callbacks).fit(module, loader())
    other = Plain()
    run(other, ExamplePrivacy(seed=0))
    assert_equal(parameters(module), parameters(other))


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(at_end, tmp_path):
    """With the noise of the same secret, which another run does not have. A round counts in its validation."""
    whole, privacy, other = bayesian(), ExamplePrivacy(), bayesian()
    kept = ModelCheckpoint(tmp_path, "half", every_n_epochs=2, save_top_k=-1, save_on_train_epoch_end=at_end)
    federation, data = (
        fb.FederatedBayes(fb.IIDPartition(3), engine="sequential", seed=4),
        (loader(), loader(shuffle=False)),
    )
    federate(whole, federation, 3, *data, callbacks=[privacy, kept], enable_checkpointing=True)
    run(other, ExamplePrivacy(), rounds=3)
    assert not torch.equal(*(next(each.parameters()) for each in (whole, other)))
    second, resumed = bayesian(seed=1), ExamplePrivacy()
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine="sequential", seed=4)
    federate(second, federation, 3, *data, callbacks=[resumed], ckpt_path=tmp_path / "half.ckpt")
    assert_equal(parameters(whole), parameters(second))
    assert resumed.epsilons == privacy.epsilons


def test_a_checkpoint_from_within_a_round_counts_finished_rounds_only(tmp_path):
    def save(trainer, *_):
        if trainer.global_step == 18:  # the second client's second step
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    run(Plain(), ExamplePrivacy(), rounds=2, callbacks=[LambdaCallback(on_train_batch_end=save)])
    stored = torch.load(tmp_path / "within.ckpt", weights_only=False)["callbacks"]["ExamplePrivacy"]
    assert {client: sum(n for *_, n in kinds) for client, kinds in stored["steps"].items()} == {0: 4, 1: 4, 2: 4}


def test_the_module_gets_its_layers_back():
    module = bayesian()
    before = {name: set(vars(layer)) for name, layer in module.network.named_modules()}
    run(module, ExamplePrivacy())
    assert {name: set(vars(layer)) for name, layer in module.network.named_modules()} == before
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in module.modules())
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    federate(module, fb.FederatedBayes(fb.IIDPartition(3)), 1)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.BatchNorm1d(6), r"net\.0 \(BatchNorm1d\) mixes the examples.*GroupNorm"),
        (nn.BatchNorm1d(6, affine=False), r"net\.0 \(BatchNorm1d\)"),
        (nn.InstanceNorm1d(6, track_running_stats=True), "running statistics"),
        (nn.ReLU(inplace=True), r"net\.0 \(ReLU\) works in place"),
        (nn.LSTM(6, 6), r"opacus\.layers\.DPLSTM"),
        (nn.MultiheadAttention(6, 2), r"opacus\.layers\.DPMultiheadAttention"),
        (Own(), r"net\.0 \(Own\) has parameters of its own"),
        (Reparameterized(nn.LSTM(6, 6)), "is a Bayesian layer.*LinearFlipout"),
    ],
)
def test_layers_whose_examples_have_no_gradient_of_their_own_are_named_before_training(layer, named):
    module = Plain(nn.Sequential(layer, nn.Linear(6, 3)))
    before = parameters(module)
    with pytest.raises(FederationError, match=named):
        run(module, ExamplePrivacy())
    assert_equal(before, parameters(module))


class Penalised(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * self.net[0].weight.square().sum()


class WithKL(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.net[0].kl_loss() / 30


test_a_penalty_or_a_divergence_in_the_loss_is_found_in_the_first_step = refusals(
    FederationError,
    (Penalised(), r"reaches 'net\.0\.weight' past the layers.*weight_decay"),
    (WithKL(nn.Sequential(LinearFlipout(6, 3))), "BayesianModule"),
    call=lambda module: run(module, ExamplePrivacy()),
)


def test_a_parameter_without_use_is_found():
    module = Plain()
    module.idle = nn.Linear(2, 2)
    with pytest.raises(FederationError, match=r"idle\.weight, idle\.bias.*requires_grad_\(False\)"):
        run(module, ExamplePrivacy())
    module.idle.requires_grad_(False)
    run(module, ExamplePrivacy(), rounds=1)


COX = fb.CoxRegressor(nn.Linear(6, 1), 1), loader(TensorDataset(torch.randn(30, 6), torch.ones(30, 2)))


@pytest.mark.parametrize(
    ("module", "data", "settings", "options", "named"),
    [
        (Plain(), None, {"engine": "vectorized"}, {}, "engine='vectorized'"),
        (Plain(), None, {}, {"precision": "bf16-mixed"}, "precision='bf16-mixed'"),
        (*COX, {}, {}, "likelihood 'cox': what an example says depends on the others"),
    ],
)
def test_unprotected_settings_are_refused(module, data, settings, options, named):
    federation = fb.FederatedBayes(fb.IIDPartition(3), **settings)
    with pytest.raises(FederationError, match=named):
        federate(module, federation, 1, data, callbacks=[ExamplePrivacy()], **options)


@pytest.mark.parametrize("argument", [{"clip": 0.0}, {"noise_multiplier": -1.0}, {"delta": 2.0}], ids=str)
def test_arguments_are_checked_and_a_federation_is_needed(argument):
    with pytest.raises(FederationError, match=f"{next(iter(argument))}="):
        ExamplePrivacy(**argument)
    with pytest.raises(FederationError, match="needs a FederatedBayes"):
        trainer(1, [ExamplePrivacy()]).fit(Plain(), loader())


def test_buffers_that_clients_would_send_are_refused():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x):
            return x

    net = nn.Sequential(Running(), network())
    with pytest.raises(FederationError, match=r"net\.0\.seen.*buffers='frozen'"):
        run(Plain(net), ExamplePrivacy())
    run(Plain(net), ExamplePrivacy(), rounds=1, buffers="frozen")
