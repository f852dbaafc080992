"""Metrics that training_step feeds: both engines log the same, or the vectorized one is refused with the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Metric, MetricCollection, classification
from torchmetrics.aggregation import MaxMetric, MeanMetric, SumMetric
from torchmetrics.wrappers import Running

import lightning_fedbayes as fb
from tests.clients.vectorized.modules import assert_goes_one_by_one
from tests.federations import CLASSES, Plain, federate

PARTITION = fb.SizesPartition((1, 7, 30, 8, 44))
EPOCH = {"on_step": False, "on_epoch": True}


class Fed(Plain):
    """Feeds ``self.metric`` by a function of (module, logits, labels, loss)."""

    def __init__(self, metric, feed, at_end=None):
        super().__init__(lr=0.5)  # it soon tells the classes apart
        self.metric, self.feed, self.at_end = metric, feed, at_end

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        changed = self.feed(self, logits, batch[1], loss)
        return loss if changed is None else changed

    def on_train_epoch_end(self):
        if self.at_end is not None:
            self.at_end(self)


def accuracy() -> classification.MulticlassAccuracy:
    return classification.MulticlassAccuracy(CLASSES, average="micro")


def collection() -> MetricCollection:
    precision = classification.MulticlassPrecision(CLASSES, average="micro")
    metrics = {"f1": classification.MulticlassF1Score(CLASSES), "accuracy": accuracy(), "precision": precision}
    return MetricCollection(metrics, prefix="train/")


def logged(feeds):
    """What feeds its metric by a function of (metric, logits, labels, loss), and logs it."""

    def step(module, logits, labels, loss):
        feeds(module.metric, logits, labels, loss)
        module.log("value", module.metric, **EPOCH)

    return step


def writes_afterwards(module, logits, labels, loss):
    updates_and_logs(module, logits, labels, loss)
    logits.detach().zero_()


def logs_what_it_returns(module, logits, labels, loss):
    module.log("value", module.metric(logits, labels), **EPOCH)


def logs_members(module, logits, labels, loss):
    module.metric(logits, labels)
    module.log_dict(module.metric, **EPOCH)


updates_and_logs = logged(lambda metric, z, y, loss: metric.update(z, target=y))
of_the_loss = logged(lambda metric, z, y, loss: metric(loss))


def logs_by_class(module, logits, labels, loss):
    assert isinstance(module.metric, nn.Module)
    if isinstance(module.metric, MetricCollection):
        module.metric.update(logits, labels)
        for name, each in module.metric.items(keep_base=True):
            module.log(f"own/{name}", each, **EPOCH)


def only_updates(module, logits, labels, loss):
    module.metric.update(logits, labels)


def computes_and_resets(module):
    computed = module.metric.compute()
    module.log_dict(computed if isinstance(computed, dict) else {"value": computed.float().flatten()[0]})
    module.metric.reset()


def in_a_dict(module, logits, labels, loss):
    module.metric["of_training"](logits, labels)
    module.log("value", module.metric["of_training"], **EPOCH)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_training = accuracy()

    def __getitem__(self, name):
        return getattr(self, name)


SAME = {
    "called": (accuracy, logged(lambda metric, z, y, loss: metric(z, y))),
    "updated": (accuracy, updates_and_logs),
    "written into afterwards": (accuracy, writes_afterwards),
    "its value": (accuracy, logs_what_it_returns),
    "mean": (MeanMetric, of_the_loss),
    "sum": (SumMetric, of_the_loss),
    "maximum": (MaxMetric, of_the_loss),
    "weighted mean": (MeanMetric, logged(lambda metric, z, y, loss: metric.update(loss, len(y)))),
    "twice in a step": (MeanMetric, logged(lambda metric, z, y, loss: [metric.update(k * loss) for k in (1, 2)])),
    "states that grow": (lambda: classification.MulticlassAUROC(CLASSES), updates_and_logs),
    "collection": (collection, logs_members),
    "by class": (collection, logs_by_class),
    "values of a collection": (collection, lambda module, z, y, loss: module.log_dict(module.metric(z, y), **EPOCH)),
    "end of the epoch": (accuracy, only_updates, computes_and_resets),
    "a matrix": (lambda: classification.MulticlassConfusionMatrix(CLASSES), only_updates, computes_and_resets),
    "collection, end of the epoch": (collection, only_updates, computes_and_resets),
    "module of metrics": (lambda: nn.ModuleDict({"of_training": accuracy()}), in_a_dict),
    "in a layer": (Deep, in_a_dict),
}


def run(engine, metric, *functions, rounds=2, partition=PARTITION, **options):
    """The module, the federation and what the Trainer has logged."""
    module, federation = Fed(metric(), *functions), fb.FederatedBayes(partition, engine=engine)
    made = federate(module, federation, rounds, **options)
    assert federation.federation.engine.name == engine
    return module, federation, {name: float(value) for name, value in made.callback_metrics.items()}


@pytest.mark.slow
def test_both_engines_log_the_same():
    for name, case in SAME.items():
        (one, first, values), (other, second, also) = (run(engine, *case) for engine in ("sequential", "vectorized"))
        torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=1e-6, atol=1e-6)
        own = [key for key in values if not key.startswith("federation/") and key != "round"]
        assert own, name
        assert values.keys() == also.keys(), name
        assert [also[key] for key in own] == pytest.approx([values[key] for key in own], rel=1e-6), name
        for before, after in zip(first.history, second.history, strict=True):
            assert before.keys() == after.keys(), name
            assert after == pytest.approx({**before, "seconds": after["seconds"]}, rel=1e-5, abs=1e-7), name


class Discounted(Metric):
    def __init__(self, reduction):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, value):
        self.total = 0.9 * self.total + value.detach()

    def compute(self):
        return self.total


class Remembers(Discounted):
    def update(self, value):
        self.total, self.last = self.total + value.detach(), value.detach()


class Wrapped(Discounted):
    def __init__(self):
        super().__init__("sum")
        self.hidden = nn.Parameter(torch.zeros(2))


def hooked() -> MeanMetric:
    made = MeanMetric()
    made.register_forward_hook(lambda *_: None)
    return made


def in_step(function):
    def feed(module, logits, labels, loss):
        module.metric.update(logits, labels)
        return function(module, logits, labels, loss)

    return feed


REFUSED = {
    "mean of states": (lambda: Discounted("mean"), of_the_loss, "self.metric may depend on the order"),
    "no reduction": (lambda: Discounted(None), of_the_loss, "self.metric may depend on the order"),
    "attribute": (lambda: Remembers("sum"), of_the_loss, "changes its attribute last, which is no state"),
    "wrapper": (lambda: Running(MeanMetric(), 3), of_the_loss, "is made of other modules"),
    "parameters": (Wrapped, of_the_loss, "is made of other modules"),
    "hook": (hooked, of_the_loss, "has a hook"),
    "compute": (accuracy, in_step(lambda m, z, y, loss: m.log("x", m.metric.compute())), "uses self.metric.compute"),
    "reset": (accuracy, in_step(lambda m, z, y, loss: m.metric.reset()), "uses self.metric.reset"),
    "state": (accuracy, in_step(lambda m, z, y, loss: m.log("x", m.metric.tp.sum().float())), "uses self.metric.tp"),
    "items": (accuracy, in_step(lambda m, z, y, loss: m.metric.items()), "uses self.metric.items"),
    "value in the loss": (accuracy, lambda m, z, y, loss: loss * m.metric(z, y), "computes with what self.metric"),
    "value in a branch": (accuracy, lambda m, z, y, loss: loss if m.metric(z, y) else 2 * loss, "computes with what"),
    "value by torch": (accuracy, lambda m, z, y, loss: torch.maximum(loss, m.metric(z, y)), "not BatchValue"),
    "value returned": (accuracy, lambda m, z, y, loss: {"loss": loss, "x": m.metric(z, y)}, "computes with what"),
    "a number": (accuracy, lambda m, z, y, loss: m.log("x", float(m.metric(z, y))), "computes with what"),
    "several values": (
        lambda: classification.MulticlassConfusionMatrix(CLASSES),
        logs_what_it_returns,
        "cannot run for several",
    ),
    "in a list": (lambda: [Discounted("sum")], lambda m, z, y, loss: m.metric[0].update(loss), "changes self.metric."),
}
FAIL_ALONE = {"items": "1 round in a row.*has no attribute 'items'", "several values": None}
"""Cases whose clients fail one by one, too → with which error; None: which no engine takes."""


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_differ_is_refused_and_auto_trains_as_sequential_does(case):
    metric, feed, reason = REFUSED[case]
    assert_goes_one_by_one(lambda: Fed(metric(), feed), PARTITION, reason, FAIL_ALONE.get(case, ""))
