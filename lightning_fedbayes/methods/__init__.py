"""Federated methods: what clients minimise, send and keep, and how the server fuses it."""

from lightning_fedbayes.methods.averaging import Averaging, FedNova, FedProx, Scaffold
from lightning_fedbayes.methods.late import FedAsync, FedBuff, Late
from lightning_fedbayes.methods.method import LocalProblem, Method, Participant, Quadratic, Report, Shared, Trained
from lightning_fedbayes.methods.personal import Ditto, Population
from lightning_fedbayes.methods.registry import (
    available_methods,
    get_method,
    register_method,
    remove_client,
    unregister_method,
)
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
