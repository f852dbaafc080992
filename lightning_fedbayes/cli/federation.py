"""LightningCLI for federations: ``fedbayes fit``, ``validate``, ``test`` and ``predict``."""

from argparse import ArgumentError, HelpFormatter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_fedbayes import data, fusion, modules  # noqa: F401 (classes to find by name)
from lightning_fedbayes.callbacks import FederatedBayes
from lightning_fedbayes.callbacks.calibration import FederatedConformal
from lightning_fedbayes.callbacks.clients import bring_reports
from lightning_fedbayes.callbacks.evaluator import callback_of, callbacks_of
from lightning_fedbayes.cli.messages import class_help, explain, one_line, option_names, short_help
from lightning_fedbayes.core.errors import FedBayesError, check_at_least
from lightning_fedbayes.data import partition  # noqa: F401
from lightning_fedbayes.data.clients import clients_of

LOGGER = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "outputs", "name": "fedbayes"}}
"""Default logger. ``fedbayes report`` reads its files."""
PREDICTIONS = "predictions.pt"
NO_SCORES = ("train/", "federation/")
"""Beginnings of the names of figures that are not shown after a fit."""
CLASSES: dict[str, type] = {"model": L.LightningModule, "data": L.LightningDataModule}


class Parser(LightningArgumentParser):
    """LightningCLI's parser, with a help of one page instead of six hundred lines."""

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        """Return :func:`short_help`, or :func:`class_help` in the parser of one class."""
        if not self.callback_keys:
            return class_help((self.description or "").rpartition("=")[2], self._actions)
        command = (self.prog or "").split()[-1]
        return short_help(command, (self.description or "").rstrip(".") + ".", self._actions, CLASSES)


class SaveConfig(SaveConfigCallback):
    """Saves the configuration into the run's folder, if it has one. LightningCLI would write into the present one."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save the configuration if the logger has a folder."""
        if getattr(trainer.logger, "log_dir", None) is not None:
            super().setup(trainer, pl_module, stage)


class FederationCLI(LightningCLI):
    """LightningCLI for one federation, with the keys ``trainer``, ``model``, ``data`` and ``federation``.

    ``federation`` holds the arguments of :class:`~lightning_fedbayes.FederatedBayes`, except its seed, which is
    ``seed_everything``. ``arguments`` have the stage first if ``run`` is true. Raises FedBayesError, in one line.
    """

    def __init__(self, arguments: list[str], run: bool = True) -> None:
        strict = {"exit_on_error": False, "allow_abbrev": False}  # errors are raised, and parse_arguments explains them
        stages = {stage: {**strict} for stage in self.subcommands()} if run else {}
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            save_config_callback=SaveConfig,
            trainer_defaults={"logger": LOGGER},
            parser_kwargs={"prog": "fedbayes", **strict, **stages},
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=arguments,
            run=run,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the federation, and link its seed to ``seed_everything``."""
        parser.add_lightning_class_args(FederatedBayes, "federation")
        parser.link_arguments("seed_everything", "federation.seed")

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed as an integer. LightningCLI would also take a bool."""
        parser.add_argument("--seed_everything", type=int, default=0, help="Seed of every random draw.")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments. Raise FedBayesError with one line for a mistake."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            used = getattr(self, "_subcommand_parsers", {}).get(args[0], parser)
            raise FedBayesError(explain(str(error), option_names(used._actions))) from error
        of_stage = self.config.get(self.config.get("subcommand", ""), self.config)
        seed = of_stage["seed_everything"]
        check_at_least("seed_everything", seed, 0, 2**32 - 1, error=FedBayesError)  # as NumPy has it

    def instantiate_classes(self) -> None:
        """Make the objects. Raise an error of this package as itself, without the parser's error around it."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            found: BaseException | None = error
            while found is not None and not isinstance(found, FedBayesError):
                found = found.__cause__
            if found is None and "Does not validate" in str(error):  # for a value that may have several types
                found = FedBayesError(one_line(str(error)))
            if found is None:
                raise
            raise found from error

    def instantiate_trainer(self, **arguments: Any) -> L.Trainer:
        """Make the Trainer. Raise FedBayesError with one line for a value of ``trainer`` that Lightning refuses."""
        try:
            return super().instantiate_trainer(**arguments)
        except (ValueError, TypeError, MisconfigurationException) as error:
            if isinstance(error, FedBayesError):
                raise
            raise FedBayesError(f"trainer: {one_line(str(error))}") from error

    def predict(self, model: L.LightningModule, **arguments: Any) -> None:
        """Predict, and save the module's output for each batch, with the sets or intervals of conformal callbacks."""
        batches = self.trainer.predict(model, **arguments) or []
        conformal = [each for each in callbacks_of(self.trainer) if isinstance(each, FederatedConformal)]
        folder = Path(self.trainer.log_dir or ".")
        if not self.trainer.is_global_zero:  # the first process has all batches
            return
        folder.mkdir(parents=True, exist_ok=True)
        saved: list[Any] = [getattr(batch, "_asdict", lambda batch=batch: batch)() for batch in batches]
        for each in conformal:  # which refuse other outputs than ours
            saved = [{**batch, each.label: found} for batch, found in zip(saved, each.predictions, strict=True)]
        torch.save(saved, folder / PREDICTIONS)
        print(f"Predictions: {folder / PREDICTIONS} (a list of batches, for torch.load)")

    def before_validate(self) -> None:
        """Make the clients, which otherwise only a fit makes, so that their figures are shown."""
        federation = callback_of(self.trainer, FederatedBayes)
        assert federation is not None
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        examples = self.datamodule.train_dataloader().dataset
        clients = clients_of(examples, federation.settings.partition, federation.settings.seed)
        report = bring_reports(self.trainer, federation)
        report.set_clients(clients.sizes, clients.counts, clients.classes, clients.names)

    before_test = before_validate

    def after_fit(self) -> None:
        """Print the last scores, and the folder of the results."""
        if not self.trainer.is_global_zero:
            return
        scores = {
            name: float(value)
            for name, value in self.trainer.callback_metrics.items()
            if name != "round" and not name.startswith(NO_SCORES)
        }
        if scores:
            width = max(map(len, scores))
            lines = [f"  {name.ljust(width)}  {value:.4g}" for name, value in sorted(scores.items())]
            print("\n".join([f"Scores after round {self.trainer.current_epoch}:", *lines]))
        folder = getattr(self.trainer.logger, "log_dir", None)
        if folder is not None:
            print(f"Results: {folder} (fedbayes report {folder} makes a page of them)")


class DescribedFederation(FederationCLI):
    """Parser that reads and checks a configuration without making its objects."""

    def instantiate_classes(self) -> None:
        """Do nothing."""
