"""IVON alone: its fixed points, its curvature, its place in any training loop."""

import math
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.modules.sources import ivon_state
from tests import federations
from tests.refusals import refusals

CURVATURE = torch.tensor([0.5, 2.0, 10.0])
CENTRE = torch.tensor([1.0, -2.0, 0.3])


def minimise(optimizer, loss, steps):
    """Take steps, and return the mean of means and precisions over the last third, for each group of one parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def closure():
        optimizer.zero_grad()
        value = sum(loss(parameter) for parameter in parameters)
        value.backward()
        return value

    totals, count = [torch.zeros(2, *parameter.shape) for parameter in parameters], 0
    for step in range(steps):
        optimizer.step(closure)
        if step == steps // 3:
            for group in optimizer.param_groups:
                group["lr"] /= 10
                group["betas"] = (0.9, 0.9998 if group["curvature"] == "ivon" else 0.999)
        if step > 2 * steps // 3:
            for parameter, total in zip(parameters, totals):
                total += torch.stack([parameter.detach(), optimizer.state[parameter]["precision"]])
            count += 1
    return [total / count for total in totals]


KINDS = ("squares", "ivon")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quadratic_loss_gives_the_exact_posterior(kind):
    """Squared gradients give the shape up to the prior's share, and their unit has a shorter memory: 0.06, not 0.02."""
    priors = ((0.5, 1.0), (2.0, 0.5), (math.inf, 1.0))
    options = [{"prior_std": std, "temperature": temperature} for std, temperature in priors]
    groups = [{"params": [nn.Parameter(torch.zeros(3))], **each} for each in options]
    optimizer = fb.IVON(groups, num_examples=200, curvature=kind)
    found = minimise(optimizer, lambda p: (CURVATURE * (p - CENTRE) ** 2).sum() / 2, 24_000)
    for (mean, precision), each in zip(found, options, strict=True):
        exact = 200 / each["temperature"] * CURVATURE + each["prior_std"] ** -2
        assert torch.allclose(precision, exact, rtol=0.02 if kind == "ivon" else 0.06)
        optimum = 200 / each["temperature"] * CURVATURE * CENTRE / exact
        assert ((mean - optimum).abs() < 0.1 * exact.rsqrt()).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logistic_regression_is_near_its_mean_field_posterior(kind):
    """Beside the posterior of the ELBO, maximised with its exact gradient over one-dimensional Gaussians of logits."""
    torch.manual_seed(1)
    x = torch.cat([torch.randn(150, 4), torch.ones(150, 1)], 1)
    y = (torch.rand(150) < torch.sigmoid(x @ torch.tensor([1.5, -1.0, 0.5, 0.0, 0.3]))).float()
    mean, log_std = torch.zeros(5, requires_grad=True), torch.full((5,), -1.0, requires_grad=True)
    nodes, weights = map(torch.Tensor, np.polynomial.hermite_e.hermegauss(21))  # of the density of N(0, 1)
    weights = weights / weights.sum()
    solver = torch.optim.LBFGS([mean, log_std], max_iter=300, line_search_fn="strong_wolfe")

    def negative_elbo():
        solver.zero_grad()
        variance = (2 * log_std).exp()
        logits = (x @ mean)[:, None] + (x**2 @ variance).sqrt()[:, None] * nodes
        nll = F.binary_cross_entropy_with_logits(logits, y[:, None].expand_as(logits), reduction="none")
        value = (nll @ weights).sum() + ((variance + mean**2) / 2 - log_std).sum()
        value.backward()
        return value

    solver.step(negative_elbo)
    parameter = nn.Parameter(torch.zeros(5))
    optimizer = fb.IVON([parameter], num_examples=150, hessian_init=0.3, curvature=kind)
    ((found, precision),) = minimise(optimizer, lambda p: F.binary_cross_entropy_with_logits(x @ p, y), 15_000)
    exact = fb.GaussianPosterior({"w": mean.detach()}, {"w": (2 * log_std.detach()).exp()})
    distance = fb.GaussianPosterior({"w": found}, {"w": 1 / precision}).kl(exact)
    assert distance / 5 < 0.02


