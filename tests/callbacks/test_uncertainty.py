"""UncertaintyReport beside a user's own module, without a federation."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.evaluator import Evaluator, evaluator_of
from lightning_fedbayes.metrics import functional
from lightning_fedbayes.modules import mlp
from tests.federations import Plain, bayesian, blobs, federate, loader, trainer

CLASSES, EXAMPLES = 3, 120
AREAS = {
    "entropy": functional.predictive_entropy,
    "epistemic": functional.mutual_information,
    "kwon_aleatoric": functional.kwon_aleatoric,
    "kwon_epistemic": functional.kwon_epistemic,
}


class Own(L.LightningModule):
    """A user's classifier that knows its probabilities, (samples,) × examples × classes: an input is its number."""

    def __init__(self, probs):
        super().__init__()
        self.probs = probs

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        numbers, target = batch
        return {"probs": self.probs[..., numbers, :], "target": target}

    test_step = validation_step


def table(samples=0, seed=0):
    """Probabilities of every example, and targets drawn from the same logits."""
    draws = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(EXAMPLES, CLASSES, generator=draws)
    target = torch.multinomial(logits.softmax(1), 1, generator=draws).squeeze(1)
    noise = torch.randn(samples, EXAMPLES, CLASSES, generator=draws) if samples else 0
    return (logits + noise).softmax(-1), target


def loaders(target, *parts):
    """One loader per part of the examples, with uneven batches."""
    data = TensorDataset(torch.arange(EXAMPLES), target)
    return [DataLoader(torch.utils.data.Subset(data, part), 17) for part in (parts or [range(EXAMPLES)])]


def logged(run):
    return {name: float(value) for name, value in run.callback_metrics.items()}


def correct_of(probs, target):
    return (probs.view(-1, EXAMPLES, CLASSES).mean(0).argmax(1) == target).double()


@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize("samples", [0, 5])
def test_areas_are_those_of_all_predictions(samples, stage):
    probs, target = table(samples)
    run = trainer(1, [fb.UncertaintyReport()])
    evaluate = run.validate if stage == "val" else run.test
    evaluate(Own(probs), loaders(target), verbose=False)
    by_sample = probs.view(-1, EXAMPLES, CLASSES)
    expected = {
        f"{stage}/retained_area_{name}": float(
            functional.accuracy_retained(correct_of(probs, target), measure(by_sample)).area
        )
        for name, measure in AREAS.items()
    }
    assert logged(run) == pytest.approx(expected, abs=2e-3)  # the metric keeps a histogram
    area = logged(run)[f"{stage}/retained_area_entropy"]
    assert area > float(correct_of(probs, target).mean()) + 0.05  # the uncertainty is worth something
    if not samples:  # nothing epistemic: the area is the plain accuracy
        assert logged(run)[f"{stage}/retained_area_epistemic"] == pytest.approx(float(correct_of(probs, target).mean()))


SIZES = (30, 10, 60)
COUNTS = torch.tensor([[20, 10, 0], [0, 0, 10], [10, 30, 20]])


def report_of(counts=COUNTS, classes=(0, 1, 2)):
    report = fb.UncertaintyReport()
    report.set_clients(SIZES, counts, classes)
    return report


def check_averages(run, accuracies):
    expected = {
        "val/client_accuracy": sum(n * a for n, a in zip(SIZES, accuracies, strict=True)) / sum(SIZES),
        "val/worst_client_accuracy": min(accuracies),
    }  # the worst tenth of three clients is one
    assert {name: logged(run)[name] for name in expected} == pytest.approx(expected)


def test_accuracies_by_label_mix_are_importance_weighted():
    """Each example weighs (share of its class at the client) / (share of its class in the validation data)."""
    probs, target = table()
    report = report_of()
    run = trainer(1, [report])
    run.validate(Own(probs), loaders(target), verbose=False)
    shares = target.bincount().double() / EXAMPLES
    accuracies = []
    for counts in COUNTS:
        weights = (counts / counts.sum() / shares)[target]
        accuracies.append(float((weights * correct_of(probs, target)).sum() / EXAMPLES))
    assert report.client_accuracy.tolist() == pytest.approx(accuracies)
    assert len(set(accuracies)) == 3
    check_averages(run, accuracies)


@pytest.mark.parametrize("counts", [COUNTS, None])
def test_with_as_many_loaders_as_clients_each_has_its_own_accuracy(counts):
    probs, target = table()
    parts = (range(20), range(20, 70), range(70, EXAMPLES))
    report = report_of(counts)
    run = trainer(1, [report])
    run.validate(Own(probs), loaders(target, *parts), verbose=False)
    accuracies = [float(correct_of(probs, target)[list(part)].mean()) for part in parts]
    assert report.client_accuracy.tolist() == pytest.approx(accuracies)
    assert not any("client_accuracy" in name for name in logged(run))  # the truth is ClientReport's to log


