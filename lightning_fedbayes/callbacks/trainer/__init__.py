"""Everything that is private of Lightning's Trainer, in one room. The rest of the package sees :class:`FitLoop`."""

from lightning_fedbayes.callbacks.trainer.checkpoints import damage, use_whole_checkpoints
from lightning_fedbayes.callbacks.trainer.checks import (
    check_held_out,
    check_not_finished,
    check_of_a_federation,
    check_same_data,
    check_same_federation,
    check_same_number,
    check_schedulers,
    check_trainer,
    is_finished,
)
from lightning_fedbayes.callbacks.trainer.loop import FitLoop, TrainsClients, optimizers_of
from lightning_fedbayes.callbacks.trainer.strategy import ClientParallelStrategy, collective_of

__all__ = [
    "ClientParallelStrategy",
    "FitLoop",
    "TrainsClients",
    "check_held_out",
    "check_not_finished",
    "check_of_a_federation",
    "check_same_data",
    "check_same_federation",
    "check_same_number",
    "check_schedulers",
    "check_trainer",
    "collective_of",
    "damage",
    "is_finished",
    "optimizers_of",
    "use_whole_checkpoints",
]
