"""Rules of validation whose tests need no setting of their own: each refuses one call, with what to do instead."""

import math

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import layers, metrics
from lightning_fedbayes.data import clients_of
from lightning_fedbayes.methods import FedNova, FedProx
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.server.schedule import Timeline
from tests.federations import Plain, bayesian, loader
from tests.refusals import refusals

THREE = torch.arange(60) % 3
MODULE, LAYER, LINE = Plain(), nn.Linear(2, 1), nn.Linear(2, 1)
POINT = fb.GaussianPosterior.point_mass({"w": torch.zeros(1)})


def labelled(labels):
    return TensorDataset(torch.zeros(len(labels), 2), torch.tensor(labels))


def dealt(labels):
    clients_of(labelled(THREE.tolist()), fb.DirichletPartition(3, 0.5, labels=labels), seed=0)


def ivon(**options):
    return fb.IVON(LAYER.parameters(), num_examples=3, **options)


class Bare(fb.Method):
    def __init__(self):
        pass


class Nothing(Plain):
    def training_step(self, batch, batch_idx):
        return {"x": 1}


def colliding():
    layer = layers.LinearReparameterization(2, 2)
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    return layers.PosteriorView(layer)


def nobody_answers():
    away = tuple((client, 0.5, math.inf) for client in range(2))
    Timeline(fb.Asynchronous(buffer=1, delays=fb.Delays(0.2, 0.0, away=away)), [5] * 2, 0).turn(20)


def ensemble():
    model = fb.modules.DeepEnsembleRegressor([mlp(6, 3) for _ in range(2)])
    model.negative_log_likelihood(model(torch.randn(4, 6)), torch.randn(4, 1))


NAN, VAGUE = torch.tensor([[1.0, math.nan, -math.inf]]), torch.tensor([1.0, -1.0, 0.5])
test_data_refuse = refusals(
    fb.FedBayesError,
    (lambda: fb.ClientDatasets({3: labelled([0]), "3": labelled([1])}), "two clients have the name '3', as a string"),
    (lambda: fb.ClientDatasets({True: labelled([0])}), "is no name of a client: give a string, or a whole number"),
    (lambda: clients_of(labelled([3] + [0, 1, 2] * 20), fb.SizesPartition((15, 15)), seed=1), "example of class 3"),
    (lambda: dealt(np.array([0, 1])), r"shape \(2,\), and there are 60 examples"),
    (lambda: dealt(lambda dataset: "x"), "cannot be read as numbers"),
)
test_layers_refuse = refusals(
    fb.FedBayesError,
    (lambda: fb.bayesianize(nn.Sequential(nn.Linear(2, 2)), last=1.5), "last=1.5: give a whole number"),
    (lambda: fb.bayesianize(nn.Sequential(nn.Linear(2, 2)), names="0"), "names='0': give a list"),
    (lambda: fb.bayesianize(nn.Sequential(nn.Linear(2, 2)), names=[]), r"names=\[\]: give a list of one or more"),
    (lambda: fb.bayesianize(nn.Sequential(nn.Linear(2, 2)), types=3), "must be classes of modules"),
    (lambda: fb.bayesianize(nn.TransformerEncoderLayer(4, 2, 8), last=1), "'linear2' .*inside a TransformerEncoderL"),
    (colliding, "both be called 'weight'"),
)
test_methods_rules_refuse = refusals(
    fb.FedBayesError,
    (lambda: fb.FederatedBayes(fusion="scafold"), "did you mean 'scaffold'"),
    (lambda: fb.fuse("scaffold", [POINT]), "method of the federation"),
    (lambda: fb.FederatedBayes(fusion=Bare()), r"call super\(\).__init__"),
    (lambda: fb.FederatedBayes(fusion=FedProx), r"give an object, FedProx\(\)"),
    (lambda: fb.register_method("another")(FedNova), "registered as 'fednova' already"),
    (lambda: fb.register_method("bare")(fb.Method), "give rule a default"),
    (nobody_answers, "no message is under way any more, and no client can start"),
)
test_metrics_calibration_refuse = refusals(
    fb.FedBayesError,
    (lambda: metrics.functional.gaussian_nll(NAN[0] * 0 + 1, VAGUE, VAGUE), "variance is negative at 1 of 3 entries"),
    (lambda: fb.FederatedTemperature(2.0)(NAN), "logits: 1 of 3 entries are NaN"),
)
test_modules_refuse = refusals(
    fb.FedBayesError,
    (lambda: fb.HybridBayesianClassifier(bayesian().network, estimator="flipout"), "without bayesian_last"),
    (lambda: fb.HybridBayesianClassifier(bayesian().network, prior_std=2.0), "prior_std=2.0 without bayesian_last"),
    (ensemble, "two outputs per target"),
    (lambda: fb.with_kl(Plain(), -1.0), "kl_weight=-1.0: give a finite number of at least 0"),
    (lambda: fb.with_kl(fb.with_kl(Plain())), "PlainWithKL has the KL divergence in its loss already"),
    (lambda: fb.with_kl(Nothing()).training_step(1, 0), "returns dict without a loss"),
    (lambda: fb.with_kl(Plain()).training_step(next(iter(loader())), 0), "does not know the number of training exam"),
    (
        lambda: fb.BayesianLinearRegression.fit(torch.randn(1, 3), torch.zeros(1, 1) + 0.1).noise_variance,
        "more examples",
    ),
)
test_ivon_refuse = refusals(
    fb.FedBayesError,
    (lambda: fb.IVON([{"params": 3}]), r"params=.*give module\.parameters\(\)"),
    (lambda: ivon().step(3), "closure=3: give a function"),
    (lambda: ivon().step(), "no gradient at a draw"),
    (lambda: ivon().posterior(LINE), "trains no parameter of the Linear"),
    (lambda: ivon().posterior(None), "give the network"),
)
