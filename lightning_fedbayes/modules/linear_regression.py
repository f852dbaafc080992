"""Bayesian linear regression in closed form, of one data set or of many clients, from sums over examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError, listed
from lightning_fedbayes.metrics.functional.utilities import check_numbers
from lightning_fedbayes.metrics.likelihoods import RegressionPrediction


@dataclass(frozen=True, eq=False)
class LinearStatistics:
    r"""Sums over the examples of one client: all that a linear model needs of its data, and all that the client sends.

    Statistics of parts of the data add up by ``+``, and ``-`` takes a part out. Those of few examples can reveal them.

    Args:
        gram: :math:`X^\top X`, float64, shape (columns, columns).
        moment: :math:`X^\top y`, float64, shape (columns,), or (columns, targets) for several.
        square: :math:`y^\top y`, float64, a scalar tensor, or shape (targets,).
        num_examples: number of rows of X.

    Raises:
        FedBayesError: shapes that do not fit, values that are not finite or not float64, or an asymmetric Gram matrix.

    >>> LinearStatistics.of(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 2.0])).moment
    tensor([3., 7.], dtype=torch.float64)
    """

    gram: Tensor
    moment: Tensor
    square: Tensor
    num_examples: int

    def __post_init__(self) -> None:
        errors.check_at_least("num_examples", self.num_examples, 0, error=FedBayesError)
        for name in ("gram", "moment", "square"):
            check_sums(name, getattr(self, name))
        columns, targets = self.moment.shape[:1], self.moment.shape[1:]
        fits = self.gram.shape == (*columns, *columns) and self.square.shape == targets
        if not fits or self.moment.ndim not in (1, 2) or not self.moment.numel():
            given = ", ".join(f"{name} {tuple(getattr(self, name).shape)}" for name in ("gram", "moment", "square"))
            wanted = "(columns, columns), (columns,) and (), or (columns, columns), (columns, targets) and (targets,)"
            raise FedBayesError(f"{given}: give {wanted}, of at least one column")
        if not (torch.equal(self.gram, self.gram.T) or torch.allclose(self.gram, self.gram.T)):
            raise FedBayesError("gram is not symmetric: give X.T @ X, as LinearStatistics.of does")

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, bias: bool = True) -> "LinearStatistics":
        """Return statistics of a client's examples, computed in float64 on the inputs' device and kept on the CPU.

        Args:
            inputs: shape (examples, features). A client may have no examples.
            targets: shape (examples,) or, the same, (examples, 1), or (examples, targets), any units.
            bias: put a column of ones before the features: column 0 is then the intercept, column j feature j - 1.

        Raises FedBayesError: shapes that do not fit, or a value that is not finite.
        """
        errors.check_flag("bias", bias, error=FedBayesError)
        check_examples(inputs, targets)
        targets = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
        design, targets = design_of(inputs, bias), targets.double()
        square = targets @ targets if targets.ndim == 1 else targets.square().sum(0)
        return cls((design.T @ design).cpu(), (design.T @ targets).cpu(), square.cpu(), len(inputs))

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the Gram matrix."""
        values, vectors = torch.linalg.eigh(self.gram)
        return values, vectors

    def __add__(self, other: "LinearStatistics") -> "LinearStatistics":
        return self._plus(other, 1)

    def __sub__(self, other: "LinearStatistics") -> "LinearStatistics":
        """Return the sums without ``other``, a part of them. Raise FedBayesError for more examples or other columns."""
        return self._plus(other, -1)

    def _plus(self, other: "LinearStatistics", sign: int) -> "LinearStatistics":
        if not isinstance(other, LinearStatistics):
            return NotImplemented
        if self.moment.shape != other.moment.shape:
            what = f"statistics of {tuple(self.moment.shape)} and of {tuple(other.moment.shape)} columns and targets"
            raise FedBayesError(f"{what}: add statistics of the same")
        if self.num_examples + sign * other.num_examples < 0:
            remedy = "subtract what was added"
            raise FedBayesError(f"{other.num_examples} of {self.num_examples} examples cannot be taken out: {remedy}")
        made = object.__new__(LinearStatistics)  # sums of what has been checked
        for name in ("gram", "moment", "square", "num_examples"):
            own, others = getattr(self, name), getattr(other, name)
            object.__setattr__(made, name, own + others if sign > 0 else own - others)
        return made


