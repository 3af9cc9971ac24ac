"""Tables: CSV and Parquet files, pandas, polars and Arrow frames. A row is a sample, a column a feature."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.federation import Source
from fedcpsl.data.texts import coded, in_order, merged
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.progress import track

TABLE_FILES = (".csv", ".tsv", ".parquet")
TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no", "")


class Columns(NamedTuple):
    """The columns that are not features: the label (empty: unlabelled), who holds the row, and whether it is a test."""

    label: str
    device: str = ""
    test: str = ""


def read_table(path: Path, columns: Columns) -> Source:
    """A CSV or Parquet file, read piece by piece."""
    with _readable(path):
        return _source(*_open(path, columns), columns)


def column_names(path: Path) -> list[str]:
    """All columns of a file, in its order."""
    with _readable(path):
        return _names(_parquet_names(path)) if _is_parquet(path) else _header(path)


class Rows(NamedTuple):
    """Rows for a model that is trained already."""

    x: NDArray[np.float32]  # [rows, features], in the order of training
    label: list[str] | None  # "" where a row has none; None without a label column


def read_rows(path: Path, features: Sequence[str], columns: Columns) -> Rows:
    """A file with the features of training, in any order; of `columns`, the label is read and the others left out."""
    names = column_names(path)
    with _readable(path):
        _check_features(names, features, columns)
        there = Columns(*(name if name in names else "" for name in columns))
        x, labels, rows = [], list[Any](), 0
        for batch in _open(path, there)[1]:
            x.append(_features(batch, list(features), rows))
            if there.label:
                labels.append(coded(batch.column(there.label)))
            rows += batch.num_rows
        if rows == 0:
            raise InputError("the table is empty: it has no rows")
        if not there.label:
            return Rows(_joined(x), None)
        codes, texts = merged(labels)
        return Rows(_joined(x), [texts[code] if code >= 0 else "" for code in codes.tolist()])


def _check_features(names: list[str], features: Sequence[str], columns: Columns) -> None:
    missing = [name for name in features if name not in names]
    unknown = [name for name in names if name not in features and name not in columns]
    if missing:
        near = f"; {did_you_mean(missing[0], unknown)}" if unknown else ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"has no column {missing[0]!r}{more}, which the model was trained on{near}")
    if unknown:
        raise InputError(f"has the column {unknown[0]!r}, which the model was not trained on; leave it out")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors with the file's name."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    arrow = _arrow(str(path))
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (arrow.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {_in_words(error, path)}") from error


def _in_words(error: Exception, path: Path) -> str:
    """What went wrong, with the column's name where pyarrow counts columns from 0."""
    found = re.search(r"In CSV column #(\d+): (?:Row #(\d+): )?.* invalid value '(.*)'", str(error))
    if found:
        number, row, value = found.groups()
        where = f" in row {int(row) - 1}" if row else ""
        return f"column {_header(path)[int(number)]!r} has {value!r}{where}, not a number: encode it, or leave it out"
    return f"cannot be read as a table: {' '.join(str(error).split())}; write it again"


def frame_source(frame: Any, columns: Columns) -> Source:
    """A pandas, polars or Arrow table."""
    arrow = _arrow("a frame")
    if isinstance(frame, dict) or not (hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "__dataframe__")):
        raise InputError(f"a {type(frame).__name__} is not a table: give a pandas, polars or Arrow frame")
    try:
        if type(frame).__module__.startswith("pandas"):
            table = arrow.Table.from_pandas(
                frame, preserve_index=False
            )  # a shuffled frame's row numbers are no feature
        else:
            table = arrow.table(frame)
        return _source(_names(table.schema.names), table.to_batches(), columns)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"the frame cannot be read: {' '.join(str(error).split())}") from error


def _arrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"{what}: reading tables needs pyarrow; pip install 'fedcpsl[tables]'") from None
    return pyarrow


def _open(path: Path, columns: Columns) -> tuple[list[str], Iterable[Any]]:
    return _open_parquet(path) if _is_parquet(path) else _open_csv(path, columns)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _parquet_names(path: Path) -> list[str]:
    from pyarrow.parquet import read_schema

    names: list[str] = read_schema(path).names
    return names


