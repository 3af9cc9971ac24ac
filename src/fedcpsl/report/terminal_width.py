"""Tables and bars in whatever width there is: nothing is cut off, in a narrow terminal or in a pipe."""

import os

from rich.console import Console
from rich.measure import Measurement
from rich.progress import ProgressColumn
from rich.table import Table
from rich.text import Text

ENDLESS = 10_000  # columns
CUT = "…"  # what rich puts where it cuts a word
BESIDE_NOTE = 46  # columns that the rest of a bar takes
FOR_BARS = 72  # columns from which on a bar has room for everything beside it


def room(console: Console) -> int:
    """Columns to write in: a terminal's, or those that COLUMNS says; as many as wanted in a pipe."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else ENDLESS


def print_table(table: Table, console: Console | None = None) -> None:
    """A table; in a pipe as wide as it is, and where it would be cut, as lines of a column's name and its value."""
    console = console or Console()
    if room(console) == ENDLESS:
        wide = console.options.update(width=ENDLESS)
        natural = Measurement.get(console, wide, table).maximum
        console = Console(file=console.file, width=max(console.width, natural))
    if CUT in "".join(segment.text for segment in console.render(table)):
        _print_lines(table, console)
    else:
        console.print(table)


def _print_lines(table: Table, console: Console) -> None:
    """What a table says, row by row."""
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


def that_fit(console: Console, *columns: ProgressColumn, narrow: tuple[int, ...]) -> list[ProgressColumn]:
    """A bar's columns; in a narrow terminal those alone whose places are given."""
    return list(columns) if console.width >= FOR_BARS else [columns[place] for place in narrow]


def if_it_fits(console: Console, note: str) -> str:
    """A note beside a bar, where there is room for all of it."""
    return note if len(note) <= console.width - BESIDE_NOTE else ""
