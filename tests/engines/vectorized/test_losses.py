"""Stacked losses against torch's own, client by client."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from lightning_fedbayes.engines.vectorized.losses import CrossEntropy, mean_cross_entropy, mean_squared_error


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("classes", [1, 2, 10])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_cross_entropy_is_that_of_torch(classes, scale):
    """Also where a probability is 0 in float32."""
    logits, labels = scale * torch.randn(3, 7, classes), torch.randint(0, classes, (3, 7))
    first, second = (logits.clone().requires_grad_() for _ in range(2))
    found = mean_cross_entropy(first, labels, -100)
    expected = torch.stack([F.cross_entropy(z, y) for z, y in zip(second, labels)])
    torch.testing.assert_close(found, expected)
    weights = torch.tensor([1.0, -2.0, 0.5])
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(first.grad, second.grad)


def test_impossible_classes_and_logits_that_are_not_finite():
    logits = torch.tensor([[[0.0, -torch.inf], [1.0, 2.0]], [[0.0, torch.nan], [1.0, 2.0]]])
    labels = torch.zeros(2, 2, dtype=torch.int64)
    expected = torch.stack([F.cross_entropy(z, y) for z, y in zip(logits, labels)])
    torch.testing.assert_close(mean_cross_entropy(logits, labels, -100), expected, equal_nan=True)


@pytest.mark.parametrize("label", [10, -1])
def test_a_label_that_is_no_class_is_refused(label):
    labels = torch.zeros(2, 3, dtype=torch.int64)
    labels[1, 1] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        mean_cross_entropy(torch.randn(2, 3, 10), labels, -100)


@pytest.mark.parametrize("ignored", [-100, -1, 0, 2])
def test_ignored_labels_do_not_count(ignored):
    """Also where the ignored label is a class; the last client has nothing else."""
    logits, labels = torch.randn(3, 7, 3, requires_grad=True), torch.randint(0, 3, (3, 7))
    labels[0, 2:4], labels[2] = ignored, ignored
    expected = torch.stack([F.cross_entropy(z, y, ignore_index=ignored) for z, y in zip(logits, labels)])
    found = mean_cross_entropy(logits, labels, ignored)
    torch.testing.assert_close(found, expected, equal_nan=True)
    ours, theirs = (torch.autograd.grad(loss[:2].sum(), logits)[0] for loss in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_derivatives():
    logits, labels = torch.randn(3, 4, dtype=torch.float64).requires_grad_(), torch.tensor([0, 3, 1])
    assert gradcheck(lambda z: CrossEntropy.apply(z, labels), [logits])
    assert gradgradcheck(lambda z: CrossEntropy.apply(z, labels), [logits])


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 5, 2), (3, 1, 1)])
def test_squared_error_is_that_of_torch(shape):
    outputs, targets = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected = torch.stack([F.mse_loss(x, y) for x, y in zip(outputs, targets)])
    found = mean_squared_error(outputs, targets)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(loss.square().sum(), outputs)[0] for loss in (found, expected))
    torch.testing.assert_close(ours, theirs)
