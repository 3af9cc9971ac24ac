"""The charts of a page: what they show, as plain objects for the page's JSON, and how they are drawn.

A chart is drawn here once, as paths in a square of 1000 units that the page stretches to its width; assets/page.js
shows, hides and points at what is drawn.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

import numpy as np

from fedcpsl.report.loaded_runs import RunSet, SeedGroup
from fedcpsl.report.tables import MODELS, value_of
from fedcpsl.runs.comparison import interval
from fedcpsl.runs.folder import Metrics

Chart = dict[str, Any]
Series = dict[str, Any]
UNITS = 1000  # of a drawing, along and down
MAX_KEYS = 12  # of a legend
BANDS = {"devices": "one standard deviation over devices", "seeds": "the 95 % interval over seeds", "": "no band"}
COLOURS = 8  # of the page's palette; further lines are grey
MAX_POINTS = 3_000  # of all series of a chart: limits the size of a page
SECONDS, JOULES = "virtual time, s", "energy, J"
X_UNITS = {"round": "", "MB sent": " MB sent", SECONDS: " s", JOULES: " J"}


def all_charts(run_set: RunSet) -> dict[str, Chart]:
    """Return the charts of a page, by id."""
    makers = (accuracy_charts, label_charts, uplink_charts, edge_charts, gap_charts)
    return {chart["id"]: chart for make in makers for chart in make(run_set)}


def accuracy_charts(run_set: RunSet) -> list[Chart]:
    """Return one chart with the three models of one group; for several groups, a chart per model with all of them."""
    if len(run_set.groups) == 1:
        (group,) = run_set.groups
        series = [_series(group, model, model, k) for k, model in enumerate(MODELS)]
        return _not_empty([_chart("accuracy", "Accuracy by round", "accuracy, %", series)])
    titles = {model: f"{model.capitalize()} model: accuracy by round" for model in MODELS}
    return _not_empty(
        [_of_all(run_set, f"accuracy-{model}", title, "accuracy, %", model) for model, title in titles.items()]
    )


def label_charts(run_set: RunSet) -> list[Chart]:
    """Return charts of the accuracy and confidence of pseudo-labels."""
    names = {"pseudo_label_accuracy": "right", "pseudo_label_confidence": "confidence"}
    if len(run_set.groups) == 1:
        (group,) = run_set.groups
        series = [_series(group, key, name, k) for k, (key, name) in enumerate(names.items())]
        return _not_empty([_chart("labels", "Pseudo-labels by round", "%", series)])
    titles = {"right": "how many are right", "confidence": "mean confidence"}
    return _not_empty(
        [_of_all(run_set, f"labels-{n}", f"Pseudo-labels: {titles[n]}", "%", key) for key, n in names.items()]
    )


def _of_all(run_set: RunSet, name: str, title: str, y: str, key: str) -> Chart:
    """Return a chart with one metric of all groups."""
    groups, most = zip(run_set.groups, colours_of(run_set), strict=True), _max_points(run_set)
    return _chart(name, title, y, [_series(group, key, group.name, k, most=most) for group, k in groups])


def uplink_charts(run_set: RunSet) -> list[Chart]:
    """Return a chart of accuracy by bytes sent, for several groups."""
    if len(run_set.groups) == 1:
        return []
    groups, most = zip(run_set.groups, colours_of(run_set), strict=True), _max_points(run_set)
    sent = [(group, k) for group, k in groups if group.runs[0].last["uplink_bytes"]]
    series = [_series(group, "personal", group.name, k, of=_megabytes, most=most) for group, k in sent]
    return _not_empty([_chart("uplink", "Personal accuracy by what was sent", "accuracy, %", series, x="MB sent")])


def edge_charts(run_set: RunSet) -> list[Chart]:
    """Return charts of accuracy by virtual time and by energy, for runs with an edge network."""
    coloured, most = zip(run_set.groups, colours_of(run_set), strict=True), _max_points(run_set)
    groups = [(group, k) for group, k in coloured if all("edge" in m for run in group.runs for m in run.metrics)]
    charts = []
    for name, x, of in (("edge-time", SECONDS, _virtual_seconds), ("edge-energy", JOULES, _joules)):
        if len(run_set.groups) == 1:
            lines = [_series(group, model, model, k, of=of) for group, _ in groups for k, model in enumerate(MODELS)]
        else:
            lines = [_series(group, "personal", group.name, k, of=of, most=most) for group, k in groups]
        title = f"{'Accuracy' if len(run_set.groups) == 1 else 'Personal accuracy'} by {x.partition(',')[0]}"
        charts.append(_chart(name, title, "accuracy, %", lines, x=x))
    return _not_empty(charts)


def gap_charts(run_set: RunSet) -> list[Chart]:
    """Return a chart of the optimality gap on a logarithmic scale, if it was logged."""
    groups, most = zip(run_set.groups, colours_of(run_set), strict=True), _max_points(run_set)
    series = [_series(group, "gaps", group.name, k, part="total", scale=1.0, most=most) for group, k in groups]
    return _not_empty([_chart("gaps", "Optimality gap by round", "gap G", series, log=True)])


def _max_points(run_set: RunSet) -> int:
    """Return the maximum points of one group in a chart with all of them."""
    return min(MAX_POINTS // 3, MAX_POINTS // max(1, len(run_set.groups)))


def colours_of(run_set: RunSet) -> list[int]:
    """Return a colour for every group; of many groups the best have their own, the others share grey."""
    if len(run_set.groups) <= COLOURS:
        return list(range(len(run_set.groups)))
    ends = [float(np.mean([value_of(run.last, "personal") or 0 for run in group.runs])) for group in run_set.groups]
    best = sorted(np.argsort(ends)[-COLOURS:].tolist())
    return [best.index(i) if i in best else COLOURS for i in range(len(run_set.groups))]


def _not_empty(charts: Sequence[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart["series"]]


def _megabytes(metrics: Metrics) -> float:
    return round(metrics["uplink_bytes"] / 1e6, 3)


def _virtual_seconds(metrics: Metrics) -> float:
    return float(metrics["edge"]["seconds"])


def _joules(metrics: Metrics) -> float:
    return float(metrics["edge"]["compute_joules"] + metrics["edge"]["radio_joules"])


def _round(metrics: Metrics) -> float:
    return metrics["round"]


def _series(
    group: SeedGroup,
    key: str,
    name: str,
    colour: int,
    *,
    part: str = "mean",
    scale: float = 100.0,
    of: Callable[[Metrics], float] = _round,
    most: int = MAX_POINTS // 3,
) -> Series:
    """Return mean by round, one standard deviation over all devices, and half a 95 % interval over seeds."""
    rows: dict[int, list[Metrics]] = {}
    for run in group.runs:
        for m in run.metrics:
            if value_of(m, key, part) is not None:
                rows.setdefault(m["round"], []).append(m)
    dash = 0 if colour == COLOURS else colour % 3
    series: Series = {"name": name, "colour": colour, "dash": dash, "x": [], "y": []}
    series |= {"devices": [], "seeds": [], "n": max((len(found) for found in rows.values()), default=0)}
    for r in _subset(sorted(rows), most):
        values = [scale * float(value_of(m, key, part) or 0) for m in rows[r]]
        spreads = [value_of(m, key, "std") if isinstance(m[key], dict) else None for m in rows[r]]
        inside = [scale * spread for spread in spreads if spread is not None]
        series["x"].append(float(f"{np.mean([of(m) for m in rows[r]]):.7g}"))
        series["y"].append(_short(float(np.mean(values))))
        within = sum(spread**2 for spread in inside) / len(inside) if inside else 0.0
        series["devices"].append(_short(float(np.sqrt(within + np.var(values)))) if inside else None)
        half = (interval(values) or {}).get("half_width")
        series["seeds"].append(None if half is None else _short(half))
    return series


def _short(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 1000 else round(value, 1)


def _chart(name: str, title: str, y: str, series: Sequence[Series], *, x: str = "round", log: bool = False) -> Chart:
    shown = [s for s in series if s["x"]]
    chart: Chart = {"id": name, "title": title, "x": x, "unit": X_UNITS[x], "y": y, "log": log, "series": shown}
    bands = [b for b in ("devices", "seeds") if any(v is not None for s in shown for v in s[b])]
    chart["bands"] = bands
    chart["band"] = "devices" if name == "accuracy" and bands else "seeds" if "seeds" in bands else ""
    if shown:
        xs, ys = [v for s in shown for v in s["x"]], [v for s in shown for v in s["y"]]
        low, high = min(xs), max(xs)
        high = high if high > low and x != "round" else max(high, low + 1)
        chart["xrange"] = [low, high]
        chart["xticks"] = [t for t in ticks(low, high, 8) if x != "round" or t == round(t)]
        chart["yrange"], chart["yticks"] = _powers(ys) if log else _percents(ys)
    return chart


def _subset(rounds: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the rounds, with the first and the last."""
    if len(rounds) <= count:
        return list(rounds)
    places = np.unique(np.linspace(0, len(rounds) - 1, max(count, 2)).round().astype(int))
    return [rounds[place] for place in places.tolist()]


