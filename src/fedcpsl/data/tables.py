"""Tables: CSV and Parquet files, pandas, polars and Arrow frames. A row is a sample, a column a feature.

Text columns become numbers: labels and devices as codes, features as 0 and 1.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.federation import Source, natural_order
from fedcpsl.data.notes import is_missing, note, note_classes, note_columns, note_devices, note_inputs, track
from fedcpsl.data.readers import batches_of, check_text_column, header_of, is_number, kind_of, not_a_number
from fedcpsl.errors import InputError, did_you_mean

TABLE_FILES = (".csv", ".tsv", ".parquet")
TRUTH_VALUES = {"true": 1.0, "yes": 1.0, "t": 1.0, "y": 1.0, "false": 0.0, "no": 0.0, "f": 0.0, "n": 0.0}
MAX_CATEGORIES = 50  # of a text column that becomes features
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no", "")


class Columns(NamedTuple):
    """The columns that are not features: the label (empty: unlabelled), the row's device, whether it is a test."""

    label: str
    device: str = ""
    test: str = ""


class TableOptions(NamedTuple):
    """Other options for reading a table."""

    drop: tuple[str, ...] = ()  # columns that are left out; #2 is the second
    missing_is_class: bool = False  # whether NA, null, ? and the like are classes
    labels_needed: bool = True


DEFAULT_OPTIONS = TableOptions()


def is_table(path: Path) -> bool:
    return kind_of(path) in TABLE_FILES


def read_table(path: Path, columns: Columns, options: TableOptions = DEFAULT_OPTIONS) -> Source:
    """Read a CSV or Parquet file, batch by batch."""
    with _readable(path):
        return _read(
            path,
            columns,
            lambda names, text_columns, batches: _source(names, text_columns, batches, columns, options, path.name),
            options,
        )


def options_of(drop: str, missing_labels: str, *, labels_needed: bool = True) -> TableOptions:
    """Return the options that the settings data.drop and data.missing_labels stand for."""
    dropped = tuple(name.strip() for name in drop.split(",")) if drop else ()
    return TableOptions(dropped, missing_labels == "class", labels_needed)


def column_names(path: Path, columns: Sequence[str] = ()) -> list[str]:
    """Return the names of all columns of a file, in its order; a frame's index only where `columns` name it."""
    with _readable(path):
        return _names(_parquet_schema(path, columns).names if _is_parquet(path) else header_of(path))


def check_columns(path: Path, columns: Columns) -> None:
    """Raise InputError where a file lacks one of these columns; its rows are not read."""
    names = column_names(path, columns)
    with _readable(path):
        _check_columns(names, columns)


class Rows(NamedTuple):
    """Rows of a file for a model that is already trained."""

    x: NDArray[np.float32]  # [rows, features], in the order of training
    label: list[str] | None  # "" if a row has none; None without a label column
    device: list[str] | None  # the same for the row's device


def read_rows(path: Path, features: Sequence[str], columns: Columns, options: TableOptions = DEFAULT_OPTIONS) -> Rows:
    """Read a file that has the features of training, in any order; of `columns`, the label and the device are read.

    Columns that were left out of training are left out if the file has them.
    """
    with _readable(path):
        names = column_names(path, columns)
        present = Columns(*(name if name in names else "" for name in columns))
        wanted = set(_without_categories(features, names))
        dropped = dropped_of(names, options.drop, features)
        unknown = [name for name in names if name not in (*wanted, *dropped) and (not name or name not in columns)]

        def read(names: list[str], text_columns: list[str], batches: Iterable[Any]) -> Rows:
            table = build_table(names, text_columns, batches, present, dropped)
            label, device = (_cells(table, column) if column else None for column in (present.label, present.device))
            known = label and ["" if not options.missing_is_class and is_missing(text) else text for text in label]
            return Rows(features_in_order(table.x, table.features, features), known, device)

        _check_features(names, wanted, columns, unknown)
        words = [name for name in columns_of_words(path, features) if name in names]
        return _read(path, present, read, TableOptions(dropped), words)