def _open_parquet(path: Path) -> tuple[list[str], Iterable[Any]]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    return _names(file.schema_arrow.names), file.iter_batches(batch_size=1 << 16)


def _open_csv(path: Path, columns: Columns) -> tuple[list[str], Iterable[Any]]:
    """Features are read as numbers from the first row to the last; nothing is guessed from the first rows."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    names = _header(path)
    _check_columns(names, columns)  # before a device's name is taken for a number
    texts = {name for name in columns if name}
    types = {name: pa.string() if name in texts else pa.float32() for name in names}
    convert = arrow_csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
    parse = arrow_csv.ParseOptions(delimiter=_delimiter(path), newlines_in_values=False)
    return names, arrow_csv.open_csv(
        path, read_options=arrow_csv.ReadOptions(block_size=8 << 20), parse_options=parse, convert_options=convert
    )


def _header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        names = next(csv.reader(file, delimiter=_delimiter(path)), [])
    if not names:
        raise InputError("the file is empty: give a header with the columns' names, then a row per sample")
    return _names(names)


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _names(names: Sequence[str]) -> list[str]:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputError(f"column {twice[0]!r} stands there twice; rename one")
    return list(names)


def _source(names: list[str], batches: Iterable[Any], columns: Columns) -> Source:
    _check_columns(names, columns)
    features = [name for name in names if name not in columns]
    if not features:
        raise InputError("has no feature columns: all its columns are label, device or test")
    x: list[NDArray[np.float32]] = []
    texts: dict[str, list[Any]] = {name: [] for name in columns if name}
    rows = 0
    for batch in track(batches, "reading rows"):
        x.append(_features(batch, features, rows))
        for name, parts in texts.items():
            parts.append(coded(batch.column(name)))
        rows += batch.num_rows
    if rows == 0:
        raise InputError("the table is empty: it has no rows")
    y, class_names = _labels(*merged(texts[columns.label]), columns.label)
    source = Source(_joined(x), y, class_names, features=tuple(features))
    if columns.device:
        codes, found = merged(texts[columns.device])
        if (codes < 0).any():
            row = int(np.flatnonzero(codes < 0)[0])
            raise InputError(f"column {columns.device!r} is empty in row {row + 1}: name the device of every row")
        names_in_order, place = in_order(found)
        source = source._replace(device=place[codes], names=tuple(names_in_order))
    if columns.test:
        source = source._replace(test=_truth(*merged(texts[columns.test]), columns.test))
        assert source.test is not None
        if (source.test & (y < 0)).any():
            row = int(np.flatnonzero(source.test & (y < 0))[0])
            raise InputError(f"row {row + 1} is a test and has no label: test rows need one")
    return source


def _check_columns(names: list[str], columns: Columns) -> None:
    flags = ("--label", "--device-column", "data.test_column")
    named = [name for name in columns if name]
    if len(set(named)) < len(named):
        raise InputError(
            f"one column is named twice ({', '.join(named)}): label, device and test are columns of their own"
        )
    for flag, name in zip(flags, columns, strict=True):
        if name and name not in names:
            raise InputError(f"has no column {name!r} ({flag}); {did_you_mean(name, names)}")


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


def _labels(codes: NDArray[np.int64], texts: list[str], column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers and names; empty is unlabelled, and so is -1."""
    used = [text for i, text in enumerate(texts) if text not in ("", "-1") and (codes == i).any()]
    if not used:
        raise InputError(f"column {column!r} has no label in any row: give some labels")
    class_names, place = in_order(used)
    number = dict(zip(used, place.tolist(), strict=True))
    table = np.array([number.get(text, -1) for text in texts] + [-1], np.int64)
    return table[codes], tuple(class_names)


def _truth(codes: NDArray[np.int64], texts: list[str], column: str) -> NDArray[np.bool_]:
    wrong = [text for text in texts if text.lower() not in TRUE + FALSE]
    if wrong:
        raise InputError(f"column {column!r} has {wrong[0]!r}: give 0 or 1, true or false")
    return np.array([text.lower() in TRUE for text in texts] + [False])[codes]
