"""Networks of a population: the rounds are the steps of variational EM, on both engines."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, federate, loader, network

from .test_sites import EXAMPLES, FEATURES, NOISE, Exact

SIZES = (20, 12, 30, 8)
POPULATION = {"fusion": "population", "safeguards": fb.Safeguards(max_influence=None)}


def schools():
    """Clients whose coefficients are draws from a population."""
    random = torch.Generator().manual_seed(2)
    parts = {}
    for number, size in enumerate(SIZES):
        x = torch.randn(size, FEATURES, generator=random, dtype=torch.float64)
        own = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        own = own + torch.tensor([0.1, 1.0, 0.5], dtype=torch.float64) * torch.randn(
            FEATURES, generator=random, dtype=torch.float64
        )
        noise = NOISE * torch.randn(size, generator=random, dtype=torch.float64)
        parts[f"c{number}"] = TensorDataset(x, x @ own + noise)
    return fb.ClientDatasets(parts)


def train(rounds, optimizer="lbfgs", **options):
    made = fb.FederatedBayes(**POPULATION, seed=1, **options)
    federate(Exact(optimizer), made, rounds, DataLoader(schools(), batch_size=EXAMPLES))
    return made


def em(rounds, prior_std=1.0):
    """The same by hand: the best factorised posteriors of each client, then the moments of all of them."""
    population_mean = torch.zeros(FEATURES, dtype=torch.float64)
    population_variance = torch.full((FEATURES,), prior_std**2, dtype=torch.float64)
    for _ in range(rounds):
        means, variances = [], []
        for part in schools().datasets:
            x, y = part.tensors
            gram = x.T @ x / NOISE**2
            means.append(
                torch.linalg.solve(
                    gram + torch.diag(1 / population_variance),
                    x.T @ y / NOISE**2 + population_mean / population_variance,
                )
            )
            variances.append(1 / (1 / population_variance + gram.diagonal()))
        mean, variance = torch.stack(means), torch.stack(variances)
        population_mean = mean.mean(0)
        population_variance = (variance + (mean - population_mean).square()).mean(0)
    return population_mean, population_variance, mean, variance


@pytest.mark.whole
@pytest.mark.parametrize("rounds", [1, 2, 15])
def test_rounds_are_the_steps_of_em(rounds):
    made = train(rounds)
    mean, variance, means, variances = em(rounds)
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(made.posterior.mean["layer.weight"][0], mean, **close)
    torch.testing.assert_close(made.posterior.variance["layer.weight"][0], variance, **close)
    for number in range(len(SIZES)):
        own = made.posterior_of(number)
        torch.testing.assert_close(own.mean["layer.weight"][0], means[number], **close)
        torch.testing.assert_close(own.variance["layer.weight"][0], variances[number], **close)


def test_engines_agree():
    one, stack = (train(4, "adam", engine=engine, local_epochs=5) for engine in ("sequential", "vectorized"))
    for number in range(len(SIZES)):
        ours, theirs = (made.posterior_of(number) for made in (one, stack))
        torch.testing.assert_close(ours.mean["layer.weight"], theirs.mean["layer.weight"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ours.variance["layer.weight"], theirs.variance["layer.weight"], rtol=1e-9, atol=0)


class StopsMoving(Plain):
    """Trains in the first round alone."""

    def __init__(self, net, optimizer):
        super().__init__(net, optimizer=optimizer)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch == 0))]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(lambda: fb.bayesianize(network(), last=2), torch.optim.SGD), (network, fb.IVON)],
    ids=["layers", "IVON"],
)
def test_a_client_goes_on_where_it_was(engine, make, optimizer):
    def own(rounds):
        made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), **POPULATION, engine=engine)
        federate(StopsMoving(make(), optimizer), made, rounds, loader())
        return made, [made.posterior_of(number) for number in range(3)]

    (_, before), (made, after) = own(1), own(2)
    for first, second in zip(before, after, strict=True):
        for name in first.names:
            assert torch.equal(first.mean[name], second.mean[name]), name
            assert not torch.equal(first.mean[name], made.posterior.mean[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*", "ignore:.*callbacks used to create.*")
@pytest.mark.parametrize(("before", "after"), [("population", "linear_pool"), ("linear_pool", "population")])
def test_a_run_that_goes_on_with_another_prior_does_so_on_both_engines(before, after, tmp_path):
    def run(method, rounds, engine, **options):
        given = {"fusion": method, "weighting": "equal", "safeguards": fb.Safeguards(max_influence=None)}
        made = fb.FederatedBayes(**given, seed=1, engine=engine, local_epochs=3)
        federate(Exact("adam"), made, rounds, DataLoader(schools(), batch_size=EXAMPLES), **options)
        return made

    for engine in ("sequential", "vectorized"):
        saver = ModelCheckpoint(tmp_path / engine, save_last=True)
        run(before, 2, engine, callbacks=[saver], enable_checkpointing=True)
    ours, theirs = (
        run(after, 3, engine, ckpt_path=tmp_path / engine / "last.ckpt").posterior
        for engine in ("sequential", "vectorized")
    )
    torch.testing.assert_close(ours.mean["layer.weight"], theirs.mean["layer.weight"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.variance["layer.weight"], theirs.variance["layer.weight"], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weighting": "distance"}, "count alike"),
        ({"posterior": fb.SWAG()}, "a SWAG has no prior"),
    ],
)
def test_other_rounds_than_those_of_em_are_refused(options, text):
    with pytest.raises(FederationError, match=text):
        fb.FederatedBayes(fusion="population", **options)
