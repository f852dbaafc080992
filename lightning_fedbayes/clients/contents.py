"""Digests of the clients' data, by which a resumed run knows another split."""

import copy
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightning_fedbayes.clients.snapshot import UNCHANGING, holds_generators
from lightning_fedbayes.core.seeding import seed_host

SECONDS = 1.0
"""Time after which no further clients are read: examples may be large files."""
AGREEING = 16
"""Pairs of readings that must agree, over all clients, before data count as not random. Half of the pairs of an
example that is flipped at random would."""


def digests(datasets: Sequence[Dataset], chosen: Sequence[int] | None = None) -> Tensor:
    """Return a digest of each client's first and last example, int64, shape (clients,). 0 where it is not known.

    A digest is of tensors, arrays, numbers and text, and of dicts, lists and tuples of them. Of other objects the type
    counts. Every example is read at least twice, in this process, from a shallow copy of its data set and under a fixed
    state of the global generators, which stay as they are. All are 0 if examples differ from reading to reading. It is
    0 for a data set that raises or that holds a random generator.

    Args:
        datasets: of the clients.
        chosen: clients to read. None: all in a random order, until :data:`SECONDS` are over.
    """
    found = torch.zeros(len(datasets), dtype=torch.int64)
    order = torch.randperm(len(datasets), generator=torch.Generator().manual_seed(0)).tolist()
    copies: dict[int, Any] = {}
    readings = max(2, -(-AGREEING // max(len(order if chosen is None else chosen), 1)))
    start = time.perf_counter()
    with isolate_rng():
        for client in order if chosen is None else chosen:
            try:
                dataset: Any = datasets[client]
                read = [_digest_at(dataset, place, copies) for place in (0, -1) for _ in range(readings)]
            except Exception:  # of the user's data set: training will report it
                continue
            if len({*read[:readings]}) > 1 or len({*read[readings:]}) > 1:
                return torch.zeros_like(found)
            if 0 not in read:
                found[client] = read[0] ^ read[-1] << 1 or 1
            if chosen is None and time.perf_counter() - start > SECONDS:
                break
    return found


def differing(datasets: Sequence[Dataset], stored: Tensor) -> list[int]:
    """Return the clients with other data than those of which :func:`digests` has ``stored`` the result."""
    known = stored.nonzero().flatten().tolist()
    now = digests(datasets, known)
    return [client for client in known if now[client] and now[client] != stored[client]]


def _digest_at(dataset: Any, place: int, copies: dict[int, Any]) -> int:
    """Return the digest of the example at ``place``. 0 if its data set holds a random generator."""
    place = range(len(dataset))[place]
    while type(dataset) is Subset:
        dataset, place = dataset.dataset, dataset.indices[place]
    if id(dataset) not in copies:  # files that it opens are closed with the copy, before workers are forked
        copies[id(dataset)] = None if holds_generators(getattr(dataset, "__dict__", None)) else copy.copy(dataset)
    own = copies[id(dataset)]
    if own is None:
        return 0
    seed_host(0)
    found = hashlib.blake2b(digest_size=7)
    _add(found, own[place])
    return int.from_bytes(found.digest(), "little") or 1


def _add(found: Any, value: Any) -> None:
    found.update(type(value).__name__.encode())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        value = value.detach().cpu().contiguous()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, UNCHANGING):
        found.update(repr(value).encode())
    elif isinstance(value, dict | list | tuple):
        for each in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            _add(found, each)
        found.update(b"end")
