"""Predictions of any module from a posterior: moments, scores, checkpoints, and what is refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fedbayes as fb
from tests.federations import Plain, around, assert_close, blobs, federate, loader, network, trainer
from tests.refusals import refusals


def test_a_point_mass_predicts_as_the_module_and_leaves_it_unchanged():
    module = network()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    x = blobs(7).tensors[0]
    point = fb.GaussianPosterior.point_mass(before)
    prediction = fb.PosteriorPredictive(module, point, samples=3).predict_step([x, None])
    assert torch.allclose(prediction.probs, module(x).softmax(-1), atol=1e-6)
    assert torch.allclose(prediction.epistemic, torch.zeros(7), atol=1e-6)
    wide = fb.PosteriorPredictive(module, around(module), samples=3).predict_step(x)
    assert (wide.epistemic > 0).all()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


Own = partial(Plain, optimizer=partial(fb.IVON, num_examples=90))


def test_a_checkpoint_of_a_federation_has_its_posterior(tmp_path):
    federation = fb.FederatedBayes(fb.IIDPartition(3))
    federate(Own(), federation, 2, loader()).save_checkpoint(tmp_path / "a.ckpt")
    loaded = fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "a.ckpt", module=Own(), weights_only=False)
    assert_close(loaded.posterior, federation.posterior)


def test_a_checkpoint_of_training_alone_has_the_optimizer_s_posterior(tmp_path):
    module = Own()
    made = trainer(2)
    made.fit(module, loader())
    made.save_checkpoint(tmp_path / "a.ckpt")
    loaded = fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "a.ckpt", module=Own(), weights_only=False)
    assert_close(loaded.posterior, made.optimizers[0].posterior(module))
    again = trainer(1)
    again.validate(loaded, loader(shuffle=False), verbose=False)
    again.save_checkpoint(tmp_path / "b.ckpt")
    twice = fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "b.ckpt", module=Own(), weights_only=False)
    assert_close(twice.posterior, loaded.posterior)


def test_scores_and_predictions_of_a_trainer():
    module = network()
    predictive = fb.PosteriorPredictive(module, around(module, 0.01), samples=5)
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
    regression = fb.PosteriorPredictive(nn.Linear(6, 1), None, likelihood=fb.Gaussian(1.0))
    regression.posterior = around(regression.network)
    targets = torch.utils.data.TensorDataset(x, x[:, 0])
    found = trainer(1).test(regression, loader(targets, shuffle=False), verbose=False)[0]
    assert {"test/rmse", "test/nll", "test/coverage90"} <= found.keys()


test_a_mistake_is_named = refusals(
    fb.FedBayesError,
    (lambda: fb.PosteriorPredictive(network(), around(nn.Linear(2, 2))), "no such parameter"),
    (lambda: fb.PosteriorPredictive(network(), around(network()), samples=0), "samples=0"),
    (lambda: fb.PosteriorPredictive(network(), around(network()), likelihood="ran"), "likelihood='ran'"),
    (lambda: fb.PosteriorPredictive(network()).predict_step(torch.zeros(1, 6)), "there is no posterior"),
    (lambda: fb.PosteriorPredictive("network"), "module"),
    (lambda: fb.PosteriorPredictive(network(), around(network()), predictive="glm"), "predictive='glm'"),
    (lambda: fb.PosteriorPredictive(network(), predictive="linearised").sample(torch.zeros(1, 6)), "no posterior"),
    (lambda: fb.PosteriorPredictive(nn.Linear(2, 2), kronecker(network())), "no such parameter"),
)


X, Y = blobs()[:4]
FOREIGN = {
    "a dict": ({"x": X, "y": Y}, "cannot predict this batch", "cannot predict this batch"),
    "a dict without targets": ({"x": X}, "cannot predict this batch", "a batch is a dict with the keys 'x'"),
    "a dict of two targets": ({"x": X, "y": Y, "label": Y}, "'label', 'y' may each be", "'label', 'y' may each be"),
    "a graph": (SimpleNamespace(x=X), "cannot predict this batch", "a batch is a SimpleNamespace"),
    "nothing": ([], "a batch is empty", "a batch is empty"),
    "inputs alone": ([X], None, "a batch is a list"),
    "a tensor alone": (X, None, "a batch is a Tensor"),
    "other inputs": ((torch.zeros(4, 2), Y), "cannot predict this batch: RuntimeError", "cannot predict this batch"),
    "inputs in a dict": (({"x": X}, Y), "cannot predict this batch: ", "cannot predict this batch: "),
    "other classes": ((X, Y + 7), None, "targets run from 7 to 9, and there are 3 classes"),
    "no targets": ((X, None), None, "a batch is a tuple"),
}


@pytest.mark.parametrize("predictive", ["draws", "linearised"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_batches_that_it_does_not_take_are_named(kind, predictive):
    batch, predict, validate = FOREIGN[kind]
    made = fb.PosteriorPredictive(network(), fb.Laplace().posterior(network(), [(X, Y)]), predictive=predictive)
    for step, message in ((made.predict_step, predict), (made.validation_step, validate), (made.test_step, validate)):
        if message is None:
            step(batch)
        else:
            with pytest.raises(fb.FedBayesError, match=message):
                step(batch)


def kronecker(module, data=None):
    one_shot = fb.KroneckerLaplace()
    x, y = blobs().tensors if data is None else data
    return one_shot.fuse([one_shot.site(module, [(x[k::2], y[k::2])]) for k in range(2)])


def test_a_linearised_regression_is_exact():
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    posterior = around(module)
    options = {"likelihood": fb.Gaussian(0.5), "predictive": "linearised"}
    found = fb.PosteriorPredictive(module, posterior, **options).predict_step(x)
    assert torch.allclose(found.mean, module(x), atol=1e-6)
    assert torch.allclose(found.epistemic, 0.3**2 * (x.square().sum(1, keepdim=True) + 1).expand(4, 2), rtol=1e-5)
    assert torch.allclose(found.variance, found.epistemic + 0.25)
    assert found.samples.shape == (256, 4, 2)
    assert torch.allclose(found.samples.var(0), found.epistemic, rtol=0.1)
    flat = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    known = fb.Gaussian(0.0)
    one = fb.PosteriorPredictive(flat, around(flat), likelihood=known, predictive="linearised").predict_step(x)
    assert one.mean.shape == one.variance.shape == (4, 1)
    assert torch.allclose(one.epistemic[:, 0], 0.3**2 * (x.square().sum(1) + 1), rtol=1e-5)


def test_a_linearised_classifier_of_two_classes_has_the_integral_of_the_logistic_function():
    module, x = nn.Linear(2, 2, bias=False), torch.tensor([[1.0, 0.0], [0.5, 2.0]])
    found = fb.PosteriorPredictive(module, around(module, 0.8), 4000, predictive="linearised").predict_step(x)
    difference, std = (module(x)[:, 0] - module(x)[:, 1]).detach(), (2 * 0.64 * x.square().sum(1)).sqrt()
    grid = torch.linspace(-8, 8, 4001)
    weights = torch.exp(-grid.square() / 2) / torch.exp(-grid.square() / 2).sum()
    probs = ((difference[:, None] + std[:, None] * grid).sigmoid() * weights).sum(1)
    assert torch.allclose(found.probs[:, 0], probs, atol=2e-3)
    assert torch.allclose(found.probs.sum(1), torch.ones(2))
    assert (found.epistemic > 0).all()


def test_what_comes_from_laplace_is_linearised_and_nothing_else():
    module, data = network(), [blobs().tensors]
    laplace = fb.Laplace().posterior(module, data)
    for posterior in (
        laplace,
        laplace.clone(),
        laplace.to("cpu"),
        laplace.ordered(laplace.names[::-1]),
        fb.GaussianPosterior.from_state_dict(laplace.state_dict()),
        laplace.unflatten(*laplace.flatten()),
        fb.fuse("conflation", [laplace, laplace]),
        fb.fuse("geometric_median", iter([laplace] * 3)),
        kronecker(module),
        kronecker(module).diagonal(),
    ):
        assert fb.PosteriorPredictive(module, posterior).is_linearised
        assert not fb.PosteriorPredictive(module, posterior, predictive="draws").is_linearised
    assert "linearised" in repr(laplace)
    drawn = around(module)
    for posterior in (
        drawn,
        fb.GaussianPosterior.from_state_dict(drawn.state_dict()),
        fb.read_posterior(module),
        fb.fuse("conflation", [drawn, laplace]),
        laplace.marked(False),
    ):
        assert not fb.PosteriorPredictive(module, posterior).is_linearised
        assert fb.PosteriorPredictive(module, posterior, predictive="linearised").is_linearised
    assert "linearised" not in repr(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("fusion", ["reverse_kl_barycenter", "sites", "coordinate_median"])
@pytest.mark.parametrize("source", [fb.Laplace(), fb.SWAG()])
def test_a_federation_s_posterior_says_where_it_comes_from(source, fusion, engine, tmp_path):
    if isinstance(source, fb.SWAG) and fusion == "sites":
        pytest.skip("a SWAG has no prior")
    options = {"fusion": fusion, "posterior": source, "engine": engine, "keep": ["posterior"]}
    federation = fb.FederatedBayes(fb.IIDPartition(3), **options)
    module = Plain()
    made = federate(module, federation, 2, loader())
    is_linearised = isinstance(source, fb.Laplace)
    personal = [federation.posterior_of(0), federation.posterior_of(0, 0.5), federation.posterior_of(0, 0.0)]
    with federation.federation.holding(1) as own:
        personal.append(own)
    for posterior in (federation.posterior, *personal):
        assert fb.PosteriorPredictive(module, posterior).is_linearised == is_linearised
    made.save_checkpoint(tmp_path / "a.ckpt")
    loaded = fb.PosteriorPredictive.load_from_checkpoint(tmp_path / "a.ckpt", module=Plain(), weights_only=False)
    assert loaded.is_linearised == is_linearised
    x = blobs(7).tensors[0]
    direct = fb.PosteriorPredictive(module, federation.posterior)
    means = (each.sample(x, 512).mean(0) for each in (loaded, direct))
    assert torch.allclose(*means, atol=0.05 if is_linearised else 0.5)
    again = fb.FederatedBayes(fb.IIDPartition(3), fusion=fusion, posterior=source, engine=engine, keep=["posterior"])
    federate(Plain(), again, 3, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert again.posterior.linearised == is_linearised


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_its_own_checkpoint_has_the_posterior_of_either_kind(kind, tmp_path):
    module = network(batch_norm=True)
    module.eval()
    posterior = kronecker(module) if kind == "kronecker" else fb.Laplace().posterior(module, [blobs().tensors])
    predictive = fb.PosteriorPredictive(module, posterior)
    made = trainer(1)
    made.validate(predictive, loader(shuffle=False), verbose=False)
    made.save_checkpoint(tmp_path / "a.ckpt")
    loaded = fb.PosteriorPredictive.load_from_checkpoint(
        tmp_path / "a.ckpt", module=network(seed=1, batch_norm=True), weights_only=False
    )
    assert loaded.is_linearised
    x = blobs(7).tensors[0]
    for ours, wanted in zip(loaded._linearised(x), predictive._linearised(x)):
        assert torch.equal(ours, wanted)


def test_a_kronecker_posterior_predicts_by_draws_too_with_its_own_buffers():
    module = network(batch_norm=True)
    module[1].running_mean.normal_()
    module.eval()
    posterior, x = kronecker(module), blobs(7).tensors[0]
    other = network(seed=1, batch_norm=True)
    for each in (fb.PosteriorPredictive(module, posterior), fb.PosteriorPredictive(other, posterior)):
        assert torch.allclose(each._linearised(x)[0], module(x), atol=1e-5)
        drawn = fb.PosteriorPredictive(each.network, posterior, 7, predictive="draws")
        torch.manual_seed(0)
        outputs = drawn.sample(x)
        torch.manual_seed(0)
        sets = posterior.sample(7)
        wanted = [torch.func.functional_call(module, {name: v[3] for name, v in sets.items()}, x)]
        assert torch.allclose(outputs[3], wanted[0], atol=1e-5)
