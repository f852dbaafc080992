"""The KL divergence and joint draws: values and closed-form gradients against torch's own, on both sides of SMALL."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence as torch_kl
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from lightning_fedbayes.core.errors import ConversionError
from lightning_fedbayes.layers import LinearFlipout, LinearReparameterization, NormalPrior, ScaleMixturePrior, kl
from lightning_fedbayes.layers.functional import softplus_std
from lightning_fedbayes.layers.kl import JointDraw, Known, gaussian_kl_sum
from tests.refusals import refusals


@pytest.fixture(params=["closed form", "autograd"])
def path(request, monkeypatch):
    """Path that ``gaussian_kl_sum`` takes to its gradient."""
    monkeypatch.setattr(kl, "SMALL", 0 if request.param == "closed form" else math.inf)
    return request.param


def positive(*shape):
    return torch.rand(*shape, dtype=torch.float64) + 0.2


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def reference(mean, std, prior_mean, prior_std):
    return torch_kl(TorchNormal(mean, std), TorchNormal(prior_mean, prior_std)).sum()


PRIORS = {
    "numbers": lambda: (0.3, 2.0),
    "standard": lambda: (0.0, 1.0),
    "wide": lambda: (0.0, 2.0),
    "shifted": lambda: (0.5, 1.0),
    "number and tensor": lambda: (torch.randn(4, 3, dtype=torch.float64), 1.0),
    "tensors": lambda: (torch.randn(4, 3, dtype=torch.float64), positive(4, 3)),
    "broadcast": lambda: (torch.randn(3, dtype=torch.float64), positive(4, 1)),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_value_and_gradients_are_those_of_torch(path, prior):
    values = torch.randn(4, 3, dtype=torch.float64), positive(4, 3), *prior()
    ours, theirs = ([leaf(v) if isinstance(v, torch.Tensor) else v for v in values] for _ in range(2))
    kl, expected = gaussian_kl_sum(*ours), reference(*theirs)
    (3 * kl).backward()
    (3 * expected).backward()
    torch.testing.assert_close(kl, expected)
    for a, b in zip(ours, theirs):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_first_and_second_derivatives_are_those_of_finite_differences(path, prior):
    values = torch.randn(4, 3, dtype=torch.float64), positive(4, 3), *prior()
    tensors = [leaf(v) for v in values if isinstance(v, torch.Tensor)]

    def kl(*tensors):
        rest = iter(tensors)
        return gaussian_kl_sum(*(next(rest) if isinstance(v, torch.Tensor) else v for v in values))

    assert gradcheck(kl, tensors)
    assert gradgradcheck(kl, tensors)


BATCHED = {
    "all": (0, 0, 0, 0),
    "mean only": (0, None, None, None),
    "std only": (None, 0, None, None),
    "last dimension": (2, 1, None, 0),
    "prior only": (None, None, 0, None),
}


@pytest.mark.parametrize("dims", BATCHED.values(), ids=BATCHED)
def test_vmap_is_a_loop_with_the_backward_pass_outside(path, dims):
    def batch(value, dim):
        stack = torch.stack([value * (1 + 0.1 * k) for k in range(5)])
        return leaf(value if dim is None else stack.movedim(0, dim))

    means = torch.randn(2, 4, 3, dtype=torch.float64)
    base = means[0], positive(4, 3), means[1], positive(4, 3)
    values = [batch(v, d) for v, d in zip(base, dims)]
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    together = vmap(gaussian_kl_sum, in_dims=dims)(*values)
    (weights * together).sum().backward()
    found = [v.grad for v in values]
    for v in values:
        v.grad = None
    loop = torch.stack(
        [gaussian_kl_sum(*(v if d is None else v.select(d, k) for v, d in zip(values, dims))) for k in range(5)]
    )
    (weights * loop).sum().backward()
    torch.testing.assert_close(together, loop)
    for v, gradient in zip(values, found):
        torch.testing.assert_close(gradient, v.grad)


@pytest.mark.parametrize(
    ("rho", "dtype", "gradient"),
    [
        (-1e4, torch.float32, 0.0),
        (-30.0, torch.float32, -1.0),
        (30.0, torch.float32, 30.0),
        (1e4, torch.float32, 1e4),
        (-1e4, torch.float64, 0.0),
        (-200.0, torch.float64, -1.0),
    ],
)
def test_extreme_spreads_have_the_limits_of_the_gradient(path, rho, dtype, gradient):
    """dKL/dρ = (σ − 1/σ) sigmoid(ρ): −1 for small σ, σ for large ones, 0 where σ is at its bound."""
    rho, mean = (torch.full((3,), value, dtype=dtype, requires_grad=True) for value in (rho, 0.5))
    kl = gaussian_kl_sum(mean, softplus_std(rho), 0.0, 1.0)
    kl.backward()
    assert kl.isfinite()
    torch.testing.assert_close(rho.grad, torch.full_like(rho, gradient), rtol=0.04, atol=1e-3)


def test_nothing_diverges_from_nothing(path):
    mean, std = (torch.ones(0, 3, requires_grad=True) for _ in range(2))
    kl = gaussian_kl_sum(mean, std, 0.0, 1.0)
    kl.backward()
    assert kl == 0
    assert mean.grad is not None
    assert mean.grad.shape == (0, 3)
    stacked = vmap(lambda m: gaussian_kl_sum(m, m + 1, 0.0, 1.0))(torch.ones(2, 0))
    assert torch.equal(stacked, torch.zeros(2))
    torch.testing.assert_close(gaussian_kl_sum(torch.tensor(1.0), torch.tensor(1.0), 0.0, 1.0), torch.tensor(0.5))


def test_a_small_divergence_of_many_entries_is_not_cancelled_away(path):
    mean, std = torch.full((1_000_000,), 1e-3), torch.full((1_000_000,), 1.001)
    exact = gaussian_kl_sum(mean.double(), std.double(), 0.0, 1.0)
    assert 1 < exact < 2
    assert abs(gaussian_kl_sum(mean, std, 0.0, 1.0) - exact) < 0.15  # half a unit in the last place of 1 per entry


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients_of_its_own_type(path, dtype):
    mean, rho = (torch.full((100,), value, dtype=dtype, requires_grad=True) for value in (0.5, 0.0))
    kl = gaussian_kl_sum(mean, softplus_std(rho), 0.0, 1.0)
    kl.backward()
    assert kl.dtype == torch.float32
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, mean)


def test_kl_of_half_precision_is_computed_in_float32():
    mean, std = torch.full((100_000,), 0.01), torch.full((100_000,), 0.5)
    exact = gaussian_kl_sum(mean.bfloat16().float(), std, 0.0, 1.0)
    torch.testing.assert_close(gaussian_kl_sum(mean.bfloat16(), std.bfloat16(), 0.0, 1.0), exact)


SHAPES = [(3, 4, 2), (3, 5), (3,), (3, 1, 1, 2)]
SHARED_PRIORS = [None, (0.0, 1.0), (0.3, 0.7), (0.0, 2.0), (-1.0, 1.0)]


@pytest.fixture
def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in 2 * SHAPES]


def joint(prior, parameters):
    torch.manual_seed(0)
    return JointDraw.apply(prior, *parameters)


def by_hand(prior, parameters):
    """The same draws and divergences out of torch's own operations."""
    torch.manual_seed(0)
    count = len(parameters) // 2
    halves = parameters[:count], parameters[count:]
    columns = [[(p.transpose(1, 2) if p.dim() == 3 else p).reshape(len(p), -1) for p in half] for half in halves]
    mean, rho = (torch.cat(half, 1) for half in columns)
    std = softplus_std(rho)
    drawn = mean + std * torch.randn_like(mean)
    sizes = [p[0].numel() for p in parameters[:count]]
    lying = [p.transpose(1, 2) if p.dim() == 3 else p for p in parameters[:count]]
    draws = [part.reshape(each.shape) for part, each in zip(drawn.split(sizes, 1), lying)]
    draws = [draw.transpose(1, 2) if draw.dim() == 3 else draw for draw in draws]
    kl = [] if prior is None else [torch.stack([gaussian_kl_sum(m, s, *prior) for m, s in zip(mean, std)])]
    return *draws, mean, rho, std, *kl


