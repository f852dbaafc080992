"""The methods: how a federation is trained, and how every client's predictions are scored."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from benchmarks.federations.data import Federation, joined
from lightning_fedbayes.callbacks.calibration import class_scores, interval_scores
from lightning_fedbayes.fusion.server_optimizers import FedAdam
from lightning_fedbayes.metrics.functional import calibration_diagram, concordance_index, cox_loss
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.modules.hierarchical import HierarchicalFit
from lightning_fedbayes.modules.sampling import outputs_with

SAMPLES = 20
"""Draws of the parameters for a prediction."""
LEVEL = 0.9
"""Of intervals and prediction sets."""
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Parts of its own posterior that a client chooses its personal one from."""
WORST = 0.1
"""Share of the clients that the worst scores are a mean over, at least one client."""
ADAM = ({"rate": 0.01}, {"rate": 0.03})
LAYERS = ({"rate": 0.03, "layers": 1, "kl_weight": 1.0}, {"rate": 0.01, "layers": 2, "kl_weight": 0.1})
IVON = ({"rate": 0.1, "temperature": 1.0}, {"rate": 0.1, "temperature": 0.1})

LONGER = tuple(tuple({**setting, "epochs": 4} for setting in grid) for grid in (LAYERS, IVON))
"""Local training of four times as many epochs, in half as many rounds at most: the clients' own posteriors come near
those of clients that train alone."""
MOST_TURNS = 10
"""Clients up to which they are trained in turns; more take too many minutes, since each turn is a round."""
MOST_SLOPES = 5
"""Features up to which the linear mixed model may have a slope of each client for every one of them."""
SHRINKAGE = 20
"""Examples that the mean NLL over clients counts as, where a client's λ is chosen by its own NLL and by that one."""
KINDS = ("own choice", "shrunk choice", "one weight")
"""Choices of λ: by each client's own tuning part; by that and the mean over clients; by the mean alone."""


class Method(NamedTuple):
    """A way to train.

    Attributes:
        grid: settings to choose from on the tuning parts, each a dict of what differs.
        options: of :class:`~lightning_fedbayes.FederatedBayes`.
        kind: "plain", a network without a posterior; "layers", with Bayesian ones; "ivon", with that optimizer.
        alone: every client trains by itself.
        pooled: one client has all data.
        personal: clients keep posteriors of their own; settings are chosen for, and scores are of, personal ones.
        own: every client predicts by the posterior that it has trained last.
        linear: the linear mixed model, of regression alone.
    """

    grid: Sequence[Mapping[str, float]]
    options: Mapping[str, Any] = {}
    kind: str = "plain"
    alone: bool = False
    pooled: bool = False
    personal: bool = False
    own: bool = False
    linear: bool = False

    @property
    def weight(self) -> float:
        """Part of its own posterior by which a client predicts, if it does not choose one."""
        return float(self.alone or self.own)

    def suits(self, federation: Federation) -> bool:
        """Return whether the method can learn the federation's task, and in turns in minutes."""
        takes_turns = self.options.get("fraction") == "turns"
        if takes_turns and len(federation.clients) > MOST_TURNS:
            return False
        return federation.task == "regression" or not self.linear


