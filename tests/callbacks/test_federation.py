"""A federation against what it must equal: plain training, and what each round begins and ends with."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError, PosteriorError
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.methods import Averaging
from lightning_fedbayes.server.plan import Batching, client_order
from tests.federations import (
    Plain,
    assert_equal,
    bayesian,
    blobs,
    federate,
    loader,
    network,
    of_bayesian_torch,
    parameters,
    trainer,
)


class InOrder(list):
    """The order in which client 0 sees its data, for plain training."""

    round = 0

    def __iter__(self):
        (order,) = client_order(self.round, 0, len(self), Batching(batch_size=8))
        self.round += 1
        return iter(order.tolist())


class SeedEpochs(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module) -> None:
        seed_everything(derive_seed(0, "training", trainer.current_epoch, 0))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("rule", "optimizer", "options"),
    [
        ("weighted_average", torch.optim.SGD, {"precision": "64-true"}),
        ("conflation", torch.optim.Adam, {}),
        ("linear_pool", torch.optim.Adam, {}),
    ],
)
def test_one_client_with_all_data_equals_plain_training_bit_by_bit(rule, optimizer, options):
    federated, plain = Plain(optimizer=optimizer, lr=0.01), Plain(optimizer=optimizer, lr=0.01)
    federate(federated, fb.FederatedBayes(fb.IIDPartition(1), fusion=rule, keep=["optimizer"]), 3, **options)
    order = InOrder(range(90))
    trainer(3, **options).fit(plain, loader(shuffle=False, sampler=order))
    assert_equal(parameters(federated), parameters(plain))


@pytest.mark.parametrize("rule", ["weighted_average", "conflation"])
def test_one_bayesian_client_equals_plain_training_noise_included(rule):
    federated, plain = bayesian(), bayesian()
    federation = fb.FederatedBayes(fb.IIDPartition(1), fusion=rule, keep=["optimizer"])
    federate(federated, federation, rounds=3)
    order = InOrder(range(90))
    own_seed = torch.Generator()  # the loader must not draw its workers' seed from the noise
    trainer(3, [SeedEpochs()]).fit(plain, loader(shuffle=False, sampler=order, generator=own_seed))
    torch.testing.assert_close(parameters(federated), parameters(plain), rtol=1e-6, atol=1e-7)


def test_ragged_cohorts_validate_once_after_every_round():
    seen = []
    spy = LambdaCallback(on_validation_start=lambda made, _: seen.append((made.current_epoch, made.fit_loop.batch_idx)))
    federation = fb.FederatedBayes(fb.SizesPartition((50, 20, 10, 5, 5)), fraction=0.4, engine="sequential")
    federate(Plain(), federation, 6, val=loader(shuffle=False), num_sanity_val_steps=0, callbacks=[spy])
    assert [epoch for epoch, _ in seen] == list(range(6))
    assert len({last for _, last in seen}) > 1, "the cohorts were to differ in length"


def test_validation_scores_the_fused_posterior_and_the_module_ends_with_it():
    module, validated = Plain(), []
    federation = fb.FederatedBayes(fb.IIDPartition(3))
    spy = LambdaCallback(on_validation_start=lambda *_: validated.append(parameters(module)))
    federate(module, federation, val=loader(shuffle=False), callbacks=[spy])
    assert_equal(validated[-1], parameters(module))
    assert_equal(dict(federation.posterior.mean), parameters(module))


def test_a_spread_of_deterministic_clients_is_kept_though_the_module_cannot_hold_it():
    federation = fb.FederatedBayes(fb.DirichletPartition(3, 0.5), fusion="gaussian_fit")
    federate(Plain(), federation)
    assert all((variance > 0).any() for variance in federation.posterior.variance.values())


def test_prior_global_is_the_posterior_that_the_round_starts_from():
    module = bayesian()
    seen = []

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            layer = pl_module.network[-1]
            prior = next(iter(layer.gaussian_parameters())).prior
            seen.append((trainer.current_epoch, torch.as_tensor(prior.mean).clone()))

        def on_train_epoch_start(self, trainer, pl_module):
            starts.append(federation.posterior.mean["network.2.weight"].clone())

    starts = []
    federation = fb.FederatedBayes(fb.IIDPartition(2), fusion=Averaging("rklb", prior="global"))
    start = module.network[-1].mu_weight.detach().clone()
    federate(module, federation, rounds=3, callbacks=[Spy()])
    assert torch.equal(starts[0], start)
    assert {round for round, _ in seen} == {0, 1, 2}
    assert all(torch.equal(prior, starts[round]) for round, prior in seen)
    assert not torch.equal(starts[1], starts[2])


@pytest.mark.parametrize(
    ("keep", "fusion", "optimizer", "second_round"),
    [
        ([], "fedavg", torch.optim.Adam, 0),
        ("optimizer", "fedavg", torch.optim.Adam, 4),
        (["posterior"], "fedavg", torch.optim.Adam, 0),
        (["posterior"], "sites", torch.optim.Adam, 4),
        ([], "sites", torch.optim.Adam, 4),
        ([], "sites", torch.optim.LBFGS, 0),
    ],
)
def test_optimizer_state_is_reset_or_kept_per_client(keep, fusion, optimizer, second_round):
    class Momentum(Plain):
        def __init__(self):
            super().__init__(optimizer=lambda p, lr: optimizer(p, lr=lr))
            self.at_start = []

        def on_client_start(self, client):
            self.at_start.append((client.round, client.number, len(self.trainer.optimizers[0].state)))

    module = Momentum()
    federate(module, fb.FederatedBayes(fb.IIDPartition(2), fusion=fusion, keep=keep))
    assert module.at_start == [(0, 0, 0), (0, 1, 0), (1, 0, second_round), (1, 1, second_round)]


def test_local_parameters_never_leave_a_client():
    module = Plain()
    initial = module.net[2].weight.detach().clone()
    starts = {}

    def on_client_start(client):
        starts.setdefault(client.number, []).append(module.net[2].weight.detach().clone())

    module.on_client_start = on_client_start
    federation = fb.FederatedBayes(fb.DirichletPartition(2, 0.5), local_parameters=["net.2.*"], engine="sequential")
    federate(module, federation, rounds=3)
    assert not any(name.startswith("net.2") for name in federation.posterior.names)
    assert torch.equal(module.net[2].weight, initial), "the global model keeps the initial head"
    for values in starts.values():
        assert torch.equal(values[0], initial)
        assert not torch.equal(values[1], initial)
        assert not torch.equal(values[2], values[1])
    assert not torch.equal(starts[0][1], starts[1][1])


@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
def test_buffers_follow_their_policy_and_keep_their_dtype(policy):
    module = Plain(network(batch_norm=True))
    starts = []

    def on_client_start(client):
        norm = module.net[1]
        starts.append((norm.running_mean.clone(), norm.num_batches_tracked.clone()))

    module.on_client_start = on_client_start
    federate(module, fb.FederatedBayes(fb.SizesPartition((60, 30)), buffers=policy, engine="sequential"), rounds=2)
    norm = module.net[1]
    assert norm.num_batches_tracked.dtype == torch.int64
    first, second = starts[2:]
    if policy == "frozen":
        assert norm.num_batches_tracked == 0
        assert not norm.running_mean.any()
    elif policy == "average":
        assert torch.equal(first[0], second[0])
        assert first[1] == round(8 * 2 / 3 + 4 / 3)  # 8 and 4 batches, weights 2/3 and 1/3
    else:
        assert not torch.equal(first[0], second[0])
        assert (first[1], second[1]) == (8, 4)


def test_every_client_draws_its_own_noise_whatever_came_before():
    """Client 1's losses are the same however long client 0 trains before it."""

    class Last(Plain):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Dropout(0.5), network()))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.last = getattr(self, "last", [])
            self.last.append(outputs["loss"])

    both, more = Last(), Last()
    x, y = blobs().tensors
    parts = {"a": TensorDataset(x[:40], y[:40]), "b": TensorDataset(x[40:80], y[40:80])}
    federate(both, fb.FederatedBayes(engine="sequential"), 1, loader(fb.ClientDatasets(parts)))
    longer = {"a": TensorDataset(x, y), "b": parts["b"]}
    federate(more, fb.FederatedBayes(engine="sequential"), 1, loader(fb.ClientDatasets(longer)))
    assert (len(both.last), len(more.last)) == (5 + 5, 12 + 5)
    assert torch.equal(torch.stack(both.last[-5:]), torch.stack(more.last[-5:]))


