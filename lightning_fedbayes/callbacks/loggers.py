"""Figures and tables for the loggers of a Trainer."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure

Row = Sequence[str | float]


def log_figure(trainer: L.Trainer, name: str, figure: Figure, round: int) -> None:
    """Log a figure: an image in W&B and TensorBoard, a PNG file beside the figures of a CSVLogger.

    Args:
        trainer: its loggers get it.
        name: key, such as "val/calibration".
        figure: of Matplotlib.
        round: number of finished rounds (epochs).
    """
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            logger.log_metrics({name: wandb.Image(figure), "round": round})  # pyright: ignore[reportArgumentType]
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, global_step=round, close=False)
        elif isinstance(logger, CSVLogger):
            figure.savefig(_file(logger, name, "png"))


def log_table(trainer: L.Trainer, name: str, columns: Sequence[str], rows: Sequence[Row], round: int) -> None:
    """Log a table: a table in W&B, Markdown text in TensorBoard, a CSV file beside the figures of a CSVLogger.

    Args:
        trainer: its loggers get it.
        name: key, such as "federation/clients".
        columns: heads of the columns.
        rows: one sequence per row, of as many entries.
        round: number of finished rounds (epochs).
    """
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            logger.log_metrics({name: table, "round": round})  # pyright: ignore[reportArgumentType]
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, markdown_table(columns, rows), global_step=round)
        elif isinstance(logger, CSVLogger):
            with open(_file(logger, name, "csv"), "w", newline="") as file:
                csv.writer(file).writerows([columns, *rows])


def markdown_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a Markdown table; floats with four significant digits.

    >>> print(markdown_table(["client", "loss"], [["a", 0.123456]]))
    | client | loss |
    |---|---|
    | a | 0.1235 |
    """
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = [list(columns), ["---"] * len(columns), *cells]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text[1] = "|" + "---|" * len(columns)
    return "\n".join(text)


def _file(logger: CSVLogger, name: str, suffix: str) -> Path:
    """Return the path of a figure or table of ``name``."""
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace('/', '_')}.{suffix}"
