"""Several processes that share the clients of a federation's rounds."""

from lightning_fedbayes.processes.alone import ALONE, OneProcess
from lightning_fedbayes.processes.base import Processes, Talk
from lightning_fedbayes.processes.gloo import GlooProcesses
from lightning_fedbayes.processes.strategy import ClientParallelStrategy, processes_of

__all__ = ["ALONE", "ClientParallelStrategy", "GlooProcesses", "OneProcess", "Processes", "Talk", "processes_of"]
