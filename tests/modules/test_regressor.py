"""Predictions of the regressor and their scores, and the exact optimum of linear regression."""

import copy
import functools
import math

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import HybridBayesianRegressor
from lightning_fedbayes.layers import ESTIMATORS, read_posterior
from lightning_fedbayes.metrics.functional import gaussian_crps
from lightning_fedbayes.modules import mlp
from tests.federations import trainer

from .helpers import loader, looked_up, numbered

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


@pytest.mark.parametrize(
    ("model", "targets"), [(bayesian(), 1), (bayesian(3), 3), (HybridBayesianRegressor(Flat(), bayesian_last=1), 1)]
)
def test_fields_of_a_prediction(model, targets):
    prediction = model.predict_step(torch.randn(8, 6))
    assert all(field.shape == (8, targets) for field in prediction[:4])
    assert prediction.samples.shape == (10, 8, targets)
    assert (prediction.epistemic > 0).all()
    assert torch.allclose(prediction.variance, prediction.aleatoric + prediction.epistemic)


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_the_nll_is_gaussian_and_summed_over_targets(targets, flat):
    model = bayesian(targets, noise_std=NOISE_STD, noise="fixed")
    outputs, y = torch.randn(8, targets), torch.randn(8, targets)
    expected = -stats.norm.logpdf(y.numpy(), outputs.numpy(), NOISE_STD).sum(1).mean()
    if flat:
        outputs, y = (outputs.squeeze(1) if targets == 1 else outputs), y.flatten()
    assert model.negative_log_likelihood(outputs, y).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("targets", [None, 2])
@pytest.mark.parametrize("size", [0.1, 100.0])
def test_errors_of_a_first_batch_beyond_noise_std_are_its_noise(targets, size):
    """So no gradient is out of proportion. Smaller errors say nothing: a batch may have one example."""
    model = HybridBayesianRegressor(mlp(6, 2, (5,)), targets=targets, noise_std=2.0, scaler=False)
    outputs, y = torch.zeros(8, 2), size * torch.randn(8, 2)
    mean = y.square().mean(0) if targets else y.square().mean()
    std = mean.clamp_min(4.0).sqrt()
    expected = -torch.distributions.Normal(0.0, std).log_prob(y).sum(1).mean()
    assert model.negative_log_likelihood(outputs, y).item() == pytest.approx(expected.item(), rel=1e-5)
    known = model.noise_variance.clone()
    again = -torch.distributions.Normal(0.0, known.sqrt()).log_prob(3 * y).sum(1).mean()
    assert model.negative_log_likelihood(outputs, 3 * y).item() == pytest.approx(again.item(), rel=1e-5)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("options", [{"optimizer": fb.IVON, "bayesian_last": 0}, {"learning_rate": 0.01}], ids=str)
@pytest.mark.parametrize("scaler", [True, False])
def test_raw_inputs_and_targets_are_learnt(engine, options, scaler):
    """Inputs of hundreds, targets of thousands: an untrained network is wrong by far more than noise_std."""
    torch.manual_seed(0)
    x = 100 + 30 * torch.randn(150, 4)
    y = (5 if scaler else 1) * x[:, :1] + torch.randn(150, 1)
    torch.manual_seed(1)
    model = HybridBayesianRegressor(mlp(4, 1, [20]), scaler=scaler, **options)
    made = fb.FederatedBayes(fb.IIDPartition(3), engine=engine, local_epochs=2)
    errors = []
    look = LambdaCallback(
        on_train_epoch_end=lambda _, module: errors.append((module.predict_step(x).mean.detach() - y).square().mean())
    )
    trainer(40, [made, look]).fit(model, DataLoader(TensorDataset(x, y), 25, shuffle=True))
    # by Adam single rounds are far off, federated or not; 12 before, 2 to 400 with noise_std
    assert torch.stack(errors[-10:]).median() < y.var()


def table(targets):
    """Fixed outputs of every example under every draw, and observed targets."""
    draws = torch.randn(EXAMPLES, targets) + 0.8 * torch.randn(SAMPLES, EXAMPLES, targets)
    return draws, draws.mean(0) + torch.randn(EXAMPLES, targets)