THEIRS = [
    [0.294898, -1.073131, 0.178337, 0.085188],
    [0.709636, -1.083895, 0.419357, 0.085315],
    [0.685467, -1.102933, 1.279991, 0.093335],
]


@pytest.mark.parametrize(("seed", "theirs"), [*enumerate(THEIRS)])
def test_steps_are_those_of_the_authors_package(seed, theirs):
    """ivon-opt 0.1.3 after 50 steps with the same draws: ess 640, hess_init .01, weight_decay 1 / (640 * .3 ** 2)."""
    torch.manual_seed(seed)
    curvature, optimum = torch.tensor([1.0, 3.0, 0.2, 0.05]), torch.tensor([1.0, -1.0, 2.0, 0.5])
    parameter = nn.Parameter(torch.zeros(4))
    options = {"prior_std": 0.3, "hessian_init": 0.01, "betas": (0.9, 0.99), "curvature": "ivon"}
    optimizer = fb.IVON([parameter], 0.1, num_examples=640, **options)
    for _ in range(50):
        with optimizer.sampled():
            parameter.grad = None
            (0.5 * curvature * (parameter - optimum) ** 2).sum().backward()
        optimizer.step()
    assert parameter.tolist() == pytest.approx(theirs, abs=2e-6)


@settings(deadline=None)
@given(
    gradients=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    second=st.floats(0.0, 0.999),
    prior_std=st.floats(0.1, 100.0),
    hessian_init=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    improper=st.booleans(),
)
def test_precisions_stay_positive_for_all_gradients(gradients, second, prior_std, hessian_init, seed, kind, improper):
    """It loses at most half of itself in a step, and with squares at most 1/(2t), or a fiftieth, in the t-th."""
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    options = {"prior_std": prior_std, "hessian_init": hessian_init, "betas": (0.9, second), "curvature": kind}
    optimizer = fb.IVON([parameter], 0.0, num_examples=10, **options)
    if improper and kind == "squares":
        with optimizer.sampled():
            pass
        negative = torch.full_like(parameter, -prior_std)
        optimizer.state[parameter] |= {"prior_precision": negative, "prior_shift": torch.zeros_like(parameter)}
    for step, gradient in enumerate(gradients, 1):
        with optimizer.sampled():
            parameter.grad = torch.full_like(parameter, gradient)
        before = optimizer.state[parameter]["precision"].clone()
        optimizer.step()
        after = optimizer.state[parameter]["precision"]
        assert after.isfinite().all()
        assert after >= (0.499 if kind == "ivon" else 0.999 - max(0.5 / step, 0.02)) * before


def by_hand(network, gradient_of, steps, n, prior_std, betas, lr, first):
    """Means and precisions after some steps by the equations of IVON's page, one tensor, in double precision."""
    m, a, (b1, b2) = network.clone(), prior_std**-2, betas
    v, g, precision = torch.full_like(m, first), torch.zeros_like(m), torch.full_like(m, n * first + a)
    signal = noise = 0.0
    for t in range(1, steps + 1):
        move = torch.randn_like(m) / precision.sqrt()
        gradient = gradient_of(m + move)
        if t == 1:
            ratio = (gradient**2 / precision).sum() / (v / precision).sum()
            v, signal = v * ratio, -ratio
        v = v + max(1 / (t + 30), 1 - b2) * (gradient**2 - v)
        memory = 1 - 8 / (t + 30 + 8)
        signal = memory * signal + (gradient * move).sum()
        noise = memory * noise + (v / precision).sum()
        c = (signal + (signal**2 + 4 * noise).sqrt()) / (2 * noise)
        wanted = n * c * v + a
        precision = torch.maximum(wanted, (1 - max(0.02, 0.5 / t)) * precision)
        g = b1 * g + (1 - b1) * gradient
        m = m - (n * g / (1 - b1**t) + a * m) / (n * v.sqrt() / lr + 10 * wanted)
    return m, precision