POPULATION = {"fusion": "population"}
METHODS: dict[str, Method] = {
    "local only": Method(ADAM, alone=True),
    "local only, IVON": Method(IVON, kind="ivon", alone=True),
    "pooled": Method(ADAM, pooled=True),
    "FedAvg": Method(ADAM, {"fusion": "weighted_average"}),
    "FedProx": Method(ADAM, {"fusion": fb.methods.FedProx(0.1)}),
    "FedAdam": Method(tuple({"rate": 0.01, "server_rate": rate} for rate in (0.03, 0.1))),
    "cyclic": Method(ADAM, {"fusion": "weighted_average", "fraction": "turns"}),
    "barycenter": Method(LAYERS, {"fusion": "reverse_kl_barycenter"}, kind="layers"),
    "sites": Method(LAYERS, {"fusion": "sites"}, kind="layers"),
    "IVON + barycenter": Method(IVON, {"fusion": "reverse_kl_barycenter"}, kind="ivon"),
    "IVON + sites": Method(IVON, {"fusion": "sites"}, kind="ivon"),
    "layers, personal": Method(LONGER[0] + LAYERS, {"fusion": "reverse_kl_barycenter"}, kind="layers", personal=True),
    "IVON, personal": Method(LONGER[1] + IVON, {"fusion": "reverse_kl_barycenter"}, kind="ivon", personal=True),
    "layers, population": Method(LONGER[0], POPULATION, kind="layers", own=True),
    "IVON, population": Method(LONGER[1], POPULATION, kind="ivon", own=True),
    "hierarchical linear": Method(({"slopes": 0}, {"slopes": 1}), own=True, linear=True),
}
FEDERATED = tuple(name for name, method in METHODS.items() if not (method.weight or method.pooled or method.personal))
"""Those that end at one global model without data in one place."""


def layers_of(federation: Federation) -> int:
    """Return the number of layers of a federation's network."""
    return len(federation.hidden) + 1


def settings_of(method: Method, federation: Federation) -> list[dict[str, float]]:
    """Return the settings that a method chooses from; linear models have one layer only."""
    found = []
    for setting in method.grid:
        own = dict(setting)
        if "layers" in own:
            own["layers"] = min(own["layers"], layers_of(federation))
        if "slopes" in own and features_of(federation) > MOST_SLOPES:
            own["slopes"] = 0
        if own not in found:
            found.append(own)
    return found


def features_of(federation: Federation) -> int:
    """Return the number of features."""
    return next(iter(federation.clients.values())).train.inputs.shape[1]


def network_of(federation: Federation) -> nn.Module:
    """Return a network: a linear model, or one with hidden layers."""
    if federation.hidden:
        return mlp(features_of(federation), federation.outputs, list(federation.hidden))
    return nn.Sequential(nn.Linear(features_of(federation), federation.outputs, bias=federation.task != "survival"))


class Anchored(nn.Module):
    """A network beside one parameter that changes nothing: all that is federated where every client trains alone.

    Args:
        body: the network.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        return self.body(x) + 0 * self.anchor


def module_of(federation: Federation, method: Method, setting: Mapping[str, float]) -> L.LightningModule:
    """Return the module of a task: a classifier, a regressor that learns its noise, or a Cox model."""
    options: dict[str, Any] = {"learning_rate": setting["rate"]}
    if method.kind == "ivon":
        options["optimizer"] = partial(
            fb.IVON, lr=setting["rate"], temperature=setting["temperature"], curvature="ivon"
        )
    if method.kind == "layers":
        options |= {"bayesian_last": int(setting["layers"]), "posterior_std": 0.05, "kl_weight": setting["kl_weight"]}
    network = Anchored(network_of(federation)) if method.alone else network_of(federation)
    if federation.task == "classification":
        return fb.HybridBayesianClassifier(network, **{"bayesian_last": 0, **options})
    if federation.task == "regression":
        return fb.HybridBayesianRegressor(network, **{"bayesian_last": 0, "targets": 1, "scaler": False, **options})
    return fb.CoxRegressor(network, **options)


# -- training ----------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A trained federation.

    Attributes:
        posteriors: client → posterior by which it predicts; for :data:`WEIGHTS` where it has a personal one.
        by_round: number of rounds → mean NLL on the tuning parts.
        kilobytes: that a client sends in a round.
        seconds: of the processor for the training, by one thread: the same beside other processes.
    """

    module: L.LightningModule
    posteriors: dict[float, dict[str, fb.GaussianPosterior]]
    by_round: dict[int, float]
    kilobytes: float
    seconds: float


