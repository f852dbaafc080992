"""Charts of lines as SVG inside a page, whose style sheet gives colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 360, 220, 46, 34, 8, 10
"""Of a chart: its box, and what its axes leave on each side."""
LOGARITHMIC = 1e3
"""Ratio of the largest to the smallest value from which a chart is logarithmic."""
FAR = 1e150
"""Values from here on, such as those of a diverged run, are not drawn."""
COLOURS, DASHES = 7, ("none", "6 3", "2 3")
"""Lines have the classes c0 to c6; more lines are dashed."""

Points = Sequence[tuple[float, float]]


def by_round(title: str, lines: Mapping[str, Mapping[int, float]]) -> str:
    """Return a chart of values by round."""
    points = {label: [(float(round), values[round]) for round in sorted(values)] for label, values in lines.items()}
    return chart(title, points, "round")


def chart(
    title: str,
    lines: Mapping[str, Points],
    xlabel: str,
    x: tuple[float, float] | None = None,
    y: tuple[float, float] | None = None,
    shares: Sequence[float] = (),
) -> str:
    """Return a chart of lines as SVG; logarithmic where the values span more than three orders of magnitude.

    Args:
        title: above it.
        lines: label → points; those that are not finite, or nearly, are left out.
        xlabel: name of the x-axis.
        x, y: ends of the axes; None: those of the points.
        shares: with both ends of both axes, the diagonal is drawn, and the points of the last line as discs of these
            areas.
    """
    lines = {label: [(a, b) for a, b in points if abs(b) < FAR] for label, points in lines.items()}
    values = [point[1] for points in lines.values() for point in points]
    is_log = y is None and bool(values) and min(values) > 0 and max(values) > LOGARITHMIC * min(values)
    if is_log:
        lines = {label: [(a, math.log10(b)) for a, b in points] for label, points in lines.items()}
    x_low, x_high = x or _ends([point[0] for points in lines.values() for point in points])
    y_low, y_high = y or _ends([point[1] for points in lines.values() for point in points])

    def place(a: float, b: float) -> tuple[float, float]:
        across, up = (a - x_low) / (x_high - x_low), (b - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    marks = []
    for tick in ticks(y_low, y_high, is_log):
        at = place(x_low, tick)[1]
        text = f"1e{tick:g}" if is_log else f"{tick:.4g}"
        marks.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for tick in ticks(x_low, x_high, whole=xlabel == "round"):
        at = place(tick, y_low)[0]
        marks.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:.4g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    marks.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(xlabel)}</text>')
    if shares:
        (x1, y1), (x2, y2) = place(x_low, y_low), place(x_high, y_high)
        marks.append(f'<line class="diagonal" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>')
    legend = []
    for number, (label, points) in enumerate(lines.items()):
        at, colour = [place(*point) for point in points], f"c{number % COLOURS}"
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        dashes = DASHES[number // COLOURS % len(DASHES)]
        behind = len(lines) - 1 - number if len(lines) <= 3 and not shares else 0  # where lines meet, each is seen
        marks.append(
            f'<polyline class="{colour}" stroke-width="{1.8 + 1.4 * behind:.1f}" stroke-dasharray="{dashes}" '
            f'points="{joined}"/>'
        )
        radii = [1.5 + 12 * math.sqrt(share) for share in shares if number == len(lines) - 1]
        radii = radii or [2.0] * (len(at) == 1)  # a line of one point is not seen
        marks += [
            f'<circle class="{colour}" cx="{a:.1f}" cy="{b:.1f}" r="{radius:.1f}"/>'
            for (a, b), radius in zip(at, radii)
        ]
        legend.append(f'<span><i class="{colour}"></i>{escape(label)}</span>')
    named = f'<div class="legend">{"".join(legend)}</div>' if len(legend) > 1 else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(marks)}</svg>{named}</figure>'
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value; where they are one, it lies between 0 and its double."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return (low, high) if high > low else (min(2 * low, 0.0), max(2 * low, 0.0)) if low else (-1.0, 1.0)


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return at most six multiples of 1, 2 or 5 times a power of ten between two numbers, whole ones if asked.

    >>> ticks(0, 1), ticks(1, 20, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [5.0, 10.0, 15.0, 20.0])
    """
    power = 10.0 ** math.floor(math.log10(high - low))
    steps = [power / 10 * each for each in (1, 2, 5, 10, 20, 50)]
    step = next(each for each in steps if (high - low) / each <= 5 + 1e-9)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round((first + number) * step, 12) for number in range(math.floor(high / step + 1e-9) - first + 1)]
