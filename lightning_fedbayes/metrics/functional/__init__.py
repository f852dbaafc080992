"""Scores and measures of uncertainty as pure functions of tensors.

Functions that score single examples return one value per example; their mean over the data is the score.
Functions named after a curve or a calibration error see all examples at once.
"""

from lightning_fedbayes.metrics.functional.accuracy_retained import accuracy_retained_area, accuracy_retained_curve
from lightning_fedbayes.metrics.functional.calibration import adaptive_calibration_error
from lightning_fedbayes.metrics.functional.ensemble import ensemble_crps
from lightning_fedbayes.metrics.functional.entropy import mutual_information, predictive_entropy
from lightning_fedbayes.metrics.functional.fairness import weighted_accuracy, worst_fraction_accuracy
from lightning_fedbayes.metrics.functional.gaussian import gaussian_crps, gaussian_nll, interval_coverage
from lightning_fedbayes.metrics.functional.kwon import (
    aleatoric_covariance,
    aleatoric_uncertainty,
    epistemic_covariance,
    epistemic_uncertainty,
)
from lightning_fedbayes.metrics.functional.reliability import Reliability, reliability
from lightning_fedbayes.metrics.functional.scores import brier_score, negative_log_likelihood
from lightning_fedbayes.metrics.functional.sharpness import determinant_sharpness

__all__ = [
    "Reliability",
    "accuracy_retained_area",
    "accuracy_retained_curve",
    "adaptive_calibration_error",
    "aleatoric_covariance",
    "aleatoric_uncertainty",
    "brier_score",
    "determinant_sharpness",
    "ensemble_crps",
    "epistemic_covariance",
    "epistemic_uncertainty",
    "gaussian_crps",
    "gaussian_nll",
    "interval_coverage",
    "mutual_information",
    "negative_log_likelihood",
    "predictive_entropy",
    "reliability",
    "weighted_accuracy",
    "worst_fraction_accuracy",
]
