"""Settings of a federation: one frozen, validated value, whoever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_fedbayes.clients.adversaries import Attack
from lightning_fedbayes.core.errors import (
    LARGEST,
    FederationError,
    check_at_least,
    check_choice,
    check_flag,
    check_kind,
    check_number,
    check_strings,
    shown,
)
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.fusion import FusionRule, Sites, rule_name
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.privacy import UpdatePrivacy
from lightning_fedbayes.server import candidates
from lightning_fedbayes.server.guard import check_influence
from lightning_fedbayes.server.plan import Fraction, check_fraction, cohort_size
from lightning_fedbayes.server.weighting import CohortWeights, check_weighting
from lightning_fedbayes.sources.curvature import SWAG, Source

EngineName = Literal["auto", "sequential", "vectorized"]
PriorPolicy = Literal["fixed", "global", "hierarchical"]
OptimizerPolicy = Literal["auto", "reset", "keep"]
BufferPolicy = Literal["average", "local", "frozen"]
Fusion = str | FusionRule | AutoFusion
Weighting = str | CohortWeights
Adversaries = Attack | Sequence[Attack]


@dataclass(frozen=True)
class FederationSettings:
    """Every choice of a federation; :class:`~lightning_fedbayes.FederatedBayes` describes each argument.

    Making one has no effect but its checks. Arguments are brought into one form: "auto" becomes an ``AutoFusion``, one
    attack a tuple of one, one pattern of local parameters likewise.

    Raises:
        FusionError, FederationError: an argument cannot be used; the message names it, the rule and the remedy.
    """

    partition: Partition | None = None
    local_epochs: int = 1
    fraction: Fraction = 1.0
    fusion: Fusion | None = None
    weighting: Weighting = "train_size"
    engine: EngineName = "auto"
    clients_at_once: int | None = None
    prior: PriorPolicy = "fixed"
    optimizer_state: OptimizerPolicy = "auto"
    buffers: BufferPolicy = "average"
    local_parameters: Sequence[str] = ()
    min_clients: int = 1
    max_failed_rounds: int = 3
    max_influence: float | None = 2.0
    adversaries: Adversaries = ()
    privacy: UpdatePrivacy | None = None
    posterior: Source | None = None
    proximal: float = 0.0
    keep_posteriors: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every argument and bring it into one form."""
        if isinstance(self.fusion, str) and self.fusion == "auto":
            self._set("fusion", AutoFusion())
        elif self.fusion is not None and not isinstance(self.fusion, AutoFusion):
            self._set("fusion", next(iter(candidates(self.fusion).values())))
        check_weighting(self.weighting)
        check_partition(self.partition)
        for name in ("local_epochs", "min_clients", "max_failed_rounds"):
            check_at_least(name, getattr(self, name), 1)
        if self.clients_at_once is not None:
            check_at_least("clients_at_once", self.clients_at_once, 1)
        check_influence(self.max_influence)
        check_fraction(self.fraction)
        check_choice("engine", self.engine, get_args(EngineName))
        check_choice("prior", self.prior, get_args(PriorPolicy))
        check_choice("optimizer_state", self.optimizer_state, get_args(OptimizerPolicy))
        check_choice("buffers", self.buffers, get_args(BufferPolicy))
        check_at_least("seed", self.seed, -LARGEST)
        self._set("local_parameters", check_patterns(self.local_parameters))
        self._set("adversaries", attacks_of(self.adversaries))
        check_privacy(self.privacy)
        check_kind("posterior", self.posterior, Source | None, "give fb.Laplace(), fb.SWAG() or None")
        check_flag("keep_posteriors", self.keep_posteriors)
        check_number("proximal", self.proximal, "[0, inf)", why="0 is no term")
        conflict = sites_conflict(self) if isinstance(self.fusion, Sites) else None
        if conflict is not None:
            raise FederationError(f"{conflict[0]} with fusion='sites': {conflict[1]}")
        if self.is_hierarchical:
            check_hierarchical(self)
            self._set("keep_posteriors", True)

    @property
    def is_hierarchical(self) -> bool:
        """True if clients' parameters are draws from a population, the global posterior."""
        return self.prior == "hierarchical"

    def _set(self, name: str, value: Any) -> None:
        """Replace an argument by its one form, while the value is being made."""
        object.__setattr__(self, name, value)

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """The attacks of adversaries."""
        return attacks_of(self.adversaries)

    def obstacle_to_sites(self) -> str | None:
        """Return the first setting that speaks against sites, as text; None if there is none."""
        if self.attacks:
            return "adversaries are given, and sites trust their clients"
        conflict = sites_conflict(self)
        return None if conflict is None else f"{conflict[0]} is given"

    def server_options(self) -> dict[str, Any]:
        """Return the arguments of :class:`~lightning_fedbayes.server.Server`."""
        names = ("fusion", "weighting", "min_clients", "max_failed_rounds", "max_influence")
        return {name: getattr(self, name) for name in names}

    def described(self) -> dict[str, Any]:
        """Return the settings as they are logged: numbers, strings and lists of them, in the order of the arguments."""
        rules = {} if self.fusion is None else candidates(self.fusion)
        weighting = self.weighting if isinstance(self.weighting, str) else getattr(self.weighting, "__name__", "custom")
        auto = isinstance(self.fusion, AutoFusion)
        forms = {
            "partition": repr(self.partition),
            "fusion": f"auto({', '.join(rules)})" if auto else next(map(rule_name, rules.values()), None),
            "weighting": weighting if not rules or any(rule.uses_weights for rule in rules.values()) else "none",
            "local_parameters": list(self.local_parameters),
            "adversaries": [repr(attack) for attack in self.attacks],
            "privacy": repr(self.privacy),
            "posterior": repr(self.posterior),
        }
        return {name: forms.get(name, value) for name, value in vars(self).items() if name != "clients_at_once"}


