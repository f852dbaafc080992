"""The exact head in a Trainer: sums of batches, of clients, late ones, changed ones, and after a restart."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import trainer


def data(count=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] + 0.5 * torch.randn(count, 3, generator=generator)).argmax(1))


def module(likelihood="one_hot", **options):
    outputs = 1 if likelihood == "gaussian" else 3
    return fb.HeadModule(nn.Identity(), fb.BayesianHead(outputs, likelihood, **options), 4)


def pooled(likelihood="one_hot", examples=None, **options):
    x, y = (examples or data()).tensors
    return fb.BayesianHead(3, likelihood, **options).fit_clients([(x, y)])


def fit(model, epochs=1, dataset=None, batch_size=7, **options):
    federation = fb.FederatedBayes(options.pop("partition", fb.DirichletPartition(5, alpha=0.3)), **options)
    made = trainer(epochs, [federation])
    made.fit(model, DataLoader(dataset or data(), batch_size=batch_size))
    return federation, made


@pytest.mark.parametrize(("likelihood", "epochs"), [("one_hot", 1), ("one_hot", 3), ("softmax", 40)])
@pytest.mark.parametrize("federated", [False, True])
def test_epochs_end_at_the_pooled_head(likelihood, epochs, federated):
    model = module(likelihood)
    if federated:
        _, made = fit(model, epochs)
    else:
        made = trainer(epochs)
        made.fit(model, DataLoader(data(), batch_size=7))
    assert likelihood != "softmax" or made.current_epoch < 40
    torch.testing.assert_close(model.fitted.weights, pooled(likelihood).weights, atol=1e-9, rtol=1e-9)


def test_a_part_of_the_clients_in_each_round_counts_each_once():
    model = module()
    federation, _ = fit(model, 12, fraction=0.4)
    assert {"valid_clients"} <= federation.history[0].keys()
    torch.testing.assert_close(model.fitted.weights, pooled().weights, atol=1e-9, rtol=1e-9)


def test_a_client_leaves():
    parts = {name: data(20 + 10 * k, seed=k) for k, name in enumerate("abc")}
    model = module()
    federation, _ = fit(model, dataset=fb.ClientDatasets(parts), partition=None)
    without = fb.remove_client(federation, 1)
    model.load_state_dict({f"sums.{n}": without.mean[f"sums.{n}"] for n in ("gram", "moment", "square")}, strict=False)
    rest = TensorDataset(*(torch.cat([parts[name].tensors[i] for name in "ac"]) for i in (0, 1)))
    torch.testing.assert_close(model.fitted.weights, pooled(examples=rest).weights, atol=1e-9, rtol=1e-9)


def test_a_large_client_is_not_clipped():
    """Sums of few and of many examples differ by more than any bound on honest updates."""
    parts = {"few": data(10), "fewer": data(9, 1), "many": data(3000, 2)}
    model = module()
    fit(model, dataset=fb.ClientDatasets(parts), partition=None, batch_size=64)
    assert float(model.sums["gram"][-1, -1].detach()) == pytest.approx(3019)


@pytest.mark.slow
def test_predictions_scores_and_conformal_sets():
    model = module("softmax")
    calibration = [fb.FederatedTemperature(), fb.FederatedConformal()]
    federation = fb.FederatedBayes(fb.DirichletPartition(5, alpha=0.3))
    made = trainer(40, [federation, fb.UncertaintyReport(), *calibration])
    made.fit(model, DataLoader(data(), batch_size=7), DataLoader(data(60, 5), batch_size=9))
    scores = made.validate(model, DataLoader(data(60, 5), batch_size=9), verbose=False)[0]
    assert scores["val/accuracy"] > 0.6
    x, _ = data(10, 6).tensors
    prediction = model.predict_step(x)
    found = fb.PosteriorPredictive(model.fitted.linear(), model.fitted.posterior, 256).predict_step(x.float())
    torch.testing.assert_close(prediction.probs.float(), found.probs, atol=0.02, rtol=0)


def test_regression_has_noise():
    x, _ = data().tensors
    examples = TensorDataset(x, x[:, 0] + 0.3 * torch.randn(90, generator=torch.Generator().manual_seed(0)).double())
    model = module("gaussian")
    fit(model, dataset=examples, partition=fb.IIDPartition(4))
    prediction = model.predict_step(x[:5])
    assert float(prediction.aleatoric.mean()) == pytest.approx(0.09, rel=0.4)
    assert float(prediction.epistemic.max()) < float(prediction.aleatoric.min())


def test_what_it_is_not_for_is_refused():
    with pytest.raises(FederationError, match="federates by fusion='sums' alone"):
        fit(module(), fusion="fedavg")
    with pytest.raises(FederationError, match="local_epochs=1"):
        fit(module(), local_epochs=2, safeguards=fb.Safeguards(max_failed_rounds=1))
    with pytest.raises(fb.FedBayesError, match="has seen no examples yet"):
        module().predict_step(torch.zeros(2, 4).double())
