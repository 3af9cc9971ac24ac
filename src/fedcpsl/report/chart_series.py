"""Charts as plain objects: what they show and in which range. A page has them as JSON, and drawn."""

from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import Any

import numpy as np

from fedcpsl.report.loaded_runs import Line, RunSet
from fedcpsl.report.summary_tables import MODELS, value_of
from fedcpsl.runs.comparison import interval
from fedcpsl.runs.folder import Metrics

Chart = dict[str, Any]
Series = dict[str, Any]
COLOURS = 8  # of the page's palette; lines beyond are grey
MOST_POINTS = 3_000  # of all series of a chart: keeps a page small
X_UNITS = {"round": "", "MB sent": " MB"}


def accuracy_charts(story: RunSet) -> list[Chart]:
    """One chart with the three models of one line; a chart per model, all lines in it, where there are several."""
    if len(story.lines) == 1:
        (line,) = story.lines
        series = [_series(line, model, model, k) for k, model in enumerate(MODELS)]
        return _kept([_chart("accuracy", "Accuracy by round", "accuracy, %", series)])
    titles = {model: f"{model.capitalize()} model: accuracy by round" for model in MODELS}
    return _kept([_of_all(story, f"accuracy-{model}", title, "accuracy, %", model) for model, title in titles.items()])


def label_charts(story: RunSet) -> list[Chart]:
    """How many pseudo-labels are right, and how sure they are."""
    names = {"pseudo_label_accuracy": "right", "pseudo_label_confidence": "confidence"}
    if len(story.lines) == 1:
        (line,) = story.lines
        series = [_series(line, key, name, k) for k, (key, name) in enumerate(names.items())]
        return _kept([_chart("labels", "Pseudo-labels by round", "%", series)])
    titles = {"right": "how many are right", "confidence": "mean confidence"}
    return _kept([_of_all(story, f"labels-{n}", f"Pseudo-labels: {titles[n]}", "%", key) for key, n in names.items()])


def _of_all(story: RunSet, name: str, title: str, y: str, key: str) -> Chart:
    """One metric of all lines in a chart."""
    lines = zip(story.lines, colours_of(story), strict=True)
    return _chart(name, title, y, [_series(line, key, line.name, k, most=_most(story)) for line, k in lines])


def uplink_charts(story: RunSet) -> list[Chart]:
    """Accuracy by what was sent, where lines differ in it."""
    if len(story.lines) == 1:
        return []
    lines = zip(story.lines, colours_of(story), strict=True)
    sent = [(line, k) for line, k in lines if line.runs[0].last["uplink_bytes"]]
    series = [_series(line, "personal", line.name, k, of=_megabytes, most=_most(story)) for line, k in sent]
    return _kept([_chart("uplink", "Personal accuracy by what was sent", "accuracy, %", series, x="MB sent")])


def gap_charts(story: RunSet) -> list[Chart]:
    """The optimality gap, on a logarithmic scale, where it was logged."""
    lines = zip(story.lines, colours_of(story), strict=True)
    series = [_series(line, "gaps", line.name, k, part="total", scale=1.0, most=_most(story)) for line, k in lines]
    return _kept([_chart("gaps", "Optimality gap by round", "gap G", series, log=True)])


def _most(story: RunSet) -> int:
    """Points of one line in a chart with all of them."""
    return min(MOST_POINTS // 3, MOST_POINTS // max(1, len(story.lines)))


def colours_of(story: RunSet) -> list[int]:
    """A colour for every line; of many lines for the best ones, the others share grey."""
    if len(story.lines) <= COLOURS:
        return list(range(len(story.lines)))
    ends = [float(np.mean([value_of(run.last, "personal") or 0 for run in line.runs])) for line in story.lines]
    best = sorted(np.argsort(ends)[-COLOURS:].tolist())
    return [best.index(i) if i in best else COLOURS for i in range(len(story.lines))]


def _kept(charts: Sequence[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart["series"]]


def _megabytes(metrics: Metrics) -> float:
    return round(metrics["uplink_bytes"] / 1e6, 3)


def _round(metrics: Metrics) -> float:
    return metrics["round"]


def _series(
    line: Line,
    key: str,
    name: str,
    colour: int,
    *,
    part: str = "mean",
    scale: float = 100.0,
    of: Callable[[Metrics], float] = _round,
    most: int = MOST_POINTS // 3,
) -> Series:
    """Mean over runs by round, one standard deviation over all their devices, half a 95 % interval over seeds."""
    rows: dict[int, list[Metrics]] = {}
    for run in line.runs:
        for m in run.metrics:
            if value_of(m, key, part) is not None:
                rows.setdefault(m["round"], []).append(m)
    dash = 0 if colour == COLOURS else colour % 3
    series: Series = {"name": name, "colour": colour, "dash": dash, "x": [], "y": []}
    series |= {"devices": [], "seeds": [], "n": max((len(found) for found in rows.values()), default=0)}
    for r in _some(sorted(rows), most):
        values = [scale * float(value_of(m, key, part) or 0) for m in rows[r]]
        spreads = [value_of(m, key, "std") if isinstance(m[key], dict) else None for m in rows[r]]
        inside = [scale * spread for spread in spreads if spread is not None]
        series["x"].append(round(float(np.mean([of(m) for m in rows[r]])), 3))
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
        low, high = min(xs), max(*xs, min(xs) + 1)
        chart["xrange"] = [low, high]
        chart["xticks"] = [t for t in ticks(low, high, 8) if x != "round" or t == round(t)]
        chart["yrange"], chart["yticks"] = _powers(ys) if log else _percents(ys)
    return chart


def _some(rounds: Sequence[int], most: int) -> list[int]:
    """So many of them at most, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    places = np.unique(np.linspace(0, len(rounds) - 1, max(most, 2)).round().astype(int))
    return [rounds[place] for place in places.tolist()]


def _percents(values: Sequence[float]) -> tuple[list[float], list[float]]:
    low = max(0, 10 * floor((min(values) - 4) / 10))
    return [float(low), 100.0], ticks(low, 100, 5)


def _powers(values: Sequence[float]) -> tuple[list[float], list[float]]:
    known = [v for v in values if v > 0] or [1.0]
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    return [10.0**low, 10.0 ** max(high, low + 1)], [10.0**k for k in range(low, max(high, low + 1) + 1)]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high, about so many."""
    rough = (high - low) / about
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, floor(high / step + 1e-9) + 1)]
