"""Predictions of the classifier and their scores."""

import functools

import numpy as np
import pytest
import torch
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import accuracy_score, log_loss
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_fedbayes import HybridBayesianClassifier
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.modules.hybrid import generalized_cross_entropy
from tests.federations import trainer

from .helpers import labelled, loader, looked_up, numbered

SAMPLES, EXAMPLES, CLASSES = 4, 90, 3
SCORES = {"accuracy", "nll", "ece", "brier", "entropy", "epistemic", "kwon_aleatoric", "kwon_epistemic"}


def bayesian(**options):
    return HybridBayesianClassifier(mlp(6, 3, (5,)), bayesian_last=2, posterior_std=0.5, **options)


def test_fields_of_a_prediction():
    prediction = bayesian(samples=7).predict_step(10 * torch.randn(8, 6))
    assert prediction.probs.shape == (8, 3)
    assert all(field.shape == (8,) for field in prediction[1:])
    assert torch.allclose(prediction.probs.sum(1), torch.ones(8))
    assert torch.equal(prediction.label, prediction.probs.argmax(1))
    assert ((prediction.entropy >= 0) & (prediction.entropy <= 1)).all()
    assert (prediction.kwon_epistemic > 0).all()
    assert (prediction.epistemic > 0).all()


def table():
    """Fixed probabilities of every example under every draw, and labels drawn from their mean logits."""
    logits = 2 * torch.randn(EXAMPLES, CLASSES) + torch.randn(SAMPLES, EXAMPLES, CLASSES)
    return logits.softmax(-1), torch.distributions.Categorical(logits=logits.mean(0)).sample()


def expected_scores(probs, target):
    p, y = probs.mean(0).double().numpy(), target.numpy()
    draws = probs.double().numpy()
    return {
        "accuracy": accuracy_score(y, p.argmax(1)),
        "nll": log_loss(y, p / p.sum(1, keepdims=True)),
        "ece": float(multiclass_calibration_error(torch.tensor(p), target, CLASSES, n_bins=15)),
        "brier": ((p - np.eye(CLASSES)[y]) ** 2).sum(1).mean(),
        "entropy": (scipy_entropy(p, axis=1) / np.log(CLASSES)).mean(),
        "epistemic": (scipy_entropy(p, axis=1) - scipy_entropy(draws, axis=2).mean(0)).mean(),
        "kwon_aleatoric": (draws * (1 - draws)).sum(2).mean(),
        "kwon_epistemic": draws.var(0).sum(1).mean(),
    }


@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize("batch_size", [7, EXAMPLES])
def test_logged_scores_are_those_of_all_predictions(stage, batch_size):
    probs, target = table()
    model, run = looked_up(HybridBayesianClassifier(mlp(1, CLASSES)), probs.log()), trainer()
    evaluate = run.validate if stage == "val" else run.test
    (logged,) = evaluate(model, loader(numbered(target), batch_size), verbose=False)
    assert logged == pytest.approx({f"{stage}/{k}": v for k, v in expected_scores(probs, target).items()}, rel=1e-4)


def test_the_sanity_check_leaves_no_trace_in_the_scores():
    probs, target = table()
    model = looked_up(HybridBayesianClassifier(mlp(1, CLASSES)), probs.log())
    model.num_examples = EXAMPLES
    run = trainer(1, num_sanity_val_steps=2)
    run.fit(model, loader(numbered(target)), loader(numbered(target), 16))
    logged = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("val/")}
    expected = expected_scores(probs, target)
    assert set(expected) == SCORES
    assert logged == pytest.approx({f"val/{name}": value for name, value in expected.items()}, rel=1e-4)


def test_the_generalised_cross_entropy_lies_between_the_cross_entropy_and_the_error():
    logits, target = 3 * torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 5, (40,))
    probs = logits.softmax(1).gather(1, target[:, None])[:, 0]
    nll = nn.functional.cross_entropy(logits, target, reduction="none")
    for exponent in (0.3, 0.8, 1.0):
        expected = (1 - probs**exponent) / exponent
        torch.testing.assert_close(generalized_cross_entropy(logits, target, exponent), expected)
    assert torch.equal(generalized_cross_entropy(logits, target, 0.0), nll)
    torch.testing.assert_close(generalized_cross_entropy(logits, target, 1e-9), nll, rtol=1e-6, atol=1e-6)


def test_its_gradient_is_that_of_the_cross_entropy_times_a_power_of_the_probability():
    """Also where the label is impossible: the loss is bounded, and the gradient 0."""
    logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.0, 900.0, 0.0]], requires_grad=True), torch.tensor([2, 0])
    (found,) = torch.autograd.grad(generalized_cross_entropy(logits, target, 0.7).sum(), logits)
    (plain,) = torch.autograd.grad(nn.functional.cross_entropy(logits, target, reduction="sum"), logits)
    probs = logits.detach().softmax(1).gather(1, target[:, None])
    torch.testing.assert_close(found, plain * probs**0.7)
    assert torch.equal(found[1], torch.zeros(3))
    assert float(generalized_cross_entropy(logits, target, 0.7)[1].detach()) == pytest.approx(1 / 0.7)


@pytest.mark.parametrize("robustness", [0.0, 0.8])
def test_what_is_trained_is_the_robust_loss_and_what_is_logged_the_likelihood(robustness):
    model = HybridBayesianClassifier(
        mlp(6, 3, (5,)), bayesian_last=0, robustness=robustness, optimizer=functools.partial(torch.optim.SGD, lr=1.0)
    )
    x, y = labelled(20).tensors
    before = [each.detach().clone() for each in model.parameters()]
    nll = nn.functional.cross_entropy(model(x), y).item()
    gradients = torch.autograd.grad(generalized_cross_entropy(model(x), y, robustness).mean(), [*model.parameters()])
    run = trainer(1)
    run.fit(model, loader(TensorDataset(x, y), 20))
    for start, gradient, end in zip(before, gradients, model.parameters(), strict=True):
        torch.testing.assert_close(end.detach(), start - gradient)
    assert float(run.callback_metrics["train/nll"]) == pytest.approx(nll, rel=1e-5)
    assert model.hparams.robustness == robustness


@pytest.mark.parametrize("robustness", [-0.1, 1.5, float("nan"), "0.8"])
def test_a_robustness_that_is_no_exponent_is_refused(robustness):
    with pytest.raises(FedBayesError, match=r"robustness=.*in \[0, 1\]"):
        bayesian(robustness=robustness)
