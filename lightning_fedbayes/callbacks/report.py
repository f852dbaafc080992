"""Report of a federation: settings, clients, rounds and reliabilities, to the loggers, the log and the progress bar."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_fedbayes.callbacks.clients import ClientReport
from lightning_fedbayes.callbacks.evaluator import callback_of, evaluator_of
from lightning_fedbayes.callbacks.loggers import Loggers, best_of, log_figure, log_histograms, log_table, note
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.clients.states import Client
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import listed, told_failures
from lightning_fedbayes.core.messages import ClientOutcome
from lightning_fedbayes.core.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.core.tables import MOST_ROWS, badness_of, markdown_table, worst_rows
from lightning_fedbayes.data.clients import Clients
from lightning_fedbayes.layers import BayesianLayer, gaussian_parameters
from lightning_fedbayes.layers.kl import KLWatch
from lightning_fedbayes.server import HELD_OUT_LOSS, RoundResult, told_bounded

Figures = Mapping[str, float]
DTYPES = {"l": torch.int64, "b": torch.int8, "d": torch.float64}


class ClientRecords:
    r"""Records of all clients over the federation, a column for each figure: a million take 56 MB.

    ``rounds`` and ``failures`` are counts, ``first_loss`` is of a client's first round, all others are of its last one.
    ``diverged`` is 1 if its loss has exceeded its first, ℓ, by more than :math:`\max(|\ell|, 1)`.
    """

    def __init__(self, clients: int) -> None:
        self.rounds, self.failures = (array("l", [0]) * clients for _ in range(2))
        self.diverged = array("b", [0]) * clients
        self.train_loss, self.first_loss, self.weight = (array("d", [math.nan]) * clients for _ in range(3))
        self.seconds, self.megabytes_up = (array("d", [0.0]) * clients for _ in range(2))
        self.last_failure: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.rounds)

    def note(self, outcome: ClientOutcome) -> bool:
        """Note the outcome of a client. Return whether its training diverges in this round for the first time."""
        client = outcome.client
        self.rounds[client] += 1
        self.seconds[client] = outcome.seconds
        if outcome.error is not None:
            self.fail(client, outcome.error)
            return False
        loss = outcome.metrics.get("train_loss", math.nan)
        self.megabytes_up[client], self.train_loss[client] = outcome.num_bytes / 1e6, loss
        if math.isnan(self.first_loss[client]):
            self.first_loss[client] = loss
        worst = self.first_loss[client] + max(abs(self.first_loss[client]), 1.0)
        diverges = not self.diverged[client] and loss > worst
        self.diverged[client] |= diverges
        return diverges

    def fail(self, client: int, error: Exception) -> None:
        """Note why a client is left out of a round."""
        self.failures[client] += 1
        self.last_failure[client] = f"{type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any]:
        """Return the columns, as tensors, and the failures."""
        known = {name: value for name, value in vars(self).items() if isinstance(value, array)}
        columns = {name: torch.tensor(value, dtype=DTYPES[value.typecode]) for name, value in known.items()}
        return {**columns, "last_failure": dict(self.last_failure)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name, value in vars(self).items():
            if isinstance(value, array):
                setattr(self, name, array(value.typecode, state[name].tolist()))
        self.last_failure = dict(state["last_failure"])


CLIENT_COLUMNS = ("client", "examples", "rounds", "failures", "weight", "train_loss", "accuracy", "seconds")
CLIENT_COLUMNS += ("megabytes_up", "last_failure")
MOST_CURVES = 20
"""Most clients with a curve each. For more, quantiles are logged."""
QUANTILES = (0.1, 0.5, 0.9)
ZERO = ("failed_clients", "failed_rounds", "excluded_clients")
"""Figures with curves that begin in the first round in which they are not 0."""
STUCK = 5
"""Rounds in a row in which a client fails, or counts only in part, that are worth an alert."""
COLLAPSED = 1e-4
"""Part of the first round's mean variance below which a posterior has collapsed."""
EVERY = 10
"""Rounds between two histograms of the posterior. The first round has some, too."""
FAILS, CLIPPED, COLLAPSE = "Clients fail", "Updates stand out", "The posterior collapses"
"""Titles of alerts."""


