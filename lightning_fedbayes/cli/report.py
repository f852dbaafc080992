"""``fedbayes report``: one page of HTML about a run, charts in it, which needs no server and no other file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_fedbayes.cli.messages import Options
from lightning_fedbayes.cli.results import spoken, without_draws
from lightning_fedbayes.core.run_file import BY_DRAWS, RunRecord, Table, file_of, home_of, read
from lightning_fedbayes.core.tables import html_table

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 360, 220, 46, 34, 8, 10
"""Size of a chart's box, and the margins of its axes."""
LOGARITHMIC = 1e3
"""Ratio of the largest to the smallest value from which a chart is logarithmic."""
FAR = 1e150
"""Larger values, as of a diverged run, are not drawn."""
COLOURS, DASHES = 7, ("none", "6 3", "2 3")
"""Lines have the classes c0 to c6. More lines are dashed."""

Points = Sequence[tuple[float, float]]

PAGE = "report.html"
GROUPS = {
    "retained_area_": "area under accuracy of the most certain",
    "kwon_": "uncertainty in two parts",
    "_spread": "spread over clients",
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier score",
    "rmse": "RMSE",
    "crps": "CRPS",
}
"""Part of a name → title of the chart that such figures share. Any other figure has its own."""
LAST = 3
"""The first so many of them are no scores, and stand last."""
STAGES = ("val/", f"val/{BY_DRAWS}", "test/", f"test/{BY_DRAWS}")
TILES = ("accuracy", "nll", "ece", "rmse", "crps", "coverage")
NOTES = {
    "area under": "Drop the most uncertain predictions first, and average the accuracy of the rest: higher is better.",
    "two parts": "Kwon's measures: aleatoric is noise in the data, epistemic is what more data would remove.",
    "spread": "Standard deviation over the clients: 0 if all are served alike.",
    "by confidence": "On the diagonal predictions are right as often as they say, below it they are too sure.",
    "most certain": "A useful uncertainty keeps the accuracy high at the left, where few predictions are left.",
    "of each client": "Lines far below the others are clients that the global model does not fit.",
    "its training loss": "A line that rises is a client whose training diverges.",
    "train loss": "Mean over the clients of a round, while they train.",
    "disagreement": "How far the clients' means lie apart. It falls as they agree.",
    "posterior variance": "Mean over the parameters. If it falls without end, data are counted again and again.",
    "effective clients": "As many equal clients would count as much: far fewer than clients mean that few decide.",
    "accuracy": "Share of right predictions, by the global model: higher is better.",
    "NLL": "Surprise at the true answers, in nats per example: lower is better. It punishes false certainty most.",
    "ECE": "Mean gap between confidence and accuracy: 0 is perfect calibration.",
    "Brier": "Squared error of the probabilities: lower is better.",
    "RMSE": "Error in the units of the target: lower is better.",
    "CRPS": "Error of the whole predicted distribution, in the units of the target: lower is better.",
    "coverage": "Share of the targets in the central 90 % interval: 0.9 is right.",
    "seconds": "Time of the round.",
    "megabytes": "What server and clients send each other.",
}
"""Part of a chart's title → how to read it. The first that fits."""
ROUND_FIGURES = ("train_loss", "disagreement", "posterior_variance", "effective_clients", "seconds")
CLIENT_COLUMNS = ("client", "examples", "accuracy", "train_loss", "failures")

STYLE = """
:root { --paper: #fff; --ink: #222; --soft: #667; --line: #dde; --tile: #f4f5f8; --c0: #0072b2; --c1: #d55e00;
 --c2: #009e73; --c3: #cc79a7; --c4: #b57f00; --c5: #3a96c8; --c6: #555; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --paper: #15171c; --ink: #e6e6ea; --soft: #a0a4b0; --line: #343843;
 --tile: #1f2229; --c0: #58b0ea; --c1: #ff8a3d; --c2: #2cc79b; --c3: #e39cc8; --c4: #f0b840; --c5: #8fd0f5;
 --c6: #bbb } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 16px }
h1 { font-size: 22px; margin: 8px 0; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 28px 0 10px; border-bottom: 1px solid var(--line); padding-bottom: 4px }
p { margin: 6px 0; max-width: 80ch } .soft { color: var(--soft) }
.tiles, .charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)) }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 20px }
.tiles div { background: var(--tile); border-radius: 6px; padding: 8px 12px }
.tiles b { display: block; font-size: 20px }
figure { margin: 0 } figcaption { font-weight: 600; font-size: 14px; margin-bottom: 2px }
svg { width: 100%; height: auto; display: block; overflow: visible } svg text { font-size: 11px; fill: var(--soft) }
.grid { stroke: var(--line) } .diagonal { stroke: var(--soft); stroke-dasharray: 4 4 }
polyline { fill: none; stroke: var(--c); stroke-linejoin: round } circle { fill: var(--c) }
.legend { font-size: 12px; color: var(--soft); overflow-wrap: anywhere } .legend span { margin-right: 10px }
.legend i { display: inline-block; width: 14px; border-top: 3px solid var(--c); vertical-align: middle;
 margin-right: 4px }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; margin-top: 12px }
td, th { text-align: left; padding: 3px 8px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top }
td:first-child, td:last-child { overflow-wrap: anywhere } td:first-child { min-width: 5.5em }
th { color: var(--soft); font-weight: 600 } .wide { overflow-x: auto }
summary { cursor: pointer; font-weight: 600; margin: 10px 0 }
""" + " ".join(f".c{number} {{ --c: var(--c{number}) }}" for number in range(COLOURS))


