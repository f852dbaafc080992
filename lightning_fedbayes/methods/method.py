"""A federated method: what clients start from, minimise, send and keep, and how the server fuses it, in one class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.messages import ClientUpdate, check_mapping
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.private_torch import version_if_any
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.fusion.registry import get_rule, rule_name
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.late import Late

Tensors = dict[str, Tensor]
PREFIX = "method/"
"""Prefix of a method's tensors among the buffers that travel between clients and server."""


@dataclass(frozen=True)
class Shared:
    """Message of the server to every client of a round.

    Args:
        posterior: the global posterior, from which clients start. Of a network without variances a point mass.
        tensors: of the method, name → tensor: from :meth:`Method.init`, or from the last :meth:`Method.fuse`.
        share: of one client among all, 1 / K.
        is_new: True until the server has fused a round.
        notes: what a method works out once for all clients of the round, such as sums over parameters.
    """

    posterior: GaussianPosterior
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    share: float = 1.0
    is_new: bool = True
    notes: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Participant:
    """Client of a round, as far as a method knows it.

    Args:
        number, num_examples: the client's, from 0, and its number of training examples.
        kept: what it has kept of its last round for this problem, name → tensor. Empty in its first.
        problem: which of its problems this is, from 0 (:attr:`Method.problems`).
        steps, rate: steps of the optimizer in this round, and their learning rate, if it is plain SGD. None for others.
        gaussian: names in the posterior of the parameters with a variance.
        frozen: names of those that do not train, though they are federated.
    """

    number: int
    num_examples: int
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    problem: int = 0
    steps: int = 0
    rate: float | None = None
    gaussian: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, least in (("number", 0), ("num_examples", 1), ("problem", 0), ("steps", 0)):
            errors.check_at_least(name, getattr(self, name), least)
        if self.rate is not None:
            errors.check_number("rate", self.rate, "[0, inf)")
        check_mapping("kept", self.kept, Tensor)


