"""What a network may put out: ten outputs, by their posteriors, through every report, prediction and calibration."""

import math

import lightning as L
import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_calibration_error

import lightning_fedbayes as fb
from lightning_fedbayes.core.seeding import derive_seed
from lightning_fedbayes.metrics.functional import concordance_index
from lightning_fedbayes.metrics.likelihoods import RegressionPrediction, likelihood_of
from lightning_fedbayes.modules import Likelihood
from tests.federations import federate, trainer


class Pixels(nn.Module):
    """A value for each of 3 × 4 pixels, or tokens if there is no second dimension."""

    def __init__(self, channels, positions=(3, 4), last=False):
        super().__init__()
        self.layer = nn.Linear(5, channels * math.prod(positions))
        self.shape, self.is_last = (channels, *positions), last

    def forward(self, x):
        found = self.layer(x).view(len(x), *self.shape)
        return found.movedim(1, -1) if self.is_last else found


def numbers(*shape):
    return lambda n: torch.randn(n, *shape)


def classes(count, *shape):
    return lambda n: torch.randint(0, count, (n, *shape))


def times(n):
    """Event and time, of which a third or so is censored."""
    return torch.stack([(torch.rand(n) < 0.7).float(), torch.empty(n).exponential_()], 1)


OUTPUTS = {  # network, targets of n examples, likelihood
    "classes": (lambda: nn.Linear(5, 3), classes(3), fb.Categorical()),
    "segmentation": (lambda: Pixels(3), classes(3, 3, 4), fb.Categorical(ignore_index=255)),
    "tokens": (lambda: Pixels(4, (6,), last=True), classes(4, 6), fb.Categorical(channels=-1)),
    "one logit, flat": (lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), classes(2), fb.Bernoulli()),
    "one logit": (lambda: nn.Linear(5, 1), classes(2), fb.Bernoulli()),
    "labels": (lambda: nn.Linear(5, 3), lambda n: torch.randint(0, 2, (n, 3)).float(), fb.Bernoulli()),
    "regression": (lambda: nn.Linear(5, 1), numbers(), fb.Gaussian(1.0)),
    "mean and variance": (lambda: nn.Linear(5, 4), numbers(2), fb.Gaussian("output")),
    "pixels": (lambda: Pixels(2), numbers(2, 3, 4), fb.Gaussian(1.0)),
    "risks": (lambda: nn.Linear(5, 1, bias=False), times, fb.Cox()),
}
CALIBRATED = [output for output, (_, _, known) in OUTPUTS.items() if known.by_example]


