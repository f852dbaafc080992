"""Image data modules over small files made on the spot: layouts, splits, scales, errors, and a federation on them."""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data import clients_of, labels_of
from lightning_fedbayes.data.clients import tensors_of
from lightning_fedbayes.data.images import channel_statistics, standardise
from lightning_fedbayes.modules import lenet
from tests.federations import trainer

from .image_files import (
    cifar_binary,
    cifar_names,
    cifar_pickle,
    cifar_pickle_of_2009,
    examples,
    write_cifar,
    write_idx,
    write_svhn,
)

TRAIN, TEST = 200, 30


def grey(folder, packed=False):
    """Files of MNIST's format; returns what is in them."""
    parts = examples(TRAIN, (1, 28, 28)), examples(TEST, (1, 28, 28), seed=1, first=3)
    for part, (images, labels) in zip(("train", "test"), parts):
        write_idx(folder, part, images, labels, packed)
    return parts


def colour():
    """Five training parts and a test part of CIFAR-10's shape."""
    return [*(examples(TRAIN // 5, (3, 32, 32), seed) for seed in range(5)), examples(TEST, (3, 32, 32), 9, first=3)]


def cifar(folder, encode, suffix):
    parts = colour()
    write_cifar(folder, parts, encode, suffix)
    return tuple(np.concatenate(each) for each in zip(*parts[:5])), parts[5]


def svhn(folder):
    parts = examples(TRAIN, (3, 32, 32)), examples(TEST, (3, 32, 32), seed=1, first=3)
    for name, part in zip(("train", "test"), parts):
        write_svhn(folder / f"{name}_32x32.mat", *part)
    return parts


LAYOUTS = {
    "plain": (fb.MNISTDataModule, grey),
    "packed": (fb.FashionMNISTDataModule, lambda folder: grey(folder, packed=True)),
    "torchvision MNIST": (fb.MNISTDataModule, lambda folder: grey(folder / "MNIST" / "raw")),
    "torchvision FashionMNIST": (fb.FashionMNISTDataModule, lambda folder: grey(folder / "FashionMNIST" / "raw")),
    "binary": (fb.CIFAR10DataModule, lambda folder: cifar(folder / "cifar-10-batches-bin", cifar_binary, ".bin")),
    "python": (fb.CIFAR10DataModule, lambda folder: cifar(folder / "cifar-10-batches-py", cifar_pickle_of_2009, "")),
    "python, inside": (fb.CIFAR10DataModule, lambda folder: cifar(folder, cifar_pickle, "")),
    "binary, inside": (fb.CIFAR10DataModule, lambda folder: cifar(folder, cifar_binary, ".bin")),
    "matlab": (fb.SVHNDataModule, svhn),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_what_was_written(layout, tmp_path):
    build, write = LAYOUTS[layout]
    written = write(tmp_path)
    module = build(tmp_path, validation_fraction=None)
    module.setup()
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (module.mean, module.std))
    for part, (images, labels) in zip((module.train, module.test), written):
        x, y = part.tensors
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert x.shape[1:] == module.shape
        assert torch.equal(y, torch.as_tensor(labels))
        torch.testing.assert_close((x * std + mean) * 255, torch.as_tensor(images).float(), atol=1e-3, rtol=0)
    assert module.validation is module.test
    assert y.unique().numel() == module.num_classes


def ready(tmp_path, build=fb.MNISTDataModule, **options):
    module = build(tmp_path, **options)
    module.setup("fit")
    return module


def test_training_images_are_standardised_without_looking_at_the_others(tmp_path):
    (images, _), _ = grey(tmp_path)
    module = ready(tmp_path, validation_fraction=0.25)
    x = module.train.tensors[0].double()
    assert len(x) == TRAIN * 3 // 4
    assert abs(x.mean()) < 1e-5
    assert abs(x.std(correction=0) - 1) < 1e-5
    assert module.mean[0] != pytest.approx(images.mean() / 255, rel=1e-6)
    everything = torch.cat([part.tensors[0] for part in (module.train, module.validation)]) * module.std[0]
    assert ((everything + module.mean[0]) * 255).double().sum().item() == pytest.approx(images.sum(), rel=1e-5)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_channel_statistics_are_mean_and_deviation(count, channels, seed):
    images = torch.from_numpy(examples(count, (channels, 3, 2), seed)[0])
    mean, std = channel_statistics(images)
    values = images.double().transpose(0, 1).flatten(1) / 255
    torch.testing.assert_close(mean, values.mean(1))
    torch.testing.assert_close(std, values.std(1, correction=0))
    expected = (values - mean[:, None]) / std[:, None]
    torch.testing.assert_close(
        standardise(images, mean, std).transpose(0, 1).flatten(1).double(), expected, rtol=1e-4, atol=1e-5
    )


def keys(dataset):
    """First pixels of every image, which differ between images."""
    return {tuple(row) for row in dataset.tensors[0].flatten(1)[:, :3].tolist()}


def raw(module, part):
    """Images of a part as they are stored."""
    return (getattr(module, part).tensors[0] * module.std[0] + module.mean[0]).mul(255).round().byte().flatten(1)


def test_splits_are_stratified_disjoint_and_depend_on_the_seed_only(tmp_path):
    grey(tmp_path)
    module, again, other = ready(tmp_path), ready(tmp_path, batch_size=3), ready(tmp_path, seed=1)
    assert (len(module.train), len(module.validation), len(module.test)) == (TRAIN * 9 // 10, TRAIN // 10, TEST)
    assert module.validation.tensors[1].bincount().tolist() == [TRAIN // 100] * 10
    assert torch.equal(module.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(raw(module, "train"), raw(other, "train"))
    assert not keys(module.train) & keys(module.validation)
    few, more = (
        {tuple(row) for part in ("train", "validation") for row in raw(each, part).tolist()}
        for each in (ready(tmp_path, examples=60), ready(tmp_path, examples=120))
    )
    assert (len(few), len(more)) == (60, 120)
    assert few < more
    few = ready(tmp_path, examples=50, validation_fraction=None)
    assert few.train.tensors[1].bincount().tolist() == [5] * 10
    assert len(few.test) == TEST


def test_setup_reads_once(tmp_path):
    grey(tmp_path)
    module = ready(tmp_path)
    before = module.train
    module.setup("test")
    assert module.train is before
    assert module.hparams.directory == str(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 1.0}, "in \\(0, 1\\); None"),
        ({"validation_fraction": 0}, "in \\(0, 1\\); None"),
        ({"examples": 0}, "examples=0: give at least 2; each class"),
        ({"examples": TRAIN + 1}, f"examples={TRAIN + 1}, but .* holds only {TRAIN} training images"),
        ({"examples": 7}, "no training example is of class .*: of 7 examples 1 are held out .* Raise examples"),
    ],
)
def test_options_out_of_range(tmp_path, options, message):
    grey(tmp_path)
    with pytest.raises(FederationError, match=message):
        ready(tmp_path, **options)


def test_missing_files_are_named_at_once(tmp_path):
    with pytest.raises(FederationError, match=r"there is no directory .*nowhere"):
        fb.CIFAR10DataModule(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FederationError, match=r"holds none of cifar-10-batches-py/data_batch_1, .*, but notes\.txt"):
        fb.CIFAR10DataModule(tmp_path)
    write_cifar(tmp_path / "cifar-10-batches-bin", colour(), cifar_binary, ".bin")
    for name in cifar_names()[1:3]:
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").unlink()
    with pytest.raises(FederationError, match=r"batches-bin lacks data_batch_2\.bin, data_batch_3\.bin; complete"):
        fb.CIFAR10DataModule(tmp_path)


def test_a_class_that_is_absent_and_a_constant_channel_are_refused(tmp_path):
    images, labels = examples(TRAIN, (1, 28, 28))
    grey(tmp_path)
    write_idx(tmp_path, "train", images, np.where((labels == 3) | (labels == 7), 1, labels))
    with pytest.raises(FederationError, match=r"no training image is of class 3, 7; .* has 10 classes"):
        ready(tmp_path)
    write_idx(tmp_path, "train", np.full_like(images, 9), labels)
    with pytest.raises(FederationError, match="channel 0 has one value in all 180 training images"):
        ready(tmp_path)


class FakeDatasets:
    """Stands in for torchvision.datasets: writes files as its downloads do."""

    @staticmethod
    def FashionMNIST(root, download):
        assert download
        grey(root / "FashionMNIST" / "raw")

    @staticmethod
    def CIFAR10(root, download):
        assert download
        cifar(root / "cifar-10-batches-py", cifar_pickle_of_2009, "")

    @staticmethod
    def SVHN(root, split, download):
        assert download
        write_svhn(root / f"{split}_32x32.mat", *examples(40, (3, 32, 32)))


@pytest.mark.parametrize("build", [fb.FashionMNISTDataModule, fb.CIFAR10DataModule, fb.SVHNDataModule])
def test_download_goes_through_torchvision(build, tmp_path, monkeypatch):
    fake = types.ModuleType("torchvision")
    fake.datasets = FakeDatasets
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    module = build(tmp_path, download=True)
    module.prepare_data()
    module.setup()
    assert len(module.train) > 0
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(FederationError, match="pip install torchvision"):
        module.prepare_data()
    build(tmp_path).prepare_data()  # nothing to do


def test_a_federation_trains_on_rows_of_tensors(tmp_path):
    grey(tmp_path)
    module = ready(tmp_path, batch_size=16)
    clients = clients_of(module.train, fb.DirichletPartition(3, alpha=0.5), seed=0)
    assert torch.equal(clients.counts.sum(0), labels_of(module.train).bincount())
    assert all(tensors_of(dataset)[0] is module.train.tensors for dataset in clients.datasets)  # the fast way
    model = fb.HybridBayesianClassifier(lenet(), bayesian_last=1, samples=2)
    federation = fb.FederatedBayes(fb.DirichletPartition(3, alpha=0.5), engine="vectorized")
    made = trainer(1, [federation])
    made.fit(model, datamodule=module)
    assert made.callback_metrics["val/nll"].isfinite()
    made.test(model, datamodule=module, verbose=False)
