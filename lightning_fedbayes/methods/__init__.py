"""Federated methods, an algorithm in each file: what clients minimise, send and keep, and how the server fuses it."""

from lightning_fedbayes.methods.averaging import Averaging
from lightning_fedbayes.methods.ditto import Ditto
from lightning_fedbayes.methods.fednova import FedNova
from lightning_fedbayes.methods.fedprox import FedProx
from lightning_fedbayes.methods.late import FedAsync, FedBuff, Late
from lightning_fedbayes.methods.method import LocalProblem, Method, Participant, Quadratic, Report, Shared, Trained
from lightning_fedbayes.methods.population import Population
from lightning_fedbayes.methods.registry import available_methods, get_method, register_method, unregister_method
from lightning_fedbayes.methods.removal import remove_client
from lightning_fedbayes.methods.scaffold import Scaffold
from lightning_fedbayes.methods.sites import Sites
from lightning_fedbayes.methods.sums import Sums

__all__ = [
    "Averaging",
    "Ditto",
    "FedAsync",
    "FedBuff",
    "FedNova",
    "FedProx",
    "Late",
    "LocalProblem",
    "Method",
    "Participant",
    "Population",
    "Quadratic",
    "Report",
    "Scaffold",
    "Shared",
    "Sites",
    "Sums",
    "Trained",
    "available_methods",
    "get_method",
    "register_method",
    "remove_client",
    "unregister_method",
]