@dataclass(frozen=True)
class Quadratic:
    r"""A term in the loss of a client, about the global values :math:`\theta_g` of what it trains.

    .. math:: \tfrac{\mu}{2} \|\theta - \theta_g\|^2 - \langle v, \theta - \theta_g \rangle

    The loss is a mean over examples. The term is a part of it, not a change of gradients: it is counted once however
    many batches are accumulated, clipped with the gradient, and told apart as the figure "added_loss".

    Args:
        strength: :math:`\mu`; or name → a value of every entry.
        slope: v, name in the posterior → tensor of the mean's shape. Names that are missing have none.
        names: of the parameters that the term is of. None: all, with the ρ of Bayesian layers.
    """

    strength: float | Mapping[str, Tensor] = 0.0
    slope: Mapping[str, Tensor] = field(default_factory=dict)
    names: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.strength, Mapping):
            check_mapping("strength", self.strength, Tensor)
        else:
            errors.check_number("strength", self.strength)
        check_mapping("slope", self.slope, Tensor)
        if self.names is not None:
            errors.check_strings("names", self.names, "give names of the posterior, or None for all")

    def __call__(self, values: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensor:
        """Return the term, a scalar, in a loop by hand. Raise FederationError unless names and shapes go together."""
        remedy = "give dict(network.named_parameters()) and the mean of the posterior that the round began with"
        with errors.raised_as(FederationError, "Quadratic: values and start do not go together", remedy):
            names = [name for name in values if self.names is None or name in self.names]
            moves = {name: values[name] - start[name] for name in names}
            strength = self.strength
            each = strength if isinstance(strength, Mapping) else dict.fromkeys(moves, strength)
            terms = [(each[name] / 2 * move.square()).sum() for name, move in moves.items() if name in each]
            terms += [-(slope * moves[name]).sum() for name, slope in self.slope.items() if name in moves]
            return torch.stack(terms).sum() if terms else torch.zeros(())


@dataclass(frozen=True)
class LocalProblem:
    """Problem of a client: the terms that its loss gains, and where it starts.

    Args:
        quadratic: a term of the loss. None for none.
        prior: a quadratic, in nats, in the place of the divergence of the Gaussian parameters from the network's own
            prior, which the loss of a client weighs. Widths then stay as they are. Of every name with a slope. None:
            the prior of :meth:`Method.prior`, or the network's.
        start: name in the posterior → the mean at which the client starts. Missing ones start at the global value.
        measures: the method wants to know the mean gradient and the curvature of the data along training, see
            :class:`Trained`.
    """

    quadratic: Quadratic | None = None
    prior: Quadratic | None = None
    start: Mapping[str, Tensor] = field(default_factory=dict)
    measures: bool = False

    def __post_init__(self) -> None:
        for name, each in (("quadratic", self.quadratic), ("prior", self.prior)):
            if each is not None:
                errors.check_kind(name, each, Quadratic, "give an fb.methods.Quadratic")
        check_mapping("start", self.start, Tensor)


@dataclass(frozen=True)
class Trained:
    """A client after its training.

    Args:
        posterior: as it has been trained. Its tensors are overwritten after :meth:`Method.report`.
        gradients: name → mean gradient along training of the client's data, without what the method has added: of
            a deterministic parameter of the mean loss times the number of examples, of a Gaussian one in nats. Empty
            if it was not asked for, without the names that had none.
        precisions: name → curvature of the data in nats, of the Gaussian parameters of layers, likewise.
    """

    posterior: GaussianPosterior
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    precisions: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        errors.check_kind("posterior", self.posterior, GaussianPosterior, "give a GaussianPosterior")
        check_mapping("gradients", self.gradients, Tensor)
        check_mapping("precisions", self.precisions, Tensor)


@dataclass(frozen=True)
class Report:
    """Result of a client's training: what it sends, and what it keeps.

    Args:
        posterior: what it sends.
        kept: what it keeps, name → tensor. It never leaves the client.
        sent: what else it sends, by the names of :meth:`Method.init`. The server averages it, or adds it up
            (:attr:`Method.adds`).
    """

    posterior: GaussianPosterior
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    sent: Mapping[str, Tensor] = field(default_factory=dict)

    def update(self, client: int, num_examples: int, buffers: Mapping[str, Tensor] | None = None) -> ClientUpdate:
        """Return a client's message in a training loop by hand. Raise FederationError if it holds more than tensors."""
        for name, given in (("buffers", {} if buffers is None else buffers), ("sent", self.sent)):
            check_mapping(name, given, Tensor)
        return ClientUpdate(client, num_examples, self.posterior, joined(buffers or {}, self.sent))


class Method:
    """A federated algorithm. A subclass overrides the hooks that it needs. As it is, it averages by a rule.

    A round: the server sends a :class:`Shared`. Every client of the cohort asks :meth:`problem` what to minimise,
    trains, and :meth:`report` says what it sends and keeps. The ``rule`` fuses the posteriors by the clients' weights,
    which average what else was sent. :meth:`fuse` makes the new global model of both.

    Hooks see one client and no engine: a method runs client by client, in a stack, in processes and over Flower. Raises
    FusionError if there is no such rule.

    Args:
        rule: fuses the posteriors: a name, or a rule object.
    """

    registered: ClassVar[str] = ""
    """Name by which users choose the method. :func:`~lightning_fedbayes.register_method` sets it."""
    keeps: ClassVar[str] = ""
    """Name of what clients keep and cannot lose, for messages, such as "its control variate". "" if nothing."""
    sends: ClassVar[bool] = False
    """True if clients send tensors with the names of :meth:`init` with their posteriors."""
    sent: ClassVar[tuple[str, ...]] = ()
    """Names that they send. Empty for all."""
    per_example: ClassVar[tuple[str, ...]] = ()
    """Those of them that count something, at least 0: the server compares their size for each example."""
    told: ClassVar[tuple[str, ...]] = ()
    """Names that the server sends to clients over a network. Empty for all."""
    sends_changes: ClassVar[bool] = False
    """True if they send the changes of what they keep under the same names. The server then bounds what they keep, and
    has them keep what it counts."""
    adds: ClassVar[bool] = False
    """True if the server adds up what else clients send, as for sites. Otherwise it averages it by their weights."""
    sends_means: ClassVar[bool] = False
    """True if the posteriors that clients send are point masses, whatever the global one is."""
    keeps_optimizer: ClassVar[bool] = False
    """True if clients keep the state of their optimizers from round to round, unless told otherwise."""
    keeps_posteriors: ClassVar[bool] = False
    """True if every client keeps the posterior that it has trained last."""
    weighting: ClassVar[str] = ""
    """Weighting of the clients, where the method says so. "": that of the federation."""
    totals: ClassVar[bool] = False
    """True if the global values are sums of the clients', of which the server leaves out those that stand out."""
    problems: ClassVar[int] = 1
    """Problems that a client solves in a round. It sends the first one's report, and the last is its personal one."""
    own_starts: ClassVar[bool] = False
    """True if a client goes on with the posterior that it has trained last, not with the global one."""

    def __init__(self, rule: str | FusionRule | AutoFusion) -> None:
        chosen = AutoFusion() if isinstance(rule, str) and rule == "auto" else rule
        self.rule = chosen if isinstance(chosen, AutoFusion) else get_rule(chosen)

    @property
    def auto(self) -> AutoFusion | None:
        """The choice of a rule in every round, if there is one."""
        return self.rule if isinstance(self.rule, AutoFusion) else None

    @property
    def name(self) -> str:
        """The name in messages: the method's, or the rule's."""
        return self.registered or self._rule_name

    @property
    def _rule_name(self) -> str:
        return f"auto({', '.join(self.rule.names)})" if isinstance(self.rule, AutoFusion) else rule_name(self.rule)

    @property
    def described(self) -> str:
        """The name with the rule, and with the arguments that are numbers and text, for logs."""
        own = [(key, value) for key, value in vars(self).items() if isinstance(value, int | float | str)]
        options = [f"{key}={value}" for key, value in own if key[0] != "_"]
        options = [self._rule_name, *options] if self.registered else options
        return f"{self.name}({', '.join(options)})" if options else self.name

    def __repr__(self) -> str:
        return self.described

    def agreement(self) -> str:
        """Return what server and clients must have in common, in words. "" if a client needs to know nothing.

        By default the method with its arguments, if it does more at the server than its rule.
        """
        return "" if type(self).init is Method.init and type(self).fuse is Method.fuse else self.described

    def conflict(self, weighting: Any, private: bool) -> tuple[str, str] | None:
        """Return the first setting that the method does not go with, and why. None if there is none.

        ``weighting`` is of the federation. ``private``: clients add noise to what they send.
        """
        if private and self.sends:
            why = "a client sends more than a posterior, and noise protects only that"
            return "privacy=", f"{why}. Take a method that sends no more"
        return None

    def tells(self, key: str) -> bool:
        """Return whether clients are sent what is called ``key`` in a message of the global model (:attr:`told`)."""
        name = key.removeprefix(f"buffer/{PREFIX}")
        return not self.told or name == key or name in self.told

    def init(self, posterior: GaussianPosterior) -> Tensors:
        """Return the tensors that the server sends with the posterior, as before the first round.

        They are the method's state at the server, kept in its checkpoints. Where clients answer (:attr:`sends`), by
        tensors of the same names and shapes. ``posterior`` is the global one before training.
        """
        return {}

    def prior(self, shared: Shared) -> GaussianPosterior | None:
        """Return the prior of all clients in this round. None: the network's."""
        return None

    def prior_of(self, name: str) -> tuple[float, float] | None:
        """Return mean and standard deviation of a tensor's prior, which the network must have, or None without one."""
        return None

    def problem(self, shared: Shared, client: Participant) -> LocalProblem:
        """Return what a client minimises. At the client, before its training."""
        return LocalProblem()

    def check(self, shared: Shared, client: Participant) -> None:
        """Raise FederationError if what a client has kept does not go with the network. Before each round."""

    def report(self, shared: Shared, client: Participant, trained: Trained) -> Report:
        """Return what a client sends and keeps. After its training. Raise FusionError if it has nothing to send."""
        return Report(trained.posterior)

    def fuse(
        self, shared: Shared, fused: GaussianPosterior, averages: Mapping[str, Tensor], heard: float
    ) -> tuple[GaussianPosterior, Mapping[str, Tensor]]:
        """Return the new global posterior and the method's new tensors, of the names of :meth:`init`. At the server.

        Args:
            shared: what the clients started from.
            fused: the rule's result.
            averages: of what else the clients have sent, by their weights, or its sums (:attr:`adds`). Empty if they
                do not (:attr:`sends`).
            heard: share of all clients that have sent something.
        """
        return fused, shared.tensors

    def doubt(self, shared: Shared, posterior: GaussianPosterior, sent: Mapping[str, Tensor]) -> str | None:
        """Return why what a client has ``sent`` with its posterior cannot come from training. None if it can.

        At the server, which leaves such a client out. Names, shapes and finite values have been checked, and sizes will
        be compared among the clients.
        """

    def slope(self, shared: Shared) -> Tensor:
        """Return the gradient of all clients' objective at the global means, of a method that :attr:`adds`, shape (P,).

        Clients whose moves go another way than down there, and than all others', are left out. By 0 nobody is.
        """
        return shared.posterior.flatten()[0].new_zeros(shared.posterior.num_parameters)

    def figures(self, shared: Shared, posterior: GaussianPosterior, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Return figures of a round for the history, name → value. At the server.

        The clients started from ``shared``. ``posterior`` and ``tensors`` are the result of :meth:`fuse`.
        """
        return {}

    @staticmethod
    def without(posterior: GaussianPosterior, kept: Mapping[str, Tensor]) -> GaussianPosterior | None:
        """Return the global posterior without a client's part, for :func:`~lightning_fedbayes.remove_client`.

        ``kept`` is what the client has kept (:meth:`report`), or what the server has counted of it. None if that is no
        part of the posterior by this method.
        """
        return None

    def check_late(self, posterior: GaussianPosterior) -> None:
        """Raise FederationError if messages cannot be taken that come late. Before the first round."""
        why = f"{type(self).__name__} fuses what clients send about one and the same global model, and a late message"
        remedy = "is about an older one. Take 'sites', or an averaging rule"
        raise FederationError(f"schedule= with fusion='{self.name}': {why} {remedy}")

    def late(
        self, sent: GaussianPosterior, started: Shared, now: Shared, staleness: int, how: Late
    ) -> GaussianPosterior:
        """Return what a client would have sent if it had started from the present global model. At the server.

        Args:
            sent: by the client.
            started, now: what it started from, and what clients start from that begin now.
            staleness: versions of the global model between them. 0 for a message that is not late.
            how: the way to take it, for methods that average.

        Raise FusionError if that is no posterior.
        """
        return how.taken(sent, started.posterior, now.posterior, staleness)

    def counted(self, posterior: GaussianPosterior) -> GaussianPosterior | None:
        """Return the prior that ``posterior`` contains once, as in an ELBO. None if it contains none or many."""
        return None

    def advice(self, posterior: GaussianPosterior, round: int, clients: int) -> str | None:
        """Return what a user should know after ``round`` rounds, from 0, of this many clients, said once, or None."""
        return None


def problem_of(method: Method, shared: Shared, client: Participant) -> LocalProblem:
    """Return what ``method`` asks of a client. Raise FederationError unless it is a LocalProblem."""
    problem = method.problem(shared, client)
    if not isinstance(problem, LocalProblem):  # the name is looked up for an error alone: this runs for every client
        errors.check_kind(f"{method.name}: problem(...)", problem, LocalProblem, "return an fb.methods.LocalProblem")
    return problem


def report_of(method: Method, shared: Shared, client: Participant, trained: Trained) -> Report:
    """Return what ``method`` makes of a client's training.

    Raise FederationError if it is no Report of tensors, sends what the method does not say, or has written into what
    the client has trained.
    """
    if type(method).report is Method.report and not method.sends:
        return Report(trained.posterior)
    tensors = [*trained.posterior.mean.values(), *trained.posterior.variance.values()]
    versions = [version_if_any(each) for each in tensors]
    report = method.report(shared, client, trained)
    if not isinstance(report, Report):
        errors.check_kind(f"{method.name}: report(...)", report, Report, "return an fb.methods.Report")
    for name, given in (("kept", report.kept), ("sent", report.sent)):
        check_mapping(f"{method.name}: {name}", given, Tensor)
    expected = set(method.sent or shared.tensors) if method.sends else set()
    if report.sent.keys() != expected:
        wanted = f"send the names of init, {errors.listed(expected)}" if expected else "say sends = True in its class"
        found = errors.listed(report.sent) or "nothing"
        raise FederationError(f"{method.name}: a client sends {found} with its posterior; {wanted}, or send nothing")
    if versions != [version_if_any(each) for each in tensors]:
        what = f"{method.name}: report(...) has written into the posterior that the client has trained"
        raise FederationError(f"{what}: make a new GaussianPosterior of what it sends")
    return report


def split(buffers: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Return the network's own buffers, and a method's tensors, which travel among them, by their own names."""
    own = {name: value for name, value in buffers.items() if not name.startswith(PREFIX)}
    return own, {name.removeprefix(PREFIX): value for name, value in buffers.items() if name not in own}


def joined(buffers: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensors:
    """Return buffers with a method's ``tensors`` among them, as they travel."""
    return {**buffers, **{f"{PREFIX}{name}": value for name, value in tensors.items()}}
