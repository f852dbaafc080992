"""The order of examples that makes samples stratified."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, load_digits

from benchmarks.readers import stratified_order
from lightning_fedbayes.data import DiabetesDataModule, DigitsDataModule, labels_of


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 2**31))
@settings(deadline=None)
def test_every_beginning_of_a_stratified_order_is_stratified(labels, seed):
    """n of N examples hold n·N_c/N of class c, to less than two."""
    y = torch.tensor(labels)
    order = stratified_order(y, torch.Generator().manual_seed(seed))
    assert torch.equal(order.sort().values, torch.arange(len(y)))
    counts = torch.nn.functional.one_hot(y[order], 5).cumsum(0)
    shares = torch.arange(1, len(y) + 1).view(-1, 1) * counts[-1] / len(y)
    assert (counts - shares).abs().max() < 2


def test_a_stratified_order_is_uniform():
    """Each example of class 0 is the first of its class equally often, and class 0 comes first half of the time."""
    y = torch.tensor([0] * 5 + [1] * 5)
    draws = torch.Generator().manual_seed(0)
    orders = torch.stack([stratified_order(y, draws) for _ in range(4000)])
    firsts = torch.stack([order[y[order] == 0][0] for order in orders]).bincount(minlength=5) / 4000
    assert (firsts - 0.2).abs().max() < 5 * (0.2 * 0.8 / 4000) ** 0.5
    assert (y[orders[:, 0]] == 0).double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / 4000**0.5)


MODULES = [DigitsDataModule, DiabetesDataModule]


def ready(module):
    module.setup("fit")
    return module


@pytest.mark.parametrize("build", MODULES)
def test_split_is_a_partition_that_depends_on_the_seed_only(build):
    first, again, other = ready(build()), ready(build(batch_size=3)), ready(build(seed=1))
    total = len(first.train) + len(first.validation)
    assert total == {DigitsDataModule: 1797, DiabetesDataModule: 442}[build]
    assert len(first.validation) == pytest.approx(0.2 * total, abs=1)
    assert torch.equal(first.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(first.train.tensors[1], other.train.tensors[1])
    for loader in (first.test_dataloader(), first.predict_dataloader()):
        assert torch.equal(torch.cat([y for _, y in loader]), first.validation.tensors[1])


def test_digits_are_the_digits():
    digits, images = ready(DigitsDataModule()), ready(DigitsDataModule(images=True))
    x, y = digits.train.tensors
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert x.shape[1] == digits.num_features
    assert torch.equal(images.train.tensors[0], x.view(-1, 1, 8, 8))
    pixels, _ = load_digits(return_X_y=True)
    everything = torch.cat([x, digits.validation.tensors[0]])
    assert everything.double().sum().item() == pytest.approx(pixels.sum() / 16)
    shares = [part.tensors[1].bincount() / len(part) for part in (digits.train, digits.validation)]
    assert len(shares[0]) == digits.num_classes
    assert (shares[0] - shares[1]).abs().max() < 0.01
    assert torch.equal(labels_of(digits.train), y)


def test_diabetes_is_standardised_on_the_training_split_and_can_be_undone():
    data = ready(DiabetesDataModule())
    for tensor in data.train.tensors:
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor.mean(0), torch.zeros(tensor.shape[1]), atol=1e-5)
        assert torch.allclose(tensor.std(0, correction=0), torch.ones(tensor.shape[1]), atol=1e-5)
    assert data.validation.tensors[0].shape[1] == data.num_features
    everything = torch.cat([data.train.tensors[1], data.validation.tensors[1]]).double()
    original = (data.target_mean + data.target_std * everything).squeeze(1).sort().values
    expected = torch.as_tensor(load_diabetes(return_X_y=True)[1]).sort().values
    assert torch.allclose(original, expected, atol=1e-3)
    assert labels_of(data.train) is None
