"""The page on the design names the types that a round passes, and no other."""

import sys
from pathlib import Path

import lightning as L

import lightning_fedbayes as fb
from tests.federations import Plain, federate

"""Rooms of the callback and its reports, and of the data set."""
FUNCTIONS, FILES = 341, 35
"""Most that a round of federated averaging passes, comprehensions among them; to become 220 and 28."""


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
