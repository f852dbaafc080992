"""What the regressor predicts and how it is scored."""

import math

import pytest
import torch
from scipy import integrate, stats
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fedbayes import HybridBayesianRegressor
from lightning_fedbayes.errors import ConversionError, FedBayesError
from lightning_fedbayes.modules import mlp

from .helpers import loader, trainer

SAMPLES, EXAMPLES, NOISE_STD = 5, 60, 0.7
SCORES = {"nll", "crps", "coverage90", "sharpness", "rmse"}


def bayesian(targets=1, **options):
    return HybridBayesianRegressor(mlp(6, targets, (5,)), bayesian_last=2, posterior_std=0.5, **options)


class Flat(nn.Module):
    """A network whose outputs have shape (batch,)."""

    def __init__(self):
        super().__init__()
        self.network = mlp(6, 1, (5,))

    def forward(self, x):
        return self.network(x).squeeze(-1)


# -- prediction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "targets"), [(bayesian(), 1), (bayesian(3), 3),
                                                (HybridBayesianRegressor(Flat(), bayesian_last=1), 1)])
def test_fields_of_a_prediction(model, targets):
    prediction = model.predict_step(torch.randn(8, 6))
    assert all(field.shape == (8, targets) for field in prediction[:4])
    assert prediction.samples.shape == (10, 8, targets)
    assert (prediction.epistemic > 0).all()
    assert torch.allclose(prediction.variance, prediction.aleatoric + prediction.epistemic)


def test_moments_of_a_prediction():
    model = bayesian(2, noise_std=NOISE_STD, samples=9)
    x = torch.randn(8, 6)
    torch.manual_seed(1)
    draws = model.sample(x)
    torch.manual_seed(1)
    prediction = model.predict_step([x, None])
    assert torch.allclose(prediction.mean, draws.sum(0) / 9)
    assert torch.allclose(prediction.epistemic, (draws - draws.mean(0)).square().sum(0) / 9, atol=1e-6)
    assert torch.allclose(prediction.aleatoric, torch.full((8, 2), NOISE_STD**2))


def test_a_deterministic_network_has_no_epistemic_variance():
    network = mlp(6, 2)
    x = torch.randn(8, 6)
    prediction = HybridBayesianRegressor(network, noise_std=NOISE_STD).predict_step(x)
    assert torch.equal(prediction.epistemic, torch.zeros(8, 2))
    assert torch.equal(prediction.mean, network(x))
    assert torch.allclose(prediction.variance, torch.full((8, 2), NOISE_STD**2))


def test_the_trainer_predicts():
    data = TensorDataset(torch.randn(20, 6), torch.randn(20))
    batches = trainer().predict(bayesian(), loader(data, 8))
    assert [len(batch.mean) for batch in batches] == [8, 8, 4]
    assert {type(batch).__name__ for batch in batches} == {"RegressionPrediction"}


# -- likelihood and scores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_the_nll_is_gaussian_and_summed_over_targets(targets, flat):
    model = bayesian(targets, noise_std=NOISE_STD)
    outputs, y = torch.randn(8, targets), torch.randn(8, targets)
    expected = -stats.norm.logpdf(y.numpy(), outputs.numpy(), NOISE_STD).sum(1).mean()
    if flat:
        outputs, y = (outputs.squeeze(1) if targets == 1 else outputs), y.flatten()
    assert model.negative_log_likelihood(outputs, y).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("noise", ["learnt", "fixed"])
def test_the_noise_is_a_parameter_that_is_learnt_or_not(noise):
    model = HybridBayesianRegressor(mlp(6, 1), noise_std=NOISE_STD, noise=noise, learning_rate=0.1)
    data = TensorDataset(torch.randn(20, 6), 5 * torch.randn(20, 1))
    trainer(max_epochs=2).fit(model, loader(data))
    noise_std = model.noise_variance.item() ** 0.5
    assert noise_std > NOISE_STD + 0.1 if noise == "learnt" else noise_std == pytest.approx(NOISE_STD)


