"""Exact heads: pooled and federated alike, evidence as published, mode and variational posterior of a softmax."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from sklearn.linear_model import BayesianRidge, LogisticRegression
from torch.nn import functional as F

import lightning_fedbayes as fb
from lightning_fedbayes.core.messages import Message
from tests.modules.test_linear_regression import examples
from tests.refusals import refusals


def classes(count=300, features=6, outputs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator, dtype=torch.float64)
    logits = x @ torch.randn(features, outputs, generator=generator, dtype=torch.float64)
    return x, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


@pytest.fixture(params=[False, True])
def large(request, monkeypatch):
    """Whether one Kronecker product stands for the curvature, as in a large network."""
    if request.param:
        monkeypatch.setattr("lightning_fedbayes.modules.head.head.DENSE", 0)
    return request.param


def split(x, y, parts):
    return [(x[each], y[each]) for each in parts]


def partitions(y):
    """One class each, if there are classes; unequal pieces; one example alone."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(2))
    yield [order[:1], order[1:20], order[20:]]
    yield [*order.split(17)][::-1]
    if not y.is_floating_point():
        yield [(y == label).nonzero().flatten() for label in y.unique()]


@pytest.mark.parametrize("likelihood", ["gaussian", "one_hot", "softmax"])
def test_every_split_gives_the_pooled_head(likelihood):
    x, y = examples(200, 5) if likelihood == "gaussian" else classes()
    head = fb.BayesianHead(2 if likelihood == "gaussian" else 3, likelihood)
    pooled = head.fit_clients([(x, y)])
    for parts in partitions(y):
        found = head.fit_clients(split(x, y, parts))
        torch.testing.assert_close(found.weights, pooled.weights, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(found.moments(x)[1], pooled.moments(x)[1], atol=1e-10, rtol=1e-10)


def test_a_client_comes_late_and_goes():
    x, y = classes()
    head = fb.BayesianHead(3, "one_hot")
    sums = [head.sums(*each) for each in split(x, y, [slice(0, 100), slice(100, 250), slice(250, 300)])]
    both = head.fit([sums[0], sums[2]])
    without = head.fit(sums[0] + sums[1] + sums[2] - sums[1])
    torch.testing.assert_close(without.weights, both.weights, atol=1e-10, rtol=0)
    late = head.fit([sums[0] + sums[2], sums[1]])
    torch.testing.assert_close(late.weights, head.fit_clients([(x, y)]).weights, atol=1e-10, rtol=0)
    with pytest.raises(fb.FedBayesError, match=r"150 of 100 examples cannot be taken out"):
        sums[0] - sums[1]


def test_the_evidence_is_that_of_bayesian_ridge():
    x, y = examples(200, 5, targets=1)
    fit = fb.BayesianHead(1, "gaussian").fit_clients([(x, y)])
    design = torch.cat([x, torch.ones(len(x), 1)], 1).numpy()
    flat = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0)
    ridge = BayesianRidge(max_iter=5000, tol=1e-13, fit_intercept=False, **flat).fit(design, y[:, 0].numpy())
    assert fit.prior_precision == pytest.approx(ridge.lambda_, rel=1e-6)
    assert 1 / fit.noise == pytest.approx(ridge.alpha_, rel=1e-6)
    torch.testing.assert_close(fit.weights[0], torch.tensor(ridge.coef_), atol=1e-8, rtol=1e-6)
    covariance = fit.posterior.systems[""].covariance(torch.eye(6).double().reshape(1, 6, 1, 6))[0]
    torch.testing.assert_close(covariance, torch.tensor(ridge.sigma_), atol=1e-9, rtol=1e-5)


def test_the_mode_of_a_softmax_is_that_of_penalised_logistic_regression():
    x, y = classes()
    fit = fb.BayesianHead(3, prior_std=0.7, inference="laplace").fit_clients(split(x, y, [slice(0, 9), slice(9, 300)]))
    design = torch.cat([x, torch.ones(len(x), 1)], 1).numpy()
    model = LogisticRegression(C=0.49, fit_intercept=False, tol=1e-10, max_iter=10_000).fit(design, y.numpy())
    torch.testing.assert_close(fit.weights, torch.tensor(model.coef_), atol=2e-3, rtol=1e-3)
    assert fit.exchanges < 15


