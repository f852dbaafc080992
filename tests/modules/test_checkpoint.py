"""A trained model comes back from a Trainer's checkpoint with the same predictions."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fedbayes import ClientDatasets, FederatedBayes, HybridBayesianClassifier, HybridBayesianRegressor
from lightning_fedbayes.layers import NormalPrior, kl_divergence
from lightning_fedbayes.modules import mlp

from .helpers import labelled, loader, trainer

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def predictions(model):
    torch.manual_seed(4)
    return model.eval().predict_step(X)


@pytest.mark.parametrize("federated", [False, True])
@pytest.mark.parametrize("kind", [HybridBayesianClassifier, HybridBayesianRegressor])
@pytest.mark.parametrize("options", [{"bayesian_last": 1, "estimator": "flipout", "samples": 3},
                                     {"bayesian_last": 2, "prior_std": 0.5, "posterior_std": 0.3, "warmup_rounds": 2},
                                     {"bayesian_last": None}])
def test_predictions_survive(kind, options, federated, tmp_path):
    data = labelled(20)
    if kind is HybridBayesianRegressor:
        data, options = TensorDataset(data.tensors[0], torch.randn(20, 3)), {**options, "noise_std": 0.6}
    callbacks = [FederatedBayes()] if federated else []
    run = trainer(max_epochs=2, callbacks=callbacks)
    model = kind(mlp(6, 3, (4,)), **options)
    run.fit(model, loader(ClientDatasets({"a": data, "b": data}) if federated else data))
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "model.ckpt", network=mlp(6, 3, (4,)))
    assert dict(loaded.hparams) == dict(model.hparams)
    assert loaded.samples == model.samples
    for before, after in zip(predictions(model), predictions(loaded), strict=True):
        assert torch.equal(before, after)


def test_what_is_no_hyperparameter_is_given_again(tmp_path):
    options = {"network": mlp(6, 3), "prior": NormalPrior(0.3, 2.0), "optimizer": torch.optim.SGD}
    model = HybridBayesianClassifier(**options, bayesian_last=1)
    run = trainer(max_epochs=1)
    run.fit(model, loader(labelled(20)))
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = HybridBayesianClassifier.load_from_checkpoint(tmp_path / "model.ckpt", **options)
    assert torch.equal(kl_divergence(loaded.network), kl_divergence(model.network))
    assert isinstance(loaded.configure_optimizers(), torch.optim.SGD)