def check_hierarchical(settings: FederationSettings) -> None:
    """Raise FederationError if the rounds of ``settings`` would not be those of a hierarchical model."""
    rule = settings.fusion
    if not isinstance(rule, FusionRule) or rule_name(rule) != "linear_pool" or settings.weighting != "equal":
        name = repr(rule_name(rule)) if isinstance(rule, FusionRule) else "'auto'" if rule else None
        raise FederationError(
            f"prior='hierarchical' with fusion={name} and weighting={shown(settings.weighting)}: mean and spread of "
            "the population are the moments of all clients together. Give fusion='linear_pool', weighting='equal'"
        )
    if isinstance(settings.posterior, SWAG):
        raise FederationError(
            "prior='hierarchical' with posterior=SWAG(): a SWAG has no prior. Take Laplace(), IVON or Bayesian layers"
        )


def sites_conflict(settings: FederationSettings) -> tuple[str, str] | None:
    """Return the first setting that sites do not go with, and why; None if there is none."""
    if settings.prior != "fixed":
        return f"prior={shown(settings.prior)}", "a client's prior is its cavity there; leave prior= out"
    if settings.proximal:
        return f"proximal={settings.proximal}", (
            "a client is held by its cavity there, and Sites(step=...) and Sites(pull=...) set how tightly. Leave "
            "proximal= out"
        )
    if settings.privacy is not None:
        return "privacy=", (
            "a client would keep another site than the one that noise leaves at the server. Take another rule, or "
            "train with ExamplePrivacy"
        )
    if settings.weighting not in ("train_size", "equal"):
        return f"weighting={shown(settings.weighting)}", (
            "sites count as they are, and the weights are those of deterministic parameters alone; give 'train_size' "
            "or 'equal'"
        )
    return None


def check_patterns(local_parameters: Any) -> tuple[str, ...]:
    """Return the patterns of local parameters; raise FederationError unless they are one string or several."""
    return check_strings("local_parameters", local_parameters, "give patterns of names, such as ['head.*']")


def check_cohort(clients: int, fraction: Fraction, min_clients: int) -> None:
    """Raise FederationError if every round would have too few clients."""
    cohort = cohort_size(clients, fraction)
    if cohort < min_clients:
        raise FederationError(
            f"min_clients={min_clients}, but a round has only {cohort} of {clients} clients (fraction={fraction}); "
            "every round would fail"
        )


def check_partition(partition: Any) -> None:
    """Raise FederationError unless ``partition`` is None or can split."""
    if partition is not None and not isinstance(partition, Partition):
        raise FederationError(
            f"partition={shown(partition)} is no Partition: give one, such as IIDPartition(clients=10), or None if the "
            "data set is a ClientDatasets"
        )


def attacks_of(adversaries: Any) -> tuple[Attack, ...]:
    """Return one attack or several as a tuple; raise FederationError for anything else."""
    several = isinstance(adversaries, Sequence) and not isinstance(adversaries, str)
    attacks = adversaries if several else (adversaries,)
    wrong = [each for each in attacks if not isinstance(each, Attack)]
    if wrong:
        raise FederationError(
            f"adversaries: {shown(wrong[0])} is no attack: give one, such as SignFlip(clients=0.3), or a list"
        )
    return tuple(attacks)


def check_privacy(privacy: Any) -> None:
    """Raise FederationError unless ``privacy`` is None or an UpdatePrivacy."""
    if privacy is not None and not isinstance(privacy, UpdatePrivacy):
        raise FederationError(
            f"privacy={shown(privacy)} is no UpdatePrivacy: give UpdatePrivacy(clip=1.0, noise_multiplier=1.0), or "
            "None; an ExamplePrivacy is a callback of the Trainer, beside FederatedBayes"
        )
