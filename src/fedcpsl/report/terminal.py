"""What the terminal shows: tables in the width there is, progress, results, splits, the status of a federation."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.split import LABELLED, ROLES, TEST, UNLABELLED
from fedcpsl.report.tables import duration, joules, size
from fedcpsl.schedule import draw_active, draw_steps

if TYPE_CHECKING:
    from fedcpsl.runs.experiment import Experiment, Watch
    from fedcpsl.runs.run_groups import Announce, Planned

UNLIMITED = 10_000  # columns
ELLIPSIS = "…"  # rich's mark of a truncated cell
WIDTH_WITHOUT_NOTE = 46  # columns of a progress bar
MIN_FULL_WIDTH = 72  # columns that a progress bar with all its columns takes
MODELS = ("personal", "global", "localized")
OUTCOMES = {  # of an upload in an edge network, as said
    "counted": "counted",
    "lost": "lost by the channel",
    "late": "late",
    "dropped": "dropped",
    "left": "lost as devices left",
    "battery": "lost as batteries ran out",
    "idle": "without a step",
}
MAX_DEVICES, MAX_CLASSES = 30, 40
SHADES = " ░▒▓█"


def available_width(console: Console) -> int:
    """Return the width to write in: the terminal's, that of COLUMNS, or unlimited in a pipe."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else UNLIMITED


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table; in a pipe in its full width, and if it would be truncated, as lines "column: value"."""
    console = console or Console()
    if available_width(console) == UNLIMITED:
        wide = console.options.update(width=UNLIMITED)
        natural = Measurement.get(console, wide, table).maximum
        console = Console(file=console.file, width=max(console.width, natural))
    if ELLIPSIS in "".join(segment.text for segment in console.render(table)):
        _print_lines(table, console)
    else:
        console.print(table)


def _print_lines(table: Table, console: Console) -> None:
    """Print a table as lines, row by row."""
    if table.title:
        console.print(table.title, style="italic", overflow="fold")
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        console.print(Text(_plain(first), style="bold"), overflow="fold")
        for column, cell in zip(table.columns[1:], others, strict=True):
            value = _plain(cell)
            head = f"{_plain(column.header)}: " if _plain(column.header) else ""
            apart = column.no_wrap and 2 + len(head) + len(value) > console.width
            if value:
                console.print(Text(f"  {head}\n  {value}" if apart else f"  {head}{value}"), overflow="fold")
    if table.caption:
        console.print(table.caption, style="dim", overflow="fold", highlight=False)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def fitting_columns(console: Console, *columns: ProgressColumn, narrow: tuple[int, ...]) -> list[ProgressColumn]:
    """Return the columns of a progress bar; in a narrow terminal only those at the places `narrow`."""
    return list(columns) if console.width >= MIN_FULL_WIDTH else [columns[place] for place in narrow]


def note_if_it_fits(console: Console, note: str) -> str:
    """Return a note for a progress bar, empty if it does not fit."""
    return note if len(note) <= console.width - WIDTH_WITHOUT_NOTE else ""


@contextmanager
def progress(rounds: int, done: int, console: Console) -> Iterator["Watch"]:
    """Show a progress bar with rounds, accuracy and time left; yield the function that updates it."""
    columns = fitting_columns(
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
    status_line = Text(no_wrap=True, overflow="ellipsis")

    def watch(round: int, metrics: dict[str, Any] | None) -> None:
        bar.update(task, completed=round)
        if metrics:
            bar.update(task, personal=percent_of(metrics["personal"]), general=percent_of(metrics["global"]))
            curve.append(metrics["personal"]["mean"] or 0.0)
            status_line.plain = f"{sparkline(curve, 24):24}  {_round_facts(metrics)}"

    if not console.is_terminal:
        yield watch
        return
    with Live(
        Group(bar, status_line) if console.width >= MIN_FULL_WIDTH else bar, console=console, refresh_per_second=8
    ):
        yield watch


def _round_facts(metrics: Mapping[str, Any]) -> str:
    """Return the metrics of a round in one line, without its mean accuracies."""
    facts = [f"worst tenth {percent_of(metrics['personal'], 'worst_tenth')}"]
    if metrics["pseudo_label_accuracy"] is not None:
        facts.append(f"pseudo-labels right {percent_of(metrics, 'pseudo_label_accuracy')}")
    return "  ".join([*facts, f"uplink {size(metrics['uplink_bytes'])}"])


def percent_of(summary: Mapping[str, Any] | None, key: str = "mean") -> str:
    """Return a share in % as text."""
    value = summary.get(key) if summary else None
    return "-" if value is None or isnan(value) else f"{100 * value:.2f} %"


def results_table(metrics: dict[str, Any]) -> Table:
    """Return the accuracies and costs of one run, from `final_metrics`."""
    title = f"{metrics['algorithm']} on {metrics['data']}, {metrics['rounds']} rounds, seed {metrics['seed']}"
    table = Table(title=title, title_justify="left", caption=_caption(metrics), caption_justify="left")
    table.add_column("accuracy on the devices' own tests")
    for column in ("mean", "std over devices", "worst tenth"):
        table.add_column(column, justify="right")
    for model in MODELS:
        if metrics[model]:
            cells = [percent_of(metrics[model], key) for key in ("mean", "std", "worst_tenth")]
            table.add_row(f"{model} model", *cells, style="bold" if model == "personal" else "")
    return table


def _caption(metrics: dict[str, Any]) -> str:
    facts = [] if metrics["union"] is None else [f"global model on all tests {percent_of(metrics, 'union')}"]
    if (metrics.get("macro_f1") or {}).get("personal") is not None:
        facts.append(f"macro-F1 of the personal models on all tests {percent_of(metrics['macro_f1'], 'personal')}")
    if metrics.get("validation"):
        facts.append(f"personal model on validation samples {percent_of(metrics['validation'])}")
    if metrics["pseudo_label_accuracy"] is not None:
        facts.append(f"pseudo-labels right {percent_of(metrics, 'pseudo_label_accuracy')}")
    facts.append(f"uplink {size(metrics['uplink_bytes'])}, downlink {size(metrics['downlink_bytes'])}")
    lost = f", {metrics['lost_uploads']} uploads lost" if metrics["lost_uploads"] else ""
    each = metrics["gradients_per_step"]
    of = f" of {each} gradient{'s' * (each > 1)}" if each else ""
    facts.append(f"{metrics['steps']:,} local steps{of} in {metrics['seconds']:.1f} s{lost}")
    return "\n".join(facts + _edge_facts(metrics.get("edge"), "visits" if metrics["global"] is None else "uploads"))


def _edge_facts(edge: dict[str, Any] | None, what: str) -> list[str]:
    """Return what the edge network took and lost; nothing without one."""
    if not edge:
        return []
    drawn = sum(edge[name] for name in OUTCOMES)
    lost = [f"{edge[name]} {said}" for name, said in OUTCOMES.items() if edge[name] and name != "counted"]
    part = f", {edge['partial']} of them with fewer steps than planned" if edge["partial"] else ""
    return [
        f"edge: {duration(edge['seconds'])} of virtual time, {joules(edge['compute_joules'])} to compute and "
        f"{joules(edge['radio_joules'])} to send",
        f"edge: {edge['counted']:,} of {drawn:,} {what} counted{part}" + (f"; {', '.join(lost)}" if lost else ""),
    ]


def planned_steps(experiment: "Experiment") -> tuple[int, int]:
    """Return the local steps of the whole run, and the maximum of one device in one round."""
    setup = experiment.setup

    def devices(r: int) -> list[int]:
        roster = setup.terms.roster(r)
        return (
            draw_active(setup.terms.seed, r, roster, setup.terms.work.active)
            if r < setup.terms.rounds
            else roster.tolist()
        )

    steps = [
        draw_steps(
            setup.terms.seed, r, device, setup.terms.sizes, setup.terms.work, setup.terms.method.traits.unlabelled
        )
        for r in range(setup.terms.total_rounds)
        for device in devices(r)
    ]
    return sum(steps), max(steps)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return accuracies from 0 to 1 as a small curve; NaN is drawn as 0."""
    bars, shown = "▁▂▃▄▅▆▇█", min(width, len(values))
    chosen = [values[round(i * (len(values) - 1) / max(shown - 1, 1))] for i in range(shown)]
    return "".join(bars[0 if isnan(v) else min(int(v * len(bars)), len(bars) - 1)] for v in chosen)


