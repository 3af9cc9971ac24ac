"""The tables of a finished run: devices.csv, and confusion.csv, the confusion matrices over all tests.

Reading them imports nothing heavy: neither torch nor the simulation.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError
from fedcpsl.storage import MAX_DIGITS, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from fedcpsl.evaluation import Evaluation
    from fedcpsl.simulation import State

COLUMNS = ("device", "name", "labelled", "unlabelled", "active_rounds", "personal", "global", "localized")
TESTS = "tests"  # a last column, which version 0.1 did not write
COUNTS, ACCURACIES = ("device", "labelled", "unlabelled", "active_rounds"), ("personal", "global", "localized")

CONFUSION_FILE = "confusion.csv"
CONFUSION_COLUMNS = ["model", "class", "predicted", "count"]
MODELS = ("personal", "global")
MAX_COUNTED, MAX_CLASSES = 2000, 100  # classes of a matrix that is written; of one that `class_metrics` returns
Counts = NDArray[np.int64]  # [classes, classes]: samples of a class (row) by the class predicted (column)


class Confusion(NamedTuple):
    """The confusion matrices of the devices' own models, and of the global model if there is one."""

    classes: list[str]
    counts: dict[str, Counts]  # by model


def write_tables(folder: Path, state: "State", evaluation: "Evaluation", class_names: Sequence[str]) -> None:
    """Write confusion.csv, then devices.csv, whose existence means that a run is finished."""
    classes = class_names or list(map(str, range(state.setup.terms.method.network.classes)))
    if len(classes) <= MAX_COUNTED:
        write_whole(folder / CONFUSION_FILE, to_csv(confusion(state, evaluation, classes)))
    write_whole(folder / "devices.csv", device_table(state, evaluation))


def device_table(state: "State", evaluation: "Evaluation") -> str:
    """Return the content of devices.csv."""
    setup = state.setup
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*COLUMNS, TESTS])
    shown = (evaluation.personal, evaluation.general, evaluation.localized)
    tests = np.diff(setup.data.test.start)
    listed: Sequence[int] = range(setup.terms.devices)
    if state.sparse is not None:
        listed = sorted({*np.flatnonzero(state.sparse.there).tolist(), *evaluation.personal.devices})
    for i in listed:
        accuracies = [a.devices.get(i, "") if a else "" for a in shown]
        sizes = (setup.terms.sizes.labelled[i], setup.terms.sizes.unlabelled[i])
        table.writerow([i, setup.terms.names[i], *sizes, state.active_rounds[i], *accuracies, tests[i]])
    return text.getvalue()


def read_device_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of devices.csv, each checked; InputError with the line of a damaged one."""
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
            _check_device(row)
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}, line {number}: {error}; was it damaged or changed by hand?") from error
    if not rows:
        raise InputError(f"{path}: has no device; was it damaged or changed by hand?")
    return rows


def _check_device(row: dict[str, str]) -> None:
    for column in (*COUNTS, TESTS) if TESTS in row else COUNTS:
        if len(row[column]) > MAX_DIGITS or int(row[column]) < 0:
            raise ValueError(f"{column} = {row[column][:40]!r} is no count")
    for column in ACCURACIES:
        if row[column] is None or (row[column] and not 0 <= float(row[column]) <= 1):
            raise ValueError(f"{column} = {row[column]!r} is no accuracy")


def confusion(state: "State", evaluation: "Evaluation", classes: Sequence[str]) -> Confusion:
    """Count classes and predicted classes over the tests of all evaluated devices."""
    tests, made = state.setup.data.test, evaluation.predictions
    tested = np.zeros(state.setup.terms.devices, bool)
    tested[list(evaluation.personal.devices)] = True
    here = np.repeat(tested, np.diff(tests.start))
    y = tests.y.cpu().numpy()[here]

    def count(log_h: "Tensor") -> Counts:
        pairs = y * len(classes) + log_h.argmax(-1).cpu().numpy()[here]
        return np.bincount(pairs, minlength=len(classes) ** 2).reshape(len(classes), len(classes))

    models = {"personal": made.personal, "global": made.general}
    return Confusion(list(classes), {name: count(m) for name, m in models.items() if m is not None and len(y)})


def to_csv(confusion: Confusion) -> str:
    """Return the content of confusion.csv: a line for every pair of classes that occurred."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(CONFUSION_COLUMNS)
    for model, counts in confusion.counts.items():
        for true, predicted in np.argwhere(counts).tolist():
            row = [model, confusion.classes[true], confusion.classes[predicted], counts[true, predicted]]
            table.writerow(row)
    return text.getvalue()


def read_confusion(folder: Path, classes: Sequence[str]) -> Confusion | None:
    """Read confusion.csv; None if the run is not finished, or older than this file."""
    path = folder / CONFUSION_FILE
    number_of = {name: i for i, name in enumerate(classes)}
    counts: dict[str, Counts] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            head, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error
    if head != CONFUSION_COLUMNS:
        raise InputError(f"{path}: has no columns {','.join(CONFUSION_COLUMNS)}; was it damaged or changed by hand?")
    for number, row in enumerate(rows, 2):
        try:
            model, true, predicted, count = row
            if model not in MODELS or len(count) > MAX_DIGITS or int(count) < 1:
                raise ValueError
            matrix = counts.setdefault(model, np.zeros((len(classes), len(classes)), np.int64))
            matrix[number_of[true], number_of[predicted]] += int(count)
        except (ValueError, KeyError, OverflowError):
            raise InputError(f"{path}, line {number}: is no count; was it damaged or changed by hand?") from None
    return Confusion(list(classes), counts)


def class_metrics(confusion: Confusion) -> dict[str, Any]:
    """Return accuracy by class, macro-F1 and the matrices, as plain values."""
    tests = next(iter(confusion.counts.values())).sum(1) if confusion.counts else np.zeros(len(confusion.classes), int)
    accuracies = {model: per_class(counts) for model, counts in confusion.counts.items()}
    return {
        "macro_f1": {model: macro_f1(counts) for model, counts in confusion.counts.items()},
        "classes": [
            {"class": name, "tests": int(tests[i])} | {model: values[i] for model, values in accuracies.items()}
            for i, name in enumerate(confusion.classes)
        ],
        "confusion": _as_lists(confusion.counts) if len(confusion.classes) <= MAX_CLASSES else None,
    }


def _as_lists(counts: Mapping[str, Counts]) -> dict[str, list[list[int]]]:
    return {model: matrix.tolist() for model, matrix in counts.items()}


def per_class(counts: Counts) -> list[float | None]:
    """Return the recall of each class; None if it has no sample."""
    pairs = zip(np.diag(counts).tolist(), counts.sum(1).tolist(), strict=True)
    return [right / samples if samples else None for right, samples in pairs]


def macro_f1(counts: Counts) -> float | None:
    """Return the mean of F1 over the classes that occur or are predicted, as scikit-learn computes it."""
    right, total = np.diag(counts), counts.sum(0) + counts.sum(1)
    present = total > 0
    return float((2 * right[present] / total[present]).mean()) if present.any() else None
