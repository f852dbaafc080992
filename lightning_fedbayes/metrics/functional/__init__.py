"""Scores and measures of uncertainty as pure functions of tensors.

Functions that score single examples return one value per example. Their mean over the data is the score.
Functions named after a curve or a calibration error need all examples at once.
"""

from lightning_fedbayes.metrics.functional.scores import (
    CalibrationBins,
    adaptive_calibration_error,
    brier_score,
    calibration_diagram,
    concordance_index,
    cox_loss,
    determinant_sharpness,
    ensemble_crps,
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    negative_log_likelihood,
    weighted_accuracy,
    worst_fraction_accuracy,
)
from lightning_fedbayes.metrics.functional.uncertainty import (
    accuracy_retained_area,
    accuracy_retained_curve,
    aleatoric_covariance,
    epistemic_covariance,
    kwon_aleatoric,
    kwon_epistemic,
    mutual_information,
    ood_auroc,
    ood_fpr,
    predictive_entropy,
)

__all__ = [
    "CalibrationBins",
    "accuracy_retained_area",
    "accuracy_retained_curve",
    "adaptive_calibration_error",
    "aleatoric_covariance",
    "brier_score",
    "calibration_diagram",
    "concordance_index",
    "cox_loss",
    "determinant_sharpness",
    "ensemble_crps",
    "epistemic_covariance",
    "gaussian_crps",
    "gaussian_nll",
    "interval_coverage",
    "kwon_aleatoric",
    "kwon_epistemic",
    "mutual_information",
    "negative_log_likelihood",
    "ood_auroc",
    "ood_fpr",
    "predictive_entropy",
    "weighted_accuracy",
    "worst_fraction_accuracy",
]
