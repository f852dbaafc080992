"""Likelihoods of a network's outputs: predictions from draws of them, and what is scored. See :class:`Likelihood`."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_choice, check_number, is_whole, shown
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.core.private_torch import outside_of_vmap
from lightning_fedbayes.metrics.functional import kwon_aleatoric, kwon_epistemic, mutual_information, predictive_entropy
from lightning_fedbayes.metrics.functional.scores import check_survival, cox_terms
from lightning_fedbayes.metrics.predictions import (
    LIKELIHOODS,
    ClassPrediction,
    Likelihood,
    RegressionPrediction,
    Rows,
    SurvivalPrediction,
    shaped_like,
)


class _OfClasses(Likelihood):
    """Base of likelihoods of classes."""

    of_classes = True

    def by_class(self, probs: Tensor) -> Tensor:
        """Return draws of probabilities, given in the form of the outputs, with the classes last."""
        return self.logits(probs)

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        r"""Return logits of draws with the classes last, shape (samples, batch, \*positions, classes)."""

    def labels(self, targets: Tensor) -> Tensor:
        r"""Return classes, int64, shape (batch, \*positions); -1 where none is known."""
        return targets.long()

    def rows(self, draws: Tensor, targets: Tensor) -> Rows:
        self.check_draws(draws, targets)
        return self._rows(self.logits(draws), targets, "logits")

    def rows_of(self, prediction: Any, targets: Tensor) -> Rows:
        if not isinstance(prediction, ClassPrediction):
            return super().rows_of(prediction, targets)
        return self.rows_of_probs(prediction.probs[None], targets)

    def rows_of_probs(self, probs: Tensor, targets: Tensor) -> Rows:
        r"""Return what is scored of draws of probabilities, (samples, batch, \*) in the form of the outputs."""
        self.check_draws(probs, targets)
        return self._rows(self.by_class(probs), targets, "probs")

    def _rows(self, values: Tensor, targets: Tensor, name: str) -> Rows:
        labels, rows = self.labels(targets), values.flatten(1, -2)
        target, counts = labels.flatten(), torch.full((len(labels),), labels[0].numel() if len(labels) else 1)
        known = target >= 0
        if not bool(known.all()):
            rows, target, counts = rows[:, known], target[known], known.view(len(labels), -1).sum(1)
        return {name: rows, "probs": rows.softmax(-1) if name == "logits" else rows, "target": target, "counts": counts}

    def predict(self, draws: Tensor) -> ClassPrediction:
        probs = self.logits(draws).softmax(-1)
        rows, mean = probs.flatten(1, -2), probs.mean(0)
        measures = predictive_entropy, mutual_information, kwon_aleatoric, kwon_epistemic
        found = [measure(rows).view(probs.shape[1:-1]) for measure in measures]
        return ClassPrediction(self._as_outputs(mean), mean.argmax(-1), *found)

    @abstractmethod
    def _as_outputs(self, probs: Tensor) -> Tensor:
        """Return mean probabilities, with the classes last, in the form of the outputs."""


@dataclass(frozen=True)
class Categorical(_OfClasses):
    r"""One of C classes at each position: :math:`p(y \mid f) = \mathrm{softmax}(f)_y`.

    When to use it: classes, segmentation, tokens.

    Args:
        ignore_index: the target of positions that do not count.
        channels: the dimension of the classes in the outputs, 1 as torch's losses take them, or -1, the last.

    Shapes: outputs (batch, classes, \*positions), targets (batch, \*positions), integers.
    Raises: FedBayesError if an argument is out of range.

    >>> Categorical().nll(torch.zeros(1, 4, 2), torch.tensor([[0, 3]]))
    tensor([[1.3863, 1.3863]])
    """

    ignore_index: int | None = None
    channels: int = 1
    name: ClassVar[str] = "categorical"

    def __post_init__(self) -> None:
        if self.ignore_index is not None:
            check_at_least("ignore_index", self.ignore_index, -(2**31), error=FedBayesError)
        if not is_whole(self.channels) or self.channels not in (1, -1):
            raise FedBayesError(f"channels={shown(self.channels)}: give 1, as torch's losses have it, or -1, the last")

    def logits(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(2 if self.channels > 0 else -1, -1)

    def _as_outputs(self, probs: Tensor) -> Tensor:
        return probs.movedim(-1, self.channels)

    def labels(self, targets: Tensor) -> Tensor:
        targets = targets.long()
        return targets if self.ignore_index is None else targets.masked_fill(targets == self.ignore_index, -1)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See :meth:`Likelihood.nll`. 0 where a target is ``ignore_index``."""
        logits, labels = outputs.movedim(self.channels, 1), self.labels(targets)
        return F.cross_entropy(logits, labels, reduction="none", ignore_index=-1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim == 2 and self.ignore_index is None:
            return F.cross_entropy(outputs, targets)
        return super().loss(outputs, targets)

    def unfit(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.ndim < 2 or outputs.shape[self.channels] < 2:
            return "at least two classes are needed, (batch, classes, *positions)"
        if targets.is_floating_point() or targets.is_complex():
            return "targets are numbers, not classes"
        if outputs.movedim(self.channels, -1).shape[:-1] != targets.shape:
            return "one class is needed for each example and position"
        labels, classes = self.labels(targets), outputs.shape[self.channels]
        labels = labels if self.ignore_index is None else labels[targets != self.ignore_index]
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            return f"targets run from {int(labels.min())} to {int(labels.max())}, and there are {classes} classes"
        return ""

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """See :meth:`Likelihood.terms`. Of the Fisher information, which needs no target."""
        logs = output.movedim(self.channels - 1 if self.channels > 0 else -1, -1).log_softmax(-1)
        found = logs * logs.detach().exp().sqrt()
        if self.ignore_index is not None:
            found = found * (target != self.ignore_index).unsqueeze(-1)
        return found.reshape(-1)


@dataclass(frozen=True)
class Bernoulli(_OfClasses):
    r"""Yes or no for each output: :math:`p(y = 1 \mid f) = 1 / (1 + e^{-f})`.

    When to use it: two classes by one logit, or several labels at once. A label is scored like a class of two, with the
    logits (0, f).
    Shapes: outputs (batch,), (batch, labels, \*positions). Targets, 0 or 1, of as many entries.

    >>> Bernoulli().nll(torch.zeros(2, 1), torch.tensor([0, 1]))
    tensor([[0.6931],
            [0.6931]])
    """

    name: ClassVar[str] = "bernoulli"

    def logits(self, outputs: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(outputs), outputs], -1)

    def by_class(self, probs: Tensor) -> Tensor:
        return torch.stack([1 - probs, probs], -1)

    def _as_outputs(self, probs: Tensor) -> Tensor:
        return probs[..., 1]

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See :meth:`Likelihood.nll`. Of the shape of the outputs."""
        targets = shaped_like(targets, outputs).to(outputs)
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    def unfit(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.numel() != targets.numel() or len(outputs) != len(targets):
            return "one target, 0 or 1, is needed for each output"
        return "" if bool(((targets == 0) | (targets == 1)).all()) else "targets are not all 0 or 1"

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """See :meth:`Likelihood.terms`. Of the Fisher information, which needs no target."""
        probs = output.detach().sigmoid()
        return (output * (probs * (1 - probs)).sqrt()).reshape(-1)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""Numbers with Gaussian noise: :math:`y \sim N(a + b f, \sigma^2)`, with shift a and scale b.

    When to use it: regression, of one or several targets, at one or many positions.

    Args:
        noise: standard deviation :math:`\sigma` in the units of the targets, a number or a tensor that is expanded to
            (targets, \*positions); "learnt": the module's ``noise_variance``, in units of f, or "output": the second
            half of the channels is :math:`\log \sigma^2 / b^2` of the first, for each input.
        units: a and b, a tensor of shape (2,) or (2, targets, \*positions); None: from the module's ``scaler``, a
            :class:`~lightning_fedbayes.FederatedScaler`, else 0 and 1. Losses, predictions and what is scored are in
            the units of the targets.

    Shapes: outputs (batch,), (batch, targets, \*positions). Targets of as many entries.
    Raises: FedBayesError if ``noise`` or ``units`` has another form.

    >>> Gaussian(2.0).nll(torch.zeros(1, 1), torch.zeros(1))  # log 2√2π
    tensor([[1.6121]])
    """

    noise: float | str | Tensor = "learnt"
    units: Tensor | None = None
    name: ClassVar[str] = "gaussian"
    by_moments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.units is not None:
            check_tensor("units", self.units, error=FedBayesError)
            if not self.units.ndim or len(self.units) != 2:
                raise FedBayesError(f"units={shown(self.units)}: give shift and scale, torch.tensor([mean, std])")
        if isinstance(self.noise, str):
            check_choice("noise", self.noise, ("learnt", "output"), error=FedBayesError)
        elif not isinstance(self.noise, Tensor):
            check_number("noise", self.noise, "[0, inf)", error=FedBayesError, why="it is a standard deviation")

    @property
    def in_outputs(self) -> bool:
        """True if the outputs hold the noise."""
        return isinstance(self.noise, str) and self.noise == "output"

    def _units(self, device: torch.device) -> tuple[Any, Any]:
        return (0.0, 1.0) if self.units is None else (self.units[0].to(device), self.units[1].to(device))

    def standard(self, targets: Tensor, like: Tensor) -> Tensor:
        """Return targets in units of the outputs, in the dtype of ``like`` where they are scaled."""
        shift, scale = self._units(targets.device)
        return targets if self.units is None else ((targets - shift) / scale).to(like)  # in the precision of units

    def means(self, outputs: Tensor) -> Tensor:
        """Return outputs, means without the noise, in the units of the targets."""
        shift, scale = self._units(outputs.device)
        return (shift + scale * outputs).to(outputs)

    def in_units(self, found: RegressionPrediction) -> RegressionPrediction:
        """Return a prediction of outputs in the units of the targets."""
        if self.units is None:
            return found
        square = self._units(found.mean.device)[1] ** 2
        variance, aleatoric, epistemic = ((square * each).to(each) for each in found[1:4])
        return RegressionPrediction(self.means(found.mean), variance, aleatoric, epistemic, self.means(found.samples))

    def _parts(self, outputs: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        """Return means and variances of the noise, in units of the outputs. ``channels`` is their dimension."""
        if self.in_outputs:
            mean, log_variance = outputs.chunk(2, channels)
            return mean, log_variance.exp()
        if isinstance(self.noise, str):
            remedy = "fb.Gaussian(noise='output') if half of the outputs are log variances"
            given = "Give fb.Gaussian(noise=0.5), a module with noise_variance"
            raise FedBayesError(f"likelihood 'gaussian': the noise is not known. {given}, or {remedy}")
        noise = torch.as_tensor(self.noise, dtype=outputs.dtype, device=outputs.device) / self._units(outputs.device)[1]
        return outputs, noise.to(outputs).square().expand_as(outputs)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See :meth:`Likelihood.nll`. Of the shape of the means."""
        mean, variance = self._parts(outputs, 1)
        errors = self.standard(shaped_like(targets, mean), mean) - mean
        scaled = self._units(mean.device)[1] ** 2 * variance
        return 0.5 * (errors.square() / variance + scaled.log().to(mean) + math.log(2 * math.pi))

    def predict(self, draws: Tensor, moments: tuple[Tensor, Tensor] | None = None) -> RegressionPrediction:
        """See :meth:`Likelihood.predict`.

        Args:
            draws: of the outputs.
            moments: mean and variance of outputs over the parameters, of the shape of the means, where they have a
                closed form.
        """
        draws = draws.unsqueeze(-1) if draws.ndim == 2 else draws
        samples, noise = self._parts(draws, 2)
        mean, epistemic = (samples.mean(0), samples.var(0, correction=0)) if moments is None else moments
        aleatoric = noise.mean(0).reshape(mean.shape)
        return self.in_units(RegressionPrediction(mean, aleatoric + epistemic, aleatoric, epistemic, samples))

    def unfit(self, outputs: Tensor, targets: Tensor) -> str:
        wanted = outputs.numel() / (1 + self.in_outputs)
        fits = len(outputs) == len(targets) and targets.numel() == wanted
        return "" if fits else "give the network one output per target"

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """See :meth:`Likelihood.terms`. Of the Fisher information, which needs no target."""
        mean, variance = self._parts(output[None], 1)
        found = (mean / variance.detach().sqrt()).reshape(-1)
        return torch.cat([found, output.chunk(2, 0)[1].reshape(-1) / 2**0.5]) if self.in_outputs else found


@dataclass(frozen=True)
class Cox(Likelihood):
    r"""Times to an event, some of them censored, with the hazard :math:`\lambda_0(t) e^f` and any :math:`\lambda_0`.

    The partial likelihood with risk sets within a batch of a client, so it is stratified by client:

    .. math:: -\log p = \sum_{i: e_i = 1} \Bigl( \log \sum_{j \in batch: t_j \ge t_i} e^{f_j} - f_i \Bigr)

    When to use it: a network that ranks risks. Give batches as large as memory allows. A term depends on the whole
    batch, so :class:`~lightning_fedbayes.Laplace` and :class:`~lightning_fedbayes.ExamplePrivacy` refuse it. Risks have
    no scale, so they are not calibrated.
    Shapes: outputs (batch,) or (batch, 1), log risks. Targets (batch, 2): event, 1 or 0 (censored), and time.
    Source: Cox (1972); ties by Breslow's method.

    >>> Cox().nll(torch.zeros(3, 1), torch.tensor([[1.0, 1.0], [0.0, 2.0], [1.0, 2.0]]))  # log 3, censored, log 2
    tensor([1.0986, 0.0000, 0.6931])
    """

    name: ClassVar[str] = "cox"
    by_example, by_moments = False, True

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See :meth:`Likelihood.nll`: each example's term, shape (batch,). They sum to the term of the batch."""
        terms, order = cox_terms(*_survival(outputs, targets))
        return terms[order.argsort()]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cox_terms(*_survival(outputs, targets))[0].sum() / len(targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """See :meth:`Likelihood.check`. Of all clients that are stacked."""
        _, *both = _survival(outputs, targets)
        check_survival(*(outside_of_vmap(each).flatten() for each in both))

    def predict(self, draws: Tensor, moments: tuple[Tensor, Tensor] | None = None) -> SurvivalPrediction:
        """See :meth:`Likelihood.predict`. For ``moments`` see :meth:`Gaussian.predict`."""
        draws = _log_risks(draws, 2)
        if moments is None:
            return SurvivalPrediction(draws.mean(0), draws.std(0, correction=0), draws)
        return SurvivalPrediction(moments[0].flatten(), moments[1].flatten().sqrt(), draws)

    def rows_of(self, prediction: Any, targets: Tensor) -> Rows:
        if not isinstance(prediction, SurvivalPrediction):
            return super().rows_of(prediction, targets)
        _survival(prediction.log_risk, targets)
        counts = torch.ones(len(targets), dtype=torch.int64)
        return {"log_risk": prediction.log_risk, "std": prediction.std, "target": targets, "counts": counts}


def _log_risks(outputs: Tensor, dimensions: int) -> Tensor:
    """Return ``outputs`` with so many dimensions, without a last one of size 1. Raise FedBayesError if it is larger."""
    found = outputs.squeeze(-1) if outputs.ndim == dimensions + 1 and outputs.shape[-1] == 1 else outputs
    if found.ndim != dimensions:
        given = f"the network's outputs have shape (batch, {', '.join(map(str, outputs.shape[dimensions:]))})"
        need = "one log risk per example is needed, shape (batch,) or (batch, 1)"
        raise FedBayesError(f"{given}, but {need}; end the network with nn.Linear(features, 1)")
    return found


def _survival(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log risk, time and event of a batch, (batch,) each. Raise FedBayesError if shapes are others."""
    check_tensor("targets", targets, error=FedBayesError)
    if targets.ndim != 2 or targets.shape[1] != 2:
        remedy = "two columns are needed, event (1 or 0) and time: torch.stack([event, time], 1)"
        raise FedBayesError(f"targets have shape {tuple(targets.shape)}, but {remedy}")
    return _log_risks(outputs, 1), targets[:, 1], targets[:, 0]


LIKELIHOODS.update({each.name: each for each in (Categorical, Bernoulli, Gaussian, Cox)})


def get_likelihood(likelihood: Any) -> Likelihood:
    """Return a likelihood by its name, or itself. Raise FedBayesError for anything else."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    check_choice("likelihood", likelihood, tuple(LIKELIHOODS), error=FedBayesError)
    return LIKELIHOODS[likelihood]()


def said_by(module: Any) -> Likelihood | None:
    """Return the likelihood that a module, or the network in it, names, with its noise and units. None without one."""
    named = getattr(module, "likelihood", None)
    if not isinstance(named, str | Likelihood):
        inner = getattr(module, "network", None)
        return None if inner is None else said_by(inner)
    found = get_likelihood(named)
    if not isinstance(found, Gaussian):
        return found
    variance, units = getattr(module, "noise_variance", None), units_of(module) if found.units is None else found.units
    if variance is None or not isinstance(found.noise, str) or found.in_outputs:
        return found if units is None else replace(found, units=units)
    noise = torch.as_tensor(variance).detach().sqrt()
    return Gaussian(noise if units is None else units[1] * noise, units)


def check_by_example(whose: Any, why: str, error: type[FedBayesError] = FedBayesError) -> None:
    """Raise ``error``, with ``why``, if a likelihood, or a module's, has no terms of single examples."""
    known = whose if isinstance(whose, Likelihood) else said_by(whose)
    if known is not None:
        known.refuse_examples(why, error)


def units_of(module: Any) -> Tensor | None:
    """Return shift and scale of the outputs by the scaler of a module, or of the network in it. None without one."""
    if module is None:
        return None
    found = getattr(getattr(module, "scaler", None), "target_units", None)
    return units_of(getattr(module, "network", None)) if found is None else found if found.numel() else None


def likelihood_of(module: nn.Module, outputs: Tensor, targets: Tensor) -> Likelihood:
    """Return the likelihood that a module names, or else the only one that fits a batch.

    Integers of the shape of the outputs without their channels are classes. Real targets need a noise, and targets of
    0 and 1 with one output each may be numbers: there the module must say.

    Raises: FedBayesError if no likelihood fits, or several do. It names the line to add.
    """
    named = said_by(module)
    if named is not None:
        return named
    for found in (Categorical(), Categorical(channels=-1)):
        if found.unfit(outputs, targets):
            continue
        totals = outputs.detach().sum(found.channels)
        if bool((outputs >= 0).all()) and torch.allclose(totals, torch.ones_like(totals), atol=1e-4):
            what = "the outputs of every example are at least 0 and sum to 1, so they are probabilities"
            remedy = "leave the softmax out, or give the module its own likelihood"
            raise FedBayesError(f"{type(module).__name__}: {what}, and logits are needed: {remedy}")
        return found
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
    who = f"{type(module).__name__}: {shapes} of {targets.dtype}"
    if not Bernoulli().unfit(outputs, targets):
        remedy = "give the module likelihood = fb.Bernoulli() or likelihood = fb.Gaussian(noise=...)"
        raise FedBayesError(f"{who} may be yes or no, or numbers: {remedy}")
    if not targets.is_floating_point():
        why = Categorical().unfit(outputs, targets)
        raise FedBayesError(f"{who}: {why}; if that is right, give the module an attribute likelihood that says so")
    how = "noise=..., in the units of the targets"
    if Gaussian(1.0).unfit(outputs, targets):
        if Gaussian("output").unfit(outputs, targets):
            raise FedBayesError(f"{who}: give the network one output per target, or the module a likelihood of its own")
        how = "noise='output', if its second half is the logarithm of a variance"
    raise FedBayesError(f"{who} are numbers whose noise is not known: give the module likelihood = fb.Gaussian({how})")


def examples_in(rows: Rows) -> int:
    """Return the number of examples that rows are of."""
    return len(rows.get("counts", rows["target"]))