def design_of(inputs: Tensor, bias: bool) -> Tensor:
    """Return ``inputs`` in float64, after a column of ones if there is a bias."""
    columns = [torch.ones_like(inputs[:, :1] if inputs.shape[1] else inputs.new_ones(len(inputs), 1))] * bias
    return torch.cat([*columns, inputs], 1).double()


def with_bias(inputs: Tensor) -> Tensor:
    """Return ``inputs`` in float64, before a last column of ones."""
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1).double()


def check_examples(inputs: Tensor, targets: Tensor, least: int = 0) -> None:
    """Raise FedBayesError unless inputs and targets are finite, and of as many examples, at ``least`` this many."""
    check_numbers(inputs=inputs, targets=targets)
    if inputs.ndim != 2 or targets.ndim not in (1, 2) or len(inputs) != len(targets) or len(inputs) < least:
        wanted = f"(examples,) or (examples, targets) of as many examples{', at least one' if least else ''}"
        given = f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}"
        raise FedBayesError(f"{given}: give (examples, features), and {wanted}")
    for name, values in (("inputs", inputs), ("targets", targets)):
        rows = values.unsqueeze(1) if values.ndim == 1 else values
        wrong = (~rows.isfinite()).any(0).nonzero().flatten().tolist()
        if wrong:
            remedy = "leave out the examples, or put the column's mean in their place"
            raise FedBayesError(f"{name} are not finite in column {listed(wrong)}: {remedy}")


def check_sums(name: str, values: Tensor) -> None:
    """Raise FedBayesError unless ``values`` is a dense tensor of finite numbers in float64."""
    check_numbers(**{name: values})
    if values.dtype != torch.float64:
        raise FedBayesError(f"{name} is of {values.dtype}: give float64, sums of other precisions cancel badly")
    if not values.isfinite().all():
        raise FedBayesError(f"{name} is not finite: standardise inputs and targets, their squares overflow")


NoiseEstimate = Literal["evidence", "target"]

STEPS, TOLERANCE = 10_000, 1e-12
"""Fixed-point iteration for the noise: most steps, and relative change of the variance at convergence."""
EXACT = 1e-9
"""Noise variance relative to the mean square of the targets below which the fit is exact, and number of weights that
the data determine below which they determine none."""


