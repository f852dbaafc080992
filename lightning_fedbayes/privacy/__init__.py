"""Differential privacy: what a federation gives away of a client or of an example, bounded and counted."""

from lightning_fedbayes.privacy.accountant import epsilon_of, noise_multiplier_for
from lightning_fedbayes.privacy.example import ExamplePrivacy
from lightning_fedbayes.privacy.update import UpdatePrivacy, check_no_buffers, privatised

__all__ = ["ExamplePrivacy", "UpdatePrivacy", "check_no_buffers", "epsilon_of", "noise_multiplier_for", "privatised"]
