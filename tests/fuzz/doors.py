"""Public doors: every callable that a user can give a wrong argument to, with a call that works."""

import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import fusion, layers, methods, metrics, modules
from lightning_fedbayes.callbacks import calibration
from lightning_fedbayes.clients import privacy
from lightning_fedbayes.clients.across import CrossScores
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.messages import ClientFailure
from lightning_fedbayes.data import ClientDatasets, DiabetesDataModule, clients_of, labels_of
from lightning_fedbayes.data.partition.base import Split, counts_table
from lightning_fedbayes.fusion import AutoFusion, available_fusions
from lightning_fedbayes.methods import (
    Averaging,
    Ditto,
    FedAsync,
    FedBuff,
    FedNova,
    FedProx,
    LocalProblem,
    Participant,
    Quadratic,
    Report,
    Scaffold,
    Shared,
    Trained,
)
from lightning_fedbayes.metrics import functional
from lightning_fedbayes.modules import HeadSlopes, LinearStatistics
from lightning_fedbayes.server import KnownOverlap, aggregation, weighting
from lightning_fedbayes.trainer import ClientParallelStrategy

LABELS = torch.arange(60) % 3
PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
SAMPLES = torch.stack([PROBS, PROBS.flip(1)])
TARGET = torch.tensor([0, 1])


def posterior(shift=0.0, variance=0.25):
    """A posterior of a Gaussian weight and a deterministic bias."""
    return fb.GaussianPosterior(
        {"w": torch.tensor([[1.0, 2.0]]) + shift, "b": torch.tensor([shift])},
        {"w": torch.full((1, 2), variance), "b": torch.zeros(1)},
    )


def update(client=0, shift=0.0):
    return fb.ClientUpdate(client, 5, posterior(shift), {"running": torch.ones(2)}, {"train_loss": 1.0}, 0.5)


def network():
    """Two linear layers, small and always the same."""
    first, last = nn.Linear(2, 3), nn.Linear(3, 2)
    nn.init.constant_(first.weight, 0.1)
    return nn.Sequential(first, nn.ReLU(), last)


def bayesian():
    return fb.bayesianize(network(), last=1)


def table(examples=60):
    return TensorDataset(torch.zeros(examples, 2), torch.arange(examples) % 3)


def entered(manager, *arguments, **options):
    """Enter and leave a context manager."""
    with manager(*arguments, **options):
        pass


def begun(**arguments):
    """A server in the middle of a round."""
    server = fb.Server(**{"posterior": posterior(), "buffers": {"running": torch.zeros(2)}, **arguments})
    server.begin(fb.RoundPlan(0, (0, 1)))
    return server


def admit(client, num_examples, posterior, buffers, metrics, seconds):
    """Admit a client's update: whatever is wrong with it must be an error of the package or an outcome with one."""
    server = begun()
    outcome = server.admit(fb.ClientUpdate(client, num_examples, posterior, buffers, metrics, seconds))
    server.admit(update(1))
    server.finish()
    if outcome.error is not None:
        raise outcome.error


def accumulate(posterior, weight):
    accumulator = fusion.FusionAccumulator(fusion.get_rule("linear_pool"))
    accumulator.add(update().posterior)
    accumulator.add(posterior, weight)
    accumulator.compute()


def aggregate(rule, weighting, previous, buffers, update):
    round = aggregation.Aggregation(rule, weighting, previous, buffers)
    round.add(update)
    round.finish()


def measure(metric, *arguments, **options):
    """Make a metric, feed it one batch and read it."""
    made = metric(*arguments, **options)
    batch = {
        metrics.ClientAccuracy: (PROBS, TARGET, TARGET),
        metrics.AccuracyRetained: (TARGET == 0, torch.rand(2)),
        metrics.IntervalCoverage: (torch.zeros(2), torch.ones(2), torch.zeros(2)),
        metrics.PredictiveEntropy: (SAMPLES,),
        metrics.OutOfDistributionFPR: (torch.rand(2), TARGET == 1),
    }.get(metric, (PROBS, TARGET))
    made.update(*batch)
    made.compute()


def updated(metric, **batch):
    """Feed a metric one batch and read it."""
    metric.update(**batch)
    metric.compute()