def test_the_curvature_is_the_hessian_of_the_loss():
    x, y = classes(40)
    head = fb.BayesianHead(3, inference="laplace")
    fit = head.fit(head.sums(x, y))
    fit = head.step(fit, head.slopes(fit, x, y))
    found = head.slopes(fit, x, y)

    def loss(weights):
        return F.cross_entropy(torch.cat([x, torch.ones(len(x), 1)], 1) @ weights.T, y, reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, fit.weights).reshape(21, 21)
    whole = sum(torch.kron(b, a) for a, b in found.terms(fit.sums.gram))
    torch.testing.assert_close(whole, hessian)
    torch.testing.assert_close(found.slope, torch.autograd.functional.jacobian(loss, fit.weights))
    torch.testing.assert_close(found.loss, loss(fit.weights))


def test_one_kronecker_product_stands_for_a_large_curvature(monkeypatch):
    """L-BFGS arrives at the same mode, and each exchange is of a gradient and of classes × classes numbers."""
    x, y = classes()
    exact = fb.BayesianHead(3, prior_std=1.0, inference="laplace").fit_clients([(x, y)])
    monkeypatch.setattr("lightning_fedbayes.modules.head.head.DENSE", 0)
    head = fb.BayesianHead(3, prior_std=1.0, inference="laplace")
    fit = head.fit_clients(split(x, y, [slice(0, 9), slice(9, 300)]))
    assert not fit.takes_pairs
    assert head.slopes(fit, x, y).curvature.numel() == 0
    assert fit.exchanges <= 40
    torch.testing.assert_close(fit.weights, exact.weights, atol=5e-3, rtol=5e-3)


def half_cauchy(precision):
    """Twice the slope of the prior of s by log precision."""
    return (1 - precision) / (1 + precision)


@pytest.mark.parametrize(("inference", "exact"), [("laplace", 5e-3), ("variational", 1e-2)])
def test_the_evidence_of_a_softmax_is_at_its_fixed_point(inference, exact):
    fit = fb.BayesianHead(3, inference=inference, exchanges=200).fit_clients([classes()])
    values = fit.posterior.systems[""].eigenvalues()
    determined = float((values / (values + fit.prior_precision)).sum()) + half_cauchy(fit.prior_precision)
    assert determined / float(fit.weights.square().sum()) == pytest.approx(fit.prior_precision, rel=exact)


def test_the_variational_posterior_has_the_largest_bound():
    """The ELBO of a full Gaussian, by the same draws of the logits, falls in every direction from it."""
    x, y = classes(60, features=2, outputs=2)
    fit = fb.BayesianHead(2, prior_std=1.0).fit_clients([(x, y)])
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    axes = torch.eye(6).double().reshape(1, 6, 2, 3)
    covariance = fit.posterior.systems[""].covariance(axes)[0]
    noise = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def bound(mean, covariance):
        root = torch.linalg.cholesky(covariance)
        weights = (mean.flatten() + noise @ root.T).reshape(-1, 2, 3)
        logs = torch.einsum("nd,scd->snc", design, weights).log_softmax(-1)
        likelihood = logs[:, torch.arange(len(y)), y].sum(1).mean()
        prior = (covariance.trace() + mean.square().sum() - 6 - torch.logdet(covariance)) / 2
        return float(likelihood - prior)

    best = bound(fit.weights, covariance)
    laplace = fb.BayesianHead(2, prior_std=1.0, inference="laplace").fit_clients([(x, y)])
    assert best > bound(laplace.weights, laplace.posterior.systems[""].covariance(axes)[0])
    for change in (0.9, 1.1):
        assert best > bound(fit.weights * change, covariance) - 1e-3
        assert best > bound(fit.weights, covariance * change) - 1e-3


def test_predictions_are_those_of_draws_of_the_weights():
    x, y = classes(80)
    fit = fb.BayesianHead(3).fit_clients([(x, y)])
    torch.manual_seed(0)
    predictive = fb.PosteriorPredictive(fit.linear(), fit.posterior, samples=4096)
    found = predictive.predict_step(x[:5].float())
    whole = sum(torch.kron(b, a) for a, b in fit.terms) + fit.prior_precision * torch.eye(21).double()
    root = torch.linalg.cholesky(torch.linalg.inv(whole))
    weights = (fit.weights.flatten() + torch.randn(40_000, 21).double() @ root.T).reshape(-1, 3, 7)
    design = torch.cat([x[:5], torch.ones(5, 1)], 1)
    probs = torch.einsum("nd,scd->snc", design, weights).softmax(-1)
    torch.testing.assert_close(found.probs.double(), probs.mean(0), atol=5e-3, rtol=0)


