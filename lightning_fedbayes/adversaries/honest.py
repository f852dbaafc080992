"""Mean and spread of the honest clients of a round, without the clients."""

from __future__ import annotations

import torch
from torch import Tensor


class HonestMoments:
    r"""Mean and standard deviation per entry of vectors that come one by one, by Welford's recursion.

    .. math:: m_k = m_{k-1} + (x_k - m_{k-1})/k, \qquad M_k = M_{k-1} + (x_k - m_{k-1})(x_k - m_k)

    Memory is that of two vectors, whatever their number.

    Args:
        like: a vector of the shape, dtype and device of those to come.

    Attributes:
        count: number of vectors so far.
        mean: their mean, shape (P,); zeros at first.

    >>> moments = HonestMoments(torch.zeros(1))
    >>> moments.add(torch.tensor([1.0]))
    >>> moments.add(torch.tensor([3.0]))
    >>> moments.mean, moments.std
    (tensor([2.]), tensor([1.]))
    """

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like)
        self._squares = torch.zeros_like(like)

    def add(self, vector: Tensor) -> None:
        """Take in one vector, shape (P,)."""
        self.count += 1
        difference = vector - self.mean
        self.mean = self.mean + difference / self.count
        self._squares += difference * (vector - self.mean)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the population, √(M/k), shape (P,); needs one vector."""
        return (self._squares / self.count).sqrt()
