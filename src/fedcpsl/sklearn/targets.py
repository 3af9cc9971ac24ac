"""Check and convert labels and devices as users give them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import did_you_mean

UNLABELLED = -1
MISSING = ("None", "nan", "NaT", "<NA>")  # missing values as text
UNLABELLED_TEXTS = ("-1", "")


def with_marks(y: Any) -> Any:
    """Return labels as an array with -1 for unlabelled: -1 or missing, or as text "-1" or empty."""
    if y is None:
        return None
    y = np.asarray(y)
    if y.dtype.kind == "f":
        missing = np.isnan(y)
        filled = np.where(missing, UNLABELLED, y)
        return filled.astype(np.int64) if missing.any() and _is_whole(filled) else filled
    if y.dtype.kind == "U":
        y = y.astype(object) if np.isin(y, UNLABELLED_TEXTS).any() else y
    if y.dtype != object:
        return y
    marks = np.array([_is_mark(value) for value in y.ravel().tolist()], bool).reshape(y.shape)
    return np.where(marks, UNLABELLED, y)


def known_labels(y: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Return which labels are known, and the known ones: as text, or as numbers of one type."""
    if y.dtype != object:
        known = y != UNLABELLED if y.dtype.kind in "iuf" else np.ones(y.shape, bool)
        return known, y[known]
    known = np.array([isinstance(value, str) or value != UNLABELLED for value in y.tolist()], bool)
    return known, _of_one_type(y[known], "y")


def device_names(device: Any, samples: int) -> NDArray[Any]:
    """Return the device of every sample, as text or numbers."""
    given = np.asarray(device)
    if given.shape != (samples,):
        raise ValueError(f"device has shape {list(given.shape)} where X has {samples} samples: give one per sample")
    if given.dtype.kind in "fO":
        missing = [row for row, name in enumerate(given.tolist()) if _is_missing(name)]
        if missing:
            raise ValueError(f"device is missing in row {missing[0]}: name the device of every sample")
    return _of_one_type(given, "device") if given.dtype == object else given


def places(names: NDArray[Any], known: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of every name among the known ones; -1 if it is unknown."""
    place = {name: i for i, name in enumerate(known.tolist())}
    return np.array([place.get(name, -1) for name in names.tolist()], np.int64)


def refuse_unseen(names: NDArray[Any], owner: NDArray[np.int64], known: NDArray[Any]) -> None:
    """Raise ValueError for a device that was not in fit."""
    unseen = names[owner < 0].tolist()
    if unseen:
        raise ValueError(
            f"device {unseen[0]!r} was not in fit; {did_you_mean(str(unseen[0]), map(str, known.tolist()))}; "
            'to use the global model, leave device out or give unseen="global"'
        )


def refuse_text(x: Any) -> None:
    """Raise ValueError for the first column of a frame that has text in it."""
    for name in getattr(x, "columns", ()):
        words = [value for value in np.asarray(x[name]).tolist() if isinstance(value, str) and not _is_number(value)]
        if words:
            fix = "encode it, or leave it out; the samples' devices go into device="
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
    return _is_missing(value) or value == UNLABELLED


def _is_missing(value: Any) -> bool:
    return not isinstance(value, str) and str(value) in MISSING


def _is_whole(y: NDArray[Any]) -> bool:
    return bool(np.isfinite(y).all() and (np.floor(y) == y).all())


def _of_one_type(values: NDArray[Any], name: str) -> NDArray[Any]:
    texts = [isinstance(value, str) for value in values.tolist()]
    if all(texts):
        return values
    if any(texts):
        raise ValueError(f"{name} has both text and {values.tolist()[texts.index(False)]!r}: give one kind")
    return np.array(values.tolist())
