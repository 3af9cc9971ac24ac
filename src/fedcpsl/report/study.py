"""The results of a study: tables beside the published figures, CSV files, a figure and a page."""

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from fedcpsl.errors import InputError
from fedcpsl.report import study_tables
from fedcpsl.report.comparison import curve_of
from fedcpsl.report.figures import costs, final_accuracies, gaps_by_rounds, maps, panels_of_curves, trend
from fedcpsl.report.loaded_runs import RunSet, SeedGroup, try_load_runs
from fedcpsl.report.page import inline_svg, page_of
from fedcpsl.report.sections import render
from fedcpsl.report.study_tables import (
    NEEDS_CAPTION,
    NEEDS_HEAD,
    CaseResults,
    Matrix,
    needs_of,
    study_matrix,
    with_half,
)
from fedcpsl.report.terminal import print_table
from fedcpsl.runs.comparison import EDGE, final_row, interval, no_row, reached, run_folder
from fedcpsl.runs.folder import failure, is_finished, is_refused, read_manifest, read_metrics, read_run_config
from fedcpsl.runs.study import Study, lines_of
from fedcpsl.settings import PUBLISHED_TESTS
from fedcpsl.storage import write_whole

STEPS = "Steps: local steps of all devices in a run, in thousands, times the minibatch gradients of a step."
CURVES = ("personal", "global")
MOST_CURVES = 12  # that can be told apart in one picture


def cells_of(folder: Path, study: Study, dataset: str, seeds: Sequence[int]) -> list[CaseResults]:
    """Return every case of a study; runs that are not finished have empty rows."""
    reach = study.reach.get(dataset, [])
    cells = []
    for line in lines_of(study, dataset):
        folders = [run_folder(folder, line.case, seed) for seed in seeds]
        ended = [is_finished(run) or failure(run) is not None for run in folders]
        known = zip(folders, seeds, ended, strict=True)
        rows = [final_row(run, reach) if over else no_row(run, seed, reach) for run, seed, over in known]
        begun = [run for run, over in zip(folders, ended, strict=True) if over and not is_refused(run)]
        cells.append(CaseResults(line, begun, rows))
    if not any(cell.folders for cell in cells):
        reasons = [f": {run['failed']}" for cell in cells for run in cell.runs if "failed" in run]
        raise InputError(f"{folder}: no run of {study.name} is finished{''.join(reasons[:1])}")
    return cells


def matrices(study: Study, dataset: str, cells: Sequence[CaseResults]) -> list[Matrix]:
    """Return the tables of a study's results, and one of what was refused, and why, where something was."""
    return [*_matrices(study, dataset, cells), *_refused(cells)]


def _refused(cells: Sequence[CaseResults]) -> list[Matrix]:
    rows = [
        [cell.line.row, cell.line.panel or "-", *map(str, cell.line.point.values()), str(run["seed"]), reason]
        for cell in cells
        for run in cell.runs
        if (reason := _refusal(run))
    ]
    grid = [key.partition(".")[2] for key in cells[0].line.point]
    return [Matrix("Runs that were refused.", ["", "panel", *grid, "seed", "why"], rows)] if rows else []


def _refusal(run: Mapping[str, Any]) -> str:
    """Return why a run was refused; nothing where it was not."""
    kind, _, reason = run.get("failed", "").partition(": ")
    return reason if kind == "refused" else ""


