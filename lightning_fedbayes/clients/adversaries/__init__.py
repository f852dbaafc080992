"""Attacks of adversarial clients, on their data or on the posteriors that they send."""

from lightning_fedbayes.clients.adversaries.base import Attack, HonestMoments, Knowledge, UpdateAttack, assign
from lightning_fedbayes.clients.adversaries.collusion import (
    ALittleIsEnough,
    InnerProductManipulation,
    largest_unnoticed_shift,
)
from lightning_fedbayes.clients.adversaries.independent import (
    FalseVariance,
    GaussianVector,
    LabelFlip,
    NotANumber,
    RandomUpdate,
    ScaledUpdate,
    SignFlip,
    flip_labels,
)

__all__ = [
    "ALittleIsEnough",
    "Attack",
    "FalseVariance",
    "GaussianVector",
    "HonestMoments",
    "InnerProductManipulation",
    "Knowledge",
    "LabelFlip",
    "NotANumber",
    "RandomUpdate",
    "ScaledUpdate",
    "SignFlip",
    "UpdateAttack",
    "assign",
    "flip_labels",
    "largest_unnoticed_shift",
]
