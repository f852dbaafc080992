"""Clients whose likelihoods are Gaussian with diagonal curvature, so that their pooled posterior is in closed form."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

import lightning_fedbayes as fb
from lightning_fedbayes.methods import Participant, Report, Shared, Trained

GAUSSIAN, POINT = "w", "b"


class Conjugate:
    r"""Clients whose data have the energy :math:`	frac12 H_k (	heta - a_k)^2`, in nats.

    Training goes a part (``effort``) of the way to the minimum of the local problem. What is measured is exact. H and a
    have the shape (clients, P), and the last ``point`` of the P parameters are deterministic; ``kept`` is the clients'.
    """

    def __init__(self, curvatures, optima, examples: Iterable[int], point: int = 0, effort: float = 1.0) -> None:
        self.curvatures, self.optima, self.examples = curvatures.double(), optima.double(), [*examples]
        self.size, self.point, self.effort = curvatures.shape[1] - point, point, effort
        self.kept: dict[int, dict[str, Tensor]] = {}

    @classmethod
    def drawn(cls, examples, size: int = 4, point: int = 0, unlike: float = 1.0, seed: int = 0, effort: float = 1.0):
        """Return clients about a common truth, whose curvature is roughly one for each example."""
        draws, examples = torch.Generator().manual_seed(seed), [*examples]
        shape = len(examples), size + point
        n = torch.tensor(examples, dtype=torch.float64)[:, None]
        curvatures = n * (0.5 + torch.rand(shape, generator=draws, dtype=torch.float64))
        truth = torch.randn(shape[1], generator=draws, dtype=torch.float64)
        spread, noise = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
        return cls(curvatures, truth + unlike * spread + noise / n.sqrt(), examples, point, effort)

    def posterior(self, mean: Tensor | float = 0.0, variance: Tensor | float = 1.0) -> fb.GaussianPosterior:
        """Return a posterior of the Gaussian parameters and, if there are any, the deterministic ones."""
        whole = torch.zeros(self.size + self.point, dtype=torch.float64) + mean
        means = dict(zip((GAUSSIAN, POINT) if self.point else (GAUSSIAN,), whole.split([self.size, self.point])))
        variances = {name: torch.zeros_like(value) for name, value in means.items()}
        variances[GAUSSIAN] = (variances[GAUSSIAN] + variance).contiguous()
        return fb.GaussianPosterior(means, variances)

    def pooled(self, prior=(0.0, 1.0), clients: Collection[int] | None = None) -> fb.GaussianPosterior:
        """Return the posterior of some clients' data, or of all; that of deterministic parameters is their optimum."""
        rows = [*(range(len(self.examples)) if clients is None else clients)]
        strength = torch.tensor([prior[1] ** -2] * self.size + [0.0] * self.point, dtype=torch.float64)
        precision = strength + self.curvatures[rows].sum(0)
        shift = strength * prior[0] + (self.curvatures * self.optima)[rows].sum(0)
        return self.posterior(shift / precision, 1 / precision[: self.size])

    def train(self, method: fb.Method, shared: Shared, client: int) -> Report:
        count, curvature, optimum = self.examples[client], self.curvatures[client], self.optima[client]
        participant = Participant(client, count, self.kept.get(client, {}), gaussian=frozenset({GAUSSIAN}))
        problem, start = method.problem(shared, participant), torch.cat([*shared.posterior.mean.values()])
        strength, slope = torch.zeros_like(start), torch.zeros_like(start)
        assert problem.measures
        assert problem.prior is not None
        strength[: self.size] = problem.prior.strength[GAUSSIAN]
        slope[: self.size] = problem.prior.slope[GAUSSIAN]
        if problem.quadratic is not None:  # of the mean loss
            slope[self.size :] = count * problem.quadratic.slope[POINT]
        mean = start + self.effort * (curvature * (optimum - start) + slope) / (curvature + strength)
        gradients = self.posterior(curvature * ((start + mean) / 2 - optimum)).mean
        trained = Trained(
            self.posterior(mean, shared.posterior.variance[GAUSSIAN]), gradients, {GAUSSIAN: curvature[: self.size]}
        )
        return method.report(shared, participant, trained)

    def round(self, server: fb.Server, cohort: Iterable[int] | None = None, lies=None) -> dict[str, float]:
        """Train a cohort from the server's model; ``lies`` maps clients to what changes (report, shared)."""
        cohort = [*(range(len(self.examples)) if cohort is None else cohort)]
        shared = server.begin(fb.RoundPlan(server.rounds, tuple(cohort), clients=len(self.examples)))
        for client in cohort:
            report = self.train(server.method, shared, client)
            if lies and client in lies:
                report = lies[client](report, shared)
            self.kept[client] = dict(report.kept)
            assert server.admit(report.update(client, self.examples[client])).error is None
        result = server.finish()
        assert result.success
        told = server.untold.union(lies or ())
        self.kept |= {client: dict(server.sites[client]) for client in told.intersection(cohort, server.sites)}
        return result.figures

    def totals(self) -> dict[str, Tensor]:
        """Return the sums of what the clients keep, in their order."""
        sites = [self.kept[client] for client in sorted(self.kept)]
        return {name: sum((site[name] for site in sites[1:]), sites[0][name]) for name in sites[0]}


def distance(one: fb.GaussianPosterior, other: fb.GaussianPosterior) -> float:
    """Return the divergence of one posterior from another in nats per Gaussian parameter."""
    (mean, variance), (at, spread) = ((p.mean[GAUSSIAN], p.variance[GAUSSIAN]) for p in (one, other))
    ratio = variance / spread
    return float((ratio - 1 - ratio.log() + (mean - at).square() / spread).mean()) / 2
