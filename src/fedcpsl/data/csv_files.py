"""CSV files in their common variants: commas, semicolons or tabs, decimal commas, gzip, a byte order mark."""

import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedcpsl.errors import InputError

SNIFFED_LINES = 200
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_NOT_A_NUMBER = re.compile(r"In CSV column #(\d+): (?:Row #(\d+): )?.* invalid value '(.*)'", re.S)


class Dialect(NamedTuple):
    """The separator of a file's cells, and the decimal point of its numbers."""

    delimiter: str
    decimal_point: str = "."


class NotANumber(NamedTuple):
    """A cell of a numeric column that pyarrow could not parse."""

    column: int
    row: int | None  # from 1, without the header
    value: str


def kind_of(path: Path) -> str:
    """Return the suffix that gives a file's format, also if it is compressed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes or [""])[-1]


@contextmanager
def _lines(path: Path) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
        yield file


def dialect_of(path: Path) -> Dialect:
    """Detect the dialect from the header and the first rows."""
    with _lines(path) as file:
        header, *rows = list(islice(file, SNIFFED_LINES)) or [""]
    if kind_of(path) == ".tsv":
        delimiter = "\t"
    else:
        delimiter = max(",;\t", key=header.count) if any(c in header for c in ",;\t") else ","
    if delimiter == ",":
        return Dialect(delimiter)
    cells = [cell.strip() for row in csv.reader(rows, delimiter=delimiter) for cell in row]
    return Dialect(delimiter, "," if any(_DECIMAL_COMMA.fullmatch(cell) for cell in cells) else ".")


def header_of(path: Path) -> list[str]:
    """Return the columns' names."""
    with _lines(path) as file:
        names = next(csv.reader(file, delimiter=dialect_of(path).delimiter), [])
    if not names:
        raise InputError("the file is empty: give a header with the columns' names, then a row per sample")
    return names


def batches_of(path: Path, names: Sequence[str], text_columns: set[str]) -> Any:
    """Return a reader of batches of rows: text columns as text, all others as numbers."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    delimiter, decimal_point = dialect_of(path)
    types = {name: pa.string() if name in text_columns else pa.float32() for name in names}
    convert = arrow_csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, decimal_point=decimal_point
    )
    return arrow_csv.open_csv(
        pa.input_stream(str(path), compression="detect"),
        read_options=arrow_csv.ReadOptions(block_size=8 << 20, column_names=list(names), skip_rows=1),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=False),
        convert_options=convert,
    )


def not_a_number(error: Exception) -> NotANumber | None:
    """Return the cell that an error of pyarrow is about; None if it is about something else."""
    found = _NOT_A_NUMBER.search(str(error))
    if found is None:
        return None
    column, row, value = found.groups()
    return NotANumber(int(column), int(row) - 1 if row else None, value)


def check_text_column(path: Path, names: Sequence[str], name: str) -> None:
    """Raise InputError if some cells of a text column are numbers: then the others are probably errors."""
    numbers, first, row = False, None, 0
    for batch in batches_of(path, names, set(names)):
        for cell in batch.column(name).to_pylist():
            row += 1
            if cell is not None and is_number(cell):
                numbers = True
            elif cell is not None and first is None:
                first = f"{cell!r} in row {row}"
            if numbers and first:
                advice = "correct it, encode it, or leave it out (--drop)"
                raise InputError(f"column {name!r} has {first}, not a number: {advice}")


def is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True
