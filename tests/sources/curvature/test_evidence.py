"""The prior that the evidence chooses: closed forms, laplace-torch, linear regression, its own prior, bounds."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.modules.sources.curvature.systems import LARGEST, chosen_precision, evident_precision


@pytest.mark.parametrize("information", [0.01, 3.0, 1e4])
def test_alike_information_has_a_closed_form(information):
    """With F alike for all P parameters a‖θ‖² = P F / (F + a) + (1 − a) / (1 + a), a cubic equation."""
    mean = torch.randn(3, 7)
    f, size = information, float(mean.double().square().sum())
    roots = np.roots([size, size * (1 + f) + 1, size * f - 21 * f - 1 + f, -22 * f])
    (exact,) = [float(root.real) for root in roots if root.real > 0 and abs(root.imag) < 1e-9]
    assert chosen_precision([torch.full((3, 7), information)], [mean]) == pytest.approx(exact, rel=1e-6)


def half_cauchy(precision):
    """The log density of log s, of s = a^(-1/2) with a half-Cauchy prior of scale 1."""
    std = torch.as_tensor(precision, dtype=torch.float64) ** -0.5
    return float(torch.distributions.HalfCauchy(torch.tensor(1.0).double()).log_prob(std) + std.log())


def test_nothing_to_learn_from_gives_the_prior_s_own():
    zero, one = torch.zeros(4), torch.ones(4)
    assert chosen_precision([zero], [zero]) == pytest.approx(1)
    assert evident_precision(torch.ones(4), zero) < LARGEST
    assert chosen_precision([one * 1e30], [one * 1e30]) == pytest.approx(1 / LARGEST)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [20, 60])
@pytest.mark.parametrize("rank", [2, 6])
def test_few_data_on_collinear_features_keep_a_width(examples, rank):
    """Evidence alone has its maximum at s = 0 in some of these, where half of the uncertainty and more is gone."""
    spread, least = [], 1.0
    for seed in range(12):
        draws = torch.Generator().manual_seed(seed)
        x = (torch.randn(examples, rank, generator=draws) @ torch.randn(rank, 19, generator=draws) / rank**0.5).relu()
        logits = torch.cat([x, torch.ones(examples, 1)], 1) @ torch.randn(20, 2, generator=draws)  # s = 1
        y = (torch.rand(examples, generator=draws) < logits.softmax(1)[:, 1]).long()
        found = []
        for prior_std in (None, 1.0):
            fit = fb.BayesianHead(2, prior_std=prior_std).fit_clients([(x, y)])
            probs = fb.PosteriorPredictive(fit.linear(), fit.posterior, 300).sample(x, 300).softmax(-1)
            found.append(float(fb.metrics.functional.mutual_information(probs).mean()))
            spread.append(math.log(fit.prior_precision))
        least = min(least, found[0] / found[1])
    assert least > 0.5
    assert max(spread) < math.log(100)


def test_is_the_maximum_of_the_evidence_of_laplace_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("laplace")
        from laplace import DiagLaplace
        from laplace.curvature import AsdlGGN

        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
        peer = DiagLaplace(module, "classification", backend=AsdlGGN)
        peer.fit(data)
    laplace = fb.Laplace(prior_std=None)
    information = laplace.site(module, data)
    precision = chosen_precision(information.values(), module.parameters())

    def evidence(factor):
        found = peer.log_marginal_likelihood(prior_precision=torch.tensor(factor * precision))
        return float(found) + half_cauchy(factor * precision)

    assert abs(evidence(1.01) - evidence(0.99)) < 2e-4  # its slope there is 0
    assert evidence(1.0) > max(evidence(0.5), evidence(0.9), evidence(1.1), evidence(2.0))
    found = laplace.posterior(module, data).variance
    for name, each in information.items():
        assert torch.allclose(1 / found[name], each + precision, rtol=1e-5)


def test_training_and_choosing_in_turn_end_at_the_evidence_of_a_linear_regression():
    r"""With orthogonal inputs :math:`\hat w_j \sim N(0, s^2 + 1/F)`: s² = mean ŵ² − 1/F, and a little by its prior."""
    noise, x = 0.5, torch.linalg.qr(torch.randn(50, 12))[0] * 3
    weights = 0.7 * torch.randn(12)
    y = x @ weights[:, None] + noise * torch.randn(50, 1)
    information, least_squares = 9 / noise**2, x.T @ y / 9
    size = float(least_squares.square().sum())
    wanted = brentq(  # the slope of the density of log s²
        lambda v: size * v / (v + 1 / information) ** 2 - 12 * v / (v + 1 / information) + (1 - v) / (1 + v), 0.01, 10
    )
    module, std = nn.Linear(12, 1, bias=False), 3.0
    for _ in range(200):
        with torch.no_grad():  # the mode under N(0, std²)
            module.weight.copy_((information / (information + std**-2) * least_squares).T)
        found = fb.Laplace(fb.Gaussian(noise), prior_std=None).posterior(module, [(x, y)])
        std = float((1 / found.variance["weight"] - information).mean()) ** -0.5
    assert std**2 == pytest.approx(wanted, rel=1e-3)
    assert abs(std - 0.7) < 0.2


def quadratic(seed=0):
    generator = torch.Generator().manual_seed(seed)
    information = torch.rand(30, generator=generator, dtype=torch.float64) * 50
    return information, information.sqrt() * 3 * torch.randn(30, generator=generator, dtype=torch.float64)


def test_the_precision_of_most_evidence_beside_a_quadratic():
    """The evidence of a Gaussian model, by its density, is largest there; and there MacKay's equation holds."""
    information, pull = quadratic()
    found = evident_precision(information, pull)

    def evidence(precision):  # of data t/sqrt(F) ~ N(sqrt(F) θ, 1)
        variance = 1 + information / precision
        found = torch.distributions.Normal(0, variance.sqrt()).log_prob(pull / information.sqrt()).sum()
        return float(found) + half_cauchy(precision)

    assert evidence(found) > max(evidence(found * 1.01), evidence(found / 1.01))
    assert evidence(found) >= max(evidence(10**each) for each in torch.linspace(-5, 5, 200).tolist())
    mode = pull / (information + found)
    determined = float((information / (information + found)).sum())
    assert determined + (1 - found) / (1 + found) == pytest.approx(found * float(mode.square().sum()))
    assert chosen_precision([information], [mode]) == pytest.approx(found, rel=1e-6)


def test_directions_that_no_data_inform_say_nothing_of_the_prior():
    information, pull = quadratic()
    more = torch.cat([information, torch.zeros(5).double()]), torch.cat([pull, torch.full((5,), 1e-12).double()])
    assert evident_precision(*more) == pytest.approx(evident_precision(information, pull))
    assert evident_precision(information, 0 * pull) < LARGEST
