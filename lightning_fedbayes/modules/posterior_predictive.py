"""Predictions with uncertainty for any module, from a Gaussian posterior of its parameters."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lightning_fedbayes.core.batches import Unpack, check_unpack, output_of, unpacked
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_choice, check_kind, raised_as
from lightning_fedbayes.core.posterior import GaussianPosterior, check_posterior
from lightning_fedbayes.layers.posterior_view import parameter_paths
from lightning_fedbayes.metrics import likelihoods
from lightning_fedbayes.modules.bayesian_module import BayesianModule, ScoredModule, scores_of
from lightning_fedbayes.modules.sampling import outputs_with
from lightning_fedbayes.modules.sources.curvature import KroneckerPosterior, draws_of_outputs, linearised_outputs

T = TypeVar("T")

OUTPUT_DRAWS = 256
"""Fewest draws of linearised outputs, which are nearly free once their covariance is known."""
REMEDY = "give inputs that its forward takes, by unpack=lambda batch: (inputs, targets) if the batch has others"


class PosteriorPredictive(ScoredModule):
    r"""Predicts with any network from a posterior of its parameters.

    .. math:: p(y \mid x) \approx \frac1S \sum_s p(y \mid f_s), \qquad
              f_s = f(x; \theta_s),\ \theta_s \sim N(\mu, \Sigma)
              \quad\text{or}\quad f_s \sim N\left(f(x; \mu), J \Sigma J^\top\right)

    The first draws parameters. The second draws outputs of the network linearised at the mean, with Jacobian J
    (:func:`~lightning_fedbayes.modules.sources.curvature.linearised_outputs`), as Laplace approximations ask for. ::

        predictive = fb.PosteriorPredictive(model, callback.posterior)        # after a federation
        predictive = fb.PosteriorPredictive(model, optimizer.posterior(model))  # after training with fb.IVON
        predictive = fb.PosteriorPredictive.load_from_checkpoint("last.ckpt", module=Model())  # of either
        L.Trainer(callbacks=[fb.UncertaintyReport()]).validate(predictive, dataloader)  # scores and pictures

    The module is put into evaluation mode, with its weights unchanged.

    When to use it: for networks without Bayesian layers, with a posterior from :class:`~lightning_fedbayes.IVON` or
    :class:`~lightning_fedbayes.Laplace`.

    Args:
        module: any module that maps inputs to logits (batch, classes), or to means (batch,) or (batch, targets): a
            tensor, a tuple that begins with one, or an object or mapping with ``logits``. A LightningModule without
            ``forward`` gives them by its ``predict_step``.
        posterior: of its parameters. Those that it does not name keep their value.
        samples: number of draws S. At least 256 of linearised outputs, which are nearly free.
        likelihood: of the outputs, or its name. None: the module's attribute ``likelihood``, or the only possible one
            for the first batch of inputs and targets (:func:`~lightning_fedbayes.metrics.likelihoods.likelihood_of`).
            For inputs without targets, classes. Moments of a linearised Gaussian are exact.
        predictive: "draws" of the parameters, or "linearised". None: "linearised" for a posterior of a Laplace
            approximation, otherwise "draws".
        unpack: batch → (inputs, targets). Not needed for a tensor of inputs, a sequence that begins with inputs and
            targets, and a mapping, or an object such as a graph, with targets under "labels", "label", "y", "target" or
            "targets". An object goes to ``forward`` as it is, a mapping as keywords if they fit its signature, or else
            as one argument. A method ``unpack`` of ``module`` does the same.

    Raises FedBayesError: an argument is out of range, or the posterior is of another network.
    Source of the linearised predictive: Immer, Korzepa and Bauer 2021.

    >>> network = nn.Linear(4, 3)
    >>> posterior = GaussianPosterior.point_mass({name: p.detach() for name, p in network.named_parameters()})
    >>> PosteriorPredictive(network, posterior).predict_step(torch.zeros(5, 4)).probs.shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        module: nn.Module,
        posterior: GaussianPosterior | KroneckerPosterior | None = None,
        samples: int = 10,
        likelihood: likelihoods.Likelihood | str | None = None,
        predictive: Literal["draws", "linearised"] | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        super().__init__()
        check_kind("module", module, nn.Module, "give a torch.nn.Module", error=FedBayesError)
        if isinstance(module, PosteriorPredictive):
            raise FedBayesError("module predicts from a posterior already: give its network, module.network")
        check_at_least("samples", samples, 1, error=FedBayesError)
        if predictive is not None:
            check_choice("predictive", predictive, ("draws", "linearised"), error=FedBayesError)
        check_unpack(unpack)
        self.network = module
        self.posterior, self.samples = posterior, samples
        self.likelihood = None if likelihood is None else likelihoods.get_likelihood(likelihood)
        self.predictive = predictive
        self._unpack = unpack
        self._scores = None
        self._one_by_one = False
        if posterior is not None:
            self._check(posterior)
        self.eval()

    def _check(self, posterior: GaussianPosterior | KroneckerPosterior) -> None:
        if not isinstance(posterior, KroneckerPosterior):
            check_posterior(posterior, "posterior", error=FedBayesError)
        paths, shapes = parameter_paths(self.network), {n: p.shape for n, p in self.network.named_parameters()}
        for name, mean in posterior.mean.items():
            if name not in paths or shapes[paths[name]] != mean.shape:
                what = f"the posterior has '{name}' of shape {tuple(mean.shape)}, and the module has no such parameter"
                raise FedBayesError(f"{what}: give the module that was trained, not a part of it or another one")

    def forward(self, inputs: Any) -> Tensor:
        """Return the network's output at its present parameters."""
        return output_of(self.network, inputs)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets of a batch, or None for targets. Raise FedBayesError if it is ambiguous."""
        is_pair = isinstance(self.network, BayesianModule) and type(self.network).unpack is BayesianModule.unpack
        return unpacked(batch, None if is_pair else self.network, self._unpack)  # inputs alone will do here

    @property
    def is_linearised(self) -> bool:
        """True if predictions come from the network linearised at the mean, False for draws of the parameters."""
        return self._known().linearised if self.predictive is None else self.predictive == "linearised"

    def _known(self) -> GaussianPosterior | KroneckerPosterior:
        """Return the posterior, on the network's device. Raise FedBayesError if there is none."""
        if self.posterior is None:
            raise FedBayesError("there is no posterior: give one, or load a checkpoint that has one")
        device = next(self.network.parameters()).device
        if next(iter(self.posterior.mean.values())).device != device:
            self.posterior = self.posterior.to(device)
        return self.posterior

    @torch.no_grad()
    def sample(self, inputs: Any, samples: int | None = None) -> Tensor:
        r"""Return draws of the network's output, shape (samples, batch, \*); None: as many as the constructor says.

        Raises FedBayesError: there is no posterior, or the network cannot predict the inputs.
        """
        if self.is_linearised:
            return self._draws(*self._linearised(inputs), samples)
        posterior = self._known()
        sets = posterior.sample(self.samples if samples is None else samples)
        buffers = posterior.buffers if isinstance(posterior, KroneckerPosterior) else None
        return self._vectorized_if_possible(outputs_with, self.network, sets, inputs, buffers=buffers)

    @torch.no_grad()
    def at_mean(self, inputs: Any) -> Tensor:
        r"""Return the network's output at the posterior's mean, shape (batch, \*)."""
        posterior = self._known()
        at = {name: value.unsqueeze(0) for name, value in posterior.mean.items()}
        buffers = posterior.buffers if isinstance(posterior, KroneckerPosterior) else None
        return outputs_with(self.network, at, inputs, vectorized=False, buffers=buffers)[0]

    def _linearised(self, inputs: Any) -> tuple[Tensor, Tensor]:
        return self._vectorized_if_possible(linearised_outputs, self.network, self._known(), inputs)

    def _draws(self, mean: Tensor, covariance: Tensor, samples: int | None = None) -> Tensor:
        return draws_of_outputs(mean, covariance, max(self.samples, OUTPUT_DRAWS) if samples is None else samples)

    def _vectorized_if_possible(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a function. If the network does not vectorise, now and from then on with ``vectorized=False``."""
        with raised_as(FedBayesError, f"{type(self.network).__name__} cannot predict this batch", REMEDY):
            if not self._one_by_one:
                try:
                    return function(*arguments, **options)
                except (RuntimeError, ValueError):  # an error of the network itself shows below
                    self._one_by_one = True
            return function(*arguments, vectorized=False, **options)

    def likelihood_for(self, outputs: Tensor, targets: Any = None) -> likelihoods.Likelihood:
        """Return the likelihood, if need be by the first outputs and targets. Raise FedBayesError if unclear."""
        found = likelihoods.said_by(self)
        if found is None and isinstance(targets, Tensor):
            self.likelihood = found = likelihoods.likelihood_of(self.network, outputs, targets)
        if found is None and (outputs.ndim < 2 or outputs.shape[1] < 2):
            what = f"{type(self.network).__name__} has one output per example, a logit or a number"
            raise FedBayesError(f"{what}: give likelihood='bernoulli' or likelihood=fb.Gaussian(noise=...)")
        return found or likelihoods.Categorical()

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Return mean prediction and decomposed uncertainty of a batch: inputs, with or without targets."""
        return self._predict(*self.unpack(batch))

    def _predict(self, inputs: Any, targets: Any = None) -> Any:
        if self.is_linearised and isinstance(likelihoods.said_by(self), likelihoods.Gaussian):
            mean, covariance = self._linearised(inputs)
            known = likelihoods.said_by(self)  # a head knows its noise now
            assert isinstance(known, likelihoods.Gaussian)
            if known.in_outputs:
                return known.predict(self._draws(mean, covariance))
            mean = mean.unsqueeze(-1) if mean.ndim == 1 else mean
            moments = mean, covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
            return known.predict(self._draws(mean, covariance), moments)
        outputs = self.sample(inputs)
        if not isinstance(targets, Tensor) or not targets.is_floating_point():
            with suppress(FedBayesError):  # predictions need no classes that are right
                return self.likelihood_for(outputs[0], targets).predict(outputs)
            targets = None
        return self.likelihood_for(outputs[0], targets).predict(outputs)

    def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> likelihoods.Rows:
        """Score a batch of inputs and targets, and return its rows."""
        inputs, targets = unpacked(batch, self, needs_targets=True)
        known = likelihoods.said_by(self)
        if known is None or known.of_classes:
            draws = self.sample(inputs)
            known = self.likelihood_for(draws[0], targets)
            rows = known.rows(draws, targets)
        else:
            rows = known.rows_of(self._predict(inputs, targets), targets)
        if self._scores is None:
            self._scores = scores_of(known).to(self.device)
        self._scores.update(rows)
        return rows

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the posterior."""
        if self.posterior is not None:
            checkpoint["posterior"] = self.posterior.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the posterior of this module's checkpoint, or of one that training has written."""
        if "posterior" in checkpoint:
            state = checkpoint["posterior"]
            kind = KroneckerPosterior if isinstance(state, Mapping) and "terms" in state else GaussianPosterior
            posterior = kind.from_state_dict(state)
        else:
            posterior = trained_posterior(checkpoint, self.network)
            checkpoint["state_dict"] = {f"network.{name}": value for name, value in checkpoint["state_dict"].items()}
        self._check(posterior)
        self.posterior = posterior


def trained_posterior(checkpoint: Mapping[str, Any], module: nn.Module) -> GaussianPosterior:
    """Return the posterior in a checkpoint of a federation or an IVON on the whole module. Else raise FedBayesError."""
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, Mapping) and {"posterior", "rounds"} <= state.keys():
            return GaussianPosterior.from_state_dict(state["posterior"])
    for optimizer in checkpoint.get("optimizer_states", ()):
        groups, states = optimizer["param_groups"], optimizer["state"]
        if not all("hessian_init" in group for group in groups):
            continue
        names = [name for name, _ in module.named_parameters()]
        numbers = [number for group in groups for number in group["params"]]
        mean = {name: checkpoint["state_dict"][name] for name in names}
        shapes = [states[n]["momentum"].shape if n in states else mean[name].shape for n, name in zip(numbers, names)]
        if len(names) != len(numbers) or shapes != [each.shape for each in mean.values()]:
            what = "the checkpoint's IVON does not train all parameters of this module in their order"
            raise FedBayesError(f"{what}: give posterior=optimizer.posterior(module) in place of a checkpoint")
        variance = {name: torch.zeros_like(value) for name, value in mean.items()}
        for n, name in zip(numbers, names):
            if "precision" in states.get(n, {}):
                variance[name] = states[n]["precision"].reciprocal().to(mean[name])
        return GaussianPosterior(mean, variance)
    why = "it is neither of a federation (FederatedBayes) nor of training with fb.IVON"
    raise FedBayesError(f"the checkpoint holds no posterior: {why}")
