"""Processes that meet through Gloo, on the CPU, whatever device they train on."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo  # pyright: ignore

from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.processes.base import Processes

TIMEOUT = timedelta(hours=12)
"""How long a process waits for one that is alive; of one that has died it hears at once."""


HEAD = struct.Struct("!QQ")
"""What a message begins with: its length, and that of the longest that its sender sends in this meeting."""

WITH_HEAD = 2**10
"""So many bytes of a message travel with its head, and most meetings are over then: where a process has one core alone,
Gloo takes up to 4 ms for a call, because its thread spins."""

BEGINNING = HEAD.size + WITH_HEAD


class GlooProcesses(Processes):
    """A process group of its own: torch's default group stays unused, so that nothing else is synchronised.

    Args:
        store: where the processes find each other.
        rank, count: number of this process, and of all.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self.meetings = 0
        self.bytes_sent = 0
        self._group: Any = ProcessGroupGloo(PrefixStore("lightning_fedbayes", store), rank, count, TIMEOUT)

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """See :meth:`Processes.exchange`."""
        self.meetings += 1
        packed = {id(value): b"" for value in values}  # what all are told is packed once
        for other, value in enumerate(values):
            if other != self.rank and not packed[id(value)]:
                packed[id(value)] = pickle.dumps(value, protocol=5)
        messages = [b"" if other == self.rank else packed[id(value)] for other, value in enumerate(values)]
        longest = max(map(len, messages))
        begun = self._all_to_all([_beginning(each, longest) for each in messages], [BEGINNING] * self.count)
        heads = [HEAD.unpack_from(each) for each in begun]
        rests = [b""] * self.count
        if max(longest for _, longest in heads) > WITH_HEAD:
            lengths = [max(0, length - WITH_HEAD) for length, _ in heads]
            rests = self._all_to_all([message[WITH_HEAD:] for message in messages], lengths)
        said = [each[HEAD.size : HEAD.size + length] + rest for each, rest, (length, _) in zip(begun, rests, heads)]
        return [values[other] if other == self.rank else pickle.loads(said[other]) for other in range(self.count)]

    def _all_to_all(self, parts: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
        """What each process has for this one, of as many bytes as ``lengths`` says, for what it has for each."""
        content = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)
        sent = [len(each) for each in parts]
        heard = torch.empty(sum(lengths), dtype=torch.uint8)
        self._meet(self._group.alltoall_base(heard, content[: sum(sent)], list(lengths), sent))
        self.bytes_sent += sum(sent) - sent[self.rank]
        return [each.numpy().tobytes() for each in heard.split(list(lengths))]

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


def _beginning(message: bytes, longest: int) -> bytes:
    """The head of a message and as much of it as travels with it."""
    return (HEAD.pack(len(message), longest) + message[:WITH_HEAD]).ljust(BEGINNING, b"\0")
