"""Public doors: every callable that a user can give a wrong argument to, with a call that works."""

import inspect
import warnings
from functools import partial
from types import SimpleNamespace

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from lightning import Trainer
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import fusion, layers, methods, metrics, modules
from lightning_fedbayes.callbacks import calibration
from lightning_fedbayes.clients import privacy
from lightning_fedbayes.clients.across import CrossScores
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core.messages import ClientFailure
from lightning_fedbayes.data import ClientDatasets, DiabetesDataModule, clients_of, labels_of
from lightning_fedbayes.fusion import AutoFusion, available_fusions
from lightning_fedbayes.metrics import functional
from lightning_fedbayes.modules import HeadSlopes, LinearStatistics
from lightning_fedbayes.server import KnownOverlap, aggregation
from lightning_fedbayes.transport.schedules import Steps
from tests.fuzz import many, only_own_errors

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


def admitted(sent):
    """Admit an update: whatever is wrong with it must be an error of the package or an outcome with one."""
    server = begun()
    outcome = server.admit(sent)
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
        metrics.AccuracyRetained: (TARGET == 0, torch.rand(2)),
        metrics.IntervalCoverage: (torch.zeros(2), torch.ones(2), torch.zeros(2)),
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
    decorate(type("Own", (methods.FedNova,), {}))
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
LINEAR = nn.Linear(2, 3)
CLASSES = TensorDataset(torch.randn(9, 2), torch.arange(9) % 3)
SCORED = {"predictive": LINEAR, "datasets": {"a": CLASSES}, "batch_size": 2}
SKETCH = calibration.ScoreSketch.of(torch.linspace(0, 1, 20))
REGRESSION = fb.Laplace(fb.Gaussian(1.0)).posterior(LINEAR, [(X, torch.zeros(8, 3))])
HALVES, THIRDS = torch.arange(8) % 2, torch.arange(8) % 3
FIT = fb.BayesianHead(2).fit(fb.BayesianHead(2).sums(X, HALVES))
DONE_HEAD = fb.BayesianHead(2, inference="laplace")
DONE_FIT = DONE_HEAD.fit_clients([(X, HALVES)])
SITE = fb.KroneckerLaplace().site(LINEAR, [(X, THIRDS)])


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
    method, client = methods.FedProx(0.1), methods.Participant(number, num_examples, kept, problem, steps, rate)
    shared = methods.Shared(**shared)
    method.problem(shared, client)
    method.report(shared, client, methods.Trained(shared.posterior)).update(number, num_examples)


def sited(gradients, precisions, **arguments):
    """Take a round of sites in a loop of one's own."""
    method, client = fb.Sites(**arguments), methods.Participant(0, 5)
    server, shared = begun(fusion=method), methods.Shared(posterior(), method.init(posterior()))
    method.problem(shared, client)
    report = method.report(shared, client, methods.Trained(posterior(1.0), gradients, precisions))
    server.admit(report.update(0, 5, {"running": torch.ones(2)}))
    server.finish()


class Plain(fb.BayesianModule):
    """A module of one's own."""

    def negative_log_likelihood(self, outputs, targets):
        return outputs.sum()


def rules():
    """Every rule with arguments, fused, so that an argument that fails late is found too."""
    registered = {type(fusion.get_rule(name)) for name in available_fusions()}
    kinds = [each for each in vars(fusion).values() if isinstance(each, type) and each in registered]
    doors = {kind.__name__: door(partial(fused, kind)) for kind in kinds if inspect.signature(kind).parameters}
    return doors | {"Reliability": door(partial(fused, fusion.Reliability), by="ivar_vb", then="linear_pool")}


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


def door(function, **given):
    """A callable and arguments that work: its defaults, but for those that are given."""
    told = function.args[0] if isinstance(function, partial) and callable(next(iter(function.args), None)) else function
    defaults = {name: each.default for name, each in inspect.signature(told).parameters.items()}
    known = {name: value for name, value in defaults.items() if repr(value) not in (repr(inspect._empty), "<factory>")}
    return function, {**known, **given}


def fuzzed(kind, **given):
    """Return a test of any argument of a strategy or controller."""
    _, good = door(kind, **given)

    @hypothesis.given(name=st.sampled_from(sorted(good)), value=st.sampled_from(POOL))
    @many("strategies")
    def any_argument(name, value):
        if not (name in FUNCTIONS and callable(value)):
            with only_own_errors("strategies"):
                kind(**{**good, name: value})

    return lambda: any_argument()


