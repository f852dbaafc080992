"""Client weights: facts about the clients in, one weight per client out; and averages of buffers by these weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_choice, check_kind, listed, shown
from lightning_fedbayes.core.exchange import Reduction, Statistics
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior, gaussian_kl
from lightning_fedbayes.fusion.accumulator import as_weights
from lightning_fedbayes.fusion.rule import add

SMALLEST_DISTANCE = 1e-8
"""Distances (KL in nats, or squared L2) below this count as this: the bound that keeps 1/distance finite."""


@dataclass(frozen=True)
class ClientFacts:
    """Facts about one client, from which its weight follows.

    Its number and number of training examples, the posterior that it sent, the ``previous`` global one that it started
    from, and figures of its training by name.
    """

    client: int
    num_examples: int
    posterior: GaussianPosterior
    previous: GaussianPosterior
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, update: ClientUpdate, previous: GaussianPosterior) -> "ClientFacts":
        """Return the facts that follow from a client's update."""
        return cls(update.client, update.num_examples, update.posterior, previous, update.metrics)


ClientWeight = Callable[[ClientFacts], float]
CohortWeights = Callable[[Sequence[ClientFacts]], "Sequence[float] | Tensor"]


def equal(facts: ClientFacts) -> float:
    r"""Return the same weight for every client, :math:`\gamma_k = 1`.

    When to use it: client sizes are unknown or cannot be trusted. Source: [FBDL] eq. (18).
    """
    return 1.0


def train_size(facts: ClientFacts) -> float:
    r"""Return the number of training examples, :math:`\gamma_k = n_k`.

    When to use it: the default of federated averaging. Source: [FBDL] eq. (19).
    """
    return float(facts.num_examples)


def distance(facts: ClientFacts) -> float:
    r"""Return the closeness to the previous global posterior q_g, :math:`\gamma_k = 1 / KL(q_g \| q_k)`.

    The KL is summed over the probabilistic parameters. A deterministic network has :math:`\|\mu_g - \mu_k\|^2` in its
    place. Either is at least :data:`SMALLEST_DISTANCE`.

    When to use it: clients that drift far should count less. Source: [FBDL] eq. (21) and §2.6.4.
    """
    mean, variance = facts.posterior.flatten()
    before, spread = facts.previous.flatten()
    random = variance > 0  # the global posterior of some rules has a spread where clients have none
    if not bool(random.any()):
        return 1 / max(float((mean - before).square().sum()), SMALLEST_DISTANCE)
    kl = gaussian_kl(before[random], spread[random], mean[random], variance[random])
    return 1 / max(float(kl), SMALLEST_DISTANCE)


def max_discrepancy(facts: Sequence[ClientFacts]) -> Tensor:
    r"""Return closeness to the nearest other client, :math:`\gamma_k = \max_{j \ne k} 1 / KL(q_k \| q_j)`, (clients,).

    KL and squared distance as for :func:`distance`. A single client gets weight 1.

    When to use it: outliers should count less. Source: [FBDL] eq. (20) and §2.6.3.
    """
    flat = [each.posterior.flatten() for each in facts]
    if len(flat) == 1:
        return torch.ones(1, dtype=torch.float64)
    is_random = any(bool((variance > 0).any()) for _, variance in flat)

    def divergence(q: tuple[Tensor, Tensor], p: tuple[Tensor, Tensor]) -> float:
        return float(gaussian_kl(*q, *p) if is_random else (q[0] - p[0]).square().sum())

    nearest_other = [min(divergence(q, p) for j, p in enumerate(flat) if j != k) for k, q in enumerate(flat)]
    return 1 / torch.tensor(nearest_other, dtype=torch.float64).clamp_min(SMALLEST_DISTANCE)