def test_one_hot_logits_are_log_densities():
    x, y = classes()
    fit = fb.BayesianHead(3, "one_hot").fit_clients([(x, y)])
    scores = torch.cat([x, torch.ones(len(x), 1)], 1) @ fit.weights.T
    density = -(torch.eye(3).double() - scores[:, None]).square().sum(-1) / (2 * fit.noise)
    logits = fit.linear(torch.float64)(x)
    torch.testing.assert_close(logits.log_softmax(1), density.log_softmax(1), atol=1e-5, rtol=1e-5)


def test_a_message_comes_back_whole():
    x, y = classes(30)
    head = fb.BayesianHead(3)
    fit = head.fit(head.sums(x, y))
    for sent in (head.sums(x, y), head.slopes(fit, x, y)):
        read = Message.of("statistics", 3, 0, sent).read(type(sent))
        for a, b in zip(vars(sent).values(), vars(read).values(), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


test_arguments_out_of_range = refusals(
    fb.FedBayesError,
    ({"outputs": 1}, "outputs=1"),
    ({"likelihood": "probit"}, "likelihood='probit'"),
    ({"inference": "exact"}, "inference='exact'"),
    call=lambda options: fb.BayesianHead(**{"outputs": 3, **options}),
)


HEAD, (X, Y) = fb.BayesianHead(3), classes(30)
FIT = HEAD.fit(HEAD.sums(X, Y))
test_what_clients_send_is_checked = refusals(
    fb.FedBayesError,
    (lambda: HEAD.sums(X, Y + 1), "classes from 0 to 2"),
    (lambda: HEAD.sums(X[0], Y), r"\(examples, features\)"),
    (lambda: HEAD.slopes(FIT, X[:, :3], Y), "the fit is of 6 features"),
    (lambda: HEAD.step(FIT, HEAD.slopes(FIT, X[:9], Y[:9])), "all clients of the sums have to answer"),
    (lambda: HEAD.fit([]), "there are no clients"),
    (lambda: HEAD.step(HEAD.fit_clients([(X, Y)]), HEAD.slopes(FIT, X, Y)), "the fit is done"),
    (lambda: fb.BayesianHead(1, "gaussian").fit_clients([(X, torch.zeros(30))]), "nothing to fit"),
)


def test_few_examples_of_many_features_that_are_fitted_exactly():
    centres = torch.randn(10, 400)

    def drawn(count):
        labels = torch.randint(10, (count,))
        return (centres[labels] + 2 * torch.randn(count, 400)).relu(), labels

    x, y = drawn(40)
    fit = fb.BayesianHead(10, "one_hot").fit_clients([(x[:7], y[:7]), (x[7:], y[7:])])
    shown = fb.PosteriorPredictive(fit.linear(), fit.posterior).predict_step(x).probs
    assert bool((shown.argmax(1) == y).all())
    inputs, labels = drawn(500)
    probs = fb.PosteriorPredictive(fit.linear(), fit.posterior).predict_step(inputs).probs
    assert float((probs.argmax(1) == labels).float().mean()) > 0.85
    assert float(-probs[torch.arange(500), labels].clamp_min(1e-12).log().mean()) < 1.0  # guessing: 2.3


def test_the_evidence_of_several_targets_is_at_its_fixed_point():
    x, y = examples(200, 5, targets=3)
    fit = fb.BayesianHead(3, "gaussian").fit_clients([(x, y)])
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    values = torch.linalg.eigvalsh(design.T @ design) / fit.noise
    determined = float((values / (values + fit.prior_precision)).sum())
    assert fit.prior_precision == pytest.approx(3 * determined / float(fit.weights.square().sum()), rel=1e-6)
    residual = float((y - design @ fit.weights.T).square().sum())
    assert fit.noise == pytest.approx(residual / (3 * (len(x) - determined)), rel=1e-6)


def test_slopes_at_no_weights_follow_from_the_sums(large):
    x, y = classes(50)
    head = fb.BayesianHead(3, inference="laplace")
    sums = head.sums(x, y)
    fit = head.fit(sums)
    found = head.slopes(replace(fit, weights=torch.zeros(3, 7).double()), x, y)
    for name, value in vars(fb.modules.HeadSlopes.at_zero(sums, not large)).items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(getattr(found, name)))