class Watch(L.Callback):
    """Scores the tuning parts after some rounds.

    Args:
        score: of the present state, called after those rounds.
        rounds: their numbers.
        turns: epochs that make a round, where clients take turns.
    """

    def __init__(self, score: Callable[[], float], rounds: Sequence[int], turns: int = 1) -> None:
        self.score, self.rounds, self.turns = score, rounds, turns
        self.by_round: dict[int, float] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the round."""
        rounds, rest = divmod(trainer.current_epoch + 1, self.turns)
        if not rest and rounds in self.rounds:
            self.by_round[rounds] = self.score()


def train(
    federation: Federation,
    method: Method,
    setting: Mapping[str, float],
    rounds: int,
    seed: int,
    watched: Sequence[int] = (),
) -> Run:
    """Train a federation, or its clients alone, or a model of the pooled data."""
    L.seed_everything(seed, verbose=False)
    module = module_of(federation, method, setting)
    names = list(federation.clients)
    parts = [own.train for own in federation.clients.values()]
    data = {"pooled": joined(parts)} if method.pooled else dict(zip(names, parts, strict=True))
    epochs = int(federation.local_epochs * setting.get("epochs", 1))
    options: dict[str, Any] = {**method.options, "local_epochs": epochs}
    if method.pooled and federation.task != "survival":  # an epoch has the steps of all clients
        options["local_epochs"] = 2
    if "server_rate" in setting:
        options["fusion"] = FedAdam(lr=setting["server_rate"])
    if method.alone:
        options |= {"local_parameters": ["network.body.*"], "keep": ["optimizer", "posterior"]}
    elif method.personal:
        options["keep"] = ["posterior"]
    turns = len(names) if options.get("fraction") == "turns" else 1
    callback = fb.FederatedBayes(seed=seed, **options)

    def posteriors(weight: float) -> dict[str, fb.GaussianPosterior]:
        if weight > 0:
            return {name: callback.posterior_of(number, weight) for number, name in enumerate(names)}
        shared = callback.posterior
        return dict.fromkeys(names, shared)

    def tuning() -> float:
        if method.personal:
            every = {weight: posteriors(weight) for weight in WEIGHTS}
            chosen = personal_weights(federation, module, every)[KINDS[1]]
            mixed = {name: every[weight][name] for name, weight in chosen.items()}
        else:
            mixed = posteriors(method.weight)
        return chosen_by(federation, scores(federation, module, mixed, "tuning"))

    watch = Watch(tuning, watched, turns)
    trainer = L.Trainer(
        max_epochs=rounds * turns,
        accelerator="cpu",
        logger=False,
        callbacks=[callback, watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    loader = DataLoader(
        fb.ClientDatasets({name: own.dataset() for name, own in data.items()}), federation.batch, shuffle=True
    )
    start = time.process_time()
    trainer.fit(module, loader)
    seconds = time.process_time() - start
    weights = WEIGHTS if method.personal else (method.weight,)
    sent = (
        0.0
        if method.alone or method.pooled
        else (1000 * turns * statistics.fmean(each["megabytes_up"] for each in callback.history) / len(names))
    )
    return Run(module.eval(), {weight: posteriors(weight) for weight in weights}, watch.by_round, sent, seconds)


# -- scores ------------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What a posterior predicts for some examples: probabilities; mean and variance; or log risks."""

    first: Tensor
    variance: Tensor | None = None


Predictions = Mapping[str, tuple[Prediction, Tensor]]
"""Client → its predictions and targets."""


@torch.no_grad()
def predict(
    federation: Federation, module: L.LightningModule, posterior: fb.GaussianPosterior, x: Tensor
) -> Prediction:
    """Return the mean prediction over draws of the parameters; of a model without a posterior, its only one."""
    draws = 1 if posterior.is_point_mass else SAMPLES
    sets = posterior.sample(draws, torch.Generator().manual_seed(0))
    outputs = torch.cat([outputs_with(module, sets, part) for part in x.split(1000)], 1)
    if federation.task == "classification":
        return Prediction(outputs.softmax(-1).mean(0))
    outputs = outputs.squeeze(-1)
    if federation.task == "survival":
        return Prediction(outputs.mean(0))
    assert isinstance(module, fb.HybridBayesianRegressor)
    return Prediction(outputs.mean(0), outputs.var(0, correction=0) + module.noise_variance)


