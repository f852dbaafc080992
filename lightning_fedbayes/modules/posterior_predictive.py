"""Predictions with uncertainty for any module, from a Gaussian posterior of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fedbayes.errors import FedBayesError, check_at_least, check_choice, check_kind, check_number
from lightning_fedbayes.modules.classifier import ClassPrediction, ClassScores, class_prediction
from lightning_fedbayes.modules.regressor import GaussianScores, RegressionPrediction, regression_prediction
from lightning_fedbayes.modules.sampling import draws_from_posterior, outputs_with, parameter_paths
from lightning_fedbayes.posterior import GaussianPosterior, check_posterior


class PosteriorPredictive(L.LightningModule):
    r"""Predicts with any network by drawing its parameters from a posterior.

    .. math:: p(y \mid x) \approx \frac1S \sum_s p(y \mid f(x; \theta_s)), \qquad \theta_s \sim N(\mu, \sigma^2)

    ::

        predictive = fb.PosteriorPredictive(model, callback.posterior)        # after a federation
        predictive = fb.PosteriorPredictive(model, optimizer.posterior(model))  # after training with fb.IVON alone
        predictive = fb.PosteriorPredictive.load_from_checkpoint("last.ckpt", module=Model())  # of either

        predictions = L.Trainer().predict(predictive, dataloader)   # probabilities and their uncertainty, per batch
        L.Trainer(callbacks=[fb.UncertaintyReport()]).validate(predictive, dataloader)  # scores and pictures

    All draws are one stacked pass where ``torch.func.vmap`` can run the network, otherwise one after the other. The
    module is put into evaluation mode; its weights are not changed.

    When to use it: for networks without Bayesian layers, whose posterior comes from :class:`~lightning_fedbayes.IVON`.

    Args:
        module: any module whose ``forward`` maps the inputs to logits (batch, classes), or to means (batch,) or
            (batch, targets). Batches are inputs, or a sequence of inputs and targets.
        posterior: of its parameters; those that it does not name keep their value.
        samples: number of draws S.
        task: "classification" or "regression".
        noise_std: standard deviation of the observation noise, for regression.

    Raises:
        FedBayesError: an argument is out of range, or the posterior is of another network.

    >>> network = nn.Linear(4, 3)
    >>> posterior = GaussianPosterior.point_mass({name: p.detach() for name, p in network.named_parameters()})
    >>> PosteriorPredictive(network, posterior).predict_step(torch.zeros(5, 4)).probs.shape
    torch.Size([5, 3])
    """

    def __init__(
        self, module: nn.Module, posterior: GaussianPosterior | None = None, samples: int = 10,
        task: Literal["classification", "regression"] = "classification", noise_std: float = 0.0,
    ) -> None:
        super().__init__()
        check_kind("module", module, nn.Module, "give a torch.nn.Module", error=FedBayesError)
        check_at_least("samples", samples, 1, error=FedBayesError)
        check_choice("task", task, ("classification", "regression"), error=FedBayesError)
        check_number("noise_std", noise_std, "[0, inf)", error=FedBayesError, why="it is a standard deviation")
        self.network = module
        self.posterior = posterior
        self.samples = samples
        self.task = task
        self.noise_std = noise_std
        self._scores = ClassScores() if task == "classification" else GaussianScores()
        self._one_by_one = False
        if posterior is not None:
            self._check(posterior)
        self.eval()

    def _check(self, posterior: GaussianPosterior) -> None:
        """Raise FedBayesError unless ``posterior`` is of the network."""
        check_posterior(posterior, "posterior", error=FedBayesError)
        paths, shapes = parameter_paths(self.network), {n: p.shape for n, p in self.network.named_parameters()}
        for name, mean in posterior.mean.items():
            if name not in paths or shapes[paths[name]] != mean.shape:
                raise FedBayesError(
                    f"the posterior has '{name}' of shape {tuple(mean.shape)}, and the module has no such parameter: "
                    "give the module that was trained, not a part of it or another one"
                )

    def forward(self, inputs: Any) -> Tensor:
        """The network's output at the values that its parameters have now."""
        return self.network(inputs)

    @torch.no_grad()
    def sample(self, inputs: Any, samples: int | None = None) -> Tensor:
        """Return the network's output at each of S draws of the parameters, shape (samples, batch, *).

        Raises:
            FedBayesError: there is no posterior.
        """
        if self.posterior is None:
            raise FedBayesError("there is no posterior: give one, or load a checkpoint that has one")
        count = self.samples if samples is None else samples
        device = next(self.network.parameters()).device
        sets = draws_from_posterior(self.posterior.to(device), count)
        if not self._one_by_one:
            try:
                return outputs_with(self.network, sets, inputs)
            except (RuntimeError, ValueError):  # an error of the network itself shows below
                self._one_by_one = True
        return outputs_with(self.network, sets, inputs, vectorized=False)

    def predict_step(
        self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> ClassPrediction | RegressionPrediction:
        """Return mean prediction and decomposed uncertainty of a batch: inputs, or a sequence of inputs and targets."""
        return self._predict(batch[0] if isinstance(batch, list | tuple) else batch)

    def _predict(self, inputs: Any) -> ClassPrediction | RegressionPrediction:
        outputs = self.sample(inputs)
        if self.task == "classification":
            return class_prediction(outputs.softmax(-1))
        return regression_prediction(outputs, outputs.new_tensor(self.noise_std**2))

    def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score a batch of inputs and targets; what it returns is what a Bayesian module's step returns."""
        inputs, targets = batch[0], batch[1]
        if isinstance(self._scores, ClassScores):
            return self._scores.update(self.sample(inputs).softmax(-1), targets)
        prediction = self._predict(inputs)
        assert isinstance(prediction, RegressionPrediction)
        return self._scores.update(prediction, targets)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log the scores over all batches."""
        self.log_dict(self._scores.take("val"))

    def on_test_epoch_end(self) -> None:
        """Log the scores over all batches."""
        self.log_dict(self._scores.take("test"))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the posterior."""
        if self.posterior is not None:
            checkpoint["posterior"] = self.posterior.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the posterior, of this module's own checkpoint or of one that training has written."""
        if "posterior" in checkpoint:
            posterior = GaussianPosterior.from_state_dict(checkpoint["posterior"])
        else:
            posterior = trained_posterior(checkpoint, self.network)
            checkpoint["state_dict"] = {f"network.{name}": value for name, value in checkpoint["state_dict"].items()}
        self._check(posterior)
        self.posterior = posterior


def trained_posterior(checkpoint: Mapping[str, Any], module: nn.Module) -> GaussianPosterior:
    """Return the posterior that a checkpoint of Lightning holds: of a federation, or of an IVON optimizer.

    Args:
        checkpoint: as Lightning writes it.
        module: that was trained. Of an IVON, all its parameters, in their order.

    Raises:
        FedBayesError: it holds none, or it is not known whose it is.
    """
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, Mapping) and {"posterior", "rounds"} <= state.keys():
            return GaussianPosterior.from_state_dict(state["posterior"])
    for optimizer in checkpoint.get("optimizer_states", ()):
        groups, states = optimizer["param_groups"], optimizer["state"]
        if not all("hessian_init" in group for group in groups):
            continue
        names = [name for name, _ in module.named_parameters()]
        numbers = [number for group in groups for number in group["params"]]
        values = checkpoint["state_dict"]
        mean = {name: values[name] for name in names}
        shapes = [states[n]["momentum"].shape if n in states else mean[name].shape for n, name in zip(numbers, names)]
        if len(names) != len(numbers) or shapes != [each.shape for each in mean.values()]:
            raise FedBayesError(
                "the checkpoint's IVON does not train all parameters of this module in their order, so it is not known "
                "whose each variance is: give posterior=optimizer.posterior(module) in place of a checkpoint"
            )
        variance = {
            name: states[n]["precision"].reciprocal().to(mean[name]) if "precision" in states.get(n, {})
            else torch.zeros_like(mean[name]) for n, name in zip(numbers, names)
        }
        return GaussianPosterior(mean, variance)
    raise FedBayesError(
        "the checkpoint holds no posterior: it is neither of a federation (FederatedBayes) nor of training with fb.IVON"
    )
