"""UCI regression: shapes, scales and splits of a folder made on the spot, and what is said of damaged ones."""

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.uci.sets import UCIDataModule
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data import labels_of

ROWS, TEST = 40, 8


def write(path, rows):
    path.write_text("\n".join(" ".join(f"{value:.17g}" for value in row) for row in rows) + "\n")


@pytest.fixture
def folder(tmp_path):
    """A data set "toy" of 40 examples in columns feature, constant, another target, target, feature; three splits."""
    data = tmp_path / "sets" / "toy" / "data"
    data.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    values = 50 + 7 * torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    values[:, 1] = 0.998
    values[:, 3] = 100 + values[:, 0] - 2 * values[:, 4]
    write(data / "data.txt", values.tolist())
    write(data / "index_features.txt", [[0], [1], [4]])
    write(data / "index_target.txt", [[3]])
    write(data / "n_splits.txt", [[3]])
    for split in range(3):
        order = torch.randperm(ROWS, generator=generator).tolist()
        write(data / f"index_train_{split}.txt", [[i] for i in order[TEST:]])
        write(data / f"index_test_{split}.txt", [[i] for i in order[:TEST]])
    return data


def build(folder, **options):
    return UCIDataModule(folder.parents[1], folder.parent.name, **options)


def ready(folder, **options):
    module = build(folder, **options)
    module.setup("fit")
    return module


def values_of(folder):
    return torch.tensor(
        [[float(v) for v in line.split()] for line in (folder / "data.txt").read_text().splitlines()],
        dtype=torch.float64,
    )


def indices_of(folder, part, split=0):
    return [int(line) for line in (folder / f"index_{part}_{split}.txt").read_text().split()]


@pytest.mark.parametrize("split", range(3))
def test_the_published_split_standardised_on_its_training_part(folder, split):
    data = ready(folder, split=split)
    values, train, test = values_of(folder), indices_of(folder, "train", split), indices_of(folder, "test", split)
    mean, std = values[train].mean(0), values[train].std(0, correction=0)
    for part, rows in ((data.train, train), (data.test, test)):
        x, y = part.tensors
        assert (x.shape, y.shape) == ((len(rows), 3), (len(rows), 1))
        assert x.dtype == y.dtype == torch.float32
        assert torch.allclose(x[:, [0, 2]].double(), ((values - mean) / std)[rows][:, [0, 4]], atol=1e-6)
        assert torch.equal(x[:, 1], torch.zeros(len(rows)))
        assert torch.allclose(data.target_mean + data.target_std * y.double(), values[rows][:, 3:4], atol=1e-4)
    assert isinstance(data.train, TensorDataset)
    assert labels_of(data.train) is None


def replace(folder, file, text):
    (folder / file).write_text(text)


def drop_lines(folder, file, number):
    lines = (folder / file).read_text().splitlines()
    replace(folder, file, "\n".join(lines[:-number]) + "\n")


def spoil(folder, row, column, text):
    lines = [line.split() for line in (folder / "data.txt").read_text().splitlines()]
    lines[row][column] = text
    replace(folder, "data.txt", "\n".join(map(" ".join, lines)))


def overlap(folder):
    path = folder / "index_test_0.txt"
    path.write_text(path.read_text() + f"{indices_of(folder, 'train')[0]}\n")


def constant_target(folder):
    rows = values_of(folder)
    rows[:, 3] = 3.0
    write(folder / "data.txt", rows.tolist())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "data.txt").write_text(""), r"data.txt holds no number"),
        (lambda f: spoil(f, 4, 2, "NaN"), r"data.txt holds no number, or one that is not finite"),
        (lambda f: spoil(f, 0, 0, "female"), r"data.txt: could not convert string 'female'"),
        (lambda f: (f / "index_test_0.txt").unlink(), r"no file .*index_test_0.txt"),
        (lambda f: drop_lines(f, "data.txt", 3), r"index_\w+_0.txt names \d+ .*data.txt has 37 examples.*truncated"),
        (lambda f: drop_lines(f, "index_train_0.txt", 3), r"split 0: 3 of 40 examples are neither .* truncated"),
        (overlap, r"split 0: 1 examples are in training and in test, such as \d+; a score"),
        (lambda f: replace(f, "index_test_0.txt", "40\n"), r"index_test_0.txt names 40 and 0 more"),
        (lambda f: replace(f, "index_test_0.txt", "-1\n"), r"index_test_0.txt names -1 "),
        (lambda f: replace(f, "index_test_0.txt", "1.5\n"), r"index_test_0.txt names 1.5 "),
        (lambda f: replace(f, "index_test_0.txt", "3\n5\n3\n"), r"index_test_0.txt names 3 twice"),
        (lambda f: replace(f, "index_target.txt", "2\n3\n"), r"index_target.txt names 2 columns; name the one"),
        (lambda f: replace(f, "index_target.txt", ""), r"index_target.txt holds no number"),
        (lambda f: replace(f, "index_target.txt", "5\n"), r"index_target.txt names 5 .* 5 columns, numbered 0 to 4"),
        (lambda f: replace(f, "index_target.txt", "4\n"), r"column 4 is the target and a feature"),
        (constant_target, r"the target is 3 in all 32 training examples, so there is nothing to learn"),
    ],
)
def test_a_damaged_folder_is_refused_before_training(folder, damage, message):
    damage(folder)
    with pytest.raises(FederationError, match=message):
        ready(folder)
