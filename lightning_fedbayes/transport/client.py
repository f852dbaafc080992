"""A client of a federation over a network: it answers the server's questions over any transport."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torch.utils.data import Subset

from lightning_fedbayes.callbacks import ExamplePrivacy
from lightning_fedbayes.clients.model import ResidentModel
from lightning_fedbayes.clients.privacy import Door, UpdatePrivacy, check_no_buffers
from lightning_fedbayes.clients.settings import BufferPolicy, FederationSettings, Fusion, Keep, Source
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.messages import Kind, Message
from lightning_fedbayes.core.quiet import without_banners
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.methods import get_method
from lightning_fedbayes.transport import one_shot as once
from lightning_fedbayes.transport.calibration import TEMPERATURE, answer, count_noise, own_data
from lightning_fedbayes.transport.checkpoint import StateFile
from lightning_fedbayes.transport.messages import check_version, posterior_in, tensors_of
from lightning_fedbayes.transport.training import ClientTraining, Task

LOG = logging.getLogger(__name__)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
"""Options of a client's Trainer, unless others are given: a client writes no files and prints no progress."""

Asked = Literal["train", "evaluate", "calibrate", "once"]
STAGES = {"train": "training", "evaluate": "evaluation", "calibrate": "calibration", "once": "training"}
"""Question → stage, as failures name it."""
DataModule = L.LightningDataModule | Callable[[Any], L.LightningDataModule]
Data = Callable[[], L.LightningDataModule]


@dataclass(frozen=True)
class Question:
    """Question of the server to a client.

    Args:
        config: :meth:`.Rounds.config_for`, and what is asked for.
        model: the global model, by the names of :func:`~lightning_fedbayes.transport.messages.tensors_of`.
        told: further tensors for the client: what has been counted of its site, or the state of a head.
    """

    client: int
    config: Mapping[str, Any]
    model: Mapping[str, Tensor]
    told: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        check_version(self.config, "the server", errors.ClientMismatch)

    def task(self, kept: Mapping[int, Any]) -> Task:
        """Return the task that the server sets. ``kept`` is the client's state."""
        posterior, buffers = posterior_in(self.model, "the server")
        config = self.config
        rest = {name: config[name] for name in ("seed", "begun", "share", "frozen", "rounds", "steps", "moved")}
        return Task(self.client, config["server-round"] - 1, posterior=posterior, buffers=buffers, kept=kept, **rest)


