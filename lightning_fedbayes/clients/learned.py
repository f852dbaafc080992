"""Posteriors of parameters outside of Bayesian layers, which keep their variances beside the module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.clients.states import OptimizerState, parameters_of
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.core.posterior import GaussianPosterior, at_least_float32
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import LocalPrior, NormalPrior
from lightning_fedbayes.modules.sources.curvature import SWAG, Laplace, Source, chosen_parameters
from lightning_fedbayes.modules.sources.ivon import IVON
from lightning_fedbayes.modules.sources.ivon_state import believed, first_curvature, first_state, precision_of

Priors = Mapping[str, NormalPrior | LocalPrior]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TrainedClient:
    """A client at the end of its local training.

    It has ``num_examples``, and parameters and buffers by name: at the end (``values``, ``buffers``), and those with
    which it began (``received``). ``state`` is of its optimizer, by the number of the parameter. ``priors`` are of this
    client, such as by sites, or None. ``batches`` returns its training batches as ``training_step`` gets them.
    """

    num_examples: int
    values: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    state: Mapping[int, Mapping[str, Any]]
    priors: Priors | None
    received: Mapping[str, Tensor]
    batches: Callable[[], Iterable[Any]]


class LearnedPosterior(ABC):
    """The posterior of parameters outside of Bayesian layers.

    A client's training begins with :meth:`start`, and ends with :meth:`measured`, which returns its variances.

    Args:
        first: name → parameter and its variance before any training, from which nothing is drawn.

    Attributes:
        variances: name in the posterior → present variance. The tensor is replaced when it changes.
    """

    linearised: ClassVar[bool] = False
    follows_data: bool = False
    """True if widths follow a client's data, not its past, so that sites can be measured."""
    described: str = "this source"
    """The source, for messages."""

    def __init__(self, first: Mapping[str, tuple[Tensor, float]]) -> None:
        self._first = {name: variance for name, (_, variance) in first.items()}
        self._priors: dict[str, NormalPrior] = {}
        self.variances = {name: torch.full_like(p.detach(), variance) for name, (p, variance) in first.items()}

    def prior_std(self, name: str) -> float:
        """Return the standard deviation of a parameter's prior. By default infinite: there is no prior."""
        return float("inf")

    def temperature(self, name: str) -> float:
        """Return the temperature of a parameter's posterior. 1 is Bayes."""
        return 1.0

    def prior(self, name: str) -> NormalPrior:
        """Return a parameter's prior. Raise FederationError if it has none."""
        if self.prior_std(name) == float("inf"):
            remedy = "give IVON or Laplace a finite prior_std; SWAG has none"
            raise FederationError(f"'{name}' has no prior (prior_std=inf), and sites need one: {remedy}")
        return NormalPrior(0.0, float(self.prior_std(name)))

    def set_prior(self, posterior: GaussianPosterior | None, exclude: Collection[str] = ()) -> None:
        """Make ``posterior`` the prior of all clients, except the names in ``exclude``. None restores the priors."""
        self._priors = {}
        if posterior is not None:
            for name in self.variances.keys() - set(exclude):
                self._priors[name] = NormalPrior(posterior.mean[name], posterior.variance[name].sqrt())

    def natural(self, priors: Priors | None) -> dict[str, dict[str, Tensor]]:
        """Return a client's ``priors``, or all clients', as :func:`natural_prior` does. Empty if none was replaced."""
        replaced = self._priors if priors is None else priors
        if not replaced:
            return {}
        return {
            name: natural_prior(replaced.get(name) or self.prior_std(name), at_least_float32(variance))
            for name, variance in self.variances.items()
        }

    def check(self, batches: Iterable[Any]) -> None:  # noqa: B027
        """Raise FederationError before any training if :meth:`measured` cannot take these ``batches`` of a client."""

    def start(
        self, kept: OptimizerState, num_examples: int, priors: Priors | None = None, local: Tensors | None = None
    ) -> OptimizerState:
        """Return the state with which a client's optimizer starts. By default what it has ``kept`` of earlier rounds.

        ``priors`` are of the client, such as by sites. None: as for all clients. ``local`` are tensors that it keeps,
        with variances of parameters that never leave it (:func:`variance_of`).
        """
        return kept

    def kept(self, state: OptimizerState) -> OptimizerState:
        """Return the part of its optimizer's state that a client keeps after a round. By default all."""
        return state

    def shown(self, state: OptimizerState) -> OptimizerState:
        """Return a client's state as hooks find it between rounds. By default as it is kept."""
        return state

    def term(self, num_examples: int, priors: Priors | None) -> tuple[Tensors, Tensors]:
        r"""Return A and b of the prior's term in the loss per example, :math:`\tfrac12 A \theta^2 - b \theta`, by name.

        By default there is no term.
        """
        return {}, {}

    def observe(self, optimizer: Optimizer, done: Sequence[float]) -> None:  # noqa: B027
        """Observe parameters after a step of one client or a stack. ``done`` is each client's share of its steps."""

    @abstractmethod
    def measured(self, client: TrainedClient) -> Tensors:
        """Return the variances of a client that has trained, and set its parameters to the posterior's mean."""


