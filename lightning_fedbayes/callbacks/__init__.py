"""The callbacks that a Trainer takes."""

from lightning_fedbayes.callbacks.clients import ClientReport
from lightning_fedbayes.callbacks.example_privacy import ExamplePrivacy
from lightning_fedbayes.callbacks.federated_bayes import FederatedBayes, check
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport

__all__ = ["ClientReport", "ExamplePrivacy", "FederatedBayes", "UncertaintyReport", "check"]