class RemoteClient:
    """Answers the server's questions, and keeps a Trainer between those that one process handles.

    Raises FederationError if an argument cannot be used, ``state_folder`` is missing where the client keeps something,
    or unprotected buffers would leave the client under ``privacy``.

    Args:
        module: the network, the same at every client and at the server. A question starts from it as it was built.
        datamodule: its training loader holds the client's data, or a function that makes it, of what the transport
            knows about the client.
        partition: deals out data that all clients have in common, as in a simulation. Without one, a
            :class:`~lightning_fedbayes.ClientDatasets` is dealt out by its parts, and other data are the client's own.
        fusion: the federated method, the same as the server's: its name, a :class:`~lightning_fedbayes.Method`, or a
            fusion rule, which matters at the server only.
        local_epochs, keep, buffers, local_parameters, posterior: see :class:`~lightning_fedbayes.FederatedBayes`.
            ``buffers`` and ``local_parameters`` are the server's. A kept "posterior" is for
            :func:`~lightning_fedbayes.transport.flower.personal_posterior`. The client scores it, too, where it scores
            the global posterior, under names that begin with "personal/".
        privacy: clips what the client sends and adds noise to it, from a secret of its own. The client counts
            all messages that it has ever sent from its ``state_folder``, also for repeated rounds and in other
            federations, and tells the server their ε.
        one_shot: the way in which the client may be asked to send in place of rounds. None: it refuses. See
            :meth:`FusionStrategy.one_shot <lightning_fedbayes.transport.flower.FusionStrategy.one_shot>`.
        conformal_epsilon: ε of the noise on counts of scores, the same as the server's
            ``FederatedConformal(epsilon=...)``. Each answer costs it again. The client adds them up in its
            ``state_folder``, and sends no exact sums for a temperature. None: counts are exact, and not sent under
            ``privacy``.
        exact: kinds of messages that may leave as they are in spite of ``privacy``, or of an
            :class:`~lightning_fedbayes.ExamplePrivacy` among the Trainer's callbacks: "scores" of a validation,
            "temperature", "counts", "statistics", "curvature", "scale". See the table in docs/what_leaves.md.
        share_errors: send the text of an exception to the server, for federations of one owner. Otherwise the server
            gets its class and the stage, and the text stays in the client's log.
        state_folder: folder of the client's state, which never leaves it: local parameters and buffers, kept optimizer
            state, the number of its messages under ``privacy``.
        trainer: options of the client's Trainer, such as ``{"accelerator": "gpu", "gradient_clip_val": 1.0}``.
    """

    def __init__(
        self,
        module: L.LightningModule,
        datamodule: DataModule,
        *,
        partition: Partition | None = None,
        local_epochs: int = 1,
        fusion: Fusion = "reverse_kl_barycenter",
        keep: Sequence[Keep] = (),
        buffers: BufferPolicy = "average",
        local_parameters: Sequence[str] = (),
        privacy: UpdatePrivacy | None = None,
        posterior: Source | None = None,
        one_shot: once.OneShot | None = None,
        conformal_epsilon: float | None = None,
        exact: Collection[str] = (),
        share_errors: bool = False,
        state_folder: str | Path | None = None,
        trainer: Mapping[str, Any] | None = None,
    ) -> None:
        errors.check_kind("module", module, L.LightningModule, "give a LightningModule")
        errors.check_strings("keep", keep, "give 'optimizer', 'posterior' or both; they lie in state_folder")
        errors.check_kind("trainer", {} if trainer is None else trainer, Mapping, "give a dict of a Trainer's options")
        own: dict[str, Any] = {"keep": keep, "buffers": buffers, "local_parameters": local_parameters}
        own |= {"privacy": privacy, "posterior": posterior}
        settings = FederationSettings(partition, local_epochs, fusion=get_method(fusion), **own)
        callbacks = (trainer or {}).get("callbacks") or ()
        callbacks = callbacks if isinstance(callbacks, Sequence) else (callbacks,)
        self.of_examples = next((each for each in callbacks if isinstance(each, ExamplePrivacy)), None)
        accounts = any(each is not None for each in (privacy, conformal_epsilon, self.of_examples))
        keeps = settings.is_personal(module) or bool(settings.kept.what) or bool(settings.method.keeps) or accounts
        self.door = Door(privacy, conformal_epsilon, exact, share_errors, self.of_examples is not None)
        if keeps and state_folder is None:
            why = "local parameters, local buffers, kept states and accounts of privacy stay at the client"
            raise errors.FederationError(f"{why}: pass state_folder=..., one folder per client")
        if privacy is not None:
            check_no_buffers(ResidentModel(module, settings.local_parameters, buffers).federated_buffers)
        self.state_folder = self.folder_of(state_folder) if keeps else None
        if one_shot is not None:
            once.check_one_shot(one_shot)
        self.module, self.datamodule = module, datamodule
        self.training = ClientTraining(settings)
        self.options, self.one_shot = {**QUIET, **(trainer or {})}, one_shot
        self._trainer: L.Trainer | None = None

    def folder_of(self, path: Any) -> Path:
        """Return the folder of the client's state. Raise FederationError for one that a transport cannot find again."""
        return errors.check_path("state_folder", path)

    def reply(self, asked: Asked, question: Question, where: Any) -> Message:
        """Return the answer to a question, or raise. ``where`` is for a function that makes the data module."""
        make = self.datamodule
        ways = {"train": self._train, "evaluate": self._evaluate, "calibrate": self._calibrate, "once": self._send_once}
        return ways[asked](question, lambda: make if isinstance(make, L.LightningDataModule) else make(where))

    def attempt(self, stage: str, client: int, answer: Callable[[], Message], sent: Callable[[Message], Any]) -> Any:
        """Return the answer as it is ``sent``, or a failure if either raises. The text goes to the client's log."""
        try:
            return sent(answer())
        except Exception as error:
            name, known = type(error).__name__, isinstance(error, errors.FedBayesError)
            LOG.error("%s failed, and the server hears of a %s: %s", stage, name, error, exc_info=not known)
            return sent(Message("failure", client, texts=self.door.failure(error, stage)))

    def _train(self, question: Question, data: Data) -> Message:
        """Train in the round that the server names, from the posterior that it sends."""
        config, number = question.config, question.client
        method = self.training.method
        own = method.agreement()
        if config["method"] != own:
            theirs, ours = config["method"] or "an average", own or "an average"
            found = f"the server's method is ({theirs}), this client's ({ours})"
            raise errors.ClientMismatch(f"{found}: give the client the fusion= that the server has")
        kept = StateFile(self.state_folder, number, config)
        if question.told is not None:
            kept.amend(number, question.told)
        if method.keeps and config["accepted"] and not kept.before:
            raise errors.LostState(
                f"client {number} has lost {method.keeps}. A server with a max_influence sends a site when it asks "
                "again; otherwise bring the state_folder back, or remove the client from the server's checkpoint"
            )
        task = question.task(kept.before)
        if self.of_examples is not None:
            self.of_examples.load_state_dict({"steps": kept.steps, "secret": kept.secret})
        update, after = self._with_trainer(lambda trainer: self.training.train(trainer, self.module, data(), task))
        spent = {}
        if self.door.privacy is not None:
            update = self.door.privacy.send(update, task.posterior, kept.secret, task.round)
            spent = {self.door.privacy.figure: kept.count(self.door.privacy)}
        if self.of_examples is not None:
            spent |= kept.count_steps(self.of_examples)
        kept.write(after)  # before anything is sent
        moved = self.training.figures
        if self.door.privacy is not None and not self.training.is_as_planned:
            why = "this client's data are private, and how often its schedule moves may depend on them"
            raise errors.NotSent(f"{why}: move it once in each step, and take a step for each batch")
        figures = {n: value for n, value in {**update.metrics, **spent, **moved}.items() if math.isfinite(value)}
        tensors = tensors_of(update.posterior, update.buffers)
        return Message("update", task.client, task.round + 1, update.num_examples, tensors, figures)

    def _evaluate(self, question: Question, data: Data) -> Message:
        """Score the server's posterior and the kept personal one. Of another client ("across") only the former."""
        self.door.check("scores")
        number, config = question.client, question.config
        keeps = self.training.settings.is_personal(self.module) and not config.get("across")
        task = question.task(StateFile(self.state_folder, number, config).before if keeps else {})
        figures, count = self._with_trainer(lambda trainer: self.training.evaluate(trainer, self.module, data(), task))
        return Message("scores", number, task.round + 1, count, figures=figures)

    def _calibrate(self, question: Question, data: Data) -> Message:
        """Answer a question about the client's validation data, to calibrate the posterior that the server sends."""
        task = question.task({})
        request = question.config
        kind: Kind = "temperature" if request["kind"] == TEMPERATURE else "counts"
        self.door.check(kind, request["epsilon"] or None)
        datamodule = data()
        datamodule.prepare_data()
        datamodule.setup("validate")
        own = own_data(datamodule.val_dataloader(), task.client)
        self.training.load_global(self.module, task)
        if request["trial"]:
            first: Any = Subset(own[0], range(min(own[1], len(own[0]))))  # pyright: ignore[reportArgumentType]
            answer(self.module, (first, own[1]), request, task.client, task.seed)
            return Message("introduction", task.client, task.round + 1)
        spent = {}
        if request["epsilon"]:
            assert self.state_folder is not None
            spent["epsilon"] = count_noise(self.state_folder, task.client, request["epsilon"])  # before it is sent
        sent = answer(self.module, own, request, task.client, task.seed)
        return Message.of(kind, task.client, task.round + 1, sent, spent)

    def _send_once(self, question: Question, data: Data) -> Message:
        """Send what a federation without rounds asks for: sums, or weights after training with their curvature."""
        method = once.check_agreed(self.one_shot, str(question.config.get("one-shot")))
        task, kind = question.task({}), once.kind_of(method)
        self.door.check(kind)
        datamodule = data()
        if method == once.COUNTING:
            size, steps = self._with_trainer(lambda trainer: self.training.steps(trainer, datamodule, task))
            return Message(kind, task.client, task.round + 1, size, figures={"steps": steps})
        loader = once.training_data(datamodule, self.training.settings, task.client, task.seed)
        if isinstance(method, once.KroneckerLaplace):
            self._with_trainer(lambda trainer: self.training.train(trainer, self.module, datamodule, task))
        if isinstance(method, once.BayesianHead):
            self.training.check_frozen(self.module, task)
        sent = once.answer_once(method, self.module, loader, question.told or {})
        return Message.of(kind, task.client, task.round + 1, sent)

    def _with_trainer(self, use: Callable[[L.Trainer], Any]) -> Any:
        """Return ``use(trainer)`` for the resident Trainer. After an error the next call makes a new one."""
        with without_banners():  # the server logs the run; a client's would repeat itself in every message
            if self._trainer is None:
                callbacks = [*self.options.get("callbacks", []), self.training]
                self._trainer = L.Trainer(**{**self.options, "callbacks": callbacks, "num_sanity_val_steps": 0})
            trainer, self._trainer = self._trainer, None
            result = use(trainer)
        self._trainer = trainer
        return result
