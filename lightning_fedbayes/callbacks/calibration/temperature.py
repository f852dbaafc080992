"""Temperature scaling of a federation: clients send sums of derivatives, the server takes Newton steps."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fedbayes.callbacks.calibration import callback, scores
from lightning_fedbayes.callbacks.calibration.callback import CalibrationCallback, Datasets, Found
from lightning_fedbayes.clients.evaluation import ClientScores, Predicted, class_figures, figures_of
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_kind, check_number, shown
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.metrics.likelihoods import RegressionPrediction, said_by

LIMIT = math.log(1e3)
"""Largest |log T|: temperatures lie between 1/1000 and 1000."""
LONGEST = 1.5
"""Longest step in log T."""
TOLERANCE, ROUGH = 1e-10, 1e-4
"""Error in log T at which the search ends. The second while a client is bounded, which adds more to the error."""
ORDINARY, MOST_EXCHANGES = 5, 10
"""Exchanges after which steps that do not shrink lead to a limit, and after which the search ends in any case."""
ROUNDING = 1e-12
"""Relative distance from a limit that counts as rounding."""


@dataclass(frozen=True)
class TemperatureMessage:
    """Message of one client in one exchange: three numbers, 24 bytes. Messages of several clients add up.

    Args:
        gradient, curvature: sums over examples of the first and second derivative of the NLL in log T, in nats.
        num_examples: number of examples.

    >>> TemperatureMessage(1.0, 2.0, 4) + TemperatureMessage(1.0, 1.0, 1)
    TemperatureMessage(gradient=2.0, curvature=3.0, num_examples=5)
    """

    gradient: float
    curvature: float
    num_examples: int

    def __post_init__(self) -> None:
        for name in ("gradient", "curvature"):
            check_number(name, getattr(self, name), error=FedBayesError, why="a client's message holds sums")
        check_at_least("num_examples", self.num_examples, 1, error=FedBayesError)

    def __add__(self, other: "TemperatureMessage") -> "TemperatureMessage":
        parts = ((each.gradient, each.curvature, each.num_examples) for each in (self, other))
        return TemperatureMessage(*map(add, *parts))


def temperature_message(logits: Tensor, targets: Tensor, temperature: float) -> TemperatureMessage:
    r"""Return the sums over a client's held-out examples of the derivatives of the NLL in u = log T.

    With :math:`z_s = f_s / T` the scaled logits of draw s, :math:`p_s = \mathrm{softmax}(z_s)` and
    :math:`\ell_s = \log p_{s,y}`:

    .. math:: \ell_s' = E_{p_s}[z_s] - z_{s,y}, \qquad \ell_s'' = -\ell_s' - \mathrm{Var}_{p_s}[z_s]

    The NLL of an example is the NLL of the mean over draws, with :math:`w = \mathrm{softmax}(\ell)` over draws,

    .. math::
        L = -\log \frac1S \sum_s e^{\ell_s}, \qquad L' = -E_w[\ell'], \qquad
        L'' = -E_w[\ell''] - \mathrm{Var}_w[\ell']

    When to use it: on a client, at the temperature that the server asks for (:class:`TemperatureSearch`).

    Args:
        logits: of held-out examples, shape (batch, classes), or (samples, batch, classes) for draws of the parameters.
        targets: class of each example, integers, shape (batch,).
        temperature: T > 0.

    Raises FedBayesError: logits that are not finite or not (batch, classes), no example, targets that are not classes
    of the logits, or a temperature that is not above 0.
    Source: Guo et al. (2017); derivatives in closed form, in double precision.

    >>> temperature_message(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 1.0).gradient
    0.2384
    """
    logits, targets = scores.check_logits(logits, targets)
    check_number("temperature", temperature, "(0, inf)", error=FedBayesError)
    return _message(logits, targets, temperature)


def _message(logits: Tensor, targets: Tensor, temperature: float) -> TemperatureMessage:
    classes_first = logits.movedim(-1, 0).contiguous()  # where softmax and sums take half the time
    index = targets.expand(classes_first.shape[1:]).unsqueeze(0)
    scaled = classes_first / temperature
    scaled = scaled - scaled.gather(0, index)  # against the true class, so that small gradients keep their digits
    others = scaled.scatter(0, index, -math.inf).logsumexp(0)
    likelihood = -torch.logaddexp(others, torch.zeros_like(others))
    probs = scaled.softmax(0)
    first = (probs * scaled).sum(0)
    second = -first - (probs * (scaled - first).square()).sum(0)
    weight = likelihood.softmax(0)
    mean = (weight * first).sum(0)
    curvature = -(weight * second).sum(0) - (weight * (first - mean).square()).sum(0)
    return TemperatureMessage(float(-mean.sum()), float(curvature.sum()), len(targets))


def message_of(pair: tuple[Tensor, ...], temperature: float) -> TemperatureMessage:
    r"""Return the message of a :func:`.checked_pair`.

    For means and standard deviations T scales the latter: :math:`L = \log T + (y - \mu)^2 / 2 \sigma^2 T^2` up to a
    constant, :math:`L' = 1 - z^2 / T^2` and :math:`L'' = 2 z^2 / T^2` with :math:`z = (y - \mu) / \sigma`.
    """
    if len(pair) == 2:
        return _message(*pair, temperature)
    squares = scores.interval_scores(*pair).square().sum() / temperature**2
    return TemperatureMessage(float(len(pair[0]) - squares), float(2 * squares), len(pair[0]))


def bounded_sum(
    messages: Sequence[TemperatureMessage], max_influence: float | None
) -> tuple[TemperatureMessage, tuple[int, ...]]:
    r"""Return the sum of K messages, in which no client counts for more than a multiple of the median one.

    A message of gradient :math:`g_k` and curvature :math:`h_k` is scaled, c = ``max_influence`` (None: never), so that

    .. math::
        |g_k| \le c \left(\operatorname{median}_j |g_j| + 2 \sqrt{\operatorname{median}_j h_j}\right), \qquad
        |h_k| \le K \operatorname{median}_j |h_j|

    Returns: the sum, and the positions of the messages that were scaled.
    """
    if max_influence is None:
        return reduce(add, messages), ()
    sums = torch.tensor([(each.gradient, each.curvature) for each in messages], dtype=torch.float64)
    gradient = scores.largest_sums(sums[:, 0], sums[:, 1], max_influence)
    curvature = len(messages) * scores.middle(sums[:, 1].abs())
    sizes, bounds = sums.abs(), torch.stack([gradient, curvature])
    factors = torch.where(sizes > bounds, bounds / sizes, 1.0).amin(1)
    outlying = tuple(map(int, (factors < 1).nonzero()[:, 0]))
    if not outlying:
        return reduce(add, messages), ()
    slope, bend = (factors[:, None] * sums).sum(0).tolist()
    return TemperatureMessage(slope, bend, sum(each.num_examples for each in messages)), outlying


@dataclass(frozen=True)
class TemperatureSearch:
    r"""State of the server's search between two exchanges: safeguarded Newton in u = log T.

    .. math:: u \leftarrow u - L'(u) / L''(u)

    with L', L'' the sums of :func:`bounded_sum`. The search begins at T = 1. A step is at most 1.5 long. Where the
    curvature is not positive it goes 1.5 downhill. A step to a larger gradient of the other sign is halved, and no step
    leaves the interval that the signs so far allow. If steps do not shrink after five exchanges, the next one goes to
    the limit of T, and back if that is too far. While a client is bounded, the difference of two gradients replaces the
    curvature. It ends when the remaining error, :math:`c\,\Delta u^2` with c from the last two steps, is below 1e-10
    (1e-4 if a client is bounded), at a limit of T, or after ten exchanges. For several draws it finds a local minimum.

    When to use it: where your transport carries messages. :class:`FederatedTemperature` runs it in one process. ::

        search = TemperatureSearch()
        while not search.done:
            messages = ...  # temperature_message(logits, targets, search.temperature) of every client
            search = search.after(messages)

    Args:
        temperature: T at which clients are asked next. The answer, once ``done``.
        max_influence: see :class:`FederatedTemperature`.
        done: the search has ended.
        exchanges: number of exchanges so far.
        at_limit: T is 1/1000 or 1000, because the loss falls up to there.
        flat: the loss does not depend on T.
        outlying: positions of the messages of the last exchange that were bounded.
        low, high: largest log T at which the loss falls, smallest at which it rises. None if unknown.
        last: log T before the last step, and the gradient there. None before the first exchange.
        step: the last step in log T. After a jump to a limit, the step that it replaced.

    >>> search = TemperatureSearch()
    >>> logits, targets = torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
    >>> while not search.done:
    ...     search = search.after([temperature_message(logits, targets, search.temperature)])
    >>> round(search.temperature, 6) == round(2 / math.log(3), 6)  # odds of 3 to 1
    True
    """

    temperature: float = 1.0
    max_influence: float | None = 2.0
    done: bool = False
    exchanges: int = 0
    at_limit: bool = False
    flat: bool = False
    outlying: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    last: tuple[float, float] | None = None
    step: float | None = None

    def after(self, messages: Sequence[TemperatureMessage]) -> "TemperatureSearch":
        """Return the state after the clients' messages at :attr:`temperature`. Raise FedBayesError once ``done``."""
        if not isinstance(messages, Sequence) or not messages:
            raise FedBayesError(f"messages={shown(messages)}: give a list of the clients' messages")
        for each in messages:
            remedy = "give what temperature_message returns"
            check_kind("message", each, TemperatureMessage, remedy, error=FedBayesError)
        if self.done:
            raise FedBayesError(f"the search is done, at T = {self.temperature}: begin another for other data")
        message, outlying = bounded_sum(messages, self.max_influence)
        at, gradient = math.log(self.temperature), message.gradient
        search = replace(self, exchanges=self.exchanges + 1, outlying=outlying)
        search = replace(search, low=at) if gradient < 0 else replace(search, high=at)
        ends = abs(at) >= LIMIT * (1 - ROUNDING)
        before, slope = self.last or (at, 0.0)
        if gradient * slope < 0 and (ends or abs(gradient) > abs(slope)):
            step = min((at - before) / 2, self.step or math.inf, key=abs)
            return search._moved(before, step, done=abs(step) < TOLERANCE)
        search = replace(search, last=(at, gradient))
        if ends and gradient * at <= 0:
            return replace(search, done=True, at_limit=True)
        if gradient == 0 and message.curvature == 0:
            return replace(search, done=True, flat=True)
        curvature = message.curvature
        if outlying and at != before:
            curvature = (gradient - slope) / (at - before)
        return search._newton(at, gradient, curvature)

    def _newton(self, at: float, gradient: float, curvature: float) -> "TemperatureSearch":
        """Return the state after a Newton step from log T = ``at``, or a safe step in its place."""
        step = -math.copysign(LONGEST, gradient)
        if curvature > 0 and abs(gradient) < LONGEST * curvature:
            step = -gradient / curvature
        if self.low is not None and self.high is not None:
            if not self.low < at + step < self.high:
                step = (self.low + self.high) / 2 - at
        elif self.exchanges > ORDINARY and self.step and step / self.step > 0.5:
            return replace(self._moved(at, math.copysign(2 * LIMIT, step), done=False), step=step)
        rate = 1.0 if not self.step else max(1.0, abs(step) / self.step**2)
        enough = ROUGH if self.outlying else TOLERANCE
        return self._moved(at, step, done=rate * step**2 < enough and curvature > 0)

    def _moved(self, at: float, step: float, done: bool) -> "TemperatureSearch":
        """Return the state after a step from log T = ``at``, within the limits."""
        to = min(max(at + step, -LIMIT), LIMIT)
        return replace(self, temperature=math.exp(to), step=to - at, done=done or self.exchanges >= MOST_EXCHANGES)


class FederatedTemperature(CalibrationCallback):
    r"""Scales logits, or standard deviations, by one temperature for all clients, found without moving data.

    .. math:: p(y \mid x) = \mathrm{softmax}(f(x) / T), \qquad T = \arg\min_T \sum_{k, i} -\log p(y_{ki} \mid x_{ki})

    with held-out example i of client k. T is the temperature of the pooled examples, however they are dealt to clients.
    In each of at most ten exchanges every client sends three numbers (:func:`temperature_message`).

    Clients may lie: of K clients alike, with n examples and h of curvature each, f < K/2 liars move log T by
    :math:`\frac{f B}{(K - f)\, n h}` at most, with :math:`B \approx 2.7\, c \sqrt{n h}` of :func:`bounded_sum`.
    A line names the clients that are bounded. One or two are never bounded.

    When to use it: after training, for a classifier with a large ECE, on held-out examples. Accuracy stays as it is.
    For numbers T is the factor of all standard deviations, :math:`T^2 = \overline{(y - \mu)^2 / \sigma^2}`.

    As a callback of a Trainer it finds T in every validation, of ``trainer.fit`` and ``trainer.validate``, logs
    "val/scaled/temperature" and keeps T in checkpoints. ``trainer.test`` logs the scaled accuracy, NLL and ECE as
    "test/scaled/...", by client, and ``trainer.predict`` predicts with scaled logits. ::

        Trainer(callbacks=[FederatedBayes(...), FederatedTemperature(), FederatedConformal()])

    Its sums are exact: it is refused beside :class:`~lightning_fedbayes.UpdatePrivacy` and
    :class:`~lightning_fedbayes.ExamplePrivacy`.

    Args:
        temperature: T found before, above 0. None until :meth:`fit`.
        max_influence: c, at least 1: largest multiple of the median client that one client counts for, as in
            :class:`~lightning_fedbayes.Safeguards`. None: no bound.

    Attributes:
        temperature: T.
        exchanges: number of messages of each client that :meth:`fit` took.

    Raises FedBayesError: ``temperature`` is not above 0, or ``max_influence`` is below 1.
    Source: Guo et al. (2017).

    >>> logits, targets = torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
    >>> scaling = FederatedTemperature().fit({"north": (logits[:3], targets[:3]), "south": (logits[3:], targets[3:])})
    >>> scaling.temperature
    1.8205
    >>> scaling(logits)[0].softmax(-1)
    tensor([0.7500, 0.2500])
    """

    needs_logits = True
    sends = "temperature"
    label = "scaled"
    if_private = "Leave it out, or calibrate by FederatedConformal(epsilon=...)"

    def __init__(self, temperature: float | None = None, *, max_influence: float | None = 2.0) -> None:
        if temperature is not None:
            check_number("temperature", temperature, "(0, inf)", error=FedBayesError)
        scores.check_influence(max_influence)
        self.max_influence, self.temperature = max_influence, temperature
        self.exchanges = 0
        self._scaled = ExitStack()

    def fit(self, clients: Mapping[str, tuple[Tensor, ...]]) -> "FederatedTemperature":
        """Find T from held-out examples of each client, with a warning if no finite T is best. Return self.

        Args:
            clients: name → (logits, targets), as :func:`temperature_message` takes them, or for numbers vectors of
                (means, standard deviations, targets).

        Raises FedBayesError: no clients, or logits and targets that cannot be used.
        """
        if not isinstance(clients, Mapping) or not clients:
            raise FedBayesError(f"clients={shown(clients)}: give a dict, client name → (logits, targets)")
        checked = {name: scores.checked_pair(name, pair) for name, pair in clients.items()}
        search = TemperatureSearch(max_influence=self.max_influence)
        while not search.done:
            search = search.after([message_of(pair, search.temperature) for pair in checked.values()])
        return self.take(search, list(checked))

    def take(self, search: TemperatureSearch, names: Sequence[str]) -> "FederatedTemperature":
        """Take T from a search that has ended among the clients ``names``, with the warnings of :meth:`fit`."""
        if search.flat:
            rank_zero_warn("the loss of the held-out examples does not depend on the temperature: T stays 1")
        elif search.at_limit:
            why = "every held-out example is classified correctly" if search.temperature < 1 else "chance is better"
            ends = f"the temperature ends at its limit, T = {search.temperature:.3g}"
            trust = ", or give max_influence=None if all clients are honest" if search.outlying else ""
            rank_zero_warn(f"{ends}: {why}, as clients count, so none within is best; hold more examples out{trust}")
        elif search.exchanges >= MOST_EXCHANGES and (search.step or 0.0) ** 2 > ROUGH:
            taken = f"{search.exchanges} exchanges"
            rank_zero_warn(f"the temperature has not converged in {taken}: T = {search.temperature}")
        self._tell("sums", [names[position] for position in search.outlying])
        self.temperature, self.exchanges = search.temperature, search.exchanges
        return self

    def fit_from(
        self,
        predictive: nn.Module,
        datasets: Datasets,
        *,
        trained_on: Dataset | None = None,
        batch_size: int = 256,
        seed: int = 0,
    ) -> "FederatedTemperature":
        """Find T from each client's calibration data set. Return self.

        Args:
            predictive: a module with a method ``sample``, such as :class:`~lightning_fedbayes.PosteriorPredictive`, or
                any module with logits from ``forward``.
            datasets: of (input, target), by client: a :class:`~lightning_fedbayes.ClientDatasets` or a dict.
            trained_on: training data, to warn of examples in both.
            batch_size: examples at a time.
            seed: of the draws from the posterior.

        Raises FedBayesError: as :meth:`fit`, or data that are not pairs.
        """
        callback.check_apart(datasets, trained_on)
        return self.fit(callback.predictions_of(predictive, datasets, batch_size, seed))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits / T, of the shape of ``logits``. Raise FedBayesError before :meth:`fit`, or if some are NaN."""
        check_tensor("logits", logits, error=FedBayesError)
        if bool((wrong := logits.isnan()).any()):
            count = f"{int(wrong.sum())} of {logits.numel()}"
            raise FedBayesError(f"logits: {count} entries are NaN; look for the cause in the inputs or the network")
        return logits / self.check_fitted()

    def check_fitted(self) -> float:
        """Return T. Raise FedBayesError before :meth:`fit`."""
        if self.temperature is None:
            remedy = "call fit or trainer.validate, load a checkpoint, or give FederatedTemperature(temperature)"
            raise FedBayesError(f"there is no temperature yet: {remedy}")
        return self.temperature

    def read(self, found: Predicted) -> tuple[Tensor, ...]:
        """Return a client's logits and targets, or its moments and targets."""
        return callback.scalable(found)

    def calibrate(self, trainer: L.Trainer, found: Found, seed: int) -> None:
        """See :class:`CalibrationCallback`."""
        self.fit(found)  # pyright: ignore[reportArgumentType]

    def score(self, found: Found) -> ClientScores:
        """Return the figures of each client's scaled predictions."""
        figures, sizes = dict[str, dict[str, float]](), dict[str, int]()
        for name, pair in found.items():
            first, *std, targets = scores.checked_pair(name, pair)
            if std:
                variance = (std[0] * self.check_fitted()).square().unsqueeze(1)
                rows = {"mean": first.unsqueeze(1), "variance": variance, "target": targets.unsqueeze(1)}
                figures[name] = figures_of(rows)
            else:
                figures[name] = class_figures(self(first).softmax(-1).mean(0), targets)
            sizes[name] = len(targets)
        return ClientScores.of(sizes, figures)

    def figures(self) -> dict[str, float]:
        """Return T."""
        assert self.temperature is not None
        return {"temperature": self.temperature}

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Scale the logits of the module's ``sample``, else ``forward``, or ``predict_step``'s standard deviations.

        The end of the predictions restores the module. Raises FedBayesError if there is no temperature.
        """
        self.check_fitted()
        module: Any = pl_module
        known = said_by(module)
        of_classes = known is None or known.of_classes
        draws = callable(getattr(module, "sample", None))
        name = "predict_step" if not of_classes else "sample" if draws else "forward"
        unscaled, own = getattr(module, name), vars(module)

        def scaled(*args: Any, **options: Any) -> Any:
            found = unscaled(*args, **options)
            if of_classes:
                return self(found)
            if not isinstance(found, RegressionPrediction):
                return found
            factor = self.check_fitted() ** 2
            parts = ("variance", "aleatoric", "epistemic")
            return found._replace(**{part: factor * getattr(found, part) for part in parts})

        self._scaled.callback(own.__setitem__ if name in own else own.pop, name, own.get(name))
        setattr(module, name, scaled)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the module."""
        self._scaled.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the module."""
        self.on_predict_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return T."""
        return {"temperature": self.temperature, "exchanges": self.exchanges}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore T. Raises FederationError: it is no state of a FederatedTemperature."""
        state = callback.state_of(self, state_dict)
        if state["temperature"] is not None:
            check_number("temperature", state["temperature"], "(0, inf)")
        check_at_least("exchanges", state["exchanges"], 0)
        self.temperature, self.exchanges = state["temperature"], state["exchanges"]