class Own(L.LightningModule):
    """A user's own module, which says what its outputs mean and nothing else."""

    def __init__(self, output, posterior, likelihood=None):
        super().__init__()
        make, _, self.known = OUTPUTS[output]
        self.likelihood = likelihood or self.known
        network = make()
        self.network = fb.bayesianize(network, types=[nn.Linear]) if posterior == "layers" else network
        self.posterior = posterior

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, number):
        x, y = batch
        return self.known.loss(self(x), y) + fb.kl_divergence(self.network) / 60

    def validation_step(self, batch, number):
        pass

    test_step = validation_step

    def predict_step(self, batch, number=0):
        return self.known.predict(self(batch[0]).unsqueeze(0))

    def configure_optimizers(self):
        if self.posterior == "ivon":
            return fb.IVON(self.parameters(), lr=0.01)
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data_of(output, sizes=(30, 34), seed=0):
    torch.manual_seed(seed)
    _, targets, _ = OUTPUTS[output]
    found = {}
    for number, size in enumerate(sizes):
        y = targets(size)
        if output == "segmentation":
            y[torch.rand(y.shape) < 0.1] = 255
        found[f"c{number}"] = TensorDataset(torch.randn(size, 5), y)
    return fb.ClientDatasets(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the temperature")  # targets are noise
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("posterior", ["layers", "ivon", "laplace"])
@pytest.mark.parametrize("output", CALIBRATED)
def test_every_output_goes_through_everything(output, posterior, engine):
    """Reports by draws, tables of clients, a temperature, sets or intervals, and predictions with both."""
    known = OUTPUTS[output][2]
    data, held_out = data_of(output), DataLoader(data_of(output, (40, 44), 1), 16)
    module = Own(output, posterior)
    scaling = fb.FederatedTemperature()
    conformal = fb.FederatedConformal(kind="lac" if known.of_classes else "interval")
    callback = fb.FederatedBayes(engine=engine, posterior=fb.Laplace(prior_std=1.0) if posterior == "laplace" else None)
    report, clients = fb.UncertaintyReport(samples=4), fb.ClientReport()
    made = federate(module, callback, 2, DataLoader(data, 8), held_out, callbacks=[report, clients, scaling, conformal])
    assert math.isfinite(float(made.callback_metrics["val/draws/clients/nll"]))
    assert 0.001 < scaling.temperature < 1000
    assert math.isfinite(conformal.threshold)
    assert ("val/draws/retained_area_entropy" in made.callback_metrics) == known.of_classes
    x, y = next(iter(held_out))
    predictive = fb.PosteriorPredictive(module, callback.posterior, samples=3)
    prediction = predictive.predict_step((x, y))
    scores = fb.evaluate_clients(predictive, data_of(output, (20, 24), 2))
    assert all(bool(torch.isfinite(each).all()) for each in scores.values.values())
    assert {"test/scaled/nll", f"test/{conformal.label}/coverage"} <= trainer(1, [scaling, conformal]).test(
        module, held_out, verbose=False
    )[0].keys()
    found = trainer(1, [scaling, conformal]).predict(predictive, held_out)
    if known.of_classes:
        assert prediction.label.numel() == y.numel()
        assert conformal.predictions[0].dtype == torch.bool
        assert len(conformal.predictions[0]) == 16
    else:
        assert found[0].mean.numel() == y.numel()
        assert conformal.predictions[0].shape == (*found[0].mean.shape, 2)


def partial_nll(log_risk, targets):
    """By the definition: of each event, the logarithm of the share of its risk in that of those who are still there."""
    event, time = targets.T
    return sum(log_risk[time >= time[i]].logsumexp(0) - log_risk[i] for i in range(len(event)) if event[i])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("posterior", ["layers", "ivon", "swag"])
def test_risks_go_through_reports_tables_and_predictions(posterior, engine):
    """By name, as by object; figures of clients are those of the clients' own pairs and risk sets."""
    held_out = data_of("risks", (40, 44), 1)
    module = Own("risks", posterior, "cox")
    callback = fb.FederatedBayes(engine=engine, posterior=fb.SWAG() if posterior == "swag" else None)
    reports = [fb.UncertaintyReport(samples=4), fb.ClientReport()]
    train, val = DataLoader(data_of("risks"), 16), DataLoader(held_out, 16)
    made = federate(module, callback, 2, train, val, callbacks=reports)
    assert {f"val/draws/clients/{name}" for name in ("c_index", "c_index_worst", "nll", "nll_spread")} <= {
        *made.callback_metrics
    }
    predictive = fb.PosteriorPredictive(module, callback.posterior, samples=3, likelihood="cox")
    scores = fb.evaluate_clients(predictive, held_out)
    for k, data in enumerate(held_out.datasets):
        x, y = data.tensors
        torch.manual_seed(derive_seed(0, "evaluation"))
        (batch,) = DataLoader(data, 84)  # which takes a number from the generator, too
        prediction = predictive.predict_step(batch)
        assert prediction.samples.shape == (3, len(x))
        torch.testing.assert_close(prediction.std, prediction.samples.std(0, correction=0))
        nll = partial_nll(prediction.log_risk, y) / len(y)
        assert float(scores.values["nll"][k]) == pytest.approx(float(nll), 1e-5)
        assert float(scores.values["c_index"][k]) == pytest.approx(
            float(concordance_index(prediction.log_risk, y[:, 1], y[:, 0]))
        )
    assert scores.worst("c_index") == float(scores.values["c_index"].min())
    (found,) = trainer(1).validate(predictive, DataLoader(held_out, 84), verbose=False)
    assert found.keys() == {"val/c_index", "val/nll"}
    assert trainer(1).predict(predictive, DataLoader(held_out, 84))[0].log_risk.shape == (84,)
    weight, nll = fb.choose_personal_weight(
        lambda weight: callback.posterior, module, held_out.datasets[0], (0.0, 1.0), likelihood="cox", samples=3
    )
    assert weight == 0
    assert nll[0.0] == pytest.approx(float(scores.values["nll"][0]))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ({"callback": fb.FederatedTemperature()}, "leave calibrations out"),
        ({"callback": fb.FederatedConformal(kind="interval")}, "leave calibrations out"),
        ({"posterior": fb.Laplace()}, "take Bayesian layers, fb.IVON or fb.SWAG"),
        ({"posterior": fb.Laplace(likelihood="cox")}, "take Bayesian layers, fb.IVON or fb.SWAG"),
    ],
    ids=["temperature", "conformal", "laplace", "laplace of a likelihood"],
)
def test_what_needs_single_examples_is_refused_of_risks_before_training(beside, why, engine):
    module = Own("risks", "plain")
    before = module.network.weight.detach().clone()
    callback = fb.FederatedBayes(engine=engine, posterior=beside.get("posterior"))
    others = [beside["callback"]] if "callback" in beside else []
    train, val = (DataLoader(data_of("risks"), 16) for _ in range(2))
    with pytest.raises(fb.FedBayesError, match=f"likelihood 'cox': what an example says depends on.*{why}"):
        federate(module, callback, 2, train, val, callbacks=others, num_sanity_val_steps=0)
    assert torch.equal(module.network.weight, before)


