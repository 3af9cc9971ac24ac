"""Files and folders written atomically (completely or not at all), digests and locks: for every module that writes.

Tensors are saved as safetensors files with a checksum of their content. Importing this module does not import torch.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedcpsl.errors import InputError, RunError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_DIGITS = 19  # of a whole number in a file that is read
CHUNK_BYTES = 1 << 22  # of selected rows gathered at a time, and written between two calls of `release`
SAFETENSORS_TYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def write_whole(path: Path, content: bytes | str | Iterable[Any], *, private: bool = False) -> None:
    """Replace a file atomically: after a crash it holds the old content or the new one, never a part.

    The content may be an iterable of bytes, so that only one piece is in memory at a time. A private file can be read
    by its owner only, also while it is being written.
    """
    raw = content.encode() if isinstance(content, str) else content
    pieces: Iterable[Any] = [raw] if isinstance(raw, bytes) else raw
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb", opener=_open_private if private else None) as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RunError(f"{path}: cannot be written: {error.strerror}; what was there before is intact") from error


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # a file left by a crash may be readable by others
    return descriptor


def append_line(path: Path, line: str) -> None:
    """Append one line, and wait until it is on disk; if that fails, the file is restored to its former length."""
    append_text(path, line + "\n", sync=True)


def append_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Append whole lines; if they cannot be written completely, the file is restored to its former length."""
    raw = text.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        before = os.lseek(descriptor, 0, os.SEEK_END)
        try:
            written = os.write(descriptor, raw)
            if written < len(raw):
                raise OSError(28, os.strerror(28))
            if sync:
                os.fsync(descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            raise RunError(f"{path}: cannot be written: {error.strerror}; its earlier lines are intact") from error
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Wait until what was appended to a file is on disk; nothing where there is no file."""
    if path.exists():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Create a folder and its missing parents, and flush their names to disk.

    A private folder can be entered by its owner only; if it exists already, its permissions are restricted.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        if private and os.name == "posix" and folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
        for each in missing:
            _sync_folder(each.parent)
    except OSError as error:
        raise RunError(f"{folder}: cannot be made: {error.strerror}; give a folder that can be written to") from error


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. InputError if it is damaged, FileNotFoundError if it does not exist."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: also text that is not UTF-8
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error


def parse_json(text: str) -> Any:
    """Parse JSON; ValueError if it is malformed, nested too deeply or has a whole number of too many digits."""
    try:
        return json.loads(text, parse_int=_plain_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def sha256_of(content: bytes | str) -> str:
    """Return the SHA-256 digest as hexadecimal digits."""
    return sha256(content.encode() if isinstance(content, str) else content).hexdigest()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder atomically: the caller fills a temporary one, which is then renamed to `folder`.

    After a crash the folder is complete or does not exist. FileExistsError if it exists already. Temporary folders of
    processes that have ended are removed.
    """
    for old in folder.parent.glob(f".{folder.name}.partial-*"):
        if not Path(f"/proc/{old.name.rpartition('-')[2]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    if os.path.lexists(folder):
        raise FileExistsError(folder)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
        _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def to_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; InputError if another process holds the lock. A crash releases it."""
    if os.name != "posix":
        yield
        return
    import fcntl

    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another process is working on this run; wait for it or stop it") from None
        yield


class SelectedRows(NamedTuple):
    """Rows of a tensor that are saved as one tensor; they are gathered a few at a time."""

    tensor: "Tensor"
    rows: "Tensor"  # row numbers, on the same device

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), *self.tensor.shape[1:]

    @property
    def dtype(self) -> "torch.dtype":
        return self.tensor.dtype


def save_tensors(
    path: Path,
    tensors: "Mapping[str, Tensor | SelectedRows]",
    numbers: dict[str, int],
    release: Callable[[], None] | None = None,
    *,
    private: bool = False,
) -> None:
    """Write tensors and a few numbers as one safetensors file with a checksum.

    `release` is called every few megabytes: it may unload pages of tensors that are mapped from disk.
    """
    placed, end = {}, 0
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
    for name in names:
        t = tensors[name]
        begin, end = end, end + prod(t.shape) * t.dtype.itemsize
        placed[name] = {"dtype": SAFETENSORS_TYPES[str(t.dtype)], "shape": list(t.shape), "data_offsets": [begin, end]}
    about = {"numbers": numbers, "sha256": _digest(tensors, numbers, release)}
    header = json.dumps({"__metadata__": {"fedcpsl": json.dumps(about)}} | placed).encode()
    header += b" " * (-len(header) % 8)

    def content() -> Iterator[Any]:
        yield len(header).to_bytes(8, "little") + header
        for name in names:
            yield from _pieces(tensors[name])

    write_whole(path, _with_release(content(), release), private=private)


def read_numbers(path: Path) -> dict[str, Any]:
    """Return the numbers in a file that `save_tensors` wrote, without reading its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["fedcpsl"])["numbers"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: corrupt ({error}); {_advice(path)}") from error


def load_tensors(path: Path, *, mapped: bool = False) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Return the tensors and numbers that `save_tensors` wrote; RunError if the file was changed since.

    `mapped`: they stay in the file until they are copied. Do not compute with these: where the file has them they are
    aligned otherwise than in memory, and products of matrices are then rounded otherwise.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("fedcpsl", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path}: corrupt ({error}); {_advice(path)}") from error
    if "sha256" not in about:
        raise RunError(f"{path}: not written by this version of fedcpsl; {_advice(path)}")
    if _digest(tensors, about["numbers"]) != about["sha256"]:
        raise RunError(f"{path}: corrupt (its checksum does not match its content); {_advice(path)}")
    return tensors if mapped else {name: t.clone() for name, t in tensors.items()}, about["numbers"]


def _advice(path: Path) -> str:
    """Return what to do about a corrupt file: if it is a checkpoint, there may be an older one."""
    others = [other.name for other in path.parent.glob("round-*.safetensors") if other.name < path.name]
    return f"move it away to resume from {max(others)}" if others else "move it away to start over"


def _pieces(tensor: "Tensor | SelectedRows") -> Iterator[Any]:
    """Yield a tensor's bytes, a piece at a time."""
    import torch

    if not prod(tensor.shape):
        return
    if isinstance(tensor, SelectedRows):
        step = max(1, CHUNK_BYTES * len(tensor.rows) // (prod(tensor.shape) * tensor.dtype.itemsize))
        for rows in tensor.rows.split(step):
            yield from _pieces(tensor.tensor.index_select(0, rows))
    else:
        flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))  # one number may have any stride
        yield flat.view(torch.uint8).numpy().data


def _with_release(pieces: Iterable[Any], release: Callable[[], None] | None) -> Iterator[Any]:
    """Yield the pieces, and call `release` every CHUNK_BYTES."""
    read = 0
    for piece in pieces:
        yield piece
        read += len(piece)
        if release and read >= CHUNK_BYTES:
            release()
            read = 0


def _digest(
    tensors: "Mapping[str, Tensor | SelectedRows]", numbers: dict[str, int], release: Callable[[], None] | None = None
) -> str:
    def content() -> Iterator[Any]:
        yield json.dumps(numbers).encode()
        for name in sorted(tensors):
            yield f"{name}{tensors[name].dtype}{list(tensors[name].shape)}".encode()
            yield from _pieces(tensors[name])

    h = sha256()
    for piece in _with_release(content(), release):
        h.update(piece)
    return h.hexdigest()
