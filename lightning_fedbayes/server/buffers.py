"""Weighted averages of the tensors that clients send beside their posteriors: buffers, and those of a method."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, listed
from lightning_fedbayes.core.exchange import Reduction, Statistics
from lightning_fedbayes.fusion.rule import add


class BufferAverage:
    """Running weighted sums of the clients' buffers in one round.

    Args:
        before: the global buffers that the clients started from; None takes the first client's as the model of all.
        several: True if other processes have clients, too.
        added: prefix of the names of tensors that are added up, not averaged; None: all are averaged.
    """

    def __init__(self, before: Mapping[str, Tensor] | None, several: bool, added: str | None = None) -> None:
        self._before = before
        self._added = added
        self._several = several
        self._sums: dict[str, Tensor] = {}

    def check(self, buffers: Mapping[str, Tensor], who: str) -> None:
        """Raise FusionError unless ``buffers`` have the structure of those before and are finite wherever those are.

        Infinite entries are allowed where the global buffer has them: a mask of minus infinities is a buffer, too.
        """
        like = buffers if self._before is None else self._before
        if not like and not buffers:
            return
        wrong = [
            name
            for name in sorted(like.keys() | buffers.keys())
            if not _alike(like.get(name), buffers.get(name), self._adds(name))
        ]
        if wrong:
            raise FusionError(
                f"{who}: buffers {listed(wrong)} are not those of the clients before (names, shapes or dtypes "
                "differ); all clients must train the same network"
            )
        for name, value in buffers.items():
            known = torch.isfinite(like[name]) if self._before is not None else torch.tensor(True)
            if bool((~torch.isfinite(value) & known.to(value.device)).any()):
                raise FusionError(f"{who}: buffer '{name}' is not finite")

    def admit(self, buffers: Mapping[str, Tensor]) -> None:
        """Take checked buffers as the model of all others, if there is none yet."""
        if self._before is None:
            self._before = dict(buffers)

    def add(self, buffers: Mapping[str, Tensor], weight: float) -> None:
        """Add a client's buffers to the running sums."""
        for name, value in buffers.items():
            factor = 1.0 if self._adds(name) else weight
            if factor == 0:
                continue
            term = value.to(torch.complex128 if value.is_complex() else torch.float64) * factor
            self._sums[name] = self._sums[name] + term if name in self._sums else term

    def reduction(self) -> Reduction:
        """Return the weighted sums of all buffers as one flat vector; in one process, as they are."""
        own = self._sums
        if self._several:
            like = self._before or {}
            flat = [_as_real(own.get(name, torch.zeros_like(value))).flatten() for name, value in like.items()]
            own = {"buffers": torch.cat(flat)} if flat else {}
        return Reduction(own, len(own.get("buffers", ())), _add_all)

    def averages(self, sums: Statistics, total: float) -> dict[str, Tensor]:
        """Return the averages, in the dtypes of the global buffers, from :meth:`reduction` and the sum of weights."""
        if not self._several:
            return {
                name: self._cast(name, value if self._adds(name) else value / total) for name, value in sums.items()
            }
        averaged, start = {}, 0
        for name, value in (self._before or {}).items():
            stop = start + value.numel() * (2 if value.is_complex() else 1)
            summed = sums["buffers"][start:stop] if "buffers" in sums else torch.zeros(stop - start)
            average = torch.view_as_complex(summed.view(-1, 2)) if value.is_complex() else summed
            average = average.view(value.shape) / (1.0 if self._adds(name) else total)
            averaged[name] = self._cast(name, average).to(value.device)
            start = stop
        return averaged

    def _adds(self, name: str) -> bool:
        """Return True if a tensor is added up."""
        return self._added is not None and name.startswith(self._added)

    def _cast(self, name: str, value: Tensor) -> Tensor:
        """Return an averaged buffer in its own dtype, integers rounded."""
        assert self._before is not None
        dtype = self._before[name].dtype
        return (value if dtype.is_floating_point or dtype.is_complex else value.round()).to(dtype)


def _add_all(statistics: Statistics, other: Statistics) -> None:
    """Add every sum of ``other`` to ``statistics``, in place."""
    for name, value in other.items():
        add(statistics, name, value)


def _as_real(buffer: Tensor) -> Tensor:
    """Return ``buffer`` on the CPU in double precision, real and imaginary parts as two numbers."""
    own = buffer.to("cpu", torch.complex128 if buffer.is_complex() else torch.float64)
    return torch.view_as_real(own) if buffer.is_complex() else own


def _alike(first: Tensor | None, second: Tensor | None, floats: bool = False) -> bool:
    """Return True if both tensors are there, dense, and agree in shape and dtype; of ``floats`` any type will do."""
    if first is None or second is None or second.is_meta or second.layout != torch.strided:
        return False
    alike = first.dtype == second.dtype or (floats and second.is_floating_point())
    return alike and first.shape == second.shape