def quietly(function, **arguments):
    """Call without warnings, of too few examples for instance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(**arguments)


def split(partition, **arguments):
    made = partition(**arguments)
    made.split(LABELS, seed=0)


def linear_regression(inputs, targets, prior_std, noise, at, samples):
    model = fb.BayesianLinearRegression.fit(inputs, targets, prior_std, noise)
    fb.BayesianLinearRegression.conflate([model, model]).predict(at, samples)


def hierarchical(random, bias, inputs, targets, at, client):
    clients = dict.fromkeys("ab", fb.modules.LinearStatistics.of(inputs, targets, bias))
    fb.HierarchicalLinearRegression(random, bias).fit(clients).predict(at, client)


def head(inputs, targets, **options):
    fb.BayesianHead(**options).fit_clients([(inputs, targets)])


def registered(name, aliases):
    decorate = fb.register_fusion(name, aliases)
    if name == "a_rule_of_a_test" and name in available_fusions():
        fusion.unregister_fusion(name)
    decorate(lambda posteriors, weights, previous: posteriors[0])
    fusion.unregister_fusion(name)


def named(name):
    decorate = fb.register_method(name)
    decorate(type("Own", (FedNova,), {}))
    methods.unregister_method(name)


def unregistered(name):
    """Unregister; the rule of the test is there whatever call came before."""
    fb.register_fusion("a_rule_of_a_test")(lambda posteriors, weights, previous: posteriors[0])
    try:
        fusion.unregister_fusion(name)
    finally:
        if "a_rule_of_a_test" in available_fusions():
            fusion.unregister_fusion("a_rule_of_a_test")


X, Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)
THREE = [posterior(0.0), posterior(1.0), posterior(2.0)]
CLIENTS = {"clients": [0]}
LINEAR = nn.Linear(2, 3)
CLASSES = TensorDataset(torch.randn(9, 2), torch.arange(9) % 3)
SKETCH = calibration.ScoreSketch.of(torch.linspace(0, 1, 20))
REGRESSION = fb.Laplace(fb.Gaussian(1.0)).posterior(LINEAR, [(X, torch.zeros(8, 3))])
HALVES = torch.arange(8) % 2
FIT = fb.BayesianHead(2).fit(fb.BayesianHead(2).sums(X, HALVES))
DONE_HEAD = fb.BayesianHead(2, inference="laplace")
DONE_FIT = DONE_HEAD.fit_clients([(X, HALVES)])
SITE = fb.KroneckerLaplace().site(LINEAR, [(X, torch.arange(8) % 3)])
CONVOLUTION = {
    "in_channels": 2,
    "out_channels": 2,
    "kernel_size": 2,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
}
OF_LAYER = {
    "prior_mean": 0.0,
    "prior_variance": None,
    "posterior_mu_init": 0.0,
    "posterior_rho_init": None,
    "bias": True,
    "prior_std": None,
    "prior": None,
    "bayesian_bias": True,
    "device": None,
    "dtype": None,
}
OF_MODULE = {
    "samples": 2,
    "kl_weight": 1.0,
    "warmup_rounds": 0,
    "learning_rate": 1e-3,
    "optimizer": None,
    "predictive": "layers",
}
OF_HYBRID = {
    "bayesian_last": 1,
    "estimator": "flipout",
    "prior_std": None,
    "prior": None,
    "init": "fresh",
    "posterior_std": None,
    **OF_MODULE,
}
SETTINGS = {
    "partition": None,
    "local_epochs": 1,
    "fraction": 1.0,
    "fusion": "linear_pool",
    "weighting": "equal",
    "engine": "auto",
    "keep": (),
    "buffers": "average",
    "local_parameters": (),
    "safeguards": fb.Safeguards(),
    "adversaries": None,
    "privacy": None,
    "seed": 0,
}


def ivon_step(closure):
    """Take a step of an IVON that has a gradient."""
    weight = torch.zeros(2, requires_grad=True)
    optimizer = fb.IVON([weight], num_examples=10)
    with optimizer.sampled():
        weight.square().sum().backward()
    optimizer.step(closure)


def cox(step, targets):
    """Take a step of a Cox regressor outside of a Trainer."""
    module = fb.CoxRegressor(nn.Linear(2, 1))
    module.num_examples, module.log_dict = 8, lambda *_, **__: None
    getattr(module, step)((X, targets), 0)


def step(name, batch, **options):
    """Take a step of a predictive outside of a Trainer."""
    getattr(fb.PosteriorPredictive(LINEAR, REGRESSION, 2, **options), name)(batch)


def given_state(optimizer, then, rounds):
    """Give a server by FedAdam a state of its rule, and finish a round."""
    server = fb.Server(posterior(), fusion="fedadam")
    state = {**server.state_dict(), "rounds": rounds}
    state["rule_states"] = {name: {"optimizer": optimizer, "then": then} for name in state["rule_states"]}
    server.load_state_dict(state)
    server.begin(fb.RoundPlan(server.rounds, (0, 1)))
    server.admit(fb.ClientUpdate(0, 5, posterior(1.0)))
    server.finish()


SHARED = {
    "posterior": posterior(),
    "tensors": {"w": torch.zeros(1, 2), "b": torch.zeros(1)},
    "share": 0.5,
    "is_new": False,
}
CLIENT = {"number": 0, "num_examples": 5, "kept": {}, "problem": 0, "steps": 3, "rate": 0.1}


def looped(number, num_examples, kept, problem, steps, rate, **shared):
    """Take a client's round of FedProx in a loop of one's own."""
    method, client = FedProx(0.1), Participant(number, num_examples, kept, problem, steps, rate)
    shared = Shared(**shared)
    method.problem(shared, client)
    method.report(shared, client, Trained(shared.posterior)).update(number, num_examples)


def sited(gradients, precisions, **arguments):
    """Take a round of sites in a loop of one's own."""
    method, client = fb.Sites(**arguments), Participant(0, 5)
    server, shared = begun(fusion=method), Shared(posterior(), method.init(posterior()))
    method.problem(shared, client)
    report = method.report(shared, client, Trained(posterior(1.0), gradients, precisions))
    server.admit(report.update(0, 5, {"running": torch.ones(2)}))
    server.finish()


class Plain(fb.BayesianModule):
    """A module of one's own."""

    def negative_log_likelihood(self, outputs, targets):
        return outputs.sum()


def rules():
    """Every rule with arguments, fused, so that an argument that fails late is found too."""
    arguments = {
        "AlphaBarycenter": {"alpha": 0.5},
        "DistributedWeightConsolidation": {"min_precision": 1e-3},
        "GeometricMedian": {"smoothing": 1e-6, "tolerance": 1e-6, "max_iterations": 5},
        "InverseCovarianceMLE": {"latent": 1, "memory": 1.0, "floor": 1e-2, "tolerance": 1e-6, "max_iterations": 5},
        "InverseCovarianceVB": {"latent": 1, "memory": 1.0, "floor": 1e-3},
        "InverseVarianceMLE": {"memory": 1.0, "floor": 1e-2, "tolerance": 1e-6, "max_iterations": 5},
        "InverseVarianceVB": {"memory": 1.0, "floor": 1e-2, "tolerance": 1e-6, "max_iterations": 5},
        "FedAvgM": {"lr": 1.0, "momentum": 0.9, "then": "weighted_average"},
        "FedAdagrad": {"lr": 0.1, "beta1": 0.0, "epsilon": 1e-3, "then": "weighted_average"},
        "FedAdam": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3, "then": "weighted_average"},
        "FedYogi": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3, "then": "weighted_average"},
        "Krum": {"byzantine": 0},
        "MultiKrum": {"byzantine": 0, "keep": 1},
        "NearestNeighbourMixing": {"then": "linear_pool", "byzantine": 0},
        "NormClipping": {"then": "linear_pool", "radius": 1.0},
        "Reliability": {"by": "ivar_vb", "then": "linear_pool"},
        "TrimmedMean": {"trim": 0.1},
    }
    return {name: (partial(fused, getattr(fusion, name)), given) for name, given in arguments.items()}


