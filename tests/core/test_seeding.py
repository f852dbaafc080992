"""Seeds of different purposes are unrelated; equal arguments give equal seeds."""

import itertools
import random
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.seeding import SERVER, Stream, derive_seed, generator, seed_everything, seed_host

STREAMS = get_args(Stream)


@pytest.fixture(autouse=True)
def _restore():
    """The global generators stay as they were."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_all_arguments_count_and_none_collide():
    keys = itertools.product((0, 1, 11), STREAMS, range(12), (SERVER, *range(11)), range(6))
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)


@given(seed=st.integers(), round=st.integers(0), client=st.integers(-1), step=st.integers(0))
@settings(deadline=None)
def test_seeds_are_sixty_three_bits_that_torch_accepts(seed, round, client, step):
    value = derive_seed(seed, "order", round, client, step)
    assert 0 <= value < 2**63
    assert value == derive_seed(seed, "order", round, client, step)
    torch.Generator().manual_seed(value)


def test_every_bit_of_a_seed_is_a_fair_coin():
    count = 4000
    seeds = [derive_seed(0, "order", round) for round in range(count)]
    ones = np.array([[value >> bit & 1 for bit in range(63)] for value in seeds]).mean(0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / count**0.5


def test_seeds_stay_what_they_are():
    """A checkpoint is resumed in another process, with another hash seed, by a later version."""
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


def test_both_ways_of_seeding_agree_on_the_host():
    seed_everything(5)
    first = draws()
    seed_host(5)
    assert draws() == first
