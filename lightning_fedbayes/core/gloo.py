"""Collective operations over Gloo, on the CPU, whatever device the processes train on."""

import pickle
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import ProcessGroupGloo

from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.exchange import Collective

TIMEOUT = timedelta(hours=12)
"""Time that a process waits for another that is alive. The end of another process is noticed at once."""
HEAD = struct.Struct("!QQ")
"""Head of a message: its length, and the length of the longest message that its sender sends in this call."""
WITH_HEAD = 2**10
"""Bytes of a message that travel with its head: one call of Gloo is enough for most messages. A call takes up to 4 ms
where a process has a single core, because Gloo's thread spins."""

BEGINNING = HEAD.size + WITH_HEAD


class GlooCollective(Collective):
    """Collective operations in a separate group of processes, which find each other through a torch ``store``."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.calls = 0
        self.bytes_sent = 0
        self._group: Any = ProcessGroupGloo(PrefixStore("lightning_fedbayes", store), rank, size, TIMEOUT)

    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        self.calls += 1
        packed = {id(value): b"" for value in values}  # a value that goes to all processes is packed once
        for other, value in enumerate(values):
            if other != self.rank and not packed[id(value)]:
                packed[id(value)] = pickle.dumps(value, protocol=5)
        messages = [b"" if other == self.rank else packed[id(value)] for other, value in enumerate(values)]
        longest = max(map(len, messages))
        firsts = [HEAD.pack(len(each), longest) + each[:WITH_HEAD] for each in messages]
        begun = self._exchange_bytes([each.ljust(BEGINNING, b"\0") for each in firsts], [BEGINNING] * self.size)
        heads = [HEAD.unpack_from(each) for each in begun]
        rests = [b""] * self.size
        if max(longest for _, longest in heads) > WITH_HEAD:
            lengths = [max(0, length - WITH_HEAD) for length, _ in heads]
            rests = self._exchange_bytes([message[WITH_HEAD:] for message in messages], lengths)
        inbox = [each[HEAD.size : HEAD.size + length] + rest for each, rest, (length, _) in zip(begun, rests, heads)]
        return [values[other] if other == self.rank else pickle.loads(inbox[other]) for other in range(self.size)]

    def _exchange_bytes(self, parts: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
        """Send ``parts``, one per process. Return one from each, of ``lengths`` in bytes."""
        content = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)
        sent = [len(each) for each in parts]
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        work = self._group.alltoall_base(received, content[: sum(sent)], list(lengths), sent)
        try:
            work.wait()
        except RuntimeError as error:
            raise FederationError(
                f"process {self.rank} of {self.size} waits for another that has ended; its output says what "
                "stopped it. Resume from the last checkpoint with ckpt_path='last'"
            ) from error
        self.bytes_sent += sum(sent) - sent[self.rank]
        return [each.numpy().tobytes() for each in received.split(list(lengths))]
