"""Charts and maps as HTML that needs no script; assets/page.js draws the charts again to fit, and lets one hover."""

from html import escape
from math import log10
from typing import Any

from fedcpsl.report.chart_series import COLOURS, Chart, Series
from fedcpsl.runs.split_summary import SplitSummary

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 26, 38
DASHES = ("", "7 3", "2 3")
MOST_KEYS = 12
BANDS = {"devices": "one standard deviation over devices", "seeds": "the 95 % interval over seeds", "": "no band"}


def figure(chart: Chart, *, heading: bool = True) -> str:
    """A chart with its legend; the numbers stand in the page's JSON under its id."""
    name, title = escape(chart["id"], quote=True), f"<h3>{escape(chart['title'])}</h3>" if heading else ""
    plot = f'<div class="plot">{draw(chart)}</div>'
    return f'<figure class="chart" data-chart="{name}">{title}{_legend(chart)}{plot}</figure>'


def _legend(chart: Chart) -> str:
    keys = []
    coloured = [(i, s) for i, s in enumerate(chart["series"]) if s["colour"] < COLOURS]
    for i, series in coloured[:MOST_KEYS]:
        line = (
            f'<svg width="26" height="10" aria-hidden="true"><path d="M1 5H25" class="line c{series["colour"]}" '
            f'stroke-dasharray="{DASHES[series["dash"]]}"/></svg>'
        )
        value = written(chart, series["y"][-1])
        keys.append(
            f'<button type="button" class="key" data-series="{i}" aria-pressed="true">{line}'
            f"<span>{escape(series['name'])}</span><b>{value}</b></button>"
        )
    others = len(chart["series"]) - len(keys)
    more = f'<span class="key">{others} more in grey</span>' if others else ""
    choices = "".join(
        f'<button type="button" data-band="{b}" title="{BANDS[b]}" aria-pressed="{str(b == chart["band"]).lower()}">'
        f"{b or 'none'}</button>"
        for b in [*chart["bands"], ""]
    )
    bands = f'<span class="bands" role="group" aria-label="band"><i>band</i>{choices}</span>' if chart["bands"] else ""
    return f'<div class="legend"><span class="keys">{"".join(keys)}{more}</span>{bands}</div>'


def written(chart: Chart, value: float) -> str:
    return f"{value:.3g}" if chart["log"] else f"{value:.2f}"


def draw(chart: Chart) -> str:
    """The chart as SVG."""
    x_low, x_high = chart["xrange"]
    low, high = _scaled(chart, chart["yrange"][0]), _scaled(chart, chart["yrange"][1])

    def x(value: float) -> float:
        return round(LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        share = (_scaled(chart, value) - low) / (high - low)
        return round(HEIGHT - BOTTOM - min(max(share, 0), 1) * (HEIGHT - TOP - BOTTOM), 1)

    parts = []
    for t in chart["yticks"]:
        parts.append(f'<path class="grid" d="M{LEFT} {y(t)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(t) + 4}" text-anchor="end">{tick_text(t)}</text>')
    for t in chart["xticks"]:
        parts.append(f'<text x="{x(t)}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick_text(t)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(chart["x"])}</text>')
    parts.append(f'<text x="0" y="12">{escape(chart["y"])}</text>')
    ordered = sorted(chart["series"], key=lambda s: -s["colour"])
    bands = [s for s in ordered if chart["band"] and s["colour"] < COLOURS]
    parts += [_band(s, chart["band"], x, y) for s in bands]
    for s in ordered:
        points = "L".join(f"{x(a)} {y(b)}" for a, b in zip(s["x"], s["y"], strict=True))
        parts.append(f'<path class="line c{s["colour"]}" stroke-dasharray="{DASHES[s["dash"]]}" d="M{points}"/>')
    label = escape(f"{chart['title']}. {described(chart)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _scaled(chart: Chart, value: float) -> float:
    return log10(max(value, chart["yrange"][0])) if chart["log"] else value


def _band(series: Series, kind: str, x: Any, y: Any) -> str:
    points = [(a, b, half) for a, b, half in zip(series["x"], series["y"], series[kind], strict=True) if half]
    if not points:
        return ""
    upper = [f"{x(a)} {y(b + half)}" for a, b, half in points]
    lower = [f"{x(a)} {y(b - half)}" for a, b, half in reversed(points)]
    return f'<path class="band c{series["colour"]}" d="M{"L".join([*upper, *lower])}Z"/>'


def described(chart: Chart) -> str:
    """A chart in words, for those who do not see it."""
    unit = "" if chart["log"] else " %"
    ends = [
        f"{s['name']}: {written(chart, s['y'][0])}{unit} at {s['x'][0]:g}{chart['unit']}, "
        f"{written(chart, s['y'][-1])}{unit} at {s['x'][-1]:g}{chart['unit']}"
        for s in chart["series"][:MOST_KEYS]
    ]
    return f"By {chart['x']}. {'; '.join(ends)}."


def tick_text(value: float) -> str:
    return f"{value:g}" if abs(value) < 10_000 else f"{value / 1000:g}k"


def heat_map(holdings: SplitSummary) -> str:
    """Devices by classes: two tables of counts, the darker the more."""
    return '<div class="maps">' + "".join(_map(holdings, what) for what in ("labelled", "unlabelled")) + "</div>"


def _map(holdings: SplitSummary, what: str) -> str:
    counts = holdings.labelled if what == "labelled" else holdings.unlabelled
    unknown = holdings.unknown if what == "unlabelled" and any(holdings.unknown) else None
    most = max((n for row in [*counts, unknown or []] for n in row), default=0) or 1
    numbers = " dense" if len(holdings.classes) > 16 or most > 999 else ""
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in [*holdings.classes, *(["?"] if unknown else [])])
    rows = []
    for i, (name, row) in enumerate(zip(holdings.names, counts, strict=True)):
        cells = []
        for c, n in enumerate(row):
            tip = f"device {name}, class {holdings.classes[c]}: {holdings.labelled[i][c]} labelled, "
            tip += f"{holdings.unlabelled[i][c]} unlabelled"
            cells.append(_cell(n, most, tip))
        if unknown:
            cells.append(_cell(unknown[i], most, f"device {name}, class unknown: {unknown[i]} unlabelled"))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{what} samples by device and class">'
        f'<table class="heat {what}{numbers}"><caption>{what}, most {most}</caption>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(count: int, most: int, tip: str) -> str:
    """A count, the darker the more; an empty one has no colour."""
    if not count:
        return "<td></td>"
    share = round(12 + 88 * count / most)
    dark = ' class="hi"' if share > 55 else ""
    return f'<td{dark} style="--v:{share}%" title="{escape(tip, quote=True)}">{count}</td>'
