"""Clients that lie, to test a defence: what they send in place of their updates, and labels that they flip.

An attack, or several in an :class:`Attacks`, is what ``FederatedBayes(adversaries=...)`` takes.
Attackers train honestly.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.settings import Sending
from lightning_fedbayes.core.errors import FederationError, FusionError, check_number
from lightning_fedbayes.core.messages import ClientFailure
from lightning_fedbayes.core.posterior import is_zero
from lightning_fedbayes.core.seeding import derive_seed, generator
from lightning_fedbayes.data import clients_of
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.methods.method import joined, split

Attackers = float | Sequence[int | str]
"""Clients that attack: a share of all clients in (0, 1], or numbers or names."""


class HonestMoments:
    r"""Mean and standard deviation, per entry, of vectors that arrive one by one: Welford's recursion.

    .. math:: m_k = m_{k-1} + (x_k - m_{k-1})/k, \qquad M_k = M_{k-1} + (x_k - m_{k-1})(x_k - m_k)
    """

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like)
        self._squares = torch.zeros_like(like)

    def add(self, vector: Tensor) -> None:
        """Add one vector, shape (P,)."""
        self.count += 1
        difference = vector - self.mean
        self.mean = self.mean + difference / self.count
        self._squares += difference * (vector - self.mean)

    @property
    def std(self) -> Tensor:
        """Return the standard deviation of the population, √(M/k), shape (P,); needs at least one vector."""
        return (self._squares / self.count).sqrt()


@dataclass(frozen=True)
class Knowledge:
    """Knowledge of an adversary about its round.

    Args:
        previous: means of the global posterior that the clients started from, μ_o, float64 of shape (P,).
        generator: the only source of randomness: a separate CPU generator for every round, client and attack.
        honest: moments of the means that the valid honest clients sent, for an attack with ``needs_honest``.
        cohort: number of clients in the round, n.
        adversaries: number of clients in the round that attack, m.
    """

    previous: Tensor
    generator: torch.Generator
    honest: HonestMoments
    cohort: int
    adversaries: int


class UpdateAttack(ABC):
    """Base class of clients that train honestly and then send false means; variances stay as they are.

    Args:
        clients: share of all clients in (0, 1], of which ⌊share·K + ½⌋ are drawn (:func:`assign`); or numbers or names.

    Attributes:
        needs_honest: if true, the attack waits for the honest clients of the round. If none of them is valid, the
            adversary sends its own update unchanged.
    """

    clients: Attackers
    ranges: ClassVar[Mapping[str, str]] = {}
    """Numbers among the arguments → the interval that they lie in."""
    needs_honest: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for argument, interval in self.ranges.items():
            if (value := getattr(self, argument)) is not None:
                check_number(f"{type(self).__name__}: {argument}", value, interval)
        if not isinstance(self.clients, Sequence):
            check_number(f"{type(self).__name__}: clients", self.clients, "(0, 1]")
        else:
            object.__setattr__(self, "clients", tuple(self.clients))

    def __call__(self, round: Sending) -> Callable[[fb.ClientUpdate | None], Iterator[fb.ClientUpdate | ClientFailure]]:
        """Return what changes the updates of a round."""
        return RoundAdversaries(assign([self], round.names, round.seed), round).send

    def send(self, posterior: fb.GaussianPosterior, knowledge: Knowledge) -> fb.GaussianPosterior:
        """Return the posterior to send in place of ``posterior``, with the same names, shapes and dtypes."""
        if self.needs_honest and knowledge.honest.count == 0:
            return posterior
        mean = self.falsify(posterior.flatten()[0], knowledge)
        return fb.GaussianPosterior(posterior.unflatten(mean, None).mean, posterior.variance)

    def send_beside(self, tensors: Mapping[str, Tensor], knowledge: Knowledge) -> dict[str, Tensor]:
        """Return what to send in place of a method's own ``tensors``: falsified as means are, about 0.

        Single numbers stay, and so does everything where the attack waits for honest means.
        """
        found = dict(tensors)
        for name, value in tensors.items() if not self.needs_honest else ():
            if value.numel() > 1 and value.is_floating_point():
                flat = value.flatten().double()
                false = self.falsify(flat, replace(knowledge, previous=torch.zeros_like(flat)))
                found[name] = false.view(value.shape).to(value.dtype)
        return found

    @abstractmethod
    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return the means to send, shape (P,), for those that the client trained, μ, float64; do not modify them."""


