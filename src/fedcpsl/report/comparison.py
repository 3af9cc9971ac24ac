"""The results of a comparison or a sweep: a table, figures, files and a page."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcpsl.report.tables import duration, joules, size
from fedcpsl.report.terminal import available_width, print_table
from fedcpsl.report.verdict import as_sentence, comparison_verdicts, score_of
from fedcpsl.runs.comparison import EDGE, SUMMARISED, read_plan, run_folder, summarise
from fedcpsl.runs.folder import read_metrics
from fedcpsl.storage import to_json, write_whole

UNEQUAL = 1.05  # ratio of steps above which work is called unequal

if TYPE_CHECKING:  # these import PyTorch, and showing a comparison needs none
    from fedcpsl.report.loaded_runs import RunSet


def print_comparison(folder: Path) -> None:
    """Print the table of a finished comparison and its verdicts."""
    summary, console = summarise(folder), Console()
    print_table(comparison_table(summary), console)
    for text in comparison_verdicts(summary):
        print(fill(text, available_width(console)))


def comparison_table(summary: Mapping[str, Any]) -> Table:
    """Return a table: mean and 95 % interval over seeds, difference to the first case, worst devices, and costs."""
    cases, seeds = summary["cases"], summary["seeds"]
    rows = _rows(summary)
    which = f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})" if len(seeds) > 1 else f"seed {seeds[0]}"
    per_step = "; gradients: minibatch gradients per local step" * ("gradients" in rows[0])
    spent = "virtual time, energy, " * ("energy" in rows[0])
    reached = f"; to x %: first round at x, {spent}bytes sent" if summary["reach"] else ""
    caption = (
        f"accuracy in % on the devices' own tests, mean over {which}; ± is half a 95 % interval, differences are "
        f"paired by seed; steps: local steps of all devices{per_step}{reached}"
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
    """Return what was compared on which data, and what a sweep was judged by."""
    cases, on = summary["cases"], f" on {summary['data']}" if summary.get("data") else ""
    if summary["kind"] == "compare":
        return f"{len(cases)} algorithms{on}"
    swept = ", ".join(key.partition(".")[2] for key in cases[0]["settings"])
    by = "validation samples" if _has_validation(summary) else "test sets"
    return f"sweep of {swept}{on}, judged by {by}"


def _has_validation(summary: Mapping[str, Any]) -> bool:
    return any(case["validation"] for case in summary["cases"])


def _best(cases: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the best case, by validation samples if there are any."""
    means = [score_of(case)["mean"] if case["personal"] else -1 for case in cases]
    return means.index(max(means))


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Return remarks on a table: unequal work, step sizes that were searched, how the best was chosen, and rounding."""
    found = []
    steps = {case["name"]: case["steps"]["mean"] for case in summary["cases"] if case["steps"]}
    if steps and max(steps.values()) > UNEQUAL * min(steps.values()):
        most, fewest = max(steps, key=steps.__getitem__), min(steps, key=steps.__getitem__)
        found.append(
            f"unequal work: {most} took {steps[most]:,.0f} local steps, {fewest} {steps[fewest]:,.0f}"
            + ("" if summary.get("matched_steps", True) else "; leave out --no-matched-steps to compare like with like")
        )
    for case in summary["cases"]:
        searches = [run["step_size_search"] for run in case["runs"] if run.get("step_size_search")]
        if searches:
            etas = ", ".join(f"{search['eta']:g}" for search in searches)
            more = sum(search["steps"] for search in searches) / len(searches)
            found.append(
                f"step size of {case['name']}: searched for each seed, {etas}; this took {more:,.0f} additional local "
                "steps per run"
            )
    if summary["kind"] == "sweep" and not _has_validation(summary):
        found.append(
            "chosen by test sets: the best of these is biased upwards by the choice; hold back validation samples to "
            "choose by: --set data.validation=0.1"
        )
    if len(summary["cases"]) * len(summary["seeds"]) > 1:
        found.append(
            "computed side by side: in float32, a run computed alone is rounded differently and may end some tenths "
            "of a point away; with --set run.dtype=float64 it does not"
        )
    return found


def _rows(summary: Mapping[str, Any]) -> list[list[str]]:
    cases, reach = summary["cases"], summary["reach"]
    shown = [key for key in ("validation", "global") if any(case[key] for case in cases)]
    first = cases[0]["name"]
    of = "algorithm" if summary["kind"] == "compare" else "settings"
    head = [of, "personal", f"vs {first}", "worst tenth"]
    gradients = len({case["gradients_per_step"] for case in cases} - {None}) > 1
    edge = any(EDGE[0] in case for case in cases)
    head += [*shown, "steps", *["gradients"] * gradients, "uplink", *["time", "energy"] * edge]
    head += [f"to {100 * r:g} %" for r in reach]
    if len(cases) == 1:
        head.remove(f"vs {first}")
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
        if edge:
            means = [case[key]["mean"] if case.get(key) else None for key in EDGE]
            row += [duration(means[0]), joules(means[1])]
        row += [_reached(r, len(summary["seeds"])) for r in case["reach"]]
        rows.append(row)
    return rows


def _interval(value: Mapping[str, float] | None, *, sign: bool = False, bare: bool = False) -> str:
    if value is None:
        return "-"
    mean = f"{100 * value['mean']:+.2f}" if sign else f"{100 * value['mean']:.2f}"
    mean = "0.00" if mean in ("+0.00", "-0.00") else mean
    return mean if bare or value["half_width"] is None else f"{mean} ± {100 * value['half_width']:.2f}"


def _reached(reach: Mapping[str, Any], seeds: int) -> str:
    if not reach["runs"]:
        return "-"
    some = "" if reach["runs"] == seeds else f" ({reach['runs']} of {seeds} seeds)"
    edge = f"{duration(reach['seconds'])}, {joules(reach['joules'])}, " if "seconds" in reach else ""
    return f"{reach['rounds']:.0f}, {edge}{size(round(reach['uplink_bytes']))}{some}"


def write_comparison(folder: Path) -> Path:
    """Write results.csv, summary.json, figures and a page into a finished comparison's folder."""
    from fedcpsl.report.figures import curves_of_cases, heat_maps
    from fedcpsl.report.page import inline_svg, page_of, write_pictures

    plan, summary = read_plan(folder), summarise(folder)
    pictures = {"accuracy": curves_of_cases(_curves(folder))}
    if plan.kind == "sweep":
        pictures["sweep"] = heat_maps(summary)
    write_pictures(folder, pictures)
    picture = inline_svg(pictures["sweep"]) if "sweep" in pictures else ""
    write_whole(folder / "summary.json", to_json(summary, indent=2) + "\n")
    write_whole(folder / "results.csv", _csv(summary))
    write_whole(folder / "report.html", page_of(_loaded(folder), _title(summary), _results(summary, picture)))
    return folder / "report.html"


