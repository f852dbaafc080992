"""The server of a federation: it plans rounds, admits updates, guards, weighs and fuses them. No Lightning."""

from lightning_fedbayes.server.guard import USUAL as USUAL
from lightning_fedbayes.server.guard import Safeguards as Safeguards
from lightning_fedbayes.server.guard import told_bounded as told_bounded
from lightning_fedbayes.server.schedule import Asynchronous as Asynchronous
from lightning_fedbayes.server.schedule import Delays as Delays
from lightning_fedbayes.server.server import HELD_OUT_LOSS as HELD_OUT_LOSS
from lightning_fedbayes.server.server import RoundResult as RoundResult
from lightning_fedbayes.server.server import Scorer as Scorer
from lightning_fedbayes.server.server import Server as Server
from lightning_fedbayes.server.weighting import KnownOverlap as KnownOverlap
