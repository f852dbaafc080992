"""Standardising: zero mean and unit spread where there is any, exactly 0 where there is none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.data.standardise import standardisation_of

NAN = float("nan")
sizes = st.integers(2, 30)


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


@settings(deadline=None, max_examples=60)
@given(rows=sizes, seed=st.integers(0, 999), shift=st.floats(-1e4, 1e4), scale=st.floats(1e-3, 1e4),
       missing=st.floats(0, 0.6))
def test_what_is_there_has_mean_zero_and_spread_one_whatever_the_units(rows, seed, shift, scale, missing):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    there = torch.rand(rows, 3, generator=generator) >= missing
    there[:2] = True  # at least two different values per column
    values = values.where(there, NAN)
    z = standardisation_of(values).apply(values)
    assert torch.equal(z[~there], torch.zeros(int((~there).sum())))
    for k in range(3):
        present = z[there[:, k], k].double()
        assert present.mean().abs() < 1e-5
        assert present.square().mean() == pytest.approx(1, abs=1e-4)
    moved = shift + scale * values
    assert torch.allclose(standardisation_of(moved).apply(moved), z, atol=1e-3)


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 8), min_size=2, max_size=4), seed=st.integers(0, 999))
def test_the_pooled_statistics_follow_from_sums_of_the_clients(sizes, seed):
    """Counts, sums and sums of squares are all that a client has to send."""
    values = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values[0, 0] = NAN
    parts = values.split(sizes)
    count = sum((~part.isnan()).sum(0) for part in parts)
    first = sum(part.nansum(0) for part in parts) / count
    second = sum(part.square().nansum(0) for part in parts) / count
    scale = standardisation_of(values)
    assert torch.allclose(scale.mean, first)
    assert torch.allclose(scale.std.square(), second - first.square(), atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.998, 1 / 3, -7e8])
def test_a_constant_column_is_zero_everywhere_and_never_nan(value):
    train = column(*[value] * 7)
    scale = standardisation_of(train)
    assert scale.std.item() == 0
    assert scale.apply(torch.cat([train, column(value + 5, NAN)])).tolist() == [[0.0]] * 9


def test_a_column_without_any_value_is_zero():
    scale = standardisation_of(column(NAN, NAN))
    assert scale.apply(column(NAN, 3.0)).tolist() == [[0.0], [0.0]]


def test_large_values_close_together_keep_their_digits():
    """Float64 until the end: 10⁸ and 10⁸ + 1 are the same number in float32."""
    values = column(1e8, 1e8 + 1)
    assert standardisation_of(values).apply(values).flatten().tolist() == [-1.0, 1.0]
