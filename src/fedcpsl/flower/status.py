"""A server's status file. Imports nothing heavy."""

import json
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError


def read_status(folder: Path) -> dict[str, Any]:
    """The last status of a server's folder."""
    path = folder / "status.json"
    try:
        status: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is a server running in that folder?") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return status
