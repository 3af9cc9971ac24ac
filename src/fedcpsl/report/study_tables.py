"""The tables of a study: its rows by its panels."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcpsl.errors import InputError
from fedcpsl.runs.comparison import Interval, final_row, interval, no_row, reached, run_folder
from fedcpsl.runs.folder import failure, is_finished, read_metrics
from fedcpsl.runs.study import Line, Study, lines_of

STEPS = "Steps: local steps of all devices in a run, in thousands, times the minibatch gradients of a step."


class Cell(NamedTuple):
    """A case of a study and how its runs ended, one per seed."""

    line: Line
    folders: list[Path]
    runs: list[dict[str, Any]]


class Matrix(NamedTuple):
    """A table of a study: rows by panels."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def cells_of(folder: Path, study: Study, dataset: str, seeds: Sequence[int]) -> list[Cell]:
    """Every case of a study; runs that are not finished have empty rows."""
    reach = study.reach.get(dataset, [])
    cells = []
    for line in lines_of(study, dataset):
        folders = [run_folder(folder, line.case, seed) for seed in seeds]
        there = [is_finished(run) or failure(run) is not None for run in folders]
        known = zip(folders, seeds, there, strict=True)
        rows = [final_row(run, reach) if ended else no_row(run, seed, reach) for run, seed, ended in known]
        cells.append(Cell(line, [run for run, ended in zip(folders, there, strict=True) if ended], rows))
    if not any(cell.folders for cell in cells):
        raise InputError(f"{folder}: no run of {study.name} is finished")
    return cells


def matrices(study: Study, dataset: str, cells: Sequence[Cell]) -> list[Matrix]:
    """Accuracy, the reference's lead, rounds to accuracies, and the worst devices: rows by panels."""
    if study.shows == "map":
        return _best_points(study, cells)
    if study.shows == "rate":
        return [_gaps(study, cells)]
    first, published = study.reference, study.published.get(dataset, {})
    by_place = {(cell.line.panel, cell.line.row): cell for cell in cells}

    def accuracy(cell: Cell) -> str:
        printed = published.get(cell.line.panel, {}).get(cell.line.row)
        return _mean(cell, "personal") + (f" ({printed:g})" if printed is not None else "")

    def lead(cell: Cell) -> str:
        of_first = by_place[cell.line.panel, first]
        return "the same runs" if cell.folders == of_first.folders else _lead(of_first, cell)

    inside = " In brackets: the paper's figure, of one run." if published else ""
    inside += f" {STEPS}"
    tables = [
        _with_steps(
            study,
            by_place,
            _matrix(study, by_place, f"Personal accuracy, %, mean over devices and seeds.{inside}", accuracy),
        )
    ]
    if len(study.rows) > 1:
        caption = f"By how much {first} is ahead of each row, in points, paired by seed."
        tables.append(_matrix(study, by_place, caption, lead, leave_out=first))
    for k, target in enumerate(study.reach.get(dataset, [])):
        caption = f"First round at {100 * target:g} % or more, mean over the seeds that got there."
        tables.append(_matrix(study, by_place, caption, partial(_reached, k=k)))
    caption = "The worst tenth of devices: their personal accuracy, %."
    tables.append(_matrix(study, by_place, caption, lambda cell: _mean(cell, "worst_tenth")))
    caption = "The global model on the devices' own tests, %."
    return [*tables, _matrix(study, by_place, caption, lambda cell: _mean(cell, "global"))]


def _matrix(
    study: Study,
    by_place: Mapping[tuple[str, str], Cell],
    caption: str,
    text: Callable[[Cell], str],
    leave_out: str = "",
) -> Matrix:
    shown = [row for row in study.rows if row != leave_out]
    rows = [[row, *(text(by_place[panel, row]) for panel in study.panels)] for row in shown]
    return Matrix(caption, ["", *(panel or "accuracy" for panel in study.panels)], rows)


def _with_steps(study: Study, by_place: Mapping[tuple[str, str], Cell], matrix: Matrix) -> Matrix:
    """The same with a column for the work behind each row, panel by panel where panels differ."""
    worked = [_steps([by_place[panel, row[0]] for panel in study.panels]) for row in matrix.rows]
    return Matrix(
        matrix.caption, [*matrix.head, "steps"], [[*row, w] for row, w in zip(matrix.rows, worked, strict=True)]
    )


