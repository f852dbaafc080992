"""Our layers obey every law of the contract, and a layer that breaks every law fails every one."""

import random

import pytest
import torch
from torch import nn
from torch.func import functional_call

from benchmarks.contract import laws
from benchmarks.contract.adaptors import LIBRARIES, Library
from benchmarks.contract.laws import LAWS, examine

pytestmark = pytest.mark.usefixtures("one_thread")  # thousands of tiny calls are far slower on several


class WrongLayer(nn.Module):
    """Breaks every law: too wide a posterior, noise that is stored and shared, a sign per pixel for the whole batch."""

    def __init__(self, template, flipout, prior_std):
        super().__init__()
        self.template, self.flipout, self.prior_std = [template], flipout, prior_std  # in a list: not a submodule
        for name, p in template.named_parameters():
            self.register_parameter(f"mu_{name}", nn.Parameter(p.detach().clone()))
            self.register_parameter(f"rho_{name}", nn.Parameter(torch.zeros_like(p)))
            self.register_buffer(f"eps_{name}", torch.zeros_like(p))

    def std(self, name):
        return getattr(self, f"rho_{name}").exp().log1p()

    def kl_loss(self):
        prior = torch.distributions.Normal(0.0, self.prior_std**2)
        q = [
            torch.distributions.Normal(getattr(self, f"mu_{name}"), self.std(name), validate_args=False)
            for name, _ in self.template[0].named_parameters()
        ]
        return torch.stack([torch.distributions.kl_divergence(each, prior).mean() for each in q]).sum()

    def forward(self, x):
        means, noise = {}, {}
        for name, p in self.template[0].named_parameters():
            eps = torch.tensor([random.gauss(0, 1) for _ in range(p.numel())]).view_as(p)  # the same in every lane
            setattr(self, f"eps_{name}", eps)
            means[name], noise[name] = getattr(self, f"mu_{name}"), 1.5 * self.std(name) * eps
        call = functional_call
        if not self.flipout:
            self.kept = call(self.template[0], {name: means[name] + noise[name] for name in means}, (x,))
            return self.kept
        mean = call(self.template[0], means, (x,))
        self.kept = mean + call(self.template[0], noise, (x,)) * torch.randn_like(mean[:1]).sign()
        return self.kept


class Wrong(Library):
    name, package, requirement = "wrong", "torch", None
    estimators = ("reparameterization", "flipout")
    claims = ("vmap", "compile")
    parameters = (("mu_weight", "rho_weight"), ("mu_bias", "rho_bias"))

    def layer(self, template, estimator, prior_mean, prior_std):
        return WrongLayer(template, estimator == "flipout", prior_std)

    def output(self, network, x):
        return torch.zeros(len(x), 3) if torch.compiler.is_compiling() else network(x)

    def kl(self, network, x):
        return torch.stack([layer.kl_loss() for layer in network.children() if isinstance(layer, WrongLayer)]).sum()

    def mean_output(self, network, x):
        return network(x)

    def convert(self, network):
        for layer in network.children():
            if isinstance(layer, nn.Conv2d):
                layer.padding_mode = "zeros"
        return self.build(network, "reparameterization", 0.0, 1.0)


@pytest.mark.parametrize("law", LAWS)
def test_our_layers_obey(law):
    verdict = examine(law, LIBRARIES["lightning-fedbayes"])
    assert verdict.verdict == "pass", verdict


@pytest.mark.parametrize("law", LAWS)
def test_a_wrong_layer_fails(law, monkeypatch):
    monkeypatch.setattr(laws, "DRAWS", 200)
    monkeypatch.setattr(laws, "SOME", 200)
    random.seed(0)
    verdict = examine(law, Wrong())
    assert verdict.verdict == "fail", verdict
    raises = {"deepcopy": "graph leaves", "bfloat16": "dtype"}
    assert raises[law] in verdict.note if law in raises else verdict.figure is not None