def dropped_of(names: Sequence[str], drop: Sequence[str], features: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of another file that were left out of training; the features of training never are."""
    wanted = set(_without_categories(features, names))
    found = (_numbered(names, each) for each in drop)
    return tuple(name for name in found if name in names and name not in wanted)


class TableRows(NamedTuple):
    """A table's rows: features as numbers, the other columns as codes of texts."""

    x: NDArray[np.float32]
    features: tuple[str, ...]
    texts: dict[str, list[Any]]


def _cells(table: TableRows, column: str) -> list[str]:
    """Return a column's texts, empty if a cell has none."""
    codes, texts = merge_names(table.texts[column])
    return [texts[code] if code >= 0 else "" for code in codes.tolist()]


def _without_categories(features: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that the features were made of: column=value comes from a text column."""
    known = set(names)
    return [name if name in known or "=" not in name else name.partition("=")[0] for name in features]


def features_in_order(
    x: NDArray[np.float32], names: Sequence[str], features: Sequence[str], of: str = "the model was not trained on"
) -> NDArray[np.float32]:
    """Return the features of a model in its order; InputError for a column or a text that it does not know.

    A text that it knows, and that no row has, is a feature of zeros.
    """
    wanted, made = set(features), {name: x[:, k] for k, name in enumerate(names)}
    for name in names:
        column, _, value = name.partition("=")
        of_column = [each for each in features if each.startswith(f"{name}=")]
        truths = {each: TRUTH_VALUES.get(each.partition("=")[2].lower()) for each in of_column}
        if column in wanted and value.lower() in TRUTH_VALUES:  # true or false, of which the rows have only one
            made[column] = made.get(column, 0) + TRUTH_VALUES[value.lower()] * made[name]
        elif name not in wanted and truths and None not in truths.values():  # one was empty in training
            made |= {each: (made[name] == truth).astype(np.float32) for each, truth in truths.items()}
        elif name not in wanted:
            what = f"column {column!r} has {value!r}" if value else f"there is a column {name!r}"
            raise InputError(f"{what}, which {of}")
    absent = np.zeros(len(x), np.float32)
    return np.stack([made.get(name, absent) for name in features], 1)


def columns_of_words(path: Path, features: Sequence[str]) -> list[str]:
    """Return the text columns of a file that some of its features, column=value, were made of."""
    columns = set(column_names(path))
    return list(dict.fromkeys(name.partition("=")[0] for name in features if name not in columns))


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
    """Add the file's name to errors."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    arrow = _arrow(str(path))
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (arrow.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {_describe(error, path)}") from error


def _describe(error: Exception, path: Path) -> str:
    """Return what went wrong, with the column's name instead of pyarrow's number."""
    found = not_a_number(error)
    if found:
        where = f" in row {found.row}" if found.row else ""
        name = header_of(path)[found.column]
        return (
            f"column {name!r} has {found.value!r}{where}, not a number: correct it, encode it, or leave it out (--drop)"
        )
    return f"cannot be read as a table: {' '.join(str(error).split())}; write it again"


def frame_source(frame: Any, columns: Columns, options: TableOptions = DEFAULT_OPTIONS) -> Source:
    """Read a pandas, polars or Arrow table."""
    arrow = _arrow("a frame")
    if isinstance(frame, dict) or not (hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "__dataframe__")):
        raise InputError(f"a {type(frame).__name__} is not a table: give a pandas, polars or Arrow frame")
    try:
        if type(frame).__module__.startswith("pandas"):
            table = arrow.Table.from_pandas(
                frame, preserve_index=False
            )  # the index of a shuffled frame is not a feature
        else:
            table = arrow.table(frame)
        names = _names(table.schema.names)
        return _source(names, _text_columns(table.schema, columns), table.to_batches(), columns, options, "the frame")
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"the frame cannot be read: {' '.join(str(error).split())}") from error


def _arrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"{what}: reading tables needs pyarrow; pip install 'fedcpsl[tables]'") from None
    return pyarrow


Use = Callable[[list[str], list[str], Iterable[Any]], Any]  # of all columns, the text columns, and batches of rows


def _read(path: Path, columns: Columns, use: Use, options: TableOptions, words: Sequence[str] = ()) -> Any:
    """Return `use` of a file's rows. A column with a cell that is not a number, or one of `words`, is read as text."""
    import pyarrow as pa

    if _is_parquet(path):
        from pyarrow.parquet import ParquetFile

        file, schema = ParquetFile(path), _parquet_schema(path, columns)
        names = _names(schema.names)
        return use(names, _text_columns(schema, columns), file.iter_batches(batch_size=1 << 16, columns=names))
    names = _names(header_of(path))
    _check_columns(names, columns)  # before a device's name is parsed as a number
    other, dropped = {name for name in columns if name}, set(_dropped(names, options))
    text_columns = list(words)
    while True:
        try:
            return use(names, text_columns, batches_of(path, names, other | dropped | set(text_columns)))
        except pa.ArrowInvalid as error:
            found = not_a_number(error)
            if (
                found is None
                or names[found.column] in text_columns
                or is_number(found.value)
                or not found.value.strip()
            ):
                raise
            text_columns.append(names[found.column])
            check_text_column(path, names, text_columns[-1])