@pytest.mark.parametrize("make", [lambda: bayesian().network, lambda: of_bayesian_torch(network(), "Flipout")])
def test_the_layers_own_prior_is_back_after_a_federation_with_the_global_prior(make):
    module = Plain(make())
    before = fb.kl_divergence(module)
    saved = []

    def priors():
        return {name: value.clone() for name, value in module.state_dict().items() if "prior" in name}

    initial = priors()
    save = LambdaCallback(on_train_batch_end=lambda *_: saved.append(priors()))
    federate(module, fb.FederatedBayes(fb.IIDPartition(2), fusion=Averaging(prior="global")), 2, callbacks=[save])
    assert saved
    for state in saved:
        assert_equal(initial, state)
    fresh = Plain(make())
    fresh.load_state_dict(module.state_dict())
    torch.testing.assert_close(fb.kl_divergence(fresh), fb.kl_divergence(module))
    assert not torch.equal(before, fb.kl_divergence(module))


@pytest.mark.parametrize(("personal", "keeps"), [("network.2.*", True), ("network.0.*", False)])
def test_a_personal_bayesian_layer_keeps_its_prior(personal, keeps):
    """Layer 2 is Bayesian; if it is shared, the global posterior is its prior."""
    module = bayesian()

    def prior():
        return torch.as_tensor(next(iter(module.network[2].gaussian_parameters())).prior.mean).clone()

    own, seen = prior(), []
    spy = LambdaCallback(on_train_batch_start=lambda *_: seen.append(prior()))
    federation = fb.FederatedBayes(fb.IIDPartition(2), fusion=Averaging(prior="global"), local_parameters=[personal])
    federate(module, federation, callbacks=[spy])
    assert seen
    assert all(torch.equal(each.expand(3, 5), own.expand(3, 5)) is keeps for each in seen)
    assert torch.equal(prior(), own)


