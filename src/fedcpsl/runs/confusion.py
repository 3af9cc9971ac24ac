"""confusion.csv: which classes a finished run's models take for which, over all tests. Imports nothing heavy."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError
from fedcpsl.runs.files import MOST_DIGITS

FILE = "confusion.csv"
HEAD = ["model", "class", "predicted", "count"]
MODELS = ("personal", "global")
MOST_COUNTED, MOST_CLASSES = 2000, 100  # whose confusions are counted; of a matrix that is given whole
Counts = NDArray[np.int64]  # [classes, classes]: of each class (row) how often which was predicted (column)


class Confusion(NamedTuple):
    """The counts of the devices' own models, and of the global one where there is one."""

    classes: list[str]
    counts: dict[str, Counts]  # by model


def to_csv(confusion: Confusion) -> str:
    """A line for every pair of classes that occurred."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(HEAD)
    for model, counts in confusion.counts.items():
        for true, predicted in np.argwhere(counts).tolist():
            row = [model, confusion.classes[true], confusion.classes[predicted], counts[true, predicted]]
            table.writerow(row)
    return text.getvalue()


def read_confusion(folder: Path, classes: Sequence[str]) -> Confusion | None:
    """As it was written; None of a run that has not ended, or ended before there was such a file."""
    path = folder / FILE
    place = {name: i for i, name in enumerate(classes)}
    counts: dict[str, Counts] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            head, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error
    if head != HEAD:
        raise InputError(f"{path}: has no columns {','.join(HEAD)}; was it damaged or changed by hand?")
    for number, row in enumerate(rows, 2):
        try:
            model, true, predicted, count = row
            if model not in MODELS or len(count) > MOST_DIGITS or int(count) < 1:
                raise ValueError
            of_model = counts.setdefault(model, np.zeros((len(classes), len(classes)), np.int64))
            of_model[place[true], place[predicted]] += int(count)
        except (ValueError, KeyError, OverflowError):
            raise InputError(f"{path}, line {number}: is no count; was it damaged or changed by hand?") from None
    return Confusion(list(classes), counts)


def class_metrics(confusion: Confusion) -> dict[str, Any]:
    """Accuracy class by class, macro-F1 and the matrices, as plain values."""
    tests = next(iter(confusion.counts.values())).sum(1) if confusion.counts else np.zeros(len(confusion.classes), int)
    accuracies = {model: per_class(counts) for model, counts in confusion.counts.items()}
    return {
        "macro_f1": {model: macro_f1(counts) for model, counts in confusion.counts.items()},
        "classes": [
            {"class": name, "tests": int(tests[i])} | {model: values[i] for model, values in accuracies.items()}
            for i, name in enumerate(confusion.classes)
        ],
        "confusion": _whole(confusion.counts) if len(confusion.classes) <= MOST_CLASSES else None,
    }


def _whole(counts: Mapping[str, Counts]) -> dict[str, list[list[int]]]:
    return {model: of_model.tolist() for model, of_model in counts.items()}


def per_class(counts: Counts) -> list[float | None]:
    """Of each class the share of its samples that was recognised; None where there is no sample of it."""
    pairs = zip(np.diag(counts).tolist(), counts.sum(1).tolist(), strict=True)
    return [right / samples if samples else None for right, samples in pairs]


def macro_f1(counts: Counts) -> float | None:
    """The mean of F1 over the classes that occur or are predicted, as scikit-learn has it."""
    right, known = np.diag(counts), counts.sum(0) + counts.sum(1)
    there = known > 0
    return float((2 * right[there] / known[there]).mean()) if there.any() else None
