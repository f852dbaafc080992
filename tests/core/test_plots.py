"""Figures show the given numbers, need no display and change no global state."""

import io

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

from lightning_fedbayes.core import plots

CURVE = (torch.linspace(0.02, 1, 50), torch.linspace(1, 0.8, 50))
FIGURES = {
    "calibration": lambda: plots.calibration_diagram(
        torch.tensor([torch.nan, 0.6, 0.9]), torch.tensor([torch.nan, 0.5, 0.8]), torch.tensor([0, 10, 30]), 0.1
    ),
    "calibration_of_one_bin": lambda: plots.calibration_diagram(
        torch.tensor(0.6), torch.tensor(0.5), torch.tensor(4), torch.tensor(0.1)
    ),
    "retained": lambda: plots.accuracy_retained({"entropy": CURVE, "epistemic": CURVE}),
    "retained_of_one_value": lambda: plots.accuracy_retained({"constant": (torch.tensor(1.0), torch.tensor(0.7))}),
    "heatmap": lambda: plots.client_heatmap(torch.arange(12).view(3, 4), "abcd"),
    "large_heatmap": lambda: plots.client_heatmap(torch.arange(60 * 40).view(60, 40), range(40)),
    "reliability_of_clients": lambda: plots.client_reliability(
        torch.tensor([[0.2, torch.nan], [0.8, 1.0]]), ["a", "b"]
    ),
    "across": lambda: plots.cross_heatmap(torch.rand(3, 3), "abc", "nll"),
    "across_long_names": lambda: plots.cross_heatmap(torch.rand(2, 2), ["a clinic in the north", "another one"], "nll"),
    "across_not_finite": lambda: plots.cross_heatmap(torch.full((2, 2), torch.nan), "ab", "nll"),
    "across_of_many": lambda: plots.cross_heatmap(torch.rand(150, 150), range(150), "nll"),
    "reliability_of_many": lambda: plots.client_reliability(torch.rand(300, 50), range(300)),
    "empty_heatmap": lambda: plots.client_heatmap(torch.zeros(2, 2).long(), (0, 1)),
    "rounds": lambda: plots.rounds({f"rule {i}": [0.1 * i, float("nan"), 0.5] for i in range(9)}, "accuracy"),
    "panels_of_rounds": lambda: plots.round_panels(
        {f"metric {i}": {"a": [0.1, float("nan"), 0.5], "b": [0.2, 0.3, 0.4 * i]} for i in range(5)}
    ),
    "one_panel": lambda: plots.round_panels({"accuracy": {"a": [0.1]}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("build", FIGURES.values(), ids=FIGURES)
def test_renders_to_png_without_pyplot(build, monkeypatch):
    before = pyplot.get_fignums(), dict(mpl.rcParams)
    monkeypatch.setattr(pyplot, "figure", None)  # whoever asks pyplot for a figure fails
    figure = build()
    assert isinstance(figure, Figure)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    assert png.getvalue().startswith(b"\x89PNG")
    assert (pyplot.get_fignums(), dict(mpl.rcParams)) == before
    width = figure.get_figwidth() * figure.dpi
    assert width >= 500
    for box in (axes.title.get_window_extent() for axes in figure.axes if axes.get_title()):
        assert 0 <= box.x0 < box.x1 <= width


def test_curves_are_the_given_points_and_told_apart():
    axes = FIGURES["retained"]().axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx(CURVE[1].numpy())
    styles = {(line.get_color(), line.get_linestyle()) for line in FIGURES["rounds"]().axes[0].lines}
    assert len(styles) == 9
    assert list(FIGURES["rounds"]().axes[0].lines[0].get_xdata()) == [1, 2, 3]
