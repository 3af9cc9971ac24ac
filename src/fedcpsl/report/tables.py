"""Tables of a report: how values are written, tables as Markdown, LaTeX and CSV, and which files may be overwritten."""

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.errors import InputError


class Column(NamedTuple):
    """A column: its key in the records, its title, and how a value is written."""

    key: str
    title: str
    text: Callable[[Any], str]


class Table(NamedTuple):
    """Records and the columns shown of them; CSV has the plain values under the keys."""

    name: str
    caption: str
    columns: list[Column]
    records: list[Mapping[str, Any]]
    empty: str = "There is nothing to list."  # in place of a table without records

    def rows(self) -> list[list[str]]:
        return [[column.text(record.get(column.key)) for column in self.columns] for record in self.records]


def plain(value: Any) -> str:
    """Return a value as text, a whole number with thousands separators; "-" for none."""
    return "-" if value is None or value == "" else f"{value:,}" if isinstance(value, int) else str(value)


def count(value: Any) -> str:
    """Return a mean of whole numbers as text."""
    return "-" if value is None else f"{value:,.0f}"


def percent(value: Any) -> str:
    """Return a share in %, with half its interval if there is one."""
    mean, half = (value.get("mean"), value.get("half_width")) if isinstance(value, Mapping) else (value, None)
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + (f" ± {100 * half:.2f}" if half is not None else "")


def points(value: Any) -> str:
    """Return a difference of shares in points."""
    mean, half = (value.get("mean"), value.get("half_width")) if isinstance(value, Mapping) else (value, None)
    if mean is None:
        return "-"
    text = f"{100 * mean:+.2f}"
    shown = "0.00" if text in ("+0.00", "-0.00") else text.replace("-", "−")
    return shown + (f" ± {100 * half:.2f}" if half is not None else "")


def size(value: Any) -> str:
    """Return a number of bytes with its unit."""
    if value is None:
        return "-"
    units = ["B", "kB", "MB", "GB", "TB"]
    left = float(value)
    while left >= 1000 and len(units) > 1:
        left, units = left / 1000, units[1:]
    return f"{left:.0f} {units[0]}" if units[0] == "B" else f"{left:.1f} {units[0]}"


def duration(value: Any) -> str:
    """Return a virtual time, of any size, with its unit."""
    return f"{value:.3g} s" if value is not None and value < 100 else seconds(value)


def joules(value: Any) -> str:
    """Return an energy with its unit."""
    if value is None:
        return "-"
    for unit, factor in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)):
        if value >= factor or unit == "mJ":
            return f"{value / factor:.3g} {unit}"
    raise AssertionError


def seconds(value: Any) -> str:
    """Return a time in seconds, minutes or hours."""
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def to_markdown(table: Table) -> str:
    """Return a Markdown table after its caption."""
    if not table.records:
        return f"{table.empty}\n"
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    rows = [[column.title for column in table.columns], rule, *table.rows()]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"{table.caption}\n\n" + "\n".join(lines) + "\n"


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"}


def to_latex(table: Table) -> str:
    """Return a table for booktabs; a comment if it is empty, because an empty table does not compile."""
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
    """Return plain values: shares from 0 to 1, bytes, seconds; an interval is two columns."""
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


GENERATOR = '<meta name="generator" content="fedcpsl'
CAPTIONS = (
    "How the runs ended: accuracy on the devices’ own tests",
    "What it took to get to an accuracy: the mean over",
    "Accuracy per device, best first: ",
    "Every evaluated round; accuracies in %",
    r"Every evaluated round; accuracies in \%",
    "What the edge network took and what became of",
)
EMPTY = ("No run got to 50 %.", "No device has a test set: ", "No run has an edge network.")
HEADS = (
    "name,seeds,rounds,personal",
    "name,accuracy,rounds,uplink_bytes,seconds",
    "name,seed,round,personal,global,",
    "device,labelled,unlabelled,active_rounds",
    "name,virtual_seconds,rounds,compute_joules",
)
FIRST_WORDS = {  # of files of a format, by which reports are recognised
    "md": (*CAPTIONS, *EMPTY),
    "latex": (
        *(f"\\begin{{table}}\n  \\centering\n  \\caption{{{caption}" for caption in CAPTIONS),
        *(f"% {words}" for words in EMPTY),
    ),
    "csv": HEADS,
}


def check_target(out: Path, form: str) -> None:
    """Raise InputError if `out` cannot be written, or is an existing file that is not a report."""
    if out.is_dir():
        raise InputError(f"{out}: is a folder; give --out a file, for example {out / 'report.html'}")
    if out.exists() and not (out.is_file() and _is_report(out, form)):
        raise InputError(f"{out}: exists and is no report; give another --out")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: no such folder; make it, or give another --out")


def _is_report(path: Path, form: str) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(2000)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give another --out") from error
    return GENERATOR in beginning if form == "html" else beginning.startswith(FIRST_WORDS[form])