def many(examples=150, features=200, outputs=4, seed=0):
    """More features than examples, with a few long directions, as those of a backbone."""
    generator = torch.Generator().manual_seed(seed)
    scales = 8 / torch.arange(1, features + 1).double() ** 0.7
    x = (torch.randn(examples, features, generator=generator, dtype=torch.float64) + 1) * scales
    weights = torch.randn(features, outputs, generator=generator, dtype=torch.float64) / 2
    return x, torch.multinomial((x @ weights).softmax(1), 1, generator=generator).squeeze(1)


def run(head, data, change=None):
    """The fit, and the loss with the prior of every exchange whose step was taken, each with its prior's precision."""
    fit, path = head.fit(head.sums(*data)), []
    fit = fit if change is None else change(fit)
    while not fit.is_done:
        found = head.slopes(fit, *data)
        square, loss = float(fit.weights.square().sum()), float(found.loss)
        fit = head.step(fit, found)
        if not fit._shortened:
            path.append((loss, square))
    return fit, path


def test_a_large_fit_remembers_each_move_and_the_change_of_the_slope(monkeypatch):
    monkeypatch.setattr("lightning_fedbayes.modules.head.head.DENSE", 0)
    data, head = classes(50), fb.BayesianHead(3, inference="laplace")
    fit = head.fit(head.sums(*data))
    for _ in range(3):
        before, found = fit._last[0], head.slopes(fit, *data)
        begun, move = head.slopes(replace(fit, weights=before), *data), fit.weights - before
        fit = head.step(fit, found)
        torch.testing.assert_close(fit._memory[-1], (move, found.slope - begun.slope))


def test_many_features_take_few_exchanges():
    fit, _ = run(fb.BayesianHead(4, inference="laplace"), many())
    assert fit.exchanges <= 25


@pytest.mark.usefixtures("large")
def test_with_a_fixed_prior_the_loss_falls_with_every_step():
    for std in (0.05, 0.5, 5.0):
        _, path = run(fb.BayesianHead(4, prior_std=std, inference="laplace"), many(features=60))
        totals = [loss + square / (2 * std**2) for loss, square in path]
        assert all(after <= before + 1e-4 for before, after in pairwise(totals))


