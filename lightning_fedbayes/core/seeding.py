"""Seeds of a federation's random draws, derived from (seed, purpose, round, client)."""

import hashlib
import random
from typing import Literal

import numpy as np
import torch

Stream = Literal[
    "cohort",
    "order",
    "training",
    "loading",
    "validation",
    "fusion",
    "partition",
    "adversaries",
    "attack",
    "privacy",
    "gradients",
    "evaluation",
    "held out",
    "delay",
]

SERVER = -1
"""The ``client`` of draws that belong to the round as a whole."""


def derive_seed(seed: int | str, stream: Stream, round: int = 0, client: int = SERVER, step: int = 0) -> int:
    """Return a 63-bit seed for one purpose of one client in one round. Different arguments give unrelated seeds.

    >>> derive_seed(0, "order", round=3, client=1) == derive_seed(0, "order", round=3, client=1)
    True
    """
    key = f"{seed}/{stream}/{round}/{client}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, stream: Stream, round: int = 0, client: int = SERVER) -> torch.Generator:
    """Return a CPU generator for one purpose of one client in one round."""
    return torch.Generator().manual_seed(derive_seed(seed, stream, round, client))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (all devices in use) with a 63-bit ``seed``.

    ``torch.manual_seed`` would also keep every seed, with a stack trace, for devices that are not in use yet: 100 µs
    and a little memory at each call.
    """
    seed_host(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    if torch.xpu.is_initialized():
        torch.xpu.manual_seed_all(seed)


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's generators that a step on ``device`` may draw from, as bytes."""
    host = torch.get_rng_state()
    return torch.cat([host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else host


def seed_host(seed: int) -> None:
    """Seed the generators of :func:`seed_everything`, except on accelerators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