@dataclass(frozen=True)
class Attacks:
    """Several attacks of one federation; a client with several applies them one after the other."""

    attacks: Sequence[UpdateAttack]

    def __call__(self, round: Sending) -> Callable[[fb.ClientUpdate | None], Iterator[fb.ClientUpdate | ClientFailure]]:
        """Return what changes the updates of a round."""
        return RoundAdversaries(assign(self.attacks, round.names, round.seed), round).send


def assign(attacks: Sequence[UpdateAttack], names: Sequence[str], seed: int) -> dict[int, tuple[UpdateAttack, ...]]:
    """Return client number → its attacks, in their order, without the honest clients.

    Shares are drawn from (seed, "adversaries") and are disjoint. A client that another attack names may be drawn too.

    Raises:
        FederationError: a client that is not there, a share of less than half a client, or too many shares.
    """
    order = torch.randperm(len(names), generator=generator(seed, "adversaries")).tolist()
    assigned: dict[int, tuple[UpdateAttack, ...]] = {}
    for attack in attacks:
        if not isinstance(attack.clients, Sequence):
            count = int(attack.clients * len(names) + 0.5)
            if not 0 < count <= len(order):
                raise FederationError(
                    f"{attack}: {count} of {len(names)} clients; at least one, and {len(order)} are left (shares are "
                    "disjoint); give another share, or numbers"
                )
            chosen, order = order[:count], order[count:]
        else:
            chosen = [names.index(each) if each in names else each for each in attack.clients]
            wrong = [each for each in chosen if not isinstance(each, int) or not 0 <= each < len(names)]
            if wrong:
                raise FederationError(f"{attack}: there is no client {wrong[0]!r} among {len(names)}")
        for client in chosen:
            assert isinstance(client, int)
            assigned[client] = (*assigned.get(client, ()), attack)
    return assigned


class RoundAdversaries:
    """Replaces the updates of the clients that attack in one round.

    Of the honest clients only moments are kept, and those only if an adversary waits for them.
    """

    def __init__(self, attacks: Mapping[int, Sequence[UpdateAttack]], round: Sending) -> None:
        self.round = round
        self._attackers = attacks.keys() & set(round.plan.cohort)
        self._attacks = {client: attacks[client] for client in self._attackers}
        self._mean = round.posterior.flatten()[0] if self._attacks else torch.zeros(0)
        self._observes = any(map(self.waits, self._attackers))
        self._honest = HonestMoments(self._mean)
        self._held_back: list[fb.ClientUpdate] = []

    def waits(self, client: int) -> bool:
        """Return True if a client sends its update only after those of the honest clients."""
        return any(attack.needs_honest for attack in self._attacks.get(client, ()))

    def send(self, update: fb.ClientUpdate | None) -> Iterator[fb.ClientUpdate | ClientFailure]:
        """Yield what is sent in place of an update; of None, what was held back."""
        if update is None:
            for each in self._held_back:
                try:
                    yield self.falsified(each)
                except FusionError as refusal:
                    yield ClientFailure(each.client, refusal, each.num_examples, each.seconds)
        elif self.waits(update.client):
            self._held_back.append(update.clone())
        else:
            yield self.falsified(update)

    def falsified(self, update: fb.ClientUpdate) -> fb.ClientUpdate:
        """Return the update that a client sends; an honest client sends ``update`` itself."""
        attacks = self._attacks.get(update.client)
        if not attacks:
            if self._observes:
                mean = update.posterior.ordered(self.round.posterior.names).flatten()[0]
                if mean.isfinite().all():
                    self._honest.add(mean)
            return update
        check_structure(update.posterior, self.round.posterior, f"client {update.client}")
        posterior = update.posterior.ordered(self.round.posterior.names)
        own, beside = split(update.buffers)
        for attack in attacks:
            posterior = attack.send(posterior, self._knowledge(update.client, attack))
            if beside:
                beside = attack.send_beside(beside, self._knowledge(update.client, attack))
        return replace(update, posterior=posterior, buffers=joined(own, beside), kept=None)

    def _knowledge(self, client: int, attack: UpdateAttack) -> Knowledge:
        """Return the knowledge of ``client``, with a generator for this round, client and attack."""
        plan, name = self.round.plan, zlib.crc32(type(attack).__name__.encode())
        draws = torch.Generator().manual_seed(derive_seed(self.round.seed, "attack", plan.round, client, name))
        return Knowledge(self._mean, draws, self._honest, len(plan.cohort), len(self._attackers))


