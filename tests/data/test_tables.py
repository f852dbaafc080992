"""Tables of numbers, and what is said of damaged ones."""

import pytest
import torch

from lightning_fedbayes.data.tables import read_table
from lightning_fedbayes.errors import FederationError


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
