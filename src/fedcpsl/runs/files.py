"""Files that are written whole or not at all."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError, RunError

MOST_DIGITS = 19


def write_whole(path: Path, content: bytes | str | Iterable[Any], *, private: bool = False) -> None:
    """Replace `path` in one step: after a crash it holds the old content or the new, never a part.

    The content may come in pieces of bytes, so that no more than a piece is in memory. What is private can be read by
    its owner alone, also while it is written.
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
    os.fchmod(descriptor, 0o600)  # a file that a crash left there may be open to others
    return descriptor


def append_line(path: Path, line: str) -> None:
    """Add one line; where it does not fit, the file is put back as it was."""
    raw = (line + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        before = os.lseek(descriptor, 0, os.SEEK_END)
        try:
            written = os.write(descriptor, raw)
            if written < len(raw):
                raise OSError(28, os.strerror(28))
            os.fsync(descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            raise RunError(f"{path}: cannot be written: {error.strerror}; its earlier lines are intact") from error
    finally:
        os.close(descriptor)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder and those above it where they are missing, and have their names on disk.

    One that is private can be entered by its owner alone; where it is there already, it is closed to others.
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
    """What a JSON file holds; one that is damaged is named. FileNotFoundError where there is none."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # of text that is no UTF-8 too
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error


def parse_json(text: str) -> Any:
    """JSON as we write it; ValueError for anything else, however deep or long its numbers are."""
    try:
        return json.loads(text, parse_int=_plain_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def sha256_of(content: bytes | str) -> str:
    return sha256(content.encode() if isinstance(content, str) else content).hexdigest()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then gets its name in one step: after a crash it is whole or not there.

    FileExistsError where the name is taken. What an earlier crash left is cleared away.
    """
    for left in folder.parent.glob(f".{folder.name}.partial-*"):
        if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
            shutil.rmtree(left, ignore_errors=True)
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
    """JSON that every reader accepts: what is not a finite number becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
