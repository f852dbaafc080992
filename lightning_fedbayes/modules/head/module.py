"""The exact head in a Trainer: a module that sums statistics in training, of one data set or of a federation."""

from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_fedbayes.core.batches import output_of, unpacked
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_kind
from lightning_fedbayes.layers import evaluation_mode
from lightning_fedbayes.metrics.likelihoods import Categorical, Gaussian
from lightning_fedbayes.modules.head.fit import HeadFit, HeadSlopes
from lightning_fedbayes.modules.head.head import BayesianHead
from lightning_fedbayes.modules.linear_regression import LinearStatistics
from lightning_fedbayes.modules.posterior_predictive import PosteriorPredictive


class HeadModule(PosteriorPredictive):
    """A frozen backbone with a :class:`~lightning_fedbayes.BayesianHead`, for the Trainer, federated or not.

    ::

        model = fb.HeadModule(backbone, fb.BayesianHead(outputs=10, likelihood="one_hot"), features=1280)
        federation = fb.FederatedBayes(fb.DirichletPartition(100, alpha=0.01))
        L.Trainer(max_epochs=1, callbacks=[federation]).fit(model, data)      # one exchange: exact
        L.Trainer(callbacks=[fb.UncertaintyReport()]).validate(model, data)

    Its parameters are sums over examples, and a training step adds a batch's: the loss is minus their inner product
    with the batch's statistics, and the optimizer SGD of rate 1. One epoch is one exchange. A softmax takes an epoch
    for the sums and one per further exchange, and then ends the fit: give it enough ``max_epochs``, or -1. It needs all
    clients in every round (:class:`~lightning_fedbayes.methods.Sums`).

    When to use it: in place of a fine-tuned head in a Trainer with its data, loggers, reports and calibration. For
    features in memory :meth:`BayesianHead.fit_clients` is shorter.

    Args:
        backbone: maps inputs to features, shape (batch, features). It is frozen, and runs in evaluation mode.
        head: the head.
        features: their number.
        samples: draws of a prediction, at least 256.

    Raises FedBayesError: an argument is out of range.
    """

    federated_method: ClassVar[str] = "sums"

    def __init__(self, backbone: nn.Module, head: BayesianHead, features: int, samples: int = 256) -> None:
        check_kind("head", head, BayesianHead, "give an fb.BayesianHead", error=FedBayesError)
        check_at_least("features", features, 1, error=FedBayesError)
        super().__init__(backbone, None, samples, Categorical() if head.is_classifier else Gaussian())
        self.train().network.requires_grad_(False)
        self.head = head
        columns, outputs = features + 1, head.outputs
        self.sums = _zeros(gram=(columns, columns), moment=(columns, outputs), square=(outputs,))
        if head.likelihood == "softmax":
            slope, spread = (outputs, columns), (outputs, outputs)
            curvature = (outputs * (outputs - 1) // 2 if head.takes_pairs(columns) else 0, columns, columns)
            self.slopes = _zeros(loss=(), slope=slope, spread=spread, curvature=curvature, num_examples=())
            self.slopes.requires_grad_(False)
        self._has_clients = False
        self._before: HeadFit | None = None
        self._found: tuple[tuple[float, ...], HeadFit] | None = None

    def configure_optimizers(self) -> Optimizer:
        """Return SGD of rate 1, with steps that are sums."""
        return SGD([p for name, p in self.named_parameters() if not name.startswith("network.")], lr=1.0)

    def on_fit_start(self) -> None:
        """Forget whether the last fit had clients."""
        self._has_clients = False

    def on_client_start(self, client: Any) -> None:
        """Note that the method begins every client at 0."""
        self._has_clients = True

    def on_train_epoch_start(self) -> None:
        """Begin the next exchange from the last one's result. A head that is done begins again."""
        if self.head.likelihood == "softmax" and not self._is_empty:
            self._begin(None if self.fitted.is_done else self.fitted)

    def _begin(self, before: HeadFit | None) -> None:
        """Exchange slopes at ``before`` from now on, or sums if it is None, starting at 0."""
        self._before = before
        self.sums.requires_grad_(before is None)
        self.slopes.requires_grad_(before is not None)
        for value in self._exchanged.values():
            value.data.zero_()

    @property
    def _exchanged(self) -> nn.ParameterDict:
        return self.sums if self._before is None else self.slopes

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return a loss with minus the batch's statistics as its gradient."""
        own = self._exchanged
        for value in own.values() if batch_idx == 0 and not self._has_clients else ():
            value.data.zero_()
        with torch.no_grad():
            inputs, targets = unpacked(batch, self, needs_targets=True)
            features = self.features(inputs)
            if self._before is None:
                found = self.head.sums(features, targets)
            else:
                found = self.head.slopes(self._before, features, targets)
            values = {name: torch.as_tensor(getattr(found, name)).to(each) for name, each in own.items()}
        return -torch.stack([(own[name] * value).sum() for name, value in values.items()]).sum()

    def on_train_epoch_end(self) -> None:
        """End the fit once the head is done."""
        if self._before is not None and self.fitted.is_done:
            self.trainer.should_stop = True

    @property
    def _is_empty(self) -> bool:
        return not float(self.sums["gram"].detach()[-1, -1]) > 0

    @property
    def fitted(self) -> HeadFit:
        """The head of the module's present sums. Raises FedBayesError if it has none."""
        if self._is_empty:
            raise FedBayesError("the head has seen no examples yet: fit it first")
        key = tuple(float(value.detach().sum()) for value in self._exchanged.values())
        if self._found is None or self._found[0] != key:
            self._found = key, self._fit()
        return self._found[1]

    def _fit(self) -> HeadFit:
        values = {name: value.detach().cpu().clone() for name, value in self._exchanged.items()}
        if self._before is None:
            gram = (values["gram"] + values["gram"].T) / 2  # noise of privacy is of single entries
            smallest = torch.linalg.eigvalsh(gram)[0].clamp(max=0)
            count, square = max(1, round(float(values["gram"][-1, -1]))), values["square"].clamp_min(0)
            gram = gram - smallest * torch.eye(len(gram)).to(gram)
            return self.head.fit(LinearStatistics(gram, values["moment"], square, count))
        count = round(float(values.pop("num_examples")))
        return self.head.step(self._before, HeadSlopes(**values, num_examples=count)) if count else self._before

    def features(self, inputs: Any) -> Tensor:
        """Return the backbone's outputs, in its evaluation mode."""
        with evaluation_mode(self.network):
            return output_of(self.network, inputs)

    @property
    def is_linearised(self) -> bool:
        """True: the head is linear."""
        return True

    def forward(self, inputs: Any) -> Tensor:
        """Return logits or means at the mean of the head."""
        return self.fitted.linear().to(self.device)(self.features(inputs))

    def _linearised(self, inputs: Any) -> tuple[Tensor, Tensor]:
        if self._is_empty and self._trainer is not None and self.trainer.sanity_checking:
            features, outputs = self.features(inputs), self.head.outputs
            return features.new_zeros(len(features), outputs), features.new_zeros(len(features), outputs, outputs)
        fitted = self.fitted
        if not self.head.is_classifier:
            self.likelihood = Gaussian(fitted.noise**0.5)
        features = self.features(inputs)
        mean, covariance = fitted.moments(features)
        return mean.to(features), covariance.to(features)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the state of the exchanges. The sums are parameters."""
        checkpoint["head"] = None if self._before is None else asdict(self._before)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of the exchanges."""
        if checkpoint.get("head") is not None:
            state = checkpoint["head"]
            self._begin(HeadFit(**{**state, "sums": LinearStatistics(**state["sums"])}))


def _zeros(**shapes: tuple[int, ...]) -> nn.ParameterDict:
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return nn.ParameterDict({name: nn.Parameter(value) for name, value in zeros.items()})
