"""The training loop as an engine sees it, and the figures that ``training_step`` logs, averaged client by client."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.clients.between import check_new
from lightning_fedbayes.clients.learned import LearnedPosterior, learned_posterior
from lightning_fedbayes.clients.settings import FederationSettings, Source
from lightning_fedbayes.clients.states import has_own_state
from lightning_fedbayes.core.errors import FederationError

Step = Callable[[Optimizer, int, Mapping[str, Any]], Mapping[str, Any]]
"""A training step of the loop: (optimizer, number of the batch, {"batch": batch, ...}) → what it returned."""
MOVING = ("lr", "momentum", "betas")
"""Options of an optimizer that schedules move."""


class Course:
    """Learning rates that move in every step: where a round and its clients begin, and where it ends.

    Every client begins at the position of the round. After the round they stand where the client that has made most
    steps has left them, the first of such. So with one client they move as without a federation.

    The ``schedulers`` are the Trainer's with ``interval="step"``, the ``own`` ones those that the module may step
    itself. ``done`` are the steps of such clients in all rounds so far, ``longest`` has the steps of this round's, and
    its position.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], own: Sequence[Any] = ()) -> None:
        self.optimizers, self.schedulers, self.own = optimizers, schedulers, own
        self.done = self._at = 0
        self.longest = self._start = self._position(0)

    def begin_round(self) -> None:
        """Take the present position for all clients' start."""
        self.longest = self._start = self._position(0)

    def begin_client(self) -> None:
        """Go back to the start of the round."""
        self._go(self._start)

    def move_to(self, steps: int) -> None:
        """Step the Trainer's schedulers until a client has made so many ``steps``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stack's optimizer steps at its own time
            for _ in range(self._at, steps):
                for each in self.schedulers:
                    each.step()
        self._at = max(self._at, steps)

    def end_client(self, steps: int) -> None:
        """Note where a client is that has made so many ``steps``."""
        if steps > self.longest[0]:
            self.longest = self._position(steps)

    def end_round(self, *, is_whole: bool = True) -> None:
        """Go to where the longest client was. Back to the start if the round was cut short."""
        self._go(self.longest if is_whole else self._start)
        self.done += self.longest[0] * is_whole

    def _position(self, steps: int) -> tuple[int, list[Any], list[list[dict[str, Any]]]]:
        states = [copy.deepcopy(each.state_dict()) for each in (*self.schedulers, *self.own)]
        groups = [each.param_groups for each in self.optimizers]
        options = [[{n: copy.deepcopy(g[n]) for n in MOVING if n in g} for g in each] for each in groups]
        return steps, states, options

    def _go(self, position: tuple[int, list[Any], list[list[dict[str, Any]]]]) -> None:
        self._at, states, options = position
        for scheduler, state in zip((*self.schedulers, *self.own), states):
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, groups in zip(self.optimizers, options):
            for group, values in zip(optimizer.param_groups, groups):
                for name, value in values.items():
                    group[name] = group[name].copy_(value) if isinstance(group[name], Tensor) else value


@dataclass(frozen=True)
class TrainingContext:
    """Module, optimizers and options of a training loop. An engine sees these and no Trainer.

    Args:
        module, optimizers, device, precision: of the training. Precision converts inputs, and gives the context of a
            step, such as autocast.
        remake_optimizers: makes new optimizers as the module configures them.
        bring: returns a batch of the loader as ``training_step`` would get it.
        watchers: the user's objects that are called at every batch, such as callbacks.
        accumulate: batches between two steps of the optimizer.
        steps: counts the optimizer's steps, by ``increment_ready`` and ``increment_completed``.
        in_training_step: returns True while ``training_step`` runs.
        training_step_marks: attributes of the module that say so. A step that calls ``training_step`` itself sets them.
        obstacles: returns, in words, what must happen in a step besides ``training_step``, backward, clipping and the
            optimizer's step. Empty if these are all.
        watched: inside, ``training_step`` raises CannotVectorize if it reads a position in the loop.
        clip_value, clips_norm: limit of the gradients, None for none. True if it limits the norm, False if each entry.
        mean_over_processes: averages a number over processes that train each client together (DDP). None for others.
        course: of learning rates that may move in every step. None if nothing moves them.
    """

    module: L.LightningModule
    optimizers: Sequence[Optimizer]
    device: torch.device
    precision: Precision
    remake_optimizers: Callable[[], Sequence[Optimizer]]
    steps: Any
    in_training_step: Callable[[], bool]
    training_step_marks: Mapping[str, Any]
    obstacles: Callable[[], Iterable[str]]
    watched: Callable[[], AbstractContextManager[None]]
    bring: Callable[[Any], Any]
    watchers: Sequence[object] = ()
    accumulate: int = 1
    clip_value: float | None = None
    clips_norm: bool = True
    mean_over_processes: Callable[[Tensor], Tensor] | None = None
    course: Course | None = None

    def __post_init__(self) -> None:
        check_new([each for each in self.optimizers if not has_own_state(each)])

    @property
    def is_coarse(self) -> bool:
        """True if a step computes in half precision."""
        half = (torch.float16, torch.bfloat16)
        is_full = type(self.precision) in (Precision, DoublePrecision)
        return not is_full or any(parameter.dtype in half for parameter in self.module.parameters())

    @property
    def takes_gradient_steps(self) -> bool:
        """True if gradients are not scaled, so that they can be read."""
        return not (type(self.precision) is MixedPrecision and self.precision.precision == "16-mixed")

    @property
    def rate(self) -> float | None:
        """The learning rate, if there is one and steps are as plain SGD takes them. None otherwise."""
        if len(self.optimizers) != 1 or type(self.optimizers[0]) is not torch.optim.SGD:
            return None
        groups = self.optimizers[0].param_groups
        rates = {float(group["lr"]) for group in groups}
        is_plain = not any(group["momentum"] or group["weight_decay"] for group in groups)
        return rates.pop() if is_plain and len(rates) == 1 else None

    def keeps_state(self, settings: FederationSettings) -> bool:
        """Return True if clients keep the state of their optimizers from round to round.

        Sites need it: the first steps of a new Adam are as long for noise as for a gradient, so with few steps per
        round local training never settles (benchmarks/posterior/README.md, FashionMNIST).
        """
        if "optimizer" in settings.kept.what:
            return True
        keepable = not any(has_own_state(each) or isinstance(each, torch.optim.LBFGS) for each in self.optimizers)
        return keepable and settings.method.keeps_optimizer

    def learned_posterior(self, source: Source | None = None) -> LearnedPosterior | None:
        """Return the posterior of parameters outside of Bayesian layers. None if they are point masses.

        Without a ``source`` it is of an :class:`~lightning_fedbayes.IVON` among the optimizers. Raise FederationError
        if the Trainer or the optimizer does not suit the source.
        """
        learned = learned_posterior(self.optimizers, self.module, source)
        if learned is None or source is not None:
            return learned
        if self.accumulate != 1:
            raise FederationError(
                f"accumulate_grad_batches={self.accumulate} with fb.IVON, which draws the parameters in every step: "
                "batches in between would be taken at the mean. Use larger batches, or IVON(samples=...)"
            )
        if self.mean_over_processes is not None:
            raise FederationError(
                "strategy='ddp' with fb.IVON: every process would draw other parameters, and their gradients are "
                "averaged before IVON sees them; use strategy='fedbayes', which shares out the clients"
            )
        if not self.takes_gradient_steps:
            why = "the gradient scaler takes gradients before IVON draws; use 'bf16-mixed'"
            raise FederationError(f"precision='16-mixed' with fb.IVON: {why}")
        return learned


def takes_index(module: L.LightningModule) -> bool:
    """Return True if Lightning gives ``training_step`` the number of the batch."""
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def loss_and_rest(output: Tensor | Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Any]]:
    """Split the output of ``training_step`` into the loss and everything else."""
    if isinstance(output, Tensor):
        return output, {}
    if not isinstance(output, Mapping) or "loss" not in output:
        raise MisconfigurationException("`training_step` must return a Tensor, a dict with the key 'loss', or None")
    return output["loss"], {key: value for key, value in output.items() if key != "loss"}


Sums = dict[str, tuple[Tensor | float, float]]
"""Name of a figure → its sum over examples, and the number of examples."""
Collected = tuple[dict[int, Sums], dict[str, dict[str, Any]]]
"""The sums of each client, and the options of ``self.log`` for the mean of each figure."""
SIGNATURE, LOGGED = inspect.signature(L.LightningModule.log), ("prog_bar", "logger")


class TrainingLog:
    """Collects ``self.log(..., on_step=False, on_epoch=True)`` of ``training_step`` and logs the means once a round.

    The mean over examples is the one that Lightning logs, but a client that is left out does not count, and a value
    costs a few microseconds instead of Lightning's 200. Lightning logs everything else. The module's ``log`` is
    replaced between :meth:`install` and :meth:`remove`. ``is_shared``: other processes train some of the clients.
    """

    def __init__(self, module: L.LightningModule, in_training_step: Callable[[], bool]) -> None:
        self.module, self.in_training_step = module, in_training_step
        self.batch: Any = None
        self.is_shared = False
        self._log = module.log
        self._sums: Sums = {}
        self._clients: dict[int, Sums] = {}
        self._options: dict[str, dict[str, Any]] = {}

    def install(self) -> None:
        """Replace the module's ``log``."""
        self.module.log = self.log  # pyright: ignore[reportAttributeAccessIssue]

    def remove(self) -> None:
        """Restore the module's ``log``."""
        self.module.__dict__.pop("log", None)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect a mean over the epoch. Pass everything else on to :meth:`lightning.LightningModule.log`."""
        if self.in_training_step() and not args and is_epoch_mean(value, kwargs):
            weight = kwargs.get("batch_size") or extract_batch_size(self.batch)
            detached = value.detach() if isinstance(value, Tensor) else float(value)
            total, examples = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total + detached * weight, examples + weight)
            self._options[name] = {key: kwargs[key] for key in LOGGED if key in kwargs}
        else:
            if self.is_shared and self.in_training_step():
                self.check_local(name, SIGNATURE.bind(None, name, value, *args, **kwargs).arguments)
            self._log(name, value, *args, **kwargs)

    @staticmethod
    def check_local(name: str, options: Mapping[str, Any]) -> None:
        """Raise FederationError for a figure of the epoch, which each process would compute from its clients."""
        if options.get("on_epoch"):
            raise FederationError(
                f"self.log('{name}', ..., on_epoch=True) in training_step: processes train different clients, and of "
                "such figures only the mean over the round is gathered; give on_step=False, on_epoch=True, and log the "
                "value of a step under another name"
            )

    def end_client(self, client: int) -> dict[str, float]:
        """Return the means of the client that has just trained. They count unless it is forgotten."""
        self._clients[client], self._sums = self._sums, {}
        return {name: float(total) / examples for name, (total, examples) in self._clients[client].items()}

    def forget(self, client: int) -> None:
        """Do not count a client that is left out."""
        self._clients.pop(client, None)

    def collected(self) -> Collected:
        """Return the figures of this process's clients in this round, ready to be sent."""
        clients: dict[int, Sums] = {
            client: {name: (float(total), examples) for name, (total, examples) in sums.items()}
            for client, sums in self._clients.items()
        }
        return clients, self._options

    def take(self, everyone: Sequence[Collected]) -> None:
        """Take what the clients of all processes have logged in place of this one's."""
        self._clients = dict(sorted((c, sums) for clients, _ in everyone for c, sums in clients.items()))
        for _, options in everyone:
            self._options = options | self._options

    def end_round(self) -> None:
        """Log the means over the round's clients. Called where epoch-wise values are logged."""
        for name, options in self._options.items():
            sums = [client[name] for client in self._clients.values() if name in client]
            if sums:
                mean = sum(total for total, _ in sums) / sum(examples for _, examples in sums)
                self._log(name, mean, on_step=False, on_epoch=True, **options)
        self._sums, self._clients = {}, {}


def is_epoch_mean(value: Any, options: Mapping[str, Any]) -> bool:
    """Return True if a call of ``self.log`` asks only for the mean over the epoch."""
    return (
        isinstance(value, Tensor | float | int)
        and options.get("on_step") is False
        and options.get("on_epoch") is True
        and options.get("reduce_fx", "mean") == "mean"
    )
