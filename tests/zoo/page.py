"""Prints docs/what_works.md: ``python -m tests.zoo.page > docs/what_works.md``."""

from __future__ import annotations

from itertools import groupby

from tests.zoo.case import EQUAL, Case
from tests.zoo.cases import CASES

HEAD = """\
# What works, and what is refused

A module trains with `FederatedBayes` as it does with Lightning alone, or it is refused before training with the
reason. Each row below is a test: one client with all data against a plain `fit`, and three clients with unequal
numbers of batches against a loop in which each client has a plain `fit` of its own in every round. The loop's
parameters and the federation's agree to rounding, with each engine (`fusion="weighted_average"`).
Where the vectorized engine is refused, `engine="auto"` takes the sequential one and says why.

## The rule

* *Kept*: what a plain `fit` on the client's own data would do. A client starts with the global model and with
  everything else of the module as it was at the start of the round.
* *Refused*: what would mix clients or cut through a round, and can be seen before training.
* *Said once, by name*: what training changes in the module and every client finds as the last one left it (lists and
  other objects), and what is put back for the next client (numbers, text, tensors, arrays, random generators, buffers
  that are not persistent, `train()` and `eval()`, `requires_grad`). With one client only, nothing is put back.
* *Unknowable*: a count in a global variable or a closure. Before stacking clients, a trial step of two at once is
  compared with a step of each; a difference means the sequential engine.

## Positions in a round

An epoch of the Trainer is a round. Inside it:

| what | its value |
|---|---|
| `batch_idx`, in `training_step` and in hooks | number of the batch in the client's own local epoch |
| `trainer.num_training_batches`, `trainer.is_last_batch` | of the client's own local epoch; not in a stack of clients |
| `trainer.estimated_stepping_batches` | a client's own steps in all rounds; outside of a step, of the largest clients |
| `trainer.global_step`, in `training_step` | steps up to the round, and the client's own in it; not in a stack |
| `trainer.global_step`, in hooks and between rounds | steps of all clients |
| `trainer.current_epoch` | the round, from 0 |
| `limit_train_batches` | of each client's batches in a local epoch |
| `accumulate_grad_batches` | within a client's local epoch, closed at its end |
| `fast_dev_run=n` | one round of two clients with n batches each |
| `on_train_batch_start` returns −1 | the client's local epoch ends |
| hooks of the epoch, of validation and of the fit | once in a round, on the global model: what they do to it holds |
| a scheduler with `interval="epoch"` | steps at the end of the round |
| a scheduler with `interval="step"`, or that the module steps itself | see below |
| the optimizer's other options | each client starts with the round's; what its training changes ends with it |
| torchmetrics in `training_step` | collect over all clients of the round; in a stack, fed after the step |

Learning rates that move in every step, by a scheduler or by a hook: each client begins at the position of the round.
After the round `lr`, `momentum`, `betas` and schedulers stand where the client of most steps has left them, and
`trainer.global_step` in `training_step` and `optimizer_step` has counted such clients of earlier rounds alone. With
clients of 3, 5 and 9 batches:

| client | steps of the schedule in round 1 | in round 2 |
|---|---|---|
| of 3 batches | 0 to 2 | 9 to 11 |
| of 5 batches | 0 to 4 | 9 to 13 |
| of 9 batches | 0 to 8 | 9 to 17 |
"""

WORDS = {True: "as Lightning", False: "refused"}


def row(case: Case) -> str:
    name = case.name.replace("*args", "`*args`").replace("|", "\\|")
    note = ", in distribution" if case.noisy else ", to half precision" if case.tolerance > 1e-3 else ""
    vectorized = WORDS[case.vectorized == EQUAL] + (note if case.vectorized == EQUAL else "")
    return f"| {name} | {WORDS[case.sequential == EQUAL]} | {vectorized} |"


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for group, cases in groupby(CASES, key=lambda case: case.group):
        rows = "\n".join(row(case) for case in cases)
        parts.append(f"## {group}\n\n| case | sequential | vectorized |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