class KnownOverlap:
    r"""Least-squares weights of clients that hold some examples in common, :math:`\gamma = \Phi^{-1} 1`.

    .. math:: \Phi_{jk} = \frac{|D_j \cap D_k|}{|D_j| |D_k|}

    ::

        FederatedBayes(fusion="weighted_average", weighting=fb.server.KnownOverlap([[250, 125], [125, 250]]))

    Φ is the covariance of the clients' means, up to a factor, so an example that several clients hold counts once.
    Without common examples the weights equal ``"train_size"``. Clients with the same data share the weight of one.
    Raises FusionError if ``shared`` is not such a matrix, or, in a round, a client is not in it, or has a negative
    weight because other clients hold nearly all of its examples, too.

    When to use it: you know how many examples every two clients have in common, and the clients are honest. Otherwise
    :class:`~lightning_fedbayes.fusion.InverseCovarianceVB` infers Φ from the updates.

    Args:
        shared: how many examples clients j and k both hold, shape (clients, clients). The sizes on the diagonal.

    Source: [Untrusted] eq. (3) with (5).
    """

    def __init__(self, shared: Sequence[Sequence[float]] | Tensor) -> None:
        try:
            counts = torch.as_tensor(shared, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise FusionError(f"KnownOverlap: shared={shown(shared)}; give a square matrix of counts") from None
        sizes = counts.diagonal() if counts.dim() == 2 else counts
        if counts.dim() != 2 or counts.shape[0] != counts.shape[1] or not bool((sizes > 0).all()):
            why = f"shared of shape {tuple(counts.shape)} is no square matrix with sizes above 0 on its diagonal"
            raise FusionError(f"KnownOverlap: {why}")
        most = torch.minimum(sizes[:, None], sizes)
        if not bool((counts == counts.T).all()) or not bool(((counts >= 0) & (counts <= most)).all()):
            limit = "at least 0, and at most the sizes of j and k, shared[j][j] and shared[k][k]"
            raise FusionError(f"KnownOverlap: shared[j][k] and shared[k][j] have to be equal, {limit}")
        self.shared = counts

    def __call__(self, facts: Sequence[ClientFacts]) -> Tensor:
        """Return the weights of a round's clients, shape (clients,)."""
        clients = [each.client for each in facts]
        last, rows = max(clients), len(self.shared)
        if last >= rows:
            raise FusionError(f"KnownOverlap: client {last} is not in shared, with {rows} rows; give each client one")
        counts = self.shared[clients][:, clients]
        sizes = counts.diagonal()
        weights = sizes * (torch.linalg.pinv(counts, hermitian=True) @ sizes)
        weights = torch.where(weights.abs() < 1e-9 * weights.sum(), 0.0, weights)
        if bool((weights < 0).any()):
            client = clients[int(weights.argmin())]
            why = "nearly all its examples are the others', too; leave it out, or use weighting='train_size'"
            raise FusionError(f"KnownOverlap: client {client} has a negative weight: {why}")
        return weights


PER_CLIENT: dict[str, ClientWeight] = {each.__name__: each for each in (equal, train_size, distance)}
"""Weightings that look at one client at a time, so that posteriors stream."""
PER_COHORT: dict[str, CohortWeights] = {"max_discrepancy": max_discrepancy}
"""Weightings that compare the clients of a round, so that all their posteriors are held."""


def client_weights(weighting: str | CohortWeights, facts: Sequence[ClientFacts]) -> list[float]:
    """Return the weights of a round's clients, one of ``facts`` each, normalised to sum to 1.

    Raise FusionError if the name is unknown, or weights are of the wrong number, negative, not finite, or all 0.
    """
    check_weighting(weighting)
    check_kind("facts", facts, Sequence, "give the ClientFacts of every client", error=FusionError)
    for each in facts:
        check_kind("facts", each, ClientFacts, "give the ClientFacts of every client", error=FusionError)
    if callable(weighting):
        values = weighting(facts)
    elif weighting in PER_COHORT:
        values = PER_COHORT[weighting](facts)
    else:
        values = [PER_CLIENT[weighting](each) for each in facts]
    return normalised(values, weighting, len(facts))


def normalised(values: Sequence[float] | Tensor, weighting: str | CohortWeights, count: int) -> list[float]:
    """Check the weights that ``weighting`` gave for ``count`` clients, and scale them to sum to 1."""
    name = weighting if isinstance(weighting, str) else getattr(weighting, "__name__", "your function")
    weights = as_weights(values, f"weighting {name}: ")
    if len(weights) != count:
        raise FusionError(f"weighting {name} gave {len(weights)} weights for {count} clients; give one per client")
    if not bool(weights.sum() > 0):
        raise FusionError(f"weighting {name} gave only zeros; at least one client needs a positive weight")
    return (weights / weights.sum()).tolist()


def check_weighting(weighting: str | CohortWeights) -> None:
    """Raise FusionError, with the nearest name, unless ``weighting`` is known or a function."""
    if not callable(weighting):
        check_choice("weighting", weighting, [*PER_CLIENT, *PER_COHORT], error=FusionError)


class BufferAverage:
    """Running weighted sums of the clients' buffers, and of a method's tensors, in one round.

    Args:
        before: the global buffers that the clients started from. None: the first client's are the model of all.
        several: True if other processes have clients, too.
        added: prefix of the names of tensors that are added up, not averaged. None: all are averaged.
    """

    def __init__(self, before: Mapping[str, Tensor] | None, several: bool, added: str | None = None) -> None:
        self.before = before
        self._added = added
        self._several = several
        self._sums: dict[str, Tensor] = {}

    def check(self, buffers: Mapping[str, Tensor], who: str) -> None:
        """Raise FusionError unless ``buffers`` have the structure of those before and are finite wherever those are.

        Infinite entries are allowed where the global buffer has them: a mask of minus infinities is a buffer, too.
        """
        like, wrong = buffers if self.before is None else self.before, []
        for name in sorted(like.keys() | buffers.keys()):
            old, new = like.get(name), buffers.get(name)
            if old is not None and new is not None and not new.is_meta and new.layout == torch.strided:
                fits = old.dtype == new.dtype or (self._adds(name) and new.is_floating_point())
                if fits and old.shape == new.shape:
                    continue
            wrong.append(name)
        if wrong:
            what = f"buffers {listed(wrong)} are not those of the clients before (names, shapes or dtypes differ)"
            raise FusionError(f"{who}: {what}; all clients must train the same network")
        for name, value in buffers.items():
            wrong = ~torch.isfinite(value)
            if self.before is not None and bool(wrong.any()):
                wrong &= torch.isfinite(like[name]).to(value.device)
            if bool(wrong.any()):
                raise FusionError(f"{who}: buffer '{name}' is not finite")

    def add(self, buffers: Mapping[str, Tensor], weight: float) -> None:
        """Add a client's buffers to the running sums."""
        for name, value in buffers.items():
            factor = 1.0 if self._adds(name) else weight
            if factor == 0:
                continue
            if name not in self._sums:
                kind = torch.complex128 if value.is_complex() else torch.float64
                self._sums[name] = torch.zeros_like(value, dtype=kind)
            self._sums[name].add_(value, alpha=factor)

    def reduction(self) -> Reduction:
        """Return the weighted sums of all buffers as one flat vector on the CPU. In one process, as they are."""
        if not self._several:
            return Reduction(self._sums, 0, _add_all)
        flat = []
        for name, value in (self.before or {}).items():
            summed = self._sums.get(name, torch.zeros_like(value))
            summed = summed.to("cpu", torch.complex128 if summed.is_complex() else torch.float64)
            flat.append((torch.view_as_real(summed) if summed.is_complex() else summed).flatten())
        sums = {"buffers": torch.cat(flat)} if flat else {}
        return Reduction(sums, len(sums.get("buffers", ())), _add_all)

    def averages(self, sums: Statistics, total: float) -> dict[str, Tensor]:
        """Return the averages, in the dtypes of the global buffers, from :meth:`reduction` and the sum of weights."""
        averaged, start = {}, 0
        before = self.before or {}
        for name in before if self._several else sums:
            like, summed = before[name], sums.get(name)
            if self._several:
                stop = start + like.numel() * (2 if like.is_complex() else 1)
                summed = sums["buffers"][start:stop] if "buffers" in sums else torch.zeros(stop - start)
                summed = (torch.view_as_complex(summed.view(-1, 2)) if like.is_complex() else summed).view(like.shape)
                start = stop
            assert summed is not None
            average = summed if self._adds(name) else summed / total
            if not like.dtype.is_floating_point and not like.dtype.is_complex:
                average = average.round()
            averaged[name] = average.to(like.dtype)
            if self._several:
                averaged[name] = averaged[name].to(like.device)
        return averaged

    def _adds(self, name: str) -> bool:
        return self._added is not None and name.startswith(self._added)


def _add_all(statistics: Statistics, other: Statistics) -> None:
    for name, value in other.items():
        add(statistics, name, value)
