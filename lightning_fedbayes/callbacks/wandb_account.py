"""Weights & Biases without an account: log offline, ask nothing."""

from __future__ import annotations

import os
from functools import cache

from lightning.pytorch.utilities import rank_zero_info


@cache
def go_offline_without_account() -> None:
    """Set ``WANDB_MODE=offline`` unless it is set already or an account is configured.

    Without an account ``wandb.init`` asks on a terminal and fails elsewhere. Called when a federation is described,
    since the Trainer starts its loggers before any hook of a callback.
    """
    if "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ:
        return
    import wandb

    if not wandb.login(prompt=False):
        os.environ["WANDB_MODE"] = "offline"
        rank_zero_info("Weights & Biases: no account is configured, so a WandbLogger logs offline (WANDB_MODE=offline).")
