"""Calibration after training without moving data: one temperature, conformal sets and intervals."""

from lightning_fedbayes.callbacks.calibration.callback import predictions_of
from lightning_fedbayes.callbacks.calibration.conformal import FederatedConformal
from lightning_fedbayes.callbacks.calibration.scores import ScoreSketch, all_class_scores, class_scores, interval_scores
from lightning_fedbayes.callbacks.calibration.temperature import (
    FederatedTemperature,
    TemperatureMessage,
    TemperatureSearch,
    temperature_message,
)

__all__ = [
    "FederatedConformal",
    "FederatedTemperature",
    "ScoreSketch",
    "TemperatureMessage",
    "TemperatureSearch",
    "all_class_scores",
    "class_scores",
    "interval_scores",
    "predictions_of",
    "temperature_message",
]
