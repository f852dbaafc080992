"""Sums over examples: all that a linear model needs of the data of a client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_flag, listed
from lightning_fedbayes.core.posterior import check_tensor


@dataclass(frozen=True, eq=False)
class LinearStatistics:
    r"""Sums over the examples of one client: all that a linear model needs of its data, and all that the client sends.

    Statistics of parts of a client's data add up, by ``+``, to those of the whole, and ``-`` takes a part out again.
    Those of a client with few examples can reveal its examples, as those of one example do. Secure summation helps
    where the sums of all clients are enough, as for a :class:`~lightning_fedbayes.BayesianHead`; not for a
    :class:`~lightning_fedbayes.HierarchicalLinearRegression`, which needs the sums of each client by themselves.

    Args:
        gram: :math:`X^\top X`, float64, shape (columns, columns).
        moment: :math:`X^\top y`, float64, shape (columns,), or (columns, targets) for several.
        square: :math:`y^\top y`, float64, a scalar tensor, or shape (targets,).
        num_examples: number of rows of X.

    Raises:
        FedBayesError: shapes that do not fit, values that are not finite or not float64, or a Gram matrix that is not
            symmetric.

    >>> LinearStatistics.of(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 2.0])).moment
    tensor([3., 7.], dtype=torch.float64)
    """

    gram: Tensor
    moment: Tensor
    square: Tensor
    num_examples: int

    def __post_init__(self) -> None:
        check_at_least("num_examples", self.num_examples, 0, error=FedBayesError)
        for name in ("gram", "moment", "square"):
            check_sums(name, getattr(self, name))
        columns, targets = self.moment.shape[:1], self.moment.shape[1:]
        fits = self.gram.shape == (*columns, *columns) and self.square.shape == targets
        if not fits or self.moment.ndim not in (1, 2) or not self.moment.numel():
            raise FedBayesError(
                f"gram {tuple(self.gram.shape)}, moment {tuple(self.moment.shape)} and square "
                f"{tuple(self.square.shape)}: give (columns, columns), (columns,) and (), of at least one column, or "
                "(columns, columns), (columns, targets) and (targets,)"
            )
        if not (torch.equal(self.gram, self.gram.T) or torch.allclose(self.gram, self.gram.T)):
            raise FedBayesError("gram is not symmetric: give X.T @ X, as LinearStatistics.of does")

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, bias: bool = True) -> LinearStatistics:
        """Statistics of a client's examples, computed in float64 on the device of ``inputs`` and kept on the CPU.

        Args:
            inputs: shape (examples, features); a client may have no examples.
            targets: shape (examples,), (examples, 1), which is the same, or (examples, targets), any units.
            bias: put a column of ones before the features: column 0 is then the intercept, column j feature j - 1.

        Raises:
            FedBayesError: shapes that do not fit, or a value that is not finite.
        """
        check_flag("bias", bias, error=FedBayesError)
        check_examples(inputs, targets)
        targets = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
        design, targets = design_of(inputs, bias), targets.double()
        square = targets @ targets if targets.ndim == 1 else targets.square().sum(0)
        return cls((design.T @ design).cpu(), (design.T @ targets).cpu(), square.cpu(), len(inputs))

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the Gram matrix, computed once."""
        values, vectors = torch.linalg.eigh(self.gram)
        return values, vectors

    def __add__(self, other: LinearStatistics) -> LinearStatistics:
        """Return the sums of both."""
        return self._plus(other, 1)

    def __sub__(self, other: LinearStatistics) -> LinearStatistics:
        """Return the sums without those of ``other``, which are a part of them.

        Raises:
            FedBayesError: ``other`` has more examples, or other columns.
        """
        return self._plus(other, -1)

    def _plus(self, other: LinearStatistics, sign: int) -> LinearStatistics:
        if not isinstance(other, LinearStatistics):
            return NotImplemented
        if self.moment.shape != other.moment.shape:
            raise FedBayesError(
                f"statistics of {tuple(self.moment.shape)} and of {tuple(other.moment.shape)} columns and targets: "
                "take those of the same"
            )
        if self.num_examples + sign * other.num_examples < 0:
            raise FedBayesError(
                f"{other.num_examples} of {self.num_examples} examples cannot be taken out: subtract what was added"
            )
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
    """Raise FedBayesError unless inputs and targets are finite, and of as many examples, at ``least`` so many."""
    for name, values in (("inputs", inputs), ("targets", targets)):
        check_real(name, values)
    if inputs.ndim != 2 or targets.ndim not in (1, 2) or len(inputs) != len(targets) or len(inputs) < least:
        raise FedBayesError(
            f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: give (examples, features), and "
            f"(examples,) or (examples, targets) of as many examples{', at least one' if least else ''}"
        )
    for name, values in (("inputs", inputs), ("targets", targets)):
        rows = values.unsqueeze(1) if values.ndim == 1 else values
        wrong = (~rows.isfinite()).any(0).nonzero().flatten().tolist()
        if wrong:
            raise FedBayesError(
                f"{name} are not finite in column {listed(wrong)}: leave out the examples, or put the column's mean in "
                "their place"
            )


def check_real(name: str, values: Tensor) -> None:
    """Raise FedBayesError unless ``values`` is a dense tensor of real numbers."""
    check_tensor(name, values, error=FedBayesError)
    if values.is_complex():
        raise FedBayesError(f"{name} is of {values.dtype}: give real numbers")


def check_sums(name: str, values: Tensor) -> None:
    """Raise FedBayesError unless ``values`` is a dense tensor of finite numbers in float64."""
    check_real(name, values)
    if values.dtype != torch.float64:
        raise FedBayesError(f"{name} is of {values.dtype}: give float64, sums of other precisions cancel badly")
    if not values.isfinite().all():
        raise FedBayesError(f"{name} is not finite: standardise inputs and targets, their squares overflow")
