"""Scores and measures of uncertainty as pure functions of tensors.

Functions that score single examples return one value per example. Their mean over the data is the score.
Functions named after a curve or a calibration error need all examples at once.
"""

from lightning_fedbayes.metrics.functional.scores import CalibrationBins as CalibrationBins
from lightning_fedbayes.metrics.functional.scores import adaptive_calibration_error as adaptive_calibration_error
from lightning_fedbayes.metrics.functional.scores import brier_score as brier_score
from lightning_fedbayes.metrics.functional.scores import calibration_diagram as calibration_diagram
from lightning_fedbayes.metrics.functional.scores import concordance_index as concordance_index
from lightning_fedbayes.metrics.functional.scores import cox_loss as cox_loss
from lightning_fedbayes.metrics.functional.scores import determinant_sharpness as determinant_sharpness
from lightning_fedbayes.metrics.functional.scores import gaussian_crps as gaussian_crps
from lightning_fedbayes.metrics.functional.scores import gaussian_nll as gaussian_nll
from lightning_fedbayes.metrics.functional.scores import interval_coverage as interval_coverage
from lightning_fedbayes.metrics.functional.scores import negative_log_likelihood as negative_log_likelihood
from lightning_fedbayes.metrics.functional.scores import weighted_accuracy as weighted_accuracy
from lightning_fedbayes.metrics.functional.scores import worst_fraction_accuracy as worst_fraction_accuracy
from lightning_fedbayes.metrics.functional.uncertainty import RetainedCurve as RetainedCurve
from lightning_fedbayes.metrics.functional.uncertainty import accuracy_retained as accuracy_retained
from lightning_fedbayes.metrics.functional.uncertainty import kwon_aleatoric as kwon_aleatoric
from lightning_fedbayes.metrics.functional.uncertainty import kwon_epistemic as kwon_epistemic
from lightning_fedbayes.metrics.functional.uncertainty import mutual_information as mutual_information
from lightning_fedbayes.metrics.functional.uncertainty import predictive_entropy as predictive_entropy
