"""The page on the design names the types that a round passes, and no other."""

import gc
import re
import sys
from pathlib import Path

import lightning as L

import lightning_fedbayes as fb
from tests.federations import Plain, federate

PAGE = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
ELSEWHERE = ("callbacks", "metrics", "data")
"""Rooms of the callback and its reports, and of the data set."""
FUNCTIONS, FILES = 348, 38
"""Most that a round of federated averaging passes, comprehensions among them; to become 220 and 28."""


def types_of_a_round():
    """Types of the package with a method that runs while two rounds of federated averaging are trained."""
    seen = set()

    def note(frame, event, _):
        owner = type(frame.f_locals.get("self")) if event == "call" else object
        package, _, room = owner.__module__.partition(".")
        if package == "lightning_fedbayes" and not room.startswith(ELSEWHERE):
            seen.add(owner.__name__)

    gc.collect()  # what other tests have left would be finalised in between
    sys.setprofile(note)
    try:
        federate(Plain(), fb.FederatedBayes(fb.IIDPartition(3), fusion="weighted_average", engine="sequential"), 2)
    finally:
        sys.setprofile(None)
    return seen


def test_the_chain_of_one_round_has_the_types_that_the_page_counts():
    table = re.search(r"^\| 1 \| `__init__`.*?\n\n", PAGE, re.MULTILINE | re.DOTALL).group()
    named = set(re.findall(r"`(\w+)`", " ".join(row.rsplit("|", 2)[1] for row in table.strip().splitlines())))
    beside = re.search(r"^Beside them, .*?\.\n\n", PAGE, re.MULTILINE | re.DOTALL).group()
    helpers = set(re.findall(r"`(\w+)`", beside))
    assert named | helpers == types_of_a_round()
    assert not named & helpers
    assert f"{len(named)} types besides the callback" in PAGE
    assert f"Beside them, {len(helpers)} types" in PAGE


def test_a_round_of_fedavg_passes_no_more_functions_than_it_did():
    """A ratchet: lower the limits when a way becomes shorter."""
    seen, package = set(), str(Path(fb.__file__).parent)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_code.co_name))

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            sys.setprofile(note if trainer.current_epoch == 1 else None)

    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="fedavg", engine="sequential")
    try:
        federate(Plain(), made, rounds=3, callbacks=[Watch()])
    finally:
        sys.setprofile(None)
    assert len(seen) <= FUNCTIONS
    assert len({file for file, *_ in seen}) <= FILES