def weighted(outputs, *, only=None):
    """A sum in which every entry counts differently."""
    chosen = [outputs[i] for i in only] if only is not None else outputs
    return sum((out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum() for out in chosen)


@pytest.mark.parametrize("prior", SHARED_PRIORS)
def test_outputs_and_gradients(prior, parameters):
    found, expected = joint(prior, parameters), by_hand(prior, parameters)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
    gradients = torch.autograd.grad(weighted(found), parameters)
    for one, other in zip(gradients, torch.autograd.grad(weighted(expected), parameters)):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("prior", SHARED_PRIORS)
def test_second_derivatives(prior, parameters):
    assert gradcheck(lambda *p: joint(prior, p), parameters)
    assert gradgradcheck(lambda *p: joint(prior, p), parameters)


def test_moments():
    count, mean, rho = 4000, torch.tensor([0.5, -2.0]), torch.tensor([-1.0, 1.0])
    means, rhos = [mean.expand(count, 2)] * 2, [rho.expand(count, 2)] * 2
    first, second = JointDraw.apply(None, *means, *rhos)[:2]
    for draws in (first, second):
        torch.testing.assert_close(draws.mean(0), mean, atol=4 * float(softplus_std(rho).max()) / count**0.5, rtol=0)
        torch.testing.assert_close(draws.std(0), softplus_std(rho), rtol=4 / (2 * count) ** 0.5, atol=0)
    assert torch.corrcoef(torch.cat([first, second], 1).T).fill_diagonal_(0).abs().max() < 0.08


@pytest.fixture
def gaussian():
    return torch.randn(4, 3), torch.rand(4, 3) + 0.1


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_scale_mixture_of_one_component_is_normal_in_expectation(gaussian, weight):
    prior = ScaleMixturePrior(weight, 0.5, 2.0)
    expected = NormalPrior(0.0, 0.5 if weight else 2.0).kl(*gaussian)
    values = torch.func.vmap(lambda _: prior.kl(*gaussian), randomness="different")(torch.empty(20_000))
    assert abs(values.mean() - expected) < 5 * values.std() / 20_000**0.5


def test_scale_mixture_matches_numerical_integration():
    mean, std, prior = 0.7, 0.4, ScaleMixturePrior(0.3, 1.5, 0.1)
    grid = torch.linspace(-6, 8, 200_001, dtype=torch.float64)
    q = TorchNormal(mean, std).log_prob(grid)
    p = torch.logaddexp(
        TorchNormal(0.0, 1.5).log_prob(grid) + torch.tensor(0.3).log(),
        TorchNormal(0.0, 0.1).log_prob(grid) + torch.tensor(0.7).log(),
    )
    exact = torch.trapezoid(q.exp() * (q - p), grid)
    values = torch.stack([prior.kl(torch.tensor([mean]), torch.tensor([std])) for _ in range(4000)])
    assert abs(values.mean() - exact) < 5 * values.std() / 4000**0.5


test_improper_priors_are_refused = refusals(
    ConversionError,
    (lambda: NormalPrior(0.0, 0.0), "std=0.0"),
    (lambda: ScaleMixturePrior(0.5, 1.0, 0.0), "std2=0.0"),
    (lambda: ScaleMixturePrior(1.5, 1.0, 1.0), "weight of a scale mixture prior=1.5"),
)


def test_the_divergence_takes_the_widths_of_the_draw_and_no_older_ones():
    """What a forward pass has computed counts until its backward pass, a change of ρ or the end of its output."""
    torch.manual_seed(0)
    layer, x = LinearReparameterization(160, 128, bias=False), torch.ones(2, 160)
    mean, rho = layer.mu_weight, layer.rho_weight

    def fresh():
        return torch.equal(layer.kl_loss(), gaussian_kl_sum(mean, softplus_std(rho), 0.0, 1.0))

    def gradients(*parts):
        layer.zero_grad()
        for part in parts:
            part.backward()
        return mean.grad.clone(), rho.grad.clone()

    torch.testing.assert_close(gradients(layer.kl_loss()), gradients(gaussian_kl_sum(mean, softplus_std(rho), 0, 1)))
    torch.manual_seed(1)
    output = layer(x)
    assert Known.values[id(rho)].std is not None
    assert fresh()
    total = output.sum() + layer.kl_loss()
    together = gradients(total)
    assert Known.values[id(rho)].std is None
    torch.manual_seed(1)
    torch.testing.assert_close(gradients(layer(x).sum(), layer.kl_loss()), together, rtol=1e-5, atol=1e-6)
    output = layer(x)
    with torch.no_grad():
        rho.add_(1.0)
    assert fresh()
    del output
    layer(x)
    rho.data.fill_(-1.0)  # which no counter of versions sees, but the output is gone
    assert fresh()
    assert copy.deepcopy(layer).kl_loss() == layer.kl_loss()
    assert grad(lambda value: functional_call(layer, {"rho_weight": value}, x).sum())(rho.detach()).any()
    assert fresh()


def loss_of(known):
    """A loss of three calls, one of them with noise and one after the divergence, and two divergences."""
    torch.manual_seed(0)
    draws = [known(MEAN, RHO, draws=noisy) for noisy in (False, True)]
    divergence = gaussian_kl_sum(*known(MEAN, RHO), 0.5, 2.0)
    divergence = divergence + gaussian_kl_sum(*known(MEAN, RHO), MEAN.detach().cos(), torch.full_like(RHO, 3.0))
    draws.append(known(MEAN, RHO, draws=False))
    return sum((k * mean.sin() + std**3).sum() for k, (mean, std) in enumerate(draws, 1)), divergence


def plain(mean, rho, draws=False):
    return mean, softplus_std(rho) * (torch.randn_like(mean) if draws else 1)


MEAN, RHO = (leaf(torch.randn(kl.SMALL, dtype=torch.float64)) for _ in range(2))
LEAVES = MEAN, RHO


def test_moments_are_shared_and_derivatives_stay_right():
    """Of all of a graph and of its parts, in one pass and in several, and second ones."""
    expected = [torch.autograd.grad(each, LEAVES) for each in loss_of(plain)]
    together = [sum(each) for each in zip(*expected)]
    draws, divergence = loss_of(kl.known)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(draws + divergence, LEAVES, retain_graph=True), (*together,))
        torch.testing.assert_close(torch.autograd.grad(divergence, LEAVES, retain_graph=True), expected[1])
        torch.testing.assert_close(torch.autograd.grad(draws, LEAVES, retain_graph=True), expected[0])
        torch.testing.assert_close(
            torch.autograd.grad(draws - 3 * divergence, RHO, retain_graph=True)[0], expected[0][1] - 3 * expected[1][1]
        )

    def second(parts):
        slopes = torch.autograd.grad(sum(parts), LEAVES, create_graph=True)
        return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), LEAVES)

    torch.testing.assert_close(second(loss_of(kl.known)), second(loss_of(plain)))