def test_a_step_with_squared_gradients_is_that_of_its_page():
    start, scales = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4), torch.logspace(-1, 1, 12).view(3, 4)
    options = {"prior_std": 0.7, "betas": (0.8, 0.98), "lr": 0.02}
    parameter = nn.Parameter(start.clone())
    optimizer = fb.IVON([parameter], num_examples=50, hessian_init=0.4, **options)
    torch.manual_seed(3)
    for _ in range(60):
        with optimizer.sampled():
            parameter.grad = (scales * parameter.detach().sin()).double()
        optimizer.step()
    torch.manual_seed(3)
    mean, precision = by_hand(start, lambda theta: scales * theta.sin(), 60, 50, first=0.4, **options)
    assert torch.allclose(parameter.detach(), mean, rtol=1e-6)
    assert torch.allclose(optimizer.state[parameter]["precision"], precision, rtol=1e-5)


def noisy_quadratic(batch, steps, scale=1.0, temperature=1.0, seed=0, size=1000):
    """Optimizer and its parameter after steps on a quadratic whose gradients have the noise of a batch."""
    torch.manual_seed(seed)
    curvature = torch.logspace(-2, 1, size)
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = fb.IVON([parameter], 1e-3, num_examples=1000, temperature=temperature)
    sums = []
    for _ in range(steps):
        before = optimizer.state[parameter].get("precision", torch.ones(1)).clone()
        mean = parameter.detach().clone()
        with optimizer.sampled():
            noise = curvature.sqrt() * torch.randn(size) / batch**0.5
            parameter.grad = scale * (curvature * parameter.detach() + noise)
            product = (parameter.grad * (parameter.detach() - mean)).sum()
        optimizer.step()
        sums.append((float(product) * 1000 / temperature, float((1 - 1 / before).sum())))
    return optimizer.state[parameter]["precision"], 1000 / temperature * scale * curvature + 1, torch.tensor(sums)


@pytest.mark.slow
def test_at_its_fixed_point_both_estimates_of_the_curvature_agree_in_sum():
    _, _, sums = noisy_quadratic(16, 6000)
    unbiased, own = sums[3000:].mean(0).tolist()
    assert unbiased == pytest.approx(own, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 64])
def test_the_width_does_not_depend_on_the_batch_size(batch):
    """Whose gradients' squares are 64 times as large."""
    precision, exact, _ = noisy_quadratic(batch, 4000)
    ratio = (precision / exact).log()
    assert abs(float(ratio.mean())) < 0.2
    assert ratio.std() < 0.2


def test_a_loss_in_another_unit_gives_the_same_posterior():
    """A loss of k times the size at k times the temperature."""
    (one, _, _), (other, _, _) = (noisy_quadratic(8, 200, scale, scale) for scale in (1.0, 32.0))
    assert torch.allclose(one, other, rtol=1e-3)


