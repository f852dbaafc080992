"""Calibration after training without moving data: one temperature, conformal sets and intervals."""

from lightning_fedbayes.callbacks.calibration.callback import predictions_of as predictions_of
from lightning_fedbayes.callbacks.calibration.conformal import FederatedConformal as FederatedConformal
from lightning_fedbayes.callbacks.calibration.scores import ScoreSketch as ScoreSketch
from lightning_fedbayes.callbacks.calibration.scores import all_class_scores as all_class_scores
from lightning_fedbayes.callbacks.calibration.scores import class_scores as class_scores
from lightning_fedbayes.callbacks.calibration.scores import interval_scores as interval_scores
from lightning_fedbayes.callbacks.calibration.temperature import FederatedTemperature as FederatedTemperature
from lightning_fedbayes.callbacks.calibration.temperature import TemperatureMessage as TemperatureMessage
from lightning_fedbayes.callbacks.calibration.temperature import TemperatureSearch as TemperatureSearch
from lightning_fedbayes.callbacks.calibration.temperature import temperature_message as temperature_message