def nlls(federation: Federation, found: Prediction, y: Tensor) -> Tensor:
    """Return the NLL of each example in nats; of survival, the NLL of each event among the examples given."""
    if federation.task == "classification":
        return -found.first.clamp_min(1e-12).log()[torch.arange(len(y)), y]
    if federation.task == "survival":
        count = int(y[:, 0].sum())
        return cox_loss(found.first, y[:, 1], y[:, 0]).expand(count) if count else y.new_zeros(0)
    assert found.variance is not None
    return 0.5 * ((y - found.first) ** 2 / found.variance + (2 * math.pi * found.variance).log())


def predictions(
    federation: Federation,
    module: L.LightningModule,
    posteriors: Mapping[str, fb.GaussianPosterior],
    part: str,
) -> Predictions:
    """Return each client's predictions and targets, those of one posterior in one pass."""
    own = {name: getattr(parts, part) for name, parts in federation.clients.items()}
    first = next(iter(posteriors.values()))
    if all(posterior is first for posterior in posteriors.values()):
        together = predict(federation, module, first, torch.cat([each.inputs for each in own.values()]))
        sizes = [len(each.targets) for each in own.values()]
        split = [values.split(sizes) if values is not None else [None] * len(sizes) for values in together]
        found = [Prediction(*each) for each in zip(*split, strict=True)]
    else:
        found = [predict(federation, module, posteriors[name], each.inputs) for name, each in own.items()]
    return {name: (one, own[name].targets) for name, one in zip(own, found, strict=True)}


def scores(
    federation: Federation,
    module: L.LightningModule,
    posteriors: Mapping[str, fb.GaussianPosterior],
    part: str,
) -> dict[str, Any]:
    """Return the scores of all clients' predictions on one part of their own examples; see :func:`summary`."""
    return summary(federation, predictions(federation, module, posteriors, part))


def summary(federation: Federation, found: Predictions) -> dict[str, Any]:
    """Return the scores of predictions.

    "metric" (accuracy, RMSE or the c-index of pairs within clients), "nll" over all examples (or events), "clients" the
    mean over clients of their NLLs, "calibration" (ECE, or coverage of the 90 % intervals), and the worst 10 % of the
    clients by the metric and by the NLL. Of survival "pooled", the c-index of pairs of all clients. "nlls" is the NLL
    of each client, NaN without an example or an event.
    """
    each = {name: nlls(federation, *pair) for name, pair in found.items()}
    own = [float(values.mean()) if len(values) else math.nan for values in each.values()]
    by_metric, known = [metric(federation, *pair) for pair in found.values()], [nll for nll in own if nll == nll]
    targets = torch.cat([y for _, y in found.values()])
    every = together(found)
    result: dict[str, Any] = {"nll": float(torch.cat(list(each.values())).mean()), "clients": mean_of(known)}
    if federation.task == "classification":
        result["metric"] = metric(federation, every, targets)
        result["calibration"] = float(calibration_diagram(every.first, targets).ece)
    elif federation.task == "regression":
        assert every.variance is not None
        result["metric"] = metric(federation, every, targets)
        inside = (targets - every.first).abs() <= 1.6448536 * every.variance.sqrt()
        result["calibration"] = float(inside.float().mean())
    else:
        pairs = [comparable(y) for _, y in found.values()]
        result["metric"] = sum(c * n for c, n in zip(by_metric, pairs, strict=True) if n) / max(1, sum(pairs))
        result["pooled"] = metric(federation, every, targets)
    worst = max(1, int(WORST * len(known)))
    ordered = sorted((value for value in by_metric if value == value), reverse=federation.task == "regression")
    result["worst_metric"] = mean_of(ordered[:worst])
    result["worst_nll"] = mean_of(sorted(known, reverse=True)[:worst])
    result["nlls"] = own
    return result


def mean_of(values: Sequence[float]) -> float:
    """Return the mean, NaN of none: a small part may have no client with an event."""
    return statistics.fmean(values) if values else math.nan


def together(found: Predictions) -> Prediction:
    """Return the predictions of all clients, one after the other."""
    first, variance = zip(*(one for one, _ in found.values()), strict=True)
    return Prediction(torch.cat(first), None if variance[0] is None else torch.cat(variance))


