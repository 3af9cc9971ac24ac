"""Figures by matplotlib, for files: accuracy of runs, comparisons and studies, maps of sweeps and splits."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedcpsl.runs.folder import Metrics

COLOURS: Mapping[str, str] = {"personal": "#2f9e6e", "global": "#3b7dd8", "localized": "#d9822b"}
GREY = "#80868b"


def accuracy_by_round(metrics: Sequence[Metrics]) -> str:
    """Mean accuracy over devices by round, with one standard deviation around the personal one, as SVG."""
    figure, axes = _axes(7.2, 3.8)
    for model, colour in COLOURS.items():
        points = [(m["round"], m[model]["mean"], m[model]["std"]) for m in metrics if _known(m, model)]
        if not points:
            continue
        rounds, means, spreads = zip(*points, strict=True)
        axes.plot(rounds, [100 * v for v in means], color=colour, label=model, linewidth=1.8)
        if model == "personal":
            low = [100 * max(m - s, 0) for m, s in zip(means, spreads, strict=True)]
            high = [100 * min(m + s, 1) for m, s in zip(means, spreads, strict=True)]
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy on own tests, %", ylim=(0, 101))
    if axes.lines:
        axes.legend(frameon=False, labelcolor=GREY, loc="lower right")
    return _svg(figure)


def accuracy_per_device(devices: Sequence[Mapping[str, str]]) -> str:
    """Every device's accuracy, best first: its personal prediction as a bar, the global model as a mark; SVG."""
    rows = sorted((d for d in devices if d["personal"]), key=lambda d: -float(d["personal"]))
    figure, axes = _axes(7.2, 3.2)
    places = range(len(rows))
    axes.bar(
        places,
        [100 * float(d["personal"]) for d in rows],
        color=COLOURS["personal"],
        width=0.75,
        label="personal",
    )
    general = [(i, 100 * float(d["global"])) for i, d in enumerate(rows) if d["global"]]
    look = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.2}
    if general:
        axes.plot(*zip(*general, strict=True), linestyle="", color=COLOURS["global"], label="global", **look)
    every = max(1, len(rows) // 25)
    axes.set_xticks(list(places)[::every], [d["name"] for d in rows][::every])
    axes.set(xlabel="device, best first", ylabel="accuracy, %", ylim=(0, 104))
    axes.legend(frameon=False, labelcolor=GREY, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return _svg(figure)


def curves_of_cases(curves: Mapping[str, tuple[Sequence[int], Any]]) -> str:
    """Personal accuracy by round of several cases, mean and 95 % interval over seeds, as SVG."""
    figure, axes = _axes(7.6, 4.2)
    _draw_curves(axes, curves)
    axes.set(ylim=(0, 101))
    if axes.lines and len(curves) <= 12:
        axes.legend(frameon=False, labelcolor=GREY, loc="lower right", ncols=1 + (len(curves) > 6))
    return _svg(figure)


def panels_of_curves(panels: Mapping[str, Mapping[str, tuple[Sequence[int], Any]]]) -> str:
    """Personal accuracy by round, a panel for every set of cases, all on one scale, as SVG."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = _figure(1.2 + 4.4 * columns, 0.9 + 3.1 * rows, len(panels), columns)
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        _draw_curves(axes, curves)
        axes.set(title=title)
        axes.title.set_color(GREY)
    return _on_one_scale(figure, grid, 2 * columns)


def final_accuracies(panels: Mapping[str, Mapping[str, tuple[float, float, float | None]]]) -> str:
    """How many cases end, best first: mean accuracy, half its interval, worst tenth of devices, in %, as SVG."""
    longest = max(len(rows) for rows in panels.values())
    figure, grid = _figure(2.0 + 4.6 * len(panels), 1.2 + 0.27 * longest, len(panels))
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        ordered = sorted(rows.items(), key=lambda row: row[1][0])
        places, (means, halves, worst) = range(len(ordered)), zip(*(row for _, row in ordered), strict=True)
        look = {"markersize": 6, "linestyle": ""}
        axes.errorbar(
            means,
            places,
            xerr=_within_percent(means, halves),
            color=COLOURS["personal"],
            marker="o",
            capsize=2,
            label="mean over devices",
            **look,
        )
        known = [(value, place) for value, place in zip(worst, places, strict=True) if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=GREY, marker="x", label="worst tenth of devices", **look)
        axes.set_yticks(places, [name for name, _ in ordered])
        axes.set(xlabel="personal accuracy, %", title=title)
        axes.title.set_color(GREY)
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, labelcolor=GREY
    )
    return _svg(figure)


def costs(rows: Mapping[str, Mapping[str, Mapping[str, tuple[Sequence[float], Any]]]]) -> str:
    """Personal accuracy by virtual time and by energy, side by side for every row, a curve for each panel, as SVG."""
    figure, grid = _figure(9.6, 0.9 + 2.7 * len(rows), 2 * len(rows), 2)
    places = iter(grid)
    for title, by_cost in rows.items():
        for x, curves in by_cost.items():
            axes = next(places)
            _draw_curves(axes, curves, ordered=True)
            axes.set(title=title, xlabel=x, xlim=(0, None))
            axes.title.set_color(GREY)
    return _on_one_scale(figure, grid, 5)


def _on_one_scale(figure: Any, grid: Sequence[Any], columns: int) -> str:
    """The figure as SVG, with one range of accuracies for all panels, and one legend below them."""
    lowest = min((float(line.get_ydata().min()) for axes in grid for line in axes.lines), default=0.0)
    for axes in grid:
        axes.set(ylim=(max(0.0, lowest - 3), 101))
    handles = grid[0].get_legend_handles_labels()
    wide = min(columns, len(handles[1]))
    figure.legend(*handles, loc="outside lower center", ncols=wide, frameon=False, labelcolor=GREY)
    return _svg(figure)


def trend(means: Mapping[str, Sequence[tuple[str, float, float]]], of: str) -> str:
    """How cases end as something changes: for every row its (label, mean %, half an interval), as SVG."""
    figure, axes = _axes(7.6, 4.2)
    labels = [label for label, _, _ in next(iter(means.values()))]
    for k, (colour, (row, points)) in enumerate(zip(_colours(len(means)), means.items(), strict=True)):
        places = [labels.index(label) + 0.06 * (k - (len(means) - 1) / 2) for label, _, _ in points]
        values, spread = [mean for _, mean, _ in points], [half for _, _, half in points]
        within = _within_percent(values, spread)
        axes.errorbar(
            places, values, within, color=colour, label=row, linewidth=1.6, marker="o", markersize=4, capsize=2
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel=of, ylabel="personal accuracy, %")
    axes.legend(frameon=False, labelcolor=GREY, loc="best")
    return _svg(figure)


def _within_percent(means: Sequence[float], halves: Sequence[float]) -> list[list[float]]:
    """How far intervals of accuracies reach below and above their means: not below 0 % or above 100 %."""
    below = [min(half, mean) for mean, half in zip(means, halves, strict=True)]
    above = [min(half, 100 - mean) for mean, half in zip(means, halves, strict=True)]
    return [below, above]


def gaps_by_rounds(means: Mapping[str, Sequence[tuple[float, Sequence[float]]]]) -> str:
    """Mean gaps of runs with more and more rounds R, on logarithmic scales, beside 1/sqrt(R), as SVG."""
    import numpy as np

    figure, axes = _axes(6.4, 4.2)
    for colour, (row, points) in zip(_colours(len(means)), means.items(), strict=True):
        rounds, middle = [r for r, _ in points], [float(np.mean(values)) for _, values in points]
        axes.loglog(rounds, middle, color=colour, label=row, marker="o", markersize=4, linewidth=1.6)
        for r, values in points:
            axes.loglog([r] * len(values), values, color=colour, marker=".", linestyle="", alpha=0.5)
        slope = [middle[0] * (rounds[0] / r) ** 0.5 for r in rounds]
        axes.loglog(rounds, slope, color=colour, linestyle="--", linewidth=1, label="1/sqrt(R)")
    axes.set(xlabel="rounds R", ylabel="optimality gap, mean over rounds")
    axes.legend(frameon=False, labelcolor=GREY)
    return _svg(figure)


def _draw_curves(axes: Any, curves: Mapping[str, tuple[Sequence[float], Any]], *, ordered: bool = False) -> None:
    import numpy as np

    from fedcpsl.runs.comparison import interval

    shades = _steps_of_a_scale(len(curves)) if ordered else _colours(len(curves))
    for colour, (name, (rounds, values)) in zip(shades, curves.items(), strict=True):
        if np.isnan(values).any():  # no device has a test set
            continue
        mean = 100 * values.mean(0)
        axes.plot(rounds, mean, color=colour, label=name, linewidth=1.7)
        if len(values) > 1:
            spread = 100 * np.array([(interval(column) or {})["half_width"] for column in values.T.tolist()])
            low, high = np.clip(mean - spread, 0, 100), np.clip(mean + spread, 0, 100)
            axes.fill_between(rounds, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.set(xlabel="round", ylabel="personal accuracy, %")


def heat_maps(summary: Mapping[str, Any]) -> str:
    """Mean accuracy of a sweep over its settings: a row for one setting, a map for two, several maps for more; SVG."""
    import numpy as np

    cases = summary["cases"]
    key_of_score = "validation" if cases[0]["validation"] else "personal"
    keys = list(cases[0]["settings"])
    values = {key: list(dict.fromkeys(str(c["settings"][key]) for c in cases)) for key in keys}
    x, y = keys[-1], keys[-2] if len(keys) > 1 else None
    rest = keys[:-2]
    panels: dict[str, Any] = {}
    for case in cases:
        chosen = {key: str(case["settings"][key]) for key in keys}
        panel = ", ".join(f"{_short(key)} = {chosen[key]}" for key in rest)
        empty = np.full((len(values[y]) if y else 1, len(values[x])), np.nan)
        row = values[y].index(chosen[y]) if y else 0
        mean = case[key_of_score]["mean"] if case[key_of_score] else np.nan
        panels.setdefault(panel, empty)[row, values[x].index(chosen[x])] = 100 * mean
    return maps(panels, (_short(x), values[x]), (_short(y) if y else "", values[y] if y else [""]))


def maps(panels: Mapping[str, Any], x: tuple[str, Sequence[str]], y: tuple[str, Sequence[str]]) -> str:
    """Tables of percentages as coloured cells on one scale, with the values of x along and y down, as SVG."""
    import numpy as np

    shape = next(iter(panels.values())).shape
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = 1.6 + 0.9 * shape[1] * columns, (1.6 + 0.55 * shape[0]) * rows
    figure, grid = _figure(*size, len(panels), columns)
    known = [value for cells in panels.values() for value in cells.flat if np.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    for axes, (panel, cells) in zip(grid, panels.items(), strict=True):
        axes.imshow(cells, cmap="viridis", vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
        for (r, c), value in np.ndenumerate(cells):
            dark = value < (low + high) / 2
            axes.text(c, r, _cell(value), ha="center", va="center", color="white" if dark else "black", fontsize=9)
        axes.set_xticks(range(shape[1]), x[1])
        axes.set_yticks(range(shape[0]), y[1])
        axes.set(xlabel=x[0], ylabel=y[0], title=panel)
        axes.title.set_color(GREY)
        axes.grid(False)
    return _svg(figure)


def _cell(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


def split_picture(federation: Any) -> str:
    """Devices by classes: how many samples each device sees labelled and unlabelled, as SVG."""
    import numpy as np

    from fedcpsl.data.split import LABELLED, UNLABELLED
    from fedcpsl.report.terminal import unknown_counts

    unknown = unknown_counts(federation)
    classes = federation.class_names or tuple(map(str, range(federation.classes)))
    rows, columns = federation.devices, federation.classes
    figure, grid = _figure(2.2 + 2 * min(0.42 * columns, 7), 1.4 + min(0.24 * rows, 12), 2)
    for axes, (name, role) in zip(grid, (("labelled", LABELLED), ("unlabelled", UNLABELLED)), strict=True):
        counts, names = federation.class_counts(role), classes
        if role == UNLABELLED and unknown.any():
            counts, names = np.column_stack([counts, unknown]), (*classes, "?")
        image = axes.imshow(counts, cmap="Greens" if role == LABELLED else "Blues", aspect="auto", vmin=0)
        figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(colors=GREY)
        every = max(1, rows // 40)
        axes.set_yticks(range(0, rows, every), federation.names[::every])
        tilt = 90 if max(map(len, classes)) > 2 else 0
        axes.set_xticks(range(len(names)), names, rotation=tilt)
        axes.set(title=f"{name} samples", xlabel="class", ylabel="device" if role == LABELLED else "")
        axes.title.set_color(GREY)
        axes.grid(False)
    return _svg(figure)


def _short(key: str) -> str:
    return key.partition(".")[2] or key


def _colours(count: int) -> list[Any]:
    import matplotlib

    fixed = [
        "#2f9e6e",
        "#3b7dd8",
        "#d9822b",
        "#b0457b",
        "#6b5fc7",
        "#8a8f98",
        "#c0392b",
        "#16a2a8",
        "#7f8c1d",
        "#5d4037",
        "#e0a100",
        "#2c3e50",
    ]
    return fixed[:count] if count <= len(fixed) else [matplotlib.colormaps["viridis"](i / count) for i in range(count)]


def _steps_of_a_scale(count: int) -> list[Any]:
    """Return colours in an order, from dark to light, for panels that are steps of one setting."""
    import matplotlib

    return [matplotlib.colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]


def _known(metrics: Metrics, model: str) -> bool:
    return bool(metrics[model]) and metrics[model]["mean"] is not None


def _axes(width: float, height: float) -> tuple[Any, Any]:
    figure, (axes,) = _figure(width, height, 1)
    return figure, axes


def _figure(width: float, height: float, panels: int, columns: int = 0) -> tuple[Any, Sequence[Any]]:
    """Return a transparent figure with panels side by side, or in `columns` columns."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    columns = columns or panels
    places = figure.subplots(-(-panels // columns), columns, squeeze=False).flatten()
    for empty in places[panels:]:
        empty.set_axis_off()
    grid: Sequence[Any] = list(places[:panels])
    for axes in grid:
        axes.set_facecolor("none")
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.tick_params(colors=GREY)
        axes.xaxis.label.set_color(GREY)
        axes.yaxis.label.set_color(GREY)
        for side, line in axes.spines.items():
            line.set_visible(side in ("left", "bottom"))
            line.set_color(GREY)
    return figure, grid


def _svg(figure: Any) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedcpsl", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
