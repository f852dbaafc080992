"""The laws that a Bayesian layer must obey, as measurements of any library through its adaptor.

This file and the adaptors need torch alone, so that they run in the environment of every library. A law returns its
figure and whether it holds. An exception is a failure in all but two cases: a library that does not offer a feature
says so by :class:`~benchmarks.contract.adaptors.NotClaimed`; and ``vmap`` and ``compile``, which no module is obliged
to support, are not applicable where they raise and the library does not claim them. Whatever runs and returns wrong
numbers fails.

Statistical laws allow :data:`LIMIT` standard errors, at fixed seeds: the chance that a right library fails one of a few
hundred comparisons is below 1e-4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, jacrev, vmap

from benchmarks.contract.adaptors import Library, NotClaimed

DRAWS = 4000
"""Calls of a layer behind a figure about its moments."""

SOME = 1000
"""Calls behind a comparison of a layer with itself, transformed."""

LIMIT = 5.5
"""Standard errors that a mean or a variance may be away from theory."""

BFLOAT16 = 2.0**-6
"""Relative error allowed in bfloat16: four roundings to 8 bits."""


@dataclass(frozen=True)
class Verdict:
    """Result of one law for one library: the figure, where there is one, and a note on an exception or a reason."""

    verdict: Literal["pass", "fail", "n/a"]
    figure: float | None = None
    note: str = ""


class Measured(NamedTuple):
    """Figure of a law, whether the law holds, and a note on where it does not."""

    figure: float
    holds: bool
    note: str = ""


@dataclass(frozen=True)
class Law:
    """A law: its measurement, the meaning of its figure, and whether only a claim obliges a library to it."""

    measure: Callable[[Library], Measured]
    figure: str
    transformation: bool = False


def examine(name: str, library: Library) -> Verdict:
    """Measure the law ``name`` of a library."""
    law = LAWS[name]
    torch.manual_seed(0)
    try:
        figure, holds, note = law.measure(library)
    except NotClaimed as reason:
        return Verdict("n/a", note=str(reason))
    except Exception as error:
        optional = law.transformation and name not in library.claims
        return Verdict("n/a" if optional else "fail", note=words(error))
    return Verdict("pass" if holds else "fail", figure, note)


def words(error: Exception) -> str:
    """Type and first line of an exception."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


def linear() -> tuple[nn.Sequential, Tensor]:
    """A linear layer and two different examples."""
    return nn.Sequential(nn.Linear(5, 3)), torch.randn(2, 5)


def convolution() -> tuple[nn.Sequential, Tensor]:
    """A convolution and two different examples."""
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), torch.randn(2, 2, 4, 4)


def perceptron() -> tuple[nn.Sequential, Tensor]:
    """Two linear layers whose four parameters differ in size, and two examples."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(2, 5)


@torch.no_grad()
def put(library: Library, network: nn.Module, means: Sequence[Tensor], stds: Sequence[Tensor]) -> None:
    """Give the posterior of ``network`` these means and standard deviations."""
    for (mean, raw), new_mean, std in zip(library.gaussians(network), means, stds, strict=True):
        mean.data.copy_(new_mean)
        raw.data.copy_(library.raw(std.double()))


def posterior(
    library: Library, template: nn.Sequential, estimator: str, prior_mean: float = 0.0, prior_std: float = 1.0
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A network with a posterior of random means and standard deviations of 0.2 to 0.8, and these."""
    network = library.build(template, estimator, prior_mean, prior_std)
    means = [p.detach().clone() for p in template.parameters()]
    stds = [0.2 + 0.6 * torch.rand_like(p) for p in means]
    put(library, network, means, stds)
    return network, means, stds


def at(template: nn.Sequential, values: Sequence[Tensor], x: Tensor) -> Tensor:
    """Output of the deterministic network with ``values`` as its parameters."""
    names = [name for name, _ in template.named_parameters()]
    return functional_call(template, dict(zip(names, values, strict=True)), (x,))


def draw(output: Callable[[Tensor], Tensor], x: Tensor, count: int) -> Tensor:
    """Outputs of ``count`` calls, shape (count, \\*output)."""
    with torch.no_grad():
        return torch.stack([output(x) for _ in range(count)])


