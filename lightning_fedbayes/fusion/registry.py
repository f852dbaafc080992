"""Fusion rules by name."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FusionError, nearest, shown
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.rule import FusionRule, Posteriors

FuseFunction = Callable[[Sequence[GaussianPosterior], Tensor, "GaussianPosterior | None"], GaussianPosterior]
Registered = TypeVar("Registered")

_OF_CLIENTS = "it changes local training: put its term into your training_step, and fuse with 'weighted_average'"
_OF_METHODS = "it is a method of the federation: give it to FederatedBayes(fusion=...)"
_OF_SERVERS = "choose a server optimizer: 'fedavgm', 'fedadam', 'fedyogi' or 'fedadagrad'"
ALGORITHMS = {
    **dict.fromkeys(("moon", "feddecorr", "fedlc"), _OF_CLIENTS),
    **dict.fromkeys(("ditto", "fednova", "fedprox", "population", "scaffold", "sites", "sums"), _OF_METHODS),
    **dict.fromkeys(("fedopt", "mime"), _OF_SERVERS),
    "feddyn": "its duals sum what short local training leaves over; fusion='sites' measures gradients instead",
    **dict.fromkeys(("pvi", "bayesadmm"), "fusion='sites' also has one factor per client, and measures it"),
    **dict.fromkeys(("fedper", "fedrep"), "fuse by 'weighted_average', with local_parameters=['head.*']"),
    "fedbn": "fuse by 'weighted_average', with the normalisation layers as local_parameters and buffers='local'",
}
"""Known algorithm that is no fusion rule, in lower case without hyphens → what to do instead."""

_RULES: dict[str, type[FusionRule] | FuseFunction] = {}
_ALIASES: dict[str, str] = {}


class FunctionRule(FusionRule):
    """Rule that calls a function ``(posteriors, weights, previous) -> GaussianPosterior``."""

    def __init__(self, function: FuseFunction) -> None:
        self.function = function

    def fuse(self, posteriors: Posteriors, weights: Tensor, previous: GaussianPosterior | None) -> GaussianPosterior:
        return self.function(posteriors, weights, previous)


def register_fusion(name: str, aliases: Sequence[str] = ()) -> Callable[[Registered], Registered]:
    """Decorate a class or function to register it as the fusion rule ``name``.

    Args:
        name: the name that users give as ``fusion="name"``.
        aliases: other names of the same rule.

    Raises FusionError: a name or alias is taken, or the decorated object is neither a rule class nor a function.

    >>> @register_fusion("first_client")
    ... def first_client(posteriors, weights, previous):
    ...     return posteriors[0]
    >>> "first_client" in available_fusions()
    True
    >>> unregister_fusion("first_client")
    """

    remedy = "give a string, the name by which users choose the rule"
    errors.check_kind("name", name, str, remedy, error=FusionError)
    aliases = errors.check_strings("aliases", aliases, remedy, error=FusionError)

    def register(rule: Registered) -> Registered:
        if not (issubclass(rule, FusionRule) if isinstance(rule, type) else callable(rule)):
            raise FusionError(f"cannot register {shown(rule)} as '{name}': give a FusionRule subclass or a function")
        keys = (name, *aliases)
        for i, key in enumerate(keys):
            if key in _RULES or key in _ALIASES or key in keys[:i]:
                raise FusionError(f"fusion rule '{key}' is registered already; choose another name")
        _RULES[name] = rule  # pyright: ignore[reportArgumentType]
        _ALIASES.update(dict.fromkeys(aliases, name))
        return rule

    return register


def unregister_fusion(name: str) -> None:
    """Remove the rule ``name`` and its aliases. Raise FusionError, with the nearest name, if there is none."""
    errors.check_choice("name", name, _RULES, error=FusionError)
    del _RULES[name]
    for alias in [alias for alias, target in _ALIASES.items() if target == name]:
        del _ALIASES[alias]


def available_fusions(aliases: bool = False) -> list[str]:
    """Return the names of all registered rules, sorted. With ``aliases``, their other names too.

    >>> available_fusions()[:2]
    ['alpha_barycenter', 'conflation']
    """
    errors.check_flag("aliases", aliases, error=FusionError)
    return sorted([*_RULES, *_ALIASES] if aliases else _RULES)


def rule_name(rule: str | FusionRule) -> str:
    """Return the name that a rule is registered by, or its class's name if it is not registered."""
    if isinstance(rule, str):
        return _ALIASES.get(rule, rule)
    kind = rule.function if isinstance(rule, FunctionRule) else type(rule)
    return next((name for name, known in _RULES.items() if known is kind), getattr(kind, "__name__", repr(kind)))


def get_rule(rule: str | FusionRule | FuseFunction) -> FusionRule:
    """Return the rule object for a name, an alias, a rule object or a function. Raise FusionError for anything else."""
    if isinstance(rule, FusionRule):
        return rule
    if isinstance(rule, str):
        name = _ALIASES.get(rule, rule)
        if name not in _RULES:
            help = ALGORITHMS.get(rule.lower().replace("-", "").replace("_", ""))
            help = help or nearest(rule, available_fusions(aliases=True))
            raise FusionError(f"unknown fusion rule '{rule}': {help}")
        registered = _RULES[name]
        return registered() if isinstance(registered, type) else FunctionRule(registered)
    if callable(rule) and not isinstance(rule, type):
        return FunctionRule(rule)
    raise FusionError(f"{shown(rule)} is no fusion rule: give a name, a FusionRule object or a function")