@contextmanager
def comparison_progress(runs: int, console: Console) -> Iterator["Announce"]:
    """Show a progress bar over all runs, and one over the rounds of the current ones; yield what starts a group."""
    columns = fitting_columns(
        console,
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        narrow=(0, 1, 2, 6),
    )
    with Progress(*columns, console=console, expand=True, disable=not console.is_terminal) as bar:
        everything = bar.add_task("[bold]runs", total=runs, note="")
        current = bar.add_task("round", total=None, note="")

        def announce(group: Sequence["Planned"], done: int) -> Sequence["Watch"]:
            rounds = group[0].config.work.rounds + group[0].config.work.personal_rounds
            first = f"{group[0].case.name}, seed {group[0].seed}"
            others = f" and {len(group) - 1} more, side by side" if len(group) > 1 else ""
            bar.update(everything, completed=done, note=note_if_it_fits(console, f"{first}{others}"))
            bar.reset(current, total=rounds)

            def watch(round: int, metrics: dict[str, Any] | None) -> None:
                bar.update(everything, completed=done + len(group) * round / max(rounds, 1))
                bar.update(current, completed=round)
                if metrics:
                    bar.update(current, note=f"personal {percent_of(metrics['personal'])}")

            return [watch, *[_ignore] * (len(group) - 1)]

        yield announce