@pytest.mark.parametrize("piece", [4, ivon_state.PIECE])
def test_a_stack_of_networks_steps_as_each_of_them(monkeypatch, piece):
    """With sums of each network's own, while numbers of steps are shared."""
    monkeypatch.setattr(ivon_state, "PIECE", piece)
    draws = {}

    def drawn(like):
        shape = like.shape[1:] if like.shape[:1] == (2,) else like.shape
        return draws[shape].expand_as(like).clone()

    monkeypatch.setattr(torch, "randn_like", drawn)
    shapes = ((3, 4), (5,), ())
    starts = [torch.randn(2, *shape) for shape in shapes]
    alone = [fb.IVON([nn.Parameter(start[i].clone()) for start in starts], num_examples=30) for i in range(2)]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    together = fb.IVON(parameters, num_examples=30)

    def parameters_of(optimizer):
        return optimizer.param_groups[0]["params"]

    for step in range(40):
        draws = {shape: torch.randn(shape) for shape in shapes}
        if not step:
            for optimizer in alone:
                with optimizer.sampled():
                    pass
            for p, *own in zip(parameters, *map(parameters_of, alone)):
                states = [each.state[one] for each, one in zip(alone, own)]
                by_row = [1] * (p.dim() - 1)
                together.state[p] = {
                    key: torch.stack([state[key] for state in states]).view(2, *by_row)
                    if key in fb.IVON.sums
                    else value.clone()
                    if key in fb.IVON.counts
                    else torch.stack([state[key] for state in states])
                    for key, value in states[0].items()
                }
        for optimizer in (together, *alone):
            with optimizer.sampled():
                for p in parameters_of(optimizer):
                    p.grad = (3 * p.detach()).sin() + p.detach()
            optimizer.step()
    for p, *own in zip(parameters, *map(parameters_of, alone)):
        assert torch.allclose(p.detach(), torch.stack([each.detach() for each in own]), rtol=1e-4, atol=1e-6)
        precisions = torch.stack([each.state[one]["precision"] for each, one in zip(alone, own)])
        assert torch.allclose(together.state[p]["precision"], precisions, rtol=1e-4)


@pytest.mark.parametrize(("kind", "samples"), [("squares", 1), ("squares", 2), ("ivon", 1)])
@pytest.mark.parametrize("has_prior", [False, True])
def test_a_step_by_pieces_is_that_of_each_parameter_alone(monkeypatch, kind, samples, has_prior):
    def trained(piece=None):
        monkeypatch.setattr(ivon_state, "PIECE", piece or math.inf)
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((6, 5), (9,), (), (2, 1, 3), (1, 7), (3,), (2,))]
        groups = parameters if piece else [{"params": [p]} for p in parameters]
        optimizer = fb.IVON(groups, num_examples=30, curvature=kind, samples=samples)
        for step in range(5):
            used = enumerate(parameters[: 4 + step])  # those that join later count fewer steps
            optimizer.step(lambda used=[*used]: sum((k * p).sin().sum() for k, p in used).backward())
            for p in parameters if has_prior and not step else ():
                optimizer.state[p] |= {"prior_precision": torch.rand_like(p), "prior_shift": torch.randn_like(p)}
        return torch.cat([torch.stack([p, optimizer.state[p]["precision"]]).flatten() for p in parameters])

    alone = trained()
    for piece in (1, 4, 10, 2**17):
        assert torch.allclose(trained(piece), alone, rtol=1e-5, atol=1e-7)


def test_a_parameter_that_one_of_two_draws_uses_counts_its_gradient_as_half():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = fb.IVON([first, second], num_examples=10, samples=2, betas=(0.0, 0.0))
    for _ in range(2):
        draws = iter(((second,), (first, second)))
        optimizer.step(lambda draws=draws: sum(4 * p.sum() for p in next(draws)).backward())
    assert optimizer.state[first]["momentum"].tolist() == [2.0, 2.0]
    assert optimizer.state[first]["square"].tolist() == [8.0, 8.0]
    assert optimizer.state[second]["square"].tolist() == [16.0, 16.0]


def test_draws_have_the_posterior_s_moments_and_leave_the_mean_unchanged():
    parameter = nn.Parameter(torch.full((20_000,), 0.1))
    optimizer = fb.IVON([parameter], num_examples=100, hessian_init=2.0)
    before = parameter.detach().clone()
    with optimizer.sampled():
        drawn = parameter.detach().clone()
    std = 201**-0.5
    assert abs(float((drawn - before).mean())) < 4 * std / 20_000**0.5
    assert float((drawn - before).std()) == pytest.approx(std, rel=0.03)
    assert torch.equal(parameter.detach(), before)


class Module(federations.Plain):
    def __init__(self, **options):
        super().__init__(lr=None, optimizer=partial(fb.IVON, num_examples=90, **options))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def trainer(folder, epochs, **options):
    return federations.trainer(epochs, default_root_dir=folder, **{"enable_checkpointing": True, **options})