DOORS = {
    "FederatedBayes": door(fb.FederatedBayes),
    "Safeguards": door(fb.Safeguards),
    "Asynchronous": door(
        fb.Asynchronous, concurrency=4, buffer=2, delays=fb.Delays(), late=methods.FedBuff(), max_staleness=5
    ),
    "KnownOverlap": door(KnownOverlap, shared=[[9, 4], [4, 6]]),
    "Delays": door(fb.Delays, slow={0: 2.0}, network=0.1, away=((0, 1.0, 2.0),), trace={1: [1.0, 2.0]}),
    "check": door(
        lambda trainer: fb.check(trainer, Plain(network())),
        trainer=Trainer(logger=False, callbacks=[fb.FederatedBayes()]),
    ),
    "FedBuff": door(methods.FedBuff),
    "FedAsync": door(methods.FedAsync),
    "Kept": door(fb.Kept, what=("optimizer",), folder="clients"),
    "UpdatePrivacy": door(fb.UpdatePrivacy, widen_posterior=True),
    "ExamplePrivacy": door(fb.ExamplePrivacy),
    "ExamplePrivacy.load_state_dict": door(
        lambda **state: fb.ExamplePrivacy().load_state_dict(state), steps={0: [(1.0, 0.5, 3)]}, secret="x"
    ),
    "FederatedConformal.load_state_dict": door(
        lambda **state: fb.FederatedConformal().load_state_dict(state), **fb.FederatedConformal().state_dict()
    ),
    "Steps.load_state_dict": door(
        lambda **state: Steps(None).load_state_dict(state), moved=[3, 3], claims={0: [9, 3, 3]}, announced={}
    ),
    "AutoFusion": door(AutoFusion, candidates=["linear_pool", "conflation"]),
    "Averaging": door(methods.Averaging, rule="linear_pool", prior="global"),
    **{
        kind.__name__: door(kind, rule="linear_pool")
        for kind in (fb.Method, methods.Ditto, methods.FedNova, methods.FedProx, methods.Scaffold)
    },
    "Sites": door(
        sited,
        prior_mean=0.0,
        prior_std={"w": 1.0},
        gradients={"w": torch.ones(1, 2), "b": torch.ones(1)},
        precisions={"w": torch.ones(1, 2)},
    ),
    "register_method": door(named, name="a_method_of_a_test"),
    "register_fusion": door(registered, name="a_rule_of_a_test", aliases=("its_other_name",)),
    "available_fusions": door(available_fusions, aliases=True),
    "get_rule": door(fusion.get_rule, rule="linear_pool"),
    "remove_client": door(removed, federation=None, client=0),
    "rule_name": door(fusion.rule_name, rule="rklb"),
    "unregister_fusion": door(unregistered, name="a_rule_of_a_test"),
    "epsilon_of": door(privacy.epsilon_of, noise_multiplier=1.0, delta=1e-5, rounds=2),
    "noise_multiplier_for": door(fb.noise_multiplier_for, epsilon=8.0, delta=1e-5, rounds=2),
    "UpdatePrivacy.figures": door(fb.UpdatePrivacy().figures, rounds=2),
    "UpdatePrivacy.send": door(
        fb.UpdatePrivacy().send, update=fb.ClientUpdate(0, 5, posterior()), previous=posterior(), secret="s", round=0
    ),
    "ClassPartition": door(partial(split, fb.ClassPartition), clients=3),
    "DirichletPartition": door(partial(split, fb.DirichletPartition), clients=3, alpha=0.5, min_examples=1),
    "DirichletPartition per client": door(partial(split, fb.DirichletPartition), clients=3, alpha=0.5, per="client"),
    "IIDPartition": door(partial(split, fb.IIDPartition), clients=3),
    "SizesPartition": door(partial(split, fb.SizesPartition), sizes=(3, 4)),
    "ClassPartition.split": door(fb.ClassPartition(3, 2).split, labels=LABELS, seed=0, num_examples=60),
    "IIDPartition.split": door(fb.IIDPartition(3).split, labels=None, seed=0, num_examples=60),
    "ClientDatasets": door(ClientDatasets, datasets={"north": table(3), "south": table(5)}),
    "clients_of": door(clients_of, dataset=table(), partition=fb.IIDPartition(3), seed=0),
    "labels_of": door(labels_of, dataset=table()),
    "DigitsDataModule": door(fb.DigitsDataModule, batch_size=8),
    "DiabetesDataModule": door(DiabetesDataModule, batch_size=8),
    "GaussianPosterior": door(fb.GaussianPosterior, mean=posterior().mean, variance=posterior().variance),
    "GaussianPosterior.point_mass": door(fb.GaussianPosterior.point_mass, mean=posterior().mean),
    "GaussianPosterior.from_state_dict": door(fb.GaussianPosterior.from_state_dict, state=posterior().state_dict()),
    "GaussianPosterior.kl": door(posterior().kl, other=posterior(1.0)),
    "GaussianPosterior.ordered": door(posterior().ordered, names=("b", "w")),
    "GaussianPosterior.unflatten": door(posterior().unflatten, mean=torch.zeros(3), variance=torch.ones(3)),
    "GaussianPosterior.sample": door(posterior().sample, draws=2),
    "fuse": door(fb.fuse, rule="linear_pool", posteriors=THREE, weights=[1.0, 2.0, 1.0]),
    "fuse dwc": door(fb.fuse, rule="dwc", posteriors=THREE, previous=posterior(variance=1e3)),
    "FusionAccumulator.add": door(accumulate, posterior=posterior(), weight=1.0),
    **rules(),
    "Server": door(
        begun,
        posterior=posterior(),
        buffers={"running": torch.zeros(2)},
        fusion="linear_pool",
        weighting="equal",
        safeguards=fb.Safeguards(),
    ),
    "Server.begin": door(begun().begin, plan=fb.RoundPlan(0, (0, 1))),
    "Server.admit": door(lambda update, started: begun().admit(update, started), update=update(), started=0),
    "Server.load_state_dict": door(lambda state: begun().load_state_dict(state), state=begun().state_dict()),
    "Server.load_state_dict rule": door(
        given_state, optimizer={"momentum": torch.zeros(3), "square": torch.ones(3)}, then={}, rounds=1
    ),
    "Shared": door(partial(looped, **CLIENT), **SHARED),
    "Participant": door(partial(looped, **SHARED), **CLIENT),
    "Trained": door(methods.Trained, posterior=posterior(), gradients={}, precisions={}),
    "Quadratic": door(
        lambda strength, slope, names, values, start: methods.Quadratic(strength, slope, names)(values, start),
        strength=1.0,
        slope={"w": torch.ones(1, 2)},
        names=frozenset("wb"),
        values=posterior(1.0).mean,
        start=posterior().mean,
    ),
    "LocalProblem": door(methods.LocalProblem, quadratic=methods.Quadratic(), start=posterior().mean),
    "Report": door(
        lambda posterior, kept, sent, client, num_examples, buffers: begun().admit(
            methods.Report(posterior, kept, sent).update(client, num_examples, buffers)
        ),
        posterior=posterior(),
        kept={},
        sent={},
        client=0,
        num_examples=5,
        buffers={"running": torch.ones(2)},
    ),
    "UncertaintyReport": door(fb.UncertaintyReport, samples=2),
    "ClientUpdate": door(lambda **sent: admitted(fb.ClientUpdate(**sent)), **vars(update())),
    "ClientFailure": door(
        lambda **arguments: begun().admit(ClientFailure(**arguments)),
        client=0,
        error=RuntimeError("x"),
        num_examples=3,
        seconds=0.1,
    ),
    "RoundPlan": door(lambda **given: begun().begin(fb.RoundPlan(**given)), round=0, cohort=(0, 1), starts=(0, 2, 3)),
    "Aggregation": door(
        aggregate,
        rule=fusion.get_rule("linear_pool"),
        weighting="equal",
        previous=posterior(),
        buffers={"running": torch.zeros(2)},
        update=update(),
    ),
    "temperature_message": door(calibration.temperature_message, logits=SAMPLES, targets=TARGET, temperature=1.5),
    "TemperatureMessage": door(
        lambda **sums: calibration.TemperatureSearch().after([calibration.TemperatureMessage(**sums)]),
        gradient=1.0,
        curvature=1.0,
        num_examples=2,
    ),
    "TemperatureSearch.after": door(
        calibration.TemperatureSearch().after, messages=[calibration.TemperatureMessage(1.0, 1.0, 1)]
    ),
    "FederatedTemperature": door(
        lambda **options: fb.FederatedTemperature(**options)(PROBS), temperature=2.0, max_influence=2.0
    ),
    "FederatedTemperature.fit": door(
        partial(quietly, fb.FederatedTemperature().fit), clients={"a": (PROBS.log(), 1 - TARGET)}
    ),
    "FederatedTemperature.fit_from": door(
        partial(quietly, fb.FederatedTemperature().fit_from), **SCORED, trained_on=table(3)
    ),
    "FederatedTemperature.evaluate": door(fb.FederatedTemperature(2.0).evaluate, **SCORED),
    "FederatedTemperature.__call__": door(fb.FederatedTemperature(2.0), logits=PROBS),
    "class_scores": door(calibration.class_scores, probs=PROBS, targets=TARGET, kind="aps"),
    "all_class_scores": door(calibration.all_class_scores, probs=PROBS, kind="aps"),
    "interval_scores": door(calibration.interval_scores, mean=torch.zeros(2), std=torch.ones(2), targets=torch.ones(2)),
    "ScoreSketch": door(
        lambda **options: calibration.ScoreSketch(**options).threshold(0.9), counts=torch.tensor([5, 9]), grid="unit"
    ),
    "ScoreSketch.of": door(calibration.ScoreSketch.of, scores=torch.rand(3), bins=8),
    "ScoreSketch.threshold": door(calibration.ScoreSketch.of(torch.rand(20)).threshold, level=0.9),
    "ScoreSketch.noisy": door(calibration.ScoreSketch.of(torch.rand(20)).noisy, epsilon=1.0, key=0),
    "ScoreSketch.__add__": door(SKETCH.__add__, other=SKETCH),
    "evaluate_clients": door(fb.evaluate_clients, module=PREDICTIVE, clients=OWN, batch_size=4),
    "evaluate_across": door(
        fb.evaluate_across, modules={"north": PREDICTIVE, "south": PREDICTIVE}, clients=OWN, batch_size=4
    ),
    "CrossScores": door(CrossScores, names=("a", "b"), values={"nll": torch.ones(2, 2)}),
    "CrossScores.others": door(ACROSS.others, figure="nll"),
    "CrossScores.effects": door(ACROSS.effects, figure="nll"),
    "CrossScores.outlying": door(ACROSS.outlying, figure="nll"),
    "CrossScores.table": door(ACROSS.table, figure="nll"),
    "hold_out": door(fb.hold_out, clients=OWN, fraction=0.3),
    "choose_personal_weight": door(
        fb.choose_personal_weight,
        posterior_of=lambda weight: PREDICTIVE.posterior,
        module=PREDICTIVE.network,
        held_out=table(5),
        weights=(0.0, 1.0),
        batch_size=4,
    ),
    "ClientScores": door(ClientScores, names=("a", "b"), num_examples=(3, 4), values={"nll": torch.ones(2)}),
    "ClientScores.mean": door(SCORES.mean, figure="nll"),
    "ClientScores.worst": door(SCORES.worst, figure="nll", fraction=0.5),
    "ClientScores.spread": door(SCORES.spread, figure="nll"),
    "FederatedConformal": door(fb.FederatedConformal, per_client=True, bins=16, epsilon=1.0),
    "FederatedConformal.fit": door(
        partial(quietly, fb.FederatedConformal().fit), clients={"a": torch.rand(9), "b": SKETCH}
    ),
    "FederatedConformal.fit_from": door(
        partial(quietly, fb.FederatedConformal(0.5).fit_from), **SCORED, temperature=2.0, trained_on=table(3)
    ),
    "FederatedConformal.evaluate": door(fb.FederatedConformal().fit({"a": SKETCH}).evaluate, **SCORED),
    "FederatedConformal.sets": door(
        fb.FederatedConformal(kind="aps", per_client=True).fit({"a": SKETCH}).sets, probs=PROBS, client="a"
    ),
    "FederatedConformal.intervals": door(
        fb.FederatedConformal(kind="interval", per_client=True).fit({"a": torch.rand(20)}).intervals,
        mean=torch.zeros(2),
        std=torch.ones(2),
        client="a",
    ),
    "predictions_of": door(calibration.predictions_of, **SCORED),
    "with_kl": door(fb.with_kl, module=fb.HybridBayesianClassifier(network()).eval()),
    "mean_network": door(fb.mean_network, module=bayesian(), posterior=fb.read_posterior(bayesian())),
    "bayesianize": door(fb.bayesianize, network=network(), last=1, estimator="flipout"),
    "bayesianize names": door(fb.bayesianize, network=network(), names=["0"], init="pretrained"),
    "bayesianize types": door(fb.bayesianize, network=network(), types=[nn.Linear], prior_std=1.0),
    "with_mc_dropout": door(fb.with_mc_dropout, network=network()),
    "kl_divergence": door(fb.kl_divergence, module=bayesian()),
    "read_posterior": door(fb.read_posterior, module=bayesian()),
    "load_posterior": door(fb.load_posterior, module=bayesian(), posterior=fb.read_posterior(bayesian())),
    "set_prior": door(layers.set_prior, module=bayesian(), posterior=fb.read_posterior(bayesian())),
    "gaussian_parameters": door(layers.gaussian_parameters, module=bayesian()),
    "mean_only": door(partial(entered, layers.mean_only), module=bayesian()),
    "evaluation_mode": door(partial(entered, layers.evaluation_mode), module=bayesian()),
    "PosteriorView": door(layers.PosteriorView, module=bayesian()),
    "MCDropout": door(layers.MCDropout),
    "NormalPrior": door(layers.NormalPrior),
    "ScaleMixturePrior": door(mixture, weight=0.5, std1=1.0, std2=0.1),
    "Reparameterized": door(partial(layer, layers.Reparameterized), module=nn.LSTM(2, 2)),
    **{
        f"Linear{kind}": door(partial(layer, getattr(layers, f"Linear{kind}")), in_features=2, out_features=2)
        for kind in ("Reparameterization", "LocalReparameterization", "Flipout")
    },
    **{
        f"Conv{shape}Flipout": door(
            partial(layer, getattr(layers, f"Conv{shape}Flipout")), in_channels=2, out_channels=2, kernel_size=2
        )
        for shape in ("1d", "2d", "3d", "Transpose1d", "Transpose2d", "Transpose3d")
    },
    "IVON": door(partial(fb.IVON, [torch.zeros(2, requires_grad=True)]), num_examples=10),
    "IVON params": door(fb.IVON, params=[torch.zeros(2, requires_grad=True)]),
    "IVON.step": door(ivon_step, closure=None),
    "IVON.posterior": door(lambda module: fb.IVON(LINEAR.parameters()).posterior(module), module=LINEAR),
    "Laplace.posterior": door(fb.Laplace().posterior, module=LINEAR, batches=[(X, THIRDS)]),
    "Laplace.site": door(
        lambda inputs, targets: fb.Laplace().site(LINEAR, [(inputs, targets)]), inputs=X, targets=THIRDS
    ),
    "Laplace.fuse": door(fb.Laplace().fuse, module=LINEAR, sites=[fb.Laplace().site(LINEAR, [(X, THIRDS)])]),
    "KroneckerLaplace.site": door(fb.KroneckerLaplace().site, module=LINEAR, batches=[(X, THIRDS)]),
    "KroneckerLaplace.site batch": door(
        lambda inputs, targets: fb.KroneckerLaplace().site(LINEAR, [(inputs, targets)]), inputs=X, targets=THIRDS
    ),
    "KroneckerLaplace.fuse": door(fb.KroneckerLaplace().fuse, sites=[SITE]),
    **{
        f"PosteriorPredictive.{name} {task} {predictive}": door(
            partial(step, name, likelihood=task, predictive=predictive),
            batch=[X, THIRDS if task == "categorical" else torch.zeros(8, 3)],
        )
        for name in ("predict_step", "validation_step", "test_step")
        for task in ("categorical", "bernoulli")
        for predictive in ("draws", "linearised")
    },
    "PosteriorPredictive.sample": door(PREDICTIVE.sample, inputs=X, samples=2),
    **{
        f"CoxRegressor.{name}": door(partial(cox, name), targets=torch.stack([torch.ones(8), torch.arange(8.0)], 1))
        for name in ("training_step", "validation_step", "test_step")
    },
    "Categorical": door(fb.Categorical, ignore_index=-100),
    "Gaussian": door(fb.Gaussian, noise=0.5),
    "Categorical.rows": door(fb.Categorical().rows, draws=X.new_zeros(2, 8, 3), targets=THIRDS),
    "Bernoulli.rows": door(fb.Bernoulli().rows, draws=X.new_zeros(2, 8, 3), targets=torch.zeros(8, 3)),
    "Gaussian.rows": door(fb.Gaussian(1.0).rows, draws=X.new_zeros(2, 8, 3), targets=torch.zeros(8, 3)),
    "Cox.rows": door(fb.Cox().rows, draws=X.new_zeros(2, 8, 1), targets=torch.ones(8, 2)),
    "Laplace": door(fb.Laplace, likelihood="categorical"),
    "KroneckerLaplace": door(fb.KroneckerLaplace, curvature=fb.Laplace(), damping=0.1),
    "SWAG": door(fb.SWAG),
    "PosteriorPredictive": door(
        fb.PosteriorPredictive,
        module=network(),
        posterior=fb.read_posterior(network()),
        samples=2,
        likelihood="categorical",
        predictive="draws",
    ),
    "BayesianModule": door(Plain, network=network()),
    "HybridBayesianClassifier": door(fb.HybridBayesianClassifier, network=network()),
    "HybridBayesianRegressor": door(fb.HybridBayesianRegressor, network=network()),
    "CoxRegressor": door(fb.CoxRegressor, network=network()),
    "BayesianModule.unpack": door(Plain(network()).unpack, batch=[X, Y]),
    "cox_loss": door(functional.cox_loss, log_risk=torch.zeros(2), time=torch.ones(2), event=TARGET),
    "DeepEnsembleRegressor": door(fb.modules.DeepEnsembleRegressor, networks=[nn.Linear(2, 2), nn.Linear(2, 2)]),
    "FederatedScaler": door(fb.FederatedScaler, targets=(0.0, 1.0), inputs=(torch.zeros(2), torch.ones(2))),
    "BayesianLinearRegression": door(linear_regression, inputs=X, targets=Y, prior_std=1.0, noise=0.1, at=X, samples=2),
    "BayesianLinearRegression.conflate": door(
        fb.BayesianLinearRegression.conflate, models=[fb.BayesianLinearRegression.fit(X, Y)]
    ),
    "HierarchicalLinearRegression": door(hierarchical, random=(0,), bias=True, inputs=X, targets=Y, at=X, client="a"),
    "HierarchicalLinearRegression.fit": door(
        fb.HierarchicalLinearRegression().fit,
        clients={name: fb.modules.LinearStatistics.of(X[k::2], Y[k::2]) for k, name in enumerate("ab")},
    ),
    "BayesianHead": door(
        head, outputs=2, likelihood="softmax", prior_std=1.0, inference="laplace", exchanges=3, inputs=X, targets=HALVES
    ),
    "BayesianHead.fit": door(fb.BayesianHead(2).fit, sums=[fb.BayesianHead(2).sums(X, HALVES)]),
    "BayesianHead.step": door(fb.BayesianHead(2).step, fit=FIT, slopes=[fb.BayesianHead(2).slopes(FIT, X, HALVES)]),
    "BayesianHead.fit_clients": door(fb.BayesianHead(2).fit_clients, clients=[(X, HALVES)]),
    "BayesianHead.personal": door(DONE_HEAD.personal, fit=DONE_FIT, features=X, targets=HALVES, weight=0.5),
    "HeadFit.moments": door(FIT.moments, features=X),
    "HeadSlopes": door(HeadSlopes, **vars(fb.BayesianHead(2).slopes(FIT, X, HALVES))),
    "HeadModule": door(fb.HeadModule, backbone=nn.Identity(), head=fb.BayesianHead(2), features=2, samples=3),
    "LinearStatistics": door(LinearStatistics, **vars(LinearStatistics.of(X, Y))),
    "LinearStatistics.of": door(fb.modules.LinearStatistics.of, inputs=X, targets=Y),
    "mlp": door(modules.mlp, features=2, outputs=2, hidden=(3,)),
    "draws_from_clients": door(modules.draws_from_clients, clients=THREE),
    "is_stochastic": door(modules.is_stochastic, network=bayesian()),
    "sample_outputs": door(lambda **given: modules.sample_outputs(inputs=X, **given), network=bayesian(), samples=2),
    "AccuracyRetained": door(partial(measure, metrics.AccuracyRetained), resolution=10),
    "AdaptiveCalibrationError": door(partial(measure, metrics.AdaptiveCalibrationError), bins=3, resolution=10),
    "CalibrationDiagram": door(partial(measure, metrics.CalibrationDiagram), bins=3),
    "IntervalCoverage": door(partial(measure, metrics.IntervalCoverage), level=0.9),
    "AccuracyRetained.update": door(
        lambda **batch: updated(metrics.AccuracyRetained(10), **batch),
        correct=TARGET == 0,
        uncertainty=torch.tensor([0.1, 0.2]),
    ),
    "ConcordanceIndex": door(
        lambda **batch: updated(metrics.ConcordanceIndex(), **batch),
        risk=torch.tensor([0.1, 0.2]),
        time=torch.ones(2),
        event=TARGET,
    ),
    "concordance_index": door(
        functional.concordance_index, risk=torch.tensor([0.1, 0.2]), time=torch.ones(2), event=TARGET
    ),
    **{
        name: door(getattr(functional, name), probs=PROBS, target=TARGET)
        for name in ("brier_score", "negative_log_likelihood")
    },
    **{
        name: door(getattr(functional, name), probs=PROBS, target=TARGET, bins=3)
        for name in ("calibration_diagram", "adaptive_calibration_error")
    },
    **{
        name: door(getattr(functional, name), probs=SAMPLES)
        for name in ("kwon_aleatoric", "kwon_epistemic", "mutual_information", "predictive_entropy")
    },
    **{
        name: door(getattr(functional, name), mean=torch.zeros(2), variance=torch.ones(2), target=torch.ones(2))
        for name in ("gaussian_crps", "gaussian_nll")
    },
    "interval_coverage": door(
        functional.interval_coverage, mean=torch.zeros(2), variance=torch.ones(2), target=torch.ones(2), level=0.9
    ),
    "determinant_sharpness": door(functional.determinant_sharpness, covariance=torch.eye(2)),
    "accuracy_retained": door(functional.accuracy_retained, correct=TARGET == 0, uncertainty=torch.tensor([0.1, 0.2])),
    "weighted_accuracy": door(functional.weighted_accuracy, accuracies=[0.5, 1.0], weights=[1, 2]),
    "worst_fraction_accuracy": door(functional.worst_fraction_accuracy, accuracies=[0.5, 1.0], fraction=0.5),
}
"""Name → function and arguments that work; each argument is replaced by a bad one in turn."""