def test_the_gradient_of_a_partial_likelihood_vanishes_at_the_estimate_of_two_groups():
    r"""Times 1 (treated), 2, 3 (treated), 4, all events: the score's root is that of :math:`r^2 - r - 4`, r = e^β."""
    beta = torch.tensor((1 + 17**0.5) / 2, dtype=torch.float64).log().requires_grad_()
    treated = torch.tensor([0.0, 1, 0, 1], dtype=torch.float64)
    y = torch.tensor([[1.0, 4], [1, 1], [1, 2], [1, 3]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(fb.Cox().nll(beta * treated, y).sum(), beta)
    assert abs(float(gradient)) < 1e-12
    (elsewhere,) = torch.autograd.grad(fb.Cox().nll(0.9 * beta * treated, y).sum(), beta)
    assert abs(float(elsewhere)) > 0.01


@pytest.mark.parametrize("output", ["classes", "segmentation", "tokens", "one logit", "labels"])
def test_scores_are_those_of_other_libraries_on_flat_positions(output):
    make, targets, known = OUTPUTS[output]
    draws, y = torch.stack([make()(torch.randn(50, 5)) for _ in range(3)]).detach(), targets(50)
    rows = known.rows(draws, y)
    probs, flat = rows["probs"].mean(0).double(), rows["target"]
    probs = probs / probs.sum(1, keepdim=True)
    scores = fb.modules.bayesian_module.ClassScores()
    scores.update({**rows, "probs": probs[None]})
    found = scores.take("val")
    labels = np.arange(probs.shape[1])
    assert float(found["val/nll"]) == pytest.approx(log_loss(flat, probs, labels=labels), abs=1e-6)
    assert float(found["val/brier"]) == pytest.approx(
        float((probs - F.one_hot(flat, probs.shape[1])).square().sum(1).mean()), abs=1e-6
    )
    if probs.shape[1] == 2:  # sklearn's is of one of the two classes
        assert float(found["val/brier"]) / 2 == pytest.approx(brier_score_loss(flat, probs[:, 1]), abs=1e-6)
    assert float(found["val/ece"]) == pytest.approx(
        float(multiclass_calibration_error(probs, flat, probs.shape[1], 15)), abs=1e-6
    )
    assert float(found["val/accuracy"]) == pytest.approx(float((probs.argmax(1) == flat).double().mean()))
    assert rows["counts"].tolist() == [y[0].numel()] * 50


def test_an_ignored_position_counts_nowhere():
    known, outputs, y = fb.Categorical(ignore_index=255), torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))
    hidden = y.clone()
    hidden[0, :2] = hidden[2] = 255
    rows, seen = known.rows(outputs[None], hidden), hidden != 255
    assert rows["counts"].tolist() == [3, 5, 0, 5]
    assert torch.equal(rows["target"], y[seen])
    torch.testing.assert_close(rows["probs"][0], outputs.softmax(1).movedim(1, -1)[seen])
    assert torch.equal(known.nll(outputs, hidden)[~seen], torch.zeros(7))
    torch.testing.assert_close(known.loss(outputs, hidden), known.nll(outputs, y)[seen].sum() / 4)


@pytest.mark.parametrize("known", [fb.Categorical(), fb.Bernoulli(), fb.Gaussian(0.7), fb.Gaussian("output")], ids=str)
def test_terms_add_up_to_the_fisher_information(known):
    r"""Of :math:`E_y \nabla^2 (-\log p)` by its definition: enumerated, or of Gaussians by moments."""
    f = torch.randn(4, dtype=torch.float64)
    is_one = isinstance(known, fb.Categorical)
    target = torch.zeros(()).long() if is_one else torch.zeros(2 if known == fb.Gaussian("output") else 4)
    jacobian = torch.func.jacrev(lambda f: known.terms(f, target))(f)
    found = jacobian.T @ jacobian
    if is_one:
        p = f.softmax(0)
        wanted = p.diag() - torch.outer(p, p)
        assert torch.allclose(found.diagonal(), wanted.diagonal())
        return
    if isinstance(known, fb.Bernoulli):
        wanted = (f.sigmoid() * (1 - f.sigmoid())).diag()
    elif known.in_outputs:
        wanted = torch.cat([(-f[2:]).exp(), torch.full((2,), 0.5)]).diag()
    else:
        wanted = torch.eye(4) / 0.49
    torch.testing.assert_close(found, wanted.double())


