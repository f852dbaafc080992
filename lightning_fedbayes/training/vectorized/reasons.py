"""Reasons why a step cannot run for several clients at once, in the words of the user's own code."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType

import lightning as L
from torch import nn
from torchmetrics import Metric

from lightning_fedbayes.errors import CannotVectorize
from lightning_fedbayes.training.snapshot import LIBRARIES

CAUSES = (
    (r"\.item\(\)", "takes a number out of a tensor by .item(): compute with the tensor itself"),
    (r"data-dependent control flow", "decides by the value of a tensor: use torch.where"),
    (r"data pointer|\.numpy\(\)|numpy", "leaves torch by .numpy() or the like: stay in torch"),
    (r"requires_grad_\(\)|torch\.autograd", "takes gradients itself, or switches them on or off"),
    (r"inplace|in-place", "writes into a tensor that clients share: make a new one"),
    (r"escaped from inside", "keeps a tensor of one step for the next where the module does not hold it"),
    (r"saved-tensor hooks", "checkpoints activations, which a stack of clients cannot"),
    (r"aten::(?:lstm|gru|rnn_\w+)\.",
     "runs a recurrent layer with dropout between layers, projections, half precision or a PackedSequence in a stack"),
    (r"not implemented for ([\w:.]+)", r"uses {0}, which torch cannot run for a stack"),
)
"""Pattern in torch's message → what the code does, and what to do instead."""


def explain(error: Exception) -> str:
    """Return in one line what the code does that a stack of clients cannot, in which layer or metric, and where."""
    first = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    text = first
    for pattern, cause in reversed(CAUSES):
        match = re.search(pattern, str(error))
        if match:
            text = cause.format(*(group.rstrip(".") for group in match.groups()))
    return ", ".join(part for part in (text, _owner(error.__traceback__), _line(error)) if part)


def explained(error: Exception) -> Exception:
    """Return ``error``, or a CannotVectorize with the remedy if vmap refuses what it did not meet in the probe."""
    if isinstance(error, RuntimeError) and "vmap" in str(error):
        return CannotVectorize(
            f"training_step can no longer run for several clients at once: {explain(error)}. Use engine='sequential'"
        )
    return error


def _owner(trace: TracebackType | None) -> str:
    """Return the innermost layer or metric in which the error was raised."""
    name = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Metric):
            return f"in the metric {type(owner).__name__}"
        if isinstance(owner, nn.Module) and not isinstance(owner, L.LightningModule):
            name = f"in the layer {type(owner).__name__}"
        trace = trace.tb_next
    return name


def _line(error: Exception) -> str:
    """Return the innermost line that is not of a library; of an installed package only if there is no other."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not set(Path(frame.filename).parts) & {*LIBRARIES}]
    if not own:
        return ""
    here = [frame for frame in own if "site-packages" not in Path(frame.filename).parts]
    last = (here or own)[-1]
    return f"at line {last.lineno} of {Path(last.filename).name} (`{last.line}`)"
