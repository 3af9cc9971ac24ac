"""Tables and the progress bar."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedcpsl.report import tables
from fedcpsl.report.terminal_width import FOR_BARS, that_fit
from fedcpsl.schedule import draw_active, draw_steps

if TYPE_CHECKING:  # these import PyTorch, and showing a run needs none
    from fedcpsl.runs.experiment import Experiment, Watch

size = tables.size
MODELS = ("personal", "global", "localized")


@contextmanager
def progress(rounds: int, done: int, console: Console) -> Iterator["Watch"]:
    """A bar with rounds, accuracy and time left, fed by the run."""
    columns = that_fit(
        console,
        TextColumn("[bold]round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("personal [bold green]{task.fields[personal]}[/]  global {task.fields[general]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        narrow=(0, 1, 2, 6),
    )
    bar = Progress(*columns, console=console, expand=True, disable=not console.is_terminal)
    task = bar.add_task("", total=rounds, completed=done, personal="  -  ", general="  -  ")
    curve: list[float] = []
    news = Text(no_wrap=True, overflow="ellipsis")

    def watch(round: int, metrics: dict[str, Any] | None) -> None:
        bar.update(task, completed=round)
        if metrics:
            bar.update(task, personal=percent(metrics["personal"]), general=percent(metrics["global"]))
            curve.append(metrics["personal"]["mean"] or 0.0)
            news.plain = f"{sparkline(curve, 24):24}  {_news(metrics)}"

    if not console.is_terminal:
        yield watch
        return
    with Live(Group(bar, news) if console.width >= FOR_BARS else bar, console=console, refresh_per_second=8):
        yield watch


def _news(metrics: Mapping[str, Any]) -> str:
    """What a round came to, beside its mean accuracies."""
    facts = [f"worst tenth {percent(metrics['personal'], 'worst_tenth')}"]
    if metrics["pseudo_label_accuracy"] is not None:
        facts.append(f"pseudo-labels right {percent(metrics, 'pseudo_label_accuracy')}")
    return "  ".join([*facts, f"uplink {size(metrics['uplink_bytes'])}"])


def percent(summary: Mapping[str, Any] | None, key: str = "mean") -> str:
    value = summary.get(key) if summary else None
    return "-" if value is None or isnan(value) else f"{100 * value:.2f} %"


def results_table(metrics: dict[str, Any]) -> Table:
    """The accuracies and costs of one run, from `final_metrics`."""
    title = f"{metrics['algorithm']} on {metrics['data']}, {metrics['rounds']} rounds, seed {metrics['seed']}"
    table = Table(title=title, title_justify="left", caption=_caption(metrics), caption_justify="left")
    table.add_column("accuracy on the devices' own tests")
    for column in ("mean", "std over devices", "worst tenth"):
        table.add_column(column, justify="right")
    for model in MODELS:
        if metrics[model]:
            cells = [percent(metrics[model], key) for key in ("mean", "std", "worst_tenth")]
            table.add_row(f"{model} model", *cells, style="bold" if model == "personal" else "")
    return table


def _caption(metrics: dict[str, Any]) -> str:
    facts = [] if metrics["union"] is None else [f"global model on all tests {percent(metrics, 'union')}"]
    if (metrics.get("macro_f1") or {}).get("personal") is not None:
        facts.append(f"macro-F1 of the personal models on all tests {percent(metrics['macro_f1'], 'personal')}")
    if metrics.get("validation"):
        facts.append(f"personal model on validation samples {percent(metrics['validation'])}")
    if metrics["pseudo_label_accuracy"] is not None:
        facts.append(f"pseudo-labels right {percent(metrics, 'pseudo_label_accuracy')}")
    facts.append(f"uplink {size(metrics['uplink_bytes'])}, downlink {size(metrics['downlink_bytes'])}")
    lost = f", {metrics['lost_uploads']} uploads lost" if metrics["lost_uploads"] else ""
    each = metrics["gradients_per_step"]
    of = f" of {each} gradient{'s' * (each > 1)}" if each else ""
    facts.append(f"{metrics['steps']:,} local steps{of} in {metrics['seconds']:.1f} s{lost}")
    return "\n".join(facts)


def planned_steps(experiment: "Experiment") -> tuple[int, int]:
    """The local steps of the whole run, and the most of one device in one round."""
    setup = experiment.setup

    def devices(r: int) -> list[int]:
        roster = setup.roster(r)
        return draw_active(setup.seed, r, roster, setup.work.active) if r < setup.rounds else roster.tolist()

    steps = [
        draw_steps(setup.seed, r, device, setup.sizes, setup.work, setup.method.traits.unlabelled)
        for r in range(setup.total_rounds)
        for device in devices(r)
    ]
    return sum(steps), max(steps)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A small curve of accuracies from 0 to 1 for the terminal; what is no number lies at the bottom."""
    bars, shown = "▁▂▃▄▅▆▇█", min(width, len(values))
    chosen = [values[round(i * (len(values) - 1) / max(shown - 1, 1))] for i in range(shown)]
    return "".join(bars[0 if isnan(v) else min(int(v * len(bars)), len(bars) - 1)] for v in chosen)