def _ignore(round: int, metrics: dict[str, Any] | None) -> None:
    """Ignore a run: the bar shows the first of a group."""


def shown_devices(federation: Federation | OnDemand, console: Console) -> Federation:
    """Return the federation; of samples made on demand only the devices that are shown."""
    if isinstance(federation, Federation):
        return federation
    shown = min(MAX_DEVICES, federation.devices)
    console.print(f"{federation.devices:,} devices, whose samples are made on demand; the first {shown}:")
    return federation.federation_of(range(shown))


def split_table(federation: Federation) -> Table:
    """Return a table of a split: labelled, unlabelled and test samples per device, and their classes."""
    table = Table(title=f"{federation.devices} devices, {federation.classes} classes", title_justify="left")
    table.add_column("device")
    shown = [role for role in range(len(ROLES)) if role <= TEST or federation.role_counts[:, role].any()]
    for role in shown:
        table.add_column(ROLES[role], justify="right")
    table.add_column("classes (known samples)")
    per_class = np.sum([federation.class_counts(role) for role in range(len(ROLES))], 0)
    classes = federation.class_names or tuple(map(str, range(federation.classes)))
    for i, name in enumerate(federation.names[:MAX_DEVICES]):
        held = [f"{c}: {n}" for c, n in zip(classes, per_class[i], strict=True) if n]
        table.add_row(Text(name), *(str(n) for n in federation.role_counts[i, shown]), Text(", ".join(held)))
    if federation.devices > MAX_DEVICES:
        table.add_row("...", *("",) * (len(shown) + 1))
    table.add_section()
    table.add_row("all", *(str(n) for n in federation.role_counts[:, shown].sum(0)), "")
    return table