def metric(federation: Federation, found: Prediction, y: Tensor) -> float:
    """Return accuracy, RMSE or c-index; NaN where there is no example, or no pair is comparable."""
    if not len(y):
        return math.nan
    if federation.task == "classification":
        return float((found.first.argmax(-1) == y).double().mean())
    if federation.task == "regression":
        return float((found.first - y).square().mean().sqrt())
    return float(concordance_index(found.first, y[:, 1], y[:, 0]))


def comparable(y: Tensor) -> int:
    """Return the number of pairs of which it is known whose event came first."""
    event, time = y[:, 0] > 0, y[:, 1]
    later = (time[:, None] < time) | ((time[:, None] == time) & ~event)
    return int((event[:, None] & later).sum())


def conformal_size(federation: Federation, tuning: Predictions, test: Predictions) -> dict[str, float]:
    """Return mean size (classes, or width in deviations of the targets) and coverage of split-conformal sets.

    One threshold of all clients' tuning examples. These have served to choose settings, too, so the coverage is not
    guaranteed.
    """
    tuning = {name: own for name, own in tuning.items() if len(own[1])}
    new, target = together(test), torch.cat([y for _, y in test.values()])
    if federation.task == "classification":
        conformal = fb.FederatedConformal(LEVEL).fit(
            {name: class_scores(one.first, y) for name, (one, y) in tuning.items()}
        )
        chosen = conformal.sets(new.first)
        return {
            "set_size": float(chosen.sum(1).double().mean()),
            "set_coverage": float(chosen[torch.arange(len(target)), target].double().mean()),
        }
    conformal = fb.FederatedConformal(LEVEL, kind="interval").fit(
        {name: interval_scores(one.first, deviation(one), y) for name, (one, y) in tuning.items()}
    )
    ends = conformal.intervals(new.first, deviation(new))
    inside = (ends[:, 0] <= target) & (target <= ends[:, 1])
    return {"set_size": float((ends[:, 1] - ends[:, 0]).mean()), "set_coverage": float(inside.double().mean())}


def deviation(found: Prediction) -> Tensor:
    """Return the predicted standard deviations of a regressor."""
    assert found.variance is not None
    return found.variance.sqrt()


def chosen_by(federation: Federation, found: Mapping[str, Any]) -> float:
    """Return the score that choices go by: the mean over clients of their NLLs, or over events, which are few."""
    return found["nll" if federation.task == "survival" else "clients"]


def personal_weights(
    federation: Federation,
    module: L.LightningModule,
    posteriors: Mapping[float, Mapping[str, fb.GaussianPosterior]],
) -> dict[str, dict[str, float]]:
    """Return, for each of :data:`KINDS`, client → the λ that its NLL on tuning parts chooses.

    A client without an example or an event has no NLL: it takes the mean's λ, by own choice 0. The smallest λ wins a
    tie.
    """
    found = {weight: scores(federation, module, own, "tuning") for weight, own in posteriors.items()}
    mean = {weight: chosen_by(federation, each) for weight, each in found.items()}
    chosen: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for number, (name, parts) in enumerate(federation.clients.items()):
        own = {weight: each["nlls"][number] for weight, each in found.items()}
        known = own[0.0] == own[0.0]
        targets = parts.tuning.targets
        size = int(targets[:, 0].sum()) if federation.task == "survival" else len(targets)
        sums = {weight: (size * own[weight] if known else 0.0) for weight in WEIGHTS}
        both = {weight: sums[weight] + SHRINKAGE * mean[weight] for weight in WEIGHTS}
        for kind, values in zip(KINDS, (sums, both, mean), strict=True):
            chosen[kind][name] = min(WEIGHTS, key=lambda weight: (values[weight], weight))
    return chosen


# -- a cell ------------------------------------------------------------------------------------------------------------


class MixedModel(NamedTuple):
    """A linear mixed model and the columns that it takes."""

    fit: HierarchicalFit
    columns: list[int]