def fused(kind, **arguments):
    fb.fuse(kind(**arguments), THREE, previous=posterior(variance=1e3))


def removed(**arguments):
    """The client of a federation by sites; None stands for a checkpoint of one."""
    posterior_state = {"mean": {"w": torch.zeros(1)}, "variance": {"w": torch.ones(1)}}
    site = {"gradient": torch.zeros(1).double(), "precision": torch.zeros(1).double()}
    state = {"posterior": posterior_state, "rule_states": {}, "sites": {}, "clients": {0: {"kept": site}}}
    given = {"callbacks": {"FederatedBayes": state}} if arguments["federation"] is None else arguments["federation"]
    fb.remove_client(given, arguments["client"])


def layer(kind, **arguments):
    made = kind(**arguments)
    made.kl_loss()


def mixture(**arguments):
    layers.ScaleMixturePrior(**arguments).kl(torch.zeros(2), torch.ones(2))


WIDE = nn.Linear(2, 3)
PREDICTIVE = fb.PosteriorPredictive(
    WIDE, fb.GaussianPosterior.point_mass({name: value.detach() for name, value in WIDE.named_parameters()})
)
OWN = ClientDatasets({"north": table(6), "south": table(5)})
ACROSS = CrossScores(("a", "b", "c"), {"nll": torch.rand(3, 3)})
SCORES = ClientScores(("a", "b"), (3, 4), {"nll": torch.ones(2)})

