"""A client's own head: between the federation's and that of the client alone, by a power prior."""

import pytest
import torch
from torch.nn import functional as F

import lightning_fedbayes as fb


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
@pytest.mark.parametrize("large", [False, True])
def test_where_label_functions_differ_a_personal_head_beats_the_global_one(head, large, monkeypatch):
    if large:
        monkeypatch.setattr("lightning_fedbayes.modules.head.head.DENSE", 0)
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
