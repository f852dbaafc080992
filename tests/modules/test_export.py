"""What leaves the package as a network is the posterior mean, and never a draw."""

import warnings

import lightning as L
import pytest
import torch
from bayesian_torch.layers import LinearReparameterization as ForeignLinear
from torch import nn

import lightning_fedbayes as fb
from benchmarks.networks import lenet
from lightning_fedbayes.core.errors import ConversionError, PosteriorError
from lightning_fedbayes.layers import ESTIMATORS, Reparameterized, mean_only
from lightning_fedbayes.modules import mean_network, mlp, sample_outputs
from tests.federations import Plain, blobs, loader, trainer


class Recurrent(nn.Module):
    """Words to logits: an embedding, an LSTM and a linear layer."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(11, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(self.words(x))[0].mean(1))


def norm():
    """A network with running statistics, which are not those of the start."""
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    network(torch.randn(20, 6) + 1)
    return network


def made():
    """Name → (module, its inputs): every estimator, wrapped modules, dropout, and the heads of all ready modules."""
    torch.manual_seed(0)
    images, rows, words = torch.randn(4, 1, 16, 16), torch.randn(4, 6), torch.randint(0, 11, (4, 7))
    pick = {"names": ["words", "lstm", "head"], "init": "pretrained"}
    return {
        **{estimator: (fb.HybridBayesianClassifier(lenet(1, 3, 16), 5, estimator), images) for estimator in ESTIMATORS},
        "batch norm": (fb.HybridBayesianClassifier(norm(), bayesian_last=1), rows),
        "recurrent": (fb.HybridBayesianClassifier(fb.bayesianize(Recurrent(), **pick)), words),
        "dropout": (fb.HybridBayesianClassifier(fb.with_mc_dropout(lenet(1, 3, 16), 0.5)), images),
        "regressor": (fb.HybridBayesianRegressor(mlp(6, 2), bayesian_last=2, targets=2), rows),
        "ensemble": (fb.modules.DeepEnsembleRegressor([fb.bayesianize(mlp(6, 2), last=1) for _ in range(2)]), rows),
        "cox": (fb.CoxRegressor(mlp(6, 1), bayesian_last=1, estimator="flipout"), rows),
    }


MADE = made()
LSTM = pytest.mark.filterwarnings("ignore:.*_flat_weights.* assigned during export")  # torch about its own


def differs(module, inputs):
    """True if two draws of ``module`` differ, so that its mean is not what it computes anyway."""
    return not torch.equal(module(inputs), module(inputs))


def is_ours(network):
    return any(type(layer).__module__.startswith("lightning_fedbayes.layers") for layer in network.modules())


@pytest.mark.parametrize("name", MADE)
def test_it_predicts_the_posterior_mean_without_our_layers(name):
    module, inputs = MADE[name]
    module.eval()
    assert differs(module, inputs)
    plain = mean_network(module)
    assert not is_ours(plain)
    assert not any(each.training for each in plain.modules())
    assert torch.allclose(plain(inputs), module.predict_mean(inputs), rtol=0, atol=1e-6)
    assert is_ours(module)
    assert differs(module, inputs)


@pytest.mark.slow
@LSTM
@pytest.mark.parametrize("name", MADE)
def test_torch_export_of_a_ready_module_or_of_its_mean_never_varies(name):
    module, inputs = MADE[name]
    module.eval()
    mean = module.predict_mean(inputs)
    for network in (module, mean_network(module)):
        exported = torch.export.export(network, (inputs,)).module()
        assert torch.equal(exported(inputs), exported(inputs))
        assert torch.allclose(exported(inputs), mean, rtol=0, atol=1e-5)
    assert differs(module, inputs)


@pytest.mark.filterwarnings("ignore")  # of torch's exporter, about its own parts
@pytest.mark.parametrize("name", MADE)
def test_onnx_runtime_predicts_the_posterior_mean(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, inputs = MADE[name]
    module.eval()
    for number, network in enumerate((module, mean_network(module))):
        path = tmp_path / f"{number}.onnx"
        torch.onnx.export(network, (inputs,), path, dynamo=True, verbose=False)
        session = runtime.InferenceSession(path)
        feed = {session.get_inputs()[0].name: inputs.numpy()}
        first, second = (torch.from_numpy(session.run(None, feed)[0]) for _ in range(2))
        assert torch.equal(first, second)
        assert torch.allclose(first, module.predict_mean(inputs), rtol=0, atol=1e-5)


def traced(network, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: it is deprecated, and what it writes down of an LSTM
        return torch.jit.trace(network, inputs)


class Sampled(nn.Module):
    """The mean of several draws, which an export would record."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return sample_outputs(self.network, x, 3).mean(0)


