"""Tables of numbers and the errors for damaged ones; standardising with missing and constant values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data.tables import read_table, standardisation_of


def written(folder, text):
    path = folder / "table.txt"
    path.write_text(text)
    return path


def test_white_space_of_any_kind_and_empty_lines(tmp_path):
    table = read_table(written(tmp_path, "\n 1.5\t2  3e2 \n\n-4 5 6\r\n\n"))
    assert table.values.tolist() == [[1.5, 2, 300], [-4, 5, 6]]
    assert table.values.dtype == torch.float64
    assert table.lines == (2, 4)


def test_separator_and_missing_values(tmp_path):
    table = read_table(written(tmp_path, "1, ?\n?,.5\n"), separator=",", missing="?")
    assert table.values.isnan().tolist() == [[False, True], [True, False]]
    assert table.values[1, 1] == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n\n3 x", r"table.txt, line 3, column 2: 'x' is not a finite number"),
        ("1 nan\n", r"line 1, column 2: 'nan' is not a finite number"),
        ("1 2\n-inf 2\n", r"line 2, column 1: '-inf' is not a finite number"),
        ("1 ?\n", r"line 1, column 2: '\?' is not"),
        ("1 2 3\n4 5\n", r"line 2: 2 columns, but the lines before have 3; .*truncated"),
        (" \n\n", "holds no number"),
        ("x" * 5000, r"'x{40}' is not"),
    ],
)
def test_damaged_files(tmp_path, text, message):
    with pytest.raises(FederationError, match=message):
        read_table(written(tmp_path, text))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "table.txt"
    path.write_bytes(b"1 2\n\xff\xfe 3\n")
    with pytest.raises(FederationError, match="line 2, column 1"):
        read_table(path)


def test_no_file(tmp_path):
    with pytest.raises(FederationError, match=r"there is no file .*table.txt; complete the folder"):
        read_table(tmp_path / "table.txt")


NAN = float("nan")
sizes = st.integers(2, 30)


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


@settings(deadline=None, max_examples=60)
@given(
    rows=sizes,
    seed=st.integers(0, 999),
    shift=st.floats(-1e4, 1e4),
    scale=st.floats(1e-3, 1e4),
    missing=st.floats(0, 0.6),
)
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
