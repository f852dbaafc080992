"""Conformal sets and intervals of a federation: clients send histograms of scores, the server takes a quantile."""

import math
import secrets
from collections.abc import Mapping
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fedbayes.callbacks.calibration import callback
from lightning_fedbayes.callbacks.calibration import scores as scoring
from lightning_fedbayes.callbacks.calibration.callback import CalibrationCallback, Datasets, Found
from lightning_fedbayes.callbacks.calibration.scores import BINS, GRIDS, Kind, ScoreSketch
from lightning_fedbayes.callbacks.calibration.temperature import FederatedTemperature
from lightning_fedbayes.callbacks.evaluator import callback_of, callbacks_of
from lightning_fedbayes.clients.evaluation import ClientScores, Predicted, likelihood_by, mean_probs
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import LARGEST, FedBayesError, FederationError, is_number, listed, nearest, shown
from lightning_fedbayes.metrics import likelihoods
from lightning_fedbayes.metrics.functional.utilities import check_numbers, check_same_shape

Pooling = Literal["sum", "median"]
Per = Literal["position", "example"]


class FederatedConformal(CalibrationCallback):
    r"""Sets of classes, or intervals, that hold the truth with a stated probability, without moving data.

    Split conformal prediction: with n held-out scores of all clients, a new example that is exchangeable with them is
    covered with

    .. math:: \mathrm{level} \le P(y \in C(x)) \le \mathrm{level} + \frac1{n + 1} + \text{(mass of one cell)}

    the upper bound for scores without ties. Each client sends one :class:`ScoreSketch`, 8 KiB.

    Clients may lie: with n examples of each of K clients alike, f < K/2 liars move the pooled threshold's
    coverage p by :math:`\frac{f B}{(K - f)\, n}` at most, with :math:`B \approx 2.7\, c \sqrt{p (1 - p)\, n}` of
    :func:`bounded_distribution`. A line names the clients that are clipped. One or two are never bounded.

    With ``pooling="median"`` the threshold is the upper median of the clients' thresholds: for f < K/2 liars between
    the smallest and the largest honest one. Where clients differ, the median client is covered with the stated level,
    not their mixture. When to use it: many of the clients may lie, or each should count alike, and every client has
    enough examples for a threshold.

    The pooled threshold covers the mixture of the clients, in proportion to their held-out examples. A single client
    may be covered less. ``per_client`` adds a threshold for each client, from its own scores, which guarantees it the
    level. The thresholds of clients with few examples are then infinite.

    When to use it: after training, where a stated coverage has to hold whatever the network. ``kind`` "lac" or "aps" is
    for classifiers, "interval" for regressors. Scale a classifier that is nearly always certain by
    :class:`FederatedTemperature` first, or give more ``bins``.

    As a callback of a Trainer, behind a :class:`FederatedTemperature` if there is one, it takes the thresholds in every
    validation, of ``trainer.fit`` and ``trainer.validate``, logs "val/lac_90/threshold" (kind and level in percent) and
    keeps them in checkpoints. ``trainer.test`` logs coverage and size of the sets (width of the intervals) by client,
    as "test/lac_90/coverage" and the like. ``trainer.predict`` puts the sets or intervals of each batch, by the pooled
    threshold, into :attr:`predictions`.

    Args:
        level: probability of coverage in (0, 1).
        kind: "lac", "aps" (see :func:`class_scores`) or "interval" (see :func:`interval_scores`).
        per_client: add one threshold for each client.
        bins: cells of the sketch.
        epsilon: ε of the noise that each client adds to its counts (:meth:`ScoreSketch.noisy`), once for each fit. None
            adds none. With noise ``trainer.fit`` takes the thresholds after its last round only.
        pooling: "sum" of the counts, or "median" of the clients' thresholds.
        max_influence: c, at least 1: largest multiple of the median client that one client counts for, as in
            :class:`~lightning_fedbayes.Safeguards`. None: no bound.
        per: where an example has several positions, labels or targets: "position" covers each with the level, as a
            mean over the positions of new examples. "example" covers all of an example at once.
        seed: of the noise of a simulation that repeats; its figure is "simulated_epsilon". None: from a secret, which
            checkpoints keep.

    Attributes:
        threshold: of the pooled clients. None before :meth:`fit`.
        thresholds: client name → its threshold. Empty without ``per_client``.
        temperature: of the logits that were scored.
        releases: number of times that thresholds were taken from noisy counts. Each has cost ``epsilon``.
        predictions: of each batch of the last ``trainer.predict``: sets, bool of shape (batch, classes, \*positions),
            for yes or no (batch, 2, labels, \*positions), or lower and upper ends, shape (batch, \*, 2).

    Raises FedBayesError: an argument is out of range.
    Source: Vovk, Gammerman and Shafer (2005), also for the conditional (Mondrian) form; Lu et al. (2023), federated.

    >>> scores = {"north": torch.arange(10) / 20, "south": torch.arange(9) / 20}
    >>> conformal = FederatedConformal(level=0.9, bins=20).fit(scores)
    >>> conformal.threshold  # the 18th of 19 scores, 0.40, and one cell
    0.45
    >>> conformal.sets(torch.tensor([[0.3, 0.7], [0.4, 0.6]]))
    tensor([[False,  True],
            [False,  True]])
    """

    sends = "counts"
    if_private = "Give FederatedConformal(epsilon=...), the noise of each client's counts"

    def __init__(
        self,
        level: float = 0.9,
        *,
        kind: Kind = "lac",
        per_client: bool = False,
        bins: int = BINS,
        epsilon: float | None = None,
        pooling: Pooling = "sum",
        max_influence: float | None = 2.0,
        per: Per = "position",
        seed: int | None = None,
    ) -> None:
        errors.check_number("level", level, "(0, 1)", error=FedBayesError)
        errors.check_choice("kind", kind, GRIDS, error=FedBayesError)
        errors.check_flag("per_client", per_client, error=FedBayesError)
        errors.check_at_least("bins", bins, 1, scoring.MOST_BINS, error=FedBayesError)
        if epsilon is not None:
            scoring.check_epsilon(epsilon)
        errors.check_choice("pooling", pooling, ("sum", "median"), error=FedBayesError)
        scoring.check_influence(max_influence)
        errors.check_choice("per", per, get_args(Per), error=FedBayesError)
        self.per: Per = per
        self.level = level
        self.kind: Kind = kind
        self.takes_moments = kind == "interval"
        self.label = f"{kind}_{100 * level:g}"  # such as "lac_90"
        self.per_client = per_client
        self.bins, self.epsilon = bins, epsilon
        if seed is not None:
            errors.check_at_least("seed", seed, -LARGEST, error=FedBayesError)
        self.seed, self._secret = seed, secrets.token_hex(32)
        self.pooling: Pooling = pooling
        self.max_influence = max_influence
        self.releases = 0
        self.threshold: float | None = None
        self.thresholds: dict[str, float] = {}
        self.temperature = 1.0
        self.predictions: list[Tensor] = []

    def sketch(self, scores: Tensor) -> ScoreSketch:
        """Return a client's message, without noise. See :meth:`ScoreSketch.of`."""
        return ScoreSketch.of(scores, self.bins, GRIDS[self.kind])

    def fit(self, clients: Mapping[str, Tensor | ScoreSketch]) -> "FederatedConformal":
        """Take the thresholds from each client's scores or sketch. Return self.

        Fewer than level / (1 − level) examples, 9 for a level of 90 %, allow no finite threshold: sets then hold every
        class, and intervals are the whole line. With ``epsilon`` each call counts as a release of every client's noisy
        counts (:attr:`releases`), with new noise.

        Args:
            clients: name → scores of held-out examples, shape (examples,), or their sketch, with the client's noise.

        Raises FedBayesError: no clients, one without an example, scores outside the grid, or sketches of unlike grids.
        """
        if not isinstance(clients, Mapping) or not clients:
            raise FedBayesError(f"clients={shown(clients)}: give a dict, client name → scores or sketch")
        sketches = {name: self._checked(name, each) for name, each in clients.items()}
        self.releases += self.epsilon is not None
        grid, sizes = GRIDS[self.kind], {name: each.num_examples for name, each in sketches.items()}
        pooled, exceeds = scoring.bounded_distribution(list(sketches.values()), self.level, self.max_influence)
        if self.pooling == "median":
            own = torch.tensor([each.threshold(self.level) for each in sketches.values()], dtype=torch.float64)
            self.threshold, behind = float(scoring.middle(own)), int(scoring.middle(torch.tensor(list(sizes.values()))))
        else:
            self.threshold, behind = scoring.edge_at(self.level, pooled, grid), sum(sizes.values())
            cell = int((pooled < self.level - scoring.ROUNDING).sum().clamp_max(len(pooled) - 1))
            self._tell("scores", [name for name, exceed in zip(sketches, exceeds[:, cell].tolist()) if exceed])
        self._warn({"all clients": behind} if math.isinf(self.threshold) else {})
        named = sketches.items() if self.per_client else ()
        self.thresholds = {name: sketch.threshold(self.level) for name, sketch in named}
        self._warn({f"client {name}": sizes[name] for name, each in self.thresholds.items() if math.isinf(each)})
        return self

    def fit_from(
        self,
        predictive: nn.Module,
        datasets: Datasets,
        *,
        temperature: float = 1.0,
        trained_on: Dataset | None = None,
        batch_size: int = 256,
        seed: int = 0,
    ) -> "FederatedConformal":
        """Take the thresholds from each client's calibration data set. Return self.

        Args:
            predictive: for classes as in :meth:`FederatedTemperature.fit_from`. For intervals a regressor with mean and
                variance from ``predict_step``.
            datasets, trained_on, batch_size, seed: as there.
            temperature: of the logits, found on *other* held-out examples or, with little harm, on the same.

        Raises FedBayesError: as :meth:`fit`, or the data or the module do not suit the kind.
        """
        callback.check_apart(datasets, trained_on)
        scores = self.scores_of(predictive, datasets, temperature, batch_size, seed)
        self.temperature = temperature
        return self.fit(scores)

    def scores_of(
        self,
        predictive: nn.Module,
        datasets: Datasets,
        temperature: float = 1.0,
        batch_size: int = 256,
        seed: int = 0,
        first: int = 0,
    ) -> dict[str, Tensor]:
        """Return the scores of each client's examples, by its name. See :meth:`fit_from` and :func:`predictions_of`."""
        errors.check_number("temperature", temperature, "(0, inf)", error=FedBayesError)
        return self._scores(self._found(predictive, datasets, batch_size, seed, first), temperature)

    def _scores(self, found: Found, temperature: float) -> dict[str, Tensor]:
        scores = dict[str, Tensor]()
        for name, (first, *std, targets, counts) in found.items():
            if self.kind == "interval":
                each = scoring.interval_scores(first, std[0], targets)
            else:
                each = scoring.class_scores(mean_probs(first, temperature), targets, self.kind)
            scores[name] = scoring.by_example(each, counts, "amax") if self.per == "example" else each
        return scores

    def score(self, found: Found) -> ClientScores:
        """Return coverage and size, or width, of each client's predictions, by its threshold with ``per_client``.

        Both are means over examples (of a regressor over examples and targets), with logits scaled as in the fit.
        """
        figures, sizes = dict[str, dict[str, float]](), dict[str, int]()
        for name, (first, *std, targets, counts) in found.items():
            whose = name if self.per_client else None
            if self.kind == "interval":
                ends = self.intervals(first, std[0], whose)
                inside = (ends[:, 0] <= targets) & (targets <= ends[:, 1])
                size = {"width": float((ends[:, 1] - ends[:, 0]).mean())}
            else:
                probs = mean_probs(first, self.temperature)
                scoring.check_targets(targets, probs)
                sets = self.sets(probs, whose)
                inside = sets.gather(1, targets.unsqueeze(1)).squeeze(1)
                size = {"set_size": float(sets.sum(1).double().mean())}
            covered = inside.double()
            covered = scoring.by_example(covered, counts, "amin") if self.per == "example" else covered
            figures[name] = {"coverage": float(covered.mean()), **size}
            sizes[name] = len(counts)
        return ClientScores.of(sizes, figures)

    def sets(self, probs: Tensor, client: str | None = None) -> Tensor:
        r"""Return each example's set of classes: those with a score of at most the threshold.

        A set of kind "lac" can be empty where no class is probable enough.

        Args:
            probs: mean predictive, shape (batch, classes, \*positions).
            client: name of the client with the threshold. None: the pooled one.

        Returns: bool, of the shape of ``probs``.
        Raises FedBayesError: before :meth:`fit`, for intervals, an unknown client, or no probabilities.
        """
        if self.kind == "interval":
            raise FedBayesError("kind='interval' has no sets: call intervals, or give kind='lac' or 'aps'")
        if not isinstance(probs, Tensor) or probs.ndim < 3:
            return scoring.all_class_scores(probs, self.kind) <= self.threshold_of(client)
        last = probs.movedim(1, -1)
        scores = scoring.all_class_scores(last.flatten(0, -2), self.kind)
        return (scores <= self.threshold_of(client)).view(last.shape).movedim(-1, 1)

    def intervals(self, mean: Tensor, std: Tensor, client: str | None = None) -> Tensor:
        r"""Return each example's interval, :math:`\hat y \pm t \hat\sigma` with the threshold t.

        Args:
            mean: predictive means, shape (batch, \*).
            std: predictive standard deviations, above 0, of the same shape.
            client: name of the client with the threshold. None: the pooled one.

        Returns: lower and upper ends, shape (batch, \*, 2), float64, in the units of ``mean``.
        Raises FedBayesError: before :meth:`fit`, for classes, an unknown client, or moments that are none.
        """
        if self.kind != "interval":
            raise FedBayesError(f"kind='{self.kind}' has no intervals: call sets, or give kind='interval'")
        check_numbers(mean=mean, std=std)
        check_same_shape(mean=mean, std=std)
        scoring.check_moments(mean.flatten(), std.flatten())
        half = self.threshold_of(client) * std.detach().double()
        return torch.stack([mean.detach().double() - half, mean.detach().double() + half], -1)

    def threshold_of(self, client: str | None = None) -> float:
        """Return a client's threshold, the pooled one for None. Raise FedBayesError if there is none."""
        if self.threshold is None:
            raise FedBayesError("there is no threshold yet: call fit or trainer.validate, or load a checkpoint")
        if client is None:
            return self.threshold
        if not self.per_client:
            raise FedBayesError(f"client={shown(client)}: there is one threshold for all; give per_client=True and fit")
        if not isinstance(client, str) or client not in self.thresholds:
            raise FedBayesError(f"no client {shown(client)}: {nearest(str(client), map(str, self.thresholds))}")
        return self.thresholds[client]

    def _checked(self, name: str, scores: Tensor | ScoreSketch) -> ScoreSketch:
        """Return a client's sketch, with noise if it is to have some. An error names the client."""
        try:
            sketch = scores if isinstance(scores, ScoreSketch) else self.sketch(scores)
            if self.epsilon is not None and sketch is not scores:
                key = f"{self._secret if self.seed is None else self.seed}/{self.releases}/{name}"
                sketch = sketch.noisy(self.epsilon, key)
            scoring.check_same_grid(self.sketch(torch.empty(0)), sketch)
        except FedBayesError as error:
            raise FedBayesError(f"client {name}: {error}") from None
        if sketch.num_examples == 0:
            raise FedBayesError(f"client {name} has no held-out example: leave it out, or hold some of its data out")
        return sketch

    def _warn(self, infinite: Mapping[str, int]) -> None:
        """Warn of infinite thresholds, name → examples, in one line with the reason of the first."""
        if not infinite:
            return
        examples, least = next(iter(infinite.values())), math.ceil(self.level / (1 - self.level) - scoring.ROUNDING)
        others = f" (and likewise {listed(list(infinite)[1:])})" if len(infinite) > 1 else ""
        if examples < least:
            why = f"{examples} held-out examples, and a level of {self.level} needs {least}"
        else:
            why = f"at a level of {self.level} the threshold lies beyond the sketch, which ends at {self.bins - 1}"
        what = "every interval is the whole line" if self.kind == "interval" else "every set holds every class"
        rank_zero_warn(f"{next(iter(infinite))}: {why}{others}, so {what}; hold more examples out, or lower the level")

    @property
    def state_key(self) -> str:
        """Key of the thresholds in a checkpoint, by kind and level."""
        return self._generate_state_key(kind=self.kind, level=self.level)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a FederatedTemperature behind it, and counts that privacy does not let out."""
        super().setup(trainer, pl_module, stage)
        self._secret = trainer.strategy.broadcast(self._secret)
        callbacks = callbacks_of(trainer)
        if any(isinstance(each, FederatedTemperature) for each in callbacks[callbacks.index(self) :]):
            raise FedBayesError("put FederatedTemperature first: FederatedConformal takes its sets of scaled logits")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the thresholds. With noise only after the last round."""
        is_last = trainer.current_epoch + 1 == trainer.max_epochs
        if self.epsilon is None or trainer.state.fn != "fit" or is_last:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn if training has ended before the round after which noisy thresholds are taken."""
        if self.epsilon is not None and trainer.current_epoch != trainer.max_epochs:
            why = "training has ended early, before the last round, which adds the noise"
            rank_zero_warn(f"FederatedConformal has no thresholds of these weights: {why}. Call trainer.validate")

    def read(self, found: Predicted) -> tuple[Tensor, ...]:
        """Return moments for intervals or logits for sets, targets, and the rows of each example of a client."""
        if self.kind != "interval":
            return *callback.logits_of(found), found["counts"]
        return *callback.numbers_of(found), found["counts"] * found["mean"].shape[1]

    def calibrate(self, trainer: L.Trainer, found: Found, seed: int) -> None:
        """See :class:`CalibrationCallback`."""
        temperature = self._temperature_in(trainer)
        scores = self._scores(found, temperature)
        self.temperature = temperature
        self.fit(scores)

    def _temperature_in(self, trainer: L.Trainer) -> float:
        scaling = callback_of(trainer, FederatedTemperature)
        return 1.0 if scaling is None or self.kind == "interval" else scaling.check_fitted()

    def figures(self) -> dict[str, float]:
        """Return the pooled threshold, the largest of the clients', and the ε of all noisy counts so far."""
        assert self.threshold is not None
        own = {"threshold_largest": max(self.thresholds.values())} if self.per_client else {}
        spent = "epsilon" if self.seed is None else "simulated_epsilon"
        noise = {} if self.epsilon is None else {spent: self.releases * self.epsilon}
        return {"threshold": self.threshold, **own, **noise}

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget earlier predictions. Raise FedBayesError without a threshold, or if logits are scaled otherwise."""
        self.threshold_of()
        present = self._temperature_in(trainer)
        if present != self.temperature:
            found = f"thresholds are of logits scaled by T = {self.temperature:.4g}, predictions by T = {present:.4g}"
            raise FedBayesError(f"{found}: predict with the FederatedTemperature that was in the Trainer then")
        self.predictions = []

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *batch: Any, **options: Any
    ) -> None:
        """Add the sets or intervals of a batch. Raise FedBayesError for predictions of another kind."""
        if isinstance(outputs, likelihoods.ClassPrediction):
            known = likelihoods.said_by(pl_module) or likelihood_by(outputs)
            assert isinstance(known, likelihoods.Categorical | likelihoods.Bernoulli)
            self.predictions.append(self.sets(known.by_class(outputs.probs[None])[0].movedim(-1, 1)).cpu())
        elif isinstance(outputs, likelihoods.RegressionPrediction):
            self.predictions.append(self.intervals(outputs.mean, outputs.variance.sqrt()).cpu())
        else:
            remedy = "give a module of this package, or fb.PosteriorPredictive(module, posterior)"
            raise FedBayesError(f"{type(pl_module).__name__}.predict_step gives {shown(outputs)}: {remedy}")

    def state_dict(self) -> dict[str, Any]:
        """Return the thresholds, and how often noisy counts were sent."""
        return {name: getattr(self, name) for name in ("threshold", "thresholds", "temperature", "releases", "_secret")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the thresholds. Releases stay counted. Raises FederationError for a foreign state."""
        state = callback.state_of(self, state_dict)
        threshold, thresholds, releases = state["threshold"], state["thresholds"], state["releases"]
        errors.check_kind("thresholds", thresholds, Mapping, "give a dict, client → threshold")
        for name, each in (("threshold", 0.0 if threshold is None else threshold), *thresholds.items()):
            if not (isinstance(each, float) and each == math.inf) and not (is_number(each) and each >= 0):
                raise FederationError(f"threshold of {shown(name)}: {shown(each)} is none; give a number of at least 0")
        errors.check_number("temperature", state["temperature"], "(0, inf)")
        errors.check_at_least("releases", releases, 0)
        self.threshold, self.thresholds, self.temperature = threshold, dict(thresholds), state["temperature"]
        errors.check_kind("_secret", state["_secret"], str, "give the state of a FederatedConformal")
        self.releases, self._secret = max(self.releases, releases), state["_secret"]