DRAWING = {
    **{name: MADE[name][0].network for name in ESTIMATORS},
    "dropout": MADE["dropout"][0].network,
    "wrapped": MADE["recurrent"][0].network,
    "draws": Sampled(MADE["flipout"][0].network),
}
INPUTS = {"wrapped": MADE["recurrent"][1]}


def exported(network, inputs):
    return torch.export.export(network, (inputs,))


@LSTM
@pytest.mark.parametrize("export", [exported, traced])
@pytest.mark.parametrize("name", DRAWING)
def test_a_layer_that_draws_is_not_exported(name, export):
    network, inputs = DRAWING[name].eval(), INPUTS.get(name, MADE["flipout"][1])
    with pytest.raises(ConversionError, match=r"exported while it draws.*Export fb\.mean_network\(module\)"):
        export(network, inputs)
    if name != "draws":
        with mean_only(network):
            export(network, inputs)


def test_tied_layers_stay_tied_and_frozen_ones_frozen():
    shared = nn.Linear(3, 3)
    network = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(3, 2).requires_grad_(False))
    plain = mean_network(fb.bayesianize(network, names=["0", "3"]))
    assert plain[0] is plain[2]
    assert [parameter.requires_grad for parameter in plain.parameters()] == [True, True, False, False]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_module_of_your_own_after_a_federation(engine):
    own = fb.with_kl(fb.bayesianize(Plain(norm()), last=1))
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine=engine, keep=["posterior"])
    trainer(2, [federation]).fit(own, loader())
    inputs = blobs().tensors[0]
    plain = mean_network(own)
    assert isinstance(plain, L.LightningModule)
    with mean_only(own.eval()):
        assert torch.equal(plain(inputs), own(inputs))
    posterior = federation.posterior_of(0)
    of_client = mean_network(own, posterior)
    assert torch.equal(of_client.net[3].weight, posterior.mean["net.3.weight"])
    assert not torch.equal(of_client.net[3].weight, plain.net[3].weight)
    assert torch.equal(of_client.net[1].running_mean, own.net[1].running_mean)


def test_what_it_refuses():
    with pytest.raises(ConversionError, match=r"'0' is a LinearReparameterization of bayesian-torch"):
        mean_network(nn.Sequential(ForeignLinear(2, 2)))
    with pytest.raises(ConversionError, match=r"is a layer of bayesian-torch, which cannot be exported"):
        exported(fb.HybridBayesianClassifier(ForeignLinear(2, 2)).eval(), torch.zeros(3, 2))
    hooked = fb.bayesianize(mlp(6, 3), last=1)
    hooked[2].register_forward_hook(lambda *given: None)
    with pytest.raises(ConversionError, match=r"'2' .* has hooks.*register them again"):
        mean_network(hooked)
    with pytest.raises(PosteriorError, match=r"no parameter '0.weight' of the posterior"):
        mean_network(nn.Linear(2, 1), fb.read_posterior(mlp(6, 3)))
    with pytest.raises(PosteriorError, match=r"'0.weight' has shape \(50, 6\) .* but \(50, 5\)"):
        mean_network(mlp(5, 3), fb.read_posterior(mlp(6, 3)))

    class Strange(Reparameterized):
        mean_layer = fb.layers.BayesianLayer.mean_layer

    with pytest.raises(ConversionError, match=r"Strange has no mean_layer: override it"):
        mean_network(Strange(nn.Linear(2, 2)))
