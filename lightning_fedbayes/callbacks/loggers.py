"""Figures, curves and tables for the loggers of a Trainer. Weights & Biases without an account."""

import configparser
import netrc
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from functools import cache, wraps
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure

from lightning_fedbayes.core.run_file import append
from lightning_fedbayes.core.tables import Row, markdown_table, write_csv

DECIDED = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
"""Environment variables by which a user has said how to log."""
ANONYMOUS = "The anonymous setting has no effect and will be removed in a future version."
"""Warning of wandb 0.31 about an argument that Lightning's WandbLogger always passes."""


def log_figure(trainer: L.Trainer, name: str, figure: Figure, round: int) -> None:
    """Log a figure after ``round`` rounds (epochs): an image in W&B and TensorBoard, a PNG file for a CSVLogger."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            _log_media(logger, name, wandb.Image(figure), round)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, global_step=round, close=False)
        elif isinstance(logger, CSVLogger):
            figure.savefig(_file(logger, name, "png"))


def log_table(trainer: L.Trainer, name: str, columns: Sequence[str], rows: Sequence[Row], round: int) -> None:
    """Log a table: in W&B, as Markdown in TensorBoard, as a CSV file for a CSVLogger, and in the file of the run."""
    note(trainer, {"round": round, "table": name, "columns": columns, "rows": rows})
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            _log_media(logger, name, wandb.Table(list(columns), [list(row) for row in rows]), round)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, markdown_table(columns, rows), global_step=round)
        elif isinstance(logger, CSVLogger):
            write_csv(_file(logger, name, "csv"), [columns, *rows])


def log_curves(
    trainer: L.Trainer, name: str, columns: Sequence[str], rows: Sequence[Sequence[float]], round: int, title: str
) -> None:
    """Log curves, first column x: a chart of lines in W&B, which keeps every round's, and in the file of the run."""
    note(trainer, {"round": round, "curve": name, "columns": columns, "rows": rows})
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            from wandb import plot

            x, *curves = map(list, zip(*rows))
            _log_media(logger, name, plot.line_series(x, curves, columns[1:], title, columns[0]), round)


def _log_media(logger: WandbLogger, name: str, value: Any, round: int) -> None:
    """Log a picture, table or chart to W&B over the rounds. The data of a chart become another table there."""
    for each in (name, f"{name}_table"):
        logger.experiment.define_metric(each, step_metric="round")
    logger.log_metrics({name: value, "round": round})


def note(trainer: L.Trainer, entry: Mapping[str, Any]) -> None:
    """Append a line to the file of the run, which ``fedbayes report`` reads, in the folder of every logger."""
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
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
    """Let ``wandb.init`` log offline without an account, and silence a warning that users can do nothing about.

    By itself it asks on a terminal and fails elsewhere. It is decided when a run starts: an account, a mode or a
    variable that the user gives until then counts. The Trainer starts its loggers before its hooks, so call it earlier.
    """
    import wandb

    start = wandb.init

    @wraps(start)
    def init(*args: Any, **given: Any) -> Any:
        is_decided = args or {"mode", "settings"} & given.keys() or any(name in os.environ for name in DECIDED)
        if not is_decided and not has_account(server()):
            given["mode"] = "offline"  # wandb itself says so when a run starts
        return start(*args, **given)

    wandb.init = init
    with redirect_stderr(StringIO()):  # what wandb has said once it does not repeat
        wandb.termwarn(ANONYMOUS, repeat=False)


def server() -> str:
    """Host name of the W&B server that the user has configured, or of the public one."""
    import wandb

    url = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    folder = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    config = configparser.ConfigParser()
    config.read(folder / "settings")
    if "WANDB_BASE_URL" not in os.environ:
        url = config.get("default", "base_url", fallback=url)
    return urlparse(url).hostname or url


def has_account(host: str) -> bool:
    """Return True if ``wandb login`` has stored a key for ``host`` in the user's netrc file."""
    places = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for place in places:
        try:
            if netrc.netrc(Path(place).expanduser()).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