@dataclass(frozen=True, eq=False)
class BayesianLinearRegression:
    r"""Linear model with a Gaussian prior on its weights, under Gaussian noise of one variance for all targets.

    .. math:: y = W^\top \tilde x + \varepsilon, \quad \tilde x = (x, 1), \quad
              \varepsilon \sim N(0, \sigma^2), \quad W_{ij} \sim N(0, s^2)

    The posterior has the natural parameters

    .. math:: \Lambda = I/s^2 + \tilde X^\top \tilde X / \sigma^2, \qquad \Lambda M = \tilde X^\top Y / \sigma^2.

    Only sums over examples are kept: several clients' add up to the posterior of the pooled data (:meth:`conflate`).

    When to use it: as the baseline that any network has to beat, and as the exact answer for federated inference.
    Standardise inputs and targets, so that a prior of standard deviation 1 is vague. The bias has the same prior.

    Args:
        sums: of the examples, of :math:`\tilde x`, with a moment of shape (features + 1, targets).
        prior_std: standard deviation s of the prior.
        noise: variance σ² in squared units of the targets, or how to estimate it: see :meth:`fit`.

    Source: Bishop (2006) §3.3 and §3.5; as a baseline of [FedAG], §4.3.

    >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
    >>> BayesianLinearRegression.fit(x, 3 * x, noise=0.01).mean.flatten()
    tensor([2.9982, 0.0000], dtype=torch.float64)
    """

    sums: LinearStatistics
    prior_std: float
    noise: float | NoiseEstimate

    @classmethod
    def fit(
        cls, inputs: Tensor, targets: Tensor, prior_std: float = 1.0, noise: float | NoiseEstimate = "evidence"
    ) -> "BayesianLinearRegression":
        """Return the posterior of ``inputs`` and ``targets``, computed in float64.

        Args:
            inputs: shape (examples, features). A constant column learns with the bias.
            targets: shape (examples,) or (examples, targets), any units.
            prior_std: standard deviation of the prior on weights and bias, in units of target per unit of input.
            noise: its variance, or a way to estimate it. "evidence": the variance under which the targets are most
                probable, the weights integrated out, see :func:`most_evident`. "target": the variance of the targets,
                too large if the inputs are informative.

        Raises FedBayesError: shapes that do not fit, no examples, a value that is not finite, ``prior_std`` or a given
        noise that is not positive, or an unknown ``noise``. The noise is estimated when it is first needed, so that
        clients too small for that can still be conflated.
        """
        errors.check_number("prior_std", prior_std, "(0, 1e100)", error=FedBayesError, why="it is a standard deviation")
        if isinstance(noise, str):
            errors.check_choice("noise", noise, get_args(NoiseEstimate), error=FedBayesError)
        else:
            errors.check_number("noise", noise, "(0, 1e100)", error=FedBayesError, why="it is a variance")
        check_examples(inputs, targets, least=1)
        targets = targets.unsqueeze(1) if targets.ndim == 1 else targets
        design, targets = with_bias(inputs), targets.double()
        sums = LinearStatistics(design.T @ design, design.T @ targets, targets.square().sum(0), len(design))
        return cls(sums, prior_std, noise)

    @staticmethod
    def conflate(models: "Sequence[BayesianLinearRegression]") -> "BayesianLinearRegression":
        r"""Return the posterior of all clients' data: product of their posteriors, the shared prior counted once.

        .. math:: \Lambda = \sum_k \Lambda_k - (K-1) I/s^2, \qquad \Lambda M = \sum_k \Lambda_k M_k

        Exact for clients of any size, if every client uses the same noise variance.

        Raises FedBayesError: no models, or models that differ in shape, prior or noise.
        Source: [FBDL] eq. (17), with full covariance.
        """
        errors.check_kind("models", models, Sequence, "give one per client", error=FedBayesError)
        if not models:
            raise FedBayesError("there are no models to conflate: give one per client")
        first = models[0]
        for number, model in enumerate(models):
            kind = BayesianLinearRegression
            errors.check_kind(f"model {number}", model, kind, "give fitted models", error=FedBayesError)
            for name in ("prior_std", "noise"):
                if getattr(model, name) != getattr(first, name):
                    values = f"{getattr(first, name)!r} in model 0 and {getattr(model, name)!r} in model {number}"
                    raise FedBayesError(f"{name} is {values}: fit all clients with the same")
        return BayesianLinearRegression(reduce(add, (each.sums for each in models)), first.prior_std, first.noise)

    @cached_property
    def noise_variance(self) -> float:
        r"""Variance σ² of the noise, given or estimated, in squared units of the targets.

        Raises FedBayesError if it cannot be estimated: all targets are equal, the fit is exact, or by evidence the
        weights leave less than one degree of freedom, :math:`n - \gamma < 1`.
        """
        if not isinstance(self.noise, str):
            return float(self.noise)
        sums, count = self.sums, self.sums.num_examples
        mean_square = float(sums.square.mean()) / count
        if self.noise == "target":
            variance = mean_square - float((sums.moment[-1] / count).square().mean())
        else:
            variance = most_evident(sums.gram, sums.moment, sums.square, count, self.prior_std)[1]
        if not variance > EXACT * mean_square:
            why = "they are all equal" if self.noise == "target" else "the line goes through them all"
        elif self.noise == "evidence" and count - self._determined(variance) < 1:
            why = "the weights leave less than one of them for it"
        else:
            return variance
        what = f"noise='{self.noise}' finds no variance of the noise in the targets of {count} examples"
        raise FedBayesError(f"{what}: {why}. Give the variance of the noise as a number, or more examples")

    def _determined(self, variance: float) -> float:
        r"""Return :math:`\gamma`, the number of weights that the data determine under this noise."""
        eigenvalues = self.sums.spectrum[0].clamp_min(0)
        return float((eigenvalues / (eigenvalues + variance / self.prior_std**2)).sum())

    @cached_property
    def precision(self) -> Tensor:
        """Λ, inverse covariance of weights and bias, the same for every target. Shape (features + 1, features + 1)."""
        gram = self.sums.gram
        return gram / self.noise_variance + torch.eye(len(gram)).to(gram) / self.prior_std**2

    @property
    def precision_mean(self) -> Tensor:
        """ΛM, shape (features + 1, targets)."""
        return self.sums.moment / self.noise_variance

    @cached_property
    def _root(self) -> Tensor:
        """Lower triangular L with LLᵀ = Λ. Raises FedBayesError if Λ is not positive definite in double precision."""
        try:
            return torch.linalg.cholesky(self.precision)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            given = f"with prior_std={self.prior_std:g} and a noise variance of {self.noise_variance:g}"
            remedy = "standardise the inputs, or give values nearer to 1"
            what = "the precision is not positive definite in double precision"
            raise FedBayesError(f"{what}, {given}: {remedy}") from None

    @property
    def mean(self) -> Tensor:
        """M, posterior mean of weights and, in the last row, bias. Shape (features + 1, targets)."""
        return torch.cholesky_solve(self.precision_mean, self._root)

    @property
    def covariance(self) -> Tensor:
        """Λ⁻¹, posterior covariance of the weights of any one target. Shape (features + 1, features + 1)."""
        return torch.cholesky_inverse(self._root)

    def predict(
        self, inputs: Tensor, samples: int = 10, generator: torch.Generator | None = None
    ) -> RegressionPrediction:
        r"""Return the exact predictive :math:`N(M^\top \tilde x,\; \sigma^2 + \tilde x^\top \Lambda^{-1} \tilde x)`.

        Args:
            inputs: shape (batch, features).
            samples: draws of the weights for the field ``samples`` of the result.
            generator: source of the draws. None: the global one.

        Returns: everything in the dtype of ``inputs``, the default one for integers.
        Raises FedBayesError: another number of features, or an estimate of the noise that fails.
        Source: Bishop (2006) eq. (3.58); [FedAG] eq. (6) with full covariance.
        """
        check_numbers(inputs=inputs)
        errors.check_at_least("samples", samples, 0, error=FedBayesError)
        columns, targets = self.sums.moment.shape
        if inputs.ndim != 2 or inputs.shape[1] != columns - 1:
            raise FedBayesError(f"inputs {tuple(inputs.shape)}: the model was fitted to (examples, {columns - 1})")
        design = with_bias(inputs)
        mean = design @ self.mean
        whitened = torch.linalg.solve_triangular(self._root, design.T, upper=False)
        epistemic = whitened.square().sum(0).unsqueeze(1).expand_as(mean)
        aleatoric = torch.full_like(mean, self.noise_variance)
        noise = torch.randn(samples, columns, targets, generator=generator, dtype=torch.float64)
        draws = mean + whitened.T @ noise.to(mean.device)
        fields = (mean, aleatoric + epistemic, aleatoric, epistemic, draws)
        dtype = torch.result_type(inputs, 1.0)
        return RegressionPrediction(*(field.to(dtype) for field in fields))


