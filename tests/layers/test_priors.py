import pytest
import torch
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence as torch_kl

from lightning_fedbayes.core.errors import ConversionError
from lightning_fedbayes.layers import NormalPrior, ScaleMixturePrior, TiedMeanPrior


@pytest.fixture
def gaussian():
    return torch.randn(4, 3), torch.rand(4, 3) + 0.1


@pytest.mark.parametrize("prior", [NormalPrior(0.3, 2.0), NormalPrior(torch.randn(4, 3), torch.rand(4, 3) + 0.5)])
def test_normal_prior_is_torchs_kl(gaussian, prior):
    expected = torch_kl(TorchNormal(*gaussian), TorchNormal(prior.mean, prior.std)).sum()
    torch.testing.assert_close(prior.kl(*gaussian), expected)


def test_tied_mean_penalises_the_spread_only(gaussian):
    mean, std = gaussian[0].requires_grad_(), gaussian[1]
    kl = TiedMeanPrior(0.7).kl(mean, std)
    torch.testing.assert_close(kl, torch_kl(TorchNormal(mean, std), TorchNormal(mean, 0.7)).sum())
    assert not kl.requires_grad


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
    values = torch.stack([prior.kl_at(torch.tensor([mean]), torch.tensor([std]), torch.randn(1)) for _ in range(4000)])
    assert abs(values.mean() - exact) < 5 * values.std() / 4000**0.5


@pytest.mark.parametrize(
    "build",
    [
        lambda: NormalPrior(0.0, 0.0),
        lambda: TiedMeanPrior(-1.0),
        lambda: ScaleMixturePrior(0.5, 1.0, 0.0),
        lambda: ScaleMixturePrior(1.5, 1.0, 1.0),
    ],
)
def test_improper_priors_are_refused(build):
    with pytest.raises(ConversionError):
        build()