def mixed_model(federation: Federation, slopes: bool) -> MixedModel:
    """Return the linear mixed model of the training parts: an intercept of each client, or slopes, too.

    A column that is a linear function of those before it is left out.
    """
    x = torch.cat([own.train.inputs for own in federation.clients.values()])
    x, columns = torch.cat([torch.ones(len(x), 1).to(x), x], 1), list[int]()
    for column in range(1, x.shape[1]):
        if int(torch.linalg.matrix_rank(x[:, [0, *columns, column]])) == len(columns) + 2:
            columns.append(column)
    columns = [column - 1 for column in columns]
    random = tuple(range(1 + slopes * len(columns)))
    sums = {
        name: fb.modules.LinearStatistics.of(own.train.inputs[:, columns], own.train.targets)
        for name, own in federation.clients.items()
    }
    return MixedModel(fb.HierarchicalLinearRegression(random=random).fit(sums), columns)


def predictions_of(federation: Federation, model: MixedModel, part: str) -> Predictions:
    """Return each client's predictions by the posterior of its own coefficients."""
    found = {}
    for name, parts in federation.clients.items():
        own = getattr(parts, part)
        mean, std = model.fit.predict(own.inputs[:, model.columns], name)
        found[name] = Prediction(mean, std.square()), own.targets
    return found


def tuned(federation: Federation, method: Method, seed: int) -> dict[str, Any]:
    """Choose setting and number of rounds by the tuning parts, one seed; personal ones with the clients' λ."""
    tried = []
    for setting in settings_of(method, federation):
        if method.linear:
            model = mixed_model(federation, bool(setting["slopes"]))
            found = summary(federation, predictions_of(federation, model, "tuning"))
            tried.append((chosen_by(federation, found), setting, 1))
            continue
        rounds = federation.rounds if "epochs" not in setting else [max(1, number // 2) for number in federation.rounds]
        run = train(federation, method, setting, max(rounds), seed, rounds)
        tried += [(nll, setting, rounds) for rounds, nll in run.by_round.items() if nll == nll]
    nll, setting, rounds = min(tried, key=lambda each: each[0])
    return {"setting": setting, "rounds": rounds, "tuning": nll}


def result_of(federation: Federation, method: Method, choice: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train with the chosen setting, and score tuning, validation and test parts.

    Returns: scores by row: "" of the global model, or of clients that train alone; of personal posteriors one row for
        each of :data:`KINDS`, with the λ of the clients.
    """
    if method.linear:
        start = time.process_time()
        model = mixed_model(federation, bool(choice["setting"]["slopes"]))
        seconds, columns = time.process_time() - start, len(model.columns) + 1
        sent = 8e-3 * (columns * (columns + 1) / 2 + columns + 2)
        return {
            "": scored(federation, partial(predictions_of, federation, model)) | {"kilobytes": sent, "seconds": seconds}
        }
    run = train(federation, method, choice["setting"], choice["rounds"], seed)
    cost = {"kilobytes": run.kilobytes, "seconds": run.seconds}

    def by(posteriors: Mapping[str, fb.GaussianPosterior]) -> dict[str, Any]:
        return scored(federation, partial(predictions, federation, run.module, posteriors)) | cost

    if not method.personal:
        (own,) = run.posteriors.values()
        return {"": by(own)}
    results = {}
    for kind, weights in personal_weights(federation, run.module, run.posteriors).items():
        mixed = {name: run.posteriors[weight][name] for name, weight in weights.items()}
        results[kind] = by(mixed) | {"weights": list(weights.values())}
    return results


def scored(federation: Federation, predicted: Callable[[str], Predictions]) -> dict[str, Any]:
    """Return the scores of the test parts, and the NLL of the tuning and of the validation parts.

    Args:
        federation: whose clients are scored.
        predicted: part → each client's predictions.
    """
    tuning, new = predicted("tuning"), predicted("test")
    size = {} if federation.task == "survival" else conformal_size(federation, tuning, new)
    return (
        summary(federation, new)
        | size
        | {
            "tuning": chosen_by(federation, summary(federation, tuning)),
            "validation": chosen_by(federation, summary(federation, predicted("validation"))),
        }
    )
