"""UCI regression: shapes, scales and splits of a folder made on the spot, and what is said of damaged ones."""

import math

import lightning as L
import pytest
import torch
from torch.distributions import Normal
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks.uci.sets import UCIDataModule, available_datasets
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data import labels_of
from lightning_fedbayes.metrics.functional import gaussian_crps, gaussian_nll
from lightning_fedbayes.modules import mlp

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


def test_facts_are_known_before_any_data_are_read(folder):
    (folder / "data.txt").write_text("not read yet")
    module = build(folder)
    assert (module.num_features, module.num_targets, module.num_splits) == (3, 1, 3)
    assert available_datasets(folder.parents[1]) == ("toy",)


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


def test_scores_go_to_original_units(folder):
    data = ready(folder)
    y, mean, variance = torch.randn(3, 20, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    variance = variance.exp()
    m, s = data.target_mean, data.target_std
    original = Normal(m + s * mean, s * variance.sqrt())
    nll = gaussian_nll(mean, variance, y).squeeze() + math.log(s)
    assert torch.allclose(nll, -original.log_prob(m + s * y).squeeze())
    crps = gaussian_crps(m + s * mean, s**2 * variance, m + s * y)
    assert torch.allclose(crps, s * gaussian_crps(mean, variance, y))


def test_validation_is_the_test_split_or_a_part_of_training(folder):
    published, tuning, again = (
        ready(folder),
        ready(folder, validation_fraction=0.25),
        ready(folder, seed=1, validation_fraction=0.25),
    )
    targets = {
        name: torch.cat([y for _, y in getattr(published, f"{name}_dataloader")()])
        for name in ("val", "test", "predict")
    }
    assert torch.equal(targets["val"], published.test.tensors[1])
    assert torch.equal(targets["test"], targets["val"])
    assert torch.equal(targets["predict"], targets["val"])
    assert (len(tuning.train), len(tuning.validation), len(tuning.test)) == (24, 8, 8)

    def original(module, part):
        y = getattr(module, part).tensors[1].double()
        return (module.target_mean + module.target_std * y).flatten()

    everything = torch.cat([original(tuning, "train"), original(tuning, "validation")]).sort().values
    assert torch.allclose(everything, original(published, "train").sort().values, atol=1e-4)
    assert torch.allclose(original(tuning, "test"), original(published, "test"), atol=1e-4)
    assert tuning.train.tensors[1].mean().abs() < 1e-6  # not of the examples that are held out
    assert tuning.target_mean != published.target_mean
    assert not torch.equal(tuning.validation.tensors[1], again.validation.tensors[1])


def test_ten_clients_learn_from_it_and_the_checkpoint_is_plain(folder, tmp_path):
    L.seed_everything(0, verbose=False)
    data = build(folder, batch_size=1)
    model = fb.HybridBayesianRegressor(mlp(data.num_features, 1, (8,)), bayesian_last=1, learning_rate=0.02)
    trainer = L.Trainer(
        max_epochs=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[fb.FederatedBayes(fb.IIDPartition(10), local_epochs=3)],
    )
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val/rmse"] < 0.7
    trainer.save_checkpoint(tmp_path / "federation.ckpt")
    checkpoint = torch.load(tmp_path / "federation.ckpt", weights_only=True)
    assert checkpoint["datamodule_hyper_parameters"]["dataset"] == "toy"


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


def test_arguments_that_cannot_be(folder, tmp_path):
    with pytest.raises(FederationError, match=r"dataset='tory': did you mean 'toy'\? Known: toy"):
        UCIDataModule(folder.parents[1], "tory")
    with pytest.raises(FederationError, match="split=3: toy has 3 splits, numbered 0 to 2"):
        build(folder, split=3)
    with pytest.raises(FederationError, match="split=-1"):
        build(folder, split=-1)
    with pytest.raises(FederationError, match="in \\(0, 1\\); None"):
        build(folder, validation_fraction=0.0)
    with pytest.raises(FederationError, match="there is no directory"):
        UCIDataModule(tmp_path / "nowhere", "toy")
    with pytest.raises(FederationError, match=r"holds no data set, but data; give the directory that holds"):
        UCIDataModule(folder.parent, "toy")