class Counts(Likelihood):
    """Counts with a Poisson likelihood, whose rate is the exponential of the output."""

    name = "counts"

    def nll(self, outputs, targets):
        return F.poisson_nll_loss(outputs, targets.view_as(outputs), full=False, reduction="none") + torch.lgamma(
            targets.view_as(outputs) + 1
        )

    def predict(self, draws):
        rates = draws.exp()
        epistemic = rates.var(0, correction=0)
        return RegressionPrediction(rates.mean(0), rates.mean(0) + epistemic, rates.mean(0), epistemic, rates)


@pytest.mark.filterwarnings("ignore:the temperature")
def test_a_likelihood_of_one_s_own_goes_through_everything(monkeypatch):
    monkeypatch.setitem(
        OUTPUTS, "counts", (lambda: nn.Linear(5, 1), lambda n: torch.poisson(torch.full((n, 1), 3.0)), Counts())
    )
    for posterior in ("layers", "laplace"):
        test_every_output_goes_through_everything("counts", posterior, "vectorized")
    draws, y = torch.randn(4, 9, 1), torch.poisson(torch.full((9, 1), 2.0))
    mixture = -torch.distributions.Poisson(draws.exp()).log_prob(y).exp().mean(0).log().squeeze(1)
    torch.testing.assert_close(Counts().rows(draws, y)["nll"], mixture)


@pytest.mark.parametrize(
    ("outputs", "targets", "found"),
    [
        (torch.zeros(4, 3), torch.zeros(4).long(), fb.Categorical()),
        (torch.zeros(4, 3, 5, 6), torch.zeros(4, 5, 6).long(), fb.Categorical()),
        (torch.zeros(4, 6, 3), torch.zeros(4, 6).int(), fb.Categorical(channels=-1)),
        (torch.zeros(4), torch.zeros(4).long(), "yes or no, or numbers"),
        (torch.zeros(4, 1), torch.ones(4), "yes or no, or numbers"),
        (torch.zeros(4, 3), torch.ones(4, 3), "yes or no, or numbers"),
        (torch.zeros(4, 1), torch.randn(4), "noise is not known"),
        (torch.zeros(4, 2), torch.randn(4), "noise='output'"),
        (torch.zeros(4, 3), torch.randn(4, 5), "one output per target"),
        (torch.zeros(4, 3), torch.full((4,), 7), "targets run from 7 to 7, and there are 3 classes"),
    ],
)
def test_a_batch_says_what_it_is_or_is_refused_with_the_line_to_add(outputs, targets, found):
    if isinstance(found, str):
        with pytest.raises(fb.FedBayesError, match=found):
            likelihood_of(nn.Identity(), outputs, targets)
    else:
        assert likelihood_of(nn.Identity(), outputs, targets) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "per"),
    [
        *((output, per) for output in ("segmentation", "labels") for per in ("position", "example")),
        ("pixels", "example"),
    ],
)
def test_coverage_over_redraws(output, per):
    """Positions of an example are alike by a common shift; both guarantees hold over examples that are drawn anew."""
    _, _, known = OUTPUTS[output]

    def draw(n):
        f = torch.randn(n, 3, 6) + torch.randn(n, 3, 1)
        if output == "segmentation":
            return f, torch.distributions.Categorical(logits=(f + 0.5 * torch.randn(n, 1, 1)).movedim(1, -1)).sample()
        if output == "labels":
            return f, (torch.rand(f.shape) < f.sigmoid()).float()
        return f, f + torch.randn(f.shape) * (0.5 + torch.rand(n, 1, 1))

    covered = []
    for _ in range(40):
        conformal = fb.FederatedConformal(0.9, kind="lac" if known.of_classes else "interval", per=per)
        rows = [known.rows(each[None], y) for each, y in (draw(400), draw(400))]
        conformal.fit(conformal._scores({"a": conformal.read(rows[0])}, 1.0))
        covered.append(conformal.score({"a": conformal.read(rows[1])}).mean("coverage"))
    assert 0.88 < np.mean(covered) < 0.93