def test_reloaded_data_may_change_sizes_but_not_the_number_of_clients():
    x, y = blobs().tensors

    class Growing(L.LightningDataModule):
        def __init__(self, sizes):
            super().__init__()
            self.sizes, self.calls = sizes, 0

        def train_dataloader(self):
            parts = self.sizes[min(self.calls, len(self.sizes) - 1)]
            self.calls += 1
            data = {str(k): TensorDataset(x[:n], y[:n]) for k, n in enumerate(parts)}
            return loader(fb.ClientDatasets(data))

    seen = []
    module = Plain()
    module.on_client_start = lambda client: seen.append((client.round, client.num_examples))
    made = trainer(2, [fb.FederatedBayes(engine="sequential")], reload_dataloaders_every_n_epochs=1)
    made.fit(module, datamodule=Growing([(20, 20), (20, 60)]))
    assert seen == [(0, 20), (0, 20), (1, 20), (1, 60)]
    made = trainer(2, [fb.FederatedBayes()], reload_dataloaders_every_n_epochs=1)
    with pytest.raises(FederationError, match="have 3 clients, and there were 2"):
        made.fit(Plain(), datamodule=Growing([(20, 20), (20, 20, 20)]))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_network_that_is_not_initialised_is_refused_before_training(engine):
    with pytest.raises(PosteriorError, match=r"not initialised have no posterior: .*call the network with a batch"):
        federate(Plain(torch.nn.LazyLinear(3)), fb.FederatedBayes(fb.IIDPartition(2), engine=engine), 1, loader())


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_fit_in_which_no_round_comes_to_anything_does_not_end_normally(rounds):
    class Fails(Plain):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no such column")

    module = Fails()
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(FederationError, match=rf"{rounds} rounds? in a row.*RuntimeError: no such column"):
        federate(module, fb.FederatedBayes(fb.IIDPartition(2), fusion="rklb"), rounds, loader())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before))


class Remembers(Plain):
    """Keeps predictions that it has made under ``inference_mode``, in a list and as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = []
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        with torch.inference_mode():
            self.outputs.append({"mean": self(batch[0]).mean(0)})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        with torch.inference_mode():
            self.seen = self(batch[0]).mean(0)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_module_may_keep_what_it_makes_under_inference_mode(engine):
    module, plain = Remembers(), Plain()
    for each in (module, plain):
        federate(each, fb.FederatedBayes(fb.IIDPartition(3), engine=engine), 3, val=loader(shuffle=False))
    torch.testing.assert_close(parameters(module), parameters(plain))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_means_of_a_posterior_and_its_vector_are_one_thing_wherever_a_user_gets_it(engine):
    class Look(fb.HybridBayesianClassifier):
        needs_client_posteriors = True

        def on_federation_start(self):
            super().on_federation_start()
            self.heard = []

        def on_round_end(self, posterior, clients):
            self.heard.append(len(clients))
            for each in (posterior, *clients):
                check(each)

    def check(posterior):
        name, before = posterior.names[0], posterior.flatten()[0].clone()
        posterior.mean[name].add_(1.0)
        moved = posterior.flatten()[0] - before
        posterior.mean[name].sub_(1.0)
        assert float(moved.sum()) == pytest.approx(posterior.mean[name].numel(), rel=1e-5)

    federation = fb.FederatedBayes(fb.IIDPartition(8), engine=engine)
    federate(module := Look(network(), bayesian_last=2), federation, 1)
    assert module.heard == [8]
    check(federation.posterior)
    check(fb.fuse("rklb", [federation.posterior, federation.posterior]))
