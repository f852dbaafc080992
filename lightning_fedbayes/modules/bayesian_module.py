"""Base LightningModules: variational training of a network, prediction by Monte Carlo, and scores."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset
from torchmetrics import MeanSquaredError, Metric, MetricCollection

from lightning_fedbayes import metrics
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_choice, check_kind, check_number, shown
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.layers import kl_divergence, mean_only
from lightning_fedbayes.layers.base import is_exporting
from lightning_fedbayes.layers.scaler import FederatedScaler, ScaleSums, asking
from lightning_fedbayes.metrics.likelihoods import Cox, Gaussian, Likelihood, Rows, get_likelihood, said_by
from lightning_fedbayes.metrics.scores import CoxNLL
from lightning_fedbayes.modules import sampling
from lightning_fedbayes.modules.sampling import NETWORK, PREDICTIVES, GlobalRound, Predictive

OPTIONS = ("samples", "kl_weight", "warmup_rounds", "learning_rate", "predictive")
"""Hyperparameters of every :class:`BayesianModule`."""

FAR = 30.0
"""Ratio of targets to noise, or of noise to targets, from which a line says so."""


class BayesianModule(L.LightningModule):
    r"""Variational inference for a network with Bayesian layers.

    The loss per example is the negative ELBO divided by the number of examples,

    .. math:: \mathcal L = \frac1B \sum_{i \in batch} -\log p(y_i | x_i, \theta) + \frac{\beta_t}{n}\, KL(q\|p),
              \qquad \theta \sim q,

    with the KL summed over all parameters and n the number of training examples, in a federation the present client's.
    ``train/nll``, ``train/kl`` and ``train/kl_factor`` (:math:`\beta_t/n`) are logged. Subclass it: implement
    :meth:`negative_log_likelihood`, and :meth:`unpack` if batches are not (inputs, targets).

    Args:
        network: any module. The KL is of its Bayesian layers.
        samples: Monte Carlo samples per prediction and validation.
        kl_weight: tempering factor β. 1 is the ELBO, smaller a cold posterior.
        warmup_rounds: epochs (rounds) over which β grows linearly from 0.
        learning_rate: of the default optimizer, Adam.
        optimizer: makes another optimizer from the parameters, e.g. ``functools.partial(SGD, lr=0.01)``.
        predictive: source of the parameters of a prediction: "layers", the Bayesian layers' noise. "omc", draws from
            the federation's global posterior. "bootstrap", the clients' parameters of the last round, each one draw.
            "closed_form", as "omc" with exact mean and variance, for a network that is one linear layer. The last three
            are meant for ``fusion="gaussian_fit"`` ([FedAG]).

    Raises FedBayesError: an argument is out of range, or ``predictive`` does not fit the network.
    Source of the loss: [BA-BFL] eq. (3); [FBDL] eq. (6).
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        samples: int = 10,
        kl_weight: float = 1.0,
        warmup_rounds: int = 0,
        learning_rate: float = 1e-3,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        predictive: Predictive = "layers",
    ) -> None:
        super().__init__()
        check_kind("network", network, nn.Module, "give a torch.nn.Module", error=FedBayesError)
        check_at_least("samples", samples, 1, error=FedBayesError)
        check_number("kl_weight", kl_weight, "[0, inf)", error=FedBayesError)
        check_at_least("warmup_rounds", warmup_rounds, 0, error=FedBayesError)
        check_number("learning_rate", learning_rate, "[0, inf)", error=FedBayesError)
        if optimizer is not None and not callable(optimizer):
            raise FedBayesError(f"optimizer={shown(optimizer)}: give a function, such as partial(SGD, lr=0.01)")
        check_choice("predictive", predictive, PREDICTIVES, error=FedBayesError)
        if predictive == "closed_form":
            sampling.linear_layer(network)
        self.network = network
        self.predictive: Predictive = predictive
        self.global_round = GlobalRound()
        self.samples, self.kl_weight, self.warmup_rounds = samples, kl_weight, warmup_rounds
        self.learning_rate, self.optimizer = learning_rate, optimizer
        self._federated = False
        self._given_examples: int | None = None
        self._fit_examples: int | None = None

    @abstractmethod
    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return −log p(y | x, θ), a mean over the batch in nats, for outputs (batch, *) of one draw of θ."""

    def loss_and_nll(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the trained loss without the KL, and the logged NLL, two scalars.

        Override it to train on another loss than the NLL, such as one that wrong labels harm less.
        """
        nll = self.negative_log_likelihood(outputs, targets)
        return nll, nll

    def unpack(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a batch. Raise FedBayesError if it is no pair."""
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            remedy = f"give a collate_fn that returns them, or override {type(self).__name__}.unpack"
            raise FedBayesError(f"a batch is a {type(batch).__name__}, and not (inputs, targets): {remedy}")
        inputs, targets = batch
        return inputs, targets

    def inputs_of(self, batch: Any) -> Tensor:
        """Return the inputs of a batch: a tensor of inputs, or (inputs, targets)."""
        return batch if isinstance(batch, Tensor) else self.unpack(batch)[0]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's output with one draw of its parameters. An export or trace takes their mean."""
        with mean_only(self.network) if is_exporting() else nullcontext():
            output = self.network(inputs)
        output = output[0] if isinstance(output, tuple) else output
        return self.in_units(output) if is_exporting() else output

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return the network's outputs in the units of the targets."""
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the negative ELBO per example."""
        inputs, targets = self.unpack(batch)
        loss, nll = self.loss_and_nll(self(inputs), targets)
        kl, factor = kl_divergence(self.network), self.kl_factor()
        figures = {"train/nll": nll.detach(), "train/kl": kl.detach(), "train/kl_factor": factor}
        self.log_dict(figures, on_step=False, on_epoch=True, batch_size=len(targets))
        return loss + factor * kl

    @property
    def num_examples(self) -> int | None:
        """Number n that divides the KL, of the client or of the data set. Set it for data without a length."""
        return self._given_examples if self._fit_examples is None else self._fit_examples

    @num_examples.setter
    def num_examples(self, value: int | None) -> None:
        self._given_examples = value

    def kl_factor(self) -> float:
        """Return the factor β_t / n of the summed KL. Raise FedBayesError if n is not known."""
        if self.num_examples is None:
            what = f"{type(self).__name__} does not know the number of training examples that the KL is divided by"
            raise FedBayesError(f"{what}: train with a Trainer on a data set with a length, or set module.num_examples")
        warm = 1.0 if not self.warmup_rounds else min(1.0, (self.current_epoch + 1) / self.warmup_rounds)
        return self.kl_weight * warm / self.num_examples

    def on_fit_start(self) -> None:
        """Assume no federation until :meth:`on_federation_start`."""
        self._federated = False

    def on_federation_start(self) -> None:
        """Note that :class:`~lightning_fedbayes.FederatedBayes` trains the module."""
        self._federated = True

    def on_train_start(self) -> None:
        """Take n from the training data, unless it is set. Without a federation fill scalers and drop an old round."""
        loader: Any = self.trainer.train_dataloader
        dataset = getattr(loader, "dataset", None)
        length = len(dataset) if hasattr(dataset, "__len__") else None  # pyright: ignore[reportArgumentType]
        if not self._federated:
            self.global_round = GlobalRound()
            for each in asking(self) if length else ():
                each.fit(loader, self)
        self._fit_examples = self._given_examples or length

    def on_client_start(self, client: Any) -> None:
        """Take n from the client (a :class:`~lightning_fedbayes.clients.states.Client`)."""
        self._fit_examples = client.num_examples

    @property
    def needs_client_posteriors(self) -> bool:
        """True if :meth:`on_round_end` needs the clients' updates."""
        return self.predictive == "bootstrap"

    def on_round_end(self, posterior: GaussianPosterior, clients: list[GaussianPosterior]) -> None:
        """Keep a round's global posterior, and the fused updates if :attr:`needs_client_posteriors`."""
        self.global_round = GlobalRound(posterior, clients)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the last round, if predictions need it."""
        last = self.global_round
        if self.predictive != "layers" and last.posterior is not None:
            clients = [each.state_dict() for each in last.clients]
            checkpoint["global_round"] = {"posterior": last.posterior.state_dict(), "clients": clients}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the last round."""
        if "global_round" in checkpoint:
            state, restore = checkpoint["global_round"], GaussianPosterior.from_state_dict
            self.global_round = GlobalRound(restore(state["posterior"]), [restore(each) for each in state["clients"]])

    def on_fit_end(self) -> None:
        """Reset n: another fit may have other data."""
        self._fit_examples = None

    def configure_optimizers(self) -> Any:
        """Return Adam, or the optimizer that ``optimizer`` makes."""
        if self.optimizer is not None:
            return self.optimizer(self.parameters())
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def sample(self, inputs: Tensor, samples: int | None = None) -> Tensor:
        """Return draws of the network's output, shape (samples, batch, *). As many as clients for "bootstrap"."""
        count = self.samples if samples is None else samples
        last, device = self.global_round, inputs.device
        if self.predictive == "layers" or last.posterior is None:  # as before the first round
            return sampling.sample_outputs(self.network, inputs, count)
        if self.predictive == "bootstrap":
            sets = sampling.draws_from_clients([sampling.within(client, NETWORK).to(device) for client in last.clients])
        else:
            sets = sampling.within(last.posterior, NETWORK).to(device).sample(count)
        return sampling.outputs_with(self.network, sets, inputs)

    def predict_mean(self, inputs: Tensor) -> Tensor:
        """Return the output at the posterior mean, in units of the targets, shape (batch, *)."""
        with mean_only(self.network):
            output = self(inputs)
        return output if is_exporting() else self.in_units(output)


class Scores(nn.Module):
    """Scores of a validation or a test: collections of metrics that take the same arguments, by name."""

    def __init__(self, **collections: Any) -> None:
        super().__init__()
        for name, each in collections.items():
            self.add_module(name, MetricCollection(each, compute_groups=False))

    def compute(self) -> dict[str, Tensor]:
        """Return the scores since the last :meth:`take`."""
        return {name: score for each in self.children() for name, score in each.compute().items()}  # pyright: ignore

    def take(self, stage: str) -> dict[str, Tensor]:
        """Return the scores since the last call, with names that begin with ``stage``."""
        scores = {f"{stage}/{name}": score for name, score in self.compute().items()}
        for each in self.children():
            each.reset()  # pyright: ignore[reportCallIssue]
        return scores


class ClassScores(Scores):
    """Scores of a classifier: accuracy, NLL, ECE (15 bins), Brier score, entropy, "epistemic" and Kwon's two traces."""

    predictive: MetricCollection
    sampled: MetricCollection

    def __init__(self) -> None:
        kwon = {"kwon_aleatoric": metrics.KwonAleatoric(), "kwon_epistemic": metrics.KwonEpistemic()}
        nll, brier = metrics.NegativeLogLikelihood(), metrics.BrierScore()
        super().__init__(
            predictive={"ece": metrics.CalibrationDiagram(), "nll": nll, "brier": brier},
            sampled={"entropy": metrics.PredictiveEntropy(), "epistemic": metrics.MutualInformation(), **kwon},
        )

    def update(self, rows: Rows) -> None:
        """Add "probs", (samples, N, classes), and "target", (N,)."""
        self.predictive.update(rows["probs"].mean(0), rows["target"])
        self.sampled.update(rows["probs"])

    def compute(self) -> dict[str, Tensor]:
        scores: dict[str, Any] = super().compute()
        diagram = scores["ece"]
        accuracy = (diagram.accuracy * diagram.counts).nansum() / diagram.counts.sum()
        return {**scores, "ece": diagram.ece, "accuracy": accuracy}


class GaussianScores(Scores):
    """RMSE, NLL, CRPS, coverage of the 90 % interval and sharpness of a regressor."""

    gaussian: MetricCollection
    others: MetricCollection

    def __init__(self) -> None:
        coverage = metrics.IntervalCoverage(level=0.9)
        super().__init__(
            gaussian={"nll": metrics.GaussianNLL(), "crps": metrics.GaussianCRPS(), "coverage90": coverage},
            others={"sharpness": metrics.DeterminantSharpness(), "rmse": MeanSquaredError(squared=False)},
        )

    def update(self, rows: Rows) -> None:
        """Add "mean", "variance" and "target", each (N, targets)."""
        mean, variance, targets = (rows[name] for name in ("mean", "variance", "target"))
        self.gaussian.update(mean, variance, targets)
        self.others["sharpness"].update(torch.diag_embed(variance))
        self.others["rmse"].update(mean.contiguous(), targets.contiguous())


class SurvivalScores(Scores):
    """Harrell's c and NLL of mean log risks, over the pairs and risk sets of all batches together."""

    survival: MetricCollection

    def __init__(self) -> None:
        super().__init__(survival={"c_index": metrics.ConcordanceIndex(), "nll": CoxNLL()})

    def update(self, rows: Rows) -> None:
        """Add "log_risk", (N,), and "target", (N, 2)."""
        event, time = rows["target"].T
        self.survival.update(rows["log_risk"], time, event)


def scores_of(likelihood: Likelihood) -> ClassScores | GaussianScores | SurvivalScores:
    """Return new scores of a likelihood's predictions."""
    if isinstance(likelihood, Cox):
        return SurvivalScores()
    return ClassScores() if likelihood.of_classes else GaussianScores()


class ScoredModule(L.LightningModule):
    """Base of modules with a ``validation_step`` that updates ``_scores``: logs them over all batches, in tests too."""

    _scores: Any

    def test_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Score a batch as ``validation_step`` does."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the scores over all batches."""
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        """Log the scores over all batches."""
        self._log_scores("test")

    def _log_scores(self, stage: str) -> None:
        if self._scores is None:
            return
        scored = any(each.update_called for each in self._scores.modules() if isinstance(each, Metric))
        if scored or self.trainer.world_size > 1:  # a subclass may score in another way
            self.log_dict(self._scores.take(stage))  # at once: a call costs as much as the pass of a small network


class LikelihoodModule(ScoredModule, BayesianModule):
    """A :class:`BayesianModule` with a likelihood: it trains on its NLL, predicts and is scored by it.

    Validation and test log as "val/" and "test/": for classes accuracy, NLL, ECE (15 bins), Brier score, entropy,
    mutual information ("epistemic") and Kwon's two traces. For numbers RMSE, NLL, CRPS, coverage of the 90 % interval
    and sharpness. For risks Harrell's c and NLL.

    Args:
        network, options: see :class:`BayesianModule`.
        likelihood: a :class:`~lightning_fedbayes.modules.Likelihood` or its name.
        scaler: standardises targets of a Gaussian: a :class:`~lightning_fedbayes.FederatedScaler`, True for a new one,
            False for none. Outputs are in its units. Losses, predictions and scores in the units of the targets.

    Raises FedBayesError: an argument has the wrong type.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: Likelihood | str,
        *,
        scaler: FederatedScaler | bool = False,
        **options: Any,
    ) -> None:
        super().__init__(network, **options)
        why = "give True, False or a FederatedScaler"
        check_kind("scaler", scaler, FederatedScaler | bool, why, error=FedBayesError)
        self.scaler = FederatedScaler() if scaler is True else scaler or None
        self.likelihood: Likelihood = get_likelihood(likelihood)
        self._scores = scores_of(self.likelihood)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the NLL, summed over positions, a mean over the batch, in nats."""
        return self._known().loss(outputs, targets)

    def in_units(self, outputs: Tensor) -> Tensor:
        """See :meth:`BayesianModule.in_units`. Outputs that hold their noise stay as they are."""
        known = self._known()
        return known.means(outputs) if isinstance(known, Gaussian) and not known.in_outputs else outputs

    def on_train_start(self) -> None:
        """See :meth:`BayesianModule.on_train_start`. Warn of targets far from the scale of the noise."""
        super().on_train_start()
        known, loader = self._known(), cast(Any, self.trainer.train_dataloader)
        if not isinstance(known, Gaussian) or known.units is not None:
            return
        with suppress(Exception):  # training tells of data that cannot be read
            first = Subset(loader.dataset, range(min(256, len(loader.dataset))))
            targets = ScaleSums.of(first, loader.collate_fn, self).units("targets", 0.0).square().sum(0).mean().sqrt()
            noise = 1.0 if isinstance(known.noise, str) else float(torch.as_tensor(known.noise).max()) or 1.0
            if not 1 / FAR < targets / noise < FAR:
                large = f"{targets / noise:.2g} times as large as the noise at the start, {noise:.2g}"
                remedy = "predictions may take long to come near. Give scaler=True"
                rank_zero_info(f"Targets are about {large}, and not standardised: {remedy}")

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Return mean prediction and decomposed uncertainty of a batch: a tensor of inputs, or (inputs, targets)."""
        inputs, known, posterior = self.inputs_of(batch), self._known(), self.global_round.posterior
        draws = self.sample(inputs)
        if self.predictive == "closed_form" and posterior is not None and isinstance(known, Gaussian | Cox):
            return known.predict(draws, sampling.linear_moments(self.network, posterior, inputs))
        return known.predict(draws)

    def _known(self) -> Likelihood:
        return said_by(self) or self.likelihood

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Rows:
        """Score a batch, and return its rows."""
        inputs, targets = self.unpack(batch)
        known = self._known()
        if known.of_classes:
            rows = known.rows(self.sample(inputs), targets)
        else:
            rows = known.rows_of(self.predict_step(inputs), targets)
        self._scores.update(rows)
        return rows
