"""Everything that is private of Lightning's Trainer, in one room. The rest of the package sees :class:`FitLoop`."""

from lightning_fedbayes.callbacks.trainer.checkpoints import damage as damage
from lightning_fedbayes.callbacks.trainer.checkpoints import use_whole_checkpoints as use_whole_checkpoints
from lightning_fedbayes.callbacks.trainer.checks import check_held_out as check_held_out
from lightning_fedbayes.callbacks.trainer.checks import check_not_finished as check_not_finished
from lightning_fedbayes.callbacks.trainer.checks import check_of_a_federation as check_of_a_federation
from lightning_fedbayes.callbacks.trainer.checks import check_same_data as check_same_data
from lightning_fedbayes.callbacks.trainer.checks import check_same_federation as check_same_federation
from lightning_fedbayes.callbacks.trainer.checks import check_same_number as check_same_number
from lightning_fedbayes.callbacks.trainer.checks import check_schedulers as check_schedulers
from lightning_fedbayes.callbacks.trainer.checks import check_trainer as check_trainer
from lightning_fedbayes.callbacks.trainer.checks import is_finished as is_finished
from lightning_fedbayes.callbacks.trainer.loop import FitLoop as FitLoop
from lightning_fedbayes.callbacks.trainer.loop import TrainsClients as TrainsClients
from lightning_fedbayes.callbacks.trainer.loop import optimizers_of as optimizers_of
from lightning_fedbayes.callbacks.trainer.strategy import ClientParallelStrategy as ClientParallelStrategy
from lightning_fedbayes.callbacks.trainer.strategy import collective_of as collective_of
