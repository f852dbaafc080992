"""Federated methods: what clients minimise, send and keep, and how the server fuses it."""

from lightning_fedbayes.methods.averaging import Averaging as Averaging
from lightning_fedbayes.methods.averaging import FedNova as FedNova
from lightning_fedbayes.methods.averaging import FedProx as FedProx
from lightning_fedbayes.methods.averaging import Scaffold as Scaffold
from lightning_fedbayes.methods.late import FedAsync as FedAsync
from lightning_fedbayes.methods.late import FedBuff as FedBuff
from lightning_fedbayes.methods.late import Late as Late
from lightning_fedbayes.methods.method import LocalProblem as LocalProblem
from lightning_fedbayes.methods.method import Method as Method
from lightning_fedbayes.methods.method import Participant as Participant
from lightning_fedbayes.methods.method import Quadratic as Quadratic
from lightning_fedbayes.methods.method import Report as Report
from lightning_fedbayes.methods.method import Shared as Shared
from lightning_fedbayes.methods.method import Trained as Trained
from lightning_fedbayes.methods.personal import Ditto as Ditto
from lightning_fedbayes.methods.personal import Population as Population
from lightning_fedbayes.methods.registry import available_methods as available_methods
from lightning_fedbayes.methods.registry import get_method as get_method
from lightning_fedbayes.methods.registry import register_method as register_method
from lightning_fedbayes.methods.registry import remove_client as remove_client
from lightning_fedbayes.methods.registry import unregister_method as unregister_method
from lightning_fedbayes.methods.sites import Sites as Sites
from lightning_fedbayes.methods.sums import Sums as Sums
