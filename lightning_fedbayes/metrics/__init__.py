"""Metrics of Bayesian predictions: torchmetrics shells over the pure functions in ``metrics.functional``.

Classification metrics score the mean predictive, shape (batch, classes). Measures of uncertainty need all posterior
samples, shape (samples, batch, classes). For accuracy, AUROC and ECE use torchmetrics' own.
"""

from lightning_fedbayes.metrics import functional as functional
from lightning_fedbayes.metrics.functional import RetainedCurve as RetainedCurve
from lightning_fedbayes.metrics.scores import AdaptiveCalibrationError as AdaptiveCalibrationError
from lightning_fedbayes.metrics.scores import BrierScore as BrierScore
from lightning_fedbayes.metrics.scores import CalibrationDiagram as CalibrationDiagram
from lightning_fedbayes.metrics.scores import ConcordanceIndex as ConcordanceIndex
from lightning_fedbayes.metrics.scores import DeterminantSharpness as DeterminantSharpness
from lightning_fedbayes.metrics.scores import GaussianCRPS as GaussianCRPS
from lightning_fedbayes.metrics.scores import GaussianNLL as GaussianNLL
from lightning_fedbayes.metrics.scores import IntervalCoverage as IntervalCoverage
from lightning_fedbayes.metrics.scores import NegativeLogLikelihood as NegativeLogLikelihood
from lightning_fedbayes.metrics.uncertainty import AccuracyRetained as AccuracyRetained
from lightning_fedbayes.metrics.uncertainty import KwonAleatoric as KwonAleatoric
from lightning_fedbayes.metrics.uncertainty import KwonEpistemic as KwonEpistemic
from lightning_fedbayes.metrics.uncertainty import MutualInformation as MutualInformation
from lightning_fedbayes.metrics.uncertainty import PredictiveEntropy as PredictiveEntropy