def most_evident(
    gram: Tensor, moment: Tensor, squares: Tensor, examples: float, prior_std: float | None, noise: float | None = None
) -> tuple[float, float]:
    r"""Return the standard deviation of the prior and the variance of the noise at MacKay's fixed point.

    .. math:: \sigma^2 = \frac{\|Y - X M\|^2}{T(n - \gamma)}, \qquad s^{-2} = \frac{T \gamma}{\|M\|^2}, \qquad
              \gamma = \sum_d \frac{g_d}{g_d + \sigma^2 / s^2}

    with the eigenvalues g of the Gram matrix. A ``prior_std`` s or ``noise`` σ² that is None is chosen, too. s is
    infinite where the data do not determine it, and tiny where weights of 0 are most evident. The noise may be 0.

    Source: Bishop (2006) eq. (3.91)-(3.95).
    """
    eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues = eigenvalues.clamp_min(0)
    rotated = (vectors.T @ moment).square().sum(1)
    total, targets = float(squares.sum()), moment.shape[1]
    variance = total / (examples * targets) if noise is None else noise
    std = prior_std if prior_std is not None else 1.0
    for _ in range(STEPS):
        shrunk = eigenvalues + variance / std**2
        residual = total - float((rotated * (2 / shrunk - eigenvalues / shrunk.square())).sum())
        determined = float((eigenvalues / shrunk).sum())
        if determined < EXACT and prior_std is None:
            break  # most evident are weights of 0: s would go on to fall
        before = variance, std
        if noise is None:
            variance = residual / (targets * (examples - determined))
            if not variance > EXACT * total / (examples * targets):
                return std, 0.0
        if prior_std is None:
            std = math.sqrt(float((rotated / shrunk.square()).sum()) / (targets * determined))
        if abs(variance - before[0]) <= TOLERANCE * variance and abs(std - before[1]) <= TOLERANCE * std:
            break
    return std, variance