def _text_columns(schema: Any, columns: Columns) -> list[str]:
    """Return the text columns of a typed schema, without those that are not features."""
    import pyarrow as pa

    def is_text(kind: Any) -> bool:
        return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)

    return [field.name for field in schema if is_text(field.type) and (not field.name or field.name not in columns)]


def _dropped(names: Sequence[str], options: TableOptions) -> list[str]:
    """Return the names of the columns to leave out, which are given by name or by number."""
    found = []
    for drop in options.drop:
        name = _numbered(names, drop)
        if name not in names:
            raise InputError(f"has no column {drop!r} (--drop); {did_you_mean(drop, names)}")
        found.append(name)
    return found


def _numbered(names: Sequence[str], drop: str) -> str:
    """Return the name of the column that #2 stands for; any other text is a name itself."""
    number = drop[1:] if drop.startswith("#") and drop not in names else ""
    return names[int(number) - 1] if number.isdigit() and 0 < int(number) <= len(names) else drop


def _is_parquet(path: Path) -> bool:
    return kind_of(path) == ".parquet"


def _parquet_schema(path: Path, columns: Sequence[str] = ()) -> Any:
    """Return a file's schema without the index of a frame, which is no feature; `columns` are kept nevertheless."""
    from pyarrow.parquet import read_schema

    schema = read_schema(path)
    index = [name for name in (schema.pandas_metadata or {}).get("index_columns", []) if isinstance(name, str)]
    left_out = [name for name in index if name in schema.names and name not in columns]
    for name in left_out:
        schema = schema.remove(schema.get_field_index(name))
    return schema


def _names(names: Sequence[str]) -> list[str]:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputError(f"column {twice[0]!r} appears twice; rename one")
    return list(names)


def _source(
    names: list[str],
    text_columns: Sequence[str],
    batches: Iterable[Any],
    columns: Columns,
    options: TableOptions,
    where: str,
) -> Source:
    _check_columns(names, columns)
    x, features, texts = build_table(names, text_columns, batches, columns, _dropped(names, options))
    note_columns(where, features, x, names)
    note_inputs(where, x, features)
    y, class_names = np.full(len(x), -1, np.int64), tuple[str, ...]()
    if columns.label:
        y, class_names = _labels(*merge_names(texts[columns.label]), columns.label, options, where)
    source = Source(x, y, class_names, features=features)
    if columns.device:
        codes, found = merge_names(texts[columns.device])
        if (codes < 0).any():
            row = int(np.flatnonzero(codes < 0)[0])
            raise InputError(f"column {columns.device!r} is empty in row {row + 1}: name the device of every row")
        ordered_names, position = natural_order(found)
        note_devices(where, ordered_names, len(y))
        source = source._replace(device=position[codes], names=tuple(ordered_names))
    if columns.test:
        source = source._replace(test=_test_rows(*merge_codes(texts[columns.test]), columns.test))
        assert source.test is not None
        if (source.test & (y < 0)).any():
            row = int(np.flatnonzero(source.test & (y < 0))[0])
            raise InputError(f"row {row + 1} is a test and has no label: give it one, or do not mark it as a test")
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
    codes: NDArray[np.int64], texts: list[str], column: str, options: TableOptions, where: str
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return class numbers and names; empty, -1 and texts such as NA are unlabelled, unless these are classes."""
    present = [text for i, text in enumerate(texts) if text not in ("", "-1") and (codes == i).any()]
    used = [text for text in present if options.missing_is_class or not is_missing(text)]
    if not used and options.labels_needed:
        raise InputError(f"column {column!r} has no label in any row: give some labels")
    left = [text for text in present if text not in used]
    if left:
        rows = int(np.isin(codes, [texts.index(text) for text in left]).sum())
        called = ", ".join(map(repr, left))
        note(
            f"{where}: {rows} rows with {called} in column {column!r} are read as unlabelled; if that is a class, "
            "give --set data.missing_labels=class"
        )
    class_names, position = natural_order(used)
    number = dict(zip(used, position.tolist(), strict=True))
    table = np.array([number.get(text, -1) for text in texts] + [-1], np.int64)
    y = table[codes]
    note_classes(where, class_names, int((y >= 0).sum()))
    return y, tuple(class_names)


def _test_rows(codes: NDArray[np.int64], texts: list[str], column: str) -> NDArray[np.bool_]:
    wrong = [text for text in texts if text.lower() not in TRUE + FALSE]
    if wrong:
        raise InputError(f"column {column!r} has {wrong[0]!r}: give 0 or 1, true or false")
    return np.array([text.lower() in TRUE for text in texts] + [False])[codes]


def build_table(
    names: list[str],
    text_columns: Sequence[str],
    batches: Iterable[Any],
    columns: Sequence[str],
    drop: Sequence[str] = (),
) -> TableRows:
    left_out = {name for name in columns if name} | set(drop)
    features = [name for name in names if name not in left_out]
    numbers = [name for name in features if name not in text_columns]
    categories: dict[str, list[Any]] = {name: [] for name in features if name in text_columns}
    texts: dict[str, list[Any]] = {name: [] for name in columns if name}
    if not features:
        raise InputError("has no feature columns: all its columns are label, device or test")
    x: list[NDArray[np.float32]] = []
    rows = 0
    for batch in track(batches, "reading rows"):
        x.append(_features(batch, numbers, rows))
        for kept in (texts, categories):
            for name, parts in kept.items():
                parts.append(encode_texts(batch.column(name)))
        rows += batch.num_rows
    if rows == 0:
        raise InputError("the table is empty: it has no rows")
    blocks = {name: one_hot_columns(name, *merge_codes(parts)) for name, parts in categories.items()}
    joined, named = _concatenate(x), tuple(numbers)
    for name, (block, made) in blocks.items():
        joined, named = np.concatenate([joined, block], 1), (*named, *made)
        how = "a number, 0 or 1" if made == (name,) else f"{len(made)} column{'s' * (len(made) > 1)} of 0 and 1"
        note(f"column {name!r} holds text: read as {how}")
    return TableRows(joined, named, texts)


def _features(batch: Any, features: list[str], before: int) -> NDArray[np.float32]:
    """Return the features of a batch, [rows, features]; InputError with the column's name for text and empty cells."""
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