class PosteriorSource(ABC):
    """Base of a user's own source of posteriors, for ``FederatedBayes(posterior=...)``.

    ``fb.Laplace`` and ``fb.SWAG`` are such sources, and ``fb.IVON`` is one among a module's optimizers.
    """

    @abstractmethod
    def attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> LearnedPosterior:
        """Return the posterior of ``module`` at the start of a fit. Raise FederationError if it does not suit."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class OptimizerPosterior(LearnedPosterior):
    r"""The posterior that an :class:`~lightning_fedbayes.IVON` optimizer learns.

    Its state holds the precisions :math:`\Lambda` and the prior. Raises FederationError if it learns parameters of a
    Bayesian layer, which have a posterior already.
    """

    def __init__(self, optimizer: IVON, module: nn.Module) -> None:
        names = {id(p): name for name, p in module.named_parameters()}
        own = {id(p): name for name, each in gaussian_parameters(module).items() for p in (each.mean, each.rho)}
        self._optimizer = optimizer
        self._numbers: dict[str, int] = {}
        first = {}
        for number, (parameter, group) in enumerate(self._groups()):
            if not group["posterior"] or not parameter.requires_grad or id(parameter) not in names:
                continue
            if id(parameter) in own:
                raise FederationError(
                    f"IVON: '{own[id(parameter)]}' is a parameter of a Bayesian layer, which has a posterior already: "
                    "put it into a group with posterior=False, such as {'params': head.parameters(), 'posterior': "
                    "False, 'lr': 1e-3}"
                )
            name = names[id(parameter)]
            self._numbers[name] = number
            first[name] = parameter, 1 / (first_curvature(parameter, group, 1.0) + group["prior_std"] ** -2)
        super().__init__(first)
        self.described = "IVON(curvature='ivon')"
        self.follows_data = all(group["curvature"] == "squares" for group in optimizer.param_groups)

    def _groups(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for group in self._optimizer.param_groups for p in group["params"]]

    def prior_std(self, name: str) -> float:
        """See :meth:`LearnedPosterior.prior_std`."""
        return self._groups()[self._numbers[name]][1]["prior_std"]

    def prior(self, name: str) -> NormalPrior:
        """See :meth:`LearnedPosterior.prior`. Raise FederationError if a site would be no measurement."""
        if not self.follows_data:
            raise FederationError(
                "IVON(curvature='ivon') with fusion='sites': its precision is a memory of every round, and no "
                "measurement of one client's data; leave curvature= at 'squares'"
            )
        return super().prior(name)

    def temperature(self, name: str) -> float:
        """See :meth:`LearnedPosterior.temperature`."""
        return self._groups()[self._numbers[name]][1]["temperature"] if name in self._numbers else 1.0

    def start(
        self, kept: OptimizerState, num_examples: int, priors: Priors | None = None, local: Tensors | None = None
    ) -> OptimizerState:
        """See :meth:`LearnedPosterior.start`. Under a client's quadratic prior the width is the global one."""
        known, natural = {number: name for name, number in self._numbers.items()}, self.natural(priors)
        states: OptimizerState = {}
        for number, (parameter, group) in enumerate(self._groups()):
            name, old = known.get(number), kept.get(number, {})
            if name is None:
                if group["posterior"] and parameter.requires_grad:
                    raise FederationError(
                        "IVON: a parameter that was frozen when the fit began is trained now, and has no posterior: "
                        "let it require gradients from the start, or put it into a group with posterior=False"
                    )
                if old:
                    states[number] = dict(old)
                continue
            state = {**first_state(parameter, group, num_examples), **natural.get(name, {})}
            like = state["precision"]
            variance = (local or {}).get(variance_of(name), self.variances[name])
            own: Any = state.get("prior_precision", group["prior_std"] ** -2)
            if bool((variance == self._first[name]).all()):  # before its first training
                scale = float(state["examples"])
                curvature = scale * first_curvature(parameter, group, scale)
                state["precision"] = torch.full_like(like, 1.0) * (curvature + own)
            elif not bool(variance.all()):
                raise FederationError(
                    f"IVON: the global posterior has no variance for '{name}'. Over Flower the server's module must "
                    "configure the same IVON, without a Trainer; elsewhere take a rule that keeps a variance"
                )
            else:
                state["precision"] = variance.to(like).reciprocal()
                if "square" in state:
                    state.update(believed(state["precision"], own, state["examples"]))
            states[number] = {**state, **{key: old[key] for key in KEPT if key in old and key in state}}
            if "received" in state:
                states[number]["received"] = states[number]["step"].clone()
            if priors and name in priors:
                states[number]["fixed"] = torch.ones(())
        return states

    def kept(self, state: OptimizerState) -> OptimizerState:
        """See :meth:`LearnedPosterior.kept`: the next round brings precision and prior."""
        own = {*self._numbers.values()}
        return {i: {k: v for k, v in entries.items() if k in KEPT or i not in own} for i, entries in state.items()}

    def shown(self, state: OptimizerState) -> OptimizerState:
        """See :meth:`LearnedPosterior.shown`: with the precision of the global posterior."""
        shown = dict(state)
        for name, number in self._numbers.items():
            shown[number] = {**state.get(number, {}), "precision": at_least_float32(self.variances[name]).reciprocal()}
        return shown

    def measured(self, client: TrainedClient) -> Tensors:
        """See :meth:`LearnedPosterior.measured`."""
        precisions = {name: precision_of(client.state[number]) for name, number in self._numbers.items()}
        return {name: each.reciprocal().to(self.variances[name].dtype) for name, each in precisions.items()}


