"""What comes out of a study: tables beside what is in print, CSV files, a picture and a page."""

import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from fedcpsl.report.comparison import curve_of
from fedcpsl.report.figures import maps, panels_of_curves, rate, trend
from fedcpsl.report.loaded_runs import Line, RunSet, try_load_runs
from fedcpsl.report.page import inline_svg, page_of
from fedcpsl.report.study_tables import Cell, Matrix, cells_of, judged, matrices, mean_gaps
from fedcpsl.report.terminal_width import print_table
from fedcpsl.runs.comparison import interval
from fedcpsl.runs.folder import read_manifest, read_metrics, read_run_config
from fedcpsl.runs.study import Study
from fedcpsl.storage import write_whole

CURVES = ("personal", "global")


def write_study(folder: Path, study: Study, dataset: str, seeds: Sequence[int]) -> Path:
    """results/<study>.csv, .md, .svg and .html (and the curves behind a picture) beside the runs."""
    cells = cells_of(folder, study, dataset, seeds)
    results = folder / "results"
    results.mkdir(exist_ok=True)
    tables, picture = matrices(study, dataset, cells), _picture(study, cells)
    write_whole(results / f"{study.name}.csv", _finals(study, dataset, cells))
    if study.shows == "curves":
        write_whole(results / f"{study.name}-curves.csv", _curves(cells))
    write_whole(results / f"{study.name}.svg", picture)
    write_whole(results / f"{study.name}.md", _markdown(tables, cells, seeds))
    write_whole(results / f"{study.name}.html", _page(study, dataset, tables, picture, cells, seeds))
    return results / f"{study.name}.html"


