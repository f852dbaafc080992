"""The callback that makes one Trainer a federation: one epoch is one round."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fedbayes.callbacks.clients import bring_reports
from lightning_fedbayes.callbacks.loggers import prepare_wandb
from lightning_fedbayes.callbacks.report import FederationReport
from lightning_fedbayes.callbacks.trainer import FitLoop, TrainsClients, checks, held_out_batches, use_whole_checkpoints
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport
from lightning_fedbayes.clients import FederatedLoader, Federation, federated_loader, make_federation, settings
from lightning_fedbayes.clients.engine import Engine
from lightning_fedbayes.clients.model import call_hook, frozen_names, with_rest
from lightning_fedbayes.core.errors import FedBayesError, FederationError, check_kind
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.server.plan import Fraction, RoundPlan, plan_round, share_of


class FederatedBayes(TrainsClients):
    r"""Federates the training of a LightningModule over clients, inside one Trainer and one ``fit``.

    An epoch is a round. The clients of the round's cohort train one after another from the global posterior, each for
    ``local_epochs`` passes over its data. Their posteriors are fused, and the module holds the fused posterior during
    validation, checkpoints, early stopping and epoch-wise schedulers. Any LightningModule with automatic optimization
    will do: parameters of Bayesian layers are Gaussian, all others point masses.

    ::

        Trainer(max_epochs=50, callbacks=[FederatedBayes(DirichletPartition(clients=10, alpha=0.5))])

    Every random draw comes from ``seed``, the round and the client: results depend neither on workers nor on
    interruptions. A client that raises, or sends what is not finite, is left out of its round.

    Args:
        partition: deals out the training examples to clients. None: the training data set is a
            :class:`~lightning_fedbayes.ClientDatasets` (or ``ConcatDataset``) with one part per client.
        local_epochs: passes over a client's data per round, E.
        fraction: share of the clients in a round, C in (0, 1], drawn in every round. "turns": one client in each round,
            in the order of their numbers.
        fusion: the federated method: its name, a :class:`~lightning_fedbayes.Method` such as ``FedProx(0.1)``, or a
            fusion rule, by which it averages (:func:`~lightning_fedbayes.methods.available_methods`). "auto", or an
            :class:`~lightning_fedbayes.fusion.AutoFusion`, chooses a rule in every round on the validation data. None:
            "sites" for Bayesian layers, or IVON, with one normal prior, clients that keep no more than 1 GiB in memory,
            and no conflicting setting. Elsewhere "reverse_kl_barycenter", an average. A line says which, and why.
        weighting: how much each client counts: "equal", "train_size", "max_discrepancy", "distance", or a function
            from a list of :class:`~lightning_fedbayes.server.weighting.ClientFacts` to weights.
        engine: "sequential": clients train one after another. "vectorized": they train at once, as one stack of
            networks, which is many times faster for small ones. "auto" takes "vectorized" where the module allows it
            and it is likely to be faster, and says why. A number: "vectorized", with at most so many clients in a
            stack. Results with Bayesian noise depend on it, within the noise.
        keep: what every client keeps from round to round: its "optimizer" state, which otherwise begins at zero, and
            the "posterior" that it has trained last, for :meth:`posterior_of`. Neither leaves the client. Each takes
            once or twice the network's memory, for each client. Under ``fusion="sites"`` clients keep most optimizers'
            states anyway. A :class:`~lightning_fedbayes.Kept` says where they lie: on disk, for many clients.
        buffers: "average" floating and integer buffers (BatchNorm's statistics) with the client weights. "local":
            every client keeps its buffers, and the global model gets the average. "frozen": they never change.
        local_parameters: patterns (``fnmatch``, e.g. ``"head.*"``) of parameters and buffers that never leave a
            client. In the global model they keep their initial value.
        safeguards: what happens in rounds of too few clients, and how much one client may do: a
            :class:`~lightning_fedbayes.Safeguards`.
        adversaries: for tests of a defence: a function of a :class:`~lightning_fedbayes.clients.settings.Sending`,
            called at the start of each round. Its result is called with each update, after privacy, and yields what is
            sent instead. After the round's last update with None, to send what it has held back.
        privacy: an :class:`~lightning_fedbayes.UpdatePrivacy`: every client clips its update and adds noise
            before it sends it, and the ε given away is logged as ``privacy/epsilon``.
        posterior: source of the posterior of parameters outside of Bayesian layers: a
            :class:`~lightning_fedbayes.Laplace`, after each client's training, or a :class:`~lightning_fedbayes.SWAG`,
            along it, or a :class:`~lightning_fedbayes.clients.learned.PosteriorSource` of your own. None: an
            :class:`~lightning_fedbayes.IVON` where the module configures one. Otherwise they are point masses.
        schedule: an :class:`~lightning_fedbayes.Asynchronous`: clients start and send whenever they are ready, in
            virtual time, and an epoch is a fusion of the messages that have arrived. None: rounds.
        seed: seed of every random draw.

    Attributes:
        clients: the clients, once ``fit`` has begun.

    Raises:
        FusionError, FederationError, PartitionError: an argument, the Trainer, the module or the data cannot be used.
            Before training starts wherever it can be known then.
    """

    def __init__(
        self,
        partition: settings.Partition | None = None,
        *,
        local_epochs: int = 1,
        fraction: Fraction = 1.0,
        fusion: settings.Fusion | None = None,
        weighting: settings.Weighting = "train_size",
        engine: settings.EngineName | int = "auto",
        keep: Sequence[settings.Keep] | settings.Kept = (),
        buffers: settings.BufferPolicy = "average",
        local_parameters: Sequence[str] = (),
        safeguards: settings.Safeguards = settings.USUAL,
        adversaries: settings.Adversaries | None = None,
        privacy: settings.UpdatePrivacy | None = None,
        posterior: settings.Source | None = None,
        schedule: settings.Asynchronous | None = None,
        seed: int = 0,
    ) -> None:
        first = (partition, local_epochs, fraction, fusion, weighting, engine, keep, buffers, local_parameters)
        last = (safeguards, adversaries, privacy, posterior, schedule, seed)
        self.settings = self._given = settings.FederationSettings(*first, *last)
        prepare_wandb()  # here: the Trainer starts its loggers before it calls any hook
        self._federation: Federation | None = None
        self._restored: dict[str, Any] | None = None  # by a checkpoint
        self._earlier: dict[str, Any] | None = None  # of the fit before
        self._loader: Any = None  # the FederatedLoader, once there is one
        self._plan: tuple[RoundPlan, Any] = RoundPlan(-1, ()), None  # and its loader
        self._reasons: list[str] | None = None
        self._report = FederationReport()
        self._uncertainty = UncertaintyReport(samples=None)

    def __repr__(self) -> str:
        default, described = vars(settings.FederationSettings()), self.settings.described()
        chosen = [name for name, value in vars(self.settings).items() if name == "fusion" or value != default[name]]
        texts = {name: repr(described.get(name, getattr(self.settings, name))) for name in chosen}
        texts |= {name: described[name] for name in chosen if name in ("partition", "privacy")}  # texts already
        return f"FederatedBayes({', '.join(f'{name}={text}' for name, text in texts.items())})"

    @property
    def federation(self) -> Federation:
        """The running federation, or the last one."""
        if self._federation is None:
            raise FederationError("there is no federation yet: call trainer.fit, with num_sanity_val_steps=0, first")
        return self._federation

    @property
    def engine(self) -> Engine:
        """The engine of the running federation, or the last one."""
        return self.federation.engine

    @property
    def clients(self) -> Any:
        """The :class:`~lightning_fedbayes.data.clients.Clients`, once ``fit`` has begun. None before."""
        return None if self._loader is None else self._loader.clients

    @property
    def posterior(self) -> GaussianPosterior:
        """The global posterior after the last round."""
        if self._restored is not None:  # in the main process of forked ones, or before fit has come to an end
            posterior = GaussianPosterior.from_state_dict(self._restored["posterior"])
            module = None if self._loop is None else self._loop.module
            return posterior if module is None else with_rest(posterior, module, frozen_names(module))
        return self.federation.engine.model.whole(self.federation.server.posterior)

    def posterior_of(self, client: int | str, weight: float = 1.0) -> GaussianPosterior:
        """Return the personal posterior of a client: between the global one and the one that it has trained last.

        It is their fusion by "reverse_kl_barycenter", with weights 1 − λ and λ. Deterministic parameters are averaged,
        local parameters are the client's, buffers (BatchNorm's statistics) are no part of it. A client that has not
        trained yet has the global posterior. :func:`~lightning_fedbayes.choose_personal_weight` chooses λ.

        Args:
            client: its number or name.
            weight: λ of the client's trained posterior, in [0, 1]. 0 is the global one.

        Source: Jamoussi et al. 2025 (projection); Zhang et al. 2022 (pFedBayes).

        Raises FederationError: there is no such client, or clients keep neither posteriors nor local parameters.
        """
        return self.federation.personal(client, weight)

    @property
    def history(self) -> list[dict[str, float]]:
        """One dict of figures per finished round, in order. Its "round" counts from 1."""
        return self.federation.server.history if self._restored is None else list(self._restored["history"])

    def described(self) -> dict[str, Any]:
        """Return the settings, the clients and the engine, as they are logged."""
        known = self.settings.described()
        if self._federation is None and self._restored is not None:  # as in the main process of forked ones
            known["fusion"] = self._restored["settings"]["fusion"]
        clients = self.clients
        return {
            "partition": known.pop("partition"),
            "clients": None if clients is None else len(clients),
            "client_sizes": None if clients is None else clients.described_sizes,
            **known,
            "engine": known["engine"] if self._federation is None else self._federation.engine.name,
        }

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the Trainer and put the clients between it and its training loader."""
        use_whole_checkpoints(trainer)
        if stage != "fit":
            return
        if self._earlier is None and self._loader is not None:  # else the fit before was refused
            self._earlier = self.state_dict() or None
        self.settings = self._given
        with self._mistakes():
            checks.check_trainer(trainer, pl_module, self.settings)
        if trainer.current_epoch == 0:  # a new federation: what an earlier fit left is no part of it
            self._federation, self._restored, self._earlier = None, None, None
            self._report = FederationReport()
        self._loader = None
        with self._mistakes():
            self._uncertainty = bring_reports(trainer, self, self if self.settings.is_personal(pl_module) else None)
        self._loop = FitLoop(trainer, pl_module)
        self._loop.replace_data(lambda loader: self._federate(trainer, loader))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_last is None:
                self._loop.put(callback, "save_last", True)  # so that "last" is the last round; a link could dangle
        # epoch-wise figures are logged whatever the number of batches
        self._loop.ignore(".*is smaller than the logging interval.*")

    @contextmanager
    def _mistakes(self) -> Iterator[None]:
        """Under :func:`check` a mistake inside is noted, so that the next one is found as well."""
        try:
            yield
        except (FedBayesError, MisconfigurationException) as mistake:
            if self._reasons is None:
                raise
            self._reasons.append(str(mistake))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to train zero rounds without a word."""
        if self._restored is None:
            checks.check_not_finished(trainer, trainer.current_epoch)
        elif trainer.current_epoch == 0 and checks.is_finished(trainer, self._restored["rounds"]):
            rank_zero_info(f"The checkpoint's federation is complete: {self._restored['rounds']} rounds are done.")
        else:
            checks.check_not_finished(trainer, self._restored["rounds"])

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find mistakes before anything runs."""
        self._prepare(trainer)

    def _prepare(self, trainer: L.Trainer) -> None:
        """Check what can only be known once optimizers and loaders exist."""
        with self._mistakes():
            checks.check_schedulers(trainer)
        if self._loader is None:
            self._loop.setup_data()

    def _federate(self, trainer: L.Trainer, loader: Any) -> FederatedLoader:
        """Return the federation's loader for the user's training ``loader``."""
        before = self._loader
        if before is not None and not self._loop.trainer.reload_dataloaders_every_n_epochs:
            return before

        plan = partial(self._planned, trainer, self._loop)
        self._loader = federated_loader(loader, self.settings, plan, self._loop.part, **self._loop.limits)
        clients = self._loader.clients
        self._uncertainty.set_clients(clients.sizes, clients.counts, clients.classes, clients.names)
        if before is not None:
            checks.check_same_number(before.clients, clients)
            if self._federation is not None:
                self._federation.engine.use(self._loader)
                self._report.set_clients(clients)
        return self._loader

    def _planned(self, trainer: L.Trainer, loop: FitLoop, loader: FederatedLoader) -> RoundPlan:
        """Return this process's share of the present round's plan, which the loader and the hooks have in common."""
        plan, planned = self._plan
        if plan.round != trainer.current_epoch or planned is not loader:
            plan = plan_round(trainer.current_epoch, loader.clients.sizes, loader.batching, loader.timeline)
            self._plan = plan, loader
        return share_of(plan, loop.collective.rank, loop.collective.size)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the federation, and continue where a checkpoint or an earlier fit left off."""
        federation, loop = self._make(trainer), self._loop
        if self._reasons is not None:
            raise _Checked
        loop.install(federation.engine, partial(self._begin_batch, trainer), self._end_batch)
        if loop.collective.size > 1:
            loop.stop_together(lambda: federation.stage == "training")
        call_hook(pl_module, "on_federation_start")
        loop.guard_weights_only(self._between_rounds)
        known = self._loader.clients, federation.server.posterior, self._loader.statistics
        self._report.start(trainer, self.described(), *known)

    def _make(self, trainer: L.Trainer) -> Federation:
        """Return a new federation, in the state of the checkpoint or the earlier fit."""
        self._prepare(trainer)
        loop, loader = self._loop, self._loader
        if self.settings.fusion is not None and self.settings.method.auto is not None:
            with self._mistakes():
                checks.check_held_out(trainer)
        earlier = self._restored or self._earlier
        held_out = partial(held_out_batches, trainer)
        federation = make_federation(self.settings, loop.context(), loader, loop.collective, held_out)
        self._federation, self.settings = federation, federation.settings
        if earlier is not None:
            checks.check_same_federation(trainer, earlier["settings"], self.described())
            if not loop.trainer.reload_dataloaders_every_n_epochs:
                checks.check_same_data(loader.clients, earlier.get("digests", ()))
            federation.load_state_dict(earlier)
            self._report.load_state_dict(earlier["report"])
            loop.step_plateau(earlier.get("plateau", {}), earlier["rounds"])
        else:
            federation.engine.states.begin()
        self._restored, self._earlier = None, None
        return federation

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round: choose the cohort and plan its batches."""
        self._loop.begin_round()
        self._loop.set_length(self.federation.engine.num_batches(self._planned(trainer, self._loop, self._loader)))

    def _begin_batch(self, trainer: L.Trainer, batch_idx: int) -> None:
        """At the round's first batch begin it. At a client's first batch, give it the global posterior."""
        if batch_idx == 0:  # here, not in on_train_epoch_start: the hooks of others may still change the weights there
            self.federation.begin(self._plan[0])
        clients = self.federation.engine.begin_batch(batch_idx)
        if clients:
            self._report.show_clients(trainer, clients)

    def _end_batch(self, batch_idx: int) -> None:
        """Take the posterior of a client that ends with this batch, and fuse after the last. Called by ``FitLoop``."""
        federation = self.federation
        outcomes = federation.receive(federation.engine.end_batch(batch_idx))
        if federation.is_complete and self.settings.schedule is not None:
            outcomes += federation.land()
        for outcome in outcomes:
            self._report.client(outcome)
        if federation.is_complete:
            self._report.tell_failures(federation.round)  # here: finish raises if too many rounds have failed
            own = set(federation.share.cohort)
            several = self._loop.collective.size > 1
            result = federation.finish(note=self._loop.own_steps(idle=not own) if several else None)
            if several:
                for outcome in result.outcomes:
                    if outcome.client not in own:  # another process has trained it
                        self._report.client(outcome)
                self._loop.count_steps([note.extra for note in result.notes])
            self._report.fused(result)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed the Monte Carlo samples of the validation, and let it score the global posterior."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._drop_unfinished_round()
            seed_everything(derive_seed(self.settings.seed, "validation", trainer.current_epoch))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round, the x-axis of the validation's figures. Estimate the ELBO of sites."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.log("round", float(trainer.current_epoch + 1), sync_dist=True)
            if self.federation.stage == "fused":
                self.federation.note_likelihood(self._uncertainty.log_likelihood_in(trainer, pl_module))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round's figures."""
        if self.federation.stage == "fused":
            self.federation.engine.log.end_round()
            step_names: set[str] = set()
            if trainer.loggers:  # the module's training figures need it; it takes as long as a small step
                pl_module.log("round", float(trainer.current_epoch + 1), sync_dist=True)
                step_names = self._loop.step_names
            if self.settings.privacy is not None:
                pl_module.log_dict(self.settings.privacy.figures(max(self._report.records.rounds)))
            self._report.log_round(trainer, self.federation.server.history[-1], step_names, self._uncertainty)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round, the x-axis of the test's figures."""
        known = self._federation is not None or self._restored is not None
        if trainer.loggers:
            pl_module.log("round", float(len(self.history)) if known else 0.0, sync_dist=True)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let W&B draw the test's figures over the rounds."""
        self._report.log_test(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the table of clients, drop a round that was cut short. Raise FederationError if no round succeeded."""
        self._drop_unfinished_round()
        self.federation.check_trained()
        self.federation.take_over()  # changes that hooks made after the last round
        self._report.finish(trainer, self._uncertainty, self.history)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make a complete federation's clients available after its checkpoint, which trains no further."""
        if self._restored is not None:
            self._make(trainer).engine.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the module with the global posterior of the last good round."""
        self._drop_unfinished_round()
        if self._federation is not None:  # what is refused before the first round holds the folder of states
            self._federation.engine.states.close()
        super().on_exception(trainer, pl_module, exception)

    def _drop_unfinished_round(self) -> None:
        """Forget a round that was cut short, by early stopping, a time limit or an exception."""
        if self._federation is not None and self._federation.stage == "training":
            self._report.tell_failures(self._federation.round)
            self._federation.abandon()
            cut = f"Round {self._federation.round + 1} was cut short"
            rank_zero_info(f"{cut}; the module holds the global posterior that it started from.")

    def state_dict(self) -> dict[str, Any]:
        """Return the whole federation at the end of the last finished round."""
        if self._federation is None:
            return {}
        own: dict[str, Any] = {"report": self._report.state_dict(), "settings": self.described()}
        if self._loader is not None:
            own["digests"] = self._loader.digests
        return {**self._federation.state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, once ``fit`` has made the engine."""
        self._restored = state_dict or None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on from a run that was no federation."""
        if trainer.state.fn == "fit":
            checks.check_of_a_federation(checkpoint, self.state_key)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Move the checkpoint to a point between two rounds, whenever it is written."""
        self._between_rounds(checkpoint)
        federation = self._federation
        if federation is not None:
            federation.engine.states.mark()
        if self._loop is not None and federation is not None and trainer.current_epoch == federation.round:
            pending = self._loop.pending_plateau() if federation.stage == "fused" else {}
            checkpoint["callbacks"][self.state_key]["plateau"] = pending

    def _between_rounds(self, checkpoint: dict[str, Any]) -> None:
        """Make ``checkpoint`` hold the global model of the last finished round only."""
        federation = self._federation
        if federation is None or self._loop is None:
            return
        is_done = federation.server.rounds > federation.round
        self._loop.close_round(checkpoint, federation.server.rounds if is_done else federation.round, is_done=is_done)
        if not is_done:
            model = federation.engine.model
            checkpoint["state_dict"] |= {**model.global_parameters, **model.global_buffers}


class _Checked(Exception):
    """Ends a fit that was only to be checked."""


def check(trainer: L.Trainer, module: L.LightningModule, data: Any = None) -> list[str]:
    """Return every reason why ``trainer.fit(module, data)`` would be refused, without training. Empty if there is none.

    The fit runs up to its first round, with its sanity check and without loggers. Random states stay, and the same
    Trainer can fit afterwards. When to use it: before a long run. ``data`` are training loaders or a
    LightningDataModule. Raises FederationError if the Trainer has no :class:`FederatedBayes`.
    """
    check_kind("trainer", trainer, L.Trainer, "give a lightning.Trainer")
    federation = next((each for each in trainer.callbacks if isinstance(each, FederatedBayes)), None)  # pyright: ignore
    if federation is None:
        raise FederationError("this Trainer has no FederatedBayes: give it callbacks=[fb.FederatedBayes(...)]")
    reasons: list[str] = []
    federation._reasons, loggers, trainer.loggers = reasons, trainer.loggers, []
    try:
        with isolate_rng():
            of_module = isinstance(data, L.LightningDataModule)
            trainer.fit(module, **{"datamodule" if of_module else "train_dataloaders": data})
    except _Checked:
        pass
    except Exception as mistake:
        reasons.append(str(mistake))
    finally:
        federation._reasons, trainer.loggers = None, loggers
    return list(dict.fromkeys(reasons))
