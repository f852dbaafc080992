"""Stacked steps without torch's private vmap primitives, against those with them."""

from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.clients.vectorized.step import ParameterSwap
from lightning_fedbayes.core.private_torch import PRIMITIVES, has_vmap_primitives
from tests.federations import Plain, bayesian, blobs, federate, loader, network

from .modules import Convolutional, Late, Logging, Padded, PerClient, SkipsShort, images, words


@pytest.fixture
def remove_primitives(monkeypatch):
    """Remove the primitives of vmap from torch."""

    def remove():
        for name in (*PRIMITIVES, "is_functorch_wrapped_tensor"):
            monkeypatch.delattr(torch._C._functorch, name)
        assert not has_vmap_primitives()

    assert has_vmap_primitives()
    return remove


CASES = {
    "plain": (partial(Plain, optimizer=torch.optim.Adam, lr=0.05), blobs),
    "batch norm": (lambda: Plain(network(batch_norm=True)), blobs),
    "convolutions": (Convolutional, images),
    "padding": (Padded, words),
    "attributes per client": (PerClient, blobs),
    "late buffer": (Late, blobs),
    "skipped steps": (SkipsShort, blobs),
    "logged values and outputs": (Logging, blobs),
    "Gaussian without noise": (partial(bayesian, posterior_std=1e-9, prior_std=0.1), blobs),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_federation_ends_equal_without_the_primitives(case, remove_primitives):
    make, data = CASES[case]
    ended = []
    for removed in (False, True):
        if removed:
            remove_primitives()
        module, partition = make(), fb.SizesPartition((30, 20, 10))
        federation = fb.FederatedBayes(partition, fusion="rklb", engine="vectorized", local_epochs=2)
        made = federate(module, federation, 2, loader(data()))
        assert federation.federation.engine.name == "vectorized"
        assert federation.history[-1]["failed_clients"] == 0
        ended.append((module.state_dict(), made.callback_metrics))
    for before, after in zip(*ended, strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            if name.endswith("seconds"):
                continue
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_a_swap_reaches_tied_tensors_and_is_undone_after_an_error():
    module = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    module["second"].weight = module["first"].weight
    before = dict(module.state_dict(keep_vars=True))
    swap = ParameterSwap(module)
    other, mean = torch.zeros(3, 2, 2), torch.ones(3, 2)
    with suppress(RuntimeError), swap.using({"first.weight": other, "norm.running_mean": mean}):
        assert module["first"].weight is module["second"].weight is swap["first.weight"] is other
        assert module["norm"].running_mean is mean
        raise RuntimeError
    assert all(tensor is before[name] for name, tensor in module.state_dict(keep_vars=True).items())
