"""The tables of a study: rows by panels, with a text for every cell."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.runs.comparison import Interval
from fedcpsl.runs.study import Line, Study


class Cell(NamedTuple):
    """A case of a study and the results of its runs, one per seed."""

    line: Line
    folders: list[Path]
    runs: list[dict[str, Any]]


class Matrix(NamedTuple):
    """A table of a study: rows by panels."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def matrix_of(
    study: Study,
    by_place: Mapping[tuple[str, str], Cell],
    caption: str,
    text: Callable[[Cell], str],
    leave_out: str = "",
) -> Matrix:
    """Return a table with the text of every cell; the row `leave_out` is not in it."""
    shown = [row for row in study.rows if row != leave_out]
    rows = [[row, *(text(by_place[panel, row]) for panel in study.panels)] for row in shown]
    return Matrix(caption, ["", *(panel or "accuracy" for panel in study.panels)], rows)


def with_half(found: Interval | None, sign: str) -> str:
    """Return a mean in % and half of its interval."""
    if found is None or found["mean"] is None:
        return "-"
    half = "" if found["half_width"] is None else f" ± {100 * found['half_width']:.2f}"
    return f"{100 * found['mean']:{sign}.2f}{half}"
