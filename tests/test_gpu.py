"""On a GPU, or skipped: the same results as on the CPU, the same bits in every run, and after a crash."""

from functools import partial

import pytest
import torch
from torch import nn

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import SignFlip
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import available_fusions
from lightning_fedbayes.methods import Ditto, FedNova, FedProx, Scaffold
from lightning_fedbayes.modules import mlp

from . import federations
from .callbacks import test_resume
from .federations import CLASSES, FEATURES, Plain, assert_equal, bayesian, blobs, federate, loader, network
from .metrics.test_shells import CASES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings(
        "ignore:.*exists and is not empty.*", "ignore:.*callbacks used to create.*", "ignore:GPU available.*"
    ),
]
DEVICE, ENGINES = torch.device("cuda"), ["sequential", "vectorized"]
ON = {"accelerator": "gpu", "devices": 1}


def posterior(federation: fb.FederatedBayes) -> dict[str, torch.Tensor]:
    found = federation.posterior
    return {
        **{f"mean/{n}": v.cpu() for n, v in found.mean.items()},
        **{f"variance/{n}": v.cpu() for n, v in found.variance.items()},
    }


WITHOUT_NOISE = {
    **{
        name: {"fusion": name}
        for name in ("fedavg", "geometric_median", "trimmed_mean", "multi_krum", "fedadam", "ivar_vb", "icov_vb")
    },
    "proximal": {"fusion": FedProx(0.1)},
    "scaffold": {"fusion": Scaffold()},
    "nova": {"fusion": FedNova()},
    "ditto": {"fusion": Ditto(0.5)},
    "laplace": {"posterior": fb.Laplace()},
    "Laplace and sites": {"posterior": fb.Laplace(), "fusion": "sites"},
    "swag": {"posterior": fb.SWAG(), "local_epochs": 2},
    "kept": {"keep": ["optimizer"], "buffers": "local", "local_parameters": ["net.3.*"]},
    "late": {"schedule": fb.Asynchronous(3, 1, fb.Delays(slow={0: 10.0}))},
    "hostile": {"fusion": "trimmed_mean", "adversaries": SignFlip(clients=[1])},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", WITHOUT_NOISE)
def test_a_run_without_noise_ends_where_it_does_on_the_cpu(setting, engine):
    def fit(**where):
        module = Plain(network(batch_norm=True))
        options = {"engine": engine, **WITHOUT_NOISE[setting]}
        federation = fb.FederatedBayes(fb.SizesPartition((30, 24, 16, 12, 8)), seed=3, **options)
        made = federate(module, federation, 3, loader(), loader(shuffle=False), **where)
        figures = {name: value for name, value in made.callback_metrics.items() if "seconds" not in name}
        return posterior(federation), figures

    (here, figures), (there, on_gpu) = fit(), fit(**ON)
    assert here.keys() == there.keys()
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=1e-3, atol=1e-4, msg=name)
    for name in ("val/nll", "train_loss"):
        if name in figures:
            torch.testing.assert_close(on_gpu[name].cpu(), figures[name], rtol=1e-3, atol=1e-4)


@pytest.fixture
def _trainers_take_the_gpu(monkeypatch):
    monkeypatch.setattr(federations, "trainer", partial(federations.trainer, **ON))
    monkeypatch.setattr(test_resume.engine, "STEPS_PER_BATCH", 1)


@pytest.mark.usefixtures("_trainers_take_the_gpu")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", test_resume.SETTINGS)
def test_a_crash_inside_a_round_changes_nothing(tmp_path, setting, engine):
    """So a second run gives the same bits as well."""
    whole = test_resume.state(*test_resume.run(tmp_path / "whole", setting, engine=engine))
    interrupt = test_resume.Interrupt(2, 2)
    with pytest.raises(test_resume.Crash):
        test_resume.run(tmp_path / "parts", setting, callbacks=[interrupt], engine=engine)
    assert_equal(whole, test_resume.state(*test_resume.run(tmp_path / "parts", setting, "last", engine=engine)))
    assert all(bool(torch.isfinite(value).all()) for value in whole.values() if value.is_floating_point())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("first", "then"), [(ON, {}), ({}, ON)], ids=["gpu to cpu", "cpu to gpu"])
