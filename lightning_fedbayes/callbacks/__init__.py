"""The callbacks that a Trainer takes."""

from lightning_fedbayes.callbacks.clients import ClientReport as ClientReport
from lightning_fedbayes.callbacks.example_privacy import ExamplePrivacy as ExamplePrivacy
from lightning_fedbayes.callbacks.federated_bayes import FederatedBayes as FederatedBayes
from lightning_fedbayes.callbacks.federated_bayes import check as check
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport as UncertaintyReport
