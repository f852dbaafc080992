"""Predictions of any module from a posterior: moments, scores, checkpoints, and what is refused."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fedbayes as fb
from tests.federations import Plain, blobs, federate, loader, network, trainer


def posterior_of(module, std=0.3):
    mean = {name: p.detach().clone() for name, p in module.named_parameters()}
    return fb.GaussianPosterior(mean, {name: torch.full_like(p, std**2) for name, p in mean.items()})


def test_a_linear_model_s_predictive_moments():
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    found = fb.PosteriorPredictive(module, posterior_of(module), 4000, "regression", noise_std=0.5).predict_step(x)
    epistemic = 0.3**2 * (x.square().sum(1, keepdim=True) + 1).expand(4, 2)
    assert torch.allclose(found.mean, module(x), atol=0.06)
    assert torch.allclose(found.epistemic, epistemic, rtol=0.12)
    assert torch.allclose(found.aleatoric, torch.full((4, 2), 0.25))
    assert torch.allclose(found.variance, found.aleatoric + found.epistemic)


def test_a_point_mass_predicts_as_the_module_and_leaves_it_unchanged():
    module = network()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    x = blobs(7).tensors[0]
    point = fb.GaussianPosterior.point_mass(before)
    prediction = fb.PosteriorPredictive(module, point, samples=3).predict_step([x, None])
    assert torch.allclose(prediction.probs, module(x).softmax(-1), atol=1e-6)
    assert torch.allclose(prediction.epistemic, torch.zeros(7), atol=1e-6)
    wide = fb.PosteriorPredictive(module, posterior_of(module), samples=3).predict_step(x)
    assert (wide.epistemic > 0).all()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


class Branches(nn.Module):
    """Decides by a value, so it cannot be stacked."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return y if float(y.sum()) > 0 else -y


def test_a_module_that_does_not_vectorize_predicts_one_by_one():
    torch.manual_seed(0)
    predictive = fb.PosteriorPredictive(Branches(), None)
    predictive.posterior = posterior_of(predictive.network)
    assert predictive.sample(torch.randn(5, 6), 4).shape == (4, 5, 3)
    assert predictive.sample(torch.randn(5, 6), 4).std(0).min() > 0


class Own(Plain):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def configure_optimizers(self):
        return fb.IVON(self.parameters(), num_examples=90, **self.options)


def same(first, second):
    assert first.names == second.names
    for name in first.names:
        assert torch.equal(first.mean[name], second.mean[name])
        assert torch.equal(first.variance[name], second.variance[name])


def test_a_checkpoint_of_a_federation_has_its_posterior(tmp_path):
    federation = fb.FederatedBayes(fb.IIDPartition(3))
    federate(Own(), federation, 2, loader()).save_checkpoint(tmp_path / "a.ckpt")
    loaded = fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "a.ckpt", module=Own(), weights_only=False)
    same(loaded.posterior, federation.posterior)


def test_a_checkpoint_of_training_alone_has_the_optimizer_s_posterior(tmp_path):
    module = Own()
    made = trainer(2)
    made.fit(module, loader())
    made.save_checkpoint(tmp_path / "a.ckpt")
    loaded = fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "a.ckpt", module=Own(), weights_only=False)
    same(loaded.posterior, made.optimizers[0].posterior(module))
    again = trainer(1)
    again.validate(loaded, loader(shuffle=False), verbose=False)
    again.save_checkpoint(tmp_path / "b.ckpt")
    twice = fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "b.ckpt", module=Own(), weights_only=False)
    same(twice.posterior, loaded.posterior)


def test_scores_and_predictions_of_a_trainer():
    module = network()
    predictive = fb.PosteriorPredictive(module, posterior_of(module, 0.01), samples=5)
    report = fb.UncertaintyReport()
    data = loader(shuffle=False)
    scores = trainer(1, [report]).validate(predictive, data, verbose=False)[0]
    x, y = blobs().tensors
    probs = module(x).softmax(-1).detach()
    assert scores["val/accuracy"] == pytest.approx(float((probs.argmax(1) == y).float().mean()), abs=0.03)
    assert scores["val/nll"] == pytest.approx(float(F.nll_loss(probs.log(), y)), rel=0.05)
    assert "val/retained_area_entropy" in scores
    predictions = trainer(1).predict(predictive, data)
    assert sum(len(each.label) for each in predictions) == len(x)
    regression = fb.PosteriorPredictive(nn.Linear(6, 1), None, task="regression", noise_std=1.0)
    regression.posterior = posterior_of(regression.network)
    targets = torch.utils.data.TensorDataset(x, x[:, 0])
    found = trainer(1).test(regression, loader(targets, shuffle=False), verbose=False)[0]
    assert {"test/rmse", "test/nll", "test/coverage90"} <= found.keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fb.PosteriorPredictive(network(), posterior_of(nn.Linear(2, 2))), "no such parameter"),
        (lambda: fb.PosteriorPredictive(network(), posterior_of(network()), samples=0), "samples=0"),
        (lambda: fb.PosteriorPredictive(network(), posterior_of(network()), task="ranking"), "task='ranking'"),
        (lambda: fb.PosteriorPredictive(network()).predict_step(torch.zeros(1, 6)), "there is no posterior"),
        (lambda: fb.PosteriorPredictive("network"), "module"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(fb.FedBayesError, match=message):
        make()


def test_a_checkpoint_without_a_posterior_is_refused(tmp_path):
    made = trainer(1)
    made.fit(Plain(), loader())
    made.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(fb.FedBayesError, match="holds no posterior"):
        fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "a.ckpt", module=Plain(), weights_only=False)


class Part(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.a(batch[0]) + self.b(batch[0]), batch[1])

    def configure_optimizers(self):
        return fb.IVON(self.b.parameters(), num_examples=90)


def test_an_optimizer_of_some_parameters_is_not_guessed_at(tmp_path):
    made = trainer(1)
    made.fit(Part(), loader())
    made.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(fb.FedBayesError, match="whose each variance is"):
        fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "a.ckpt", module=Part(), weights_only=False)