class RoundLog:
    """Logs rounds under the names of a federation. Finds what goes wrong round after round, and tells it once.

    Attributes:
        told: figures that have a chart already.
    """

    def __init__(self) -> None:
        self.told: set[str] = set()
        self._axes: set[str] = set()
        self._streaks: dict[tuple[str, int], int] = {}
        self._first: float | None = None
        self._alerts: list[tuple[str, str]] = []
        self._posterior: GaussianPosterior | None = None

    def begin(self, loggers: Loggers, settings: dict[str, Any], round: int) -> None:
        """Log the settings of a federation that goes on after ``round`` rounds."""
        self._axes = set()
        for logger in loggers:
            logger.log_hyperparams({"federation": settings})
            if isinstance(logger, TensorBoardLogger):  # which shows the hyperparameters of its first call only
                text = markdown_table(("setting", "value"), [(key, str(value)) for key, value in settings.items()])
                logger.experiment.add_text("federation/settings", text)
        note(loggers, {"round": round, "settings": settings})  # last: a CSVLogger begins in an empty folder

    def see(self, result: RoundResult, names: Sequence[str] | Mapping[int, str]) -> None:
        """Look at a round. ``names`` are of the clients."""
        self._posterior = result.posterior
        outlying = set() if result.aggregate is None else {*result.aggregate.outlying}
        found: dict[str, list[str]] = {FAILS: [], CLIPPED: []}
        for outcome in result.outcomes:
            for what, is_so in ((FAILS, outcome.error is not None), (CLIPPED, outcome.client in outlying)):
                streak = self._streaks.pop((what, outcome.client), 0) + 1
                if is_so:
                    self._streaks[what, outcome.client] = streak
                if is_so and streak == STUCK:
                    found[what].append(names[outcome.client])
        variance = result.figures.get("posterior_variance", math.nan)
        self._first = variance if self._first is None else self._first
        if variance < COLLAPSED * self._first:
            self._first, found[COLLAPSE] = 0.0, ["the mean variance is below 1/10,000 of the first round's"]
        for what, who in found.items():
            if who:
                text = listed(who) if what == COLLAPSE else f"{listed(who)} in each of their last {STUCK} rounds"
                self._alerts.append((what, text))
                rank_zero_info(f"Round {result.round + 1}: {what}: {text}")

    def log(self, loggers: Loggers, figures: Figures, more: Figures, names: Iterable[str], step: int) -> None:
        """Log the ``figures`` of a round, and ``more`` of clients. In W&B ``names`` are drawn over the rounds, too."""
        round = int(figures["round"])
        named = {f"federation/{name}": value for name, value in figures.items() if name != "round"}
        shown = {f"federation/{name}": figures[name] for name in self._worth_a_chart(figures)}
        self.draw(loggers, {*names, *shown, *more})
        for logger in loggers:
            row = {**(named if isinstance(logger, CSVLogger) else shown), **more}
            logger.log_metrics({**row, "round": figures["round"], "epoch": round - 1}, step=step)
            if isinstance(logger, WandbLogger):
                for title, text in self._alerts:
                    logger.experiment.alert(title, text, level="WARN")
        if self._posterior is not None and (round == 1 or round % EVERY == 0):
            log_histograms(loggers, self._posterior, round)
        self._alerts, self._posterior = [], None

    def draw(self, loggers: Loggers, names: Iterable[str]) -> None:
        """Let W&B draw figures over the rounds, and keep the best value of each beside the last one.

        By exact names: a pattern competes with Lightning's "*".
        """
        new = {*names} - self._axes - {"round", "epoch"}
        self._axes |= new
        for logger in (each for each in loggers if isinstance(each, WandbLogger)):
            for name in sorted(new):
                summary = f"{best},last" if (best := best_of(name)) else None
                logger.experiment.define_metric(name, step_metric="round", summary=summary)

    def _worth_a_chart(self, figures: Figures) -> list[str]:
        """Return the names except of counts still 0 and of traffic down that equals traffic up. Once told, always."""
        constant = {name for name in ZERO if figures[name] == 0}
        if figures["megabytes_down"] == figures["megabytes_up"]:
            constant.add("megabytes_down")
        self.told |= set(figures) - constant - {"round"}
        return [name for name in figures if name in self.told]


