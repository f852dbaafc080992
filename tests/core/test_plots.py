"""Figures show the given numbers, need no display and change no global state."""

import io

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots

X = torch.linspace(-2, 2, 30)
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
    "across_not_finite": lambda: plots.cross_heatmap(torch.full((2, 2), torch.nan), "ab", "nll"),
    "across_of_many": lambda: plots.cross_heatmap(torch.rand(150, 150), range(150), "nll"),
    "reliability_of_many": lambda: plots.client_reliability(torch.rand(300, 50), range(300)),
    "accuracy_of_clients": lambda: plots.client_accuracy(torch.tensor([0.9, torch.nan, 0.5, 0.7])),
    "empty_heatmap": lambda: plots.client_heatmap(torch.zeros(2, 2).long(), (0, 1)),
    "rounds": lambda: plots.rounds({f"rule {i}": [0.1 * i, float("nan"), 0.5] for i in range(9)}, "accuracy"),
    "panels_of_rounds": lambda: plots.round_panels(
        {f"metric {i}": {"a": [0.1, float("nan"), 0.5], "b": [0.2, 0.3, 0.4 * i]} for i in range(5)}
    ),
    "one_panel": lambda: plots.round_panels({"accuracy": {"a": [0.1]}}),
}


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


def test_a_notebook_shows_the_figure_of_a_split_once():
    """IPython, without Matplotlib's own display, asks the value of a cell for these; a picture in two forms is one."""
    table = fb.DirichletPartition(clients=3, alpha=0.5).split(torch.arange(60) % 4, seed=0)
    shown = [
        form
        for form in ("png", "jpeg", "svg", "html")
        if hasattr(table.plot(), f"_repr_{form}_") and getattr(table.plot(), f"_repr_{form}_")() is not None
    ]
    assert shown == ["png"]
    assert table.plot()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("build", FIGURES.values(), ids=FIGURES)
def test_axes_are_labelled_and_titled(build):
    figure = build()
    axes = [a for a in figure.axes if a.get_label() != "<colorbar>"]
    assert axes[0].get_title()
    assert all(a.get_ylabel() for a in axes)
    assert axes[-1].get_xlabel()


def test_calibration_bars_are_the_accuracies_of_full_bins():
    axes, below = FIGURES["calibration"]().axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.5, 0.8])
    assert [bar.get_x() for bar in axes.patches] == pytest.approx([1 / 3, 2 / 3])
    assert [bar.get_height() for bar in below.patches] == pytest.approx([0, 0.25, 0.75])
    assert "10.00%" in axes.get_title()


def test_curves_are_the_given_points_and_told_apart():
    axes = FIGURES["retained"]().axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx(CURVE[1].numpy())
    styles = {(line.get_color(), line.get_linestyle()) for line in FIGURES["rounds"]().axes[0].lines}
    assert len(styles) == 9
    assert list(FIGURES["rounds"]().axes[0].lines[0].get_xdata()) == [1, 2, 3]


def test_a_page_of_rounds_has_a_panel_per_metric_and_one_legend():
    figure = FIGURES["panels_of_rounds"]()
    assert [axes.get_ylabel() for axes in figure.axes] == [f"metric {i}" for i in range(5)]
    assert list(figure.axes[4].lines[1].get_ydata()) == pytest.approx([0.2, 0.3, 1.6])
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b"]
    assert not FIGURES["one_panel"]().legends


def test_heatmap_writes_the_counts():
    axes = FIGURES["heatmap"]().axes[0]
    assert [text.get_text() for text in axes.texts] == [str(i) for i in range(12)]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list("abcd")


def test_clients_are_drawn_from_the_worst_to_the_best_without_those_of_no_data():
    axes = FIGURES["accuracy_of_clients"]().axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.5, 0.7, 0.9])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "3", "0"]
    assert axes.lines[0].get_ydata() == pytest.approx([0.7, 0.7])


def test_reliability_has_a_row_per_client_and_a_column_per_round():
    axes = FIGURES["reliability_of_clients"]().axes[0]
    assert axes.images[0].get_array().filled(-1).tolist() == [[pytest.approx(0.2), -1], [pytest.approx(0.8), 1]]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]