NUMBERS = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**70, -(2**70), 10**400, 1j, 5e-324, 1e-30, 1e308, float("nan")),
    *(0.0, 0.5, 1.0, 2.5, -1.5, float("inf"), -float("inf"), np.int64(2), np.float32(0.5), np.float64(0.5)),
)
WORDS = ("", "x", "mean", "all", "é\ud800", "a" * 300, b"x", "../..", "\0")
LISTS = (
    *([], [1], [0.5, 0.5], ["x"], [None], [[1, [2]]], [float("nan"), 1.0], [True, False], [10**400]),
    *((), (1, 2), (0,), {}, {"a": 1}, {1: 2}, {"w": None}, set(), {1, 2}, range(3)),
)
OBJECTS = (object(), int, len, SimpleNamespace(shape=3), Exception("x"))
ARRAYS = (
    *map(np.array, (2, [1.0, 2.0], ["a"], [None])),
    *(np.zeros((0, 3)), np.zeros((2, 2, 2)), np.array([1, 2], dtype=np.uint8)),
)
TENSORS = (
    *map(torch.tensor, (2, 0.5, [1.0, 2.0], [[float("nan")]], [1, 2], [True, False])),
    *map(torch.zeros, (0, (2, 3), (2, 2, 2))),
    *(torch.ones(2, dtype=torch.complex64), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16)),
    *(torch.zeros(2, device="meta"), torch.eye(2).to_sparse()),
)
OURS = (
    *(posterior(), update(), network(), bayesian(), nn.ReLU(), table(4), fb.IIDPartition(2), fusion.LinearPool()),
    *(AutoFusion(), fb.RoundPlan(0, (0,)), layers.NormalPrior()),
)
POOL = [*NUMBERS, *WORDS, *LISTS, *OBJECTS, *ARRAYS, *TENSORS, *OURS]
"""Bad values."""
FUNCTIONS = {
    *("closure", "rule", "then", "weighting", "score", "optimizer", "source", "labels", "fusion", "prior", "unpack"),
    "collate_fn",
}
"""Arguments that take a function of the user, which may raise what it likes."""