def class_map(federation: Federation) -> Table:
    """Return a map of devices by classes, the darker the more samples: labelled left, unlabelled right."""
    labelled, unlabelled = (federation.class_counts(role) for role in (LABELLED, UNLABELLED))
    unknown = unknown_counts(federation)
    shown = [(labelled, labelled.max()), (unlabelled, max(unlabelled.max(), unknown.max()))]
    legend = "?: unlabelled, class unknown" if unknown.any() else "known samples"
    grid = Table(title=f"devices by classes ({legend})", title_justify="left", box=None, padding=(0, 1))
    grid.add_column("device")
    for name, (_, most) in zip(("labelled", "unlabelled"), shown, strict=True):
        grid.add_column(f"{name}, most {most}", no_wrap=True)
    if unknown.any():
        grid.add_column("?", no_wrap=True)
        shown.append((unknown[:, None], shown[1][1]))
    for i, name in enumerate(federation.names[:MAX_DEVICES]):
        grid.add_row(Text(name), *(_shaded(counts[i], most) for counts, most in shown))
    if federation.devices > MAX_DEVICES:
        grid.add_row("...")
    return grid


def unknown_counts(federation: Federation) -> NDArray[np.int64]:
    """Return every device's number of unlabelled samples of unknown class."""
    counts: NDArray[np.int64] = federation.counts[:, UNLABELLED] - federation.class_counts(UNLABELLED).sum(1)
    return counts


def _shaded(counts: np.ndarray, most: int) -> Text:
    """Return one row of shaded cells; a single sample is visible."""
    levels = np.ceil(counts / max(most, 1) * (len(SHADES) - 1)).astype(int)
    cells = "".join(2 * SHADES[level] for level in levels[:MAX_CLASSES])
    return Text("▕" + cells + "▏" + ("..." if len(counts) > MAX_CLASSES else ""))


def print_status(status: Mapping[str, Any]) -> None:
    """Print a federation's round, devices, accuracies and problems as a table."""
    ago = max(0.0, time.time() - status["updated"])
    state = "over" if status["over"] else f"updated {ago:.0f} s ago"
    title = f"round {status['round']} of {status['rounds']}, {state}"
    if status["waiting_for"]:
        more = status["waiting_for"]
        title = f"waiting for {more} more device{'s' * (more > 1)}, {state}"
    if status.get("trying") is not None:
        title = f"trial of step size {status['trying']:g}: {title}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column, side in (("device", "left"), ("labels", "right"), ("others", "right"), ("last counted", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    table.add_column("accuracy", justify="right")
    table.add_column("")
    for device in status["devices"]:
        counted, accuracy = device["last_counted"], device["accuracy"]
        table.add_row(
            Text(device["name"]),
            str(device["labelled"]),
            str(device["unlabelled"]),
            "-" if counted is None else f"round {counted + 1}",
            "-" if accuracy is None else f"{100 * accuracy:.1f} %",
            Text(_remark(device, over=status["over"])),
        )
    for name, problem in status["strangers"].items():
        table.add_row(Text(name), "-", "-", "-", "-", Text(problem))
    console = Console()
    print_table(table, console)
    for event in status.get("events", ()):  # the server's own folder has them
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        console.print(Text(f"{when} {event['text']}"))
    search = status.get("step_size_search")
    if search and search["eta"] is not None:
        trials = f"found by trials of {search['rounds']} rounds each in {search['seconds']:.0f} s"
        console.print(f"step size {search['eta']:g}, {trials if search['losses'] else 'not searched'}")
    if status["privacy"]:
        private = status["privacy"]
        console.print(
            f"a device has sent at most {private['updates']} noised updates: epsilon {private['epsilon']:.2f} at "
            f"delta {private['delta']:g}, against everyone, including the server"
        )


def _remark(device: Mapping[str, Any], *, over: bool) -> str:
    """Return the most serious remark on a device."""
    if device.get("forgotten"):
        return "forgotten: it has no weight any more"
    if device.get("excluded_until") is not None:
        why = f": {device['problem']}" if device["problem"] else ""
        return f"not asked before round {device['excluded_until'] + 1}{why}"
    return device["problem"] or ("" if device["online"] or over else "not connected")
