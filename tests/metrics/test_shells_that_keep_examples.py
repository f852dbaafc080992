"""Shells that keep all examples: batches, resets, forward and merged processes give the value of the pure function."""

import pickle

import pytest
import torch
from torchmetrics import MetricCollection

from lightning_fedbayes import metrics as M
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F

BATCH = 60
generator = torch.Generator().manual_seed(0)
UNCERTAINTY = torch.randint(8, (BATCH,), generator=generator).float()
OUT = torch.rand(BATCH, generator=generator) < 0.4
RISK = torch.randint(8, (BATCH,), generator=generator).float()
TIME = torch.randint(9, (BATCH,), generator=generator).float()
EVENT = torch.rand(BATCH, generator=generator) < 0.6


def sides(uncertainty, out):
    return uncertainty[~out], uncertainty[out]


CASES = {
    "auroc": (M.OutOfDistributionAUROC, (UNCERTAINTY, OUT), lambda *a: F.ood_auroc(*sides(*a))),
    "fpr": (lambda: M.OutOfDistributionFPR(recall=0.7), (UNCERTAINTY, OUT), lambda *a: F.ood_fpr(*sides(*a), 0.7)),
    "concordance": (M.ConcordanceIndex, (RISK, TIME, EVENT), F.concordance_index),
}
every_metric = pytest.mark.parametrize(("build", "inputs", "function"), CASES.values(), ids=CASES)


def part(inputs, *ends):
    return tuple(values[slice(*ends)] for values in inputs)


@every_metric
def test_batches_forward_and_resets(build, inputs, function):
    metric = build()
    for ends in ((0, 1), (1, 40)):
        metric.update(*part(inputs, *ends))
    batch = part(inputs, 40, BATCH)
    assert metric(*batch) == function(*batch)
    assert metric.compute() == function(*inputs)
    assert pickle.loads(pickle.dumps(metric)).compute() == function(*inputs)
    metric.reset()
    metric.update(*part(inputs, 0, 40))
    assert metric.compute() == function(*part(inputs, 0, 40))


@every_metric
def test_processes_merge(build, inputs, function):
    first, second = build(), build()
    first.update(*part(inputs, 0, 25))
    second.update(*part(inputs, 25, BATCH))
    first.merge_state(second)
    assert first.compute() == function(*inputs)


def test_one_side_at_a_time_and_in_one_collection():
    collection = MetricCollection(
        {
            "auroc": M.OutOfDistributionAUROC(),
            "fpr": M.OutOfDistributionFPR(),
            "fpr_half": M.OutOfDistributionFPR(recall=0.5),
        }
    )
    inside, outside = sides(UNCERTAINTY, OUT)
    collection.update(inside, False)
    assert all(value.isnan() for value in collection.compute().values())
    collection.update(outside, True)
    assert collection.compute() == {
        "auroc": F.ood_auroc(inside, outside),
        "fpr": F.ood_fpr(inside, outside),
        "fpr_half": F.ood_fpr(inside, outside, 0.5),
    }


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: M.OutOfDistributionAUROC().update(UNCERTAINTY, OUT.long()), "out is of torch.int64: give torch.bool"),
        (lambda: M.OutOfDistributionAUROC().update(UNCERTAINTY, OUT[1:]), "shapes differ"),
        (lambda: M.OutOfDistributionAUROC().update(UNCERTAINTY * torch.nan, OUT), "uncertainty is NaN at 60 of 60"),
        (lambda: M.OutOfDistributionFPR(recall=0), "recall=0"),
        (lambda: M.ConcordanceIndex().update(RISK, EVENT, TIME), "swapped with time"),
        (lambda: M.ConcordanceIndex()(RISK * torch.nan, TIME, EVENT), "risk is NaN"),
    ],
)
def test_errors(call, says):
    with pytest.raises(FedBayesError, match=says):
        call()