def _concatenate(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Concatenate the parts, and free each once it is copied: memory never holds everything twice."""
    joined = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.float32)
    end = len(joined)
    while parts:
        part = parts.pop()
        joined[end - len(part) : end] = part
        end -= len(part)
    return joined


def encode_texts(column: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Return a column as codes of its distinct texts (-1 if empty), and these texts."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.string())).dictionary_decode()
    if pa.types.is_floating(column.type):  # pandas turns whole numbers with missing values into floats
        column = pa.array(column.to_numpy(zero_copy_only=False), from_pandas=True)  # NaN is missing too
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


def merge_codes(parts: list[tuple[NDArray[np.int64], list[str]]]) -> tuple[NDArray[np.int64], list[str]]:
    """Merge the codes of a column's batches into codes of the whole column."""
    known: dict[str, int] = {}
    whole = []
    for codes, texts in parts:
        table = np.array([known.setdefault(text, len(known)) for text in texts] + [-1], np.int64)
        whole.append(table[codes])  # -1 selects the last entry
    return np.concatenate(whole), list(known)


def merge_names(parts: list[tuple[NDArray[np.int64], list[str]]]) -> tuple[NDArray[np.int64], list[str]]:
    """Merge the codes of a column of names: where all are whole numbers, 1.0, as pandas writes it, is 1."""
    codes, names = merge_codes(parts)
    if all(_WHOLE.fullmatch(name) for name in names if name):
        return merge_codes([(codes, [name.partition(".")[0] for name in names])])
    return codes, names


def one_hot_columns(
    name: str, codes: NDArray[np.int64], texts: list[str]
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return a text column as numbers: 0 or 1 for true and false, else one column for each text."""
    used = [text for i, text in enumerate(texts) if (codes == i).any()]
    if (
        all(text.lower() in TRUTH_VALUES for text in used)
        and (codes >= 0).all()
        and len({TRUTH_VALUES[t.lower()] for t in used}) == 2
    ):
        values = np.array([TRUTH_VALUES.get(text.lower(), 0.0) for text in texts], np.float32)
        return values[codes][:, None], (name,)
    if len(used) > MAX_CATEGORIES:
        raise InputError(
            f"column {name!r} holds {len(used)} different texts, not numbers: encode it as numbers, or leave it out "
            "(--drop)"
        )
    ordered, _ = natural_order(used)
    block = np.stack([codes == texts.index(text) for text in ordered], 1).astype(np.float32)
    return block, tuple(f"{name}={text}" for text in ordered)
