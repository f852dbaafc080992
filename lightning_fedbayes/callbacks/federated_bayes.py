"""The callback that makes one Trainer a federation: one epoch is one round."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils.data import DataLoader

from lightning_fedbayes.callbacks.checkpoint import Checkpoint, RoundBoundary, close_round
from lightning_fedbayes.callbacks.checks import check_not_finished, check_schedulers, check_trainer
from lightning_fedbayes.callbacks.progress import show_client
from lightning_fedbayes.callbacks.report import FederationReport
from lightning_fedbayes.callbacks.source import install_source, remove_source, set_round_length
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport, bring_report
from lightning_fedbayes.callbacks.wandb_account import go_offline_without_account
from lightning_fedbayes.data.clients import Clients, clients_of
from lightning_fedbayes.engines.loader import FederatedLoader, batching_of
from lightning_fedbayes.engines.plan import RoundPlan, check_batches, plan_round
from lightning_fedbayes.engines.round import ClientUpdate, RoundFusion
from lightning_fedbayes.engines.sequential import ClientFailure, OptimizerPolicy, SequentialEngine
from lightning_fedbayes.engines.state import BufferPolicy, ResidentModel
from lightning_fedbayes.errors import FederationError, FusionError, nearest
from lightning_fedbayes.fusion import FusionRule, get_rule, rule_name
from lightning_fedbayes.layers.kl import set_prior
from lightning_fedbayes.partition import Partition
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.seeding import derive_seed, seed_everything
from lightning_fedbayes.weighting import CohortWeights, check_weighting


class FederatedBayes(L.Callback):
    r"""Federates the training of a LightningModule over clients, inside one Trainer and one ``fit``.

    An epoch is a round. The clients of the round's cohort train one after another from the global posterior, each for
    ``local_epochs`` passes over its own data; their posteriors are fused, and the module holds the fused posterior
    when validation, checkpoints, early stopping and epoch-wise schedulers have their turn. Any LightningModule with
    automatic optimization will do: parameters of Bayesian layers are Gaussian, all others point masses.

    ::

        Trainer(max_epochs=50, callbacks=[FederatedBayes(DirichletPartition(clients=10, alpha=0.5))])

    Every random draw comes from ``seed``, the round and the client: results depend neither on workers nor on
    interruptions. A client that raises, or sends what is not finite, is left out of its round.

    Args:
        partition: how the training examples are dealt out to clients. None: the training data set is a
            :class:`~lightning_fedbayes.ClientDatasets` (or ``ConcatDataset``) with one part per client.
        local_epochs: passes over a client's data per round, E.
        fraction: share of the clients that take part in a round, C in (0, 1], drawn anew in every round.
        fusion: name of a fusion rule (:func:`~lightning_fedbayes.available_fusions`) or a rule object.
        weighting: how much each client counts: "equal", "train_size", "max_discrepancy", "distance", their "_l2"
            forms, or a function from a list of :class:`~lightning_fedbayes.weighting.ClientFacts` to weights.
        engine: "sequential": clients train one after another. "auto" picks the fastest engine that can run the
            module; at present that is this one.
        prior: "fixed": the layers' own priors in every round. "global": the prior of a round is the global posterior
            that it starts from, as ``dwc`` wants it.
        optimizer_state: "reset" in every round, or "keep" one per client from round to round.
        buffers: "average" floating and integer buffers (BatchNorm's statistics) with the client weights; "local":
            every client keeps its own, and the global model gets the average; "frozen": they never change.
        local_parameters: patterns (``fnmatch``, e.g. ``"head.*"``) of parameters and buffers that never leave a
            client. In the global model they keep their initial value.
        min_clients: fewer valid updates than this leave the global posterior as it was.
        max_failed_rounds: after this many such rounds in a row the run stops with an error.
        seed: where every random draw comes from.

    Attributes:
        posterior: the global posterior after the last round.
        clients: the clients, once ``fit`` has begun.
        history: one dict of figures per finished round, in order.

    Raises:
        FusionError, FederationError, PartitionError: an argument, the Trainer, the module or the data cannot be used;
            before training starts wherever it can be known then.
    """

    def __init__(
        self,
        partition: Partition | None = None,
        *,
        local_epochs: int = 1,
        fraction: float = 1.0,
        fusion: str | FusionRule = "reverse_kl_barycenter",
        weighting: str | CohortWeights = "train_size",
        engine: Literal["auto", "sequential"] = "auto",
        prior: Literal["fixed", "global"] = "fixed",
        optimizer_state: OptimizerPolicy = "reset",
        buffers: BufferPolicy = "average",
        local_parameters: Sequence[str] = (),
        min_clients: int = 1,
        max_failed_rounds: int = 3,
        seed: int = 0,
    ) -> None:
        self.rule = get_rule(fusion)
        check_weighting(weighting)
        _check_at_least("local_epochs", local_epochs, 1)
        _check_at_least("min_clients", min_clients, 1)
        _check_at_least("max_failed_rounds", max_failed_rounds, 1)
        if not 0 < fraction <= 1:
            raise FederationError(f"fraction={fraction}: the share of clients in a round lies in (0, 1]")
        _check_choice("engine", engine, ("auto", "sequential"))
        _check_choice("prior", prior, ("fixed", "global"))
        _check_choice("optimizer_state", optimizer_state, ("reset", "keep"))
        _check_choice("buffers", buffers, ("average", "local", "frozen"))
        if isinstance(local_parameters, str):
            local_parameters = (local_parameters,)
        self.partition = partition
        self.local_epochs = local_epochs
        self.fraction = fraction
        self.fusion = fusion
        self.weighting = weighting
        self.engine_name = engine
        self.prior = prior
        self.optimizer_state: OptimizerPolicy = optimizer_state
        self.buffers: BufferPolicy = buffers
        self.local_parameters = tuple(local_parameters)
        self.min_clients = min_clients
        self.max_failed_rounds = max_failed_rounds
        self.seed = seed
        go_offline_without_account()
        self.clients: Clients | None = None
        self.history: list[dict[str, float]] = []
        self._posterior: GaussianPosterior | None = None
        self._restored: dict[str, Any] | None = None
        self._failed_rounds = 0
        self._plan: RoundPlan | None = None
        self._loader: FederatedLoader | None = None
        self._engine: SequentialEngine | None = None
        self._fusion: RoundFusion | None = None
        self._boundary: RoundBoundary | None = None
        self._stage: Literal["between", "training", "fused", "abandoned"] = "between"
        self._report = FederationReport()
        self._uncertainty = UncertaintyReport()

    @property
    def posterior(self) -> GaussianPosterior:
        """The global posterior after the last round."""
        if self._posterior is None:
            raise FederationError("there is no global posterior yet: call trainer.fit first")
        return self._posterior

    def settings(self) -> dict[str, Any]:
        """The federation's settings, as they are logged."""
        weighting = self.weighting if isinstance(self.weighting, str) else getattr(self.weighting, "__name__", "custom")
        return {
            "partition": repr(self.partition),
            "clients": len(self.clients) if self.clients is not None else None,
            "local_epochs": self.local_epochs,
            "fraction": self.fraction,
            "fusion": rule_name(self.fusion),
            "weighting": weighting if self.rule.uses_weights else "none",
            "engine": "sequential",
            "prior": self.prior,
            "optimizer_state": self.optimizer_state,
            "buffers": self.buffers,
            "local_parameters": list(self.local_parameters),
            "min_clients": self.min_clients,
            "seed": self.seed,
        }

    # -- before training -----------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the Trainer and put the clients between it and its training loader."""
        if stage != "fit":
            return
        check_trainer(trainer, pl_module)
        if trainer.current_epoch == 0:
            self._forget()
        self._stage = "between"
        self._loader = None
        self._uncertainty = bring_report(trainer, beside=self)
        install_source(trainer, lambda loader: self._federate(trainer, loader))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_last is None:
                callback.save_last = "link"  # so that ckpt_path="last" finds the last round
        # epoch-wise figures are logged whatever the number of batches
        warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to train zero rounds in silence."""
        rounds_done = trainer.current_epoch if self._restored is None else self._restored["rounds"]
        check_not_finished(trainer, rounds_done)
        self._guard_checkpoints(trainer, pl_module)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find mistakes before anything runs."""
        self._prepare(trainer)

    def _federate(self, trainer: L.Trainer, loader: Any) -> FederatedLoader:
        """The federation's loader for the user's training ``loader``."""
        reload = trainer.reload_dataloaders_every_n_epochs  # pyright: ignore[reportAttributeAccessIssue]
        if self._loader is None or reload:
            batching = batching_of(loader, local_epochs=self.local_epochs, fraction=self.fraction, seed=self.seed)
            assert isinstance(loader, DataLoader)
            clients = clients_of(loader.dataset, self.partition, self.seed)
            check_batches(clients.names, clients.sizes, batching)
            cohort = len(plan_round(0, clients.sizes, batching).cohort)
            if cohort < self.min_clients:
                raise FederationError(
                    f"min_clients={self.min_clients}, but a round has only {cohort} of {len(clients)} clients "
                    f"(fraction={self.fraction}); every round would fail"
                )
            self.clients = clients
            self._loader = FederatedLoader(
                loader, clients, batching, lambda: plan_round(trainer.current_epoch, clients.sizes, batching)
            )
        return self._loader

    def _prepare(self, trainer: L.Trainer) -> None:
        """Check what can only be known once optimizers and loaders exist."""
        check_schedulers(trainer)
        if self._loader is None:
            trainer.fit_loop.setup_data()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the engine, and continue where a checkpoint or an earlier fit left off."""
        self._prepare(trainer)
        assert self.clients is not None
        model = ResidentModel(pl_module, self.local_parameters, self.buffers)
        earlier = self._engine.state_dict() if self._engine is not None else {}
        self._engine = SequentialEngine(
            trainer,
            model,
            self.clients.names,
            self.clients.sizes,
            optimizer_state=self.optimizer_state,
            seed=self.seed,
        )
        if self._restored is not None:
            self._posterior = GaussianPosterior.from_state_dict(self._restored["posterior"]).to(pl_module.device)
            self._engine.load_state_dict(self._restored["clients"])
            self._failed_rounds = self._restored["failed_rounds"]
            self.history = list(self._restored["history"])
            self._report.load_state_dict(self._restored["report"])
            self._restored = None
        elif self._posterior is None:
            self._posterior = model.read_posterior().clone()
        else:
            self._engine.load_state_dict(earlier)
        self._engine.install()
        self._uncertainty.set_clients(self.clients.sizes, self.clients.counts, self.clients.classes)
        self._report.start(trainer, self.settings(), self.clients)

    # -- a round -------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round: choose the cohort and plan its batches."""
        assert self._engine is not None
        assert self.clients is not None
        assert self._loader is not None
        self._boundary = RoundBoundary(trainer)
        self._plan = plan_round(trainer.current_epoch, self.clients.sizes, self._loader.batching)
        set_round_length(trainer, self._plan.num_batches)
        if self.prior == "global":
            set_prior(pl_module, self.posterior)
        buffers = self._engine.model.federated_buffers
        self._fusion = RoundFusion(self.rule, self.weighting, self.posterior, buffers)
        self._failures: dict[int, Exception] = {}
        self._report.begin_round()
        self._round_start = time.perf_counter()
        self._engine.begin_round(self._plan)
        self._stage = "training"

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """At a client's first batch, give it the global posterior."""
        assert self._engine is not None
        assert self._plan is not None
        client = self._engine.begin_batch(batch_idx)
        if client is not None:
            self._client_start = time.perf_counter()
            show_client(trainer, client, len(self._plan.cohort))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """At a client's last batch, take its posterior; at the last client's, fuse."""
        assert self._engine is not None
        assert self._plan is not None
        outcome = self._engine.end_batch(batch_idx, outputs)
        if outcome is None:
            return
        self._admit(outcome)
        if batch_idx + 1 == self._plan.num_batches:
            self._finish_round(pl_module)

    def _admit(self, outcome: ClientUpdate | ClientFailure) -> None:
        """Add a client's update to the round, or leave it out."""
        assert self._fusion is not None
        assert self._engine is not None
        assert self.clients is not None
        error = outcome.error if isinstance(outcome, ClientFailure) else None
        if isinstance(outcome, ClientUpdate):
            try:
                self._fusion.add(outcome)
            except FusionError as refusal:
                error = refusal
        seconds = time.perf_counter() - self._client_start
        if error is not None:
            self._engine.forget(outcome.client)
            self._failures[outcome.client] = error
            assert self._plan is not None
            rank_zero_info(
                f"Round {self._plan.round + 1}: client {self.clients.names[outcome.client]} is left out: "
                f"{type(error).__name__}: {error}"
            )
        self._report.client(outcome, error, seconds)

    def _finish_round(self, pl_module: L.LightningModule) -> None:
        """Fuse the round's updates, or keep the old posterior if there are too few."""
        assert self._engine is not None
        assert self._fusion is not None
        assert self._plan is not None
        success = len(self._fusion) >= self.min_clients
        self._engine.end_round(success=success)
        metrics: dict[str, float] = {}
        if success:
            result = self._fusion.finish()
            self._posterior = result.posterior
            self._engine.model.load_posterior(result.posterior, result.buffers)
            self._failed_rounds = 0
            self._report.weights(result.weights)
            metrics = result.metrics
        else:
            self._engine.model.load_global()
            self._failed_rounds += 1
        self._fusion = None
        self._stage = "fused"
        down = self.posterior.num_bytes
        metrics |= {
            "valid_clients": float(len(self._plan.cohort) - len(self._failures)),
            "failed_clients": float(len(self._failures)),
            "failed_rounds": float(self._failed_rounds),
            "seconds": time.perf_counter() - self._round_start,
            "megabytes_down": down * len(self._plan.cohort) / 1e6,
        }
        self.history.append({"round": float(self._plan.round), **metrics, **self._report.totals()})
        if self._failed_rounds >= self.max_failed_rounds:
            first = next(iter(self._failures.values()))
            raise FederationError(
                f"{self._failed_rounds} rounds in a row had fewer than min_clients={self.min_clients} valid updates; "
                f"the global posterior of the last good round is kept. The first failure of this round was "
                f"{type(first).__name__}: {first}"
            ) from first

    # -- between rounds ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed the Monte Carlo samples of the validation; see that it scores the global posterior."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self._stage == "training":
            self._abandon_round()
        seed_everything(derive_seed(self.seed, "validation", trainer.current_epoch))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round beside the validation's figures: it is their x-axis."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.log("round", float(trainer.current_epoch + 1))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round's figures."""
        if self._stage != "fused":
            return
        assert self._engine is not None
        self._engine.log.end_round()
        pl_module.log("round", float(trainer.current_epoch + 1))
        self._report.log_round(trainer, self.history[-1], self._engine.log.names)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the federation for the loggers; drop a round that was cut short."""
        if self._stage == "training":
            self._abandon_round()
        self._report.finish(trainer, self._uncertainty.client_accuracy)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the module with the global posterior of the last good round: nothing learnt is lost."""
        if self._stage == "training" and self._engine is not None:
            self._abandon_round()
        self._remove(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the Trainer and the module back as they were."""
        if stage == "fit":
            self._remove(trainer, pl_module)

    def _abandon_round(self) -> None:
        """Forget an unfinished round."""
        assert self._engine is not None
        assert self._plan is not None
        self._engine.end_round(success=False)
        self._engine.model.load_global()
        rank_zero_info(
            f"Round {self._plan.round + 1} was cut short; the module holds the global posterior that it started from."
        )
        self._stage = "abandoned"

    def _remove(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        remove_source(trainer)
        pl_module.__dict__.pop("on_save_checkpoint", None)
        if self._engine is not None:
            self._engine.remove()

    def _forget(self) -> None:
        """Start a new federation: what an earlier fit of this callback left is no part of it."""
        self._posterior, self._engine, self._restored = None, None, None
        self._failed_rounds, self.history = 0, []
        self._report = FederationReport()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole federation at the end of the last finished round."""
        if self._posterior is None or self._engine is None:
            return {}
        return {
            "rounds": len(self.history),
            "posterior": self._posterior.state_dict(),
            "clients": self._engine.state_dict(),
            "failed_rounds": self._failed_rounds,
            "history": list(self.history),
            "report": self._report.state_dict(),
            "settings": self.settings(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, once ``fit`` has made the engine."""
        self._restored = state_dict or None

    def _guard_checkpoints(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See to it that every checkpoint of this fit lies between two rounds.

        The module's hook is the last that Lightning calls, and it calls it for weights-only checkpoints too.
        """
        user_hook = pl_module.on_save_checkpoint

        def on_save_checkpoint(checkpoint: Checkpoint) -> None:
            self._between_rounds(checkpoint)
            user_hook(checkpoint)

        pl_module.on_save_checkpoint = on_save_checkpoint

    def _between_rounds(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` hold the global model of the last finished round and nothing of a begun one."""
        if self._plan is None or self._engine is None or self._stage == "between":
            return
        if self._stage == "fused":
            close_round(checkpoint, self._plan.round + 1)
            return
        assert self._boundary is not None
        self._boundary.apply(checkpoint, self._plan.round)
        model = self._engine.model
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **model.global_parameters, **model.global_buffers}


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise FederationError(f"{name}={value}: give at least {least}")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise FederationError(f"{name}='{value}': {nearest(str(value), choices)}")