def test_a_checkpoint_resumes_on_the_other_device(tmp_path, first, then, engine):
    def fit(rounds, where, ckpt_path=None):
        module = Plain(network(batch_norm=True), optimizer=partial(torch.optim.SGD, momentum=0.9))
        settings = {"fusion": "sites", "posterior": fb.Laplace(), "keep": ["optimizer"], "buffers": "local"}
        federation = fb.FederatedBayes(fb.SizesPartition((32, 24, 18, 16)), engine=engine, **settings)
        return federation, federate(module, federation, rounds, loader(), ckpt_path=ckpt_path, **where)

    whole, _ = fit(4, {})
    _, made = fit(2, first)
    made.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = fit(4, then, tmp_path / "two.ckpt")
    for name, value in posterior(whole).items():
        torch.testing.assert_close(posterior(resumed)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", available_fusions())
def test_rules_fuse_on_the_gpu_as_on_the_cpu(rule):
    clients = [
        fb.GaussianPosterior(
            {"w": torch.randn(4, 3), "b": torch.randn(3)}, {"w": torch.rand(4, 3) + 0.5, "b": torch.rand(3) + 0.5}
        )
        for _ in range(7)
    ]
    previous = fb.GaussianPosterior(
        {"w": torch.zeros(4, 3), "b": torch.zeros(3)}, {"w": 9 * torch.ones(4, 3), "b": 9 * torch.ones(3)}
    )

    def moved(each, device):
        parts = each.mean, each.variance
        return fb.GaussianPosterior(*({name: value.to(device) for name, value in part.items()} for part in parts))

    found = []
    for device in (torch.device("cpu"), DEVICE):
        try:
            fused = fb.fuse(rule, [moved(each, device) for each in clients], previous=moved(previous, device))
        except FusionError as error:
            found.append(str(error))
            continue
        assert all(value.device.type == device.type for value in [*fused.mean.values(), *fused.variance.values()])
        found.append(fused)
    here, there = found
    if isinstance(here, str):
        assert here == there
        return
    for part in ("mean", "variance"):
        for name, value in getattr(here, part).items():
            torch.testing.assert_close(getattr(there, part)[name].cpu(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_metrics_take_tensors_of_the_gpu(case):
    made, inputs, expected = CASES[case]
    metric = made().to(DEVICE)
    metric.update(*(value.to(DEVICE) for value in inputs))
    found, here = metric.compute(), expected(*inputs)
    pairs = zip(found, here, strict=True) if isinstance(here, tuple) else [(found, here)]
    tolerance = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False, "equal_nan": True}
    for first, second in pairs:
        torch.testing.assert_close(torch.as_tensor(first).cpu(), torch.as_tensor(second), **tolerance)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("estimator", ["flipout", "local_reparameterization"])
def test_bayesian_layers_train_and_predict(estimator, engine):
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
    module = fb.HybridBayesianClassifier(net, bayesian_last=2, estimator=estimator, learning_rate=0.01, kl_weight=0.05)
    federation = fb.FederatedBayes(fusion="sites", partition=fb.IIDPartition(4), seed=0, engine=engine)
    made = federations.trainer(3, [federation, fb.FederatedTemperature(), fb.FederatedConformal(level=0.9)], **ON)
    data = fb.DigitsDataModule()
    made.fit(module, datamodule=data)
    assert made.callback_metrics["val/accuracy"] > 0.7
    assert all(bool(torch.isfinite(value).all()) for value in posterior(federation).values())
    scores = made.test(module, datamodule=data, verbose=False)[0]
    assert all(value == value for value in scores.values())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
@pytest.mark.parametrize("make", [Plain, bayesian])
def test_other_precisions_learn_as_much(make, precision):
    def nll(precision):
        federation = fb.FederatedBayes(fb.IIDPartition(3), seed=3, fusion="fedavg")
        made = federate(make(), federation, 4, val=loader(shuffle=False), precision=precision, **ON)
        return float(made.callback_metrics["val/nll"])

    assert nll(precision) == pytest.approx(nll("32-true"), abs=0.1)


def test_heads_are_fitted_on_the_gpu_as_on_the_cpu():
    def fit(**where):
        torch.manual_seed(0)
        module = fb.HeadModule(mlp(FEATURES, 4), fb.BayesianHead(CLASSES, "one_hot"), 4)
        made = federations.trainer(1, [fb.FederatedBayes(fb.IIDPartition(3))], **where)
        made.fit(module, loader())
        return module.cpu().eval()(blobs(12).tensors[0])

    torch.testing.assert_close(fit(**ON), fit(), rtol=1e-3, atol=1e-3)
