"""Calibration errors against torchmetrics and closed forms."""

import pytest
import torch
import torchmetrics.functional as tm

from lightning_fedbayes.metrics import functional as F
from tests.metrics.functional.predictions import draw, targets


def test_diagrams_ece_is_that_of_torchmetrics():
    probs, target = draw((3000, 7)), targets(3000, 7)
    for bins in (1, 15, 100):
        expected = tm.classification.multiclass_calibration_error(probs, target, num_classes=7, n_bins=bins)
        assert F.calibration_diagram(probs, target, bins).ece.item() == pytest.approx(expected.item(), rel=1e-6)


def test_bins_of_the_diagram_hold_what_lies_in_them():
    probs, target = draw((500, 4)), targets(500, 4)
    diagram = F.calibration_diagram(probs, target, bins=8)
    confidence, predicted = probs.max(1)
    for b in range(8):
        inside = (confidence >= b / 8) & (confidence < (b + 1) / 8)
        assert diagram.counts[b] == inside.sum()
        assert torch.allclose(diagram.confidence[b], confidence[inside].mean(), equal_nan=True)
        assert torch.allclose(diagram.accuracy[b], (predicted == target)[inside].float().mean(), equal_nan=True)
    certain = F.calibration_diagram(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), bins=8)
    assert certain.counts.tolist() == [0] * 7 + [1]
    assert certain.ece == 0


def calibrated(blocks=12, each=20):
    """Block b predicts the confidence (12 + b)/24, and exactly that share of it is correct."""
    probs, target = [], []
    for b in range(blocks):
        hits = round((0.5 + b / (2 * blocks)) * each * 12)
        confidence = hits / (each * 12)
        probs += [[confidence, 1 - confidence]] * (each * 12)
        target += [0] * hits + [1] * (each * 12 - hits)
    return torch.tensor(probs, dtype=torch.float64), torch.tensor(target)


@pytest.mark.parametrize("bins", [1, 12, 15, 100])
def test_adaptive_error_is_zero_for_perfect_calibration_whatever_the_order(bins):
    probs, target = calibrated()
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    assert F.adaptive_calibration_error(probs[order], target[order], bins).item() == pytest.approx(0, abs=1e-9)


def test_adaptive_error_is_the_mean_gap_of_equal_parts():
    probs = draw((600, 5))
    confidence, predicted = probs.max(1)
    target = torch.where(torch.rand(600) < 0.6, predicted, (predicted + 1) % 5)  # under- and then overconfident
    order = confidence.argsort()
    gaps = ((predicted == target).double() - confidence)[order].view(15, 40).mean(1)
    assert gaps.min() < 0 < gaps.max()
    assert F.adaptive_calibration_error(probs, target).item() == pytest.approx(gaps.abs().mean().item(), rel=1e-6)