def table(targets):
    """Fixed outputs of every example under every draw, and observed targets."""
    draws = torch.randn(EXAMPLES, targets) + 0.8 * torch.randn(SAMPLES, EXAMPLES, targets)
    return draws, draws.mean(0) + torch.randn(EXAMPLES, targets)


def looked_up(draws):
    """A model whose network gives ``draws``: an example's input is its number."""
    model = HybridBayesianRegressor(mlp(1, 1), noise_std=NOISE_STD)
    model.sample = lambda inputs, samples=None: draws[:, inputs[:, 0].long()]
    return model


def crps(mean, std, y):
    r""":math:`\int (\Phi((x - \mu)/\sigma) - [x \ge y])^2 dx`, numerically."""
    def integrand(x):
        return (stats.norm.cdf(x, mean, std) - (x >= y)) ** 2

    return sum(integrate.quad(integrand, *sorted(ends))[0] for ends in ((y, y - 15), (y, y + 15)))


def expected_scores(draws, y):
    mean, y = draws.double().mean(0).numpy(), y.double().numpy()
    std = (draws.double().var(0, correction=0) + NOISE_STD**2).sqrt().numpy()
    return {
        "rmse": math.sqrt(((mean - y) ** 2).mean()),
        "nll": -stats.norm.logpdf(y, mean, std).mean(),
        "crps": sum(map(crps, mean.flatten(), std.flatten(), y.flatten())) / y.size,
        "coverage90": ((y > stats.norm.ppf(0.05, mean, std)) & (y < stats.norm.ppf(0.95, mean, std))).mean(),
        "sharpness": stats.gmean(std, axis=1).mean(),
    }


@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize(
    ("targets", "output_shape", "target_shape"),
    [(1, (EXAMPLES,), (EXAMPLES,)), (1, (EXAMPLES,), (EXAMPLES, 1)), (1, (EXAMPLES, 1), (EXAMPLES,)),
     (1, (EXAMPLES, 1), (EXAMPLES, 1)), (2, (EXAMPLES, 2), (EXAMPLES, 2))],
)
def test_logged_scores_are_those_of_all_predictions(stage, targets, output_shape, target_shape):
    draws, y = table(targets)
    data = TensorDataset(torch.arange(EXAMPLES).float().unsqueeze(1), y.view(target_shape))
    model, run = looked_up(draws.view(SAMPLES, *output_shape)), trainer()
    evaluate = run.validate if stage == "val" else run.test
    expected = {f"{stage}/{name}": value for name, value in expected_scores(draws, y).items()}
    assert {name.removeprefix(f"{stage}/") for name in expected} == SCORES
    (logged,) = evaluate(model, loader(data, 16), verbose=False)
    assert logged == pytest.approx(expected, rel=1e-4)
    (again,) = evaluate(model, loader(data, EXAMPLES), verbose=False)  # starts anew
    assert again == pytest.approx(expected, rel=1e-4)


def test_several_loaders_are_scored_together():
    draws, y = table(1)
    data = TensorDataset(torch.arange(EXAMPLES).float().unsqueeze(1), y)
    parts = [torch.utils.data.Subset(data, range(20)), torch.utils.data.Subset(data, range(20, EXAMPLES))]
    logged = trainer().validate(looked_up(draws), [loader(part, 16) for part in parts], verbose=False)
    merged = {name.removeprefix("val/"): value for scores in logged for name, value in scores.items()}
    assert merged == pytest.approx(expected_scores(draws, y), rel=1e-4)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_std", [0.0, -1.0, math.nan])
def test_noise_has_a_positive_standard_deviation(noise_std):
    with pytest.raises(FedBayesError, match=f"noise_std={noise_std}: the noise has a positive standard deviation"):
        HybridBayesianRegressor(mlp(6, 1), noise_std=noise_std)


@pytest.mark.parametrize(("options", "message"), [({"bayesian_last": 2}, "only 1 layers can be converted"),
                                                  ({"bayesian_last": 1, "estimator": "flip"}, "flipout")])
def test_arguments_of_the_conversion(options, message):
    with pytest.raises(ConversionError, match=message):
        HybridBayesianRegressor(mlp(6, 1, ()), **options)