DOORS = {
    "FederationSettings": (FederationSettings, SETTINGS),
    "FederatedBayes": (fb.FederatedBayes, SETTINGS),
    "Safeguards": (fb.Safeguards, {"min_clients": 1, "max_failed_rounds": 3, "max_influence": 2.0}),
    "Asynchronous": (
        fb.Asynchronous,
        {"concurrency": 4, "buffer": 2, "delays": fb.Delays(), "late": FedBuff(), "max_staleness": 5},
    ),
    "KnownOverlap": (KnownOverlap, {"shared": [[9, 4], [4, 6]]}),
    "Delays": (
        fb.Delays,
        {
            "typical": 1.0,
            "spread": 0.5,
            "slow": {0: 2.0},
            "by_size": False,
            "network": 0.1,
            "away": ((0, 1.0, 2.0),),
            "trace": {1: [1.0, 2.0]},
        },
    ),
    "check": (
        lambda trainer: fb.check(trainer, Plain(network())),
        {"trainer": Trainer(logger=False, callbacks=[fb.FederatedBayes()])},
    ),
    "FedBuff": (FedBuff, {"exponent": 0.5}),
    "FedAsync": (FedAsync, {"exponent": 0.5, "mixing": 0.6}),
    "Kept": (fb.Kept, {"what": ("optimizer",), "folder": "clients"}),
    "UpdatePrivacy": (fb.UpdatePrivacy, {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "widen_posterior": True}),
    "ExamplePrivacy": (fb.ExamplePrivacy, {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}),
    "AutoFusion": (AutoFusion, {"candidates": ["linear_pool", "conflation"], "score": None}),
    "Averaging": (Averaging, {"rule": "linear_pool", "prior": "global"}),
    "Ditto": (Ditto, {"strength": 0.1, "rule": "linear_pool"}),
    "FedNova": (FedNova, {"rule": "linear_pool"}),
    "FedProx": (FedProx, {"strength": 0.1, "rule": "linear_pool"}),
    "Scaffold": (Scaffold, {"rule": "linear_pool"}),
    "Sites": (
        sited,
        {
            "prior_mean": 0.0,
            "prior_std": {"w": 1.0},
            "gradients": {"w": torch.ones(1, 2), "b": torch.ones(1)},
            "precisions": {"w": torch.ones(1, 2)},
        },
    ),
    "register_method": (named, {"name": "a_method_of_a_test"}),
    "register_fusion": (registered, {"name": "a_rule_of_a_test", "aliases": ("its_other_name",)}),
    "available_fusions": (available_fusions, {"aliases": True}),
    "get_rule": (fusion.get_rule, {"rule": "linear_pool"}),
    "remove_client": (removed, {"federation": None, "client": 0}),
    "rule_name": (fusion.rule_name, {"rule": "rklb"}),
    "unregister_fusion": (unregistered, {"name": "a_rule_of_a_test"}),
    "epsilon_of": (privacy.epsilon_of, {"noise_multiplier": 1.0, "delta": 1e-5, "rounds": 2, "fraction": 1.0}),
    "noise_multiplier_for": (fb.noise_multiplier_for, {"epsilon": 8.0, "delta": 1e-5, "rounds": 2}),
    "UpdatePrivacy.figures": (fb.UpdatePrivacy().figures, {"rounds": 2}),
    "UpdatePrivacy.send": (
        fb.UpdatePrivacy().send,
        {"update": fb.ClientUpdate(0, 5, posterior()), "previous": posterior(), "seed": 0, "round": 0},
    ),
    "ClassPartition": (partial(split, fb.ClassPartition), {"clients": 3, "classes_per_client": 2, "labels": None}),
    "DirichletPartition": (
        partial(split, fb.DirichletPartition),
        {"clients": 3, "alpha": 0.5, "per": "label", "min_examples": 1, "balance": True, "labels": None},
    ),
    "DirichletPartition per client": (
        partial(split, fb.DirichletPartition),
        {"clients": 3, "alpha": 0.5, "per": "client"},
    ),
    "IIDPartition": (partial(split, fb.IIDPartition), {"clients": 3}),
    "SizesPartition": (partial(split, fb.SizesPartition), {"sizes": (3, 4)}),
    "ClassPartition.split": (fb.ClassPartition(3, 2).split, {"labels": LABELS, "seed": 0, "num_examples": 60}),
    "IIDPartition.split": (fb.IIDPartition(3).split, {"labels": None, "seed": 0, "num_examples": 60}),
    "Split.from_indices": (Split.from_indices, {"indices": [[0, 1], [2]], "labels": LABELS}),
    "counts_table": (counts_table, {"indices": [torch.tensor([0]), torch.tensor([1])], "labels": LABELS}),
    "ClientDatasets": (ClientDatasets, {"datasets": {"north": table(3), "south": table(5)}, "skip_empty": False}),
    "clients_of": (clients_of, {"dataset": table(), "partition": fb.IIDPartition(3), "seed": 0}),
    "labels_of": (labels_of, {"dataset": table(), "source": None}),
    "DigitsDataModule": (
        fb.DigitsDataModule,
        {"batch_size": 8, "validation_fraction": 0.2, "seed": 0, "images": False},
    ),
    "DiabetesDataModule": (DiabetesDataModule, {"batch_size": 8, "validation_fraction": 0.2, "seed": 0}),
    "GaussianPosterior": (fb.GaussianPosterior, {"mean": posterior().mean, "variance": posterior().variance}),
    "GaussianPosterior.point_mass": (fb.GaussianPosterior.point_mass, {"mean": posterior().mean}),
    "GaussianPosterior.from_state_dict": (fb.GaussianPosterior.from_state_dict, {"state": posterior().state_dict()}),
    "GaussianPosterior.kl": (posterior().kl, {"other": posterior(1.0)}),
    "GaussianPosterior.ordered": (posterior().ordered, {"names": ("b", "w")}),
    "GaussianPosterior.unflatten": (posterior().unflatten, {"mean": torch.zeros(3), "variance": torch.ones(3)}),
    "GaussianPosterior.sample": (posterior().sample, {"generator": None}),
    "fuse": (fb.fuse, {"rule": "linear_pool", "posteriors": THREE, "weights": [1.0, 2.0, 1.0], "previous": None}),
    "fuse dwc": (fb.fuse, {"rule": "dwc", "posteriors": THREE, "weights": None, "previous": posterior(variance=1e3)}),
    "FusionAccumulator.add": (accumulate, {"posterior": posterior(), "weight": 1.0}),
    **rules(),
    "Server": (
        begun,
        {
            "posterior": posterior(),
            "buffers": {"running": torch.zeros(2)},
            "fusion": "linear_pool",
            "weighting": "equal",
            "safeguards": fb.Safeguards(),
        },
    ),
    "Server.begin": (begun().begin, {"plan": fb.RoundPlan(0, (0, 1))}),
    "Server.admit": (lambda update, started: begun().admit(update, started), {"update": update(), "started": 0}),
    "Server.load_state_dict": (lambda state: begun().load_state_dict(state), {"state": begun().state_dict()}),
    "Server.load_state_dict rule": (
        given_state,
        {"optimizer": {"momentum": torch.zeros(3), "square": torch.ones(3)}, "then": {}, "rounds": 1},
    ),
    "Shared": (partial(looped, **CLIENT), SHARED),
    "Participant": (partial(looped, **SHARED), CLIENT),
    "Trained": (Trained, {"posterior": posterior(), "gradients": {}, "precisions": {}}),
    "Quadratic": (
        lambda strength, slope, names, values, start: Quadratic(strength, slope, names)(values, start),
        {
            "strength": 1.0,
            "slope": {"w": torch.ones(1, 2)},
            "names": frozenset("wb"),
            "values": posterior(1.0).mean,
            "start": posterior().mean,
        },
    ),
    "LocalProblem": (
        LocalProblem,
        {"quadratic": Quadratic(), "prior": None, "start": posterior().mean, "measures": False},
    ),
    "Report": (
        lambda posterior, kept, sent, client, num_examples, buffers: begun().admit(
            Report(posterior, kept, sent).update(client, num_examples, buffers)
        ),
        {
            "posterior": posterior(),
            "kept": {},
            "sent": {},
            "client": 0,
            "num_examples": 5,
            "buffers": {"running": torch.ones(2)},
        },
    ),
    "Method": (fb.Method, {"rule": "linear_pool"}),
    "UncertaintyReport": (fb.UncertaintyReport, {"samples": 2}),
    "ClientParallelStrategy": (ClientParallelStrategy, {"start_method": "spawn"}),
    "ClientUpdate": (
        admit,
        {
            "client": 0,
            "num_examples": 5,
            "posterior": posterior(),
            "buffers": {"running": torch.ones(2)},
            "metrics": {"train_loss": 1.0},
            "seconds": 0.5,
        },
    ),
    "ClientFailure": (
        lambda **arguments: begun().admit(ClientFailure(**arguments)),
        {"client": 0, "error": RuntimeError("x"), "num_examples": 3, "seconds": 0.1},
    ),
    "RoundPlan": (
        lambda **arguments: begun().begin(fb.RoundPlan(**arguments)),
        {"round": 0, "cohort": (0, 1), "starts": (0, 2, 3)},
    ),
    "Aggregation": (
        aggregate,
        {
            "rule": fusion.get_rule("linear_pool"),
            "weighting": "equal",
            "previous": posterior(),
            "buffers": {"running": torch.zeros(2)},
            "update": update(),
        },
    ),
    "client_weights": (
        weighting.client_weights,
        {"weighting": "train_size", "facts": [weighting.ClientFacts.of(update(), posterior())]},
    ),
    "effective_clients": (weighting.effective_clients, {"weights": [0.5, 0.5]}),
    "temperature_message": (
        calibration.temperature_message,
        {"logits": SAMPLES, "targets": TARGET, "temperature": 1.5},
    ),
    "TemperatureMessage": (
        lambda **sums: calibration.TemperatureSearch().after([calibration.TemperatureMessage(**sums)]),
        {"gradient": 1.0, "curvature": 1.0, "num_examples": 2},
    ),
    "TemperatureSearch.after": (
        calibration.TemperatureSearch().after,
        {"messages": [calibration.TemperatureMessage(1.0, 1.0, 1)]},
    ),
    "FederatedTemperature": (
        lambda **options: fb.FederatedTemperature(**options)(PROBS),
        {"temperature": 2.0, "max_influence": 2.0},
    ),
    "FederatedTemperature.fit": (
        partial(quietly, fb.FederatedTemperature().fit),
        {"clients": {"a": (PROBS.log(), 1 - TARGET)}},
    ),
    "FederatedTemperature.fit_from": (
        partial(quietly, fb.FederatedTemperature().fit_from),
        {"predictive": LINEAR, "datasets": {"a": CLASSES}, "trained_on": table(3), "batch_size": 2, "seed": 0},
    ),
    "FederatedTemperature.evaluate": (
        fb.FederatedTemperature(2.0).evaluate,
        {"predictive": LINEAR, "datasets": {"a": CLASSES}, "batch_size": 2, "seed": 0},
    ),
    "FederatedTemperature.__call__": (fb.FederatedTemperature(2.0), {"logits": PROBS}),
    "class_scores": (calibration.class_scores, {"probs": PROBS, "targets": TARGET, "kind": "aps", "generator": None}),
    "all_class_scores": (calibration.all_class_scores, {"probs": PROBS, "kind": "aps", "generator": None}),
    "interval_scores": (
        calibration.interval_scores,
        {"mean": torch.zeros(2), "std": torch.ones(2), "targets": torch.ones(2)},
    ),
    "ScoreSketch": (
        lambda **arguments: calibration.ScoreSketch(**arguments).threshold(0.9),
        {"counts": torch.tensor([5, 9]), "grid": "unit"},
    ),
    "ScoreSketch.of": (calibration.ScoreSketch.of, {"scores": torch.rand(3), "bins": 8, "grid": "unit"}),
    "ScoreSketch.threshold": (calibration.ScoreSketch.of(torch.rand(20)).threshold, {"level": 0.9}),
    "ScoreSketch.noisy": (calibration.ScoreSketch.of(torch.rand(20)).noisy, {"epsilon": 1.0, "seed": 0}),
    "ScoreSketch.__add__": (SKETCH.__add__, {"other": SKETCH}),
    "evaluate_clients": (
        fb.evaluate_clients,
        {"module": PREDICTIVE, "clients": OWN, "batch_size": 4, "seed": 0, "collate_fn": None},
    ),
    "evaluate_across": (
        fb.evaluate_across,
        {
            "modules": {"north": PREDICTIVE, "south": PREDICTIVE},
            "clients": OWN,
            "figure": "nll",
            "batch_size": 4,
            "seed": 0,
            "collate_fn": None,
        },
    ),
    "CrossScores": (CrossScores, {"names": ("a", "b"), "values": {"nll": torch.ones(2, 2)}}),
    "CrossScores.others": (ACROSS.others, {"figure": "nll"}),
    "CrossScores.effects": (ACROSS.effects, {"figure": "nll"}),
    "CrossScores.outlying": (ACROSS.outlying, {"figure": "nll", "rate": 0.05}),
    "CrossScores.table": (ACROSS.table, {"figure": "nll"}),
    "hold_out": (fb.hold_out, {"clients": OWN, "fraction": 0.3, "seed": 0}),
    "choose_personal_weight": (
        fb.choose_personal_weight,
        {
            "posterior_of": lambda weight: PREDICTIVE.posterior,
            "module": PREDICTIVE.network,
            "held_out": table(5),
            "weights": (0.0, 1.0),
            "batch_size": 4,
            "seed": 0,
        },
    ),
    "ClientScores": (ClientScores, {"names": ("a", "b"), "num_examples": (3, 4), "values": {"nll": torch.ones(2)}}),
    "ClientScores.mean": (SCORES.mean, {"figure": "nll", "weighting": "clients"}),
    "ClientScores.worst": (SCORES.worst, {"figure": "nll", "fraction": 0.5}),
    "ClientScores.spread": (SCORES.spread, {"figure": "nll"}),
    "FederatedConformal": (
        fb.FederatedConformal,
        {
            "level": 0.9,
            "kind": "lac",
            "per_client": True,
            "shrinkage": 1.0,
            "bins": 16,
            "epsilon": 1.0,
            "pooling": "sum",
            "max_influence": 2.0,
        },
    ),
    "FederatedConformal.fit": (
        partial(quietly, fb.FederatedConformal().fit),
        {"clients": {"a": torch.rand(9), "b": SKETCH}, "seed": 0},
    ),
    "FederatedConformal.fit_from": (
        partial(quietly, fb.FederatedConformal(0.5).fit_from),
        {
            "predictive": LINEAR,
            "datasets": {"a": CLASSES},
            "temperature": 2.0,
            "trained_on": table(3),
            "batch_size": 2,
            "seed": 0,
        },
    ),
    "FederatedConformal.evaluate": (
        fb.FederatedConformal().fit({"a": SKETCH}).evaluate,
        {"predictive": LINEAR, "datasets": {"a": CLASSES}, "batch_size": 2, "seed": 0},
    ),
    "FederatedConformal.sets": (
        fb.FederatedConformal(kind="aps", per_client=True).fit({"a": SKETCH}).sets,
        {"probs": PROBS, "client": "a", "generator": None},
    ),
    "FederatedConformal.intervals": (
        fb.FederatedConformal(kind="interval", per_client=True).fit({"a": torch.rand(20)}).intervals,
        {"mean": torch.zeros(2), "std": torch.ones(2), "client": "a"},
    ),
    "predictions_of": (
        calibration.predictions_of,
        {"predictive": LINEAR, "datasets": {"a": CLASSES}, "batch_size": 2, "seed": 0},
    ),
    "with_kl": (fb.with_kl, {"module": fb.HybridBayesianClassifier(network()).eval(), "kl_weight": 1.0}),
    "mean_network": (fb.mean_network, {"module": bayesian(), "posterior": fb.read_posterior(bayesian())}),
    "bayesianize": (
        fb.bayesianize,
        {
            "network": network(),
            "last": 1,
            "names": None,
            "types": None,
            "estimator": "flipout",
            "prior_std": None,
            "prior": None,
            "init": "fresh",
            "delta": 0.1,
            "posterior_std": None,
            "bayesian_bias": True,
        },
    ),
    "bayesianize names": (fb.bayesianize, {"network": network(), "names": ["0"], "init": "pretrained", "delta": 0.1}),
    "bayesianize types": (fb.bayesianize, {"network": network(), "types": [nn.Linear], "prior_std": 1.0}),
    "with_mc_dropout": (fb.with_mc_dropout, {"network": network(), "rate": 0.2}),
    "kl_divergence": (fb.kl_divergence, {"module": bayesian()}),
    "read_posterior": (fb.read_posterior, {"module": bayesian(), "exclude": ()}),
    "load_posterior": (
        fb.load_posterior,
        {"module": bayesian(), "posterior": fb.read_posterior(bayesian()), "exclude": ()},
    ),
    "set_prior": (layers.set_prior, {"module": bayesian(), "posterior": fb.read_posterior(bayesian()), "exclude": ()}),
    "gaussian_parameters": (layers.gaussian_parameters, {"module": bayesian()}),
    "mean_only": (partial(entered, layers.mean_only), {"module": bayesian()}),
    "evaluation_mode": (partial(entered, layers.evaluation_mode), {"module": bayesian()}),
    "use_estimator": (partial(entered, layers.use_estimator), {"module": bayesian(), "name": "flipout"}),
    "PosteriorView": (layers.PosteriorView, {"module": bayesian(), "exclude": ()}),
    "MCDropout": (layers.MCDropout, {"p": 0.5}),
    "NormalPrior": (layers.NormalPrior, {"mean": 0.0, "std": 1.0}),
    "TiedMeanPrior": (layers.TiedMeanPrior, {"std": 1.0}),
    "ScaleMixturePrior": (mixture, {"weight": 0.5, "std1": 1.0, "std2": 0.1}),
    "Reparameterized": (
        partial(layer, layers.Reparameterized),
        {
            "module": nn.LSTM(2, 2),
            "prior_mean": 0.0,
            "prior_variance": None,
            "prior_std": None,
            "prior": None,
            "posterior_std": None,
        },
    ),
    **{
        f"Linear{kind}": (
            partial(layer, getattr(layers, f"Linear{kind}")),
            {"in_features": 2, "out_features": 2, **OF_LAYER},
        )
        for kind in ("Reparameterization", "LocalReparameterization", "Flipout")
    },
    **{
        f"Conv{shape}Flipout": (
            partial(layer, getattr(layers, f"Conv{shape}Flipout")),
            {
                **CONVOLUTION,
                **({"output_padding": 0} if "Transpose" in shape else {}),
                **OF_LAYER,
                "padding_mode": "zeros",
            },
        )
        for shape in ("1d", "2d", "3d", "Transpose1d", "Transpose2d", "Transpose3d")
    },
    "IVON": (
        lambda **options: fb.IVON([torch.zeros(2, requires_grad=True)], **options),
        {
            "lr": 0.1,
            "num_examples": 10,
            "prior_std": 1.0,
            "hessian_init": 1.0,
            "betas": (0.9, 0.999),
            "samples": 1,
            "temperature": 1.0,
        },
    ),
    "IVON params": (fb.IVON, {"params": [torch.zeros(2, requires_grad=True)]}),
    "IVON.step": (ivon_step, {"closure": None}),
    "IVON.posterior": (lambda module: fb.IVON(LINEAR.parameters()).posterior(module), {"module": LINEAR}),
    "Laplace.posterior": (fb.Laplace().posterior, {"module": LINEAR, "batches": [(X, torch.arange(8) % 3)]}),
    "Laplace.site": (
        lambda inputs, targets: fb.Laplace().site(LINEAR, [(inputs, targets)]),
        {"inputs": X, "targets": torch.arange(8) % 3},
    ),
    "Laplace.fuse": (
        fb.Laplace().fuse,
        {"module": LINEAR, "sites": [fb.Laplace().site(LINEAR, [(X, torch.arange(8) % 3)])]},
    ),
    "KroneckerLaplace.site": (fb.KroneckerLaplace().site, {"module": LINEAR, "batches": [(X, torch.arange(8) % 3)]}),
    "KroneckerLaplace.site batch": (
        lambda inputs, targets: fb.KroneckerLaplace().site(LINEAR, [(inputs, targets)]),
        {"inputs": X, "targets": torch.arange(8) % 3},
    ),
    "KroneckerLaplace.fuse": (fb.KroneckerLaplace().fuse, {"sites": [SITE]}),
    **{
        f"PosteriorPredictive.{name} {task} {predictive}": (
            partial(step, name, likelihood=task, predictive=predictive),
            {"batch": [X, torch.arange(8) % 3 if task == "categorical" else torch.zeros(8, 3)]},
        )
        for name in ("predict_step", "validation_step", "test_step")
        for task in ("categorical", "bernoulli")
        for predictive in ("draws", "linearised")
    },
    "PosteriorPredictive.sample": (PREDICTIVE.sample, {"inputs": X, "samples": 2}),
    **{
        f"CoxRegressor.{name}": (partial(cox, name), {"targets": torch.stack([torch.ones(8), torch.arange(8.0)], 1)})
        for name in ("training_step", "validation_step", "test_step")
    },
    "Categorical": (fb.Categorical, {"ignore_index": -100, "channels": 1}),
    "Gaussian": (fb.Gaussian, {"noise": 0.5}),
    "Categorical.rows": (fb.Categorical().rows, {"draws": X.new_zeros(2, 8, 3), "targets": torch.arange(8) % 3}),
    "Bernoulli.rows": (fb.Bernoulli().rows, {"draws": X.new_zeros(2, 8, 3), "targets": torch.zeros(8, 3)}),
    "Gaussian.rows": (fb.Gaussian(1.0).rows, {"draws": X.new_zeros(2, 8, 3), "targets": torch.zeros(8, 3)}),
    "Cox.rows": (fb.Cox().rows, {"draws": X.new_zeros(2, 8, 1), "targets": torch.ones(8, 2)}),
    "Laplace": (
        fb.Laplace,
        {
            "likelihood": "categorical",
            "curvature": "ggn",
            "prior_std": 1.0,
            "temperature": 1.0,
            "parameters": ("*",),
            "unpack": None,
        },
    ),
    "KroneckerLaplace": (fb.KroneckerLaplace, {"curvature": fb.Laplace(), "damping": 0.1}),
    "SWAG": (fb.SWAG, {"start": 0.5, "scale": 1.0, "min_std": 1e-3, "parameters": ("*",)}),
    "PosteriorPredictive": (
        fb.PosteriorPredictive,
        {
            "module": network(),
            "posterior": fb.read_posterior(network()),
            "samples": 2,
            "likelihood": "categorical",
            "predictive": "draws",
            "unpack": None,
        },
    ),
    "BayesianModule": (Plain, {"network": network(), **OF_MODULE}),
    "HybridBayesianClassifier": (fb.HybridBayesianClassifier, {"network": network(), **OF_HYBRID, "robustness": 0.0}),
    "HybridBayesianRegressor": (
        fb.HybridBayesianRegressor,
        {"network": network(), **OF_HYBRID, "noise": "learnt", "noise_std": 1.0, "targets": None, "scaler": True},
    ),
    "CoxRegressor": (fb.CoxRegressor, {"network": network(), **OF_HYBRID}),
    "BayesianModule.unpack": (Plain(network()).unpack, {"batch": [X, Y]}),
    "cox_loss": (functional.cox_loss, {"log_risk": torch.zeros(2), "time": torch.ones(2), "event": TARGET}),
    "DeepEnsembleRegressor": (
        lambda **arguments: fb.modules.DeepEnsembleRegressor(**arguments),
        {"networks": [nn.Linear(2, 2), nn.Linear(2, 2)], "learning_rate": 1e-3, "optimizer": None, "scaler": True},
    ),
    "FederatedScaler": (fb.FederatedScaler, {"targets": (0.0, 1.0), "inputs": (torch.zeros(2), torch.ones(2))}),
    "BayesianLinearRegression": (
        linear_regression,
        {"inputs": X, "targets": Y, "prior_std": 1.0, "noise": 0.1, "at": X, "samples": 2},
    ),
    "BayesianLinearRegression.conflate": (
        fb.BayesianLinearRegression.conflate,
        {"models": [fb.BayesianLinearRegression.fit(X, Y)]},
    ),
    "HierarchicalLinearRegression": (
        hierarchical,
        {"random": (0,), "bias": True, "inputs": X, "targets": Y, "at": X, "client": "a"},
    ),
    "HierarchicalLinearRegression.fit": (
        fb.HierarchicalLinearRegression().fit,
        {"clients": {name: fb.modules.LinearStatistics.of(X[k::2], Y[k::2]) for k, name in enumerate("ab")}},
    ),
    "BayesianHead": (
        head,
        {
            "outputs": 2,
            "likelihood": "softmax",
            "prior_std": 1.0,
            "inference": "laplace",
            "exchanges": 3,
            "inputs": X,
            "targets": HALVES,
        },
    ),
    "BayesianHead.fit": (fb.BayesianHead(2).fit, {"sums": [fb.BayesianHead(2).sums(X, HALVES)]}),
    "BayesianHead.step": (fb.BayesianHead(2).step, {"fit": FIT, "slopes": [fb.BayesianHead(2).slopes(FIT, X, HALVES)]}),
    "BayesianHead.fit_clients": (fb.BayesianHead(2).fit_clients, {"clients": [(X, HALVES)]}),
    "BayesianHead.personal": (DONE_HEAD.personal, {"fit": DONE_FIT, "features": X, "targets": HALVES, "weight": 0.5}),
    "HeadFit.moments": (FIT.moments, {"features": X}),
    "HeadSlopes": (
        HeadSlopes,
        {
            "loss": torch.ones(()).double(),
            "slope": torch.ones(2, 3).double(),
            "spread": torch.eye(2).double(),
            "curvature": torch.ones(1, 3, 3).double(),
            "num_examples": 2,
        },
    ),
    "HeadModule": (fb.HeadModule, {"backbone": nn.Identity(), "head": fb.BayesianHead(2), "features": 2, "samples": 3}),
    "LinearStatistics": (
        LinearStatistics,
        {
            "gram": torch.eye(2).double(),
            "moment": torch.ones(2).double(),
            "square": torch.tensor(3.0).double(),
            "num_examples": 2,
        },
    ),
    "LinearStatistics.of": (fb.modules.LinearStatistics.of, {"inputs": X, "targets": Y, "bias": True}),
    "mlp": (modules.mlp, {"features": 2, "outputs": 2, "hidden": (3,)}),
    "lenet": (modules.lenet, {"channels": 1, "classes": 2, "size": 16}),
    "resnet20": (modules.resnet20, {"channels": 1, "classes": 2}),
    "draws_from_posterior": (modules.draws_from_posterior, {"posterior": posterior(), "samples": 2, "generator": None}),
    "draws_from_clients": (modules.draws_from_clients, {"clients": THREE}),
    "is_stochastic": (modules.is_stochastic, {"network": bayesian()}),
    "sample_outputs": (
        lambda **arguments: modules.sample_outputs(inputs=X, **arguments),
        {"network": bayesian(), "samples": 2},
    ),
    "AccuracyRetained": (partial(measure, metrics.AccuracyRetained), {"resolution": 10}),
    "AdaptiveCalibrationError": (partial(measure, metrics.AdaptiveCalibrationError), {"bins": 3, "resolution": 10}),
    "CalibrationDiagram": (partial(measure, metrics.CalibrationDiagram), {"bins": 3}),
    "ClientAccuracy": (partial(measure, metrics.ClientAccuracy), {"clients": 3}),
    "IntervalCoverage": (partial(measure, metrics.IntervalCoverage), {"level": 0.9}),
    "PredictiveEntropy": (partial(measure, metrics.PredictiveEntropy), {"normalize": True}),
    "ClientAccuracy.update": (
        lambda **batch: updated(metrics.ClientAccuracy(2), **batch),
        {"probs": PROBS, "target": TARGET, "client": TARGET},
    ),
    "AccuracyRetained.update": (
        lambda **batch: updated(metrics.AccuracyRetained(10), **batch),
        {"correct": TARGET == 0, "uncertainty": torch.tensor([0.1, 0.2])},
    ),
    "OutOfDistributionFPR": (partial(measure, metrics.OutOfDistributionFPR), {"recall": 0.9}),
    "OutOfDistributionFPR.update": (
        lambda **batch: updated(metrics.OutOfDistributionFPR(), **batch),
        {"uncertainty": torch.tensor([0.1, 0.2]), "out": TARGET == 1},
    ),
    "ConcordanceIndex": (
        lambda **batch: updated(metrics.ConcordanceIndex(), **batch),
        {"risk": torch.tensor([0.1, 0.2]), "time": torch.ones(2), "event": TARGET},
    ),
    "concordance_index": (
        functional.concordance_index,
        {"risk": torch.tensor([0.1, 0.2]), "time": torch.ones(2), "event": TARGET},
    ),
    "ood_auroc": (functional.ood_auroc, {"uncertainty_in": torch.rand(3), "uncertainty_out": torch.rand(2)}),
    "ood_fpr": (functional.ood_fpr, {"uncertainty_in": torch.rand(3), "uncertainty_out": torch.rand(2), "recall": 0.9}),
    **{
        name: (getattr(functional, name), {"probs": PROBS, "target": TARGET})
        for name in ("brier_score", "negative_log_likelihood")
    },
    **{
        name: (getattr(functional, name), {"probs": PROBS, "target": TARGET, "bins": 3})
        for name in ("calibration_diagram", "adaptive_calibration_error")
    },
    **{
        name: (getattr(functional, name), {"probs": SAMPLES})
        for name in (
            "aleatoric_covariance",
            "kwon_aleatoric",
            "epistemic_covariance",
            "kwon_epistemic",
            "mutual_information",
        )
    },
    "predictive_entropy": (functional.predictive_entropy, {"probs": SAMPLES, "normalize": True}),
    **{
        name: (getattr(functional, name), {"mean": torch.zeros(2), "variance": torch.ones(2), "target": torch.ones(2)})
        for name in ("gaussian_crps", "gaussian_nll")
    },
    "interval_coverage": (
        functional.interval_coverage,
        {"mean": torch.zeros(2), "variance": torch.ones(2), "target": torch.ones(2), "level": 0.9},
    ),
    "ensemble_crps": (functional.ensemble_crps, {"samples": SAMPLES[:, :, 0], "target": torch.zeros(2)}),
    "determinant_sharpness": (functional.determinant_sharpness, {"covariance": torch.eye(2)}),
    **{
        name: (getattr(functional, name), {"correct": TARGET == 0, "uncertainty": torch.tensor([0.1, 0.2])})
        for name in ("accuracy_retained_area", "accuracy_retained_curve")
    },
    "weighted_accuracy": (functional.weighted_accuracy, {"accuracies": [0.5, 1.0], "weights": [1, 2]}),
    "worst_fraction_accuracy": (functional.worst_fraction_accuracy, {"accuracies": [0.5, 1.0], "fraction": 0.5}),
}
"""Name → function and arguments that work; each argument is replaced by a bad one in turn."""


