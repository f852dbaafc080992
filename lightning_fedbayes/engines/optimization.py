"""One optimizer step inside a Trainer: guarded, and without the hooks that nobody uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

Step = Callable[..., dict[str, Any]]

STEP_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
)
"""What may happen in a step besides ``training_step``, backward and the optimizer's step."""


def step_is_plain(trainer: L.Trainer) -> bool:
    """Whether a step is nothing but ``training_step``, backward and the optimizer's step.

    True if neither the module nor a callback overrides one of :data:`STEP_HOOKS`, in full precision, on one device,
    without gradient clipping, profiling or anomaly detection. Then :func:`plain_step` does the same as the Trainer in
    half the time (the Trainer's own step calls 14 hooks).
    """
    module = trainer.lightning_module
    return (
        type(trainer.strategy) is SingleDeviceStrategy
        and type(trainer.precision_plugin) is Precision
        and isinstance(trainer.profiler, PassThroughProfiler)
        and not trainer.gradient_clip_val
        and not getattr(trainer, "_detect_anomaly", False)
        and not any(_needs_closure(optimizer) for optimizer in trainer.optimizers)
        and not any(is_overridden(hook, module) for hook in STEP_HOOKS)
        and not any(
            is_overridden(hook, callback)
            for callback in trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
            for hook in STEP_HOOKS
            if hasattr(L.Callback, hook)
        )
    )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def plain_step(trainer: L.Trainer) -> Step:
    """The step of :func:`step_is_plain`, to be called as Lightning calls its automatic optimization."""
    module = trainer.lightning_module
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    attributes = module.__dict__

    def run(optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        before = attributes.get("_current_fx_name")
        attributes["_current_fx_name"] = "training_step"  # what self.log asks; nn.Module's own setattr costs 1 µs
        try:
            output = module.training_step(*kwargs.values())
        finally:
            attributes["_current_fx_name"] = before
        if output is None:
            return {}
        loss, extra = _loss_and_rest(output)
        progress.increment_ready()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.increment_completed()
        return {"loss": loss.detach(), **extra}

    return run


def _loss_and_rest(output: Tensor | Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Any]]:
    """The loss that ``training_step`` returned, and what else it returned."""
    if isinstance(output, Tensor):
        return output, {}
    if not isinstance(output, Mapping) or "loss" not in output:
        raise MisconfigurationException("`training_step` must return a Tensor, a dict with the key 'loss', or None")
    return output["loss"], {key: value for key, value in output.items() if key != "loss"}
