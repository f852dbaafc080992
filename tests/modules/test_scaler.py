"""A common scale: pooled sums, what a liar can do, and the same training as on standardised targets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.layers.scaler import FARTHEST, ScaleSums, pooled
from lightning_fedbayes.modules import mlp
from tests.federations import Plain, federate, trainer


def sums(*values):
    """The sums of clients whose targets are ``values``, client for client."""
    return {
        str(k): ScaleSums.of(TensorDataset(torch.zeros(len(each), 1), torch.as_tensor(each).double()))
        for k, each in enumerate(values)
    }


def scale(sums, stream="targets"):
    """Mean and standard deviation, numbers for targets that are numbers."""
    return sums.units(stream).squeeze(1).unbind()


def assert_pooled(found, whole, rtol=1e-10):
    assert found.num_examples == len(whole)
    mean, std = found.units("targets")
    assert torch.allclose(mean, whole.mean(0).reshape(-1), rtol=rtol, atol=rtol)
    assert torch.allclose(std, whole.std(0, correction=0).reshape(-1), rtol=rtol, atol=0)


@given(
    st.lists(st.integers(5, 40) | st.just(0), min_size=1, max_size=8).filter(any),
    st.sampled_from([0.0, 1e4]),
    st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_sums_of_any_split_are_those_of_the_pooled_data(sizes, mean, ordered):
    whole = torch.randn(sum(sizes), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes))) + mean
    whole = whole.sort(0).values if ordered else whole
    assert_pooled(pooled(sums(*whole.split(sizes))), whole)


def test_digits_survive_a_mean_of_1e8_with_a_deviation_of_1():
    whole = torch.arange(1000, dtype=torch.float64).remainder(7)
    found = pooled(sums(*(whole + 1e8).split(100)))  # a mean of 1e8 has eight digits behind the point
    assert scale(found)[0].item() - 1e8 == pytest.approx(whole.mean().item(), abs=2e-8)
    assert scale(found)[1].item() == pytest.approx(whole.std(correction=0).item(), rel=1e-8)
    _, _, square = pooled(sums(whole[:211] + 2.0**52)).moments["targets"]  # the mean of a sum is wrong by almost 1
    assert square.item() == pytest.approx(210 * whole[:211].var().item())


def test_missing_values_are_counted_and_left_out():
    found = pooled(sums([1.0, math.nan, 3.0], [5.0, math.inf]))
    assert found.num_examples == 5
    assert found.moments["targets"][0].item() == 3
    assert scale(found)[0].item() == pytest.approx(3)
    assert scale(found)[1].item() == pytest.approx(math.sqrt(8 / 3))


@pytest.mark.parametrize("lie", [1e3, 1e9, -1e140])
def test_a_liar_counts_as_its_examples_at_a_bounded_distance(lie):
    """Brought back along the line to the median mean, to thirty times the distance of the median client."""
    honest = [torch.randn(50, dtype=torch.float64) + shift for shift in range(9)]
    lies = lie * torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    centre = torch.stack([each.mean() for each in (*honest, lies)]).median()
    distances = torch.stack([(each - centre).square().mean().sqrt() for each in (*honest, lies)])
    counted = centre + (lies - centre) * FARTHEST * distances.median() / distances[-1]
    assert_pooled(pooled(sums(*honest, lies)), torch.cat([*honest, counted]))


def test_honest_clients_whose_means_differ_are_not_touched():
    whole = [torch.randn(30, dtype=torch.float64) + 100 * k for k in range(8)]  # a hundred deviations apart
    assert_pooled(pooled(sums(*whole)), torch.cat(whole))
    columns = [torch.cat([torch.zeros(20), torch.zeros(5) + k // 6]) for k in range(9)]  # most have zeros alone
    assert_pooled(pooled(sums(*columns)), torch.cat(columns).double())


@pytest.mark.parametrize("wrong", [(3.0, 1.0, 1.0), (-1.0, 1.0, 1.0), (1.0, 1.0, -1.0), (1.0, 1.0, math.inf)])
def test_sums_that_no_examples_have_are_refused(wrong):
    ScaleSums(2, {"targets": torch.ones(3, 1).double()})
    with pytest.raises(FedBayesError, match="targets"):
        ScaleSums(2, {"targets": torch.tensor(wrong).double().view(3, 1)})
    for other in ({"targets": torch.ones(3, 1)}, {"targets": torch.ones(2, 1).double()}, {"targets": torch.ones(3)}):
        with pytest.raises(FedBayesError, match="float64"):
            ScaleSums(2, other)


@pytest.mark.parametrize("given", [(0.0, 0.0), (math.nan, 1.0), 3, ("a", 1.0), (1.0, -1.0), (1.0,)])
def test_a_scale_that_is_none_is_refused(given):
    with pytest.raises(FedBayesError, match="targets="):
        fb.FederatedScaler(targets=given)


def data(mean=0.0, std=1.0, examples=200):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 4, generator=generator)
    y = x[:, 0].sin() + 0.3 * torch.randn(examples, generator=generator)
    return TensorDataset(x, ((y - y.mean()) / y.std(correction=0)).double() * std + mean)


def regressor(**options):
    torch.manual_seed(0)
    return fb.HybridBayesianRegressor(mlp(4, 1, (8,)), learning_rate=1e-2, **options)


def ensemble(**options):
    torch.manual_seed(0)
    return fb.modules.DeepEnsembleRegressor([mlp(4, 2, (8,)) for _ in range(2)], learning_rate=1e-2, **options)


def fitted(module, dataset, engine="sequential", **options):
    federation = fb.FederatedBayes(fb.IIDPartition(4), fusion="weighted_average", engine=engine, seed=1, **options)
    federate(module, federation, 3, DataLoader(dataset, 16, shuffle=True))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("make", [regressor, ensemble])
def test_training_is_that_on_standardised_targets(make, engine):
    """Parameters and predictions, at mean 1e4 and standard deviation 500."""
    far, near = fitted(make(), data(1e4, 500.0), engine), fitted(make(scaler=False), data(), engine)
    for name, value in near.named_parameters():
        assert torch.allclose(dict(far.named_parameters())[name], value, atol=1e-4), name
    x = torch.randn(6, 4)
    found, expected = (torch.manual_seed(0) and each.eval().predict_step(x) for each in (far, near))
    assert torch.allclose(found.mean, expected.mean * 500 + 1e4, atol=0.05)
    for name in ("variance", "aleatoric", "epistemic"):
        assert torch.allclose(getattr(found, name), getattr(expected, name) * 500**2, rtol=1e-3)


@pytest.mark.parametrize("make", [regressor, ensemble])
def test_the_likelihood_is_that_of_the_data(make):
    """In nats of a density over the targets' own units: a scale of s adds log s."""
    far, near, y = make(), make(scaler=False), torch.randn(5)
    far.scaler.target_units = torch.tensor([[3.0], [7.0]])
    outputs = torch.randn(5, 1) if make is regressor else torch.randn(5, 2, 2)
    count = 1 if make is regressor else 2
    found, expected = far.negative_log_likelihood(outputs, y * 7 + 3), near.negative_log_likelihood(outputs, y)
    assert found.item() == pytest.approx(expected.item() + count * math.log(7), abs=1e-5)


