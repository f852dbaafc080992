"""Seeds of a federation's random draws, derived from (seed, purpose, round, client)."""

import hashlib
import random
from typing import Literal

import numpy as np
import torch
from torch import Tensor

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


def private_uniform(key: int | str, size: int, *about: object, protects: Tensor | None = None) -> Tensor:
    """Return draws between 0 and 1 for the noise of privacy, float64 on the CPU, shape (size,).

    SHAKE-256 stretches the ``key``, and draws about another thing are unrelated. (Torch's generators on the CPU take 32
    bits of a seed: whoever tries all of them can subtract their noise.) A whole number is the seed of a simulation. A
    text is a secret: its draws depend on what they protect, too, so that no two messages share them.

    >>> torch.equal(private_uniform("secret", 3, "update", 0), private_uniform("secret", 3, "update", 0))
    True
    """
    name = "/".join(map(str, (type(key).__name__, key, *about))).encode(errors="surrogatepass")
    if isinstance(key, str) and protects is not None:
        name += protects.detach().double().contiguous().cpu().numpy().tobytes()
    bits = np.frombuffer(hashlib.shake_256(name).digest(8 * size), "<u8") >> 12
    return torch.from_numpy((bits + 0.5) * 2.0**-52)


def private_normal(key: int | str, like: Tensor, *about: object, protects: Tensor | None = None) -> Tensor:
    """Return draws of N(0, 1) by :func:`private_uniform`, in shape, type and place of ``like``."""
    return torch.special.ndtri(private_uniform(key, like.numel(), *about, protects=protects)).view_as(like).to(like)


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
