"""The study of wrong labels: its data, and small federations of every method."""

import math

import pytest
import torch

from benchmarks.posterior import label_noise


@pytest.mark.parametrize("share", label_noise.SHARES)
def test_a_share_of_the_training_labels_is_wrong_and_none_of_those_held_out(share):
    noisy, clean = (label_noise.NoisyDigits(each, seed=1) for each in (share, 0.0))
    for data in (noisy, clean):
        data.setup("fit")
    (x, labels), (same, right) = noisy.train.tensors, clean.train.tensors
    wrong = labels != right
    assert torch.equal(x, same)
    assert int(wrong.sum()) == round(share * len(right))
    assert torch.equal(labels[wrong], 9 - right[wrong])
    assert torch.equal(noisy.validation.tensors[1], clean.validation.tensors[1])


@pytest.mark.parametrize("name", label_noise.METHODS)
def test_a_small_federation_of_every_method_is_scored(name, monkeypatch):
    monkeypatch.setattr(label_noise, "LOCAL_EPOCHS", 2)
    scores = label_noise.run(label_noise.METHODS[name], 0.2, seed=0, rounds=1)
    assert 0 < scores["nll"] < 2 * math.log(10)
