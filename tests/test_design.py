"""The way of a round."""

import sys
from pathlib import Path

import lightning as L

import lightning_fedbayes as fb
from tests.federations import Plain, federate

FUNCTIONS, FILES = 220, 28
"""Most that a round of federated averaging passes."""
NO_FUNCTIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""Frames of expressions, most of which are none since Python 3.12."""


def test_a_round_of_fedavg_passes_no_more_functions_than_it_did():
    """A ratchet: lower the limits when a way becomes shorter."""
    seen, package = set(), str(Path(fb.__file__).parent)

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name not in NO_FUNCTIONS:
            seen.add(code)

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            sys.setprofile(note if trainer.current_epoch == 1 else None)

    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="fedavg", engine="sequential")
    try:
        federate(Plain(), made, rounds=3, callbacks=[Watch()])
    finally:
        sys.setprofile(None)
    assert len(seen) <= FUNCTIONS
    assert len({code.co_filename for code in seen}) <= FILES