def _title(summary: Mapping[str, Any]) -> str:
    """Return the title of a sweep's page; a comparison has the usual one."""
    return headline(summary) if summary["kind"] == "sweep" else ""


def _loaded(folder: Path) -> "RunSet":
    """Load the runs of a finished comparison, grouped by the cases of its plan."""
    from fedcpsl.report.loaded_runs import SeedGroup, try_load_runs

    run_set, plan = try_load_runs([folder]), read_plan(folder)
    by_folder = {run.folder: run for run in run_set.runs}
    groups = [
        SeedGroup(
            case.name, [by_folder[f] for seed in plan.seeds if (f := run_folder(folder, case, seed)) in by_folder]
        )
        for case in plan.cases
    ]
    return run_set._replace(groups=[group for group in groups if group.runs])


def _curves(folder: Path) -> dict[str, tuple[list[int], np.ndarray]]:
    """Return personal accuracy by evaluated round, [seeds, rounds], of every case."""
    plan = read_plan(folder)
    curves = {}
    for case in plan.cases:
        runs = [read_metrics(run_folder(folder, case, seed)) for seed in plan.seeds]
        curves[case.name] = curve_of(runs)
    return curves


def curve_of(runs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[int], np.ndarray]:
    """Return the evaluated rounds of runs with several seeds, and their personal accuracies; NaN if there is none."""
    rounds = [m["round"] for m in max(runs, key=len)]
    values = np.full((len(runs), len(rounds)), np.nan)
    for row, run in zip(values, runs, strict=True):
        row[: len(run)] = [np.nan if m["personal"]["mean"] is None else m["personal"]["mean"] for m in run]
    return rounds, values


def _csv(summary: Mapping[str, Any]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    edge = [key for key in EDGE if all(key in run for case in summary["cases"] for run in case["runs"])]
    keys, costs = [*SUMMARISED, *edge, "gradients_per_step"], {"rounds": "reach_rounds", "uplink_bytes": "reach_bytes"}
    costs |= {"seconds": "reach_seconds", "joules": "reach_joules"} if edge else {}
    targets = [f"{what}_to_{r:g}" for r in summary["reach"] for what in costs]
    swept = list(summary["cases"][0]["settings"]) if summary["kind"] == "sweep" else []
    table.writerow(["case", *swept, "seed", *keys, *targets])
    for case in summary["cases"]:
        for run in case["runs"]:
            pairs = zip(*(run[key] for key in costs.values()), strict=True)
            reached = ["" if v is None else v for pair in pairs for v in pair]
            chosen = [case["settings"][key] for key in swept]
            cells = ["" if run[key] is None else run[key] for key in keys]
            table.writerow([case["name"], *chosen, run["seed"], *cells, *reached])
    return text.getvalue()


def _results(summary: Mapping[str, Any], picture: str) -> str:
    """Return the table with paired differences, and the map of a sweep, as HTML."""
    from fedcpsl.report.sections import render

    head, *rows = _rows(summary)
    spent = ", virtual time and energy" * ("energy" in head)
    per_step = ", gradients the minibatch gradients per local step" * ("gradients" in head)
    reached = f"; to x %: the first round at x{spent} and the bytes sent by then" if summary["reach"] else ""
    text = (
        f"{len(rows)} cases, {len(summary['seeds'])} seeds; runs of one seed share split, devices and samples. "
        "Accuracies are in %, ± is half a 95 % interval over seeds, differences are paired by seed; steps are the "
        f"local steps of all devices{per_step}{reached}."
    )
    return render(
        "comparison",
        verdicts=[as_sentence(text) for text in comparison_verdicts(summary)],
        captions=[text, *remarks(summary)],
        head=head,
        rows=rows,
        best=_best(summary["cases"]),
        picture=picture,
    )
