"""The noise of a regressor: measured over all clients, or by each client for itself."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import HybridBayesianRegressor
from lightning_fedbayes.modules import mlp

from ..federations import trainer


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
    torch.manual_seed(0)
    clients = unlike_clients()
    model = Fixed(zero(), bayesian_last=0, noise=noise, noise_std=start, scaler=False)
    federation = fb.FederatedBayes(engine=engine, fusion="weighted_average")
    trainer(12, [federation]).fit(model, DataLoader(clients, 300, shuffle=False))
    squares = [each.tensors[1].square() for each in clients.datasets]
    assert float(model.pooled_variance) == pytest.approx(float(torch.cat(squares).mean()), rel=1e-3)
    if noise == "per_client":
        assert not model.client_variance  # the global model has none
        for number, own in enumerate(squares):
            with federation.holding(number):
                assert float(model.noise_variance) == pytest.approx(float(own.mean()), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_client_is_covered_by_its_own_noise(seed):
    torch.manual_seed(seed)
    stds = {f"{std:g}": std for std in (0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0)}

    def data(count):
        inputs = {name: torch.randn(count, 4) for name in stds}
        return fb.ClientDatasets(
            {
                name: TensorDataset(x, x[:, :1] - x[:, 1:2] + stds[name] * torch.randn(count, 1))
                for name, x in inputs.items()
            }
        )

    model = HybridBayesianRegressor(mlp(4, 1, [16]), noise="per_client", learning_rate=0.01)
    federation = fb.FederatedBayes(seed=seed)
    run = trainer(30, [federation], check_val_every_n_epoch=30)
    run.fit(model, DataLoader(data(300), 30, shuffle=True), DataLoader(data(1000), 200))
    report = next(each for each in run.callbacks if isinstance(each, fb.ClientReport))
    own = report.scores["personal/val"].values["coverage"]
    assert own.min() > 0.8
    assert own.max() < 0.98
    pooled = report.scores["val"].values["coverage"]
    assert pooled.min() < 0.8 or pooled.max() > 0.98  # one noise for all covers none of them
