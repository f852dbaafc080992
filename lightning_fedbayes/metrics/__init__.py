"""Metrics of Bayesian predictions: torchmetrics shells over the pure functions in ``metrics.functional``.

Classification metrics score the mean predictive, shape (batch, classes). Measures of uncertainty need all posterior
samples, shape (samples, batch, classes). For accuracy, AUROC and ECE use torchmetrics' own.
"""

from lightning_fedbayes.metrics import functional
from lightning_fedbayes.metrics.scores import (
    AdaptiveCalibrationError,
    BrierScore,
    CalibrationDiagram,
    ClientAccuracy,
    ConcordanceIndex,
    DeterminantSharpness,
    EnsembleCRPS,
    GaussianCRPS,
    GaussianNLL,
    IntervalCoverage,
    NegativeLogLikelihood,
)
from lightning_fedbayes.metrics.uncertainty import (
    AccuracyRetained,
    KwonAleatoric,
    KwonEpistemic,
    MutualInformation,
    OutOfDistributionAUROC,
    OutOfDistributionFPR,
    PredictiveEntropy,
    RetainedCurve,
)

__all__ = [
    "AccuracyRetained",
    "AdaptiveCalibrationError",
    "BrierScore",
    "CalibrationDiagram",
    "ClientAccuracy",
    "ConcordanceIndex",
    "DeterminantSharpness",
    "EnsembleCRPS",
    "GaussianCRPS",
    "GaussianNLL",
    "IntervalCoverage",
    "KwonAleatoric",
    "KwonEpistemic",
    "MutualInformation",
    "NegativeLogLikelihood",
    "OutOfDistributionAUROC",
    "OutOfDistributionFPR",
    "PredictiveEntropy",
    "RetainedCurve",
    "functional",
]