def largest(values: Tensor) -> float:
    """Largest entry; infinite where one is not a number, so that no comparison takes it for small."""
    return float(values.detach().nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def largest_z(draws: Tensor, mean: Tensor, variance: Tensor) -> float:
    r"""Largest distance of a mean or a variance of Gaussian draws from theory, in standard errors.

    The standard errors are :math:`\sigma / \sqrt n` and :math:`\sigma^2 \sqrt{2 / (n - 1)}`.
    """
    draws, mean, variance = draws.double(), mean.double(), variance.double()
    count = len(draws)
    shift = (draws.mean(0) - mean).abs() / variance.sqrt() * count**0.5
    spread = (draws.var(0) / variance - 1).abs() * ((count - 1) / 2) ** 0.5
    return largest(torch.maximum(shift, spread))


def largest_z_between(draws: Tensor, others: Tensor, rounding: float = 0.0) -> float:
    """Largest distance between the means or variances of two sets of draws, in standard errors of the distance.

    The standard errors come from the draws; ``rounding`` is the relative error that the number type excuses.
    """
    draws, others = draws.double(), others.double()
    pairs = [
        (draws, others, rounding),
        ((draws - draws.mean(0)).square(), (others - others.mean(0)).square(), 4 * rounding),
    ]
    worst = 0.0
    for these, those, excused in pairs:
        distance = (these.mean(0) - those.mean(0)).abs() - excused * (those.mean(0).abs() + those.std(0))
        error = (these.var(0) / len(these) + those.var(0) / len(those)).sqrt()
        worst = max(worst, largest(distance / error))
    return worst


def largest_z_of_transformation(
    library: Library,
    make: Callable[[], tuple[nn.Sequential, Tensor]],
    sample: Callable[[nn.Module, Tensor], Tensor],
    rounding: float = 0.0,
) -> Measured:
    """Largest z between draws by ``sample(network, x)`` and draws of the network as it is, over all estimators."""
    worst = 0.0
    for estimator in library.estimators:
        template, x = make()
        network, _, _ = posterior(library, template, estimator)
        plain = draw(lambda x, network=network: library.output(network, x), x, SOME)
        worst = max(worst, largest_z_between(sample(network, x), plain, rounding))
    return Measured(worst, worst < LIMIT)


def kl_draws(library: Library, network: nn.Module, x: Tensor, count: int) -> Tensor:
    """The library's KL divergence at the same ``count`` draws whenever it is called; one value where it needs none."""
    torch.manual_seed(0)
    values = [library.kl(network, x).detach().double().squeeze() for _ in range(2)]
    if values[0] == values[1]:
        return values[0].unsqueeze(0)
    return torch.stack([*values, *(library.kl(network, x).detach().double().squeeze() for _ in range(count - 2))])


def kl_is_the_sum(library: Library) -> Measured:
    """KL of a network of four parameters under N(0, 1), against the sum of ``torch.distributions``' in float64."""
    template, x = perceptron()
    network, means, stds = posterior(library, template, library.estimators[0])
    exact = sum(
        float(kl_divergence(Normal(m.double(), s.double()), Normal(0.0, 1.0)).sum()) for m, s in zip(means, stds)
    )
    draws = kl_draws(library, network, x, DRAWS)
    error = LIMIT * float(draws.std()) / len(draws) ** 0.5 if len(draws) > 1 else 0.0
    return Measured(float(draws.mean()) / exact, abs(float(draws.mean()) - exact) < error + 1e-4 * exact)


def kl_honours_the_prior(library: Library) -> Measured:
    """Standard deviation at which the KL is smallest, over the one (0.5) that the prior's arguments state.

    The posterior has one mean and one σ. Among steps of a factor of :math:`2^{1/4}` in σ, and of a quarter of the
    prior's σ in the mean, the KL must be smallest at the prior itself. Its scale does not matter here.
    """
    template, x = perceptron()
    prior_mean, prior_std = 0.0 if library.centred else 0.3, 0.5
    network = library.build(template, library.estimators[0], prior_mean, prior_std)
    sizes = list(template.parameters())

    def kl(mean: float, std: float) -> float:
        put(library, network, [torch.full_like(p, mean) for p in sizes], [torch.full_like(p, std) for p in sizes])
        return float(kl_draws(library, network, x, 200).mean())

    ratios = [2 ** (step / 4) for step in range(-12, 13)]
    shifts = [step / 4 for step in range(-4, 5)]
    ratio = min(ratios, key=lambda ratio: kl(prior_mean, prior_std * ratio))
    shift = min(shifts, key=lambda shift: kl(prior_mean + prior_std * shift, prior_std))
    return Measured(ratio, ratio == 1 and shift == 0, f"smallest {shift:+} σ from the prior's mean" if shift else "")


def moments(library: Library) -> Measured:
    """Mean and variance of every output entry of a linear layer and a convolution, under every estimator.

    Every estimator gives an output entry the mean op(x, μ) and the variance op(x², σ²).
    """
    worst = {}
    for estimator in library.estimators:
        for make in (linear, convolution):
            template, x = make()
            network, means, stds = posterior(library, template, estimator)
            draws = draw(lambda x, network=network: library.output(network, x), x, DRAWS)
            z = largest_z(draws, at(template, means, x), at(template, [s.square() for s in stds], x.square()))
            worst[f"{estimator} of {make.__name__}"] = z
    note = ", ".join(f"{name}: z = {z:.1f}" for name, z in worst.items() if z >= LIMIT)
    return Measured(max(worst.values()), not note, note)


def need_flipout(library: Library) -> None:
    """Raise NotClaimed for a library without Flipout."""
    if "flipout" not in library.estimators:
        raise NotClaimed("no Flipout")


def flipout_pooled(library: Library) -> Measured:
    """Variance of a spatially averaged map under Flipout, as a ratio to that under one sampled kernel.

    All positions of one example see one kernel, so that their noise does not average out.
    """
    need_flipout(library)
    template, x = convolution()
    network, means, stds = posterior(library, template, "flipout")
    jacobians = jacrev(lambda values: at(template, values, x).mean((2, 3)))(means)
    exact = sum((j.square() * s.square()).flatten(2).sum(2) for j, s in zip(jacobians, stds))
    assert isinstance(exact, Tensor)
    draws = draw(lambda x: library.output(network, x), x, DRAWS).mean((3, 4)).double()
    ratio = draws.var(0) / exact
    return Measured(float(ratio.mean()), bool(((ratio - 1).abs() * ((DRAWS - 1) / 2) ** 0.5 < LIMIT).all()))


def flipout_independent(library: Library) -> Measured:
    """Correlation between the outputs of two equal examples of one batch under Flipout; the largest entry."""
    need_flipout(library)
    worst, holds = 0.0, True
    for make in (linear, convolution):
        template, x = make()
        network, _, _ = posterior(library, template, "flipout")
        equal = x[:1].expand_as(x).contiguous()
        draws = draw(lambda x, network=network: library.output(network, x), equal, DRAWS).double()
        first, second = ((draws[:, i] - draws[:, i].mean(0)) / draws[:, i].std(0) for i in range(2))
        products = first * second
        worst = max(worst, largest(products.mean(0).abs()))
        holds &= bool((products.mean(0).abs() < LIMIT * products.std(0) / DRAWS**0.5).all())
    return Measured(worst, holds)


def finite(library: Library) -> Measured:
    """Share of outputs, KL divergences and gradients that are not finite at the σ of ρ = 100 and of ρ = −100.

    These are σ = 100 and σ = exp(−100); a library that stores log σ is tested at the same two.
    """
    are_finite = []
    for estimator in library.estimators:
        for rho in (100.0, -100.0):
            template, x = perceptron()
            network, means, _ = posterior(library, template, estimator)
            std = torch.tensor(rho, dtype=torch.float64).exp().log1p()
            put(library, network, means, [std.expand(mean.shape) for mean in means])
            output, kl = library.output(network, x), library.kl(network, x)
            (output.sum() + kl.sum()).backward()
            gradients = [p.grad for pair in library.gaussians(network) for p in pair if p.grad is not None]
            are_finite += [values.isfinite().flatten() for values in (output, kl, *gradients)]
    share = float((~torch.cat(are_finite)).double().mean())
    return Measured(share, share == 0)


def copies(library: Library) -> Measured:
    """Difference between a network and its ``deepcopy`` after a forward pass, which must share no memory."""
    worst, apart = 0.0, True
    for estimator in library.estimators:
        template, x = perceptron()
        network, _, _ = posterior(library, template, estimator)
        library.output(network, x)
        copied = copy.deepcopy(network)
        for (mean, raw), (mean2, raw2) in zip(library.gaussians(network), library.gaussians(copied), strict=True):
            worst = max(worst, largest((mean - mean2).abs()), largest((raw - raw2).abs()))
            apart &= mean.data_ptr() != mean2.data_ptr() and raw.data_ptr() != raw2.data_ptr()
        library.output(copied, x)
    return Measured(worst, worst == 0 and apart)


def state_is_the_posterior(library: Library) -> Measured:
    """Count of entries of the ``state_dict`` that a forward pass changes."""
    changed = 0
    for estimator in library.estimators:
        template, x = perceptron()
        network, _, _ = posterior(library, template, estimator)
        library.output(network, x)
        before = {key: value.clone() for key, value in network.state_dict().items()}
        library.output(network, x)
        after = network.state_dict()
        changed += sum(key not in before or not torch.equal(before[key], value) for key, value in after.items())
    return Measured(changed, changed == 0)


def vmapped(library: Library) -> Measured:
    """Moments over the lanes of ``vmap(..., randomness="different")``, each of which must draw its own noise."""

    def sample(network: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return vmap(lambda _: library.output(network, x), randomness="different")(torch.empty(DRAWS))

    return largest_z_of_transformation(library, convolution, sample)


def bfloat16(library: Library) -> Measured:
    """Moments of a linear layer after ``.to(torch.bfloat16)``, beyond rounding."""

    def sample(network: nn.Module, x: Tensor) -> Tensor:
        network, x = network.to(torch.bfloat16), x.to(torch.bfloat16)
        draws = draw(lambda x: library.output(network, x), x, SOME)
        if draws.dtype != torch.bfloat16:
            raise TypeError(f"the output has dtype {draws.dtype}")
        return draws

    return largest_z_of_transformation(library, linear, sample, BFLOAT16)


def compiled(library: Library) -> Measured:
    """Moments of a compiled linear layer, which must draw new noise at every call (backend ``aot_eager``)."""

    def sample(network: nn.Module, x: Tensor) -> Tensor:
        torch.compiler.reset()
        return draw(torch.compile(lambda x: library.output(network, x), backend="aot_eager"), x, SOME)

    return largest_z_of_transformation(library, linear, sample)


def mean_prediction(library: Library) -> Measured:
    """Distance of the prediction at the mean from the deterministic network there, after one step of training.

    The network has changed its number type before the step, as networks do when they move to another device: the mean
    that is trained must be the mean that predicts. Two predictions must be equal.
    """
    template, x = perceptron()
    network, _, _ = posterior(library, template, library.estimators[0])
    template, network, x = template.double(), network.double(), x.double()
    library.output(network, x).sum().backward()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
        exact = at(template, [mean for mean, _ in library.gaussians(network)], x)
        first, second = (library.mean_output(network, x) for _ in range(2))
    distance = largest((first - exact).abs())
    return Measured(distance, torch.equal(first, second) and torch.allclose(first, exact))


def conversion(library: Library) -> Measured:
    """Count of layers, of five, that cannot be converted or whose conversion at σ = 1e-6 has other outputs."""
    layers = (
        (nn.Linear(5, 3), (2, 5)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 8, 8)),
        (nn.Conv2d(2, 3, (3, 2), padding=(2, 1), dilation=2, bias=False), (2, 2, 8, 8)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 8, 8)),
        (nn.Conv1d(2, 3, 3, padding=2), (2, 2, 8)),
    )
    notes = []
    for layer, shape in layers:
        template, x = nn.Sequential(layer), torch.randn(shape)
        try:
            network = library.convert(copy.deepcopy(template))
            means = [p.detach() for p in template.parameters()]
            put(library, network, means, [torch.full_like(mean, 1e-6) for mean in means])
            output, exact = library.output(network, x), template(x)
            if output.shape != exact.shape or not torch.allclose(output, exact, atol=1e-3):
                notes.append(f"{layer}: other outputs")
        except NotClaimed:
            raise
        except Exception as error:
            notes.append(f"{layer}: {words(error)}")
    return Measured(len(notes), not notes, "; ".join(notes))


LAWS: dict[str, Law] = {
    "KL is the sum": Law(kl_is_the_sum, "KL / sum of torch.distributions'"),
    "KL honours the prior": Law(kl_honours_the_prior, "σ of the smallest KL / stated σ"),
    "moments": Law(moments, "largest z, every estimator"),
    "Flipout, pooled": Law(flipout_pooled, "variance of the mean map / exact"),
    "Flipout, examples": Law(flipout_independent, "correlation of equal examples"),
    "finite": Law(finite, "share not finite at ρ = ±100"),
    "deepcopy": Law(copies, "difference after a forward"),
    "state_dict": Law(state_is_the_posterior, "entries that a forward changes"),
    "vmap": Law(vmapped, "largest z between lanes and calls", transformation=True),
    "bfloat16": Law(bfloat16, "largest z from float32, beyond rounding"),
    "compile": Law(compiled, "largest z from the plain layer", transformation=True),
    "mean prediction": Law(mean_prediction, "distance from the mean's output"),
    "conversion": Law(conversion, "layers of 5 lost"),
}
"""Every law by name, in the order of the table."""
