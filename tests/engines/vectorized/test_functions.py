"""The stacked forms of functions against what vmap makes of the functions themselves, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fedbayes.engines.vectorized import functions
from lightning_fedbayes.engines.vectorized.functions import StackedFunctions
from lightning_fedbayes.engines.vectorized.small_sites import Sites, SmallSites
from lightning_fedbayes.engines.vectorized.vmap import beneath, clients, enter, leave, stack_of
from lightning_fedbayes.layers import LinearReparameterization, NormalPrior, ScaleMixturePrior
from lightning_fedbayes.layers.functional import gaussian_kl_sum, softplus_std

from .modules import Divergence

CLIENTS = 4


def functions_for(level: int, module: nn.Module | None = None, tensors=None, entered=None) -> StackedFunctions:
    """The stacked functions of a step of ``module``, whose parameters lie in ``tensors``."""
    sites = Sites(module or nn.Module())
    return StackedFunctions(level, sites, SmallSites(sites, tensors or {}, entered or {}))


def both_ways(function, *stacks: Tensor):
    """Output and gradients, by ``torch.func.vmap`` and inside :class:`StackedFunctions`."""
    results = []
    for stacked in (False, True):
        inputs = [s.clone().requires_grad_() if s.is_floating_point() else s for s in stacks]
        if stacked:
            with clients(CLIENTS) as level, functions_for(level):
                output = leave(function(*(enter(each, level) for each in inputs)), level, CLIENTS)
        else:
            output = torch.func.vmap(function)(*inputs)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        (output * weights).sum().backward()
        results.append([output.detach(), *(each.grad for each in inputs if each.is_floating_point())])
    return results


def assert_agree(function, *stacks: Tensor) -> None:
    for expected, actual in zip(*both_ways(function, *stacks), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def spy(monkeypatch, function) -> list:
    """Whether the stacked form of ``function`` applied, call by call."""
    original, applied = functions.STACKED[function], []

    def wrapped(*args, **kwargs):
        result = original(*args, **kwargs)
        applied.append(result is not None)
        return result

    monkeypatch.setitem(functions.STACKED, function, wrapped)
    return applied


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (1, 3, 2), (0,)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(lead, bias, monkeypatch):
    applied = spy(monkeypatch, F.linear)
    stacks = [torch.randn(CLIENTS, *lead, 5), torch.randn(CLIENTS, 6, 5), torch.randn(CLIENTS, 6)]
    if bias:
        assert_agree(lambda x, w, b: F.linear(x, w, b), *stacks)
    else:
        assert_agree(lambda x, w: F.linear(x, w), *stacks[:2])
    assert applied == [True]


def test_linear_with_what_clients_share(monkeypatch):
    applied = spy(monkeypatch, F.linear)
    shared = torch.randn(6, 5)
    assert_agree(lambda x: F.linear(x, shared), torch.randn(CLIENTS, 3, 5))
    assert_agree(lambda w: F.linear(shared, w), torch.randn(CLIENTS, 4, 5))
    assert_agree(lambda x, w: F.linear(x, w, shared[:, 0]), torch.randn(CLIENTS, 3, 5), torch.randn(CLIENTS, 6, 5))
    assert applied == [False] * 3


def test_linear_inside_another_transform(monkeypatch):
    applied = spy(monkeypatch, F.linear)

    def jacobian(x, w):
        return torch.func.jacrev(lambda z: F.linear(z, w).tanh())(x)

    assert_agree(jacobian, torch.randn(CLIENTS, 5), torch.randn(CLIENTS, 6, 5))
    assert_agree(
        lambda x, w: torch.func.vmap(lambda z: F.linear(z, w))(x), torch.randn(CLIENTS, 3, 5),
        torch.randn(CLIENTS, 6, 5),
    )
    assert not any(applied)


def test_cross_entropy(monkeypatch):
    applied = spy(monkeypatch, F.cross_entropy)
    logits, labels = torch.randn(CLIENTS, 7, 3), torch.randint(0, 3, (CLIENTS, 7))
    labels[1, :4] = -100
    labels[2, 0] = 1
    assert_agree(lambda z, y: F.cross_entropy(z, y), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, ignore_index=1), logits, labels.clamp_min(0))
    assert_agree(lambda z, y: nn.CrossEntropyLoss()(z, y), logits, labels)
    assert applied == [True] * 3


def test_cross_entropy_of_other_kinds(monkeypatch):
    applied = spy(monkeypatch, F.cross_entropy)
    logits, labels = torch.randn(CLIENTS, 7, 3), torch.randint(0, 3, (CLIENTS, 7))
    weights = torch.tensor([0.2, 1.0, 3.0])
    assert_agree(lambda z, y: F.cross_entropy(z, y, weights), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, reduction="sum"), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, reduction="none"), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), logits, labels)
    assert_agree(lambda z, p: F.cross_entropy(z, p), logits, torch.randn(CLIENTS, 7, 3).softmax(-1))
    pixels = torch.randn(CLIENTS, 7, 3, 2), torch.randint(0, 3, (CLIENTS, 7, 2))
    assert_agree(lambda z, y: F.cross_entropy(z, y), *pixels)
    assert_agree(lambda z, y: F.cross_entropy(z[0], y[0]), logits, labels)
    shared = labels[0]
    assert_agree(lambda z: F.cross_entropy(z, shared), logits)
    assert not any(applied)


def test_squared_error(monkeypatch):
    applied = spy(monkeypatch, F.mse_loss)
    outputs, targets = torch.randn(CLIENTS, 5, 2), torch.randn(CLIENTS, 5, 2)
    assert_agree(lambda x, y: F.mse_loss(x, y), outputs, targets)
    assert_agree(lambda x, y: nn.MSELoss()(x, y), outputs, targets)
    assert applied == [True] * 2
    shared = targets[0]
    assert_agree(lambda x: F.mse_loss(x, shared), outputs)
    assert_agree(lambda x, y: F.mse_loss(x, y, reduction="sum"), outputs, targets)
    assert_agree(lambda x, y: F.mse_loss(x, y, reduction="none"), outputs, targets)
    assert not any(applied[2:])


def test_half_precision_keeps_its_dtype():
    logits, labels = torch.randn(CLIENTS, 7, 3, dtype=torch.bfloat16), torch.randint(0, 3, (CLIENTS, 7))
    with clients(CLIENTS) as level, functions_for(level):
        entered = enter(logits, level)
        assert F.cross_entropy(entered, enter(labels, level)).dtype == torch.bfloat16
        assert F.mse_loss(entered, entered).dtype == torch.bfloat16


def test_a_client_without_a_label_has_no_loss():
    logits, labels = torch.randn(CLIENTS, 2, 3), torch.full((CLIENTS, 2), -100)
    labels[0] = 1
    with clients(CLIENTS) as level, functions_for(level):
        loss = leave(F.cross_entropy(enter(logits, level), enter(labels, level)), level, CLIENTS)
    assert loss.isnan().tolist() == [False, True, True, True]


class Network(nn.Module):
    def __init__(self, *priors) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LinearReparameterization(3, 2, prior=prior) for prior in priors)


PRIORS = {
    "one": (NormalPrior(0.3, 0.7),),
    "joined": (NormalPrior(0.3, 0.7), NormalPrior(0.3, 0.7)),
    "two": (NormalPrior(), NormalPrior(0.0, 0.5)),
    "tensor": (NormalPrior(torch.zeros(()), torch.ones(())), NormalPrior()),
}


@pytest.mark.parametrize("priors", PRIORS)
def test_kl_of_a_network_is_that_of_each_client(priors):
    """Against the closed form, client by client, whether σ was asked for before or not."""
    network = Network(*PRIORS[priors])
    names = [name for name, _ in network.named_parameters()]
    stacks = {name: torch.randn(CLIENTS, *p.shape) for name, p in network.named_parameters()}
    for before in (False, True):
        inputs = {name: stack.clone().requires_grad_() for name, stack in stacks.items()}
        with clients(CLIENTS) as level, functions_for(level):
            entered = {name: enter(each, level) for name, each in inputs.items()}
            if before:
                for name in names:
                    if "rho" in name:
                        softplus_std(entered[name])
            given = {f"inner.{name}": tensor for name, tensor in entered.items()}
            divergence = torch.func.functional_call(Divergence(network), given, ())
            divergence = leave(divergence, level, CLIENTS)
        divergence.sum().backward()
        for client in range(CLIENTS):
            alone = {name: stack[client].clone().requires_grad_() for name, stack in stacks.items()}
            expected = torch.zeros(())
            for i, prior in enumerate(PRIORS[priors]):
                for site in ("weight", "bias"):
                    mean, rho = alone[f"layers.{i}.mu_{site}"], alone[f"layers.{i}.rho_{site}"]
                    expected = expected + gaussian_kl_sum(mean, softplus_std(rho), prior.mean, prior.std)
            expected.backward()
            torch.testing.assert_close(divergence[client].detach(), expected.detach())
            for name, each in alone.items():
                torch.testing.assert_close(inputs[name].grad[client], each.grad, msg=name)


def test_a_prior_without_closed_form_draws_for_every_client():
    network = Network(ScaleMixturePrior(0.5, 1.0, 0.1))
    stacks = {f"inner.{name}": p.detach().expand(CLIENTS, *p.shape) for name, p in network.named_parameters()}
    with clients(CLIENTS) as level, functions_for(level):
        entered = {name: enter(each, level) for name, each in stacks.items()}
        divergence = leave(torch.func.functional_call(Divergence(network), entered, ()), level, CLIENTS)
    assert len(divergence.unique()) == CLIENTS


def test_stacks_are_seen_only_at_their_own_level():
    stack = torch.randn(CLIENTS, 3)
    with clients(CLIENTS) as level:
        client = enter(stack, level)
        assert client.shape == (3,)
        assert stack_of(client, level) is not None
        assert stack_of(stack, level) is None
        assert stack_of(client, level + 1) is None
        with beneath():
            assert stack.sum(1).shape == (CLIENTS,)
        torch.func.vmap(lambda _: pytest.fail("seen") if stack_of(client, level) is not None else _)(torch.zeros(2))
        assert torch.equal(leave(client * 2, level, CLIENTS), stack * 2)
        assert leave(torch.ones(2), level, CLIENTS).shape == (CLIENTS, 2)


def test_noise_differs_between_clients():
    with clients(CLIENTS) as level:
        noise = leave(torch.randn(1000), level, CLIENTS)
        dropped = leave(F.dropout(torch.ones(1000)), level, CLIENTS)
    assert noise.corrcoef().fill_diagonal_(0).abs().max() < 0.15
    assert dropped.corrcoef().fill_diagonal_(0).abs().max() < 0.15


def test_saved_tensor_hooks_work_again_after_a_step():
    with clients(2), pytest.raises(RuntimeError, match="several clients at once"), torch.autograd.graph.save_on_cpu():
        pass
    with torch.autograd.graph.save_on_cpu():
        pass
    with torch.autograd.graph.disable_saved_tensors_hooks("for a reason of one's own"):
        with clients(2):
            pass
        with pytest.raises(RuntimeError, match="reason of one's own"), torch.autograd.graph.save_on_cpu():
            pass
