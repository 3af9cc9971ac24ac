"""What people see of a comparison or a sweep: a table, a picture, files and a page."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedcpsl.report.tables import size
from fedcpsl.report.terminal import percent
from fedcpsl.report.terminal_width import if_it_fits, print_table, room, that_fit
from fedcpsl.report.verdict import as_sentence, judged, of_comparison
from fedcpsl.runs.comparison import SUMMARISED, read_plan, run_folder, summarise
from fedcpsl.runs.folder import read_metrics
from fedcpsl.storage import to_json, write_whole

UNEQUAL = 1.05  # times the fewest steps

if TYPE_CHECKING:  # these import PyTorch, and showing a comparison needs none
    from fedcpsl.report.loaded_runs import RunSet
    from fedcpsl.runs.experiment import Watch
    from fedcpsl.runs.run_groups import Announce, Planned


@contextmanager
def comparison_progress(runs: int, console: Console) -> Iterator["Announce"]:
    """A bar over all runs with time left, and one over the rounds of the run at hand."""
    columns = that_fit(
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
            bar.update(everything, completed=done, note=if_it_fits(console, f"{first}{others}"))
            bar.reset(current, total=rounds)

            def watch(round: int, metrics: dict[str, Any] | None) -> None:
                bar.update(everything, completed=done + len(group) * round / max(rounds, 1))
                bar.update(current, completed=round)
                if metrics:
                    bar.update(current, note=f"personal {percent(metrics['personal'])}")

            return [watch, *[_look_away] * (len(group) - 1)]

        yield announce


def _look_away(round: int, metrics: dict[str, Any] | None) -> None:
    """The bar follows one of the runs that go together."""


def print_comparison(folder: Path) -> None:
    """The table of a finished comparison, and what it says."""
    summary, console = summarise(folder), Console()
    print_table(comparison_table(summary), console)
    for text in of_comparison(summary):
        print(fill(text, room(console)))


def comparison_table(summary: Mapping[str, Any]) -> Table:
    """Mean and 95 % interval over seeds, the difference to the first, the worst devices, and what it took."""
    cases, seeds = summary["cases"], summary["seeds"]
    rows = _rows(summary)
    which = f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})" if len(seeds) > 1 else f"seed {seeds[0]}"
    per_step = "; gradients: of a step, one per model and minibatch" * ("gradients" in rows[0])
    caption = (
        f"accuracy in % on the devices' own tests, mean over {which}; ± is half a 95 % interval, differences are "
        f"paired by seed; steps: local steps of all devices{per_step}; to x %: first round at x, bytes sent"
    )
    caption = "\n".join([caption, *remarks(summary)])
    table = Table(
        title=Text(headline(summary)),
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for k, column in enumerate(rows[0]):
        table.add_column(Text(column), justify="left" if k == 0 else "right")
    best = _best(cases)
    for i, row in enumerate(rows[1:]):
        table.add_row(*map(Text, row), style="bold" if i == best else "")
    return table


def headline(summary: Mapping[str, Any]) -> str:
    """What was compared on what; of a sweep also what judged it."""
    cases, on = summary["cases"], f" on {summary['data']}" if summary.get("data") else ""
    if summary["kind"] == "compare":
        return f"{len(cases)} algorithms{on}"
    swept = ", ".join(key.partition(".")[2] for key in cases[0]["settings"])
    by = "validation samples" if _has_validation(summary) else "test sets"
    return f"sweep of {swept}{on}, judged by {by}"


def _has_validation(summary: Mapping[str, Any]) -> bool:
    return any(case["validation"] for case in summary["cases"])


def _best(cases: Sequence[Mapping[str, Any]]) -> int:
    """The place of the best case, by validation samples where there are some."""
    means = [judged(case)["mean"] if case["personal"] else -1 for case in cases]
    return means.index(max(means))


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the table must know: whether all did the same work, what chose the best, what rounding does."""
    found = []
    steps = {case["name"]: case["steps"]["mean"] for case in summary["cases"] if case["steps"]}
    if steps and max(steps.values()) > UNEQUAL * min(steps.values()):
        most, fewest = max(steps, key=steps.__getitem__), min(steps, key=steps.__getitem__)
        found.append(
            f"unequal work: {most} took {steps[most]:,.0f} local steps, {fewest} {steps[fewest]:,.0f}"
            + ("" if summary.get("matched_steps", True) else "; leave out --no-matched-steps to compare like with like")
        )
    if summary["kind"] == "sweep" and not _has_validation(summary):
        found.append(
            "chosen by test sets: the best of these is flattered by having been chosen; keep validation samples with "
            "--set data.validation=0.1 to choose by"
        )
    if len(summary["cases"]) * len(summary["seeds"]) > 1:
        found.append(
            "computed side by side: a run by itself rounds otherwise in float32, and may end some tenths of a point "
            "away; with --set run.dtype=float64 it does not"
        )
    return found


