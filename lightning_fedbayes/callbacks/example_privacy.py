"""Example-level privacy: clients whose optimizer sees clipped and noised gradients only (DP-SGD)."""

import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.callbacks.evaluator import callback_of
from lightning_fedbayes.callbacks.trainer import TrainsClients
from lightning_fedbayes.clients.privacy import accountant, check_no_buffers
from lightning_fedbayes.clients.privacy.example_gradients import GradSamples, check_network
from lightning_fedbayes.clients.sequential import SequentialEngine
from lightning_fedbayes.core.errors import LARGEST, FederationError, check_at_least, check_kind, listed, raised_as
from lightning_fedbayes.core.messages import EPSILONS
from lightning_fedbayes.core.seeding import private_normal
from lightning_fedbayes.layers import kl_divergence
from lightning_fedbayes.metrics.likelihoods import check_by_example
from lightning_fedbayes.modules import BayesianModule

FULL_PRECISION = ("32-true", "64-true")
ROUNDING = 1e-3
"""Size, relative to the gradients of the examples, below which a part of the loss counts as rounding."""
Counts = dict[int, dict[tuple[float, float], int]]
"""Client → noise multiplier and share of its examples in a batch → number of such steps."""


class ExamplePrivacy(L.Callback):
    r"""(ε, δ)-differential privacy for every training example, against whoever sees the messages of its client.

    In every step the gradient of each example is clipped to the L2 norm C, and the user's own optimizer gets their
    noisy mean (DP-SGD, Abadi et al. 2016, Algorithm 1):

    .. math:: \tilde g = \frac1B \Bigl(\sum_{i \in batch} g_i \min(1, C / \lVert g_i \rVert) + z C \epsilon\Bigr),
              \qquad \epsilon \sim N(0, I)

    Results of such steps give away no more than their ε, whatever becomes of them. When to use it: clients are
    institutions with many records each, such as hospitals, and the records are to be protected. ::

        Trainer(callbacks=[FederatedBayes(..., engine="sequential"), ExamplePrivacy(clip=1.0, noise_multiplier=1.0)])

    The module, with Bayesian layers or without, and its optimizer stay what they are: Opacus clips and noises the
    gradients between backward and step. The gradient of a :class:`~lightning_fedbayes.BayesianModule`'s KL, which
    depends on no example, is added as it is.

    ``privacy/example_epsilon`` is logged after each round: the largest ε of a client. Steps count as Poisson samples of
    a batch's share of the client's examples, neighbours differ in one example more or less. Batches are in fact
    shuffled, which is the customary approximation. Logged figures of training and numbers of examples are not
    protected. The noise comes from a secret in the checkpoint, so that a run that goes on ends as one that was not
    interrupted: keep checkpoints where the data are. Over Flower and FLARE it stands among the client's callbacks
    (``client_app(trainer={"callbacks": [...]})``), and secret and steps are in the client's folder.

    Args:
        clip: C > 0, in the unit of a gradient of the loss of one example.
        noise_multiplier: z ≥ 0. 0 clips only.
        delta: δ in (0, 1), well below one over a client's number of examples.
        seed: of a simulation that repeats. Whoever knows it can subtract the noise, so the figure is then
            ``privacy/simulated_example_epsilon``. None: nobody knows the noise.

    Raises:
        FederationError: before training starts: an argument outside its range, Opacus is not installed, no
            FederatedBayes with the sequential engine, several processes or optimizers, half precision, buffers that
            clients send, layers whose examples have no separate gradients, or a likelihood that takes them together. In
            the first step: a part of the loss that bypasses the layers, or parameters that it does not reach.
    """

    takes_single_gradients: ClassVar[bool] = True

    def __init__(
        self, clip: float = 1.0, noise_multiplier: float = 1.0, delta: float = 1e-5, seed: int | None = None
    ) -> None:
        accountant.check_clip(clip)
        accountant.check_noise(noise_multiplier)
        accountant.check_delta(delta)
        accountant.check_opacus()
        if seed is not None:
            check_at_least("seed", seed, -LARGEST)
        self.seed = seed
        self._secret = secrets.token_hex(32)
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self._counts: Counts = {}
        self._finished: Counts = {}  # of whole rounds
        self._trains: Any = None
        self._samples: GradSamples | None = None
        self._optimizer: Any = None
        self._checked = False
        self._batch_idx = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the Trainer and the network."""
        if stage != "fit":
            return
        found = callback_of(trainer, TrainsClients)
        if found is None:
            need = "Trainer(callbacks=[FederatedBayes(...), ExamplePrivacy(...)])"
            raise FederationError(f"ExamplePrivacy needs a FederatedBayes beside it: {need}")
        self._trains = found
        if found.settings.engine == "vectorized":
            what = "ExamplePrivacy needs gradients of single examples, which engine='vectorized' does not compute"
            raise FederationError(f"{what}; use engine='sequential' or 'auto'")
        if trainer.world_size > 1:
            why = f"it counts the steps of clients that one process trains, and there are {trainer.world_size}"
            raise FederationError(f"ExamplePrivacy: {why}; use devices=1")
        if trainer.precision not in FULL_PRECISION:
            why = "a gradient is clipped and noised in full precision"
            raise FederationError(f"precision={trainer.precision!r}: {why}; use '32-true'")
        why = "To clip the gradient of each hides none: take FederatedBayes(privacy=UpdatePrivacy(...))"
        check_by_example(pl_module, why, FederationError)
        check_network(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the optimizer."""
        if len(trainer.optimizers) != 1:
            found = f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers"
            raise FederationError(f"ExamplePrivacy: {found}, and clips an example over all parameters at once; use one")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """At the first round, put hooks on the layers."""
        if self._samples is not None:
            return
        check_no_buffers(self._trains.engine.model.federated_buffers)
        self._samples = GradSamples(pl_module)
        self._optimizer = accountant.import_opacus("opacus.optimizers").DPOptimizer(
            trainer.optimizers[0],
            noise_multiplier=0.0,  # below: Opacus's generator takes 32 bits of a seed
            max_grad_norm=self.clip,
            expected_batch_size=1,
        )
        self._checked = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forget the gradients of the step before."""
        assert self._samples is not None
        self._samples.reset()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Replace the gradient by the noisy mean of the clipped gradients of the examples."""
        assert self._samples is not None
        engine = self._trains.engine
        assert isinstance(engine, SequentialEngine)  # gradients of single examples are an obstacle to a stack
        parameters = self._optimizer.params
        check_all_sampled(pl_module, parameters)
        of_prior = kl_gradients(pl_module, parameters)
        if not self._checked:
            check_nothing_else(pl_module, parameters, of_prior)
            self._checked = True
        client, step = engine.turn
        examples = len(self._optimizer.grad_samples[0])
        self._optimizer.expected_batch_size = examples
        self._optimizer.pre_step()
        key, std = self._secret if self.seed is None else self.seed, self.noise_multiplier * self.clip / examples
        for number, (parameter, gradient) in enumerate(zip(parameters, of_prior)):
            about = ("gradient", engine.plan.round, client, step, number)
            noise = private_normal(key, parameter.grad, *about, protects=parameter.grad)
            parameter.grad.add_(noise, alpha=std)
            if gradient is not None:
                parameter.grad.add_(gradient)
        self._samples.reset()
        kinds = self._counts.setdefault(client, {})
        kind = self.noise_multiplier, min(1.0, examples / engine.sizes[client])
        kinds[kind] = kinds.get(kind, 0) + 1

    @property
    def epsilons(self) -> dict[int, float]:
        """ε of an example of each client that has trained, by the client's number."""
        return {
            client: accountant.epsilon_spent([(*kind, steps) for kind, steps in kinds.items()], self.delta)
            for client, kinds in self._counts.items()
        }

    @property
    def figure(self) -> str:
        """Name of the ε in logs."""
        return EPSILONS[2 + (self.seed is not None)]

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the steps of the round: it is over, and a checkpoint may be written in its validation."""
        self._finished = {client: dict(kinds) for client, kinds in self._counts.items()}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the largest ε of a client."""
        self.on_validation_start(trainer, pl_module)
        pl_module.log(self.figure, max(self.epsilons.values(), default=0.0))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Take the hooks off the layers."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the hooks off the layers."""
        if self._samples is not None:
            self._samples.remove()
        self._samples, self._optimizer = None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the secret, and the steps of every client up to the end of the last finished round."""
        steps = {client: [(*kind, n) for kind, n in kinds.items()] for client, kinds in self._finished.items()}
        return {"steps": steps, "secret": self._secret}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. Raise FederationError for another state."""
        with raised_as(FederationError, "ExamplePrivacy: the state is of another version", "begin anew"):
            accountant.check_steps(state_dict["steps"])
            check_kind("secret", secret := state_dict.get("secret", self._secret), str, "a text is needed")
            counts = {client: {(z, share): n for z, share, n in each} for client, each in state_dict["steps"].items()}
        self._secret, self._counts = secret, counts
        self._finished = {client: dict(kinds) for client, kinds in counts.items()}


