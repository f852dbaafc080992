r"""The Gaussian posterior whose precision is a sum of Kronecker products, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import check_at_least
from lightning_fedbayes.core.posterior import GaussianPosterior, zeros_like
from lightning_fedbayes.sources.curvature.systems import KroneckerSystem

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class KroneckerPosterior:
    r"""Gaussian posterior whose precision is a sum of Kronecker products, layer by layer.

    .. math:: \Lambda = \sum_k B_k \otimes A_k + s^{-2} I

    Args:
        mean: all parameters, name → tensor; those of no layer in ``terms`` are point masses.
        terms: layer → the pairs :math:`(A_k, B_k)` of the clients, float64.
        prior_precisions: layer → :math:`s^{-2}`, with the damping.
        buffers: their averages, for ``module.load_state_dict({**mean, **buffers}, strict=False)``.
    """

    mean: Mapping[str, Tensor]
    terms: Mapping[str, Sequence[tuple[Tensor, Tensor]]]
    prior_precisions: Mapping[str, float]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    linearised: ClassVar[bool] = True  # see GaussianPosterior

    @cached_property
    def systems(self) -> dict[str, KroneckerSystem]:
        r"""Layer → its :math:`\Lambda`."""
        return {layer: KroneckerSystem(terms, self.prior_precisions[layer]) for layer, terms in self.terms.items()}

    def diagonal(self) -> GaussianPosterior:
        r"""Return the mean-field posterior nearest to this one in reverse KL: the variances are :math:`1/\Lambda_{ii}`.

        Every other part of the package takes it; :class:`~lightning_fedbayes.PosteriorPredictive` takes either.
        """
        variance = {name: zeros_like(value) for name, value in self.mean.items()}
        for layer, terms in self.terms.items():
            diagonals = torch.stack([torch.outer(b.diagonal(), a.diagonal()) for a, b in terms])
            for name, value in split(1 / (diagonals.sum(0) + self.prior_precisions[layer]), layer, self.mean).items():
                variance[name] = value
        return GaussianPosterior(dict(self.mean), variance, linearised=True)

    def sample(self, draws: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        r"""Return exact draws of the parameters, name → shape (draws, \*shape); those of no layer are expanded.

        .. math:: \theta = \mu + \Lambda^{-1} z, \qquad
                  z = \sum_k B_k^{1/2} Z_k A_k^{1/2} + s^{-1} Z_0 \sim N(0, \Lambda)

        with one linear system per draw and layer.

        Args:
            draws: number of draws.
            generator: source of the noise; None: the global one.
        """
        check_at_least("draws", draws, 1)
        sets = {name: value.expand(draws, *value.shape) for name, value in self.mean.items()}
        for layer, terms in self.terms.items():
            roots, prior = [(_root(a), _root(b)) for a, b in terms], self.prior_precisions[layer]
            like = terms[0][1].new_empty(terms[0][1].shape[0], terms[0][0].shape[0])

            def noise(like: Tensor = like) -> Tensor:
                return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

            for name in split(like, layer, self.mean):
                sets[name] = sets[name].clone()
            for draw in range(draws):
                pushed = sum((b @ noise() @ a for a, b in roots), prior**0.5 * noise())
                moved = self.systems[layer].solve(pushed)
                for name, value in split(moved, layer, self.mean).items():
                    sets[name][draw] += value
        return sets

    def to(self, device: torch.device | str) -> KroneckerPosterior:
        """This posterior on another device."""
        return KroneckerPosterior(
            {name: value.to(device) for name, value in self.mean.items()},
            {layer: [(a.to(device), b.to(device)) for a, b in terms] for layer, terms in self.terms.items()},
            self.prior_precisions,
            {name: value.to(device) for name, value in self.buffers.items()},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a state for :meth:`from_state_dict`: tensors, numbers, and dicts and lists of them."""
        return {
            "mean": dict(self.mean),
            "terms": {layer: [list(pair) for pair in terms] for layer, terms in self.terms.items()},
            "prior_precisions": dict(self.prior_precisions),
            "buffers": dict(self.buffers),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> KroneckerPosterior:
        """The posterior that :meth:`state_dict` stored."""
        terms = {layer: [(a, b) for a, b in pairs] for layer, pairs in state["terms"].items()}
        return cls(dict(state["mean"]), terms, dict(state["prior_precisions"]), dict(state["buffers"]))


def joined(layer: str, tensors: Mapping[str, Tensor], leading: int = 0) -> Tensor:
    r"""Return weight and bias of a layer as one matrix, shape (\*, out, in), with the bias as last column.

    Args:
        layer: its name.
        tensors: name → value of a parameter's shape behind ``leading`` dimensions of its own.
        leading: their number.
    """
    prefix = f"{layer}." if layer else ""
    weight, bias = tensors[f"{prefix}weight"].flatten(leading + 1), tensors.get(f"{prefix}bias")
    return weight if bias is None else torch.cat([weight, bias[..., None]], -1)


def split(matrix: Tensor, layer: str, like: Mapping[str, Tensor]) -> Tensors:
    """Return what :func:`joined` joined, of the shapes and dtypes of the entries of ``like``."""
    prefix = f"{layer}." if layer else ""
    names = [name for name in (f"{prefix}weight", f"{prefix}bias") if name in like]
    width = like[names[0]].flatten(1).shape[1]
    parts = matrix[:, :width], matrix[:, width:]
    return {name: part.reshape(like[name].shape).to(like[name]) for name, part in zip(names, parts)}


def _root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt() @ vectors.T