# -- attacks of clients that know nothing of each other ----------------------------------------------------------------


@dataclass(frozen=True)
class SignFlip(UpdateAttack):
    r"""Sends the update with the opposite sign, :math:`\mu_o - s\,(\mu - \mu_o)`.

    With m of K clients flipped by s = 1, an average moves about 1 − 2m/K as far as without them.
    """

    clients: Attackers
    scale: float = 1.0

    ranges: ClassVar[Mapping[str, str]] = {"scale": "(0, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o − s (μ − μ_o)."""
        return knowledge.previous - self.scale * (mean - knowledge.previous)


@dataclass(frozen=True)
class ScaledUpdate(UpdateAttack):
    r"""Sends a multiple of the update, :math:`\mu_o + f\,(\mu - \mu_o)`: model replacement; a free rider with f = 0."""

    clients: Attackers
    factor: float = 10.0

    ranges: ClassVar[Mapping[str, str]] = {"factor": "(-inf, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o + f (μ − μ_o)."""
        return knowledge.previous + self.factor * (mean - knowledge.previous)


@dataclass(frozen=True)
class RandomUpdate(UpdateAttack):
    r"""Sends an update of the honest length in a random direction, :math:`\mu_o + \|\mu - \mu_o\|\,g / \|g\|`."""

    clients: Attackers

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o + ‖μ − μ_o‖ g/‖g‖."""
        noise = torch.randn(mean.shape, generator=knowledge.generator, dtype=mean.dtype).to(mean.device)
        return knowledge.previous + (mean - knowledge.previous).norm() * noise / noise.norm()


@dataclass(frozen=True)
class GaussianVector(UpdateAttack):
    r"""Sends noise in place of the parameters, :math:`N(0, s^2 I)`; [Untrusted] uses s = 1."""

    clients: Attackers
    std: float = 1.0

    ranges: ClassVar[Mapping[str, str]] = {"std": "(0, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return a draw of N(0, s²) per parameter."""
        noise = torch.randn(mean.shape, generator=knowledge.generator, dtype=mean.dtype)
        return self.std * noise.to(mean.device)


@dataclass(frozen=True)
class NotANumber(UpdateAttack):
    """Sends NaN as every mean and every variance that is not 0; the server refuses it before the fusion rule."""

    clients: Attackers

    def send(self, posterior: fb.GaussianPosterior, knowledge: Knowledge) -> fb.GaussianPosterior:
        """Return NaN everywhere except variances of 0."""
        means = super().send(posterior, knowledge).mean
        variances = {n: v if is_zero(v) else torch.full_like(v, torch.nan) for n, v in posterior.variance.items()}
        return fb.GaussianPosterior(means, variances)

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return NaN."""
        return torch.full_like(mean, torch.nan)


@dataclass(frozen=True)
class FalseVariance(UpdateAttack):
    r"""Sends honest means with false variances, :math:`f \sigma^2`; point masses stay as they are.

    A client that claims to be sure (f < 1) owns a product of densities, and one that claims to know nothing (f > 1)
    spoils an average of variances. Under sites the change of the precision is divided by f.
    """

    clients: Attackers
    factor: float = 0.0

    ranges: ClassVar[Mapping[str, str]] = {"factor": "[0, inf)"}

    def send(self, posterior: fb.GaussianPosterior, knowledge: Knowledge) -> fb.GaussianPosterior:
        """Return the means as they are, with f σ² in place of σ²."""
        variances = {n: v if is_zero(v) else v * self.factor for n, v in posterior.variance.items()}
        return fb.GaussianPosterior(posterior.mean, variances)

    def send_beside(self, tensors: Mapping[str, Tensor], knowledge: Knowledge) -> dict[str, Tensor]:
        """Return false precisions where a method sends such; by a factor of 0 infinite ones."""
        return {name: value / self.factor if name == "precision" else value for name, value in tensors.items()}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return the means as they are."""
        return mean


# -- attacks of clients that know the honest updates of the round ------------------------------------------------------


@dataclass(frozen=True)
class ALittleIsEnough(UpdateAttack):
    r"""Sends the honest mean, shifted within the spread of the honest clients, :math:`\bar\mu - z\,s`.

    s is the deviation of the population, √(Σ(x − x̄)²/n), per entry; z is None for :func:`largest_unnoticed_shift`.

    Source: Baruch et al. 2019, A Little Is Enough. There, the adversaries estimate mean and deviation from their own
    honest updates.
    """

    clients: Attackers
    z: float | None = None
    needs_honest: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, str]] = {"z": "(-inf, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return honest mean − z × honest standard deviation."""
        z = largest_unnoticed_shift(knowledge.cohort, knowledge.adversaries) if self.z is None else self.z
        return knowledge.honest.mean - z * knowledge.honest.std


def largest_unnoticed_shift(cohort: int, adversaries: int) -> float:
    r"""Largest shift, in standard deviations, with which adversaries are nearer the centre than s honest clients.

    .. math:: z_{max} = \Phi^{-1}\Big(\frac{n - m - s}{n - m}\Big), \qquad s = \lfloor n/2 + 1 \rfloor - m

    s is the number of honest clients that the m adversaries need on their side to be a majority of n. If the
    adversaries are the majority by themselves (s ≤ 0), any shift would do; s = 1 then keeps the quantile finite. With
    at most one honest client there is no spread, and z is 0.
    """
    honest = cohort - adversaries
    if honest <= 1:
        return 0.0
    supporters = max(cohort // 2 + 1 - adversaries, 1)
    return NormalDist().inv_cdf((honest - supporters) / honest)


@dataclass(frozen=True)
class InnerProductManipulation(UpdateAttack):
    r"""Sends the reversed mean of the honest updates, :math:`\mu_o - \varepsilon\,\overline{(\mu - \mu_o)}`.

    It makes the inner product of the fused update with the honest one negative: for an average, once ε m > n − m.

    Source: Xie et al. 2020, Fall of Empires.
    """

    clients: Attackers
    epsilon: float = 0.1
    needs_honest: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, str]] = {"epsilon": "(0, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o − ε (honest mean − μ_o)."""
        return knowledge.previous - self.epsilon * (knowledge.honest.mean - knowledge.previous)


# -- poisoned data -----------------------------------------------------------------------------------------------------


def flip_labels(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Return integer labels with each replaced by its mirror image among ``classes``, which ascend."""
    ascending = torch.tensor(classes, dtype=torch.int64, device=labels.device)
    place = torch.searchsorted(ascending, labels.to(torch.int64)).clamp_max(len(ascending) - 1)
    return torch.where(ascending[place] == labels, ascending.flip(0)[place], labels).to(labels.dtype)


def with_flipped_labels(
    dataset: TensorDataset, partition: Partition, liars: Sequence[int], seed: int = 0
) -> fb.ClientDatasets:
    """Return the clients that ``partition`` makes of ``dataset``, some of them with reversed labels, y → C − 1 − y."""
    clients = clients_of(dataset, partition, seed)
    parts: dict[str, Dataset] = {}
    for number, (name, own) in enumerate(zip(clients.names, clients.datasets)):
        tensors = [torch.stack(column) for column in zip(*(own[row] for row in range(len(own))))]  # type: ignore[arg-type]
        if number in liars:
            tensors[-1] = flip_labels(tensors[-1], clients.classes)
        parts[name] = TensorDataset(*tensors)
    return fb.ClientDatasets(parts)