def _steps(cells: Sequence[Cell]) -> str:
    """Local steps of a run, mean over seeds, for each of some cases; times the gradients of a step where known."""
    means = []
    for cell in cells:
        known = [run["steps"] for run in cell.runs if run["steps"] is not None]
        means.append(f"{np.mean(known) / 1000:.1f}k" if known else "-")
    shown = " / ".join(means if len(set(means)) > 1 else means[:1])
    gradients = {run["gradients_per_step"] for cell in cells for run in cell.runs} - {None}
    return f"{shown} x {gradients.pop()}" if len(gradients) == 1 else shown


def _best_points(study: Study, cells: Sequence[Cell]) -> list[Matrix]:
    """For every row of a map the points that did best."""
    tables = []
    for row in study.rows:
        own = sorted((c for c in cells if c.line.row == row), key=lambda c: -judged(c)[0])
        keys = list(own[0].line.point)
        rows = [
            [*(str(c.line.point[key]) for key in keys), f"{judged(c)[0]:.2f}", _spread(c), _steps([c])] for c in own[:5]
        ]
        head = [*(key.partition(".")[2] for key in keys), "accuracy, %", "by seed", "steps"]
        which = f"the best five of {len(own)} points" if len(own) > 5 else "every point, the best first"
        tables.append(Matrix(f"{row}: {which}. {STEPS}", head, rows))
    return tables


def judged(cell: Cell) -> tuple[float, str]:
    """The mean by which a point is judged, %: on validation samples where there are some, else on the tests."""
    key = "validation" if any(run["validation"] is not None for run in cell.runs) else "personal"
    values = [run[key] for run in cell.runs]
    return (100 * float(np.mean(values)) if None not in values else float("-inf")), key


def _spread(cell: Cell) -> str:
    key = judged(cell)[1]
    return ", ".join("failed" if run[key] is None else f"{100 * run[key]:.2f}" for run in cell.runs)


def _mean(cell: Cell, key: str) -> str:
    """Mean and interval over the seeds that came to an end, and how many did not."""
    ended = [run for run in cell.runs if run["steps"] is not None]
    failed, absent = sum("failed" in run for run in cell.runs), len(cell.runs) - len(cell.folders)
    notes = f" ({failed} failed)" * bool(failed) + f" ({len(cell.folders)} of {len(cell.runs)} seeds)" * bool(absent)
    return _with_half(interval([run[key] for run in ended]), "") + notes


def _lead(first: Cell, cell: Cell) -> str:
    pairs = zip(first.runs, cell.runs, strict=True)
    known = [a["personal"] - b["personal"] for a, b in pairs if None not in (a["personal"], b["personal"])]
    return _with_half(interval(known), "+")


def _with_half(found: Interval | None, sign: str) -> str:
    """A mean in % and half of its interval."""
    if found is None or found["mean"] is None:
        return "-"
    half = "" if found["half_width"] is None else f" ± {100 * found['half_width']:.2f}"
    return f"{100 * found['mean']:{sign}.2f}{half}"


def _reached(cell: Cell, k: int) -> str:
    found = reached(cell.runs, k)
    if not found["runs"]:
        return "-"
    some = "" if found["runs"] == len(cell.runs) else f" ({found['runs']} of {len(cell.runs)})"
    return f"{found['rounds']:.0f}{some}"


def mean_gaps(cell: Cell) -> list[float]:
    """Of every run, the mean of the optimality gap over its evaluated rounds but the last: what Theorem 1 bounds."""
    runs = [read_metrics(folder)[:-1] for folder in cell.folders]
    if any(m["gaps"] is None for run in runs for m in run):
        raise InputError("a study that shows a rate needs run.gaps = true among its settings")
    return [float(np.mean([m["gaps"]["total"] for m in run])) for run in runs]


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """a where values fall as sizes^a: the slope of a straight line through their logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _gaps(study: Study, cells: Sequence[Cell]) -> Matrix:
    """Mean gaps over rounds, and how fast they fall as rounds grow."""
    rows = []
    for row in study.rows:
        own = [cell for cell in cells if cell.line.row == row and cell.folders]
        means = [float(np.mean(mean_gaps(cell))) for cell in own]
        falls = exponent([float(cell.line.panel) for cell in own], means) if len(own) > 1 else float("nan")
        rows.append([row, *(f"{mean:.3g}" for mean in means), f"R^{falls:.2f}"])
    caption = "The optimality gap of Theorem 1, mean over rounds and seeds, by the number of rounds R."
    return Matrix(caption, ["", *study.panels, "falls as"], rows)
