"""The zoo: every case trains as plain Lightning does, on every engine, or is refused before it trains."""

import logging
from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FedBayesError
from tests.federations import blobs, trainer
from tests.zoo.case import EQUAL, REFUSED, SIZES, Case, Net, difference, federated, loop_of_plain_fits, plain
from tests.zoo.cases import CASES, Counter, Ema
from tests.zoo.page import PAGE, page

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


def test_the_page_of_the_documentation_is_made_from_them():
    assert PAGE.read_text() == page()


def test_fast_dev_run_is_one_round_of_two_clients_with_one_batch_each():
    federation = fb.FederatedBayes(fb.IIDPartition(5), engine="sequential")
    made = trainer(callbacks=[federation], fast_dev_run=True)
    made.fit(Net(), DataLoader(blobs(), 4))
    assert [row["valid_clients"] for row in federation.history] == [2.0]
    assert made.global_step == 2
    assert made.max_steps == 1


def test_what_is_put_back_and_what_is_shared_is_said_once_by_name(caplog):
    class Both(Counter):
        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch_idx)
            return super().training_step(batch, batch_idx)

    case = Case("", "", Both, callbacks=lambda: [Ema()])
    with caplog.at_level(logging.INFO):
        federated(case, "sequential")
    put_back = [line for line in caplog.messages if "the module's own self.steps: what training changes" in line]
    shared = [line for line in caplog.messages if "Clients share Ema.shadow, self.seen, which" in line]
    assert (len(put_back), len(shared)) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_one_client_trains_as_plain_lightning_does(case):
    kept = {"federation": {"keep": ["optimizer"], **case.federation}} if case.keeps else {"rounds": 1}
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
