"""CIFAR-10's official batches, binary and Python's, read without executing anything."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickletools import opcodes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.download import PUBLISHED, Published, cache_folder, download_folder
from fedcpsl.errors import InputError

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]

CLASSES = 10
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
TESTS = ("test_batch",)
MEMBERS = (*(f"{name}.bin" for name in (*TRAINING, *TESTS)), "batches.meta.txt")

_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in opcodes}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
# number of items that an instruction takes off the stack; None: all above the last mark
_TAKES: dict[str, int | None] = {
    **dict.fromkeys(("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS")),
    **dict.fromkeys(("TUPLE1", "APPEND", "BUILD"), 1),
    **dict.fromkeys(("TUPLE2", "SETITEM", "STACK_GLOBAL", "REDUCE", "NEWOBJ"), 2),
    "TUPLE3": 3,
}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_OTHERS = {"PROTO", "FRAME", "MARK", "EMPTY_LIST", "EMPTY_DICT", "GLOBAL", "STOP"}
_KNOWN = {*_LITERALS, *_CONSTANTS, *_TAKES, *_PUTS, *_GETS, *_OTHERS}
_NUMPY = ("numpy.core", "numpy._core")  # before and since numpy 2
_FUNCTIONS = {
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
    "__builtin__.bytes",
    "builtins.bytes",
    *(f"{core}.{name}" for core in _NUMPY for name in ("multiarray._reconstruct", "numeric._frombuffer")),
}


@dataclass
class _Call:
    """A function that a pickle names, with its arguments and its state. It is never called."""

    function: str
    arguments: Any = None
    state: Any = None


def read_cifar10(
    folders: Sequence[Path], archive: Published = PUBLISHED["cifar10"]["archive"], batches: Sequence[str] = TRAINING
) -> Batch:
    """Return the 50,000 training images and their classes, or those of other batches.

    They are read from your folders, else from the cache, else downloaded.
    """
    paths = find_batches(folders, batches)
    if not paths:
        folder = download_folder("cifar10", folders, archive, BINARY, MEMBERS)
        paths = [folder / f"{name}.bin" for name in batches]
    contents = [read_binary_batch(path) if path.suffix == ".bin" else read_python_batch(path) for path in paths]
    images, labels = zip(*contents, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def find_batches(folders: Sequence[Path], names: Sequence[str] = TRAINING) -> list[Path]:
    """Return the training or other batches in your folders or the cache; an empty list if they must be downloaded."""
    own = next((paths for folder in folders if (paths := _batches(folder, names))), None)
    if own:
        missing = [path for path in own if not os.path.isfile(path)]
        if missing:
            raise InputError(f"{missing[0]}: no such file, though others of CIFAR-10 are there; unpack them all again")
        return own
    cached = _batches(cache_folder(), names)
    return cached if all(map(os.path.isfile, cached)) else []


def _batches(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the batches' paths in the first subfolder of `folder` that has one of them."""
    own = folder / "cifar10"
    for subfolder in (own / BINARY, own / PYTHON, folder / BINARY, folder / PYTHON, own, folder):
        for suffix in (".bin", ""):
            paths = [subfolder / f"{name}{suffix}" for name in names]
            if any(map(os.path.isfile, paths)):
                return paths
    return []


def read_binary_batch(path: Path) -> Batch:
    """Read a batch of `cifar-10-batches-bin`: per image one byte for its class, then its red, green and blue planes."""
    raw = np.frombuffer(_read(path), np.uint8)
    if len(raw) == 0 or len(raw) % (1 + PIXELS):
        raise InputError(
            f"{path}: its {len(raw)} bytes are not whole images of {1 + PIXELS} bytes; delete it and fetch it again"
        )
    records = raw.reshape(-1, 1 + PIXELS)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise InputError(f"{path}: has class {labels.max()}, CIFAR-10 has 0 to 9; delete it and fetch it again")
    return records[:, 1:].copy().reshape(-1, *SHAPE), labels  # a writable copy


def read_python_batch(path: Path) -> Batch:
    """Read a batch of `cifar-10-batches-py`: a pickle, which is parsed and never executed."""
    raw = _read(path)
    try:
        batch = _interpret(raw)
        if not isinstance(batch, dict) or not {"data", "labels"} <= batch.keys():
            raise ValueError("has no 'data' and 'labels', as a CIFAR-10 batch has")
        images, labels = _pixels(batch["data"]), batch["labels"]
        if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < CLASSES for y in labels):
            raise ValueError("its labels are not classes from 0 to 9")
        if len(labels) != len(images):
            raise ValueError(f"has {len(images)} images but {len(labels)} labels")
    except ValueError as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:200]}; fetch the file again") from error
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: not a CIFAR-10 batch, or a damaged one; fetch the file again") from error
    return images, np.array(labels, np.int64)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make it readable or fetch it again") from error