def test_a_draw_with_another_mean_takes_no_gradient_of_the_divergence():
    other = leaf(MEAN.detach() + 1)
    draw, divergence = kl.known(other, RHO), gaussian_kl_sum(*kl.known(MEAN, RHO), 0.0, 1.0)
    of_other, of_mean = torch.autograd.grad(draw[0].sum() + draw[1].sum() + divergence, (other, MEAN))
    torch.testing.assert_close((of_other, of_mean), (torch.ones_like(other), MEAN.detach()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_activations_leave_the_gradients_as_they_are(reentrant):
    layer, x = LinearFlipout(160, 128), leaf(torch.randn(4, 160))

    def gradients(output):
        return torch.autograd.grad(output.square().sum() + layer.kl_loss(), [*layer.parameters()])

    torch.manual_seed(0)
    expected = gradients(layer(x))
    torch.manual_seed(0)
    layer.zero_grad()
    (checkpoint(layer, x, use_reentrant=reentrant).square().sum() + layer.kl_loss()).backward()
    torch.testing.assert_close([each.grad for each in layer.parameters()], [*expected], rtol=1e-5, atol=1e-5)


def test_a_divergence_of_a_draw_leaves_its_gradient_to_it(monkeypatch):
    """So that there is one vector less. Not of another backward pass, or where torch does not tell."""
    ran = []
    monkeypatch.setattr(kl.GaussianKL, "backward", lambda *_: ran.append(1) or (None,) * 5)
    mean, std = kl.known(MEAN, RHO)
    divergence = gaussian_kl_sum(*kl.known(MEAN, RHO), 0.0, 1.0)
    (mean.sum() + std.sum() + divergence).backward()
    assert not ran
    monkeypatch.setattr(kl, "backward_pass", lambda node: None)
    gaussian_kl_sum(*kl.known(MEAN, RHO), 0.0, 1.0).backward()
    assert ran
