"""The exact head: exchanges of sums that give the posterior of a linear layer of the clients' pooled data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_choice, check_kind, check_number, shown
from lightning_fedbayes.modules.head import fit as fits
from lightning_fedbayes.modules.head.fit import HeadFit, HeadSlopes, design_of
from lightning_fedbayes.modules.linear_regression import LinearStatistics
from lightning_fedbayes.modules.sources.curvature import draws_of_outputs
from lightning_fedbayes.modules.sources.curvature.systems import DENSE

Likelihood = Literal["softmax", "one_hot", "gaussian"]
Inference = Literal["laplace", "variational"]
AT_ONCE = 4096
"""Examples with draws in memory at once."""
DRAWS = 128
"""Draws of the logits for expectations under a posterior, the same in every exchange."""
Sent = TypeVar("Sent", LinearStatistics, HeadSlopes)


@dataclass(frozen=True)
class BayesianHead:
    r"""Gaussian posterior of a linear layer on fixed features, of all clients' pooled data, in a few exchanges.

    .. math:: W_{ij} \sim N(0, s^2), \qquad f(x) = W \tilde\phi(x), \quad \tilde\phi = (\phi, 1)

    with one of three likelihoods:

    * "gaussian": regression, :math:`y \sim N(f(x), \sigma^2)`. Clients send the sums :math:`\Phi^\top \Phi`,
      :math:`\Phi^\top Y` and :math:`\sum y^2` once. The posterior is exact, with s and σ² of most evidence.
    * "one_hot": classification by the same regression on one-hot targets, in one exchange. Classes have densities
      :math:`p(c \mid W) \propto N(e_c; f(x), \sigma^2)`, so logits are :math:`f(x) / \sigma^2`; where the Gaussian does
      not fit, a :class:`~lightning_fedbayes.FederatedTemperature` helps.
    * "softmax": logits f(x). After the sums, each exchange is of slopes and curvature at the server's weights
      (:class:`HeadSlopes`), for a step of Newton, or of L-BFGS where the curvature is too large to send, and for s.

    Sums of clients add up to the sums of the pooled data, and a client comes or goes by ``+`` and ``-``. ::

        head = fb.BayesianHead(outputs=10)
        fit = head.fit_clients([(features, labels), ...])               # in one process
        predictive = fb.PosteriorPredictive(fit.linear(), fit.posterior)

        fit = head.fit(sum_of_all_clients)                              # or by exchanges: of head.sums(...)
        while not fit.is_done:
            fit = head.step(fit, slopes_of_all_clients)                 # of head.slopes(fit, features, labels)

    When to use it: the backbone stays as it is. Where it has to change, give adapters a posterior
    (:class:`~lightning_fedbayes.IVON`).

    Args:
        outputs: number of classes, or of targets.
        likelihood: see above.
        prior_std: s > 0, of weights and biases. None: by evidence, of a softmax with a half-Cauchy prior of s of scale
            1, without which few data, or redundant features, often leave no width.
        inference: of a softmax. "variational": the Gaussian of full covariance nearest to the posterior in KL(q ‖ p).
            Its exchanges tell clients the posterior's covariance, and so sums over all features. "laplace": about half
            as many exchanges, which tell clients only the weights, but less exact, and s too small for wide posteriors.
        exchanges: most exchanges of slopes.

    Raises FedBayesError: an argument is out of range.
    Source: He et al. 2025 for one exchange of sums; MacKay 1992 for the evidence; Opper and Archambeau 2009 for the
    variational posterior; Kuss and Rasmussen 2005.

    >>> features = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
    >>> left, right = (features[:2], torch.tensor([0, 0])), (features[2:], torch.tensor([1, 1]))
    >>> fit = BayesianHead(outputs=2).fit_clients([left, right])
    >>> fit.is_done, fit.linear()(features).argmax(1)
    (True, tensor([0, 0, 1, 1]))
    """

    outputs: int
    likelihood: Likelihood = "softmax"
    prior_std: float | None = None
    inference: Inference = "variational"
    exchanges: int = 40

    def __post_init__(self) -> None:
        check_choice("likelihood", self.likelihood, get_args(Likelihood), error=FedBayesError)
        check_at_least("outputs", self.outputs, 1 if self.likelihood == "gaussian" else 2, error=FedBayesError)
        if self.prior_std is not None:
            why = "it is a standard deviation"
            check_number("prior_std", self.prior_std, "(0, 1e19)", error=FedBayesError, why=why)
        check_choice("inference", self.inference, get_args(Inference), error=FedBayesError)
        check_at_least("exchanges", self.exchanges, 1, error=FedBayesError)

    @property
    def is_classifier(self) -> bool:
        """True unless targets are real numbers."""
        return self.likelihood != "gaussian"

    def takes_pairs(self, columns: int) -> bool:
        """Return True if clients send the curvature of every pair of classes, False for its Kronecker approximation."""
        return bool(self.outputs * columns <= DENSE)

    def sums(self, features: Tensor, targets: Tensor) -> LinearStatistics:
        """Return what a client sends first: sums over its examples.

        Args:
            features: shape (examples, features).
            targets: classes, shape (examples,), or real numbers, shape (examples,) or (examples, outputs).

        Raises FedBayesError: values or shapes that do not fit.
        """
        if self.is_classifier:
            self._check_labels(targets)
            targets = torch.nn.functional.one_hot(targets.long(), self.outputs)
        elif targets.ndim == 1:
            targets = targets.unsqueeze(1)
        if targets.ndim != 2 or targets.shape[1] != self.outputs:
            raise FedBayesError(f"targets {tuple(targets.shape)}: give (examples,) or (examples, {self.outputs})")
        design, targets = design_of(features), targets.double()
        if len(design) != len(targets):
            raise FedBayesError(f"features {tuple(features.shape)} of {len(targets)} targets: give as many of both")
        sums = design.T @ design, design.T @ targets, targets.square().sum(0)
        return LinearStatistics(sums[0].cpu(), sums[1].cpu(), sums[2].cpu(), len(design))

    def slopes(self, fit: HeadFit, features: Tensor, labels: Tensor) -> HeadSlopes:
        """Return what a client sends in a further exchange, for features (examples, features) and classes."""
        self._check_labels(labels)
        design = design_of(features)
        if design.shape[1] != fit.weights.shape[1] or len(design) != len(labels):
            why = f"the fit is of {fit.weights.shape[1] - 1} features, and each example has a label"
            raise FedBayesError(f"features {tuple(features.shape)} of {len(labels)} labels: {why}")
        parts = zip(features.split(AT_ONCE), design.split(AT_ONCE), labels.split(AT_ONCE))
        found = (HeadSlopes.of(self._logits(fit, x, each), each, y, fit.takes_pairs) for x, each, y in parts)
        return total(found, HeadSlopes, "labels")

    def _logits(self, fit: HeadFit, features: Tensor, design: Tensor) -> Tensor:
        """Return logits at the weights, or draws under the variational posterior, (draws, examples, classes)."""
        if self.inference == "laplace":
            return design @ fit.weights.T[None]
        mean, covariance = fit.moments(features)
        with torch.random.fork_rng([mean.device] if mean.is_cuda else []):
            torch.manual_seed(0)
            return draws_of_outputs(mean, covariance, DRAWS)

    def personal(self, fit: HeadFit, features: Tensor, targets: Tensor, weight: float) -> HeadFit:
        r"""Return a client's head: the federation's as the prior, with the others' part of it discounted.

        .. math:: p_k(W) \propto N(W; 0, s^2 I) \, p(D_k \mid W) \, \prod_{j \neq k} p(D_j \mid W)^{1 - w}

        w = 0 is the federation's head, w = 1 ignores the other clients, for whom the federation's sums stand, or for a
        softmax its Gaussian. No data leave the client. S and σ² stay.
        :func:`~lightning_fedbayes.choose_personal_weight` finds w.

        When to use it: clients differ in what a label means, or in how often it comes.

        Args:
            fit: of the federation, done.
            features, targets: of the client, which has taken part. With no examples it gets ``fit``.
            weight: w in [0, 1].

        Raises FedBayesError: the fit is not done, or values or shapes do not fit.
        Source: Ibrahim and Chen 2000, for the power prior.
        """
        check_kind("fit", fit, HeadFit, "give what fit() or step() has returned", error=FedBayesError)
        check_number("weight", weight, "[0, 1]", error=FedBayesError)
        if not fit.is_done or fit.likelihood != self.likelihood:
            raise FedBayesError(f"the fit is not one of {self} that is done: go on with step() until it is")
        own = self.sums(features, targets)
        if own.moment.shape != fit.sums.moment.shape or own.num_examples > fit.sums.num_examples:
            fitted = f"{fit.sums.num_examples} examples with {fit.weights.shape[1] - 1} features"
            raise FedBayesError(f"features {tuple(features.shape)}: the fit is of {fitted}, the client's among them")
        if not own.num_examples:
            return fit
        if self.likelihood != "softmax":
            sums = fits.mixed_sums(fit.sums, own, weight)  # at the noise and the prior of the federation's
            return fits.gaussian_fit(sums, fit.likelihood, fit.prior_precision, fit.noise)
        is_variational = self.inference == "variational"
        return fits.personal_softmax(fit, own, lambda at: self.slopes(at, features, targets), weight, is_variational)

    def fit(self, sums: LinearStatistics | Iterable[LinearStatistics]) -> HeadFit:
        """Return the fit of all clients' sums. A softmax is not done yet. Raise FedBayesError if all targets are 0."""
        if not isinstance(sums, LinearStatistics):
            sums = total(sums, LinearStatistics, "sums")
        if sums.moment.ndim != 2 or sums.moment.shape[1] != self.outputs or not sums.num_examples:
            what = f"sums of {sums.num_examples} examples with moment {tuple(sums.moment.shape)}"
            remedy = f"give sums of at least one example and {self.outputs} outputs, as BayesianHead.sums returns"
            raise FedBayesError(f"{what}: {remedy}")
        return fits.first_fit(sums, self.likelihood, self.prior_std, self.takes_pairs(len(sums.gram)))

    def step(self, fit: HeadFit, slopes: HeadSlopes | Iterable[HeadSlopes]) -> HeadFit:
        """Return the fit after an exchange of all clients' slopes. Raise FedBayesError if that cannot be."""
        check_kind("fit", fit, HeadFit, "give what fit() or step() has returned", error=FedBayesError)
        if fit.is_done:
            raise FedBayesError("the fit is done: do not call step() again")
        found = slopes if isinstance(slopes, HeadSlopes) else total(slopes, HeadSlopes, "slopes")
        if found.slope.shape != fit.weights.shape or found.num_examples != fit.sums.num_examples:
            given = f"slopes of {found.num_examples} examples, {tuple(found.slope.shape)}"
            fitted = f"{fit.sums.num_examples} examples, {tuple(fit.weights.shape)}"
            raise FedBayesError(f"{given}: the fit is of {fitted}; all clients of the sums have to answer")
        return fits.next_fit(fit, found, self.prior_std, self.inference == "variational", self.exchanges)

    def fit_clients(self, clients: Sequence[tuple[Tensor, Tensor]]) -> HeadFit:
        """Return the fit of clients in this process, pairs of features and targets, after all exchanges."""
        check_kind("clients", clients, list | tuple, "give pairs (features, targets)", error=FedBayesError)
        for number, each in enumerate(clients):
            if not isinstance(each, list | tuple) or len(each) != 2:
                raise FedBayesError(f"clients[{number}]={shown(each)}: give a pair (features, targets)")
        fit = self.fit(self.sums(*each) for each in clients)
        while not fit.is_done:
            fit = self.step(fit, (self.slopes(fit, *each) for each in clients))
        return fit

    def _check_labels(self, labels: Tensor) -> None:
        check_kind("targets", labels, Tensor, "give a tensor of classes", error=FedBayesError)
        good = labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()
        if not good or (labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.outputs):
            remedy = f"give classes from 0 to {self.outputs - 1}, shape (examples,)"
            raise FedBayesError(f"targets of shape {tuple(labels.shape)} and {labels.dtype}: {remedy}")


def total(parts: Iterable[Sent], kind: type[Sent], name: str) -> Sent:
    """Return the sum of ``parts``. Raise FedBayesError if there is no part, or one of another type."""
    check_kind(name, parts, Iterable, "give what every client has sent", error=FedBayesError)
    found: Sent | None = None
    for part in parts:
        check_kind(name, part, kind, "give what every client has sent", error=FedBayesError)
        found = part if found is None else found + part  # pyright: ignore[reportOperatorIssue]
    if found is None:
        raise FedBayesError(f"{name}: there are no clients; give what every client has sent")
    return found
