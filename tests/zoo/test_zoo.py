"""The zoo: every case trains as plain Lightning does, on every engine, or is refused before it trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_fedbayes.errors import FedBayesError
from tests.zoo.case import EQUAL, REFUSED, SIZES, Case, difference, federated, loop_of_plain_fits, plain
from tests.zoo.cases import CASES

IDS = [f"{case.group}: {case.name}" for case in CASES]


def outcome(case: Case, engine: str, expected: str, reference, sizes=SIZES) -> None:
    """Train with ``engine`` and compare."""
    if expected == REFUSED:
        with pytest.raises(FedBayesError) as refusal:
            federated(case, engine, sizes)
        assert "rounds in a row" not in str(refusal.value), "it trained"
        return
    learnt, federation = federated(case, engine, sizes)
    assert [row["failed_clients"] for row in federation.history] == [0.0] * case.rounds
    if not case.noisy or federation.federation.engine.name == "sequential":
        assert difference(learnt, reference) <= case.tolerance


def test_there_are_many_and_each_stands_once():
    assert len(CASES) >= 120
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_one_client_trains_as_plain_lightning_does(case):
    kept = {"federation": {"optimizer_state": "keep", **case.federation}} if case.keeps else {"rounds": 1}
    case = replace(case, **kept)
    reference = plain(case) if case.sequential == EQUAL else {}
    for engine in ("sequential", "auto"):
        outcome(case, engine, case.sequential, reference, (sum(SIZES),))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_three_clients_train_as_a_loop_of_plain_fits_does(case):
    reference = loop_of_plain_fits(case) if EQUAL in (case.sequential, case.vectorized) else {}
    outcome(case, "sequential", case.sequential, reference)
    outcome(case, "vectorized", case.vectorized, reference)
    outcome(case, "auto", case.sequential, reference)
