"""Small Gaussian parameters that are drawn together, against each of them drawn alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lightning_fedbayes as fb
from lightning_fedbayes.clients.vectorized import gaussians
from lightning_fedbayes.clients.vectorized.gaussians import GaussianParameters, JointDraws
from lightning_fedbayes.clients.vectorized.operations import StackedOperations
from lightning_fedbayes.clients.vectorized.step import ParameterSwap
from lightning_fedbayes.core.private_torch import to_client_view, to_stack, vmap_level
from lightning_fedbayes.layers import LinearReparameterization, NormalPrior, kl_divergence
from lightning_fedbayes.layers.functional import softplus_std
from lightning_fedbayes.layers.kl import SMALL, gaussian_kl_sum
from lightning_fedbayes.layers.posterior_view import read_posterior, set_prior
from lightning_fedbayes.layers.priors import LocalPrior
from tests.clients.vectorized.modules import Divergence

CLIENTS = 3


class Run:
    """Stacked steps of a module, as an engine takes them."""

    def __init__(self, module: nn.Module) -> None:
        torch.manual_seed(0)
        self.module, self.gaussians, self.swap = module, GaussianParameters(module), ParameterSwap(module)
        self.stacks = {
            name: (p.detach() + 0.1 * torch.randn(CLIENTS, *p.shape, dtype=p.dtype)).requires_grad_()
            for name, p in module.named_parameters()
        }

    def __call__(self, function: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``function`` for each client; gradients of its sum are those of the stacks."""
        for stack in self.stacks.values():
            stack.grad = None
        with vmap_level(CLIENTS) as level:
            views = {name: to_client_view(stack, level) for name, stack in self.stacks.items()}
            draws = JointDraws(self.gaussians, self.stacks, views)
            with self.swap.using(views), StackedOperations(level, self.gaussians, draws):
                return to_stack(function(), level, CLIENTS)

    def divergence(self, module: nn.Module, priors: dict[str, tuple[float, float]] | None = None) -> Tensor:
        """KL of every client's ``module`` by the closed form, parameter by parameter."""
        total = torch.zeros(CLIENTS)
        own = {id(part): path for path, part in self.module.named_modules()}
        prefix = own[id(module)]
        for name in self.stacks:
            if "mu_" in name and name.startswith(prefix):
                prior = (priors or {}).get(name, (0.0, 1.0))
                pairs = zip(self.stacks[name], self.stacks[name.replace("mu_", "rho_")])
                total = total + torch.stack([gaussian_kl_sum(mean, softplus_std(rho), *prior) for mean, rho in pairs])
        return total