def _percents(values: Sequence[float]) -> tuple[list[float], list[float]]:
    low = max(0, 10 * floor((min(values) - 4) / 10))
    return [float(low), 100.0], ticks(low, 100, 5)


def _powers(values: Sequence[float]) -> tuple[list[float], list[float]]:
    known = [v for v in values if v > 0] or [1.0]
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    return [10.0**low, 10.0 ** max(high, low + 1)], [10.0**k for k in range(low, max(high, low + 1) + 1)]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers from low to high, about this many."""
    rough = (high - low) / count
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, floor(high / step + 1e-9) + 1)]


class Drawing(NamedTuple):
    """A chart as it is drawn; ticks are (place in %, text), paths are in a square of 1000 units."""

    legend: list[tuple[int, Series]]
    grey: int  # series without a key of their own
    choices: list[tuple[str, str]]  # of bands, with their meaning
    xticks: list[tuple[float, str]]
    yticks: list[tuple[float, str]]
    lines: list[tuple[int, Series, str]]
    bands: list[tuple[int, Series, str, str]]
    description: str


def drawn(chart: Chart) -> Drawing:
    """Draw a chart: its lines, bands and ticks, coloured series above grey ones."""
    x, y = _scales(chart)
    ordered = sorted(enumerate(chart["series"]), key=lambda pair: -pair[1]["colour"])
    coloured = [(i, s) for i, s in enumerate(chart["series"]) if s["colour"] < COLOURS]
    bands = [
        (i, s, kind, path)
        for i, s in ordered
        for kind in chart["bands"]
        if s["colour"] < COLOURS and (path := _band(s, kind, x, y))
    ]
    return Drawing(
        legend=coloured[:MAX_KEYS],
        grey=len(chart["series"]) - len(coloured[:MAX_KEYS]),
        choices=[(kind, BANDS[kind]) for kind in [*chart["bands"], ""]],
        xticks=[(x(t) / 10, _tick_text(t)) for t in chart["xticks"]],
        yticks=[(y(t) / 10, _tick_text(t)) for t in chart["yticks"]],
        lines=[(i, s, _path((x(a), y(b)) for a, b in zip(s["x"], s["y"], strict=True))) for i, s in ordered],
        bands=bands,
        description=described(chart),
    )


def _scales(chart: Chart) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return the functions from values to units, from the left and from the top."""
    x_low, x_high = chart["xrange"]

    def height(value: float) -> float:
        return log10(max(value, chart["yrange"][0])) if chart["log"] else value

    low, high = map(height, chart["yrange"])

    def x(value: float) -> float:
        return round(UNITS * (value - x_low) / (x_high - x_low), 1)

    def y(value: float) -> float:
        return round(UNITS * (1 - min(max((height(value) - low) / (high - low), 0), 1)), 1)

    return x, y


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:g} {b:g}" for a, b in points)


def _band(series: Series, kind: str, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    points = [(a, b, half) for a, b, half in zip(series["x"], series["y"], series[kind], strict=True) if half]
    upper = [(x(a), y(b + half)) for a, b, half in points]
    lower = [(x(a), y(b - half)) for a, b, half in reversed(points)]
    return f"{_path([*upper, *lower])}Z" if points else ""


def value_text(value: float, chart: Chart) -> str:
    """Return a value of a chart as text."""
    return f"{value:.3g}" if chart["log"] else f"{value:.2f}"


def described(chart: Chart) -> str:
    """Return a chart in words, for screen readers."""
    unit = "" if chart["log"] else " %"
    ends = [
        f"{s['name']}: {value_text(s['y'][0], chart)}{unit} at {s['x'][0]:g}{chart['unit']}, "
        f"{value_text(s['y'][-1], chart)}{unit} at {s['x'][-1]:g}{chart['unit']}"
        for s in chart["series"][:MAX_KEYS]
    ]
    return f"By {chart['x']}. {'; '.join(ends)}."


def _tick_text(value: float) -> str:
    return f"{value:g}" if abs(value) < 10_000 else f"{value / 1000:g}k"
