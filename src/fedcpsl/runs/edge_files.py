"""The files of a run's edge network: a line for every device that a round drew, and one for every device.

Reading them imports nothing heavy.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcpsl.edge.settings import FILES
from fedcpsl.errors import InputError, RunError
from fedcpsl.storage import append_text, sha256_of, write_whole

if TYPE_CHECKING:
    from fedcpsl.edge.settings import Edge
    from fedcpsl.simulation import State

ROUNDS_FILE, DEVICES_FILE = "edge_rounds.csv", "edge_devices.csv"
ROUND_COLUMNS = (
    "round",
    "device",
    "staleness",
    "start",
    "download_seconds",
    "compute_seconds",
    "upload_seconds",
    "steps_planned",
    "steps_done",
    "outcome",
    "compute_joules",
    "radio_joules",
    "bandwidth_hz",
    "outage_probability",
)
DEVICE_COLUMNS = (
    "device",
    "name",
    "x",
    "y",
    "distance",
    "path_loss_db",
    "clock_hz",
    "visits",
    "losses",
    "compute_joules",
    "radio_joules",
    "battery_joules",
)
WHOLE = ("round", "device", "staleness", "steps_planned", "steps_done", "visits", "losses")


def edge_digests(edge: "Edge") -> dict[str, str]:
    """The checksums of the files that the settings of an edge network name."""
    return {name: sha256_of(Path(path).read_bytes()) for name in FILES if (path := getattr(edge, name))}


def check_edge_files(folder: Path, edge: "Edge", known: Mapping[str, Any]) -> None:
    """Raise InputError if a file of an edge network changed since the run began."""
    for name, digest in edge_digests(edge).items():
        if known.get("edge_sha256", {}).get(name) != digest:
            raise InputError(
                f"{folder}: edge.{name}, {getattr(edge, name)}, has changed since the run began; restore it"
            )


def round_lines(state: "State") -> str:
    """The lines of the devices whose part ended in the state's last round."""
    from fedcpsl.edge.state import OUTCOMES, Records

    records = None if state.edge is None else state.edge.records
    if records is None or state.round == 0:
        return ""
    columns: list[list[Any]] = [field.tolist() for field in records]
    columns[Records._fields.index("outcome")] = [OUTCOMES[kind] for kind in records.outcome.tolist()]
    return "".join(f"{state.round},{','.join(map(_shown, row))}\n" for row in zip(*columns, strict=True))


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def append_round(folder: Path, state: "State") -> None:
    """Append a round's lines, the names of the columns first."""
    path, lines = folder / ROUNDS_FILE, round_lines(state)
    if not path.exists():
        lines = ",".join(ROUND_COLUMNS) + "\n" + lines
    if lines:
        append_text(path, lines)


def keep_rounds_until(folder: Path, round: int) -> None:
    """Delete the lines of rounds after `round`, and one that a crash cut short: they will be computed again."""
    path = folder / ROUNDS_FILE
    if not path.exists():
        return
    head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] or [""]
    if tuple(head.split(",")) != ROUND_COLUMNS:
        raise RunError(f"{path}: has not the columns {','.join(ROUND_COLUMNS)}; was it changed by hand? Restore it")
    kept = []
    for number, line in enumerate(lines, 2):
        cells = line.split(",")
        if not cells[0].isdigit():
            raise RunError(f"{path}, line {number}: is not of a round; was it changed by hand? Restore it")
        if int(cells[0]) <= round:
            kept.append(line)
    write_whole(path, "\n".join([head, *kept]) + "\n")


def write_devices(folder: Path, state: "State") -> None:
    """Write edge_devices.csv: where each device is, and what became of it."""
    terms, edge = state.setup.edge, state.edge
    if terms is None or edge is None:
        return
    cell, names = terms.cell, state.setup.terms.names
    battery = edge.battery.tolist() if terms.has_batteries else [""] * terms.devices
    numbers = (cell.x, cell.y, cell.distance, cell.path_loss_db, cell.clock, edge.visits, edge.losses, *edge.joules)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(DEVICE_COLUMNS)
    for i, row in enumerate(zip(*(column.tolist() for column in numbers), battery, strict=True)):
        table.writerow([i, names[i], *map(_shown, row)])
    write_whole(folder / DEVICES_FILE, text.getvalue())


def read_table(path: Path, columns: tuple[str, ...]) -> dict[str, Any] | None:
    """Read one of the two files as arrays by column, text as lists; None where there is none."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            whole = "".join(line for line in file if line.endswith("\n"))
        head, *rows = list(csv.reader(io.StringIO(whole))) or [[]]
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error
    if tuple(head) != columns:
        raise InputError(f"{path}: has not the columns {','.join(columns)}; was it damaged or changed by hand?")
    found: dict[str, Any] = {}
    try:
        by_column = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
        for name, cells in zip(columns, by_column, strict=True):
            if name in ("outcome", "name"):
                found[name] = list(cells)
            else:
                kind = np.int64 if name in WHOLE else np.float64
                found[name] = np.array([kind(cell or "nan") for cell in cells], kind)
    except ValueError as error:
        raise InputError(f"{path}: a cell is no number ({error}); was it damaged or changed by hand?") from None
    return found


def read_rounds(folder: Path) -> dict[str, Any] | None:
    """Read edge_rounds.csv; a last line that is being written is left out."""
    return read_table(folder / ROUNDS_FILE, ROUND_COLUMNS)


def read_devices(folder: Path) -> dict[str, Any] | None:
    """Read edge_devices.csv."""
    return read_table(folder / DEVICES_FILE, DEVICE_COLUMNS)
