"""Columns of text as numbers: labels, who holds a row, and features that are words."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError

WORDS = {"true": 1.0, "yes": 1.0, "t": 1.0, "y": 1.0, "false": 0.0, "no": 0.0, "f": 0.0, "n": 0.0}
MOST_CATEGORIES = 50  # of a column of words that becomes features


def coded(column: Any) -> tuple[NDArray[np.int64], list[str]]:
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


def merged(parts: list[tuple[NDArray[np.int64], list[str]]]) -> tuple[NDArray[np.int64], list[str]]:
    """Codes of pieces of a column as codes of the whole column."""
    known: dict[str, int] = {}
    whole = []
    for codes, texts in parts:
        table = np.array([known.setdefault(text, len(known)) for text in texts] + [-1], np.int64)
        whole.append(table[codes])  # -1 finds the last entry
    return np.concatenate(whole), list(known)


def in_order(texts: list[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Texts in natural order (p2 before p10), and each one's place there."""
    order = sorted(range(len(texts)), key=lambda i: natural(texts[i]))
    place = np.empty(len(texts), np.int64)
    place[order] = np.arange(len(texts))
    return [texts[i] for i in order], place


def natural(text: str) -> tuple[Any, ...]:
    """What to sort a text by: numbers in it by their value, negative ones before all; equal ones by the text itself."""
    negative = re.fullmatch(r"-(\d+)", text)
    if negative:
        return (0, -int(negative.group(1))), (2, text)
    pieces = re.split(r"(\d+)", text)
    return *((1, piece) if k % 2 == 0 else (0, int(piece)) for k, piece in enumerate(pieces) if piece), (2, text)


def encoded(name: str, codes: NDArray[np.int64], texts: list[str]) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """A column of words as numbers: 0 or 1 for true and false, else one column for each word."""
    used = [text for i, text in enumerate(texts) if (codes == i).any()]
    if (
        all(text.lower() in WORDS for text in used)
        and (codes >= 0).all()
        and len({WORDS[t.lower()] for t in used}) == 2
    ):
        values = np.array([WORDS.get(text.lower(), 0.0) for text in texts], np.float32)
        return values[codes][:, None], (name,)
    if len(used) > MOST_CATEGORIES:
        raise InputError(
            f"column {name!r} holds {len(used)} different words, not numbers: encode it as numbers, or leave it out "
            "(--drop)"
        )
    ordered, _ = in_order(used)
    block = np.stack([codes == texts.index(text) for text in ordered], 1).astype(np.float32)
    return block, tuple(f"{name}={text}" for text in ordered)