def report(arguments: list[str]) -> int:
    """Write the page of a run, and print its file."""
    options = Options("report", f"Write a page about a run, {PAGE}: one file, which needs no server and no account.")
    kinds = "folder of a CSVLogger or TensorBoardLogger, or W&B's folder offline-run-…"
    options.add_argument("run", metavar="RUN", type=Path, help=kinds)
    options.add_argument("--output", metavar="FILE", type=Path, help=f"default: {PAGE} in the folder of the run")
    values = options.parse(arguments)
    file = file_of(values.run)
    output = values.output or home_of(file) / PAGE
    text = page(read(file), home_of(file).resolve().name)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(output)
    return 0


def page(run: RunRecord, name: str) -> str:
    """Return the page of a run under the heading ``name``."""
    figures = run.figures
    known = {each: of_rounds[max(of_rounds)] for each, of_rounds in figures.items()}
    settings = [(key.replace("_", " "), value) for key, value in run.settings.items() if key != "network"]
    scores = [stage + each for stage in STAGES for each in TILES if stage + each in known]
    shown = [(spoken(each), known[each]) for each in scores]
    heads, clients = _rows(run.tables.get("federation/clients"))
    if clients and not math.isnan(clients[0][2]):
        shown.append((f"{heads[2]} of the worst client, {clients[0][0]}", clients[0][2]))
    tiles = "".join(f"<div>{escape(what)}<b>{value:.4g}</b></div>" for what, value in shown)
    rounds = [
        by_round(each.replace("_", " "), {each: figures[f"federation/{each}"]})
        for each in ROUND_FIGURES
        if f"federation/{each}" in figures
    ]
    firsts_and_lasts = [(each, figures[each][min(figures[each])], known[each]) for each in sorted(figures)]
    torn = "The last line of the run's file is cut short and left out: the run was killed while it wrote."
    fusion = str(run.settings.get("fusion", "?")).partition("(")[0]
    parts = [
        f"<h1>{escape(str(run.settings.get('clients', '?')))} clients by {escape(fusion)}</h1>",
        f"<p>{escape(f'{name}: {_about(run)}')}</p>",
        f'<p class="soft">{torn}</p>' if run.torn else "",
        f'<div class="tiles">{tiles}</div>',
        _section("By round", [*(by_round(key, lines) for key, lines in _groups(figures).items()), *rounds]),
        _section("Calibration, and what uncertainty is worth", _curves(run.curves)),
        _section("Clients", _client_charts(figures)),
        _clients(heads, clients),
        _section("What travelled", _traffic(figures)),
        f"<h2>Settings</h2>{html_table(('setting', 'value'), settings)}",
        "<h2>Everything</h2>",
        _details("figures", ("figure", "first", "last"), firsts_and_lasts),
        *(_details(each, table["columns"], table["rows"]) for each, table in sorted(run.tables.items())),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(name)}</title><style>{STYLE}</style>"
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{body}\n</main></body></html>\n'


def _about(run: RunRecord) -> str:
    rounds = max(max(of_rounds) for of_rounds in run.figures.values())
    parts = [f"{rounds} rounds", f"fusion {run.settings.get('fusion', '?')}"]
    if network := run.settings.get("network"):
        counts = "{parameters:,} parameters, {trained:,} trained, {gaussian:,} Gaussian".format(**network)
        parts.append(f"{network['module']} with {network['name']} of {counts}")
    return "; ".join(parts)


def _groups(figures: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Mapping[int, float]]]:
    """Return the charts of the validation, scores first: title → name of a line → its values by round."""
    titles = [*GROUPS.values()]
    charts: dict[str, dict[str, Mapping[int, float]]] = {title: {} for title in titles[LAST:] + titles[:LAST]}
    for name in sorted(figures):
        if name.startswith("val/"):
            part = next((each for each in GROUPS if each in name), None)
            title = spoken(name) if part is None else GROUPS[part]
            own, by = without_draws(name.removeprefix("val/"))
            line = own.replace("clients/", "").replace("retained_area_", "").replace("_", " ")
            charts.setdefault(title, {})[line + by] = figures[name]
    return {title: lines for title, lines in charts.items() if lines}


