"""Deep ensembles: the mixture, independence of the members, and federations of them."""

import copy
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import FedBayesError
from lightning_fedbayes.modules import DeepEnsembleRegressor, mlp
from lightning_fedbayes.modules.deep_ensemble import mean_and_variance
from tests.clients.vectorized.test_parity import assert_same, both
from tests.federations import trainer

FEATURES, MEMBERS = 3, 5


def networks(targets=1, members=MEMBERS):
    return [mlp(FEATURES, 2 * targets, (4,)) for _ in range(members)]


def examples(count=60, targets=1):
    x = torch.randn(count, FEATURES)
    return TensorDataset(x, x[:, :1] + 0.3 * torch.randn(count, targets))


def test_prediction_has_the_moments_of_the_mixture():
    """Drawn from: a member, then its Gaussian."""
    model, x, draws = DeepEnsembleRegressor(networks(2)), torch.randn(6, FEATURES), 200_000
    prediction = model.predict_step([x, None])
    with torch.no_grad():
        outputs = torch.stack([member(x) for member in model.network.members])
    mean, variance = mean_and_variance(outputs)
    chosen = torch.randint(MEMBERS, (draws,))
    sampled = mean[chosen] + variance[chosen].sqrt() * torch.randn(draws, 6, 2)
    torch.testing.assert_close(prediction.mean, sampled.mean(0), atol=5 * math.sqrt(2 / draws), rtol=0)
    torch.testing.assert_close(prediction.variance, sampled.var(0), rtol=0.03, atol=0)
    torch.testing.assert_close(prediction.samples, mean)
    torch.testing.assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    assert prediction.samples.shape == (MEMBERS, 6, 2)


def test_loss_is_the_sum_of_the_members_likelihoods():
    model, (x, y) = DeepEnsembleRegressor(networks(2)), examples(7, 2).tensors
    expected = 0.0
    for member in model.network.members:
        mean, raw = member(x).split(2, 1)
        noise = torch.log1p(raw.exp()) + 1e-6
        expected -= torch.distributions.Normal(mean, noise.sqrt()).log_prob(y).sum() / 7
    torch.testing.assert_close(model.negative_log_likelihood(model(x), y), expected)


def test_members_learn_as_they_would_alone():
    members, data = networks(), examples()
    together = DeepEnsembleRegressor(copy.deepcopy(members), learning_rate=0.01)
    trainer(3).fit(together, DataLoader(data, 5))
    for number, member in enumerate(members):
        alone = DeepEnsembleRegressor([member], learning_rate=0.01)
        trainer(3).fit(alone, DataLoader(data, 5))
        for one, other in zip(member.parameters(), together.network.members[number].parameters()):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_engines_agree(optimizer):
    def make():
        torch.manual_seed(3)
        return DeepEnsembleRegressor(networks(), optimizer=lambda p: optimizer(p, lr=0.01))

    assert_same(both(make, fb.IIDPartition(4), train=DataLoader(examples(), 5, shuffle=True), local_epochs=2), 1e-4)


def test_members_that_would_stay_alike_are_refused():
    one = mlp(FEATURES, 2)
    for twins in ([one, mlp(FEATURES, 2), one], [one, mlp(FEATURES, 2), copy.deepcopy(one)]):
        with pytest.raises(FedBayesError, match="networks 0 and 2 have equal parameters"):
            DeepEnsembleRegressor(twins)
    with pytest.raises(FedBayesError, match="at least one member"):
        DeepEnsembleRegressor([])