@pytest.fixture
def joint_draws(monkeypatch) -> list[int]:
    calls, apply = [], gaussians.JointDraw.apply

    def counted(prior, *parameters):
        calls.append(len(parameters) // 2)
        return apply(prior, *parameters)

    monkeypatch.setattr(gaussians.JointDraw, "apply", counted)
    return calls


def network() -> nn.Sequential:
    return nn.Sequential(LinearReparameterization(4, 4), nn.Tanh(), LinearReparameterization(4, 4))


def loss(module: nn.Module, inputs: Tensor) -> Tensor:
    return module(inputs).square().sum() + 0.1 * kl_divergence(module)


def test_a_step_is_that_of_each_client_with_its_noise(joint_draws):
    module, inputs = network(), torch.randn(6, 4)
    run = Run(module)
    torch.manual_seed(1)
    found = run(partial(loss, module, inputs))
    found.sum().backward()
    assert joint_draws == [4]
    torch.manual_seed(1)
    noise = torch.randn(CLIENTS, sum(stack[0].numel() for name, stack in run.stacks.items() if "mu_" in name))
    for client in range(CLIENTS):
        alone = {name: stack[client].detach().clone().requires_grad_() for name, stack in run.stacks.items()}
        start, weights, kl = 0, [], torch.zeros(())
        for layer in ("0", "2"):
            for name in ("weight", "bias"):
                mean, std = alone[f"{layer}.mu_{name}"], softplus_std(alone[f"{layer}.rho_{name}"])
                own = noise[client, start : start + mean.numel()].view(mean.shape[::-1])
                own = own.mT if own.dim() == 2 else own  # column by column
                weights.append(mean + std * own)
                kl = kl + gaussian_kl_sum(mean, std, 0.0, 1.0)
                start += mean.numel()
        hidden = torch.tanh(inputs @ weights[0].T + weights[1])
        expected = (hidden @ weights[2].T + weights[3]).square().sum() + 0.1 * kl
        expected.backward()
        torch.testing.assert_close(found[client], expected)
        for name, each in alone.items():
            torch.testing.assert_close(run.stacks[name].grad[client], each.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_step_does_not_depend_on_those_before():
    """Bit by bit, as a run that is resumed must go on."""
    module, inputs = network(), torch.randn(6, 4)
    gradients = []
    for before in (0, 2):
        run = Run(module)
        for _ in range(before):
            run(partial(loss, module, inputs))
        torch.manual_seed(1)
        run(partial(loss, module, inputs)).sum().backward()
        gradients.append({name: stack.grad for name, stack in run.stacks.items()})
    for name, first in gradients[0].items():
        assert torch.equal(first, gradients[1][name]), name


def test_a_layer_that_is_called_twice_draws_twice(joint_draws):
    module = network()
    first, second = Run(module)(lambda: torch.stack([module[0](torch.ones(4)), module[0](torch.ones(4))])).unbind(1)
    assert joint_draws == [4]
    assert (first != second).all()


def test_a_layer_that_is_not_used_gets_no_gradient(joint_draws):
    module = network()
    run = Run(module)
    run(lambda: module[0](torch.ones(4)).sum()).sum().backward()
    assert joint_draws == [4]
    unused = {name for name, stack in run.stacks.items() if stack.grad is None}
    assert unused == {f"2.{kind}_{name}" for kind in ("mu", "rho") for name in ("weight", "bias")}


@pytest.mark.parametrize("use", [True, False])
def test_the_divergence_follows_the_prior_in_force(use):
    """Joint or not, before the draws or after them, of the whole or of a part."""
    module = network()
    run = Run(module)

    def kl(part=module):
        if use:
            module(torch.ones(4))
        return kl_divergence(part)

    for _ in range(3):
        torch.testing.assert_close(run(kl), run.divergence(module))
        torch.testing.assert_close(run(lambda: kl(module[0])), run.divergence(module[0]))
    for layer in (module[0], module[2]):
        for name in ("weight", "bias"):
            layer.replaced_priors[name] = NormalPrior(0.5, 2.0)
    means = [name for name in run.stacks if "mu_" in name]
    for _ in range(2):
        found, known = run(kl), run.divergence(module, dict.fromkeys(means, (0.5, 2.0)))
        torch.testing.assert_close(found, known)
        ours, theirs = (torch.autograd.grad(each.sum(), [*run.stacks.values()]) for each in (found, known))
        torch.testing.assert_close(ours, theirs)
    module[2].replaced_priors["bias"] = NormalPrior(0.0, 3.0)
    expected = {**dict.fromkeys(means, (0.5, 2.0)), "2.mu_bias": (0.0, 3.0)}
    for _ in range(2):
        torch.testing.assert_close(run(kl), run.divergence(module, expected))
    set_prior(module, None)
    torch.testing.assert_close(run(kl), run.divergence(module))
    posterior = read_posterior(module)
    set_prior(module, posterior)
    with torch.no_grad():
        for name, p in module.named_parameters():
            run.stacks[name].copy_(p)
    torch.testing.assert_close(run(kl), torch.zeros(CLIENTS), atol=1e-5, rtol=0)


def test_large_and_small_layers(joint_draws):
    """Large ones are drawn alone, and their divergence is added."""
    width = SMALL // 8
    module = nn.Sequential(LinearReparameterization(8, width), LinearReparameterization(width, 1), nn.Linear(1, 1))
    run = Run(module)
    for _ in range(2):
        found = run(lambda: 0.0 * module(torch.ones(8)).sum() + kl_divergence(module))
        torch.testing.assert_close(found, run.divergence(module), rtol=1e-5, atol=0)
    assert joint_draws == [3, 3]


def test_parameters_that_are_swapped_or_written_to():
    """The divergence is that of the parameters that are there when it is asked for."""
    module = network()
    run = Run(module)
    shifted = {name: stack.detach() + 0.3 for name, stack in run.stacks.items()}

    def swapped() -> Tensor:
        module(torch.ones(4))
        given = {f"inner.{name}": tensor + 0.3 for name, tensor in module.named_parameters()}
        return torch.func.functional_call(Divergence(module), given, ())

    run(lambda: kl_divergence(module))
    found = run(swapped)
    run.stacks = shifted
    torch.testing.assert_close(found, run.divergence(module))

    def written() -> Tensor:
        module(torch.ones(4))
        with torch.no_grad():
            module[0].mu_weight.add_(1.0)
        return kl_divergence(module) + 0 * module(torch.ones(4)).sum()

    run = Run(module)
    for _ in range(2):
        torch.testing.assert_close(run(written), run.divergence(module))


def test_what_is_not_joined(joint_draws):
    """Half precision, other estimators, parametrised means, and a single parameter."""
    half = network().to(torch.bfloat16)
    Run(half)(lambda: half(torch.ones(4, dtype=torch.bfloat16)))
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    local = fb.bayesianize(layers, last=2, estimator="local_reparameterization")
    Run(local)(lambda: local(torch.ones(4)) + kl_divergence(local))
    one = LinearReparameterization(4, 2, bias=False)
    Run(one)(lambda: one(torch.ones(4)) + kl_divergence(one))
    bound = network()
    for layer in (bound[0], bound[2]):
        parametrize.register_parametrization(layer, "mu_weight", nn.Tanh())
        parametrize.register_parametrization(layer, "rho_bias", nn.Tanh())
    Run(bound)(lambda: bound(torch.ones(4)) + kl_divergence(bound))
    assert joint_draws == []


def test_the_prior_that_one_client_sees_is_its_own():
    centre, (curvature, slope, means), tally = torch.randn(4), torch.randn(3, CLIENTS, 4), torch.rand(CLIENTS, 2)
    with vmap_level(CLIENTS) as level:
        view = partial(to_client_view, level=level)
        prior = gaussians.SeenPrior(LocalPrior(centre, curvature, slope, tally=tally), view)
        found = to_stack(prior.kl(view(means), view(means)), level, CLIENTS)
    own = zip(curvature, slope, tally, means)
    expected = [LocalPrior(centre, a, c, tally=t).kl(mean, mean) for a, c, t, mean in own]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("shape", [(), (4,), (4, 5)])
def test_priors_of_a_stack_are_those_of_its_clients(shape):
    """The slope of each client, also of a parameter that is one number and of matrices that lie transposed."""
    rows = (torch.randn(3, *shape, dtype=torch.float64) for _ in range(3))
    means, curvature, slope = (each.mT.contiguous().mT if each.dim() == 3 else each for each in rows)
    stack = LocalPrior(torch.randn(shape, dtype=torch.float64), curvature, slope)
    slopes = stack.gradient(means)
    for k in range(3):
        prior = replace(stack, curvature=curvature[k], slope=slope[k])
        torch.testing.assert_close(slopes[k], torch.func.grad(lambda mean, of=prior: of.kl(mean, mean))(means[k]))
