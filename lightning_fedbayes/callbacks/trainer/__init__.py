"""Everything that is private of Lightning's Trainer, in one room. The rest of the package sees :class:`FitLoop`."""

from lightning_fedbayes.callbacks.trainer.checkpoints import damage as damage
from lightning_fedbayes.callbacks.trainer.checkpoints import use_whole_checkpoints as use_whole_checkpoints
from lightning_fedbayes.callbacks.trainer.checks import check_schedulers as check_schedulers
from lightning_fedbayes.callbacks.trainer.checks import check_trainer as check_trainer
from lightning_fedbayes.callbacks.trainer.data import held_out_batches as held_out_batches
from lightning_fedbayes.callbacks.trainer.loop import FitLoop as FitLoop
from lightning_fedbayes.callbacks.trainer.loop import TrainsClients as TrainsClients
from lightning_fedbayes.callbacks.trainer.loop import optimizers_of as optimizers_of
from lightning_fedbayes.callbacks.trainer.strategy import ClientParallelStrategy as ClientParallelStrategy
from lightning_fedbayes.callbacks.trainer.strategy import collective_of as collective_of
