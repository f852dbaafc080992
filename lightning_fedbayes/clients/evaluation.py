"""Scores of every client on its data, the best personal posterior of a client, and an AutoFusion's held-out loss."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.batches import output_of, unpacked
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.core.posterior import GaussianPosterior, check_tensor
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.core.tables import Row, badness_of, html_table, markdown_table, worst_rows, write_csv
from lightning_fedbayes.data.clients import ClientDatasets, check_dataset
from lightning_fedbayes.fusion.auto import AutoFusion, Score
from lightning_fedbayes.layers import evaluation_mode
from lightning_fedbayes.metrics import functional, likelihoods
from lightning_fedbayes.modules import BayesianModule, PosteriorPredictive

Predicted = likelihoods.Rows
Prediction = likelihoods.ClassPrediction | likelihoods.RegressionPrediction | likelihoods.SurvivalPrediction
OF_DRAWS = ("logits", "probs")
"""Figures of draws, with the examples in the last dimension but one."""
Collate = Callable[[list[Any]], Any]
Predictors = L.LightningModule | Mapping[str, L.LightningModule]
HIGHER_IS_BETTER = ("accuracy", "coverage", "c_index")
REMEDY = "give a module of this package, or wrap your own, fb.PosteriorPredictive(module, federation.posterior)"
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ClientScores:
    """Scores of every client on its data: a table with a row for each client.

    Args:
        names: of the clients.
        num_examples: of each client, the weights of :meth:`mean`.
        values: figure → one value for each client. Of classifiers "accuracy", "nll" (nats per example) and "ece" (15
            bins). Of regressors "rmse", "nll" and "coverage" (share of the targets inside the central 90 % interval).
            Of risks "c_index" and "nll", with pairs and risk sets within each client. A missing value is NaN and does
            not count.

    >>> scores = ClientScores(("a", "b"), (30, 10), {"accuracy": torch.tensor([0.75, 0.5])})
    >>> scores.mean("accuracy"), scores.worst("accuracy"), scores.spread("accuracy")
    (0.6875, 0.5, 0.125)
    """

    names: tuple[str, ...]
    num_examples: tuple[int, ...]
    values: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        errors.check_strings("names", self.names, "give the name of each client", error=FedBayesError)
        need = "give a number for each client"
        errors.check_kind("num_examples", self.num_examples, Sequence, need, error=FedBayesError)
        need = "give a dict, figure → values of the clients"
        errors.check_kind("values", self.values, Mapping, need, error=FedBayesError)
        for count in self.num_examples:
            errors.check_at_least("num_examples", count, 1, error=FedBayesError)
        for figure, values in self.values.items():
            check_tensor(f"values['{figure}']", values, error=FedBayesError)
            if values.shape != (len(self.names),) or len(self.num_examples) != len(self.names):
                raise FedBayesError(
                    f"'{figure}' is of shape {tuple(values.shape)}, and there are {len(self.names)} names and "
                    f"{len(self.num_examples)} numbers of examples: give one of each for every client"
                )

    @classmethod
    def of(cls, num_examples: Mapping[str, int], figures: Mapping[str, Mapping[str, float]]) -> "ClientScores":
        """Return the table of each client's number of examples and figures, by its name. NaN for a missing figure."""
        values = {
            figure: torch.tensor([figures[name].get(figure, math.nan) for name in num_examples], dtype=torch.float64)
            for figure in dict.fromkeys(figure for each in figures.values() for figure in each)
        }
        return cls(tuple(num_examples), tuple(num_examples.values()), values)

    def _of(self, figure: str) -> Tensor:
        errors.check_choice("figure", figure, tuple(self.values), error=FedBayesError)
        return self.values[figure].double()

    def mean(self, figure: str) -> float:
        """Return the mean over all examples."""
        values = self._of(figure)
        return float(functional.weighted_accuracy(values, torch.tensor(self.num_examples).to(values)))

    def worst(self, figure: str, fraction: float = 0.1) -> float:
        """Return the mean over the worst ⌈fraction·K⌉ clients: lowest accuracies and coverages, else highest."""
        values, sign = self._of(figure), sign_of(figure)
        return sign * float(functional.worst_fraction_accuracy(sign * values, fraction))

    def spread(self, figure: str) -> float:
        """Return the standard deviation over clients. 0 for a single one."""
        values = self._of(figure)
        values = values[~values.isnan()]
        return float(values.std(correction=0)) if len(values) else math.nan

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each client: "client", "examples" and the figures."""
        return [
            {"client": name, "examples": count, **{figure: float(self.values[figure][k]) for figure in self.values}}
            for k, (name, count) in enumerate(zip(self.names, self.num_examples, strict=True))
        ]

    def table(self) -> tuple[list[str], list[Row]]:
        """Return head and rows to print: of many clients the worst by the first figure, and a count."""
        figure = next(iter(self.values), "")

        def badness(row: Row) -> float:
            return badness_of(-sign_of(figure) * float(row[2])) if figure else 0.0

        return ["client", "examples", *self.values], worst_rows([list(row.values()) for row in self.rows()], badness)

    def summary(self) -> dict[str, float]:
        """Return mean, worst 10 % and spread of every figure, by the names for loggers."""
        ends = (("", self.mean), ("_worst", self.worst), ("_spread", self.spread))
        return {f"clients/{figure}{end}": of(figure) for figure in self.values for end, of in ends}

    def to_csv(self, path: str | Path) -> None:
        """Write the table as a CSV file with a head."""
        rows = self.rows()
        write_csv(errors.check_path("path", path), [list(rows[0]), *(list(row.values()) for row in rows)])

    def markdown(self) -> str:
        """Return the table in Markdown: the clients, then mean, worst 10 % and spread."""
        return markdown_table(*self._lines())

    def _repr_html_(self) -> str:
        return html_table(*self._lines())

    def _lines(self) -> tuple[list[str], list[Row]]:
        ends = [("mean", self.mean), ("worst 10 %", self.worst), ("spread", self.spread)]
        head, lines = self.table()
        return head, [*lines, *([name, "", *(of(figure) for figure in self.values)] for name, of in ends)]


def sign_of(figure: str) -> int:
    """Return 1 for a figure where more is better, and -1 for any other."""
    return 1 if figure.rpartition("/")[2] in HIGHER_IS_BETTER else -1


def evaluate_clients(
    module: Predictors,
    clients: ClientDatasets,
    *,
    batch_size: int = 256,
    seed: int = 0,
    collate_fn: Collate | None = None,
) -> ClientScores:
    """Score every client on its data, in one pass. The server needs no data.

    ::

        held_out = fb.ClientDatasets({"north": north_test, "south": south_test})
        print(fb.evaluate_clients(model, held_out).markdown())                   # the global model
        personal = {name: fb.PosteriorPredictive(model, callback.posterior_of(name)) for name in held_out.names}
        print(fb.evaluate_clients(personal, held_out).markdown())                # each client's own

    Raise FedBayesError if a client lacks examples or a module, or the predictions are not of this package.

    Args:
        module: a module of this package, or a :class:`~lightning_fedbayes.PosteriorPredictive` of any other, with a
            ``predict_step`` that returns a prediction of this package, or one for each client, by name.
        clients: name → data set of inputs and targets, in batches of ``batch_size`` that ``module`` takes.
        seed: of the draws from the posterior, the same for every client.
        collate_fn: list of examples → batch, as for a DataLoader of graphs. None: torch's.
    """
    errors.check_kind("clients", clients, ClientDatasets, "give a ClientDatasets of their data", error=FedBayesError)
    check_pass(batch_size, seed)
    remedy = "give a function, list of examples → batch"
    errors.check_kind("collate_fn", collate_fn, Callable | None, remedy, error=FedBayesError)
    scores, sizes = dict[str, dict[str, float]](), dict[str, int]()
    for name, dataset in zip(clients.names, clients.datasets, strict=True):
        own = module.get(name) if isinstance(module, Mapping) else module
        if own is None:
            raise FedBayesError(f"there is no module for client {name}: give one for each client")
        if not len(dataset):  # pyright: ignore[reportArgumentType]
            raise FedBayesError(f"client {name} has no example to be scored on: leave it out, or hold some back")
        scores[name] = _score(own, dataset, batch_size, seed, collate_fn)
        sizes[name] = len(dataset)  # pyright: ignore[reportArgumentType]
    return ClientScores.of(sizes, scores)


def check_pass(batch_size: int, seed: int) -> None:
    """Raise FedBayesError unless examples can be predicted in batches of this size, by draws from ``seed``."""
    errors.check_at_least("batch_size", batch_size, 1, error=FedBayesError)
    errors.check_at_least("seed", seed, -errors.LARGEST, error=FedBayesError)


def batches_of(dataset: Dataset, batch_size: int, collate_fn: Collate | None = None) -> Iterator[Any]:
    """Yield batches. Raise FedBayesError for examples that make none."""
    loader = DataLoader(dataset, int(batch_size), collate_fn=collate_fn)  # the size may be a NumPy integer
    try:
        yield from loader
    except (TypeError, ValueError, RuntimeError) as error:  # torch cannot stack the examples
        why = "give pairs of input and target, or a collate_fn"
        raise FedBayesError(f"the examples make no batch ({error}): {why}") from error


def _score(
    module: L.LightningModule, dataset: Dataset, batch_size: int, seed: int, collate_fn: Collate | None = None
) -> dict[str, float]:
    remedy = "give a LightningModule, or a PosteriorPredictive of it"
    errors.check_kind("module", module, L.LightningModule, remedy, error=FedBayesError)
    if not has_predict_step(module):
        raise FedBayesError(f"{type(module).__name__} has no predict_step of its own: {REMEDY}")

    def predict(batch: Any) -> Predicted:
        return means_of(predicted(module, batch))

    return figures_of(predict_data(module, dataset, batch_size, derive_seed(seed, "evaluation"), predict, collate_fn))


@torch.no_grad()
def predict_data(
    module: nn.Module,
    dataset: Dataset,
    batch_size: int,
    seed: int,
    predict: Callable[[Any], Predicted],
    collate_fn: Collate | None = None,
) -> Predicted:
    """Return the joined predictions of ``predict`` for a data set, in evaluation mode, with draws from ``seed``."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with evaluation_mode(module), drawing(device, seed):
        batches = batches_of(dataset, batch_size, collate_fn)
        return joined([predict(move_data_to_device(batch, device)) for batch in batches])


