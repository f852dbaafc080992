"""Settings of a federation: one frozen, validated value."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning_fedbayes.clients.learned import PosteriorSource
from lightning_fedbayes.clients.privacy import UpdatePrivacy
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.fusion import FusionRule
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.methods import Method, get_method
from lightning_fedbayes.modules.sources.curvature import SWAG, Laplace
from lightning_fedbayes.server.guard import USUAL, Safeguards
from lightning_fedbayes.server.plan import Fraction, RoundPlan, check_fraction, cohort_size
from lightning_fedbayes.server.schedule import Asynchronous
from lightning_fedbayes.server.weighting import CohortWeights, check_weighting

EngineName = Literal["auto", "sequential", "vectorized"]
Keep = Literal["optimizer", "posterior"]
BufferPolicy = Literal["average", "local", "frozen"]
Fusion = str | FusionRule | AutoFusion | Method
Weighting = str | CohortWeights
Source = Laplace | SWAG | PosteriorSource
MOST_DESCRIBED = 300
"""Most characters of a partition, or of adversaries, among the settings that are logged."""


class Sending(NamedTuple):
    """A round as adversaries see it: the clients that send, their global start, all names, and the seed."""

    plan: RoundPlan
    posterior: GaussianPosterior
    names: tuple[str, ...]
    seed: int


Adversaries = Callable[[Sending], Callable[[ClientUpdate | None], Iterable[ClientUpdate | ClientFailure]]]
"""Called at the start of a round. What it returns is called with each update, and with None after the last."""


@dataclass(frozen=True)
class Kept:
    """Choice of what every client keeps from round to round, in addition to the method's tensors, and where.

    Raises FederationError if an argument cannot be used.

    Args:
        what: "optimizer", "posterior" or both. See :class:`~lightning_fedbayes.FederatedBayes`.
        folder: for this run only, on a disk that all processes share. Clients' states lie there in an SQLite file, a
            round in one transaction. They are neither in memory nor in checkpoints, which refer to the folder: keep it
            to resume from one of the last two checkpoints. None: in memory, and in every checkpoint.
    """

    what: Sequence[Keep] = ()
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        what = errors.check_strings("keep", self.what, "give 'optimizer', 'posterior' or both")
        object.__setattr__(self, "what", what)
        for each in self.what:
            errors.check_choice("keep", each, get_args(Keep))
        if self.folder is not None:
            errors.check_path("folder", self.folder)


@dataclass(frozen=True)
class FederationSettings:
    """Every choice of a federation. :class:`~lightning_fedbayes.FederatedBayes` describes each argument.

    Arguments are checked and brought into one form: ``fusion`` becomes a :class:`~lightning_fedbayes.Method`, one
    pattern of local parameters a tuple of one. Raises FusionError or FederationError if an argument cannot be used. The
    message names it, the rule and the remedy.
    """

    partition: Partition | None = None
    local_epochs: int = 1
    fraction: Fraction = 1.0
    fusion: Fusion | None = None
    weighting: Weighting = "train_size"
    engine: EngineName | int = "auto"
    keep: Sequence[Keep] | Kept = ()
    buffers: BufferPolicy = "average"
    local_parameters: Sequence[str] = ()
    safeguards: Safeguards = USUAL
    adversaries: Adversaries | None = None
    privacy: UpdatePrivacy | None = None
    posterior: Source | None = None
    schedule: Asynchronous | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fusion is not None:
            self._set("fusion", get_method(self.fusion))
        check_weighting(self.weighting)
        remedy = "give a Partition, such as IIDPartition(clients=10), or None if the data set is a ClientDatasets"
        errors.check_kind("partition", self.partition, Partition | None, remedy)
        errors.check_at_least("local_epochs", self.local_epochs, 1)
        errors.check_kind("safeguards", self.safeguards, Safeguards, "give fb.Safeguards(...)")
        check_fraction(self.fraction)
        if isinstance(self.engine, int):
            errors.check_at_least("engine", self.engine, 1)
        else:
            errors.check_choice("engine", self.engine, get_args(EngineName))
        self._set("keep", self.keep if isinstance(self.keep, Kept) else Kept(self.keep))
        errors.check_choice("buffers", self.buffers, get_args(BufferPolicy))
        errors.check_at_least("seed", self.seed, -errors.LARGEST)
        remedy = "give patterns of names, such as ['head.*']"
        self._set("local_parameters", errors.check_strings("local_parameters", self.local_parameters, remedy))
        remedy = "give a function of a round that returns what changes its updates, or None"
        errors.check_kind("adversaries", self.adversaries, Callable | None, remedy)
        remedy = (
            "give UpdatePrivacy(clip=1.0, noise_multiplier=1.0), or None; ExamplePrivacy is a callback of the Trainer"
        )
        errors.check_kind("privacy", self.privacy, UpdatePrivacy | None, remedy)
        remedy = "give fb.Laplace(), fb.SWAG(), a PosteriorSource or None"
        errors.check_kind("posterior", self.posterior, Source | None, remedy)
        remedy = "give fb.Asynchronous(...), or None for rounds"
        errors.check_kind("schedule", self.schedule, Asynchronous | None, remedy)
        if self.schedule is not None and self.fraction != 1.0:
            why = "say how many clients train at once by concurrency="
            raise FederationError(f"fraction={self.fraction} with schedule=: {why}")
        if self.fusion is None:
            return
        method = self.method
        conflict = method.conflict(self.weighting, self.privacy is not None)
        if conflict is not None:
            raise FederationError(f"{conflict[0]} with fusion='{method.name}': {conflict[1]}")
        if method.own_starts and isinstance(self.posterior, SWAG):
            why = "a SWAG has no prior. Take Laplace(), IVON or Bayesian layers"
            raise FederationError(f"fusion='{method.name}' with posterior=SWAG(): {why}")
        self._set("weighting", method.weighting or self.weighting)
        if method.keeps_posteriors and not self.keeps_posteriors:
            self._set("keep", Kept((*self.kept.what, "posterior"), self.kept.folder))

    @property
    def method(self) -> Method:
        """The federated method. For ``fusion=None`` it is known once the network is."""
        assert isinstance(self.fusion, Method)
        return self.fusion

    @property
    def keeps_posteriors(self) -> bool:
        """Return True if every client keeps the posterior that it has trained last."""
        return "posterior" in self.kept.what

    def is_personal(self, module: Any) -> bool:
        """Return True if each client predicts by its posterior, or its local parameters or buffers."""
        own = self.local_parameters or getattr(module, "local_parameters", ()) or self.buffers == "local"
        return self.keeps_posteriors or bool(own)

    @property
    def kept(self) -> Kept:
        """Return what clients keep, and where."""
        assert isinstance(self.keep, Kept)
        return self.keep

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def server_options(self) -> dict[str, Any]:
        """Return the arguments of :class:`~lightning_fedbayes.server.Server`."""
        late = None if self.schedule is None else self.schedule.late
        hides = self.privacy is not None and self.method.totals  # noise hides what is true of sums
        safeguards = replace(self.safeguards, max_influence=None) if hides else self.safeguards
        return {"fusion": self.fusion, "weighting": self.weighting, "safeguards": safeguards, "late": late}

    def described(self) -> dict[str, Any]:
        """Return the settings for loggers: numbers, strings and lists of them, in the order of the arguments."""
        rule = None if self.fusion is None else self.method.rule
        rules = rule.rules if isinstance(rule, AutoFusion) else () if rule is None else (rule,)
        weighting = self.weighting if isinstance(self.weighting, str) else getattr(self.weighting, "__name__", "custom")
        forms = {
            "partition": errors.shown(self.partition, MOST_DESCRIBED),
            "fusion": None if self.fusion is None else self.method.described,
            "weighting": weighting if not rules or any(rule.uses_weights for rule in rules) else "none",
            "keep": list(self.kept.what),
            "local_parameters": list(self.local_parameters),
            "adversaries": None if self.adversaries is None else errors.shown(self.adversaries, MOST_DESCRIBED),
            "privacy": repr(self.privacy),
            "posterior": repr(self.posterior),
            "schedule": None if self.schedule is None else repr(self.schedule),
        }
        found = {name: forms.get(name, value) for name, value in vars(self).items()}
        return found | found.pop("safeguards").__dict__


def check_cohort(clients: int, fraction: Fraction, min_clients: int) -> None:
    """Raise FederationError if every round would have too few clients."""
    cohort = cohort_size(clients, fraction)
    if cohort < min_clients:
        raise FederationError(
            f"min_clients={min_clients}, but a round has only {cohort} of {clients} clients (fraction={fraction}); "
            "every round would fail"
        )