def _rows(summary: Mapping[str, Any]) -> list[list[str]]:
    cases, reach = summary["cases"], summary["reach"]
    shown = [key for key in ("validation", "global") if any(case[key] for case in cases)]
    first = cases[0]["name"]
    of = "algorithm" if summary["kind"] == "compare" else "settings"
    head = [of, "personal", f"less {first}", "worst tenth"]
    gradients = len({case["gradients_per_step"] for case in cases} - {None}) > 1
    head += [*shown, "steps", *["gradients"] * gradients, "uplink", *(f"to {100 * r:g} %" for r in reach)]
    if len(cases) == 1:
        head.remove(f"less {first}")
    rows = [head]
    for case in cases:
        row = [case["name"], _interval(case["personal"])]
        if len(cases) > 1:
            row.append(_interval(case["difference"], sign=True))
        row += [_interval(case["worst_tenth"]), *(_interval(case[key], bare=True) for key in shown)]
        row.append(f"{case['steps']['mean']:,.0f}" if case["steps"] else "-")
        if gradients:
            row.append(f"{case['gradients_per_step'] or '-'}")
        row.append(size(round(case["uplink_bytes"]["mean"])) if case["uplink_bytes"] else "-")
        row += [_reached(r, len(summary["seeds"])) for r in case["reach"]]
        rows.append(row)
    return rows


def _interval(value: Mapping[str, float] | None, *, sign: bool = False, bare: bool = False) -> str:
    if value is None:
        return "-"
    mean = f"{100 * value['mean']:+.2f}" if sign else f"{100 * value['mean']:.2f}"
    return mean if bare or value["half_width"] is None else f"{mean} ± {100 * value['half_width']:.2f}"


def _reached(reach: Mapping[str, Any], seeds: int) -> str:
    if not reach["runs"]:
        return "-"
    some = "" if reach["runs"] == seeds else f" ({reach['runs']} of {seeds} seeds)"
    return f"{reach['rounds']:.0f}, {size(round(reach['uplink_bytes']))}{some}"


def write_comparison(folder: Path) -> Path:
    """results.csv, summary.json, a picture and a page into a finished comparison's folder."""
    from fedcpsl.report.figures import curves_of_cases, heat_maps
    from fedcpsl.report.page import page_of

    plan, summary = read_plan(folder), summarise(folder)
    pictures = {"accuracy": curves_of_cases(_curves(folder))}
    if plan.kind == "sweep":
        pictures["sweep"] = heat_maps(summary)
    (folder / "plots").mkdir(exist_ok=True)
    for name, svg in pictures.items():
        write_whole(folder / "plots" / f"{name}.svg", svg)
    write_whole(folder / "summary.json", to_json(summary, indent=2) + "\n")
    write_whole(folder / "results.csv", _csv(summary))
    write_whole(folder / "report.html", page_of(_story(folder), _title(summary), _results(summary, pictures)))
    return folder / "report.html"


