"""Differential privacy of clients and of examples: noise on updates, gradients of examples, and the ε given away."""

from lightning_fedbayes.clients.privacy.accountant import epsilon_of, noise_multiplier_for
from lightning_fedbayes.clients.privacy.update import Door, UpdatePrivacy, check_no_buffers, privatised

__all__ = ["Door", "UpdatePrivacy", "check_no_buffers", "epsilon_of", "noise_multiplier_for", "privatised"]