def _curves(curves: Mapping[str, Mapping[int, Table]]) -> Iterable[str]:
    """Draw calibration in the first, the middle and the last round, and the last accuracy-retained curves."""
    for stage in STAGES:
        if diagrams := curves.get(f"{stage}calibration_curve"):
            rounds = sorted(diagrams)
            shown = {
                f"round {round}": [(row[0], row[1]) for row in diagrams[round]["rows"]]
                for round in dict.fromkeys((rounds[0], rounds[len(rounds) // 2], rounds[-1]))
            }
            shares = [row[3] for row in diagrams[rounds[-1]]["rows"]]
            title = spoken(f"{stage}accuracy by confidence")
            yield chart(title, shown, "confidence", (0.0, 1.0), (0.0, 1.0), shares)
        if retained := curves.get(f"{stage}retained_curve"):
            table = retained[max(retained)]
            lines = {
                name.replace("_", " "): [(row[0], row[place]) for row in table["rows"]]
                for place, name in enumerate(table["columns"])
                if place
            }
            title = f"{spoken(f'{stage}accuracy of the most certain')}, by"
            yield chart(title, lines, "examples retained", (0.0, 1.0))


def _client_charts(figures: Mapping[str, Mapping[int, float]]) -> Iterable[str]:
    for kind, title in (
        ("client_accuracy/", "accuracy of each client"),
        ("client_train_loss/", "its training loss"),
        (f"{BY_DRAWS}client_accuracy/", "accuracy of each client, by draws"),
    ):
        lines = {name.removeprefix(kind).replace("_", " "): figures[name] for name in figures if name.startswith(kind)}
        if lines:
            yield by_round(title, dict(sorted(lines.items(), key=lambda line: (len(line[0]), line[0]))))


def _rows(table: Table | None) -> tuple[list[str], list[Any]]:
    """Return heads and rows of the table of clients, the least accurate first, unknown accuracies last."""
    if table is None:
        return [], []
    columns = dict(map(without_draws, table["columns"]))
    places = [list(columns).index(each) for each in (*CLIENT_COLUMNS, "last_failure")]
    rows = [[row[place] for place in places] for row in table["rows"]]
    heads = [each.replace("_", " ") + columns[each] for each in CLIENT_COLUMNS]
    return heads, sorted(rows, key=lambda row: (math.isnan(row[2]), row[2], -row[3]))


def _clients(heads: Sequence[str], rows: Sequence[Any]) -> str:
    if not heads:
        return '<p class="soft">The table of clients is written at the end of a run: this one has not reached it.</p>'
    reasons = {row[0]: row[-1] for row in rows if row[-1]}
    told = [f'<p class="soft">{escape(f"{name} was left out, last for {why}")}</p>' for name, why in reasons.items()]
    return "".join([html_table(heads, [row[:-1] for row in rows]), *told])


def _traffic(figures: Mapping[str, Mapping[int, float]]) -> Iterable[str]:
    names = {way: f"federation/megabytes_{way}" for way in ("up", "down")}
    lines = {way: dict(sorted(figures[name].items())) for way, name in names.items() if name in figures}
    if lines:
        yield by_round("megabytes in a round, all clients", lines)
        sums = {
            f"{way}, {sum(each.values()):.4g} in all": dict(zip(each, accumulate(each.values())))
            for way, each in lines.items()
        }
        yield by_round("megabytes so far, all clients", sums)


def _section(title: str, charts: Iterable[str]) -> str:
    shown = "\n".join(charts)
    return f'<h2>{escape(title)}</h2><div class="charts">{shown}</div>' if shown else ""


def _details(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table that opens at a click, and can be moved where the window is narrow."""
    return f'<details><summary>{escape(title)}</summary><div class="wide">{html_table(columns, rows)}</div></details>'


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
    """Return a chart of lines, label → points, as SVG. Logarithmic where values span three orders of magnitude.

    ``x`` and ``y`` are ends of the axes. None: the points' ends. ``shares`` are areas of the last line's points.
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
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        marks.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
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
        stroke = f'stroke-width="{1.8 + 1.4 * behind:.1f}" stroke-dasharray="{dashes}"'
        marks.append(f'<polyline class="{colour}" {stroke} points="{joined}"/>')
        radii = [1.5 + 12 * math.sqrt(share) for share in shares if number == len(lines) - 1]
        radii = radii or [2.0] * (len(at) == 1)  # a line of one point is not seen
        marks += [
            f'<circle class="{colour}" cx="{a:.1f}" cy="{b:.1f}" r="{radius:.1f}"/>'
            for (a, b), radius in zip(at, radii)
        ]
        legend.append(f'<span><i class="{colour}"></i>{escape(label)}</span>')
    named = f'<div class="legend">{"".join(legend)}</div>' if len(legend) > 1 else ""
    label = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'
    drawing = f"<svg {label}>{''.join(marks)}</svg>"
    note = next((text for part, text in NOTES.items() if part in title), "")
    said = f'<p class="soft">{note}</p>' if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}{named}{said}</figure>"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value. Where they are equal, it lies between 0 and its double."""
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
