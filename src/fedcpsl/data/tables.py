"""Tables: CSV and Parquet files, pandas, polars and Arrow frames. A row is a sample, a column a feature."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.categorical import in_order, merged
from fedcpsl.data.csv_files import batches_of, check_words, header_of, is_number, kind_of, not_a_number
from fedcpsl.data.federation import Source
from fedcpsl.data.notes import is_missing, note, note_classes, note_columns, note_inputs
from fedcpsl.data.table_rows import Table, table_of
from fedcpsl.errors import InputError, did_you_mean

TABLE_FILES = (".csv", ".tsv", ".parquet")
TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no", "")


class Columns(NamedTuple):
    """The columns that are not features: the label (empty: unlabelled), who holds the row, and whether it is a test."""

    label: str
    device: str = ""
    test: str = ""


class Choices(NamedTuple):
    """What else was decided about a table."""

    drop: tuple[str, ...] = ()  # columns that are left out; #2 is the second
    missing_is_class: bool = False  # whether NA, null, ? and the like are classes


AS_IT_IS = Choices()


def is_table(path: Path) -> bool:
    return kind_of(path) in TABLE_FILES


def read_table(path: Path, columns: Columns, choices: Choices = AS_IT_IS) -> Source:
    """A CSV or Parquet file, read piece by piece."""
    with _readable(path):
        return _read(
            path,
            columns,
            lambda names, words, batches: _source(names, words, batches, columns, choices, path.name),
            choices,
        )


def column_names(path: Path) -> list[str]:
    """All columns of a file, in its order."""
    with _readable(path):
        return _names(_parquet_names(path)) if _is_parquet(path) else _names(header_of(path))


class Rows(NamedTuple):
    """Rows for a model that is trained already."""

    x: NDArray[np.float32]  # [rows, features], in the order of training
    label: list[str] | None  # "" where a row has none; None without a label column
    device: list[str] | None  # the same for who holds a row


def read_rows(path: Path, features: Sequence[str], columns: Columns) -> Rows:
    """A file with the features of training, in any order; of `columns`, the label and the device are read."""
    with _readable(path):
        names = column_names(path)
        there = Columns(*(name if name in names else "" for name in columns))
        wanted = set(_without_categories(features, names))
        dropped = tuple(name for name in names if name not in wanted and (not name or name not in columns))

        def read(names: list[str], words: list[str], batches: Iterable[Any]) -> Rows:
            table = table_of(names, words, batches, there)
            label, device = (_cells(table, column) if column else None for column in (there.label, there.device))
            known = label and ["" if is_missing(text) else text for text in label]
            return Rows(_as_trained(table, features), known, device)

        _check_features(names, wanted, columns, dropped)
        return _read(path, there, read, Choices())


def _cells(table: Table, column: str) -> list[str]:
    """A column's words, empty where there is none."""
    codes, texts = merged(table.texts[column])
    return [texts[code] if code >= 0 else "" for code in codes.tolist()]


def _without_categories(features: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns that features were made of: column=value came of a column of words."""
    known = set(names)
    return [name if name in known or "=" not in name else name.partition("=")[0] for name in features]


def _as_trained(table: Table, features: Sequence[str]) -> NDArray[np.float32]:
    """The features of training, in their order; a word that training did not have is refused."""
    trained, made = set(features), dict(zip(table.features, range(len(table.features)), strict=True))
    for name in table.features:
        if name not in trained:
            column, _, value = name.partition("=")
            raise InputError(f"column {column!r} has {value!r}, which the model was not trained on")
    nothing = np.zeros(len(table.x), np.float32)
    return np.stack([table.x[:, made[name]] if name in made else nothing for name in features], 1)


def _check_features(names: list[str], features: set[str], columns: Columns, unknown: Sequence[str]) -> None:
    missing = sorted(name for name in features if name not in names and name not in columns)
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
    found = not_a_number(error)
    if found:
        where = f" in row {found.row}" if found.row else ""
        name = header_of(path)[found.column]
        return f"column {name!r} has {found.value!r}{where}, not a number: mend it, encode it, or leave it out (--drop)"
    return f"cannot be read as a table: {' '.join(str(error).split())}; write it again"


def frame_source(frame: Any, columns: Columns, choices: Choices = AS_IT_IS) -> Source:
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
        names = _names(table.schema.names)
        return _source(names, _words(table.schema, columns), table.to_batches(), columns, choices, "the frame")
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"the frame cannot be read: {' '.join(str(error).split())}") from error


def _arrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"{what}: reading tables needs pyarrow; pip install 'fedcpsl[tables]'") from None
    return pyarrow


Use = Callable[[list[str], list[str], Iterable[Any]], Any]  # of columns, those of words, and rows piece by piece


def _read(path: Path, columns: Columns, use: Use, choices: Choices) -> Any:
    """What `use` makes of a file's rows. A column with a cell that is no number is read again as words."""
    import pyarrow as pa

    if _is_parquet(path):
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(path)
        names = _names(file.schema_arrow.names)
        return use(names, _words(file.schema_arrow, columns), file.iter_batches(batch_size=1 << 16))
    names = _names(header_of(path))
    _check_columns(names, columns)  # before a device's name is taken for a number
    texts, dropped = {name for name in columns if name}, set(_dropped(names, choices))
    words: list[str] = []
    while True:
        try:
            return use(names, words, batches_of(path, names, texts | dropped | set(words)))
        except pa.ArrowInvalid as error:
            found = not_a_number(error)
            if found is None or names[found.column] in words or is_number(found.value) or not found.value.strip():
                raise
            words.append(names[found.column])
            check_words(path, names, words[-1])


def _words(schema: Any, columns: Columns) -> list[str]:
    """The columns of words of a table that knows its types, but for those that are no features."""
    import pyarrow as pa

    def of_words(kind: Any) -> bool:
        return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)

    return [field.name for field in schema if of_words(field.type) and (not field.name or field.name not in columns)]