def print_study(study: Study, dataset: str, cells: Sequence[Cell]) -> None:
    """The tables of a study in the terminal."""
    console = Console()
    console.print(Text.assemble((study.title, "bold"), f", {dataset}"))
    for matrix in matrices(study, dataset, cells):
        table = Table(caption=escape_markup(matrix.caption), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for k, column in enumerate(matrix.head):
            table.add_column(Text(column), justify="left" if k == 0 else "right")
        for row in matrix.rows:
            table.add_row(*map(Text, row))
        print_table(table, console)


def _picture(study: Study, cells: Sequence[Cell]) -> str:
    if study.shows == "map":
        return _maps(cells)
    if study.shows == "rate":
        return rate(
            {row: [(float(c.line.panel), mean_gaps(c)) for c in cells if c.line.row == row] for row in study.rows}
        )
    if study.shows == "trend":
        return trend(_trends(study, cells), study.title)
    panels: dict[str, dict[str, tuple[list[int], Any]]] = {}
    for cell in cells:
        runs = [read_metrics(folder) for folder in cell.folders]
        if not runs:
            continue
        panels.setdefault(cell.line.panel, {})[cell.line.row] = curve_of(runs)
    return panels_of_curves(panels)


def _trends(study: Study, cells: Sequence[Cell]) -> dict[str, list[tuple[str, float, float]]]:
    points: dict[str, list[tuple[str, float, float]]] = {row: [] for row in study.rows}
    for cell in cells:
        found = interval([run["personal"] for run in cell.runs if run["personal"] is not None])
        if found and found["mean"] is not None:
            points[cell.line.row].append((cell.line.panel, 100 * found["mean"], 100 * (found["half_width"] or 0)))
    return points


def _maps(cells: Sequence[Cell]) -> str:
    """A map over the last two settings of the grid (a strip for one) for every row, panel and value of the others."""
    y, x = ["", *cells[0].line.point][-2:]
    ys, xs = (list(dict.fromkeys(cell.line.point.get(key, "") for cell in cells)) for key in (y, x))
    panels: dict[str, Any] = {}
    for cell in cells:
        point = cell.line.point
        others = {key.partition(".")[2]: value for key, value in point.items() if key not in (x, y)}
        rest = [value if isinstance(value, str) else f"{name} = {value}" for name, value in others.items()]
        title = ", ".join([cell.line.row, *([cell.line.panel] if cell.line.panel else []), *rest])
        table = panels.setdefault(title, np.full((len(ys), len(xs)), np.nan))
        value = judged(cell)[0]
        table[ys.index(point.get(y, "")), xs.index(point[x])] = value if np.isfinite(value) else np.nan
    return maps(panels, (x.partition(".")[2], list(map(str, xs))), (y.partition(".")[2], list(map(str, ys))))


def _finals(study: Study, dataset: str, cells: Sequence[Cell]) -> str:
    """One line per run."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    keys = (
        "personal",
        "worst_tenth",
        "global",
        "localized",
        "validation",
        "uplink_bytes",
        "steps",
        "gradients_per_step",
    )
    targets = [f"rounds_to_{target:g}" for target in study.reach.get(dataset, [])]
    grid = list(dict.fromkeys(key for cell in cells for key in cell.line.point))
    table.writerow(["panel", "row", *grid, "seed", *keys, *targets])
    for cell in cells:
        for run in cell.runs:
            values = [run[key] for key in keys] + list(run["reach_rounds"])
            point = [cell.line.point.get(key, "") for key in grid]
            shown = ["" if v is None else round(v, 6) if isinstance(v, float) else v for v in values]
            table.writerow([cell.line.panel, cell.line.row, *point, run["seed"], *shown])
    return text.getvalue()


def _curves(cells: Sequence[Cell]) -> str:
    """Accuracies by round, one line per run and evaluated round."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["panel", "row", "seed", "round", *CURVES])
    for cell in cells:
        for folder in cell.folders:
            seed = read_run_config(folder).run.seed
            for m in read_metrics(folder):
                means = [m[key]["mean"] if m[key] else None for key in CURVES]
                shown = ["" if v is None else f"{v:.4f}" for v in means]
                table.writerow([cell.line.panel, cell.line.row, seed, m["round"], *shown])
    return text.getvalue()


def made_with(cells: Sequence[Cell], seeds: Sequence[int]) -> str:
    """Seeds, versions, hardware and date of a study's runs."""
    folders = [folder for cell in cells for folder in cell.folders]
    manifests = [read_manifest(folder) for folder in folders]
    facts = {name: sorted({str(m[name]) for m in manifests}) for name in ("fedcpsl", "torch", "device_name")}
    days = sorted({str(m["started"])[:10] for m in manifests})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    precision = read_run_config(folders[0]).run.precision
    over = f"seeds {seeds[0]} to {seeds[-1]}, ± is half a 95 % interval over them" if len(seeds) > 1 else "one seed"
    made = f"fedcpsl {', '.join(facts['fedcpsl'])}, PyTorch {', '.join(facts['torch'])}"
    return f"{over}; {made}, {precision} float32, {', '.join(facts['device_name'])}, {when}"


def commands_of(cells: Sequence[Cell]) -> list[str]:
    """The commands that made a study's runs, without where they wrote."""
    given = [read_manifest(folder)["command"] for cell in cells for folder in cell.folders]
    return list(dict.fromkeys(" ".join(_without_out(words)) for words in given))


def _without_out(words: Sequence[str]) -> list[str]:
    """A command without --out and --data-dir, which say nothing to others."""
    kept, skip = [], False
    for word in words:
        if not skip and word not in ("--out", "--data-dir"):
            kept.append(word)
        skip = word in ("--out", "--data-dir")
    return kept


def _markdown(tables: Sequence[Matrix], cells: Sequence[Cell], seeds: Sequence[int]) -> str:
    parts = []
    for matrix in tables:
        rule = ["---"] + ["---:"] * (len(matrix.head) - 1)
        lines = [f"| {' | '.join(row)} |" for row in (matrix.head, rule, *matrix.rows)]
        parts.append(f"{matrix.caption}\n\n" + "\n".join(lines) + "\n")
    commands = ", ".join(f"`{command}`" for command in commands_of(cells))
    return "\n".join([*parts, f"Made with {commands}: {made_with(cells, seeds)}.\n"])


def _page(
    study: Study, dataset: str, tables: Sequence[Matrix], picture: str, cells: Sequence[Cell], seeds: Sequence[int]
) -> str:
    sections = []
    for matrix in tables:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in matrix.head)
        rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in matrix.rows)
        caption = escape(matrix.caption, quote=True)
        sections.append(
            f'<p class="say">{caption}</p><div class="wide" role="region" tabindex="0" aria-label="{caption}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )
    results = (
        f'<h2>Results</h2><p class="say">{escape(made_with(cells, seeds))}</p>{"".join(sections)}'
        f'<figure class="picture">{inline_svg(picture)}</figure>'
    )
    return page_of(_story(cells), f"{study.title} on {dataset}", results)


def _story(cells: Sequence[Cell]) -> RunSet:
    """The runs of a study by row and panel; what two of its places share is told once."""
    found = try_load_runs([folder for cell in cells for folder in cell.folders])
    by_folder = {run.folder: run for run in found.runs}
    lines: dict[tuple[Path, ...], Line] = {}
    for cell in cells:
        runs = [by_folder[folder] for folder in cell.folders if folder in by_folder]
        point = [f"{key.partition('.')[2]}={value}" for key, value in cell.line.point.items()]
        name = ", ".join(word for word in (cell.line.row, cell.line.panel, *point) if word)
        if runs:
            lines.setdefault(tuple(run.folder for run in runs), Line(name, runs))
    return found._replace(lines=list(lines.values()))
