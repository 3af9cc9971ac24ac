"""devices.csv, the table of a finished run's devices, as it is read. Imports nothing heavy."""

import csv
from pathlib import Path

from fedcpsl.errors import InputError
from fedcpsl.runs.files import MOST_DIGITS

COLUMNS = ("device", "name", "labelled", "unlabelled", "active_rounds", "personal", "global", "localized")
TESTS = "tests"  # a last column, which version 0.1 did not write
COUNTS, ACCURACIES = ("device", "labelled", "unlabelled", "active_rounds"), ("personal", "global", "localized")


def read_device_table(path: Path) -> list[dict[str, str]]:
    """The rows, each checked; a table that is damaged is named with its line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (table.fieldnames or ())]
            if missing:
                raise InputError(
                    f"{path}: has no column {missing[0]!r}; was it changed by hand? It needs {','.join(COLUMNS)}"
                )
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error
    for number, row in enumerate(rows, 2):
        try:
            _check(row)
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}, line {number}: {error}; was it damaged or changed by hand?") from error
    if not rows:
        raise InputError(f"{path}: has no device; was it damaged or changed by hand?")
    return rows


def _check(row: dict[str, str]) -> None:
    for column in (*COUNTS, TESTS) if TESTS in row else COUNTS:
        if len(row[column]) > MOST_DIGITS or int(row[column]) < 0:
            raise ValueError(f"{column} = {row[column][:40]!r} is no count")
    for column in ACCURACIES:
        if row[column] is None or (row[column] and not 0 <= float(row[column]) <= 1):
            raise ValueError(f"{column} = {row[column]!r} is no accuracy")