VALUES = SimpleNamespace(
    numbers=[
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        7,
        0.0,
        0.5,
        1.0,
        2.5,
        -1.5,
        float("nan"),
        float("inf"),
        -float("inf"),
        5e-324,
        1e-30,
        1e308,
        2**70,
        -(2**70),
        10**400,
        1j,
        np.float64(0.5),
        np.float32(0.5),
        np.int64(2),
    ],
    words=["", "x", "mean", "all", "é\ud800", "a" * 300, b"x", "../..", "\0"],
    lists=[
        [],
        [1],
        [0.5, 0.5],
        ["x"],
        [None],
        [[1, [2]]],
        [float("nan"), 1.0],
        [True, False],
        (),
        (1, 2),
        (0,),
        [10**400],
        {},
        {"a": 1},
        {1: 2},
        {"w": None},
        set(),
        {1, 2},
        range(3),
    ],
    objects=[object(), int, len, SimpleNamespace(shape=3), Exception("x")],
    arrays=[
        np.array(2),
        np.array([1.0, 2.0]),
        np.array(["a"]),
        np.array([None]),
        np.zeros((0, 3)),
        np.zeros((2, 2, 2)),
        np.array([1, 2], dtype=np.uint8),
    ],
    tensors=[
        torch.tensor(2),
        torch.tensor(0.5),
        torch.tensor([1.0, 2.0]),
        torch.tensor([[float("nan")]]),
        torch.empty(0),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, requires_grad=True),
        torch.tensor([1, 2]),
        torch.tensor([True, False]),
        torch.zeros(2, 3),
        torch.zeros(2, 2, 2),
        torch.ones(2, dtype=torch.bfloat16),
    ],
    values=[
        posterior(),
        update(),
        network(),
        bayesian(),
        nn.ReLU(),
        table(4),
        fb.IIDPartition(2),
        fusion.LinearPool(),
        AutoFusion(),
        fb.RoundPlan(0, (0,)),
        layers.NormalPrior(),
    ],
)
"""Values by kind."""
FUNCTIONS = {
    "closure",
    "rule",
    "then",
    "weighting",
    "score",
    "optimizer",
    "source",
    "labels",
    "fusion",
    "prior",
    "unpack",
    "collate_fn",
}
"""Arguments that take a function of the user, which may raise what it likes."""
POOL = [value for kind in vars(VALUES).values() for value in kind]
