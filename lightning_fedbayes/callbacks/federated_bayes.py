"""The callback that makes one Trainer a federation: one epoch is one round."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_fedbayes.adversaries import Attack, assign
from lightning_fedbayes.callbacks.checkpoint import (
    Checkpoint,
    RoundBoundary,
    close_round,
    guard_weights_only,
    pending_plateau,
    step_plateau,
    unguard_weights_only,
)
from lightning_fedbayes.callbacks.checks import (
    attacks_of,
    check_at_least,
    check_attacks,
    check_cohort,
    check_fraction,
    check_not_finished,
    check_not_split,
    check_partition,
    check_privacy,
    check_same_federation,
    check_same_number,
    check_schedulers,
    check_trainer,
    is_finished,
)
from lightning_fedbayes.callbacks.held_out import check_held_out, held_out_batches, log_choices
from lightning_fedbayes.callbacks.progress import show_clients
from lightning_fedbayes.callbacks.reliability import ReliabilityReport
from lightning_fedbayes.callbacks.report import FederationReport
from lightning_fedbayes.callbacks.source import install_source, remove_source, set_round_length
from lightning_fedbayes.callbacks.step_count import StepCount
from lightning_fedbayes.callbacks.stopping import stop_together
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport, bring_report
from lightning_fedbayes.callbacks.wandb_account import go_offline_without_account
from lightning_fedbayes.data.clients import Clients, clients_of
from lightning_fedbayes.engines.choice import EngineName, make_engine
from lightning_fedbayes.engines.engine import OptimizerPolicy
from lightning_fedbayes.engines.federation import ClientOutcome, Federation
from lightning_fedbayes.engines.loader import FederatedLoader, batching_of
from lightning_fedbayes.engines.plan import Batching, RoundPlan, check_batches, plan_round, share_of
from lightning_fedbayes.engines.poisoning import poisoned
from lightning_fedbayes.engines.selection import AutoFusion
from lightning_fedbayes.engines.server import PriorPolicy, Server
from lightning_fedbayes.engines.state import BufferPolicy, ResidentModel
from lightning_fedbayes.errors import FederationError, nearest
from lightning_fedbayes.fusion import FusionRule, get_rule, rule_name
from lightning_fedbayes.partition import Partition
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.privacy import UpdatePrivacy, check_no_buffers
from lightning_fedbayes.processes import processes_of
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
        fusion: name of a fusion rule (:func:`~lightning_fedbayes.available_fusions`) or a rule object; "auto", or an
            :class:`~lightning_fedbayes.AutoFusion`, chooses one in every round on the validation data.
        weighting: how much each client counts: "equal", "train_size", "max_discrepancy", "distance", their "_l2"
            forms, or a function from a list of :class:`~lightning_fedbayes.weighting.ClientFacts` to weights.
        engine: "sequential": clients train one after another. "vectorized": they train at once, as one stack of
            networks, which is many times faster for small ones. "auto" takes "vectorized" where the module allows it
            and it is likely to be faster, and says which it took and why.
        clients_at_once: most clients in a stack of the vectorized engine; None: as many as fit into 256 MiB (4 GiB on
            a GPU). Results with Bayesian noise depend on it, within the noise.
        prior: "fixed": the layers' own priors in every round. "global": the prior of a round is the global posterior
            that it starts from, as ``dwc`` wants it.
        optimizer_state: "reset" in every round, or "keep" one per client from round to round.
        buffers: "average" floating and integer buffers (BatchNorm's statistics) with the client weights; "local":
            every client keeps its own, and the global model gets the average; "frozen": they never change.
        local_parameters: patterns (``fnmatch``, e.g. ``"head.*"``) of parameters and buffers that never leave a
            client. In the global model they keep their initial value.
        min_clients: fewer valid updates than this leave the global posterior as it was, and so do updates that the
            rule cannot fuse.
        max_failed_rounds: after this many such rounds in a row the run stops with an error.
        adversaries: an attack, or a list of them, by which some clients try to spoil the fusion, such as
            ``SignFlip(clients=0.3)``. A client with several applies them one after the other. Adversaries train
            honestly, report what they measured then, and send honest buffers.
        privacy: an :class:`~lightning_fedbayes.privacy.UpdatePrivacy`: every client clips its update and adds noise
            before it sends it, and the ε given away is logged as ``privacy/epsilon``. Adversaries replace what they
            would have sent then.
        seed: where every random draw comes from.

    Attributes:
        clients: the clients, once ``fit`` has begun.

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
        fusion: str | FusionRule | AutoFusion = "reverse_kl_barycenter",
        weighting: str | CohortWeights = "train_size",
        engine: EngineName = "auto",
        clients_at_once: int | None = None,
        prior: PriorPolicy = "fixed",
        optimizer_state: OptimizerPolicy = "reset",
        buffers: BufferPolicy = "average",
        local_parameters: Sequence[str] = (),
        min_clients: int = 1,
        max_failed_rounds: int = 3,
        adversaries: Attack | Sequence[Attack] = (),
        privacy: UpdatePrivacy | None = None,
        seed: int = 0,
    ) -> None:
        fusion = AutoFusion() if fusion == "auto" else fusion
        rule = fusion if isinstance(fusion, AutoFusion) else get_rule(fusion)
        check_weighting(weighting)
        check_partition(partition)
        check_at_least("local_epochs", local_epochs, 1)
        check_at_least("min_clients", min_clients, 1)
        check_at_least("max_failed_rounds", max_failed_rounds, 1)
        check_fraction(fraction)
        _check_choice("engine", engine, ("auto", "sequential", "vectorized"))
        if clients_at_once is not None:
            check_at_least("clients_at_once", clients_at_once, 1)
        _check_choice("prior", prior, ("fixed", "global"))
        _check_choice("optimizer_state", optimizer_state, ("reset", "keep"))
        _check_choice("buffers", buffers, ("average", "local", "frozen"))
        if isinstance(local_parameters, str):
            local_parameters = (local_parameters,)
        self.partition = partition
        self.local_epochs = local_epochs
        self.fraction = fraction
        self.engine: EngineName = engine
        self.clients_at_once = clients_at_once
        self.optimizer_state: OptimizerPolicy = optimizer_state
        self.buffers: BufferPolicy = buffers
        self.local_parameters = tuple(local_parameters)
        self.server = Server(rule, weighting, prior, min_clients, max_failed_rounds)
        self.adversaries = attacks_of(adversaries)
        self.privacy = check_privacy(privacy)
        self.seed = seed
        go_offline_without_account()
        self.clients: Clients | None = None
        self._federation: Federation | None = None
        self._restored: dict[str, Any] | None = None
        self._loader: FederatedLoader | None = None
        self._boundary: RoundBoundary | None = None
        self._report = FederationReport()
        self._reliability = ReliabilityReport()
        self._uncertainty = UncertaintyReport()

    @property
    def federation(self) -> Federation:
        """The running federation, or the last one."""
        if self._federation is None:
            raise FederationError("there is no federation yet: call trainer.fit first")
        return self._federation

    @property
    def posterior(self) -> GaussianPosterior:
        """The global posterior after the last round."""
        if self._restored is not None:  # a checkpoint of a complete federation: there was nothing to train
            return GaussianPosterior.from_state_dict(self._restored["posterior"])
        return self.federation.posterior

    @property
    def history(self) -> list[dict[str, float]]:
        """One dict of figures per finished round, in order."""
        return self.federation.history if self._restored is None else list(self._restored["history"])

    def settings(self) -> dict[str, Any]:
        """The federation's settings, as they are logged."""
        weighting = self.server.weighting
        name = weighting if isinstance(weighting, str) else getattr(weighting, "__name__", "custom")
        rule = self.server.rule
        described = f"auto({', '.join(rule.names)})" if isinstance(rule, AutoFusion) else rule_name(rule)
        rules = rule.rules if isinstance(rule, AutoFusion) else (rule,)
        return {
            "partition": repr(self.partition),
            "clients": len(self.clients) if self.clients is not None else None,
            "client_sizes": list(self.clients.sizes) if self.clients is not None else None,
            "local_epochs": self.local_epochs,
            "fraction": self.fraction,
            "fusion": described,
            "weighting": name if any(each.uses_weights for each in rules) else "none",
            "engine": self.engine if self._federation is None else self._federation.engine.name,
            "prior": self.server.prior,
            "optimizer_state": self.optimizer_state,
            "buffers": self.buffers,
            "local_parameters": list(self.local_parameters),
            "min_clients": self.server.min_clients,
            "max_failed_rounds": self.server.max_failed_rounds,
            "adversaries": [repr(attack) for attack in self.adversaries],
            "privacy": repr(self.privacy),
            "seed": self.seed,
        }

    # -- before training -----------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the Trainer and put the clients between it and its training loader."""
        if stage != "fit":
            return
        check_trainer(trainer, pl_module)
        check_attacks(self.adversaries, trainer)
        if trainer.current_epoch == 0:  # a new federation: what an earlier fit left is no part of it
            self._federation, self._restored = None, None
            self._report, self._reliability = FederationReport(), ReliabilityReport()
        self._loader = None
        self._uncertainty = bring_report(trainer, beside=self)
        install_source(trainer, lambda loader: self._federate(trainer, loader))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_last is None:
                callback.save_last = True  # so that ckpt_path="last" finds the last round; a link could dangle
        # epoch-wise figures are logged whatever the number of batches
        warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to train zero rounds in silence."""
        if self._restored is None:
            check_not_finished(trainer, trainer.current_epoch)
        elif trainer.current_epoch == 0 and is_finished(trainer, self._restored["rounds"]):
            rank_zero_info(f"The checkpoint's federation is complete: {self._restored['rounds']} rounds are done.")
        else:
            check_not_finished(trainer, self._restored["rounds"])

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find mistakes before anything runs."""
        self._prepare(trainer)

    def _prepare(self, trainer: L.Trainer) -> None:
        """Check what can only be known once optimizers and loaders exist."""
        check_schedulers(trainer)
        if self._loader is None:
            trainer.fit_loop.setup_data()

    def _federate(self, trainer: L.Trainer, loader: Any) -> FederatedLoader:
        """The federation's loader for the user's training ``loader``."""
        reload = trainer.reload_dataloaders_every_n_epochs  # pyright: ignore[reportAttributeAccessIssue]
        if self._loader is None or reload:
            batching = batching_of(loader, local_epochs=self.local_epochs, fraction=self.fraction, seed=self.seed)
            clients = clients_of(loader.dataset, self.partition, self.seed)
            check_batches(clients.names, clients.sizes, batching)
            check_cohort(len(clients), self.fraction, self.server.min_clients)
            if self._loader is not None:
                check_same_number(self._loader.clients, clients)
            self.clients = clients
            trained = poisoned(clients, assign(self.adversaries, clients.names, self.seed))
            replaced, self._loader = self._loader, FederatedLoader(
                loader, trained, batching, lambda: self._share(trainer, clients.sizes, batching), _part(trainer)
            )
            if replaced is not None and self._federation is not None:
                self._federation.engine.arrange(self._loader)
        return self._loader

    @staticmethod
    def _share(trainer: L.Trainer, sizes: Sequence[int], batching: Batching) -> RoundPlan:
        """The part of the current round that this process trains."""
        processes = processes_of(trainer)
        return share_of(plan_round(trainer.current_epoch, sizes, batching), processes.rank, processes.count)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the engine, and continue where a checkpoint or an earlier fit left off."""
        self._prepare(trainer)
        assert self.clients is not None
        model = ResidentModel(pl_module, self.local_parameters, self.buffers)
        if self.privacy is not None:
            check_no_buffers(model.federated_buffers)
        assert self._loader is not None
        policy, seed = self.optimizer_state, self.seed
        engine = make_engine(
            self.engine, trainer, model, self._loader, self.clients_at_once, optimizer_state=policy, seed=seed
        )
        earlier = self._restored
        if earlier is None and self._federation is not None:
            earlier = self.state_dict()
        if isinstance(self.server.rule, AutoFusion):
            self.server.rule.check(pl_module)
            check_held_out(trainer)
            check_not_split(trainer)
        protect = None if self.privacy is None else self.privacy.send
        self._federation = Federation(
            self.server, engine, self.adversaries, lambda: held_out_batches(trainer), processes_of(trainer), protect
        )
        if earlier is not None:
            check_same_federation(trainer, earlier["settings"], self.settings())
            self._federation.load_state_dict(earlier)
            self._report.load_state_dict(earlier["report"])
            self._reliability.load_state_dict(earlier["reliability"])
            step_plateau(trainer, earlier.get("plateau", {}), earlier["rounds"])
        self._restored = None
        engine.install()
        processes, federation = processes_of(trainer), self._federation
        if processes.count > 1:
            stop_together(trainer, processes, lambda: federation.stage == "training")
        start = getattr(pl_module, "on_federation_start", None)
        if start is not None:
            start()
        guard_weights_only(pl_module, self._between_rounds)
        self._report.start(trainer, self.settings(), self.clients)

    # -- a round -------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round: choose the cohort and plan its batches."""
        assert self.clients is not None
        assert self._loader is not None
        self._boundary, self._steps = RoundBoundary(trainer), StepCount(trainer)
        self.federation.engine.set_clients(self.clients.names, self.clients.sizes)  # data may have been reloaded
        self._uncertainty.set_clients(self.clients.sizes, self.clients.counts, self.clients.classes)
        self._report.set_clients(self.clients)
        plan = plan_round(trainer.current_epoch, self.clients.sizes, self._loader.batching)
        self.federation.begin_round(plan)
        set_round_length(trainer, self.federation.engine.num_batches(self.federation.share))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """At a client's first batch, give it the global posterior."""
        clients = self.federation.begin_batch(batch_idx)
        if clients:
            show_clients(trainer, clients)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """At a client's last batch, take its posterior; at the last client's, fuse."""
        for outcome in self.federation.end_batch(batch_idx, outputs):
            self._note(outcome)
        if self.federation.round_is_complete:
            own = set(self.federation.share.cohort)
            steps = self.federation.end_round(note=self._steps.own(trainer, idle=not own))
            for outcome in self.federation.outcomes:
                if outcome.client not in own:
                    self._note(outcome)
            if len(steps) > 1:
                self._steps.take(trainer, steps)
            if self.federation.refusal is not None:
                rank_zero_info(
                    f"Round {self.federation.round + 1}: the old posterior stays, because the clients cannot be fused: "
                    f"{self.federation.refusal}"
                )
            self._report.weights(self.federation.weights)
            self._reliability.note(self.federation)

    def _note(self, outcome: ClientOutcome) -> None:
        """Report what became of a client."""
        self._report.client(outcome)
        if outcome.error is not None:
            assert self.clients is not None
            rank_zero_info(
                f"Round {self.federation.round + 1}: client {self.clients.names[outcome.client]} is left out: "
                f"{type(outcome.error).__name__}: {outcome.error}"
            )

    # -- between rounds ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed the Monte Carlo samples of the validation; see that it scores the global posterior."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._drop_unfinished_round()
            seed_everything(derive_seed(self.seed, "validation", trainer.current_epoch))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round beside the validation's figures: it is their x-axis."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.log("round", float(trainer.current_epoch + 1))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round's figures."""
        if self.federation.stage == "fused":
            self.federation.engine.log.end_round()
            if trainer.loggers:  # beside what the module logs of its training; it takes as long as a small step
                pl_module.log("round", float(trainer.current_epoch + 1))
            if self.privacy is not None:
                pl_module.log_dict(self._given_away(self.privacy))
            self._report.log_round(trainer, self.history[-1], self.federation.engine.log.names)

    def _given_away(self, privacy: UpdatePrivacy) -> dict[str, float]:
        """What the rounds so far have given away of a client."""
        assert self.clients is not None
        assert self.federation.plan is not None
        fraction = len(self.federation.plan.cohort) / len(self.clients)
        most = max(record.rounds for record in self._report.records.values())
        return privacy.figures(self.federation.rounds_done, fraction, most)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table of clients; drop a round that was cut short."""
        self._drop_unfinished_round()
        self._report.finish(trainer, self._uncertainty.client_accuracy)
        if self.clients is not None:
            self._reliability.finish(trainer, self.clients.names)
        log_choices(trainer, self.history)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the module with the global posterior of the last good round: nothing learnt is lost."""
        self._drop_unfinished_round()
        self._give_back(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the Trainer and the module back as they were."""
        if stage == "fit":
            self._give_back(trainer, pl_module)

    def _drop_unfinished_round(self) -> None:
        """Forget a round that was cut short, by early stopping, a time limit or an exception."""
        if self._federation is not None and self._federation.stage == "training":
            self._federation.abandon_round()
            rank_zero_info(
                f"Round {self._federation.round + 1} was cut short; the module holds the global posterior that it "
                "started from."
            )

    def _give_back(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        remove_source(trainer)
        unguard_weights_only(pl_module)
        if self._federation is not None:
            self._federation.close()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole federation at the end of the last finished round."""
        if self._federation is None:
            return {}
        return {
            **self._federation.state_dict(),
            "report": self._report.state_dict(),
            "reliability": self._reliability.state_dict(),
            "settings": self.settings(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, once ``fit`` has made the engine."""
        self._restored = state_dict or None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """See to it that the checkpoint lies between two rounds, whenever it is written."""
        self._between_rounds(checkpoint)
        if self._federation is not None and trainer.current_epoch == self._federation.round:
            checkpoint["callbacks"][self.state_key]["plateau"] = pending_plateau(trainer, self._federation.stage)

    def _between_rounds(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` hold the global model of the last finished round and nothing of a begun one."""
        federation = self._federation
        if federation is None or self._boundary is None:
            return
        if federation.rounds_done > federation.round:
            close_round(checkpoint, federation.rounds_done)
        else:
            self._boundary.apply(checkpoint, federation.round)
            model = federation.engine.model
            checkpoint["state_dict"] |= {**model.global_parameters, **model.global_buffers}


def _part(trainer: L.Trainer) -> tuple[int, int]:
    """Number of this process, and of those that split every batch: under DDP they train each client together."""
    return (trainer.global_rank, trainer.world_size) if isinstance(trainer.strategy, DDPStrategy) else (0, 1)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise FederationError(f"{name}='{value}': {nearest(str(value), choices)}")
