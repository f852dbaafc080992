"""A posterior and its buffers as the arrays of a Flower message, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from lightning_fedbayes.errors import FusionError, PosteriorError
from lightning_fedbayes.posterior import GaussianPosterior

KINDS = ("mean", "variance", "buffer")
"""What an array can be; its key is the kind, a slash and the parameter's or buffer's name."""


def to_arrays(posterior: GaussianPosterior, buffers: Mapping[str, Tensor]) -> ArrayRecord:
    """``posterior`` and ``buffers`` as one ArrayRecord, floating-point values in float32, all others as they are.

    Deterministic parameters send no variance. Keys are ``mean/<name>``, ``variance/<name>`` and ``buffer/<name>``.

    Args:
        posterior: means and variances, any floating dtype; bfloat16, which Flower cannot send, is exact in float32.
        buffers: name → tensor.

    >>> q = GaussianPosterior({"w": torch.zeros(2), "b": torch.zeros(1)}, {"w": torch.ones(2), "b": torch.zeros(1)})
    >>> sorted(to_arrays(GaussianPosterior.point_mass({"w": torch.zeros(2)}), {"steps": torch.tensor(3)}))
    ['buffer/steps', 'mean/w']
    """
    stored = posterior.state_dict()
    parts = {"mean": stored["mean"], "variance": stored["variance"], "buffer": buffers}
    return ArrayRecord({
        f"{kind}/{name}": Array(_sendable(value)) for kind, part in parts.items() for name, value in part.items()
    })


def from_arrays(arrays: ArrayRecord, who: str) -> tuple[GaussianPosterior, dict[str, Tensor]]:
    """What :func:`to_arrays` sent.

    Args:
        arrays: of a message; nothing in it is trusted.
        who: whose they are, for messages.

    Returns: the posterior, float32, and the buffers in the dtype they were sent in.

    Raises:
        FusionError: an array of another kind, one that cannot be read, a mean or variance that is no real number or
            negative, or a variance without a mean.
    """
    parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for key, array in arrays.items():
        kind, _, name = key.partition("/")
        if kind not in parts:
            raise FusionError(f"{who}: array '{key}' is none of {', '.join(f'{known}/…' for known in KINDS)}")
        try:
            value = torch.from_numpy(array.numpy())
        except Exception as error:  # bytes of a stranger: NumPy raises what it likes
            raise FusionError(f"{who}: array '{key}' cannot be read: {error}") from None
        if kind != "buffer":
            if not value.is_floating_point():
                raise FusionError(f"{who}: array '{key}' is {value.dtype}; means and variances are floating-point")
            value = value.to(torch.float32)
        parts[kind][name] = value
    orphans = sorted(parts["variance"].keys() - parts["mean"].keys())
    if orphans:
        raise FusionError(f"{who}: variances without a mean: {', '.join(orphans)}")
    try:
        posterior = GaussianPosterior.from_state_dict(parts)
    except PosteriorError as error:
        raise FusionError(f"{who}: {error}") from None
    return posterior, parts["buffer"]


def probabilistic_names(arrays: ArrayRecord) -> set[str]:
    """Names of the parameters that come with a variance."""
    return {key.removeprefix("variance/") for key in arrays if key.startswith("variance/")}


def _sendable(value: Tensor) -> Tensor:
    """``value`` on the CPU, floating-point values in float32."""
    detached = value.detach().cpu()
    return detached.to(torch.float32) if detached.is_floating_point() else detached
