"""Figures, curves and tables for the loggers of a Trainer. Weights & Biases without an account."""

import netrc
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.figure import Figure

from lightning_fedbayes.core.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.core.run_file import append
from lightning_fedbayes.core.tables import Row, markdown_table, write_csv

DECIDED = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
"""Environment variables by which a user has said how to log."""
BEST = {
    "spread": None,
    **dict.fromkeys(("accuracy", "acc", "index", "retained"), "max"),
    **dict.fromkeys(("nll", "ece", "brier", "rmse", "mse", "mae", "crps", "loss"), "min"),
}
"""Word in the name of a validation's figure → its best value over the rounds. The first word that fits counts."""
Loggers = Sequence[Logger]
MOST_ENTRIES = 2**16
"""Most parameters of a tensor in a histogram."""


def best_of(name: str) -> str | None:
    """Return "min" or "max" for a validation's figure whose best round W&B is to know, otherwise None.

    >>> best_of("val/clients/nll_worst"), best_of("val/worst_client_accuracy"), best_of("train/nll")
    ('min', 'max', None)
    """
    stage, *words = re.split(r"[/_]", name)
    return next((best for word, best in BEST.items() if word in words), None) if stage == "val" else None


def log_figure(loggers: Loggers, name: str, figure: Figure, round: int) -> None:
    """Log a figure after ``round`` rounds (epochs): an image in W&B and TensorBoard, a PNG file for a CSVLogger."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            _log_media(logger, name, wandb.Image(figure), round)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, global_step=round, close=False)
        elif isinstance(logger, CSVLogger):
            figure.savefig(_file(logger, name, "png"))


def log_table(loggers: Loggers, name: str, columns: Sequence[str], rows: Sequence[Row], round: int) -> None:
    """Log a table: in W&B, as Markdown in TensorBoard, as a CSV file for a CSVLogger, and in the file of the run."""
    note(loggers, {"round": round, "table": name, "columns": columns, "rows": rows})
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            _log_media(logger, name, wandb.Table(list(columns), [list(row) for row in rows]), round)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, markdown_table(columns, rows), global_step=round)
        elif isinstance(logger, CSVLogger):
            write_csv(_file(logger, name, "csv"), [columns, *rows])


def log_curves(
    loggers: Loggers, name: str, columns: Sequence[str], rows: Sequence[Sequence[float]], round: int, title: str
) -> None:
    """Log curves, first column x: a chart of lines in W&B, which keeps every round's, and in the file of the run."""
    note(loggers, {"round": round, "curve": name, "columns": columns, "rows": rows})
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            from wandb import plot

            x, *curves = map(list, zip(*rows))
            chart = plot.line_series(x, curves, columns[1:], title, columns[0])
            _log_media(logger, name, chart, round, key=f"{name}_table")


def log_histograms(loggers: Loggers, posterior: GaussianPosterior, round: int) -> None:
    r"""Log histograms of σ and :math:`10 \log_{10}(|\mu| / \sigma)` of each Gaussian tensor, in W&B and TensorBoard.

    Of more than :data:`MOST_ENTRIES` parameters every n-th counts.
    """
    for logger in (each for each in loggers if isinstance(each, WandbLogger | TensorBoardLogger)):
        for name, variance in posterior.variance.items():
            if is_zero(variance):
                continue
            step = 1 + variance.numel() // MOST_ENTRIES
            mean, sigma = (each.detach().flatten()[::step].cpu().double() for each in (posterior.mean[name], variance))
            sigma = sigma.sqrt()
            for kind, values in (("sigma", sigma), ("signal_to_noise", 10 * (mean.abs() / sigma).log10())):
                key, values = f"federation/{kind}/{name}", values[values.isfinite()].numpy()
                if not len(values):
                    continue
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_histogram(key, values, global_step=round)
                else:
                    import wandb

                    _log_media(logger, key, wandb.Histogram(values.tolist()), round)


def _log_media(logger: WandbLogger, name: str, value: Any, round: int, key: str = "") -> None:
    """Log a picture, table or chart to W&B over the rounds. A chart becomes a table under another ``key``."""
    logger.experiment.define_metric(key or name, step_metric="round")
    logger.log_metrics({name: value, "round": round})


@rank_zero_only
def note(loggers: Loggers, entry: Mapping[str, Any]) -> None:
    """Append a line to the file of the run, which ``fedbayes report`` reads, in the folder of every logger."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            place = None if logger.experiment.disabled else logger.experiment.dir
        else:
            place = getattr(logger, "log_dir", None)
        if place is not None:
            append(Path(place), entry)


def _file(logger: CSVLogger, name: str, suffix: str) -> Path:
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace('/', '_')}.{suffix}"


@cache
def prepare_wandb() -> None:
    """Let ``wandb.init`` log offline without an account.

    By itself it asks on a terminal and fails elsewhere. It is decided when a run starts: an account, a mode or a
    variable that the user gives until then counts. The Trainer starts its loggers before its hooks, so call it earlier.
    """
    import wandb

    start = wandb.init

    @wraps(start)
    def init(*args: Any, **given: Any) -> Any:
        is_decided = args or {"mode", "settings"} & given.keys() or any(name in os.environ for name in DECIDED)
        if not is_decided and not has_account(urlparse(wandb.setup().settings.base_url).hostname or ""):
            given["mode"] = "offline"  # wandb itself says so when a run starts
        if given.get("anonymous") is None:  # Lightning always passes it, and wandb 0.31 warns of it
            given.pop("anonymous", None)
        return start(*args, **given)

    wandb.init = init


def has_account(host: str) -> bool:
    """Return True if ``wandb login`` has stored a key for ``host`` in the user's netrc file."""
    places = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for place in places:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(Path(place).expanduser()).authenticators(host):
                return True
    return False
