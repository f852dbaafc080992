"""Checks of a Trainer and a module before training starts: options that a federation cannot run with."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_fedbayes.callbacks.trainer.data import held_out_batches
from lightning_fedbayes.callbacks.trainer.strategy import ClientParallelStrategy
from lightning_fedbayes.clients.contents import differing
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.errors import FederationError, listed, shown
from lightning_fedbayes.data.clients import Clients

AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
TUNING = ("LearningRateFinder", "BatchSizeFinder")


def check_trainer(trainer: L.Trainer, module: L.LightningModule, settings: FederationSettings) -> None:
    """Raise FederationError, with all reasons, if ``trainer`` or ``module`` cuts across rounds or mixes clients."""
    reasons = list(_reasons(trainer, module))
    if reasons:
        raise FederationError("this Trainer cannot run a federation:\n" + "\n".join(f"  * {each}" for each in reasons))
    if settings.schedule is not None and isinstance(trainer.strategy, ClientParallelStrategy):
        raise FederationError(
            f"schedule= with strategy='fedbayes', devices={trainer.world_size}: messages are under way for many "
            "rounds, and only the process that has trained their clients has them; use devices=1, or no schedule="
        )


def _reasons(trainer: Any, module: L.LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        why = "the Trainer takes the clients' steps; use automatic optimization"
        yield f"{type(module).__name__}.automatic_optimization is False: {why}"
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        owner = f"{type(module).__name__}.training_step"
        yield f"{owner} takes dataloader_iter, which hides the clients' batches; take batch and batch_idx"
    if any(
        base.__module__.startswith("pytorch_lightning.") for each in trainer.callbacks for base in type(each).__mro__
    ):
        yield "it has callbacks of the package pytorch_lightning; take those of its twin: import lightning as L"
    if trainer.world_size > 1:
        yield from _reasons_of_several_processes(trainer)
    if trainer.overfit_batches:
        yield f"overfit_batches={trainer.overfit_batches} replaces the clients' batches; give a small data set instead"
    if trainer.max_steps != -1 and not trainer.fast_dev_run:
        yield f"max_steps={trainer.max_steps} stops inside a round; use max_epochs, the number of rounds"
    interval = trainer.val_check_interval  # the integer 1 is one batch, not the share 1.0
    if not isinstance(interval, float) or interval != 1.0 or trainer.check_val_every_n_epoch is None:
        why = "validates inside a round, when the module holds one client's model"
        yield f"val_check_interval={interval} {why}; use 1.0, and check_val_every_n_epoch for fewer validations"
    for callback in trainer.callbacks:
        name = next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in (*AVERAGING, *TUNING)), None)
        if name in AVERAGING:
            yield f"{name} averages the weights of different clients; the fusion rule does the averaging"
        elif isinstance(callback, lightning_callbacks.ModelPruning):
            yield "ModelPruning renames the parameters while clients train; prune the global model after the fit"
        elif name in TUNING:
            yield f"{name} trains on part of a round; tune on one client's data without FederatedBayes first"
        elif isinstance(callback, lightning_callbacks.GradientAccumulationScheduler) and callback.scheduling != {0: 1}:
            yield f"{type(callback).__name__} changes from round to round; give accumulate_grad_batches= to the Trainer"


def _reasons_of_several_processes(trainer: Any) -> Iterator[str]:
    if type(trainer.strategy) is DDPStrategy:  # DeepSpeed's is one, too
        return
    if not isinstance(trainer.strategy, ClientParallelStrategy):
        remedy = "use strategy='fedbayes', which shares out the clients, or 'ddp', which splits their batches"
        yield f"devices={trainer.world_size}, {type(trainer.strategy).__name__}: it splits the network; {remedy}"
    for callback in trainer.callbacks:
        if isinstance(callback, lightning_callbacks.Timer) and callback._interval == "step":
            yield "a time limit (max_time) that is checked in every step; use Timer(..., interval='epoch')"
        elif isinstance(callback, lightning_callbacks.ModelCheckpoint) and (
            callback._every_n_train_steps or callback._train_time_interval
        ):
            yield "ModelCheckpoint inside a round, when processes are at different steps; use every_n_epochs="


def check_same_number(before: Clients, clients: Clients) -> None:
    """Raise FederationError if reloaded data have another number of clients."""
    if len(before) != len(clients):
        raise FederationError(
            f"the reloaded training data have {len(clients)} clients, and there were {len(before)}: clients cannot be "
            "added or removed during a fit. Use fraction= for clients that are absent"
        )


def is_finished(trainer: L.Trainer, rounds_done: int) -> bool:
    """Return True if no round is left to train."""
    return trainer.max_epochs not in (None, -1) and rounds_done >= trainer.max_epochs


def check_not_finished(trainer: L.Trainer, rounds_done: int) -> None:
    """Raise FederationError if the Trainer would train no round. Lightning would return without a word."""
    if is_finished(trainer, rounds_done):
        done = f"{rounds_done} of max_epochs={trainer.max_epochs} rounds are done"
        raise FederationError(f"this Trainer has finished: {done}. Make a new Trainer, or raise fit_loop.max_epochs")


def check_held_out(trainer: L.Trainer) -> None:
    """Raise FederationError unless every process sees the same validation data, to choose a rule with."""
    if next(held_out_batches(trainer), None) is None:
        remedy = "give trainer.fit a validation loader, or name a fusion rule"
        raise FederationError(f"fusion='auto' chooses a rule on the validation data, and there are none: {remedy}")
    if trainer.world_size > 1 and isinstance(trainer.strategy, DDPStrategy):
        why = "fusion='auto' scores the rules on validation data, of which each process of DDP sees a part"
        raise FederationError(f"{why}; use strategy='fedbayes', or name a rule")


def check_schedulers(trainer: L.Trainer) -> None:
    """Raise FederationError for a scheduler that cannot begin alike for all clients of a round."""
    for config in trainer.lr_scheduler_configs:
        name = type(config.scheduler).__name__
        if config.interval == "step" and config.reduce_on_plateau:
            raise FederationError(f"{name} with interval='step' follows one client's figure; use interval='epoch'")
        if config.interval == "step" and not hasattr(config.scheduler, "load_state_dict"):
            raise FederationError(
                f"{name} with interval='step' cannot go back to where a client begins: give it state_dict and "
                "load_state_dict, or use interval='epoch'"
            )


def check_of_a_federation(checkpoint: Mapping[str, Any], state_key: str) -> None:
    """Raise FederationError if ``checkpoint`` is of a run without this callback: its epochs are no rounds."""
    if checkpoint["global_step"] > 0 and not checkpoint.get("callbacks", {}).get(state_key):
        raise FederationError(
            f"the checkpoint is of a run without {state_key}: its epochs are no rounds of a federation. Start one from "
            "its weights: the module's load_from_checkpoint(path), and trainer.fit without ckpt_path"
        )


def check_same_data(clients: Clients, stored: Tensor) -> None:
    """Raise FederationError if clients have other examples than those of which a checkpoint has ``stored`` digests."""
    others = differing(clients.datasets, stored) if len(stored) == len(clients) else []
    if others:
        whose = listed(shown(clients.names[client]) for client in others)
        raise FederationError(
            f"these are other data than those of the rounds before: the first or the last example of {len(others)} "
            f"clients differs: {whose}. Was the split drawn without a seed? Give the data of the rounds before, or "
            "start a new federation from the checkpoint's weights, with load_from_checkpoint"
        )


def check_same_federation(trainer: Any, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise FederationError if a checkpoint has other clients' data or local parameters. Print other changes."""
    names = ("seed", "clients") if trainer.reload_dataloaders_every_n_epochs else ("seed", "client_sizes")
    names = (*names, "privacy", "local_parameters", "posterior", "schedule")

    def changes(names: Iterable[str]) -> str:
        differ = [name for name in names if stored.get(name) != settings.get(name)]
        return ", ".join(f"{name}={settings.get(name)} (was {stored.get(name)})" for name in differ)

    if changed := changes(names):
        why = "Resume with the same settings, or start a new federation from its weights, with load_from_checkpoint"
        raise FederationError(f"the checkpoint is of another federation: {changed}. {why}")
    if told := changes(name for name in settings if name not in (*names, "client_sizes")):
        rank_zero_info(f"Resuming with other settings than those of the checkpoint: {told}")
