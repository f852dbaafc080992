"""Slope and curvature of a softmax head's loss at given weights: what a client sends in one exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_kind
from lightning_fedbayes.modules.linear_statistics import LinearStatistics, check_sums, with_bias
from lightning_fedbayes.sources.curvature import draws_of_outputs

DRAWS = 128
"""Draws of the logits by which expectations under a posterior are taken, the same in every exchange."""


@dataclass(frozen=True, eq=False)
class HeadSlopes:
    r"""Sums over the examples of one client, at the weights W that the server has sent. They add up by ``+``.

    With :math:`p_i = \mathrm{softmax}(W \tilde\phi_i)` and :math:`\tilde\phi = (\phi, 1)`; of a variational posterior
    everything is its expectation under it.

    Args:
        loss: :math:`-\sum_i \log p_{i y_i}`, in nats, a scalar tensor.
        slope: :math:`\sum_i (p_i - e_{y_i}) \tilde\phi_i^\top`, shape (classes, columns).
        spread: :math:`\sum_i \mathrm{diag}(p_i) - p_i p_i^\top`, shape (classes, classes).
        curvature: :math:`\sum_i p_{ic} p_{id} \tilde\phi_i \tilde\phi_i^\top` for every pair of classes c < d, shape
            (pairs, columns, columns); or no pair, where they are too many.
        num_examples: their number.

    Raises:
        FedBayesError: shapes that do not fit, or values that are not finite or not float64.
    """

    loss: Tensor
    slope: Tensor
    spread: Tensor
    curvature: Tensor
    num_examples: int

    def __post_init__(self) -> None:
        check_at_least("num_examples", self.num_examples, 0, error=FedBayesError)
        for name in ("loss", "slope", "spread", "curvature"):
            check_sums(name, getattr(self, name))
        classes, columns = self.slope.shape if self.slope.ndim == 2 else (0, 0)
        pairs = classes * (classes - 1) // 2
        fits = self.curvature.shape[0] in (0, pairs) and self.curvature.shape[1:] == (columns, columns)
        if not columns or self.loss.ndim or self.spread.shape != (classes, classes) or not fits:
            raise FedBayesError(
                f"slope {tuple(self.slope.shape)}, spread {tuple(self.spread.shape)} and curvature "
                f"{tuple(self.curvature.shape)}: give (classes, columns), (classes, classes) and (0 or pairs of "
                "classes, columns, columns)"
            )

    @classmethod
    def at_zero(cls, sums: LinearStatistics, pairs: bool) -> HeadSlopes:
        """Return the sums at W = 0, which follow from those of the first exchange: every class is as probable.

        Args:
            sums: of examples with one-hot targets, the column of ones last.
            pairs: whether the curvature is wanted.
        """
        gram, classes, count = sums.gram, sums.moment.shape[1], sums.num_examples
        eye = torch.eye(classes).to(gram)
        curvature = (gram / classes**2).expand(classes * (classes - 1) // 2 if pairs else 0, -1, -1)
        return cls(
            gram.new_tensor(count * math.log(classes)),
            gram[-1] / classes - sums.moment.T,
            count * (eye - 1 / classes) / classes,
            curvature,
            count,
        )

    @classmethod
    def of(cls, weights: Tensor, design: Tensor, labels: Tensor, pairs: bool) -> HeadSlopes:
        """Return the sums at ``weights``.

        Args:
            weights: W, float64, shape (classes, columns).
            design: :math:`\\tilde\\phi`, float64, shape (examples, columns).
            labels: classes, shape (examples,).
            pairs: whether the curvature is wanted.
        """
        return cls._of(design @ weights.T[None], design, labels, pairs)

    @classmethod
    def expected(cls, mean: Tensor, covariance: Tensor, design: Tensor, labels: Tensor, pairs: bool) -> HeadSlopes:
        """Return the expectations of the sums under a posterior.

        Args:
            mean, covariance: of the logits of each example, see :meth:`HeadFit.moments`.
            design, labels, pairs: see :meth:`of`.
        """
        with torch.random.fork_rng([mean.device] if mean.is_cuda else []):
            torch.manual_seed(0)
            logits = draws_of_outputs(mean, covariance, DRAWS)
        return cls._of(logits, design, labels, pairs)

    @classmethod
    def _of(cls, logits: Tensor, design: Tensor, labels: Tensor, pairs: bool) -> HeadSlopes:
        """Return the sums for draws of the logits, shape (draws, examples, classes)."""
        logs = logits.log_softmax(-1)
        probs, classes = logs.exp(), logits.shape[-1]
        mean, products = probs.mean(0), torch.einsum("snc,snd->ncd", probs, probs) / len(probs)
        truth = torch.nn.functional.one_hot(labels.long(), classes).to(mean)
        spread = mean.sum(0).diag() - products.sum(0)
        chosen = torch.triu_indices(classes, classes, 1).T.tolist() if pairs else []
        found = [design.T @ (products[:, c, d, None] * design) for c, d in chosen]
        curvature = torch.stack(found) if found else design.new_zeros(0, *2 * design.shape[1:])
        return cls(-(logs.mean(0) * truth).sum(), (mean - truth).T @ design, spread, curvature, len(labels))

    def __add__(self, other: HeadSlopes) -> HeadSlopes:
        if not isinstance(other, HeadSlopes):
            return NotImplemented
        if self.curvature.shape != other.curvature.shape or self.slope.shape != other.slope.shape:
            raise FedBayesError(
                f"slopes {tuple(self.slope.shape)} and {tuple(other.slope.shape)} do not add up: give all clients the "
                "same fit"
            )
        return HeadSlopes(
            self.loss + other.loss,
            self.slope + other.slope,
            self.spread + other.spread,
            self.curvature + other.curvature,
            self.num_examples + other.num_examples,
        )

    def terms(self, gram: Tensor) -> list[tuple[Tensor, Tensor]]:
        r"""Return the curvature as Kronecker products :math:`B \otimes A`, pairs (A, B).

        .. math:: \sum_i (\mathrm{diag}(p_i) - p_i p_i^\top) \otimes \tilde\phi_i \tilde\phi_i^\top =
                  \sum_{c<d} (e_c - e_d)(e_c - e_d)^\top \otimes \sum_i p_{ic} p_{id} \tilde\phi_i \tilde\phi_i^\top

        exactly; without the pairs, the one product of the mean spread and the Gram matrix.
        """
        classes = len(self.slope)
        if not len(self.curvature):
            return [(gram, self.spread / max(1, self.num_examples))]
        eye = torch.eye(classes).to(self.slope)
        c, d = torch.triu_indices(classes, classes, 1)
        differences = eye[c] - eye[d]
        return [(a, torch.outer(each, each)) for a, each in zip(self.curvature, differences)]


def design_of(features: Tensor) -> Tensor:
    """Return features in float64, before a column of ones."""
    check_kind("features", features, Tensor, "give a tensor (examples, features)", error=FedBayesError)
    if features.ndim != 2 or not features.shape[1]:
        raise FedBayesError(f"features {tuple(features.shape)}: give (examples, features), at least one feature")
    return with_bias(features)