def _matrices(study: Study, dataset: str, cells: Sequence[CaseResults]) -> list[Matrix]:
    """Return the tables, rows by panels: accuracy, the reference's lead, rounds to accuracies, worst devices."""
    if study.shows == "map":
        return _best_points(study, cells)
    if study.shows == "rate":
        return [_gaps(study, cells)]
    first, published = study.reference, study.published.get(dataset, {})
    by_place = {(cell.line.panel, cell.line.row): cell for cell in cells}
    if study.needs:
        return [table for panel in study.panels for table in _side_by_side(study, dataset, panel, by_place)]

    def accuracy(cell: CaseResults) -> str:
        printed = published.get(cell.line.panel, {}).get(cell.line.row)
        return _mean(cell, "personal") + (f" ({printed:g})" if printed is not None else "")

    def lead(cell: CaseResults) -> str:
        of_first = by_place[cell.line.panel, first]
        return "the same runs" if cell.folders == of_first.folders else _lead(of_first, cell)

    inside = " In brackets: the published figure." if published else ""
    inside += f" {STEPS}"
    caption = f"Personal accuracy, %, mean over devices and seeds.{inside}"
    tables = [_with_steps(study, by_place, study_matrix(study, by_place, caption, accuracy))]
    if len(study.rows) > 1:
        caption = f"By how much {first} is ahead of each row, in points, paired by seed."
        tables.append(study_matrix(study, by_place, caption, lead, leave_out=first))
    tables += _costs(study, dataset, by_place)
    caption = "The worst tenth of devices: their personal accuracy, %."
    tables.append(study_matrix(study, by_place, caption, lambda cell: _mean(cell, "worst_tenth")))
    caption = "The global model on the devices' own tests, %."
    tables.append(study_matrix(study, by_place, caption, lambda cell: _mean(cell, "global")))
    if _has_published_tests(study, dataset):
        caption = "The global model on the published test images of all devices, %."
        tables.append(study_matrix(study, by_place, caption, lambda cell: _mean(cell, "union")))
    return tables


def _has_published_tests(study: Study, dataset: str) -> bool:
    """Whether devices are tested on images that the data set's authors published for this, in all cases."""
    base = study.bases[dataset].data.test
    return all(line.case.settings.get("data.test", base) == PUBLISHED_TESTS for line in lines_of(study, dataset))


def _costs(study: Study, dataset: str, by_place: Mapping[tuple[str, str], CaseResults]) -> list[Matrix]:
    """Return the rounds until accuracies; with edge networks also virtual time, energy, bytes and lost uploads."""
    edge = any(study_tables.has_edge(cell.runs) for cell in by_place.values())
    what = "First round, virtual time, energy and bytes sent until then," if edge else "First round"
    tables = []
    for k, target in enumerate(study.reach.get(dataset, [])):
        caption = f"{what} at {100 * target:g} % or more, mean over the seeds that got there."
        tables.append(study_matrix(study, by_place, caption, partial(_reached, k=k)))
    if edge:
        tables += study_tables.edge_tables(study, by_place)
    return tables


def _with_steps(study: Study, by_place: Mapping[tuple[str, str], CaseResults], matrix: Matrix) -> Matrix:
    """Return a table with a column for the steps of each row, per panel if panels differ."""
    worked = [_steps([by_place[panel, row[0]] for panel in study.panels]) for row in matrix.rows]
    return Matrix(
        matrix.caption, [*matrix.head, "steps"], [[*row, w] for row, w in zip(matrix.rows, worked, strict=True)]
    )


def _side_by_side(
    study: Study, dataset: str, panel: str, by_place: Mapping[tuple[str, str], CaseResults]
) -> list[Matrix]:
    """Return two tables of one panel: what each row reaches, and beside its accuracy what it needs for it."""
    first, targets = by_place[panel, study.reference], study.reach.get(dataset, [])
    reached_rows, needed_rows = [], []
    for row in study.rows:
        cell = by_place[panel, row]
        personal = _mean(cell, "personal")
        lead = "-" if row == study.reference else _lead(first, cell)
        rounds = [_reached(cell, k) for k in range(len(targets))]
        worst, general = (_mean(cell, key) for key in ("worst_tenth", "global"))
        reached_rows.append([row, personal, lead, worst, general, *rounds, _steps([cell])])
        needed_rows.append([row, personal, *needs_of(cell.runs, study.chosen.get(dataset, {}))])
    rounds_to = [f"to {100 * target:g} %" for target in targets]
    reaches = ["", "personal", f"{study.reference} ahead", "worst tenth", "global", *rounds_to, "steps"]
    where = f"{panel}: accuracy" if panel else "Accuracy"
    caption = f"{where} in %; by how much {study.reference} is ahead, paired by seed; the first round at some. {STEPS}"
    return [Matrix(caption, reaches, reached_rows), Matrix(NEEDS_CAPTION, ["", "personal", *NEEDS_HEAD], needed_rows)]


