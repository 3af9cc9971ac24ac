"""A table's rows as numbers: features that are numbers or words, and other columns as texts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.categorical import coded, encoded, merged
from fedcpsl.data.notes import note
from fedcpsl.errors import InputError
from fedcpsl.progress import track


class Table(NamedTuple):
    """A table's rows: features as numbers, the other columns as texts."""

    x: NDArray[np.float32]
    features: tuple[str, ...]
    texts: dict[str, list[Any]]


def table_of(
    names: list[str], words: Sequence[str], batches: Iterable[Any], columns: Sequence[str], drop: Sequence[str] = ()
) -> Table:
    left_out = {name for name in columns if name} | set(drop)
    features = [name for name in names if name not in left_out]
    numbers = [name for name in features if name not in words]
    categories: dict[str, list[Any]] = {name: [] for name in features if name in words}
    texts: dict[str, list[Any]] = {name: [] for name in columns if name}
    if not features:
        raise InputError("has no feature columns: all its columns are label, device or test")
    x: list[NDArray[np.float32]] = []
    rows = 0
    for batch in track(batches, "reading rows"):
        x.append(_features(batch, numbers, rows))
        for kept in (texts, categories):
            for name, parts in kept.items():
                parts.append(coded(batch.column(name)))
        rows += batch.num_rows
    if rows == 0:
        raise InputError("the table is empty: it has no rows")
    blocks = {name: encoded(name, *merged(parts)) for name, parts in categories.items()}
    joined, named = _joined(x), tuple(numbers)
    for name, (block, made) in blocks.items():
        joined, named = np.concatenate([joined, block], 1), (*named, *made)
        how = "a number, 0 or 1" if made == (name,) else f"{len(made)} column{'s' * (len(made) > 1)} of 0 and 1"
        note(f"column {name!r} holds words: read as {how}")
    return Table(joined, named, texts)


def _features(batch: Any, features: list[str], before: int) -> NDArray[np.float32]:
    """The features of some rows, [rows, features]; text and holes are refused by name."""
    import pyarrow as pa

    block = np.empty((batch.num_rows, len(features)), np.float32)
    for k, name in enumerate(features):
        column = batch.column(name)
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise InputError(f"column {name!r} holds {kind}, not numbers: encode it as numbers, or leave it out")
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(f"column {name!r} is empty in row {before + row + 1}: fill it, or leave the row out")
        block[:, k] = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    if not np.isfinite(block).all():
        row, k = np.argwhere(~np.isfinite(block))[0]
        raise InputError(f"column {features[k]!r} is not a finite number in row {before + row + 1}: fill it")
    return block


def _joined(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """One array of all parts, each given up once it is copied: at no time is everything there twice."""
    joined = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.float32)
    end = len(joined)
    while parts:
        part = parts.pop()
        joined[end - len(part) : end] = part
        end -= len(part)
    return joined