def _dropped(names: Sequence[str], choices: Choices) -> list[str]:
    """The columns that are left out, by name or by number."""
    found = []
    for drop in choices.drop:
        number = drop[1:] if drop.startswith("#") and drop not in names else ""
        name = names[int(number) - 1] if number.isdigit() and 0 < int(number) <= len(names) else drop
        if name not in names:
            raise InputError(f"has no column {drop!r} (--drop); {did_you_mean(drop, names)}")
        found.append(name)
    return found


def _is_parquet(path: Path) -> bool:
    return kind_of(path) == ".parquet"


def _parquet_names(path: Path) -> list[str]:
    from pyarrow.parquet import read_schema

    names: list[str] = read_schema(path).names
    return names


def _names(names: Sequence[str]) -> list[str]:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputError(f"column {twice[0]!r} stands there twice; rename one")
    return list(names)


def _source(
    names: list[str], words: Sequence[str], batches: Iterable[Any], columns: Columns, choices: Choices, where: str
) -> Source:
    _check_columns(names, columns)
    x, features, texts = table_of(names, words, batches, columns, _dropped(names, choices))
    note_columns(where, features, x, names)
    note_inputs(where, x, features)
    y, class_names = _labels(*merged(texts[columns.label]), columns.label, choices, where)
    source = Source(x, y, class_names, features=features)
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
    flags = ("--label", "--device-column", "--test-column")
    named = [name for name in columns if name]
    if len(set(named)) < len(named):
        raise InputError(
            f"one column is named twice ({', '.join(named)}): label, device and test are columns of their own"
        )
    for flag, name in zip(flags, columns, strict=True):
        if name and name not in names:
            raise InputError(f"has no column {name!r} ({flag}); {did_you_mean(name, names)}")


def _labels(
    codes: NDArray[np.int64], texts: list[str], column: str, choices: Choices, where: str
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers and names; empty is unlabelled, and so are -1 and words such as NA, unless these are classes."""
    there = [text for i, text in enumerate(texts) if text not in ("", "-1") and (codes == i).any()]
    used = [text for text in there if choices.missing_is_class or not is_missing(text)]
    if not used:
        raise InputError(f"column {column!r} has no label in any row: give some labels")
    left = [text for text in there if text not in used]
    if left:
        rows = int(np.isin(codes, [texts.index(text) for text in left]).sum())
        called = ", ".join(map(repr, left))
        note(
            f"{where}: {rows} rows with {called} in column {column!r} are read as unlabelled; where that is a class, "
            "give --set data.missing_labels=class"
        )
    class_names, place = in_order(used)
    note_classes(where, class_names)
    number = dict(zip(used, place.tolist(), strict=True))
    table = np.array([number.get(text, -1) for text in texts] + [-1], np.int64)
    return table[codes], tuple(class_names)


def _truth(codes: NDArray[np.int64], texts: list[str], column: str) -> NDArray[np.bool_]:
    wrong = [text for text in texts if text.lower() not in TRUE + FALSE]
    if wrong:
        raise InputError(f"column {column!r} has {wrong[0]!r}: give 0 or 1, true or false")
    return np.array([text.lower() in TRUE for text in texts] + [False])[codes]