def states(optimizer):
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def test_resumes_bit_by_bit(tmp_path):
    def fit(module, epochs, state=None, **options):
        L.seed_everything(1, verbose=False)
        if state is not None:
            torch.set_rng_state(state)
        made = trainer(tmp_path, epochs, enable_checkpointing=False)
        made.fit(module, federations.loader(shuffle=False), **options)
        return made

    whole, half, rest = Module(), Module(), Module()
    expected = fit(whole, 4)
    fit(half, 2).save_checkpoint(tmp_path / "half.ckpt")
    found = fit(rest, 4, torch.get_rng_state(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters()))
    pairs = zip(states(expected.optimizers[0]), states(found.optimizers[0]), strict=True)
    assert all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)


def test_clipping_limits_the_gradient_at_the_draw(tmp_path):
    clipped, free = (Module(betas=(0.0, 0.999), curvature="ivon") for _ in range(2))  # whose steps grow with gradients
    for module, limit in ((clipped, 1e-6), (free, None)):
        L.seed_everything(0, verbose=False)
        trainer(tmp_path, 1, enable_checkpointing=False, gradient_clip_val=limit).fit(
            module, federations.loader(shuffle=False)
        )
    start = list(Module().parameters())
    moves = [sum(float((a - b).detach().norm()) for a, b in zip(each.parameters(), start)) for each in (clipped, free)]
    assert moves[0] < 0.3 * moves[1]


def test_a_group_without_a_posterior_takes_adam_s_steps():
    points, drawn = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
    other = nn.Parameter(points.detach().clone())
    optimizer = fb.IVON([{"params": [drawn]}, {"params": [points], "posterior": False, "lr": 0.01}], num_examples=10)
    adam = torch.optim.Adam([other], lr=0.01, betas=(0.9, 0.999))

    def closure():
        optimizer.zero_grad()
        (points.sin().sum() + drawn.square().sum()).backward()

    for _ in range(5):
        optimizer.step(closure)
        adam.zero_grad()
        other.sin().sum().backward()
        adam.step()
    assert torch.allclose(points, other, atol=1e-6)
    module = nn.ParameterDict({"a": points, "b": drawn})
    posterior = optimizer.posterior(module)
    assert not posterior.variance["a"].any()
    assert posterior.variance["b"].all()


def test_a_frozen_parameter_is_not_drawn_and_one_without_gradient_does_not_move():
    frozen, unused, used = (nn.Parameter(torch.ones(3), requires_grad=i > 0) for i in range(3))
    optimizer = fb.IVON([frozen, unused, used], num_examples=10)
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append((frozen.detach().clone(), used.detach().clone()))
        (used * frozen).sum().backward()

    optimizer.step(closure)
    assert torch.equal(seen[0][0], torch.ones(3))
    assert not torch.equal(seen[0][1], torch.ones(3))
    assert torch.equal(unused.detach(), torch.ones(3))
    assert not torch.equal(used.detach(), torch.ones(3))


test_a_mistake_is_named = refusals(
    FederationError,
    (lambda p: fb.IVON(p, num_examples=0), "num_examples=0"),
    (lambda p: fb.IVON(p, hessian_init=0.0), "hessian_init=0.0"),
    (lambda p: fb.IVON(p, curvature="exact"), "curvature='exact'.*'squares' or 'ivon'"),
    (lambda p: fb.IVON(p, betas=(0.9, 1.0)), "betas=1.0"),
    (lambda p: fb.IVON(p, betas=0.9), "two numbers"),
    (lambda p: fb.IVON([{"params": p, "weight_decay": 0.1}]), "prior_std"),
    (lambda p: fb.IVON(p, num_examples=3).step(), "hand it a closure"),
    (lambda p: fb.IVON(p).step(lambda: None), "num_examples is not known"),
    call=lambda make: make([nn.Parameter(torch.ones(2))]),
)
