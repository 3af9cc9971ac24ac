"""Tables: CSV and Parquet files, pandas, polars and Arrow frames. A row is a sample, a column a feature."""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.federation import Source
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
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    arrow = _arrow(str(path))
    try:
        opened = _open_parquet(path) if path.suffix.lower() == ".parquet" else _open_csv(path, columns)
        return _source(*opened, columns)
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
            parts.append(_coded(batch.column(name)))
        rows += batch.num_rows
    if rows == 0:
        raise InputError("the table is empty: it has no rows")
    y, class_names = _labels(*_merge(texts[columns.label]), columns.label)
    source = Source(_joined(x), y, class_names)
    if columns.device:
        codes, found = _merge(texts[columns.device])
        if (codes < 0).any():
            row = int(np.flatnonzero(codes < 0)[0])
            raise InputError(f"column {columns.device!r} is empty in row {row + 1}: name the device of every row")
        names_in_order, place = _in_order(found)
        source = source._replace(device=place[codes], names=tuple(names_in_order))
    if columns.test:
        source = source._replace(test=_truth(*_merge(texts[columns.test]), columns.test))
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


def _coded(column: Any) -> tuple[NDArray[np.int64], list[str]]:
    """A column as numbers of its distinct texts, -1 where empty."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.string())).dictionary_decode()
    if pa.types.is_floating(column.type):  # what pandas makes of whole numbers with holes
        column = pa.array(column.to_numpy(zero_copy_only=False), from_pandas=True)  # NaN is a hole too
        column = column.cast(pa.int64()) if _is_whole(column) else column
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    encoded = column.cast(pa.string()).dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    texts = [text.strip() for text in encoded.dictionary.to_pylist()]
    empty = [i for i, text in enumerate(texts) if text == ""]
    codes[np.isin(codes, empty)] = -1
    return codes, texts


def _is_whole(column: Any) -> bool:
    values = column.drop_null().to_numpy(zero_copy_only=False)
    return bool((np.floor(values) == values).all())


def _merge(parts: list[tuple[NDArray[np.int64], list[str]]]) -> tuple[NDArray[np.int64], list[str]]:
    """Codes of pieces of a column as codes of the whole column."""
    known: dict[str, int] = {}
    merged = []
    for codes, texts in parts:
        table = np.array([known.setdefault(text, len(known)) for text in texts] + [-1], np.int64)
        merged.append(table[codes])  # -1 finds the last entry
    return np.concatenate(merged), list(known)


def _in_order(texts: list[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Texts in order (whole numbers by value), and each one's place there."""
    try:
        order = sorted(range(len(texts)), key=lambda i: int(texts[i]))
    except ValueError:
        order = sorted(range(len(texts)), key=lambda i: texts[i])
    place = np.empty(len(texts), np.int64)
    place[order] = np.arange(len(texts))
    return [texts[i] for i in order], place


def _labels(codes: NDArray[np.int64], texts: list[str], column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers and names; empty is unlabelled, and so is -1."""
    used = [text for i, text in enumerate(texts) if text not in ("", "-1") and (codes == i).any()]
    if not used:
        raise InputError(f"column {column!r} has no label in any row: give some labels")
    class_names, place = _in_order(used)
    number = dict(zip(used, place.tolist(), strict=True))
    table = np.array([number.get(text, -1) for text in texts] + [-1], np.int64)
    return table[codes], tuple(class_names)


def _truth(codes: NDArray[np.int64], texts: list[str], column: str) -> NDArray[np.bool_]:
    wrong = [text for text in texts if text.lower() not in TRUE + FALSE]
    if wrong:
        raise InputError(f"column {column!r} has {wrong[0]!r}: give 0 or 1, true or false")
    return np.array([text.lower() in TRUE for text in texts] + [False])[codes]