class CurvaturePosterior(LearnedPosterior):
    r"""The posterior of a :class:`~lightning_fedbayes.Laplace` approximation, taken after each client's training.

    The prior, or a client's :math:`\exp(b\theta - \tfrac12 A\theta^2)`, is a part of the loss. The precision is
    :math:`\sum_i F_i + A`, with the information :math:`F_i` at the end of training. By sites :math:`F_i` is at the
    global model that the client has received, once that was trained: all sites are of one model, and a client that fits
    its examples perfectly ends where they have next to no information. Where posteriors are averaged, the information
    weighs what each client has learnt, so it is at the client's model. Raises FederationError if an optimizer has a
    prior or weight decay, the source's prior is to be chosen, or the likelihood is not a product over examples.
    """

    linearised = True
    follows_data = True

    def __init__(self, source: Laplace, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            decay = max((group.get("weight_decay", 0.0) for group in optimizer.param_groups), default=0.0)
            if isinstance(optimizer, IVON) or decay:
                has, remedy = f"weight_decay={decay}", "set weight_decay=0"
                if isinstance(optimizer, IVON):
                    has, remedy = "a posterior of its own", "take another optimizer, or leave posterior= out"
                why = f"{type(optimizer).__name__} has {has}, and Laplace adds its prior to the loss: {remedy}"
                raise FederationError(f"posterior=Laplace(): {why}")
        source.check_likelihood(module)
        self._source, self._module, self._prior_std = source, module, source.fixed_prior_std("FederatedBayes")
        chosen = chosen_parameters(module, source.parameters)
        super().__init__({name: (p, self._prior_std**2) for name, p in chosen.items()})

    def prior_std(self, name: str) -> float:
        """See :meth:`LearnedPosterior.prior_std`."""
        return self._prior_std

    def temperature(self, name: str) -> float:
        """See :meth:`LearnedPosterior.temperature`."""
        return self._source.temperature if name in self.variances else 1.0

    def _prior_of(self, name: str, natural: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return natural[name] if natural else natural_prior(self.prior_std(name), at_least_float32(self.variances[name]))

    def term(self, num_examples: int, priors: Priors | None) -> tuple[Tensors, Tensors]:
        """See :meth:`LearnedPosterior.term`."""
        natural, scale = self.natural(priors), self._source.temperature / num_examples
        found = {name: self._prior_of(name, natural) for name in self.variances}
        strengths = {name: each["prior_precision"] * scale for name, each in found.items()}
        return strengths, {name: each["prior_shift"] * scale for name, each in found.items()}

    def check(self, batches: Iterable[Any]) -> None:
        """See :meth:`LearnedPosterior.check`: measure the first example."""
        try:
            batch = self._source.unpacked(next(iter(batches)))
            first = apply_to_collection(batch, Tensor, lambda tensor: tensor[:1])
            self._source.information(self._module, chosen_parameters(self._module, self._source.parameters), [first])
        except FedBayesError:
            raise
        except Exception:  # of the network or the data: its client fails with it, when it is measured
            return

    def measured(self, client: TrainedClient) -> Tensors:
        """See :meth:`LearnedPosterior.measured`."""
        is_trained = any(bool((each != self._first[name]).any()) for name, each in self.variances.items())
        has_site = client.priors is not None
        where = client.received if has_site and is_trained else {**client.values, **client.buffers}
        others = {name: value.detach() for name, value in where.items()}
        values = {name: others[name] for name in self.variances}
        information, _ = self._source.information(self._module, values, client.batches(), others)
        natural = self.natural(client.priors)
        precisions = {n: each + self._prior_of(n, natural)["prior_precision"] for n, each in information.items()}
        return {name: each.reciprocal().to(self.variances[name].dtype) for name, each in precisions.items()}


class PathPosterior(LearnedPosterior):
    """The posterior of a :class:`~lightning_fedbayes.SWAG`: moments of the parameters along a client's training.

    The optimizer's state holds them, from the first step on: :data:`MOMENTS`. Raises FederationError if there are
    several optimizers, or one that learns a posterior.
    """

    def __init__(self, source: SWAG, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.described = "SWAG()"
        if len(optimizers) != 1 or isinstance(optimizers[0], IVON):
            names = ", ".join(type(each).__name__ for each in optimizers)
            raise FederationError(f"posterior=SWAG() needs one optimizer without a posterior of its own, not {names}")
        chosen = chosen_parameters(module, source.parameters)
        numbers = {id(p): number for number, p in enumerate(parameters_of(optimizers[0]))}
        self._source, self._told = source, False
        self._numbers = {name: numbers[id(p)] for name, p in chosen.items() if id(p) in numbers}
        super().__init__({name: (chosen[name], source.min_std**2) for name in self._numbers})

    def start(
        self, kept: OptimizerState, num_examples: int, priors: Priors | None = None, local: Tensors | None = None
    ) -> OptimizerState:
        """See :meth:`LearnedPosterior.start`: the moments of earlier rounds are left out."""
        return {i: {key: each for key, each in entries.items() if key not in MOMENTS} for i, entries in kept.items()}

    @torch.no_grad()
    def observe(self, optimizer: Optimizer, done: Sequence[float]) -> None:
        """See :meth:`LearnedPosterior.observe`: Welford's update of mean and squares."""
        parameters = parameters_of(optimizer)
        counted = [share > self._source.start for share in done]
        if not any(counted):
            return
        for number in self._numbers.values():
            p = parameters[number]
            one = at_least_float32(p.detach())
            shape = (len(done), *[1] * (p.dim() - 1)) if len(done) > 1 else ()
            new = torch.tensor(counted if shape else counted[0], device=p.device).to(one).reshape(shape)
            state = optimizer.state[p]
            count, mean, squares = (state.get(name, torch.zeros_like(one)) for name in MOMENTS)
            move = (one - mean) * new
            count = count + new
            mean = mean + move / count.clamp_min(1)
            state.update(zip(MOMENTS, (count, mean, squares + move * (one - mean))))

    @torch.no_grad()
    def measured(self, client: TrainedClient) -> Tensors:
        """See :meth:`LearnedPosterior.measured`."""
        variances, narrow = {}, []
        for name, number in self._numbers.items():
            state, least = client.state.get(number, {}), self._source.min_std**2
            variances[name] = torch.full_like(self.variances[name], least)
            if MOMENTS[0] in state and bool(state[MOMENTS[0]].any()):
                count, mean, squares = (state[key] for key in MOMENTS)
                client.values[name].copy_(mean)
                spread = self._source.scale * squares / count
                variances[name] = (spread + least).to(self.variances[name].dtype)
                narrow += [name] if float(spread.mean()) < least else []
        if narrow and not self._told:
            self._told = True
            rank_zero_info(
                f"SWAG: the path of a client's training is narrower than min_std={self._source.min_std:g} in "
                f"{len(narrow)} of {len(variances)} tensors, whose width is that and not the path's. Let it wander: "
                "SGD at a larger, constant learning rate, more local epochs"
            )
        return variances


KEPT = ("step", "momentum", "square", "signal", "noise")
"""State of IVON that a client keeps with its optimizer. The precision is the global posterior's."""
MOMENTS = ("path_count", "path_mean", "path_squares")
"""Names of the moments in the state of an optimizer, each of the parameter's shape, as stacks need it."""


def learned_posterior(
    optimizers: Sequence[Optimizer], module: nn.Module, source: Source | PosteriorSource | None = None
) -> LearnedPosterior | None:
    """Return the posterior of ``module`` by ``source``. Without a source by an IVON among the ``optimizers``."""
    if isinstance(source, PosteriorSource):
        return source.attach(module, optimizers)
    if source is not None:
        kind = CurvaturePosterior if isinstance(source, Laplace) else PathPosterior
        return kind(source, module, optimizers)  # pyright: ignore[reportArgumentType]
    found = next((each for each in optimizers if isinstance(each, IVON)), None)
    return None if found is None else OptimizerPosterior(found, module)


def variance_of(name: str) -> str:
    """Return the name under which a client keeps the variance of a parameter that never leaves it."""
    return f"{name} (variance)"


def natural_prior(prior: NormalPrior | LocalPrior | float, like: Tensor) -> dict[str, Tensor]:
    """Return a prior, or one of mean 0 by its standard deviation, as IVON reads it in the state of ``like``."""
    if isinstance(prior, LocalPrior):
        fields = prior.curvature, prior.curvature * prior.mean - prior.slope
    else:
        mean, std = (prior.mean, prior.std) if isinstance(prior, NormalPrior) else (0.0, prior)
        precision = torch.as_tensor(std, dtype=like.dtype).to(like).square().reciprocal()
        fields = precision, precision * torch.as_tensor(mean).to(like)
    names = "prior_precision", "prior_shift"
    return {name: value.to(like).expand_as(like).clone() for name, value in zip(names, fields)}