@pytest.mark.parametrize("noise", ["learnt", "residual"])
def test_noise_that_is_measured_is_in_units_of_the_network(noise):
    module = regressor(scaler=fb.FederatedScaler(targets=(10.0, 4.0)), bayesian_last=0, noise=noise).eval()
    assert module.noise_variance.item() == pytest.approx(1.0)
    assert module.predict_step(torch.zeros(1, 4)).aleatoric.item() == pytest.approx(16.0)


def test_a_fit_without_a_federation_fills_it():
    module, dataset = regressor(), data(1e4, 500.0)
    trainer(1).fit(module, DataLoader(dataset, 16, shuffle=True))
    y, (mean, std) = dataset.tensors[1], module.scaler.target_units
    assert mean.item() == pytest.approx(y.mean().item(), rel=1e-10)
    assert std.item() == pytest.approx(y.std(correction=0).item(), rel=1e-10)


class Own(Plain):
    """A user's module, with one line for the scale."""

    def __init__(self):
        super().__init__(nn.Linear(4, 1))
        self.scaler = fb.FederatedScaler()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(self.scaler(x)).squeeze(1) - self.scaler.targets(y).float()).square().mean()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_one_line_in_a_module_of_ones_own(engine):
    module = fitted(Own(), data(1e4, 500.0), engine)
    assert torch.allclose(module.scaler.input_units[0], data().tensors[0].double().mean(0), atol=1e-10)
    loss = module.training_step(data(1e4, 500.0).tensors, 0)
    assert loss < 1
    with pytest.raises(FedBayesError, match="not filled"):
        trainer(1).fit(Own(), DataLoader(data(), 16))


def test_a_run_that_goes_on_does_not_ask_again(tmp_path, monkeypatch):
    def callback():
        return fb.FederatedBayes(fb.IIDPartition(4), fusion="weighted_average", engine="sequential")

    train = DataLoader(data(1e4, 500.0), 16)
    whole, first, second = regressor(), regressor(), regressor()
    federate(whole, callback(), 2, train)
    federate(first, callback(), 1, train).save_checkpoint(tmp_path / "a.ckpt")
    monkeypatch.setattr(ScaleSums, "of", None)
    federate(second, callback(), 2, train, ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(second.scaler.target_units, whole.scaler.target_units)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), whole.parameters()))
    again = fb.HybridBayesianRegressor.load_from_checkpoint(tmp_path / "a.ckpt", network=mlp(4, 1, (8,)))
    assert torch.equal(again.scaler.target_units, whole.scaler.target_units)


@pytest.mark.parametrize("of", [fb.UpdatePrivacy, fb.ExamplePrivacy])
def test_privacy_refuses_by_name_with_a_remedy(of):
    def fit(**options):
        private = of(clip=1.0, noise_multiplier=1.0)
        inside, beside = ({"privacy": private}, []) if of is fb.UpdatePrivacy else ({}, [private])
        federation = fb.FederatedBayes(fb.IIDPartition(4), fusion="fedavg", **inside)
        federate(regressor(noise="fixed", **options), federation, 1, DataLoader(data(), 16), callbacks=beside)

    with pytest.raises(FederationError, match=r"FederatedScaler\(targets=\(mean, std\)\).*scaler=False"):
        fit()
    fit(scaler=fb.FederatedScaler((0.0, 1.0)))
    fit(scaler=False)