def expected_scores(draws, y):
    mean, y = draws.double().mean(0).numpy(), y.double().numpy()
    std = (draws.double().var(0, correction=0) + NOISE_STD**2).sqrt().numpy()
    return {
        "rmse": math.sqrt(((mean - y) ** 2).mean()),
        "nll": -stats.norm.logpdf(y, mean, std).mean(),
        "crps": gaussian_crps(*map(torch.tensor, (mean, std**2, y))).mean().item(),
        "coverage90": ((y > stats.norm.ppf(0.05, mean, std)) & (y < stats.norm.ppf(0.95, mean, std))).mean(),
        "sharpness": stats.gmean(std, axis=1).mean(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize(
    ("targets", "output_shape", "target_shape"),
    [
        (1, (EXAMPLES,), (EXAMPLES,)),
        (1, (EXAMPLES,), (EXAMPLES, 1)),
        (1, (EXAMPLES, 1), (EXAMPLES,)),
        (1, (EXAMPLES, 1), (EXAMPLES, 1)),
        (2, (EXAMPLES, 2), (EXAMPLES, 2)),
    ],
)
def test_logged_scores_are_those_of_all_predictions(stage, targets, output_shape, target_shape):
    draws, y = table(targets)
    data, run = numbered(y.view(target_shape)), trainer()
    model = looked_up(HybridBayesianRegressor(mlp(1, 1), noise_std=NOISE_STD), draws.view(SAMPLES, *output_shape))
    evaluate = run.validate if stage == "val" else run.test
    expected = {f"{stage}/{name}": value for name, value in expected_scores(draws, y).items()}
    assert {name.removeprefix(f"{stage}/") for name in expected} == SCORES
    (logged,) = evaluate(model, loader(data, 16), verbose=False)
    assert logged == pytest.approx(expected, rel=1e-4)
    (again,) = evaluate(model, loader(data, EXAMPLES), verbose=False)  # starts anew
    assert again == pytest.approx(expected, rel=1e-4)


N, LINE_NOISE_STD, PRIOR_STD, STEPS = 50, 0.5, 0.7, 1000


class FullBatches(IterableDataset):
    """The whole data set as one batch, again and again."""

    def __init__(self, x, y):
        self.batch = [x, y]

    def __iter__(self):
        return iter([self.batch] * STEPS)


class Averaged(HybridBayesianRegressor):
    """Averages parameters and noise over the second half of the steps, and with them the noise of the gradients."""

    @property
    def averaged(self):
        return [*self.parameters(), self.pooled_variance]

    def on_train_start(self):
        self.sums = [torch.zeros_like(p) for p in self.averaged]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx >= STEPS // 2:
            torch._foreach_add_(self.sums, [p.detach() for p in self.averaged])

    @torch.no_grad()
    def on_train_end(self):
        for parameter, total in zip(self.averaged, self.sums, strict=True):
            parameter.copy_(total / (STEPS - STEPS // 2))


def data():
    """Correlated inputs, so that the mean-field variance is not the marginal one."""
    x = torch.randn(N, 3) @ torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]])
    return x, x @ torch.tensor([[0.8], [-0.5], [0.3]]) + 0.4 + LINE_NOISE_STD * torch.randn(N, 1)


def trained(x, y, **options):
    options |= {"prior_std": PRIOR_STD, "noise_std": LINE_NOISE_STD}
    optimizer = functools.partial(torch.optim.Adam, lr=0.03)
    model = Averaged(nn.Linear(3, 1), bayesian_last=1, optimizer=optimizer, **options)
    model.num_examples = N
    trainer(1).fit(model, torch.utils.data.DataLoader(FullBatches(x, y), batch_size=None))
    return model


def fitted(model):
    """Posterior mean and variance of weights and bias, in one vector each."""
    posterior = read_posterior(model.network)
    names = sorted(posterior.names, key=lambda name: "bias" in name)
    return tuple(torch.cat([part[name].flatten() for name in names]) for part in (posterior.mean, posterior.variance))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "kl_weight"), [*((estimator, 1.0) for estimator in ESTIMATORS), ("local_reparameterization", 0.2)]
)
def test_training_finds_the_optimal_mean_field_posterior(estimator, kl_weight):
    x, y = data()
    mean, variance = fitted(trained(x, y, estimator=estimator, noise="fixed", kl_weight=kl_weight))
    design = torch.cat([x, torch.ones(N, 1)], 1)
    # minus the ELBO times β: the likelihood counts 1/β times
    precision = design.T @ design / (kl_weight * LINE_NOISE_STD**2) + torch.eye(4) / PRIOR_STD**2
    exact_mean = torch.linalg.solve(precision, design.T @ y / (kl_weight * LINE_NOISE_STD**2)).flatten()
    exact_variance = 1 / precision.diagonal()
    assert ((mean - exact_mean).abs() < 0.1 * exact_variance.sqrt()).all()
    assert torch.allclose(variance, exact_variance, rtol=0.2)
    marginal = torch.linalg.inv(precision).diagonal()
    assert (marginal / exact_variance).max() > 2  # the test tells the two apart


