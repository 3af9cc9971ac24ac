"""What users are shown while data is read: warnings about it, each once, on the log `fedcpsl`, and progress bars.

Bars are on stderr, vanish when the work is done, and stay silent where stderr is no terminal.
"""

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import printable

LOG = logging.getLogger("fedcpsl")
MISSING = ("na", "nan", "n/a", "null", "none", "?", "unknown")  # texts that mean an unknown label
OUTLIER = 1e6  # times the usual magnitude
SAMPLED_ROWS = 4096
MAX_NAMED = 3
LARGE_IMAGE = 96  # pixels a side
MANY = 20  # classes or devices
_TEST = re.compile(r"(is_?)?(test|train|valid|validation|split|fold|subset)(_set)?", re.I)
_ID = re.compile(r"(.*[_ ])?(id|uuid|guid|index|idx|row|row_?n(umber|o)?|key)|unnamed: \d+", re.I)
_TIME = re.compile(r"(.*[_ ])?(time|timestamp|date|datetime|epoch|ts)", re.I)
_logged: set[str] = set()
WIDE = 80  # columns from which on a bar has room for everything beside it
T = TypeVar("T")


def note(text: str) -> None:
    """Log a note, unless it was logged before."""
    if text not in _logged:
        _logged.add(text)
        LOG.warning("note: %s", printable(text))


def is_missing(label: str) -> bool:
    """Whether a label text means that the label is unknown."""
    return label.strip().lower() in MISSING


def suspicious_column(name: str, values: NDArray[Any]) -> str | None:
    """Return why a column may not be meant as a feature, or None."""
    known = name.strip()
    if _TEST.fullmatch(known) and np.isin(values, (0, 1)).all():
        return "looks like the mark of test rows; if it is, give --test-column"
    if not known or _ID.fullmatch(known) or _counts_rows(values):
        return "looks like a number of the row, which has no information about its class; if it is one, give --drop"
    if _TIME.fullmatch(known):
        return "looks like a time; if it should not be a feature, give --drop"
    return None


def _counts_rows(values: NDArray[Any]) -> bool:
    return len(values) > 2 and bool((np.diff(values.astype(np.float64)) == 1).all())


def note_columns(where: str, features: Sequence[str], x: NDArray[Any], names: Sequence[str]) -> None:
    """Log columns that are read as features and perhaps are not; `names` are all of the table's columns."""
    for k, name in enumerate(features):
        why = suspicious_column(name, x[:, k])
        if why:
            number = f"#{names.index(name) + 1}" if name in names else ""
            called = f"column {name!r}" if name.strip() else f"column {number}, which has no name,"
            note(f"{where}: {called} is read as a feature: it {why} {name or number}")


def note_classes(where: str, names: Sequence[str], labels: int = 0) -> None:
    """Log classes whose names are nearly the same, a single class, and classes that seem to be measured numbers."""
    alike = defaultdict(list)
    for name in names:
        alike["".join(name.lower().split())].append(name)
    for group in alike.values():
        if len(group) > 1:
            note(f"{where}: the classes {_some(group)} differ in case or spaces only; are they the same?")
    if len(names) == 1:
        note(f"{where}: there is one class, {names[0]!r}: any model will be right")
    if len(names) > MANY and 2 * len(names) > labels > 0:
        note(f"{where}: {labels} labels have {len(names)} classes ({_some(names)}); is this the label?")


def note_devices(where: str, names: Sequence[str], samples: int) -> None:
    """Log devices that hold hardly more than one sample each."""
    if len(names) > MANY and 2 * len(names) > samples:
        note(f"{where}: {samples} samples are on {len(names)} devices ({_some(names)}); is this the device column?")


def note_roles(
    where: str, y: NDArray[np.int64], labelled: NDArray[np.bool_], test: NDArray[np.bool_], names: Any
) -> None:
    """Log classes that occur in tests and in no training label."""
    only = sorted(set(np.unique(y[test]).tolist()) - set(np.unique(y[labelled]).tolist()) - {-1})
    if only:
        called = _some([str(names[c]) if len(names) > c else str(c) for c in only])
        note(f"{where}: {len(only)} of the classes ({called}) occur in tests and in no training label")


def note_inputs(where: str, x: NDArray[Any], features: Sequence[str] = ()) -> None:
    """Log values far beyond all others, and windows that seem to have time first."""
    if x.dtype.kind == "f" and x.ndim == 2:
        largest = np.maximum(x.max(0), -x.min(0))
        usual = np.quantile(np.abs(x[:: max(1, len(x) // SAMPLED_ROWS)]), 0.9, axis=0)
        far = np.flatnonzero(largest > OUTLIER * np.maximum(usual, 1e-3))
        if len(far):
            k = int(far[np.argmax(largest[far])])
            row = int(np.abs(x[:, k]).argmax())
            called = f"column {features[k]!r}" if features else f"feature {k}"
            note(f"{where}: {called} has {x[row, k]:.3g} in row {row + 1}, far beyond its other values; is it right?")
    if x.ndim == 3 and x.shape[1] > 4 * x.shape[2]:
        note(
            f"{where}: an input has shape {list(x.shape[1:])}, read as {x.shape[1]} channels of {x.shape[2]} times; if "
            f"it is {x.shape[1]} times of {x.shape[2]} channels, give x.transpose(0, 2, 1)"
        )


def note_images(where: str, size: Sequence[int]) -> None:
    """Log images that are larger than the models here are made for."""
    height, width = size[:2]
    if height * width > LARGE_IMAGE**2:
        note(
            f"{where}: images of {width} x {height} pixels take much time and memory; --set data.image_size=64 scales "
            "them to 64 x 64 when they are read"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MAX_NAMED])
    return shown + f" and {len(names) - MAX_NAMED} more" * (len(names) > MAX_NAMED)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """The items one by one, with a bar. `total` is their number where they cannot say it themselves."""
    if not _watched():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    said, count, left = TextColumn("{task.description}", markup=False), MofNCompleteColumn(), TimeRemainingColumn()
    columns = (said, BarColumn(), count, left) if console.width >= WIDE else (count, left)
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(items, total=total, description=description)


@contextmanager
def bytes_bar(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for a download, and a function to call with the number of bytes that have arrived since."""
    if not _watched():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    said, arrived, left = TextColumn("{task.description}", markup=False), DownloadColumn(), TimeRemainingColumn()
    columns = (said, BarColumn(16), arrived, TransferSpeedColumn(), left) if console.width >= WIDE else (arrived, left)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
