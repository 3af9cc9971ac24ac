"""Reading .npz archives from anywhere, executing nothing."""

import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError


def read_archive(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of an .npz file; anything else is refused with the file's name and what to do."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError(f"{path}: a single array; give an .npz archive, as numpy.savez writes it")
            return {name: _read_array(path, archive, name) for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error) as error:
        why = "" if isinstance(error, ValueError) else f" ({error})"  # numpy's words there would advise pickle
        raise InputError(f"{path}: not a readable .npz archive{why}; write it again with numpy.savez") from error


def _read_array(path: Path, archive: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = archive[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise InputError(f"{path}: {name} is an array of Python objects; give it as numbers") from error
    return array