@pytest.mark.slow
def test_a_learnt_noise_is_the_expected_squared_residual():
    r""":math:`\sigma^2 = \frac1n E_q \|y - X\theta\|^2` is where the derivative of the ELBO vanishes."""
    x, y = data()
    model = trained(x, y, noise="learnt")
    mean, variance = fitted(model)
    design = torch.cat([x, torch.ones(N, 1)], 1)
    expected = ((y.flatten() - design @ mean).square() + design.square() @ variance).mean()
    assert model.noise_variance.item() == pytest.approx(expected.item(), rel=0.05)


class Fixed(HybridBayesianRegressor):
    """A network that does not train: what moves is the noise."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


STDS = {"exact": (0.1, 60), "usual": (0.5, 25), "wild": (2.0, 300)}


def unlike_clients():
    """Clients whose noise differs, and their numbers of examples with it."""
    found = {}
    for name, (std, count) in STDS.items():
        x = torch.randn(count, 2)
        found[name] = TensorDataset(x, std * torch.randn(count, 1))
    return fb.ClientDatasets(found)


def zero():
    network = nn.Linear(2, 1)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    return network


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("start", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("noise", ["learnt", "per_client", "residual"])
def test_the_pooled_noise_is_the_mean_squared_error_of_all_examples(engine, start, noise):
    """Whatever the sizes of the clients, and not a mean of logarithms."""
    clients = unlike_clients()
    model = Fixed(zero(), bayesian_last=0, noise=noise, noise_std=start, scaler=False)
    federation = fb.FederatedBayes(engine=engine, fusion="weighted_average")
    trainer(12, [federation]).fit(model, DataLoader(clients, 300, shuffle=False))
    squares = [each.tensors[1].square() for each in clients.datasets]
    assert float(model.pooled_variance) == pytest.approx(float(torch.cat(squares).mean()), rel=1e-3)
    if noise == "per_client":
        assert not model.client_variance  # the global model has none
        for number, own in enumerate(squares):
            with federation.federation.holding(number):
                assert float(model.noise_variance) == pytest.approx(float(own.mean()), rel=1e-3)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("rounds", "size", "net"), [(6, 4, mlp(9, 1, [32])), (1, 50, nn.Linear(9, 1))], ids=str)
def test_clients_measure_the_noise_before_they_fit_their_own_examples(engine, rounds, size, net):
    """Twenty local epochs leave nothing of the residuals of four examples. Before a first round nothing is fitted."""
    x = torch.randn(600, 9)
    y = x[:, :1] + 0.5 * torch.randn(600, 1)
    clients = zip(x[:200].split(size), y[:200].split(size))
    clients = fb.ClientDatasets({str(number): TensorDataset(*each) for number, each in enumerate(clients)})
    model = HybridBayesianRegressor(copy.deepcopy(net), learning_rate=0.01, scaler=False)
    federation = fb.FederatedBayes(engine=engine, fusion="weighted_average", local_epochs=20)
    trainer(rounds, [federation]).fit(model, DataLoader(clients, 4))
    held_out = (model.predict_step(x[200:]).mean.detach() - y[200:]).square().mean()
    assert 0.7 < float(model.noise_variance / held_out) < 1.6


def test_a_client_that_is_alone_measures_its_noise_in_every_round():
    x, y = torch.randn(40, 2), torch.randn(40, 1)
    model = Fixed(zero(), bayesian_last=0, noise_std=20.0, scaler=False)
    federation = fb.FederatedBayes(fb.IIDPartition(1), engine="sequential")
    trainer(4, [federation]).fit(model, DataLoader(TensorDataset(x, y), 40))
    assert float(model.pooled_variance) == pytest.approx(float(y.square().mean()), rel=0.01)
