"""Seeds of different purposes are unrelated; equal arguments give equal seeds."""

import itertools
import random
from typing import get_args

import numpy as np
import pytest
import torch

from lightning_fedbayes.core.seeding import SERVER, Stream, derive_seed, generator, seed_everything, seed_host

STREAMS = get_args(Stream)


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_all_arguments_count_none_collide_and_seeds_stay_what_they_are():
    """A checkpoint is resumed in another process, with another hash seed, by a later version."""
    keys = itertools.product((0, 1, 11), STREAMS, range(12), (SERVER, *range(11)), range(6))
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(3, "order", round=2, client=1, step=5) == 5647549401005917005


def test_generators_of_one_purpose_are_equal_and_independent_of_the_global_one():
    before = torch.get_rng_state()
    first, second, other = (torch.rand(5, generator=generator(0, "order", 1, client)) for client in (2, 2, 3))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seeding", [seed_everything, seed_host])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_global_generators_are_all_seeded(seeding, seed):
    seeding(seed)
    first = draws()
    draws()
    seeding(seed)
    assert draws() == first
