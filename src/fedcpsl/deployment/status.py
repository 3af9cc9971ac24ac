"""A server's status: its file, and the part of it that may be read from elsewhere. Imports nothing heavy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError

OPERATOR, DEVICE = "operator", "device/"  # who asks; the latter with a device's name after it
SHOWN = ("round", "rounds", "over", "updated", "waiting_for")
SHOWN_OF_DEVICES = ("name", "labelled", "unlabelled", "online", "last_counted", "accuracy")
LATE = "late, or its answer was refused"


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


def shown_part(status: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """The rounds, and of every device (or of one alone) its name, counts, lateness and the accuracy that it shares."""
    devices = [each for each in status["devices"] if device in (None, each["name"])]
    return {name: status[name] for name in SHOWN} | {
        "privacy": None,
        "devices": [
            {name: each[name] for name in SHOWN_OF_DEVICES} | {"problem": LATE if each["problem"] else None}
            for each in devices
        ],
        "strangers": {name: LATE for name in status["strangers"] if device in (None, name)},
    }