def test_a_client_whose_classes_are_not_in_the_validation_data_does_not_count():
    probs, target = table()
    known = [number for number in range(EXAMPLES) if target[number] != 2]
    report = report_of()
    run = trainer(1, [report])
    run.validate(Own(probs), loaders(target, known), verbose=False)
    assert torch.isnan(report.client_accuracy).tolist() == [False, True, False]
    hits = correct_of(probs, target)
    zero, one = (float(hits[target == label].mean()) for label in (0, 1))
    first, last = (20 * zero + 10 * one) / 30, (10 * zero + 30 * one) / 40
    assert report.client_accuracy[[0, 2]].tolist() == pytest.approx([first, last])
    assert logged(run)["val/client_accuracy"] == pytest.approx((30 * first + 60 * last) / 90)
    assert logged(run)["val/worst_client_accuracy"] == pytest.approx(min(first, last))


def test_the_log_likelihood_is_the_mean_over_samples_of_logarithms():
    probs, target = table(samples=5)
    report = fb.UncertaintyReport()
    for part in torch.arange(EXAMPLES).split(50):
        report.update(probs[:, part], target[part])
    total, count = report.log_likelihood
    assert count == EXAMPLES
    assert total == pytest.approx(float(probs.log()[:, torch.arange(EXAMPLES), target].mean(0).sum()), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["sites", "reverse_kl_barycenter"])
def test_rounds_of_sites_estimate_the_pooled_elbo(fusion, caplog):
    sums = []

    def note(trainer, module):
        (report,) = (each for each in trainer.callbacks if isinstance(each, fb.UncertaintyReport))
        sums.append(report.log_likelihood)

    watch, federation = LambdaCallback(on_validation_end=note), fb.FederatedBayes(fb.IIDPartition(3), fusion=fusion)
    with caplog.at_level("INFO"):
        made = federate(bayesian(), federation, val=loader(blobs(30, seed=1), shuffle=False), callbacks=[watch])
    if fusion != "sites":
        assert not any("sites/elbo" in row for row in federation.history)
        return
    total, count = sums[-1]
    q = federation.posterior
    prior = torch.distributions.Normal(0.0, 1.0)
    divergence = sum(
        float(torch.distributions.kl_divergence(torch.distributions.Normal(m.double(), v.double().sqrt()), prior).sum())
        for m, v in zip(q.mean.values(), q.variance.values())
        if v.any()
    )
    elbo = federation.history[-1]["sites/elbo"]
    assert count == 30
    assert elbo == pytest.approx(total / 30 - divergence / 90, rel=1e-5)
    assert float(made.callback_metrics["federation/sites/elbo"]) == pytest.approx(elbo, rel=1e-5)
    assert f"the pooled ELBO is about {elbo:.4g} nats per example" in caplog.text


@pytest.mark.slow
def test_rounds_of_laplace_are_scored_by_the_linearised_network():
    report, seen = fb.UncertaintyReport(samples=5), []
    watch = LambdaCallback(
        on_validation_end=lambda made, _: seen.append((report.log_likelihood, evaluator_of(made)._predictive))
    )
    federation, module, val = fb.FederatedBayes(fb.IIDPartition(3), posterior=fb.Laplace()), Plain(), blobs(60, seed=1)
    federate(module, federation, 3, val=loader(val, shuffle=False), callbacks=[report, watch])
    made = fb.PosteriorPredictive(module, federation.posterior)
    (found, count), predictive = seen[-1]
    assert predictive.is_linearised
    assert predictive.posterior is federation.posterior
    x, y = val.tensors
    total = made.sample(x, 2000).log_softmax(-1)[:, torch.arange(60), y].mean(0).sum()
    assert count == 60
    assert found == pytest.approx(float(total), rel=0.03)


@pytest.mark.parametrize(("variance", "says"), [(1e4, 1), (1e-4, 0)])
def test_a_report_says_by_the_targets_once_if_draws_are_much_worse_than_the_mean(variance, says, caplog):
    """Also where the network is not sure of itself, so that its own margin tells nothing."""
    evaluator, (x, y) = Evaluator(), blobs(300).tensors
    module = torch.nn.Linear(6, 3, bias=False)
    module.weight.data = torch.linalg.lstsq(x, torch.nn.functional.one_hot(y, 3).float()).solution.T
    wide = fb.GaussianPosterior({"weight": module.weight.detach()}, {"weight": torch.full((3, 6), variance)})
    evaluator._calibrates, right = False, float((module(x).argmax(1) == y).double().mean())
    with caplog.at_level("INFO"):
        for _ in range(3):
            for part in (slice(0, 150), slice(150, 300)):
                evaluator._draw(evaluator.predictive(module, wide), x[part], y[part])
            evaluator.begin()
    assert caplog.text.count("too wide") == says
    line = f"Of 300 targets of the validation the posterior's mean gets {right:.1%} right"
    assert caplog.text.count(line) == says


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["weighted_average", "reverse_kl_barycenter", "wasserstein_barycenter"])
def test_accuracy_rises_as_the_most_uncertain_are_discarded(rule):
    data = fb.DigitsDataModule(batch_size=16)
    options = {"bayesian_last": 2, "learning_rate": 0.01, "kl_weight": 0.05, "samples": 30}
    model = fb.HybridBayesianClassifier(mlp(64, 10, (32,)), **options)
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