def kl_gradients(module: nn.Module, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradient of a BayesianModule's weighted KL, which depends on no example. None for other modules."""
    loss = module.kl_factor() * kl_divergence(module.network) if isinstance(module, BayesianModule) else None
    if loss is None or not loss.requires_grad:
        return [None] * len(parameters)
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def check_all_sampled(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Raise FederationError if some of ``parameters`` have no gradients of single examples."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    missing = [names[id(each)] for each in parameters if getattr(each, "grad_sample", None) is None]
    if missing:
        remedy = "call the layers themselves, and freeze what is not used (requires_grad_(False))"
        why = f"the loss of this batch does not depend on {listed(missing)} through the layers that hold them"
        raise FederationError(f"ExamplePrivacy: {why}; {remedy}")


def check_nothing_else(module: nn.Module, parameters: Sequence[Any], of_prior: Sequence[Tensor | None]) -> None:
    """Raise FederationError unless the gradient is the mean of the examples' and the prior's, without penalties."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter, prior in zip(parameters, of_prior):
        samples = parameter.grad_sample.flatten(1)
        prior = torch.zeros_like(parameter) if prior is None else prior
        rest = parameter.grad - prior - samples.mean(0).view_as(parameter)
        if rest.norm() > ROUNDING * (samples.norm(dim=1).max() + prior.norm()):
            what = f"a part of the loss reaches '{names[id(parameter)]}' past the layers, such as a penalty"
            remedy = "Use weight_decay, or a BayesianModule, with a KL that is known"
            raise FederationError(f"ExamplePrivacy: {what}, and would be lost. {remedy}")
