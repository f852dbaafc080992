"""Dicts, objects and longer tuples as batches: predictions, scores, calibration and Laplace are those of pairs."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, around, blobs, federate, network, trainer

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


class Dicts(Plain):
    def forward(self, batch):
        return self.net(batch["x"])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch), batch["labels"])

    def validation_step(self, batch, batch_idx):
        return None


class Keywords(Dicts):
    def forward(self, x, mask=None):
        return SimpleNamespace(logits=self.net(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["x"]).logits, batch["labels"])


class Objects(Dicts):
    """Takes an object that holds its targets, as a graph does."""

    def forward(self, batch):
        return self.net(batch.x), "more"

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch)[0], batch.y)


class Steps(Dicts):
    forward = fb.PosteriorPredictive.__mro__[1].forward

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.predict_step(batch, 0), batch["labels"])


class Pairs(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch, batch_idx):
        return None


class Odd(Dicts):
    """Takes batches whose form says nothing, and says by ``unpack`` what is what."""

    def unpack(self, batch):
        return batch["x"], batch["answer"]

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["x"]), batch["answer"])


def dicts(examples):
    x, labels = default_collate(examples)
    return {"x": x, "mask": torch.ones(len(x)), "labels": labels}


def pairs(examples):
    return default_collate(examples)  # whose it is cannot be told, as of the others


def objects(examples):
    x, y = default_collate(examples)
    return SimpleNamespace(x=x, y=y)


def longer(examples):
    return [*default_collate(examples), torch.arange(len(examples))]


def odd(examples):
    x, y = default_collate(examples)
    return {"x": x, "answer": y, "names": ["a"] * len(x)}


FORMS = {
    "dicts": (Dicts, dicts),
    "keywords": (Keywords, dicts),
    "objects": (Objects, objects),
    "steps": (Steps, dicts),
    "longer": (Pairs, longer),
    "odd": (Odd, odd),
}


class Examples(list):
    """The same data, of any form that a collate function makes."""


def batches(collate=None, count=40, shuffle=False):
    return DataLoader(Examples(blobs(count)), 8, collate_fn=collate, shuffle=shuffle)


def clients(collate=None):
    data = {"north": Examples(blobs(20, 1)), "south": Examples(blobs(12, 2))}
    return DataLoader(fb.ClientDatasets(data), 8, collate_fn=collate)


@cache
def trained():
    module = Pairs(lr=0.3)
    trainer(5).fit(module, batches(count=90, shuffle=True))
    return module.net


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("predictive", ["draws", "linearised"])
def test_predictions_and_scores_are_those_of_pairs(form, predictive):
    found = []
    for module, collate in ((Pairs(), pairs), (FORMS[form][0](), FORMS[form][1])):
        module.net.load_state_dict(trained().state_dict())
        torch.manual_seed(0)
        made = fb.PosteriorPredictive(module, around(module), 5, predictive=predictive)
        report, sets = fb.UncertaintyReport(), fb.FederatedConformal(0.8)
        scaling = fb.FederatedTemperature()
        callbacks = [report, scaling, sets, fb.ClientReport()]
        scores = trainer(1, callbacks).validate(made, clients(collate), verbose=False)[0]
        test = trainer(1).test(made, batches(collate), verbose=False)[0]
        predicted = trainer(1).predict(made, batches(collate))
        found.append(({**scores, **test}, torch.cat([each.probs for each in predicted]), scaling.temperature))
    (ours, probs, temperature), (scores, others, same) = found
    assert ours.keys() == scores.keys()
    assert {"val/accuracy", "val/nll", "val/clients/nll", "val/scaled/temperature", "test/nll"} <= ours.keys()
    for name, value in ours.items():
        assert scores[name] == pytest.approx(value, abs=1e-5), name
    torch.testing.assert_close(others, probs, **TOLERANCE)
    assert same == pytest.approx(temperature, rel=1e-5)


@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_laplace_is_that_of_pairs(form, curvature):
    kind, collate = FORMS[form]
    own, laplace = kind(), fb.Laplace(curvature=curvature)
    expected = fb.Laplace(curvature=curvature).site(Pairs(), batches())
    for name, value in laplace.site(own, batches(collate)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    found, wanted = (
        fb.KroneckerLaplace(each).site(module, batches(c))
        for each, module, c in ((laplace, own, collate), (fb.Laplace(curvature=curvature), Pairs(), None))
    )
    assert found.num_examples == wanted.num_examples == 40
    for part in ("inputs", "outputs"):
        for name, value in getattr(found, part).items():
            torch.testing.assert_close(value, getattr(wanted, part)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_federation_by_laplace_is_that_of_pairs(form, engine):
    found = []
    for module, collate in ((Pairs(), pairs), (FORMS[form][0](), FORMS[form][1])):
        if form in ("objects", "odd") and engine == "vectorized":
            engine = "auto"  # only tensors can be stacked
        federation = fb.FederatedBayes(fb.IIDPartition(3), engine=engine, posterior=fb.Laplace(), fusion="sites")
        report = fb.UncertaintyReport(samples=4)
        made = federate(module, federation, 2, batches(collate), clients(collate), callbacks=[report])
        found.append((federation.posterior, made.callback_metrics))
    (ours, scores), (other, same) = found
    torch.testing.assert_close(dict(other.mean), dict(ours.mean), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(other.variance), dict(ours.variance), rtol=1e-4, atol=1e-6)
    for name in ("val/draws/retained_area_entropy", "val/draws/clients/nll"):
        torch.testing.assert_close(same[name], scores[name], rtol=1e-4, atol=1e-4)


def test_a_function_says_what_a_batch_holds():
    module = network()
    unpack = lambda batch: (batch["x"], batch["answer"])  # noqa: E731
    batch = next(iter(batches(odd)))
    made = fb.PosteriorPredictive(module, around(module), 5, unpack=unpack)
    torch.manual_seed(0)
    found = made.validation_step(batch)
    torch.manual_seed(0)
    wanted = fb.PosteriorPredictive(module, around(module), 5).validation_step((batch["x"], batch["answer"]))
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    assert made.predict_step(batch).probs.shape == (8, 3)
    with pytest.raises(fb.FedBayesError, match="a batch is a dict with the keys 'x', 'answer', 'names', and not"):
        fb.PosteriorPredictive(module, around(module)).validation_step(batch)
    expected = fb.Laplace().site(module, [(batch["x"], batch["answer"])])
    for name, value in fb.Laplace(unpack=unpack).site(module, [batch]).items():
        torch.testing.assert_close(value, expected[name], **TOLERANCE)
    with pytest.raises(fb.FedBayesError, match="unpack='labels': give a function"):
        fb.PosteriorPredictive(module, unpack="labels")
    with pytest.raises(FederationError, match="unpack='labels': give a function"):
        fb.Laplace(unpack="labels")


def test_what_cannot_be_divided_is_linearised_as_one():
    module = Objects()
    batch, found = next(iter(batches(objects))), fb.Laplace().posterior(module, batches(objects))
    inner = fb.GaussianPosterior(
        *({name.removeprefix("net."): value for name, value in part.items()} for part in (found.mean, found.variance)),
        linearised=True,
    )
    ours = fb.PosteriorPredictive(module, found)._linearised(batch)
    wanted = fb.PosteriorPredictive(module.net, inner)._linearised(batch.x)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        inside = fb.PosteriorPredictive(module, found)._linearised(SimpleNamespace(x=batch.x.clone()))
    torch.testing.assert_close(inside, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(FederationError, match="give as many of both"):
        fb.Laplace().posterior(module, [SimpleNamespace(x=batch.x, y=batch.y[:3])])