def _title(summary: Mapping[str, Any]) -> str:
    """The page's own for algorithms; a sweep says what judged it."""
    return headline(summary) if summary["kind"] == "sweep" else ""


def _story(folder: Path) -> "RunSet":
    """The runs of a finished comparison, by the names that its plan gives them."""
    from fedcpsl.report.loaded_runs import Line, try_load_runs

    story, plan = try_load_runs([folder]), read_plan(folder)
    by_folder = {run.folder: run for run in story.runs}
    lines = [
        Line(case.name, [by_folder[f] for seed in plan.seeds if (f := run_folder(folder, case, seed)) in by_folder])
        for case in plan.cases
    ]
    return story._replace(lines=[line for line in lines if line.runs])


def _curves(folder: Path) -> dict[str, tuple[list[int], np.ndarray]]:
    """Personal accuracy by evaluated round, [seeds, rounds], for every case."""
    plan = read_plan(folder)
    curves = {}
    for case in plan.cases:
        runs = [read_metrics(run_folder(folder, case, seed)) for seed in plan.seeds]
        curves[case.name] = curve_of(runs)
    return curves


def curve_of(runs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[int], np.ndarray]:
    """The evaluated rounds of runs with several seeds, and their personal accuracies; NaN where there is none."""
    rounds = [m["round"] for m in max(runs, key=len)]
    values = np.full((len(runs), len(rounds)), np.nan)
    for row, run in zip(values, runs, strict=True):
        row[: len(run)] = [np.nan if m["personal"]["mean"] is None else m["personal"]["mean"] for m in run]
    return rounds, values


def _csv(summary: Mapping[str, Any]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    keys = [*SUMMARISED, "gradients_per_step"]
    targets = [f"{what}_to_{r:g}" for r in summary["reach"] for what in ("rounds", "uplink_bytes")]
    swept = list(summary["cases"][0]["settings"]) if summary["kind"] == "sweep" else []
    table.writerow(["case", *swept, "seed", *keys, *targets])
    for case in summary["cases"]:
        for run in case["runs"]:
            pairs = zip(run["reach_rounds"], run["reach_bytes"], strict=True)
            reached = ["" if v is None else v for pair in pairs for v in pair]
            chosen = [case["settings"][key] for key in swept]
            cells = ["" if run[key] is None else run[key] for key in keys]
            table.writerow([case["name"], *chosen, run["seed"], *cells, *reached])
    return text.getvalue()


def _results(summary: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The table with paired differences, and the map of a sweep."""
    from fedcpsl.report.page import inline_svg

    head, *rows = _rows(summary)
    best = _best(summary["cases"])
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = []
    for i, (first, *cells) in enumerate(rows):
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr{" class=best" * (i == best)}><th scope="row">{escape(first)}</th>{values}</tr>')
    per_step = ", gradients those of a step, one per model and minibatch" * ("gradients" in head)
    says = (
        f"{len(rows)} cases, {len(summary['seeds'])} seeds; runs of one seed share split, devices and samples. "
        "Accuracies are in %, ± is half a 95 % interval over seeds, differences are paired by seed; steps are the "
        f"local steps of all devices{per_step}; to x %: the first round at x and the bytes sent by then."
    )
    says = '</p><p class="say">'.join([escape(says), *map(escape, remarks(summary))])
    told = "".join(f"<p>{escape(as_sentence(text))}</p>" for text in of_comparison(summary))
    figures = ""
    if "sweep" in pictures:
        words = "Mean personal accuracy, %: on validation samples where there are some, else on the tests."
        figures = (
            f'<figure class="picture sweep">{inline_svg(pictures["sweep"])}<figcaption>{words}</figcaption></figure>'
        )
    return (
        f'<h2>Results</h2>{told}<p class="say">{says}</p>'
        '<div class="wide" role="region" tabindex="0" aria-label="results">'
        f'<table class="sorts"><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>{figures}'
    )
