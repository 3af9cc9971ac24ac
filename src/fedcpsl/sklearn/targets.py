"""Labels and devices as people bring them, and as numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import did_you_mean

UNLABELLED = -1
HOLES = ("None", "nan", "NaT", "<NA>")  # how what is missing writes itself
UNLABELLED_TEXTS = ("-1", "")


def with_marks(y: Any) -> Any:
    """Labels as an array with -1 wherever there is none: where they are -1 or missing, or as text "-1" or empty."""
    if y is None:
        return None
    y = np.asarray(y)
    if y.dtype.kind == "f":
        holes = np.isnan(y)
        filled = np.where(holes, UNLABELLED, y)
        return filled.astype(np.int64) if holes.any() and _is_whole(filled) else filled
    if y.dtype.kind == "U":
        y = y.astype(object) if np.isin(y, UNLABELLED_TEXTS).any() else y
    if y.dtype != object:
        return y
    marks = np.array([_is_mark(value) for value in y.ravel().tolist()], bool).reshape(y.shape)
    return np.where(marks, UNLABELLED, y)


def known_labels(y: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Which of marked labels are known, and those: as text, or as numbers of one type."""
    if y.dtype != object:
        known = y != UNLABELLED if y.dtype.kind in "iuf" else np.ones(y.shape, bool)
        return known, y[known]
    known = np.array([isinstance(value, str) or value != UNLABELLED for value in y.tolist()], bool)
    return known, _of_one_type(y[known], "y")


def device_names(device: Any, samples: int) -> NDArray[Any]:
    """The device of every sample, as text or numbers."""
    given = np.asarray(device)
    if given.shape != (samples,):
        raise ValueError(f"device has shape {list(given.shape)} where X has {samples} samples: give one per sample")
    if given.dtype.kind in "fO":
        missing = [row for row, name in enumerate(given.tolist()) if _is_hole(name)]
        if missing:
            raise ValueError(f"device is missing in row {missing[0]}: name the device of every sample")
    return _of_one_type(given, "device") if given.dtype == object else given


def places(names: NDArray[Any], known: NDArray[Any]) -> NDArray[np.int64]:
    """Where every name is among the known ones; -1 where it is not."""
    place = {name: i for i, name in enumerate(known.tolist())}
    return np.array([place.get(name, -1) for name in names.tolist()], np.int64)


def refuse_unseen(names: NDArray[Any], owner: NDArray[np.int64], known: NDArray[Any]) -> None:
    """Say which device is not known, and what can be done."""
    unseen = names[owner < 0].tolist()
    if unseen:
        raise ValueError(
            f"device {unseen[0]!r} was not there at fit; {did_you_mean(str(unseen[0]), map(str, known.tolist()))} "
            'Leave device out, or give unseen="global", to ask the global model'
        )


def refuse_text(x: Any) -> None:
    """Name the first column of a frame that has words in it."""
    for name in getattr(x, "columns", ()):
        words = [value for value in np.asarray(x[name]).tolist() if isinstance(value, str) and not _is_number(value)]
        if words:
            fix = "encode it, or leave it out; whose the samples are goes into device="
            raise ValueError(f"column {name!r} of X could not be converted: it has text such as {words[0]!r}; {fix}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_mark(value: Any) -> bool:
    if isinstance(value, str):
        return value in UNLABELLED_TEXTS
    return _is_hole(value) or value == UNLABELLED


def _is_hole(value: Any) -> bool:
    return not isinstance(value, str) and str(value) in HOLES


def _is_whole(y: NDArray[Any]) -> bool:
    return bool(np.isfinite(y).all() and (np.floor(y) == y).all())


def _of_one_type(values: NDArray[Any], name: str) -> NDArray[Any]:
    texts = [isinstance(value, str) for value in values.tolist()]
    if all(texts):
        return values
    if any(texts):
        raise ValueError(f"{name} has both text and {values.tolist()[texts.index(False)]!r}: give one kind")
    return np.array(values.tolist())