@contextmanager
def drawing(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, torch draws from ``seed``. Afterwards its generators are restored."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def joined(parts: Sequence[Predicted]) -> Predicted:
    """Return the predictions of several batches as one."""
    names = parts[0] if parts else ()
    return {name: torch.cat([each[name] for each in parts], -2 if name in OF_DRAWS else 0) for name in names}


def has_predict_step(module: L.LightningModule) -> bool:
    """Return True if a module overrides ``predict_step``."""
    return type(module).predict_step is not L.LightningModule.predict_step


def predicted(module: L.LightningModule, batch: Any) -> Predicted:
    """Return the rows to score of a module's ``predict_step``, "probs" as one draw. Raise FedBayesError for others."""
    target = unpacked(batch, module, needs_targets=True)[1]
    prediction: Any = module.predict_step(batch, 0)
    if not isinstance(prediction, Prediction):
        raise FedBayesError(f"{type(module).__name__}.predict_step returns {errors.shown(prediction)}: {REMEDY}")
    return (likelihoods.said_by(module) or likelihood_by(prediction)).rows_of(prediction, target)


def likelihood_by(prediction: Prediction) -> likelihoods.Likelihood:
    """Return the likelihood that follows from the shapes of a prediction."""
    if isinstance(prediction, likelihoods.RegressionPrediction):
        return likelihoods.Gaussian(0.0)
    if isinstance(prediction, likelihoods.SurvivalPrediction):
        return likelihoods.Cox()
    probs, label = prediction.probs, prediction.label
    if probs.shape == label.shape:
        return likelihoods.Bernoulli()
    return likelihoods.Categorical(channels=1 if probs.movedim(1, -1).shape[:-1] == label.shape else -1)


def means_of(found: Predicted) -> Predicted:
    """Return the mean predictive of draws, as :func:`figures_of` takes it."""
    kept = {name: value for name, value in found.items() if name not in OF_DRAWS}
    return {**kept, "probs": found["probs"].mean(0)} if "probs" in found else kept


def rows_by_outputs(predictive: nn.Module, batch: Any) -> Predicted:
    """Return the rows to score of a batch: of draws of the output if the module can draw, otherwise of its output."""
    inputs, targets = unpacked(batch, predictive, needs_targets=True)
    sample: Any = getattr(predictive, "sample", None)
    outputs: Any = sample(inputs) if callable(sample) else output_of(predictive, inputs).unsqueeze(0)
    if not isinstance(outputs, Tensor) or outputs.ndim < 2:
        needed = "outputs of shape (batch, *), or draws of them, are needed"
        raise FedBayesError(f"{type(predictive).__name__} gives {errors.shown(outputs)}; {needed}")
    if isinstance(predictive, PosteriorPredictive):
        return predictive.likelihood_for(outputs[0], targets).rows(outputs, targets)
    return likelihoods.likelihood_of(predictive, outputs[0], targets).rows(outputs, targets)


def mean_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the mean predictive of scaled logits, shape (samples, batch, classes) or (batch, classes), in float64."""
    scaled = logits.movedim(-1, 0).double() / temperature
    probs = scaled.contiguous().softmax(0).movedim(0, -1)  # over the first dimension in an eighth of the time
    return probs.mean(0) if probs.ndim == 3 else probs


def figures_of(found: Predicted) -> dict[str, float]:
    """Return the figures of a client's predictions. Raise FedBayesError if they have another form.

    Args:
        found: "probs" (batch, classes) and "target" (batch,). "mean", "variance" and "target", (batch, targets); or
            "log_risk" (batch,) and "target" (batch, 2).
    """
    target = found["target"]
    if "probs" in found:
        return class_figures(found["probs"], target)
    if "log_risk" in found:
        c_index = float(functional.concordance_index(found["log_risk"], target[:, 1], target[:, 0]))
        return {"c_index": c_index, "nll": float(nll_of(found).mean())}
    if "mean" not in found:
        raise FedBayesError(f"there are neither probabilities of classes nor mean and variance: {REMEDY}")
    mean, variance = found["mean"], found["variance"]
    target = target.to(mean)
    return {
        "rmse": float((mean - target).square().mean().sqrt()),
        "nll": float(nll_of(found).mean()) / (1 if "nll" in found else mean.shape[1]),
        "coverage": float(functional.interval_coverage(mean, variance, target, level=0.9).float().mean()),
    }


def nll_of(found: Predicted) -> Tensor:
    """Return the NLL of each row in nats, summed over targets. For "probs" of their mean over draws."""
    if "nll" in found:
        return found["nll"]
    if "log_risk" in found:
        return likelihoods.Cox().nll(found["log_risk"], found["target"])
    if "mean" in found:
        return functional.gaussian_nll(found["mean"], found["variance"], found["target"].to(found["mean"])).sum(1)
    probs = found["probs"] if found["probs"].ndim == 2 else found["probs"].mean(0)
    return functional.negative_log_likelihood(probs, found["target"])


def class_figures(probs: Tensor, target: Tensor) -> dict[str, float]:
    """Return accuracy, NLL in nats per example and ECE (15 bins) of mean predictives, shape (batch, classes)."""
    return {
        "accuracy": float((probs.argmax(-1) == target).double().mean()),
        "nll": float(functional.negative_log_likelihood(probs, target).mean()),
        "ece": float(functional.calibration_diagram(probs, target).ece),
    }


def choose_personal_weight(
    posterior_of: Callable[[float], GaussianPosterior],
    module: Any,
    held_out: Dataset,
    weights: Sequence[float] = WEIGHTS,
    *,
    batch_size: int = 256,
    seed: int = 0,
    **options: Any,
) -> tuple[float, dict[float, float]]:
    r"""Choose the weight of a client's own posterior in its personal one, by the NLL of data it has not trained on.

    .. math:: \lambda_k = \arg\min_\lambda -\tfrac1n \sum_i \log p(y_i \mid x_i, q_k^{(\lambda)})

    ::

        weight, _ = fb.choose_personal_weight(lambda w: callback.posterior_of("north", w), model, north_validation)
        predictive = fb.PosteriorPredictive(model, callback.posterior_of("north", weight))

    The smallest weight wins a tie. Every weight is scored with the same random draws. Do not use training data, which
    favour the client's own posterior, nor the data on which you report the result. Raise FedBayesError if examples or
    weights are missing, or no weight has a finite NLL.

    Args:
        posterior_of: weight → the personal posterior. 0 is the global one.
        module, held_out: the network, and data of the client, inputs and targets.
        weights: to choose from, each in [0, 1].
        batch_size, seed: see :func:`evaluate_clients`.
        options: of :class:`~lightning_fedbayes.PosteriorPredictive`, such as ``samples=20, likelihood="bernoulli"``.

    Returns: the weight, and the NLL of each weight in nats per example. Source: Jamoussi et al. 2025.
    """
    check_dataset("held_out", held_out)
    if not len(held_out):  # pyright: ignore[reportArgumentType]
        raise FedBayesError("held_out has no example to choose a weight by: hold some back, or take weight 0")
    errors.check_kind("weights", weights, Sequence, "give weights in [0, 1]", error=FedBayesError)
    if not len(weights):
        raise FedBayesError("weights is empty: give weights in [0, 1]")
    for weight in weights:
        errors.check_number("weights", weight, "[0, 1]", error=FedBayesError)
    if not callable(posterior_of):
        raise FedBayesError(f"posterior_of={errors.shown(posterior_of)}: give a function, weight → posterior")
    check_pass(batch_size, seed)
    scores = {}
    for weight in sorted(weights):
        with errors.raised_as(FedBayesError, f"posterior_of({weight})", "give a function, weight → posterior"):
            own = posterior_of(weight)
        scores[weight] = _score(PosteriorPredictive(module, own, **options), held_out, batch_size, seed)["nll"]
    finite = [weight for weight, nll in scores.items() if math.isfinite(nll)]
    if not finite:
        why = "look for NaN in its inputs and targets, and in the posteriors"
        raise FedBayesError(f"held_out has an NLL that is not finite by every weight: {why}")
    return min(finite, key=lambda weight: scores[weight]), scores


def check_score(auto: AutoFusion, module: L.LightningModule) -> None:
    """Raise FederationError if ``auto`` does not know how to score ``module``."""
    if auto.score is None and not isinstance(module, BayesianModule):
        why = "pass AutoFusion(score=lambda module, batch: ...), the mean loss of the module on a batch"
        raise FederationError(f"fusion='auto' does not know how to score a {type(module).__name__}: {why}")


def held_out_loss(
    module: L.LightningModule, batches: Iterable[Any], score: Score | None, seed: int, round: int
) -> float:
    """Return the mean loss of ``module`` over ``batches``, with the same noise for every candidate of a round."""
    total, count = 0.0, 0
    context = module.trainer.precision_plugin.forward_context
    with evaluation_mode(module), torch.no_grad(), torch.random.fork_rng(), context():
        seed_everything(derive_seed(seed, "validation", round))
        for batch in batches:
            size = extract_batch_size(batch)
            total += float((score or predictive_nll)(module, batch)) * size
            count += size
    return total / count if count else math.nan


def own_hook(module: L.LightningModule) -> Callable[..., None] | None:
    """Return the hook of our modules that takes a candidate's posterior. None for others, which see the chosen one."""
    return partial(BayesianModule.on_round_end, module) if isinstance(module, BayesianModule) else None


def predictive_nll(module: L.LightningModule, batch: Any) -> Tensor:
    """Return the negative log-likelihood, per example in nats, of the module's ``predict_step`` on a batch."""
    rows = predicted(module, batch)
    return nll_of(rows).sum() / likelihoods.examples_in(rows)


@contextmanager
def kept_attributes(module: object, *names: str) -> Iterator[None]:
    """Restore the attributes ``names`` of ``module`` at the end, whatever happens inside."""
    kept = {name: getattr(module, name) for name in names if hasattr(module, name)}
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
