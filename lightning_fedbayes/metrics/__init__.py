"""What a Bayesian prediction is worth: torchmetrics shells over the pure functions in ``metrics.functional``.

Classification metrics score the mean predictive, shape (batch, classes); measures of uncertainty need all posterior
samples, shape (samples, batch, classes). For accuracy, AUROC and ECE use torchmetrics' own.
"""

from lightning_fedbayes.metrics import functional
from lightning_fedbayes.metrics.accuracy_retained import AccuracyRetained, RetainedCurve
from lightning_fedbayes.metrics.calibration import AdaptiveCalibrationError
from lightning_fedbayes.metrics.classification import BrierScore, NegativeLogLikelihood
from lightning_fedbayes.metrics.client_accuracy import ClientAccuracy
from lightning_fedbayes.metrics.regression import (
    DeterminantSharpness,
    EnsembleCRPS,
    GaussianCRPS,
    GaussianNLL,
    IntervalCoverage,
)
from lightning_fedbayes.metrics.reliability_diagram import ReliabilityDiagram
from lightning_fedbayes.metrics.uncertainty import (
    AleatoricUncertainty,
    EpistemicUncertainty,
    MutualInformation,
    PredictiveEntropy,
)

__all__ = [
    "AccuracyRetained",
    "AdaptiveCalibrationError",
    "AleatoricUncertainty",
    "BrierScore",
    "ClientAccuracy",
    "DeterminantSharpness",
    "EnsembleCRPS",
    "EpistemicUncertainty",
    "GaussianCRPS",
    "GaussianNLL",
    "IntervalCoverage",
    "MutualInformation",
    "NegativeLogLikelihood",
    "PredictiveEntropy",
    "ReliabilityDiagram",
    "RetainedCurve",
    "functional",
]
