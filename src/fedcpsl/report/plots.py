"""Pictures of a run: accuracy by round, accuracy per device."""

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
    general = [100 * float(d["global"]) for d in rows]
    look = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.2}
    axes.plot(places, general, linestyle="", color=COLOURS["global"], label="global", **look)
    every = max(1, len(rows) // 25)
    axes.set_xticks(list(places)[::every], [d["name"] for d in rows][::every])
    axes.set(xlabel="device, best first", ylabel="accuracy, %", ylim=(0, 104))
    axes.legend(frameon=False, labelcolor=GREY, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return _svg(figure)


def _known(metrics: Metrics, model: str) -> bool:
    return bool(metrics[model]) and metrics[model]["mean"] is not None


def _axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    for side, line in axes.spines.items():
        line.set_visible(side in ("left", "bottom"))
        line.set_color(GREY)
    return figure, axes


def _svg(figure: Any) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedcpsl", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