def _pixels(call: Any) -> NDArray[np.uint8]:
    """Return the images in the array that numpy would rebuild from the pickle."""
    function = call.function if isinstance(call, _Call) else ""
    if function.endswith("._reconstruct"):  # protocols 0 to 4
        _, shape, kind, fortran, content = call.state
        order = "F" if fortran else "C"
    elif function.endswith("._frombuffer"):  # protocol 5
        content, kind, shape, order = call.arguments
    else:
        raise ValueError("its 'data' is not an array")
    if not isinstance(kind, _Call) or kind.function != "numpy.dtype" or _text(kind.arguments[0]) != "u1":
        raise ValueError("its 'data' is not an array of bytes (uint8)")
    if isinstance(content, str):  # Python 2's strings
        content = content.encode("latin-1")
    count, width = shape
    if width != PIXELS or type(count) is not int or count < 1 or len(content) != count * PIXELS:
        raise ValueError(f"its 'data' is not an array of n x {PIXELS}")
    values = np.frombuffer(content, np.uint8).reshape((count, PIXELS), order="F" if order == "F" else "C")
    return np.array(values, order="C").reshape(-1, *SHAPE)


def _interpret(raw: bytes) -> Any:
    """Return the object that a pickle describes, with functions it would call as `_Call`."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for name, argument in _instructions(raw):
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name == "GLOBAL":
            stack.append(_named(*argument))
        elif name in _PUTS:
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _TAKES:
            count = _TAKES[name]
            start = marks.pop() if count is None else len(stack) - count
            items = stack[start:]
            del stack[start:]
            _combine(name, items, stack)
        elif name == "STOP":
            return stack.pop()
    raise ValueError("ends too early")


def _combine(name: str, items: list[Any], stack: list[Any]) -> None:
    """Execute an instruction that combines items taken off the stack into one, or adds them to the item below."""
    if name.startswith("TUPLE"):
        stack.append(tuple(items))
    elif name == "LIST":
        stack.append(items)
    elif name == "DICT":
        stack.append(_pairs(items))
    elif name == "STACK_GLOBAL":
        stack.append(_named(*items))
    elif name in ("REDUCE", "NEWOBJ"):
        stack.append(_called(*items))
    elif name == "BUILD":
        stack[-1].state = items[0]
    elif name in ("SETITEM", "SETITEMS"):
        stack[-1].update(_pairs(items))
    else:
        stack[-1].extend(items)


def _pairs(items: list[Any]) -> dict[str, Any]:
    """Return a dictionary with text keys, whichever Python version wrote them."""
    return {_text(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise ValueError("has a name that is not text")
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _named(module: Any, name: Any) -> _Call:
    function = f"{_text(module)}.{_text(name)}"
    if function not in _FUNCTIONS:
        raise ValueError(f"uses {ascii(function)[1:-1][:80]}, which a CIFAR-10 batch does not")
    return _Call(function)


def _called(function: _Call, arguments: Any) -> Any:
    """Return a call as `_Call`, except for the two ways in which Python 3 writes bytes for Python 2."""
    if function.function == "_codecs.encode":
        text, coding = arguments
        if coding not in ("latin1", "latin-1"):
            raise ValueError("has bytes in another coding than latin1")
        return text.encode("latin-1")
    if function.function.endswith(".bytes") and arguments == ():
        return b""
    return _Call(function.function, arguments)


def _instructions(raw: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the known instructions as pickletools.genops does; protocol 0's strings may have bytes above 127."""
    file = BytesIO(raw)
    while code := file.read(1):
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise ValueError("not a pickle")
        if opcode.name not in _KNOWN:
            raise ValueError(f"uses the pickle instruction {opcode.name}, which a CIFAR-10 batch does not")
        if opcode.name == "STRING":
            yield opcode.name, file.readline().strip()[1:-1].decode("unicode_escape")
        elif opcode.name == "GLOBAL":
            yield opcode.name, (file.readline().rstrip(b"\n"), file.readline().rstrip(b"\n"))
        else:
            yield opcode.name, opcode.arg.reader(file) if opcode.arg else None