def curves_of(values: Mapping[str, Mapping[str, float]], clients: int) -> dict[str, float]:
    """Return figures by client for a logger, figure/NAME → value. Of more than 20 clients quantiles.

    >>> curves_of({"client_nll": {"north": 0.5, "south": math.nan}}, clients=2)
    {'client_nll/north': 0.5}
    """
    curves: dict[str, float] = {}
    for name, of_clients in values.items():
        known = {client: value for client, value in of_clients.items() if math.isfinite(value)}
        if clients <= MOST_CURVES:
            curves |= {f"{name}/{client}": value for client, value in known.items()}
        elif known:
            levels = torch.tensor(list(known.values())).quantile(torch.tensor(QUANTILES))
            curves |= {f"{name}/quantile_{100 * level:.0f}": float(value) for level, value in zip(QUANTILES, levels)}
    return curves


class FederationReport:
    """Keeps one record per client and the reliabilities that the rule infers, and logs tables and pictures of them."""

    def __init__(self) -> None:
        self.records = ClientRecords(0)
        self.reliabilities: list[dict[str, Any]] = []
        self._clients = Clients((), ())
        self._outlying: set[int] = set()
        self._diverged: list[int] = []
        self._unheld: list[str] = []
        self._failures: dict[str, Exception] = {}
        self._told: dict[str, str] = {}  # of the round before
        self._losses: dict[int, float] = {}
        self._drawn: Tensor | None = None
        self._scored: ClientScores | None = None
        self._log = RoundLog()
        self._noted: dict[str, Tensor] = {}

    def start(
        self,
        trainer: L.Trainer,
        settings: dict[str, Any],
        clients: Clients,
        posterior: GaussianPosterior,
        statistics: tuple[list[str], list[Any]] | None = None,
    ) -> None:
        """Log settings, the network's name and parameters, clients × classes as a heat map, and ``statistics``."""
        found = gaussian_parameters(trainer.lightning_module)
        is_ours = all(isinstance(each.layer, BayesianLayer) for each in found.values())  # no note is taken of others
        self._unheld = [name for name, each in found.items() if each.rho.requires_grad] if is_ours else []
        KLWatch.seen = False
        self.set_clients(clients)
        settings = {**settings, "network": described_network(trainer.lightning_module, posterior)}
        self._log.begin(trainer.loggers, settings, trainer.current_epoch)
        if trainer.loggers and clients.counts is not None and trainer.current_epoch == 0:
            heat_map = plots.client_heatmap(clients.counts, clients.classes, clients.names)
            log_figure(trainer.loggers, "federation/clients_by_class", heat_map, round=0)
        if statistics is not None:
            log_table(trainer.loggers, "federation/statistics", *statistics, round=0)

    def set_clients(self, clients: Clients) -> None:
        """Take the clients' names and sizes from ``clients``."""
        self._clients = clients
        if len(self.records) != len(clients):
            self.records = ClientRecords(len(clients))

    def show_clients(self, trainer: L.Trainer, clients: Sequence[Client]) -> None:
        """Show the round and its clients in the training progress bar, if it is one of Lightning's."""
        bar = trainer.progress_bar_callback
        rounds = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        first = clients[0]
        if len(clients) == 1:
            who = f"client {first.position + 1}/{first.cohort} ({first.name})"
        elif len(clients) == first.cohort:
            who = f"all {first.cohort} clients at once"
        else:
            who = f"{len(clients)} of {first.cohort} clients at once"
        text = f"Round {first.round + 1}{rounds}, {who}"
        if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
            bar.train_progress_bar.set_description(text, refresh=False)
        elif isinstance(bar, RichProgressBar) and bar.is_enabled and bar.progress:
            row = bar.train_progress_bar_id
            if row is not None:
                bar.progress.update(row, description=text)

    def client(self, outcome: ClientOutcome) -> None:
        """Note the outcome of a client."""
        if self.records.note(outcome):
            self._diverged.append(outcome.client)
        if outcome.error is None:
            self._losses[outcome.client] = self.records.train_loss[outcome.client]
        else:
            self._failures[self._clients.names[outcome.client]] = outcome.error

    def tell_failures(self, round: int) -> None:
        """Print a line for each new kind of failure of clients that are left out of ``round``, from 0."""
        new = {name: error for name, error in self._failures.items() if self._told.get(name) != str(error)}
        for line in told_failures(new) if new else ():
            rank_zero_info(f"Round {round + 1}: {line}")
        self._told, self._failures = {name: str(error) for name, error in self._failures.items()}, {}

    def fused(self, result: RoundResult) -> None:
        """Note the clients' weights, and reliabilities if the rule infers them. Print lines about what went wrong."""
        for outcome in result.outcomes:
            if outcome.error is not None and self._losses.pop(outcome.client, None) is not None:  # seen among others
                self.records.fail(outcome.client, outcome.error)
                self._failures[self._clients.names[outcome.client]] = outcome.error
        self.tell_failures(result.round)
        if self._diverged:
            names = [self._clients.names[client] for client in sorted(self._diverged)]
            who = f"the training of client{'s' if len(names) > 1 else ''} {listed(names)} has diverged"
            why = "the loss is far above that of the first round, which began without knowledge"
            remedy = "Take a smaller learning rate or fewer local epochs"
            rank_zero_info(f"Round {result.round + 1}: {who}: {why}. {remedy}")
        self._diverged = []
        if self._unheld and not KLWatch.seen and result.success:
            gaussian = f"but {self._unheld[0]} and {len(self._unheld) - 1} others are Gaussian"
            remedy = "add fb.kl_divergence(self) / n, the client's number of examples, or train fb.with_kl(module)"
            rank_zero_info(f"No KL divergence has been computed while the clients trained, {gaussian}: {remedy}")
        self._unheld = []
        if result.refusal is not None:
            kept = "the old posterior stays, because the clients cannot be fused"
            rank_zero_info(f"Round {result.round + 1}: {kept}: {result.refusal}")
        self._log.see(result, self._clients.names)
        found = result.aggregate
        for client, weight in () if found is None else found.weights.items():
            self.records.weight[client] = weight
        new = set() if found is None else {*found.outlying} - {*found.refused} - self._outlying
        self._outlying |= new
        if new:
            names = listed(self._clients.names[client] for client in sorted(new))
            why = "they are too large, as of few or unlike examples, or too frequent, for max_influence"
            rank_zero_info(f"Round {result.round + 1}: the updates of {names} stand out, and count in part: {why}")
        if result.bounded:
            bounded = {self._clients.names[client]: numbers for client, numbers in result.bounded.items()}
            rank_zero_info(f"Round {result.round + 1}: {told_bounded(bounded)}")
        if result.aggregate is not None and result.aggregate.inferred:
            shares, excluded = dict(result.weights), dict(result.excluded)
            self.reliabilities.append({"round": result.round + 1, "shares": shares, "excluded": excluded})

    def log_round(
        self, trainer: L.Trainer, figures: dict[str, float], step_names: set[str], scored: UncertaintyReport
    ) -> None:
        """Log a round's figures as ``federation/...``, which other callbacks can monitor, and the clients' curves.

        They go to the loggers directly: ``self.log`` costs 0.3 ms each, as much as a step of a small network. The
        x-axis is "round", from 1, also of what the module logs, but for ``step_names``, figures of single steps.
        """
        named = {f"federation/{name}": value for name, value in figures.items() if name != "round"}
        logged = {**named, "round": figures["round"]}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in logged.items()})
        if not trainer.loggers:
            return
        curves = self._client_curves(trainer, scored)
        self._note_figures(trainer, int(figures["round"]), {**named, **curves})
        names = {*trainer.logged_metrics} - step_names
        step = trainer.global_step - 1  # of Lightning's own epoch-wise figures
        self._log.log(trainer.loggers, figures, curves, names, step)

    def log_test(self, trainer: L.Trainer) -> None:
        """Draw the figures of a test over the rounds. The round is logged with them."""
        if not trainer.loggers:
            return
        self._note_figures(trainer, int(trainer.callback_metrics["round"]), {})
        self._log.draw(trainer.loggers, trainer.logged_metrics)

    def _note_figures(self, trainer: L.Trainer, round: int, more: Mapping[str, float]) -> None:
        """Write what has been logged since the last time, and ``more``, into the file of the run."""
        known = dict(trainer.callback_metrics)  # a figure that is logged again is another tensor
        new = {name: float(value) for name, value in known.items() if value is not self._noted.get(name)}
        self._noted = known
        new.pop("round", None)
        note(trainer.loggers, {"round": round, "figures": {**new, **more}})

    def _client_curves(self, trainer: L.Trainer, scored: UncertaintyReport) -> dict[str, float]:
        """Return the round's training loss of each client, and what a validation in this round says of each."""
        names, accuracy = self._clients.names, scored.client_accuracy
        values = {"client_train_loss": {names[client]: loss for client, loss in self._losses.items()}}
        if accuracy is not None and accuracy is not self._drawn:
            values[f"{scored.by}client_accuracy"] = dict(zip(names, accuracy.tolist()))
        report = callback_of(trainer, ClientReport)
        scores = None if report is None else report.scores.get("val")
        if scores is not None and scores is not self._scored:
            begin = f"{evaluator_of(trainer).by('client')}client_"
            others = {figure: each for figure, each in scores.values.items() if figure != "accuracy"}
            values |= {f"{begin}{figure}": dict(zip(scores.names, each.tolist())) for figure, each in others.items()}
        self._drawn, self._scored, self._losses = accuracy, scores, {}
        return curves_of(values, len(self.records))

    def finish(self, trainer: L.Trainer, scored: UncertaintyReport, history: Sequence[Mapping[str, float]]) -> None:
        """Log the tables of clients, reliabilities (with a picture) and chosen rules. Tell how far sites have come."""
        tell_of_sites(history)
        known = self.records
        if not trainer.loggers or not len(known):
            return
        accuracy = scored.client_accuracy
        scores = [math.nan] * len(known) if accuracy is None else accuracy.tolist()
        failures = [known.last_failure.get(client, "") for client in range(len(known))]
        parts = (known.rounds, known.failures, known.weight, known.train_loss, scores, known.seconds)
        columns_of = (self._clients.names, self._clients.sizes, *parts, known.megabytes_up, failures)
        rows = [list(row) for row in zip(*columns_of, strict=True)]
        shown = worst_rows(rows, lambda row: (row[3], badness_of(-float(row[6])), badness_of(float(row[5]))))
        columns = [f"{scored.by}{name}" if name == "accuracy" else name for name in CLIENT_COLUMNS]
        log_table(trainer.loggers, "federation/clients", columns, shown, round=trainer.current_epoch)
        self._log_reliabilities(trainer)
        log_choices(trainer, history)

    def _log_reliabilities(self, trainer: L.Trainer) -> None:
        """Log the clients' reliabilities over the rounds, if the rule has inferred any. Of many, the last round's."""
        if not self.reliabilities:
            return
        names = self._clients.names
        rows = [
            [each["round"], names[client], share, each["excluded"].get(client, "")]
            for each in (self.reliabilities if len(names) <= MOST_ROWS else self.reliabilities[-1:])
            for client, share in each["shares"].items()
        ]
        if len(names) > MOST_ROWS:
            rows = worst_rows(rows, lambda row: (bool(row[3]), badness_of(-float(row[2]))))
        columns = ("round", "client", "reliability", "left_out")
        log_table(trainer.loggers, "federation/reliability_by_round", columns, rows, round=trainer.current_epoch)
        table = torch.full((len(names), self.reliabilities[-1]["round"]), torch.nan)
        for each in self.reliabilities:
            for client, share in each["shares"].items():
                table[client, each["round"] - 1] = share
        log_figure(
            trainer.loggers, "federation/reliability", plots.client_reliability(table, names), trainer.current_epoch
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the records and reliabilities, for a checkpoint."""
        reliabilities, told = list(self.reliabilities), sorted(self._log.told)
        return {"records": self.records.state_dict(), "reliabilities": reliabilities, "told": told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.records.load_state_dict(state["records"])
        self.reliabilities = list(state["reliabilities"])
        self._log.told = set(state["told"])


def described_network(module: nn.Module, posterior: GaussianPosterior) -> dict[str, Any]:
    """Return the name and parameters of the module's largest part: all, trained and Gaussian; (μ, ρ) count once."""
    rhos = {id(each.rho) for each in gaussian_parameters(module).values()}
    known = [parameter for parameter in module.parameters() if id(parameter) not in rhos]
    largest = max([*module.children(), module], key=lambda part: sum(p.numel() for p in part.parameters()))
    return {
        "module": type(module).__name__,
        "name": type(largest).__name__,
        "parameters": sum(p.numel() for p in known),
        "trained": sum(p.numel() for p in known if p.requires_grad),
        "gaussian": sum(variance.numel() for variance in posterior.variance.values() if not is_zero(variance)),
    }


def tell_of_sites(history: Sequence[Mapping[str, float]]) -> None:
    """Print what the last round of sites has changed, the decrement that is left, and the estimate of the ELBO."""
    last = history[-1] if history else {}
    if "sites/change" not in last:
        return
    left = f"the pooled gradient has a Newton decrement of {last['sites/decrement']:.2g}"
    if last["sites/decrement"] <= last["sites/change"]:
        left += ", the noise of local training"
    elbo = f"; the pooled ELBO is about {last['sites/elbo']:.4g} nats per example" if "sites/elbo" in last else ""
    moved = f"round {last['round']:.0f} has changed the posterior by {last['sites/change']:.2g} nats per parameter"
    rank_zero_info(f"Sites: {moved}; {left}{elbo}.")


def log_choices(trainer: L.Trainer, history: Sequence[Mapping[str, float]]) -> None:
    """Log the rule that was chosen in each round, and every candidate's loss on the held-out data."""
    scored = [(int(row["round"]), losses) for row in history if (losses := candidate_losses(row))]
    if not scored:
        return
    names = sorted({name for _, losses in scored for name in losses})
    rows = []
    for round, losses in scored:
        chosen = min(filter(lambda name: math.isfinite(losses[name]), losses), key=losses.__getitem__)
        rows.append([round, chosen, *(losses.get(name, math.nan) for name in names)])
    log_table(
        trainer.loggers, "federation/chosen_rules", ["round", "chosen", *names], rows, round=trainer.current_epoch
    )


def candidate_losses(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the loss of each candidate, by its name, from the figures of a round."""
    known = [name for name in figures if name.startswith(HELD_OUT_LOSS)]
    return {name.removeprefix(HELD_OUT_LOSS): figures[name] for name in known}
