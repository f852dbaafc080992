"""Processes that meet through Gloo, on the CPU, whatever device they train on."""

from __future__ import annotations

import itertools
import pickle
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo  # pyright: ignore

from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.processes.base import Processes, block_bounds

T = TypeVar("T")

TIMEOUT = timedelta(hours=12)
"""How long a process waits for one that is alive; of one that has died it hears at once."""


class GlooProcesses(Processes):
    """A process group of its own: torch's default group stays unused, so that nothing else is synchronised.

    Args:
        store: where the processes find each other.
        rank, count: number of this process, and of all.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self.bytes_sent = 0
        self._group: Any = ProcessGroupGloo(PrefixStore("lightning_fedbayes", store), rank, count, TIMEOUT)

    def broadcast(self, value: T, source: int = 0) -> T:
        """See :meth:`Processes.broadcast`."""
        own = _pickled(value) if self.rank == source else torch.zeros(0, dtype=torch.uint8)
        length = torch.tensor([len(own)])
        self._meet(self._group.broadcast(length, source))
        content = own if self.rank == source else torch.zeros(int(length), dtype=torch.uint8)
        self._meet(self._group.broadcast(content, source))
        self._count_bytes(content, self.count - 1 if self.rank == source else 0)
        return value if self.rank == source else pickle.loads(bytes(content.numpy()))

    def gather(self, value: T) -> list[T]:
        """See :meth:`Processes.gather`."""
        own = _pickled(value)
        lengths = self._gather_equal(torch.tensor([len(own)]))
        longest = int(torch.cat(lengths).max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        everyone = self._gather_equal(padded)
        return [
            pickle.loads(bytes(each[: int(length)].numpy())) for each, length in zip(everyone, lengths, strict=True)
        ]

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, of one shape and dtype."""
        everyone = [torch.empty_like(tensor) for _ in range(self.count)]
        self._meet(self._group.allgather([everyone], [tensor]))
        self._count_bytes(tensor, self.count - 1)
        return everyone

    def sum(self, tensor: Tensor) -> Tensor:
        """See :meth:`Processes.sum`."""
        total = tensor.clone(memory_format=torch.contiguous_format)  # Gloo adds memory, whatever its order
        self._meet(self._group.allreduce([total]))
        self._count_bytes(tensor, 2 * (self.count - 1) / self.count)  # of a ring
        return total

    def columns(self, rows: Tensor) -> Tensor:
        """See :meth:`Processes.columns`."""
        bounds = block_bounds(rows.shape[1], self.count)
        width = bounds[self.rank + 1] - bounds[self.rank]
        counts = [int(each) for each in self._gather_equal(torch.tensor([len(rows)]))]
        sent = [rows[:, start:end].flatten() for start, end in itertools.pairwise(bounds)]
        received = rows.new_empty(sum(counts) * width)
        self._meet(self._group.alltoall_base(
            received, torch.cat(sent), [count * width for count in counts], [len(each) for each in sent]
        ))
        self._count_bytes(rows, 1 - len(sent[self.rank]) / max(rows.numel(), 1))
        return received.view(sum(counts), width)

    def join(self, block: Tensor) -> Tensor:
        """See :meth:`Processes.join`."""
        widths = [int(each) for each in self._gather_equal(torch.tensor([block.shape[1]]))]
        padded = block.new_zeros(len(block), max(widths))
        padded[:, : block.shape[1]] = block
        return torch.cat([each[:, :width] for each, width in zip(self._gather_equal(padded), widths)], 1)

    def _meet(self, work: Any) -> None:
        """Wait until all processes have done their part.

        Raises:
            FederationError: one of them has ended.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise FederationError(
                f"process {self.rank} of {self.count} waits for another that has ended; what stopped it stands in its "
                "own output. Resume from the last checkpoint with ckpt_path='last'"
            ) from error

    def _count_bytes(self, tensor: Tensor, times: float) -> None:
        self.bytes_sent += round(tensor.numel() * tensor.element_size() * times)


def _pickled(value: Any) -> Tensor:
    """``value`` as bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