START = {
    "short": lambda fit: replace(fit, weights=fit.weights * 0.1),
    "long": lambda fit: replace(fit, weights=fit.weights * 10),
    "tight": lambda fit: replace(fit, prior_precision=fit.prior_precision * 10),
    "loose": lambda fit: replace(fit, prior_precision=fit.prior_precision / 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["laplace", "variational"])
@pytest.mark.parametrize("start", START.values(), ids=START)
@pytest.mark.usefixtures("large")
def test_it_arrives_from_everywhere_and_stays(inference, start):
    """Ten times as many exchanges as usual change nothing, and so do weights or a prior that are ten times off."""
    data, head = classes(200), fb.BayesianHead(3, inference=inference, exchanges=400)
    usual, other = run(head, data)[0], run(head, data, start)[0]
    assert max(usual.exchanges, other.exchanges) < 100
    assert other.prior_precision == pytest.approx(usual.prior_precision, rel=0.02)
    torch.testing.assert_close(other.weights, usual.weights, atol=0.02, rtol=0.02)


def test_the_variational_evidence_finds_the_prior_that_weights_were_drawn_from():
    """Laplace's is too tight where posteriors are wide; means over draws, in logarithms."""
    found = {"laplace": [], "variational": []}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(100, 30, generator=generator, dtype=torch.float64)
        weights = torch.randn(31, 3, generator=generator, dtype=torch.float64) / 2
        y = torch.multinomial((x @ weights[:-1] + weights[-1]).softmax(1), 1, generator=generator).squeeze(1)
        for inference, precisions in found.items():
            fit = fb.BayesianHead(3, inference=inference).fit_clients([(x, y)])
            precisions.append(math.log(fit.prior_precision / 4))
    laplace, variational = (sum(each) / 4 for each in found.values())
    assert abs(variational) < 0.3
    assert laplace > 1


def clients(number=6, count=60, features=5, outputs=3, seed=0, differ=1.5):
    """Clients whose label functions are those of a common one, changed for each; examples to train by and held out."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common, parts = draw(features, outputs), []
    for _ in range(number):
        x = draw(count, features)
        logits = 1.5 * x @ (common + differ * draw(features, outputs))
        y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
        parts.append((x[: count // 2], y[: count // 2], x[count // 2 :], y[count // 2 :]))
    return parts


def nll(fit, x, y):
    probs = fb.PosteriorPredictive(fit.linear(), fit.posterior).predict_step(x.float()).probs
    return float(probs[torch.arange(len(y)), y].log().mean().neg())


HEADS = [fb.BayesianHead(3), fb.BayesianHead(3, inference="laplace"), fb.BayesianHead(3, "one_hot")]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.usefixtures("large")
def test_where_label_functions_differ_a_personal_head_beats_the_global_one(head):
    parts = clients()
    fit = head.fit_clients([(x, y) for x, y, _, _ in parts])
    gains = [nll(fit, *held_out) - nll(head.personal(fit, x, y, 0.8), *held_out) for x, y, *held_out in parts]
    assert sum(gains) / len(gains) > 0.1
    assert sum(gain > 0 for gain in gains) >= 5


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_weight_0_is_the_federation_and_1_the_client_alone(head):
    (x, y, *_), *rest = clients()
    fit = head.fit_clients([(x, y), *((each[0], each[1]) for each in rest)])
    torch.testing.assert_close(head.personal(fit, x, y, 0.0).weights, fit.weights, atol=1e-3, rtol=1e-3)
    alone = fb.BayesianHead(3, head.likelihood, fit.prior_precision**-0.5, head.inference)
    found, expected = head.personal(fit, x, y, 1.0), alone.fit_clients([(x, y)])
    if head.likelihood == "softmax":
        torch.testing.assert_close(found.weights, expected.weights, atol=5e-3, rtol=5e-3)
        torch.testing.assert_close(found.moments(x)[1], expected.moments(x)[1], atol=5e-3, rtol=2e-2)
    else:  # alone it finds a noise of its own
        gram, eye = found.sums.gram, torch.eye(6).double()
        ridge = torch.linalg.solve(gram / fit.noise + fit.prior_precision * eye, head.sums(x, y).moment / fit.noise)
        torch.testing.assert_close(found.weights, ridge.T)


def test_the_mode_is_that_of_the_power_prior():
    """One hot: of the examples, each repeated; softmax: where the others' part is its quadratic."""
    parts = clients(2)
    (x, y, *_), (u, v, *_) = parts
    head = fb.BayesianHead(3, "one_hot")
    fit = head.fit_clients([(x, y), (u, v)])
    own, others = head.sums(x, y), head.sums(u, v)
    found = head.personal(fit, x, y, 0.5)
    torch.testing.assert_close(found.sums.gram, own.gram + others.gram / 2)
    softmax = fb.BayesianHead(3, inference="laplace")
    fit = softmax.fit_clients([(x, y), (u, v)])
    w = softmax.personal(fit, x, y, 0.5).weights.clone().requires_grad_()
    moved = w - fit.weights

    def design(values):
        return torch.cat([values, torch.ones(len(values), 1)], 1)

    def curved(values, labels):
        p = (design(values) @ fit.weights.T).softmax(1)
        z = design(values) @ moved.T
        slope = ((p - F.one_hot(labels, 3)).T @ design(values) * moved).sum()
        return slope + ((p * z.square()).sum() - (p * z).sum(1).square().sum()) / 2

    loss = F.cross_entropy(design(x) @ w.T, y, reduction="sum") + curved(u, v) / 2
    loss = loss + fit.prior_precision / 2 * w.square().sum()
    (slope,) = torch.autograd.grad(loss, w)
    assert float(slope.abs().max()) < 0.02


def test_what_it_cannot_take_is_refused():
    (x, y, *_), _ = clients(2)
    head = fb.BayesianHead(3)
    with pytest.raises(fb.FedBayesError, match="that is done"):
        head.personal(head.fit(head.sums(x, y)), x, y, 0.5)
    fit = head.fit_clients([(x, y)])
    with pytest.raises(fb.FedBayesError, match=r"weight=2"):
        head.personal(fit, x, y, 2)
    with pytest.raises(fb.FedBayesError, match="the client's among them"):
        head.personal(fit, x[:, :2], y, 0.5)