def best_points(study: Study, dataset: str, cells: Sequence[CaseResults]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the point of every grid with the best mean, by (algorithm,), or by (panel, row) if the study has panels.

    A point of a panel has what the study was told of its row too. InputError where some are not finished.
    """
    if study.shows != "map":
        raise InputError(f"--choose: {study.name} is not a study of settings; give one that shows a map")
    best: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {}
    for cell in cells:
        score, name = mean_score(cell)[0], next((run["algorithm"] for run in cell.runs if run["algorithm"]), "")
        if len(cell.folders) < len(cell.runs):
            raise InputError(f"--choose: {cell.line.case.name} of {study.name} is not finished; run it first")
        place = (cell.line.panel, cell.line.row) if cell.line.panel else (name,)
        given = study.tuned.get(dataset, {}).get(cell.line.panel, {}).get(cell.line.row, {})
        if name and score > best.get(place, (float("-inf"), {}))[0]:
            best[place] = score, given | cell.line.point
    return {place: point for place, (_, point) in best.items()}


def rows_without_a_point(cells: Sequence[CaseResults]) -> list[str]:
    """Return the rows, with their panels, of which every point failed."""
    best: dict[str, float] = {}
    for cell in cells:
        row = ", ".join(filter(None, (cell.line.row, cell.line.panel)))
        best[row] = max(best.get(row, float("-inf")), mean_score(cell)[0])
    return [row for row, score in best.items() if score == float("-inf")]


def _steps(cells: Sequence[CaseResults]) -> str:
    """Return the local steps of a run, mean over seeds, of each cell; times the gradients of a step if known."""
    means = []
    for cell in cells:
        known = [run["steps"] for run in cell.runs if run["steps"] is not None]
        means.append(f"{np.mean(known) / 1000:.1f}k" if known else "-")
    shown = " / ".join(means if len(set(means)) > 1 else means[:1])
    gradients = {run["gradients_per_step"] for cell in cells for run in cell.runs} - {None}
    return f"{shown} x {gradients.pop()}" if len(gradients) == 1 else shown


def _best_points(study: Study, cells: Sequence[CaseResults]) -> list[Matrix]:
    """Return for every row of a map, panel by panel, its best points."""
    tables = []
    for row, panel in product(study.rows, study.panels):
        of_panel = [c for c in cells if (c.line.row, c.line.panel) == (row, panel)]
        own = sorted(of_panel, key=lambda c: -mean_score(c)[0])
        keys = list(own[0].line.point)
        rows = [
            [*(str(c.line.point[key]) for key in keys), f"{mean_score(c)[0]:.2f}", _spread(c), _steps([c])]
            for c in own[:5]
        ]
        head = [*(key.partition(".")[2] for key in keys), "accuracy, %", "by seed", "steps"]
        which = f"the best five of {len(own)} points" if len(own) > 5 else "every point, the best first"
        tables.append(Matrix(f"{', '.join(filter(None, (row, panel)))}: {which}. {STEPS}", head, rows))
    return tables


def mean_score(cell: CaseResults) -> tuple[float, str]:
    """Return the mean accuracy that a point is judged by, %: on validation samples if there are any, else on tests."""
    key = "validation" if any(run["validation"] is not None for run in cell.runs) else "personal"
    values = [run[key] for run in cell.runs]
    return (100 * float(np.mean(values)) if None not in values else float("-inf")), key


def _spread(cell: CaseResults) -> str:
    key = mean_score(cell)[1]
    return ", ".join("failed" if run[key] is None else f"{100 * run[key]:.2f}" for run in cell.runs)


def _mean(cell: CaseResults, key: str) -> str:
    """Return mean and interval over the finished seeds, and how many failed or are missing."""
    ended = [run for run in cell.runs if run["steps"] is not None]
    refused = sum(bool(_refusal(run)) for run in cell.runs)
    failed, absent = sum("failed" in run for run in cell.runs) - refused, len(cell.runs) - len(cell.folders) - refused
    notes = f" ({failed} failed)" * bool(failed) + f" ({refused} refused)" * bool(refused)
    notes += f" ({len(cell.folders)} of {len(cell.runs)} seeds)" * bool(absent)
    return with_half(interval([run[key] for run in ended]), "") + notes


def _lead(first: CaseResults, cell: CaseResults) -> str:
    pairs = zip(first.runs, cell.runs, strict=True)
    known = [a["personal"] - b["personal"] for a, b in pairs if None not in (a["personal"], b["personal"])]
    return with_half(interval(known), "+")


def _reached(cell: CaseResults, k: int) -> str:
    found = reached(cell.runs, k)
    if not found["runs"]:
        return "-"
    some = "" if found["runs"] == len(cell.runs) else f" ({found['runs']} of {len(cell.runs)})"
    return f"{found['rounds']:.0f}{study_tables.costs_until(cell.runs, k)}{some}"


def mean_gaps(cell: CaseResults) -> list[float]:
    """Return per run the mean optimality gap over its evaluated rounds but the last: what Theorem 1 bounds."""
    runs = [read_metrics(folder)[:-1] for folder in cell.folders]
    if any(m["gaps"] is None for run in runs for m in run):
        raise InputError("a study that shows a rate needs run.gaps = true among its settings")
    return [float(np.mean([m["gaps"]["total"] for m in run])) for run in runs]


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return a where values fall as sizes^a: the slope of a straight line through their logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _gaps(study: Study, cells: Sequence[CaseResults]) -> Matrix:
    """Return mean gaps over rounds, and how fast they fall as rounds grow."""
    rows = []
    for row in study.rows:
        own = [cell for cell in cells if cell.line.row == row and cell.folders]
        means = [float(np.mean(mean_gaps(cell))) for cell in own]
        falls = exponent([float(cell.line.panel) for cell in own], means) if len(own) > 1 else float("nan")
        rows.append([row, *(f"{mean:.3g}" for mean in means), f"R^{falls:.2f}"])
    caption = "The optimality gap of Theorem 1, mean over rounds and seeds, by the number of rounds R."
    return Matrix(caption, ["", *study.panels, "falls as"], rows)


def write_study(folder: Path, study: Study, dataset: str, seeds: Sequence[int]) -> Path:
    """Write results/<study>.csv, .md, .svg and .html (and the curves of the figure) beside the runs."""
    cells = cells_of(folder, study, dataset, seeds)
    results = folder / "results"
    results.mkdir(exist_ok=True)
    tables, picture = matrices(study, dataset, cells), _picture(study, cells)
    write_whole(results / f"{study.name}.csv", _finals(study, dataset, cells))
    if study.shows in ("curves", "costs"):
        write_whole(results / f"{study.name}-curves.csv", _curves(cells))
    write_whole(results / f"{study.name}.svg", picture)
    write_whole(results / f"{study.name}.md", _markdown(tables, cells, seeds))
    write_whole(results / f"{study.name}.html", _page(study, dataset, tables, picture, cells, seeds))
    return results / f"{study.name}.html"


def print_study(study: Study, dataset: str, cells: Sequence[CaseResults]) -> None:
    """Print the tables of a study."""
    console = Console()
    console.print(Text.assemble((study.title, "bold"), f", {dataset}"))
    for matrix in matrices(study, dataset, cells):
        table = Table(caption=escape_markup(matrix.caption), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for k, column in enumerate(matrix.head):
            table.add_column(Text(column), justify="left" if k == 0 else "right")
        for row in matrix.rows:
            table.add_row(*map(Text, row))
        print_table(table, console)


def _picture(study: Study, cells: Sequence[CaseResults]) -> str:
    if study.shows == "map":
        return _maps(cells)
    if study.shows == "rate":
        return gaps_by_rounds(
            {row: [(float(c.line.panel), mean_gaps(c)) for c in cells if c.line.row == row] for row in study.rows}
        )
    if study.shows == "costs":
        return costs(study_tables.cost_curves(study, cells))
    if study.shows == "trend":
        return trend(_trends(study, cells), study.title)
    if len(study.rows) > MOST_CURVES:
        return final_accuracies(_ends(cells))
    panels: dict[str, dict[str, tuple[list[int], Any]]] = {}
    for cell in cells:
        runs = [read_metrics(folder) for folder in cell.folders]
        if not runs:
            continue
        panels.setdefault(cell.line.panel, {})[cell.line.row] = curve_of(runs)
    return panels_of_curves(panels)


def _ends(cells: Sequence[CaseResults]) -> dict[str, dict[str, tuple[float, float, float | None]]]:
    """Return by panel and row the mean accuracy, half its interval and the mean of the worst tenth of devices, in %."""
    panels: dict[str, dict[str, tuple[float, float, float | None]]] = {}
    for cell in cells:
        personal, worst = (
            interval([run[key] for run in cell.runs if run[key] is not None]) for key in ("personal", "worst_tenth")
        )
        if personal and personal["mean"] is not None:
            least = 100 * worst["mean"] if worst and worst["mean"] is not None else None
            end = 100 * personal["mean"], 100 * (personal["half_width"] or 0), least
            panels.setdefault(cell.line.panel, {})[cell.line.row] = end
    return panels


def _trends(study: Study, cells: Sequence[CaseResults]) -> dict[str, list[tuple[str, float, float]]]:
    points: dict[str, list[tuple[str, float, float]]] = {row: [] for row in study.rows}
    for cell in cells:
        found = interval([run["personal"] for run in cell.runs if run["personal"] is not None])
        if found and found["mean"] is not None:
            points[cell.line.row].append((cell.line.panel, 100 * found["mean"], 100 * (found["half_width"] or 0)))
    return points


def _maps(cells: Sequence[CaseResults]) -> str:
    """Draw a map over the last two settings of the grid for every row, panel and value of the others.

    Where rows have grids of different settings, a row's points stand in their order.
    """
    if len({tuple(cell.line.point) for cell in cells}) > 1:
        cells = _numbered(cells)
    y, x = ["", *cells[0].line.point][-2:]
    ys, xs = (list(dict.fromkeys(cell.line.point.get(key, "") for cell in cells)) for key in (y, x))
    panels: dict[str, Any] = {}
    for cell in cells:
        point = cell.line.point
        others = {key.partition(".")[2]: value for key, value in point.items() if key not in (x, y)}
        rest = [value if isinstance(value, str) else f"{name} = {value}" for name, value in others.items()]
        title = ", ".join([cell.line.row, *([cell.line.panel] if cell.line.panel else []), *rest])
        table = panels.setdefault(title, np.full((len(ys), len(xs)), np.nan))
        value = mean_score(cell)[0]
        table[ys.index(point.get(y, "")), xs.index(point[x])] = value if np.isfinite(value) else np.nan
    return maps(panels, (x.partition(".")[2], list(map(str, xs))), (y.partition(".")[2], list(map(str, ys))))


def _numbered(cells: Sequence[CaseResults]) -> list[CaseResults]:
    """Return cells whose point is its place in the grid of its row."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for cell in cells:
        place = cell.line.row, cell.line.panel
        seen[place] = seen.get(place, 0) + 1
        found.append(cell._replace(line=cell.line._replace(point={"grid.point": seen[place]})))
    return found


def _finals(study: Study, dataset: str, cells: Sequence[CaseResults]) -> str:
    """Return the final metrics as CSV, one line per run."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    keys: tuple[str, ...] = (
        "personal",
        "worst_tenth",
        "global",
        "localized",
        "validation",
        *(("union",) if _has_published_tests(study, dataset) else ()),
        "uplink_bytes",
        "steps",
        "gradients_per_step",
        *(("downlink_bytes", "device_bytes", "models_down", "models_up", "models_kept") if study.needs else ()),
    )
    edge = any(study_tables.has_edge(cell.runs) for cell in cells)
    until = {"rounds": "reach_rounds"}
    if edge:
        keys += EDGE
        until |= {"seconds": "reach_seconds", "joules": "reach_joules", "bytes": "reach_bytes"}
    targets = [f"{what}_to_{target:g}" for what in until for target in study.reach.get(dataset, [])]
    unknown = [None] * len(study.reach.get(dataset, []))
    grid = list(dict.fromkeys(key for cell in cells for key in cell.line.point))
    table.writerow(["panel", "row", *grid, "seed", *keys, *targets])
    for cell in cells:
        for run in cell.runs:
            values = [run.get(key) for key in keys] + [v for key in until.values() for v in run.get(key, unknown)]
            point = [cell.line.point.get(key, "") for key in grid]
            shown = ["" if v is None else round(v, 6) if isinstance(v, float) else v for v in values]
            table.writerow([cell.line.panel, cell.line.row, *point, run["seed"], *shown])
    return text.getvalue()


def _curves(cells: Sequence[CaseResults]) -> str:
    """Return accuracies as CSV, one line per run and evaluated round."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    edge = any(study_tables.has_edge(cell.runs) for cell in cells)
    table.writerow(["panel", "row", "seed", "round", *CURVES, *list(study_tables.COSTS) * edge])
    for cell in cells:
        for folder in cell.folders:
            seed = read_run_config(folder).run.seed
            for m in read_metrics(folder):
                means = [m[key]["mean"] if m[key] else None for key in CURVES]
                shown = ["" if v is None else f"{v:.4f}" for v in means]
                shown += [f"{study_tables.cost_of(m, cost):.6g}" for cost in study_tables.COSTS if edge]
                table.writerow([cell.line.panel, cell.line.row, seed, m["round"], *shown])
    return text.getvalue()


def made_with(cells: Sequence[CaseResults], seeds: Sequence[int]) -> str:
    """Return the seeds, versions, hardware and dates of a study's runs."""
    folders = [folder for cell in cells for folder in cell.folders]
    manifests = [read_manifest(folder) for folder in folders]
    facts = {name: sorted({str(m[name]) for m in manifests}) for name in ("fedcpsl", "torch", "device_name")}
    days = sorted({str(m["started"])[:10] for m in manifests})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    precision = read_run_config(folders[0]).run.precision
    over = f"seeds {seeds[0]} to {seeds[-1]}, ± is half a 95 % interval over them" if len(seeds) > 1 else "one seed"
    made = f"fedcpsl {', '.join(facts['fedcpsl'])}, PyTorch {', '.join(facts['torch'])}"
    return f"{over}; {made}, {precision} float32, {', '.join(facts['device_name'])}, {when}"


def commands_of(cells: Sequence[CaseResults]) -> list[str]:
    """Return the commands that made a study's runs, without output folders."""
    given = [read_manifest(folder)["command"] for cell in cells for folder in cell.folders]
    return list(dict.fromkeys(shlex.join(_without_out(words)) for words in given))


def _without_out(words: Sequence[str]) -> list[str]:
    """Return a command without the options that name files and folders, which differ between machines."""
    paths = ("--out", "--data-dir", "--choose")
    kept, skip = [], False
    for word in words:
        if not skip and word not in paths:
            kept.append(word)
        skip = word in paths
    return kept


def _markdown(tables: Sequence[Matrix], cells: Sequence[CaseResults], seeds: Sequence[int]) -> str:
    parts = []
    for matrix in tables:
        rule = ["---"] + ["---:"] * (len(matrix.head) - 1)
        lines = [f"| {' | '.join(row)} |" for row in (matrix.head, rule, *matrix.rows)]
        parts.append(f"{matrix.caption}\n\n" + "\n".join(lines) + "\n")
    commands = ", ".join(f"`{command}`" for command in commands_of(cells))
    return "\n".join([*parts, f"Made with {commands}: {made_with(cells, seeds)}.\n"])


def _page(
    study: Study,
    dataset: str,
    tables: Sequence[Matrix],
    picture: str,
    cells: Sequence[CaseResults],
    seeds: Sequence[int],
) -> str:
    results = render("study", made_with=made_with(cells, seeds), tables=tables, picture=inline_svg(picture))
    return page_of(_loaded(cells), f"{study.title} on {dataset}", results)


def _loaded(cells: Sequence[CaseResults]) -> RunSet:
    """Load the runs of a study by row and panel; runs that two cells share are loaded once."""
    run_set = try_load_runs([folder for cell in cells for folder in cell.folders])
    by_folder = {run.folder: run for run in run_set.runs}
    groups: dict[tuple[Path, ...], SeedGroup] = {}
    for cell in cells:
        runs = [by_folder[folder] for folder in cell.folders if folder in by_folder]
        point = [f"{key.partition('.')[2]}={value}" for key, value in cell.line.point.items()]
        name = ", ".join(word for word in (cell.line.row, cell.line.panel, *point) if word)
        if runs:
            groups.setdefault(tuple(run.folder for run in runs), SeedGroup(name, runs))
    return run_set._replace(groups=list(groups.values()))
