"""Harrell's c against all pairs, lifelines, and what theory knows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.metrics import functional as F
from tests.refusals import refusals

TIME = torch.tensor([5.0, 8, 8, 12, 3, 8, 20, 15, 12, 1, 9, 20])
EVENT = torch.tensor([1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1])
RISK = torch.tensor([1.5, 0.3, 0.3, -0.2, 2.0, 0.9, -1.0, -0.4, 0.3, 1.5, 1.1, -1.0])
LIFELINES = 0.9019607843137255
"""lifelines 0.30.3: ``concordance_index(TIME, -RISK, EVENT)``."""
examples = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 5), st.booleans()), min_size=1, max_size=25)


def columns(rows):
    return tuple(torch.tensor(column) for column in zip(*rows))


def of_all_pairs(risk, time, event):
    """The definition, pair by pair."""
    score = pairs = 0
    for i in range(len(risk)):
        for j in range(len(risk)):
            later = time[i] < time[j] or (time[i] == time[j] and not event[j])
            if event[i] and later:
                pairs += 1
                score += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return score / pairs if pairs else math.nan


@given(examples)
@settings(deadline=None)
def test_index_is_that_of_all_pairs(rows):
    expected = of_all_pairs(*zip(*rows))
    assert F.concordance_index(*columns(rows)).item() == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_index_is_that_of_lifelines():
    assert F.concordance_index(RISK, TIME, EVENT).item() == pytest.approx(LIFELINES, abs=1e-6)


@given(examples)
@settings(deadline=None)
def test_what_does_not_matter(rows):
    """Monotone maps of risk and time, and the order of examples; the opposite risk has the opposite index."""
    risk, time, event = columns(rows)
    index = F.concordance_index(risk, time, event)
    for same in (
        F.concordance_index(risk.double().exp(), 2 * time, event),
        F.concordance_index(risk.flip(0), time.flip(0), event.flip(0).float()),
        1 - F.concordance_index(-risk, time, event),
    ):
        torch.testing.assert_close(same, index, equal_nan=True)


def test_extremes_and_ties_in_time():
    time = torch.arange(6.0)
    assert F.concordance_index(-time, time, torch.ones(6)) == 1
    assert F.concordance_index(time, time, torch.ones(6)) == 0
    assert F.concordance_index(torch.zeros(6), time, torch.ones(6)) == 0.5
    risk, together = torch.tensor([2.0, 1.0]), torch.ones(2)
    assert F.concordance_index(risk, together, torch.tensor([1, 1])).isnan()  # which was first is not known
    assert F.concordance_index(risk, together, torch.tensor([1, 0])) == 1  # the censored one outlived the other
    assert F.concordance_index(risk, together, torch.tensor([0, 1])) == 0
    assert F.concordance_index(risk, together, torch.tensor([0, 0])).isnan()


test_errors = refusals(
    FedBayesError,
    (RISK[:-1], TIME, EVENT, r"shapes differ: risk \(11,\), time \(12,\)"),
    (RISK.unsqueeze(1), TIME.unsqueeze(1), EVENT.unsqueeze(1), "a vector is needed"),
    (RISK[:0], TIME[:0], EVENT[:0], "no entries.*at least one"),
    (RISK, -TIME, EVENT, "time holds -5 among 12 of 12"),
    (RISK, TIME / torch.arange(12), EVENT, "time holds inf among 1 of 12"),
    (RISK, TIME * torch.nan, EVENT, "time holds nan among 12 of 12"),
    (RISK, EVENT, TIME, "event holds 5 among 11 of 12.*swapped with time"),
    (RISK * torch.nan, TIME, EVENT, "risk is NaN at 12 of 12"),
    (RISK, TIME, [1] * 12, "event=.*give a torch.Tensor"),
    call=F.concordance_index,
)
