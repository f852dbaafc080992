"""Hierarchical linear regression: a linear model for every client, from one exchange of sums over examples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_flag, check_kind, listed, nearest, shown
from lightning_fedbayes.metrics.functional.utilities import check_numbers
from lightning_fedbayes.modules.linear_regression import LinearStatistics, design_of

STARTS = (0.1, 1.0, 10.0)
"""Standard deviations of the random coefficients, relative to the noise, at which searches start."""
SLOPE = 1e-6
"""Largest slope of the log-likelihood per example that counts as a maximum."""
DEPENDENT = 1e-11
"""Smallest eigenvalue of the scaled Gram matrix, below which columns count as linearly dependent."""
EXACT = 1e-12
"""Noise variance relative to the mean square of the targets below which the fit is exact."""


@dataclass(frozen=True, eq=False)
class HierarchicalFit:
    """Fitted hierarchical linear model: see :class:`HierarchicalLinearRegression`.

    Attributes:
        fixed: estimate of the coefficients β of the population, shape (columns,).
        fixed_covariance: covariance of that estimate, shape (columns, columns).
        random_covariance: covariance Ψ of the clients' deviations, shape (len(random), len(random)).
        noise_variance: σ², in squared units of the targets.
        log_likelihood: log of the restricted likelihood at its maximum, in nats. Compare it only between models with
            the same columns in the same units.
        clients: statistics of every client, by name.
        random: columns with coefficients that differ from client to client.
        bias: True if column 0 is a column of ones that :meth:`predict` adds.
    """

    fixed: Tensor
    fixed_covariance: Tensor
    random_covariance: Tensor
    noise_variance: float
    log_likelihood: float
    clients: Mapping[str, LinearStatistics]
    random: tuple[int, ...]
    bias: bool

    def posterior_of(self, client: str | None = None) -> tuple[Tensor, Tensor]:
        r"""Return mean, (columns,), and covariance, (columns, columns), of a client's coefficients, in float64.

        With :math:`Z_k = X_k S` the columns in ``random`` and :math:`C_k = (\Psi^{-1} + Z_k^\top Z_k / \sigma^2)^{-1}`,
        the covariance of :math:`b_k` if β were known, :math:`\beta + S b_k` has, given the data of all clients,

        .. math:: m_k = \hat\beta + S C_k Z_k^\top (y_k - X_k \hat\beta) / \sigma^2, \qquad
                  \mathrm{Cov}_k = T_k \mathrm{Cov}(\hat\beta) T_k^\top + S C_k S^\top, \quad
                  T_k = I - S C_k Z_k^\top X_k / \sigma^2.

        β has a flat prior. Ψ and σ² count as known. Few examples draw a client towards the population. A client without
        any, or None, has the population's :math:`N(\hat\beta, \mathrm{Cov}(\hat\beta) + S \Psi S^\top)`.

        Raises FedBayesError: ``client`` is no name of a client of the fit.
        Source: Laird and Ware (1982) §3.
        """
        columns, random = len(self.fixed), list(self.random)
        select = torch.eye(columns, dtype=torch.float64)[:, random]
        if client is None:
            return self.fixed, self.fixed_covariance + select @ self.random_covariance @ select.T
        if not isinstance(client, str) or client not in self.clients:
            known = nearest(client, self.clients) if isinstance(client, str) else "give the name of a client"
            raise FedBayesError(f"client={shown(client)}: {known}; or None for a client without statistics")
        gram, moment = self.clients[client].gram, self.clients[client].moment
        inner = torch.eye(len(random)).double() + self.random_covariance @ gram[random][:, random] / self.noise_variance
        given_fixed = torch.linalg.solve(inner, self.random_covariance)
        given_fixed = (given_fixed + given_fixed.T) / 2
        gain = select @ given_fixed / self.noise_variance
        mean = self.fixed + gain @ (moment - gram @ self.fixed)[random]
        through = torch.eye(columns).double() - gain @ gram[random]
        return mean, through @ self.fixed_covariance @ through.T + select @ given_fixed @ select.T

    def predict(self, inputs: Tensor, client: str | None = None) -> tuple[Tensor, Tensor]:
        r"""Return mean and standard deviation of new targets of one client, shape (batch,) each.

        .. math:: N(x^\top m_k,\; \sigma^2 + x^\top \mathrm{Cov}_k\, x)

        Args:
            inputs: shape (batch, features), without the column of ones. The result has their dtype.
            client: see :meth:`posterior_of`.

        Raises FedBayesError: an unknown name, or another number of features.
        """
        mean, covariance = self.posterior_of(client)
        check_numbers(inputs=inputs)
        features = len(self.fixed) - self.bias
        if inputs.ndim != 2 or inputs.shape[1] != features:
            raise FedBayesError(f"inputs {tuple(inputs.shape)}: the model was fitted to (examples, {features})")
        design = design_of(inputs, self.bias)
        variance = self.noise_variance + ((design @ covariance.to(design.device)) * design).sum(1)
        dtype = torch.result_type(inputs, 1.0)
        return (design @ mean.to(design.device)).to(dtype), variance.sqrt().to(dtype)


@dataclass(frozen=True)
class HierarchicalLinearRegression:
    r"""Linear mixed model: clients' coefficients differ around a population's, with a variance that is learnt.

    .. math:: y_k = X_k \beta + Z_k b_k + \varepsilon_k, \quad b_k \sim N(0, \Psi), \quad
              \varepsilon_k \sim N(0, \sigma^2 I),

    where :math:`Z_k` holds the columns ``random`` of :math:`X_k`. Ψ and σ² maximise the restricted likelihood (REML),
    which integrates β out under a flat prior; β is the generalised least-squares estimate under them:

    .. math:: \ell(\Psi, \sigma^2) = -\tfrac{1}{2} \Bigl( (N - P) \log 2\pi + \sum_k \log |V_k| +
              \log \Bigl| \sum_k X_k^\top V_k^{-1} X_k \Bigr| +
              \sum_k (y_k - X_k \hat\beta)^\top V_k^{-1} (y_k - X_k \hat\beta) \Bigr), \quad
              V_k = \sigma^2 I + Z_k \Psi Z_k^\top.

    It depends on the data only through each client's :class:`LinearStatistics` (Woodbury's identity): one message per
    client gives the result of the pooled data. For Ψ = 0 the model is ordinary least squares.

    When to use it: clients with few examples, as schools or hospitals, alike but not the same: two, or better ten.

    Args:
        random: columns with coefficients that differ from client to client; (0,) is a random intercept if ``bias``.
        bias: column 0 of the statistics is the column of ones that :meth:`LinearStatistics.of` puts there.

    Raises FedBayesError: ``random`` is empty, repeats a column or is not of columns.
    Source: Laird and Ware (1982); REML: Patterson and Thompson (1971).

    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    >>> wave = 0.1 * (40 * x[:, 0]).sin()
    >>> clients = {f"school {k}": LinearStatistics.of(x, k + 3 * x[:, 0] + (k + 1) * wave) for k in range(5)}
    >>> fit = HierarchicalLinearRegression().fit(clients)
    >>> fit.fixed, fit.random_covariance  # 2.5, less what the noise accounts for
    (tensor([2.0..., 3.0...], dtype=torch.float64), tensor([[2.5...]], dtype=torch.float64))
    >>> mean, covariance = fit.posterior_of("school 4")
    """

    random: tuple[int, ...] = (0,)
    bias: bool = True

    def __post_init__(self) -> None:
        check_flag("bias", self.bias, error=FedBayesError)
        remedy = "give the columns with coefficients that differ from client to client, such as (0, 1)"
        check_kind("random", self.random, Sequence, remedy, error=FedBayesError)
        for column in self.random:
            check_at_least("a column in random", column, 0, error=FedBayesError)
        if not self.random or len(set(self.random)) < len(self.random):
            raise FedBayesError(f"random={shown(self.random)}: {remedy}, each once")

    def fit(self, clients: Mapping[str, LinearStatistics]) -> HierarchicalFit:
        """Maximise the restricted likelihood, given the statistics of every client.

        Args:
            clients: name of the client → its statistics. Clients without examples are allowed.

        Raises FedBayesError: no statistics. Clients with other columns. Fewer than two clients in which a random column
        is not 0. Columns that are linearly dependent over all clients. Not more examples than the clients'
        coefficients. Targets that fit exactly, or a search that does not converge.
        """
        self._check(clients)
        names = sorted(clients)
        # outside of inference mode, where there are no gradients
        with torch.inference_mode(False), torch.enable_grad():
            sent = [clients[name] for name in names]
            sums = ("gram", "moment", "square")
            grams, moments, squares = (torch.stack([getattr(each, name).cpu() for each in sent]) for name in sums)
            count = sum(client.num_examples for client in sent)
            data = _Stacked(grams, moments, squares.sum(), count, list(self.random))
            self._check_identified(data)
            root = _maximise(data)
        log_likelihood, noise, fixed, factor = data.estimate(root)
        return HierarchicalFit(
            fixed=fixed,
            fixed_covariance=noise * torch.cholesky_inverse(factor),
            random_covariance=noise * root @ root.T,
            noise_variance=float(noise),
            log_likelihood=float(log_likelihood),
            clients={name: clients[name] for name in names},
            random=tuple(self.random),
            bias=self.bias,
        )

    def _check(self, clients: Mapping[str, LinearStatistics]) -> None:
        """Raise FedBayesError unless all statistics have the same columns, and a column of ones if there is a bias."""
        check_kind("clients", clients, Mapping, "give a dict, name → LinearStatistics", error=FedBayesError)
        if not clients:
            raise FedBayesError("clients is empty: give the LinearStatistics of at least two")
        columns = None
        for name, statistics in clients.items():
            check_kind("a client's name", name, str, "give a string", error=FedBayesError)
            check_kind(f"client '{name}'", statistics, LinearStatistics, "give LinearStatistics", error=FedBayesError)
            if statistics.moment.ndim != 1:
                raise FedBayesError(f"client '{name}' has {statistics.moment.shape[1]} targets: give statistics of one")
            columns = len(statistics.moment) if columns is None else columns
            if len(statistics.moment) != columns:
                remedy = "give all the same columns"
                raise FedBayesError(f"client '{name}' has {len(statistics.moment)} columns, others {columns}: {remedy}")
            if self.bias and not math.isclose(float(statistics.gram[0, 0]), statistics.num_examples):
                remedy = "pass bias=True to LinearStatistics.of, or bias=False here"
                raise FedBayesError(f"bias=True, but column 0 of client '{name}' is not a column of ones: {remedy}")
            if max(self.random) >= columns:
                raise FedBayesError(f"random={self.random}: the statistics have columns 0 to {columns - 1}")

    def _check_identified(self, data: "_Stacked") -> None:
        """Raise FedBayesError unless the data determine β, Ψ and σ²."""
        for column in self.random:
            having = int((data.grams[:, column, column] > 0).sum())
            if having < 2:
                remedy = "Take it out of random, or fit one client by BayesianLinearRegression"
                need = "the variance between clients needs at least two"
                raise FedBayesError(f"column {column} is not 0 in {having} client(s): {need}. {remedy}")
        gram = data.gram / data.scale / data.scale.unsqueeze(1)
        zero = (data.gram.diagonal() <= 0).nonzero().flatten().tolist()
        if zero:
            raise FedBayesError(f"column {listed(zero)} is 0 in all clients: leave it out")
        values, vectors = torch.linalg.eigh(gram)
        if values[0] < DEPENDENT:
            which = (vectors[:, 0].abs() > 0.1).nonzero().flatten().tolist()
            how = f"linearly dependent over all clients (smallest scaled eigenvalue {float(values[0]):.1g})"
            remedy = "leave one out, standardise inputs with a large mean, or give more examples than columns"
            raise FedBayesError(f"columns {listed(which)} are {how}: {remedy}")
        random = list(self.random)
        within = data.grams[:, random][:, :, random] / data.scale[random] / data.scale[random].unsqueeze(1)
        needed = max(int(torch.linalg.matrix_rank(within, hermitian=True).sum()), len(gram))
        if data.num_examples <= needed:
            what = f"{data.num_examples} examples determine {needed} coefficients and leave none for the noise"
            raise FedBayesError(f"{what}: give clients more examples, or take columns out of random")
        _, noise, _, _ = data.estimate(torch.zeros(len(random), len(random), dtype=torch.float64))
        if not noise > EXACT * data.square / data.num_examples:
            remedy = "leave out columns, or standardise targets with a large mean"
            raise FedBayesError(f"one model fits the targets of all {data.num_examples} examples exactly: {remedy}")


@dataclass(frozen=True, eq=False)
class _Stacked:
    """Statistics of all clients, stacked. Methods treat random columns with covariance σ² root rootᵀ."""

    grams: Tensor
    moments: Tensor
    square: Tensor
    num_examples: int
    random: list[int]

    @property
    def gram(self) -> Tensor:
        """Gram matrix of the pooled data, shape (columns, columns)."""
        return self.grams.sum(0)

    @property
    def scale(self) -> Tensor:
        """Norm of every column in the pooled data, shape (columns,)."""
        return self.gram.diagonal().sqrt()

    def weighted(self, root: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Return sums under the weights :math:`W_k = (I + Z_k L L^\top Z_k^\top)^{-1}` with L the ``root`` of Ψ/σ².

        .. math:: W_k = I - Z_k L (I + L^\top Z_k^\top Z_k L)^{-1} L^\top Z_k^\top

        They are :math:`\sum_k X_k^\top W_k X_k`, :math:`\sum_k X_k^\top W_k y_k`, :math:`\sum_k y_k^\top W_k y_k` and
        :math:`-\sum_k \log |W_k|`.
        """
        across = self.grams[:, :, self.random] @ root
        inner = torch.eye(len(root)).to(root) + root.T @ across[:, self.random]
        factor = torch.linalg.cholesky(inner)
        half = torch.linalg.solve_triangular(factor, across.mT, upper=False)
        moments = (self.moments[:, self.random] @ root).unsqueeze(2)
        half_moment = torch.linalg.solve_triangular(factor, moments, upper=False)
        return (
            self.gram - (half.mT @ half).sum(0),
            self.moments.sum(0) - (half.mT @ half_moment).sum(0).squeeze(1),
            self.square - half_moment.square().sum(),
            2 * factor.diagonal(dim1=1, dim2=2).log().sum(),
        )

    def estimate(self, root: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return restricted log-likelihood, σ², β and the Cholesky factor of β's precision times σ²."""
        gram, moment, square, log_det = self.weighted(root)
        factor = torch.linalg.cholesky(gram)
        fixed = torch.cholesky_solve(moment.unsqueeze(1), factor).squeeze(1)
        freedom = self.num_examples - len(fixed)
        noise = (square - moment @ fixed) / freedom
        log_dets = log_det + 2 * factor.diagonal().log().sum()
        return -(freedom * (1 + (2 * math.pi * noise).log()) + log_dets) / 2, noise, fixed, factor


def _maximise(data: _Stacked) -> Tensor:
    """Return the triangular root of Ψ/σ² at the best maximum of a few searches, in units of the columns' norms."""
    size = len(data.random)
    rows, columns = torch.tril_indices(size, size)
    unit = data.scale[data.random].unsqueeze(1) / math.sqrt(data.num_examples)

    def root_of(entries: Tensor) -> Tensor:
        return torch.zeros(size, size, dtype=torch.float64).index_put((rows, columns), entries) / unit

    def value_and_slope(entries: NDArray) -> tuple[float, NDArray]:
        variable = torch.tensor(entries, requires_grad=True)
        try:
            log_likelihood, *_ = data.estimate(root_of(variable))
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return math.inf, np.zeros_like(entries)
        value = -log_likelihood / data.num_examples
        (slope,) = torch.autograd.grad(value, variable)
        return value.item(), slope.numpy()

    found = []
    for start in STARTS:
        entries = (start * torch.eye(size))[rows, columns].double().numpy()
        with np.errstate(all="ignore"):
            end = minimize(value_and_slope, entries, jac=True, method="BFGS", options={"gtol": 1e-10})
        if math.isfinite(end.fun) and np.abs(end.jac).max() < SLOPE:
            found.append((end.fun, root_of(torch.tensor(end.x))))
    if not found:
        what = f"the restricted likelihood of {len(data.grams)} clients with {size} random column(s) has no maximum"
        remedy = "standardise inputs and targets, take columns out of random, or give clients more examples"
        raise FedBayesError(f"{what} that can be found in double precision: {remedy}")
    return min(found, key=lambda each: each[0])[1]
