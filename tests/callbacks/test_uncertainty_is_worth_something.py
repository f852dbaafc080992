"""On real digits: the more of the uncertain examples are discarded, the more of the others are right."""

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.modules import mlp
from tests.federations import trainer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rule", ["weighted_average", "reverse_kl_barycenter", "wasserstein_barycenter"])
def test_accuracy_rises_as_the_most_uncertain_are_discarded(rule):
    torch.manual_seed(0)
    data = fb.DigitsDataModule(batch_size=16)
    model = fb.HybridBayesianClassifier(
        mlp(64, 10, (32,)), bayesian_last=2, learning_rate=0.01, kl_weight=0.05, samples=30
    )
    federation = fb.FederatedBayes(fb.DirichletPartition(clients=5, alpha=0.5), fusion=rule, local_epochs=2)
    trainer(8, [federation], num_sanity_val_steps=0, limit_val_batches=0).fit(model, datamodule=data)
    inputs, targets = data.validation.tensors
    torch.manual_seed(1)
    with torch.no_grad():
        prediction = model.eval().predict_step(inputs)
    right = (prediction.label == targets).double()
    for measure in (prediction.entropy, prediction.epistemic, prediction.kwon_epistemic):
        order = measure.argsort()
        kept = [float(right[order[: int(share * len(order))]].mean()) for share in (1.0, 0.9, 0.7, 0.5)]
        assert kept == sorted(kept), kept
        assert kept[-1] > kept[0] + 0.04, kept
        assert kept[-1] > 0.97, kept
