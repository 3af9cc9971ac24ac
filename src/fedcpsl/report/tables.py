"""The tables of a report, and how they are written: HTML, Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fedcpsl.storage import to_json


class Column(NamedTuple):
    """A column: its key in the records, what stands above it, and how a value is written."""

    key: str
    title: str
    text: Callable[[Any], str]


class Table(NamedTuple):
    """Records and the columns shown of them; CSV has the plain values under the keys."""

    name: str
    caption: str
    columns: list[Column]
    records: list[Mapping[str, Any]]
    empty: str = "There is nothing to list."  # said in its place where it has no records

    def rows(self) -> list[list[str]]:
        return [[column.text(record.get(column.key)) for column in self.columns] for record in self.records]


def plain(value: Any) -> str:
    return "-" if value is None or value == "" else f"{value:,}" if isinstance(value, int) else str(value)


def count(value: Any) -> str:
    """A mean of whole numbers."""
    return "-" if value is None else f"{value:,.0f}"


def percent(value: Any) -> str:
    """A share in %; with half an interval where the value is one."""
    mean, half = (value.get("mean"), value.get("half_width")) if isinstance(value, Mapping) else (value, None)
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + (f" ± {100 * half:.2f}" if half is not None else "")


def points(value: Any) -> str:
    """A difference of shares, in points."""
    mean, half = (value.get("mean"), value.get("half_width")) if isinstance(value, Mapping) else (value, None)
    if mean is None:
        return "-"
    text = f"{100 * mean:+.2f}"
    shown = "0.00" if text in ("+0.00", "-0.00") else text.replace("-", "−")
    return shown + (f" ± {100 * half:.2f}" if half is not None else "")


def size(value: Any) -> str:
    """A number of bytes as people write it."""
    if value is None:
        return "-"
    units = ["B", "kB", "MB", "GB", "TB"]
    left = float(value)
    while left >= 1000 and len(units) > 1:
        left, units = left / 1000, units[1:]
    return f"{left:.0f} {units[0]}" if units[0] == "B" else f"{left:.1f} {units[0]}"


def seconds(value: Any) -> str:
    """A time as people say it."""
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def to_html(table: Table, *, label: str = "") -> str:
    """A table that scrolls sideways where it must; a click on a heading sorts by it."""
    head = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in table.columns)
    values = [[record.get(column.key) for column in table.columns] for record in table.records]
    rows = "".join(_html_row(*pair) for pair in zip(table.rows(), values, strict=True))
    named = escape(label or table.caption, quote=True)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{named}"><table class="sorts">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _html_row(row: Sequence[str], values: Sequence[Any]) -> str:
    first, *others = [f"{_order(value)}>{escape(cell)}" for cell, value in zip(row, values, strict=True)]
    cells = "".join(f"<td{cell}</td>" for cell in others)
    return f'<tr><th scope="row"{first}</th>{cells}</tr>'


def _order(value: Any) -> str:
    """The number that a cell is sorted by, where it has one: "2 h 01 min" is more than "3 min 00 s"."""
    number = value.get("mean") if isinstance(value, Mapping) else value
    return f' data-v="{float(number):.10g}"' if isinstance(number, int | float) else ""


def to_markdown(table: Table) -> str:
    if not table.records:
        return f"{table.empty}\n"
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    rows = [[column.title for column in table.columns], rule, *table.rows()]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"{table.caption}\n\n" + "\n".join(lines) + "\n"


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"}


def to_latex(table: Table) -> str:
    """A table for booktabs; a comment where it would be empty, which does not compile."""
    if not table.records:
        return f"% {table.empty}\n"

    def safe(text: str) -> str:
        return "".join(LATEX.get(letter, letter) for letter in text)

    head = " & ".join(safe(column.title) for column in table.columns)
    rows = "\n".join("    " + " & ".join(safe(cell) for cell in row) + r" \\" for row in table.rows())
    return (
        f"\\begin{{table}}\n  \\centering\n  \\caption{{{safe(table.caption)}}}\n"
        f"  \\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}\n    \\toprule\n    {head} \\\\\n    \\midrule\n"
        f"{rows}\n    \\bottomrule\n  \\end{{tabular}}\n\\end{{table}}\n"
    )


def to_csv(table: Table) -> str:
    """Plain values: shares from 0 to 1, bytes, seconds; an interval is two columns."""
    text = io.StringIO()
    wide = [any(isinstance(r.get(c.key), Mapping) for r in table.records) for c in table.columns]
    keys = [[c.key, f"{c.key}_half_width"] if two else [c.key] for c, two in zip(table.columns, wide, strict=True)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([key for pair in keys for key in pair])
    for record in table.records:
        cells: list[Any] = []
        for column, two in zip(table.columns, wide, strict=True):
            value = record.get(column.key)
            as_pair = value if isinstance(value, Mapping) else {"mean": value}
            cells += [as_pair.get("mean"), as_pair.get("half_width")] if two else [value]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


WRITERS: dict[str, Callable[[Table], str]] = {"md": to_markdown, "latex": to_latex, "csv": to_csv}


def embedded(value: Any) -> str:
    """JSON that may stand in a script element."""
    return to_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
