"""The posterior of parameters that no Bayesian layer holds: their variance stands beside the module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import CavityPrior, NormalPrior, RenyiCavityPrior
from lightning_fedbayes.optim import IVON, first_state
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.training.optimizers import OptimizerState

Priors = Mapping[str, NormalPrior | CavityPrior]


class LearnedPosterior:
    r"""The posterior that an :class:`~lightning_fedbayes.IVON` optimizer learns: read, load, prior and state.

    A client's training begins with :meth:`start`, which gives the optimizer its precisions :math:`\Lambda` and its
    prior, and ends with :meth:`finish`, which reads them.

    Args:
        optimizer: the user's.
        module: whose parameters it trains.

    Attributes:
        variances: name in the posterior → variance, now in force beside the parameter; replaced when it changes.

    Raises:
        FederationError: it is to learn the posterior of a Bayesian layer's parameters, which have one already.
    """

    def __init__(self, optimizer: IVON, module: nn.Module) -> None:
        names = {id(p): name for name, p in module.named_parameters()}
        own = {id(p): name for name, each in gaussian_parameters(module).items() for p in (each.mean, each.rho)}
        self._optimizer = optimizer
        self._numbers: dict[str, int] = {}
        self._priors: Priors = {}
        self.variances: dict[str, Tensor] = {}
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
            self.variances[name] = torch.full_like(parameter.detach(), self._first(group))

    def _groups(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Return every parameter of the optimizer with its group, in the order of its ``state_dict``."""
        return [(p, group) for group in self._optimizer.param_groups for p in group["params"]]

    @staticmethod
    def _first(group: Mapping[str, Any]) -> float:
        """Return the variance of a parameter that no client has trained: that of one example. Nobody draws from it."""
        return 1 / (group["hessian_init"] + group["prior_std"] ** -2)

    def prior(self, name: str) -> NormalPrior:
        """Return a parameter's own prior.

        Raises:
            FederationError: it has none.
        """
        _, group = self._groups()[self._numbers[name]]
        if group["prior_std"] == float("inf"):
            raise FederationError(f"IVON: '{name}' has no prior (prior_std=inf), and sites need one: give prior_std")
        return NormalPrior(0.0, float(group["prior_std"]))

    def set_prior(self, posterior: GaussianPosterior | None, exclude: Collection[str] = ()) -> None:
        """Make ``posterior`` the prior of all clients but for the names in ``exclude``; None brings the own back."""
        self._priors = {} if posterior is None else {
            name: NormalPrior(posterior.mean[name], posterior.variance[name].sqrt())
            for name in self._numbers if name not in exclude
        }

    def start(
        self, kept: OptimizerState, num_examples: int, priors: Priors | None = None,
        local: Mapping[str, Tensor] | None = None,
    ) -> OptimizerState:
        """Return the state with which a client's optimizer starts.

        Args:
            kept: of the client's earlier rounds, if any: gradients' means and numbers of steps.
            num_examples: of the client.
            priors: its own, such as cavities; None: those of all clients.
            local: what the client keeps, with the variances of parameters that never leave it (:func:`variance_of`).

        Raises:
            FederationError: a parameter that was frozen trains now, or the global posterior is a point mass.
        """
        groups, known = self._groups(), {number: name for name, number in self._numbers.items()}
        replaced = self._priors if priors is None else priors
        states: OptimizerState = {}
        for number, (parameter, group) in enumerate(groups):
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
            state = first_state(parameter, group, num_examples)
            like = state["precision"]
            if replaced:  # a group has priors of one form
                state.update(natural_prior(replaced.get(name) or group["prior_std"], like))
            variance = (local or {}).get(variance_of(name), self.variances[name])
            if bool((variance == self._first(group)).all()):  # no client has trained it
                curvature = state["examples"].to(like) * group["hessian_init"]
                own = state.get("prior_precision", group["prior_std"] ** -2)
                state["precision"] = torch.full_like(like, 1.0) * (curvature + own) / state.get("prior_weight", 1.0)
            elif not bool(variance.all()):
                raise FederationError(
                    f"IVON: the global posterior has no variance for '{name}'. Over Flower the server's module must "
                    "configure the same IVON, without a Trainer; elsewhere take a rule that keeps a variance"
                )
            else:
                state["precision"] = variance.to(like).reciprocal()
            states[number] = {**state, **{key: old[key] for key in ("step", "momentum") if key in old}}
        return states

    def finish(self, state: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Take the variances of a client that has trained, or of a stack of clients: shape (clients, *).

        Args:
            state: of the optimizer; None: the optimizer's own.
        """
        for name, number in self._numbers.items():
            parameter, _ = self._groups()[number]
            entries = self._optimizer.state[parameter] if state is None else state[number]
            self.variances[name] = entries["precision"].reciprocal().to(parameter.dtype)


def learned_posterior(optimizers: Sequence[Optimizer], module: nn.Module) -> LearnedPosterior | None:
    """Return the posterior that an IVON among the ``optimizers`` of ``module`` learns; None without one."""
    found = next((each for each in optimizers if isinstance(each, IVON)), None)
    return None if found is None else LearnedPosterior(found, module)


def variance_of(name: str) -> str:
    """Return the name under which a client keeps the variance of a parameter that never leaves it."""
    return f"{name} (variance)"


def natural_prior(prior: NormalPrior | CavityPrior | float, like: Tensor) -> dict[str, Tensor]:
    """Return a prior as :class:`~lightning_fedbayes.IVON` reads it in the state of a parameter ``like``.

    A number is the standard deviation of a prior with mean 0, infinite for none.

    Raises:
        FederationError: it is no quadratic.
    """
    if isinstance(prior, RenyiCavityPrior):
        raise FederationError("renyi= needs Bayesian layers: IVON's prior is a quadratic. Leave renyi= out")
    if isinstance(prior, CavityPrior):
        shift = prior.curvature * prior.mean - prior.slope
        fields = prior.curvature, shift, prior.step
    else:
        mean, std = (prior.mean, prior.std) if isinstance(prior, NormalPrior) else (0.0, prior)
        precision = torch.as_tensor(std, dtype=like.dtype).to(like).square().reciprocal()
        fields = precision, precision * torch.as_tensor(mean).to(like), torch.ones(())
    names = "prior_precision", "prior_shift", "prior_weight"
    return {name: value.to(like).expand_as(like).clone() for name, value in zip(names, fields)}
