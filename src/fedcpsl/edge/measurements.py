"""Reading one's own measurements: where devices are, when they are there, what they can do. CSV files, checked."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.radio import Numbers
from fedcpsl.errors import InputError, did_you_mean

COORDINATES, DISTANCE = ("device", "x", "y"), ("device", "distance")
INTERVALS = ("device", "start", "end")
MOST_LISTED = 100  # devices up to which a message may list all of them
CAPACITIES = ("device", "seconds_per_sample", "up_mbit", "down_mbit")


class Trace(NamedTuple):
    """When devices are there: intervals of all devices, in order, each device's in one piece."""

    first: NDArray[np.int64]  # [devices + 1]: where a device's intervals begin
    start: Numbers
    end: Numbers
    before: Numbers  # seconds that the device was there before the interval


class Capacities(NamedTuple):
    """What devices can do, [devices] each; NaN: not measured."""

    seconds_per_sample: Numbers
    up: Numbers  # bits a second
    down: Numbers


def rows_of(path: Path, setting: str, kinds: Sequence[Sequence[str]]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file by column, with their line; its columns must be one of some kinds."""
    listed = " or ".join(",".join(kind) for kind in kinds)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            columns = [name.strip() for name in table.fieldnames or ()]
            if not any(set(kind) <= set(columns) for kind in kinds):
                raise InputError(f"{setting} = {str(path)!r}: its first line must name the columns {listed}")
            table.fieldnames = columns
            for row in table:
                if None in row:
                    raise InputError(f"{path}, line {table.line_num}: has more cells than the {len(columns)} columns")
                yield table.line_num, {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
    except FileNotFoundError:
        raise InputError(f"{setting} = {str(path)!r}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{setting} = {str(path)!r}: cannot be read as CSV ({error})") from error


def device_number(names: Mapping[str, int], row: Mapping[str, str], where: str) -> int:
    """The number of the device that a row is about."""
    if row["device"] not in names:
        few = len(names) <= MOST_LISTED
        hint = did_you_mean(row["device"], list(names)) if few else "see the names that `fedcpsl data` shows"
        raise InputError(f"{where}: device {row['device']!r} is not among the {len(names)} devices; {hint}")
    return names[row["device"]]


def number(row: Mapping[str, str], column: str, where: str, low: float = -np.inf) -> float:
    """A number of a row, checked."""
    try:
        value = float(row[column])
    except (ValueError, KeyError):
        raise InputError(f"{where}: {column} = {row.get(column)!r} is no number; give one") from None
    if not isfinite(value) or value < low:
        raise InputError(f"{where}: {column} = {value:g}; give a number of at least {low:g}")
    return value


def refuse_second(lines: dict[int, int], device: int, line: int, where: str) -> None:
    """Refuse a second row of one device; `lines` has the line of each so far."""
    if device in lines:
        raise InputError(f"{where}: is of the same device as line {lines[device]}; leave one of the two out")
    lines[device] = line


def read_positions(path: Path, names: Mapping[str, int]) -> tuple[Numbers, Numbers]:
    """Where devices are, x and y in metres; a file of distances puts each on the x axis."""
    place, lines = np.full((2, len(names)), np.nan), dict[int, int]()
    for line, row in rows_of(path, "edge.positions", (COORDINATES, DISTANCE)):
        where = f"{path}, line {line}"
        device = device_number(names, row, where)
        refuse_second(lines, device, line, where)
        if "distance" in row:
            place[:, device] = number(row, "distance", where, 0.0), 0.0
        else:
            place[:, device] = number(row, "x", where), number(row, "y", where)
    missing = np.flatnonzero(np.isnan(place[0]))
    if len(missing):
        raise InputError(f"{path}: has no row for device {list(names)[missing[0]]!r}; give one for each device")
    return place[0], place[1]


def read_trace(path: Path, names: Mapping[str, int]) -> Trace:
    """When devices are there; one that has no row never is."""
    found = list(rows_of(path, "edge.trace", (INTERVALS,)))
    if not found:
        raise InputError(f"edge.trace = {str(path)!r}: has no interval, so nobody is ever there; give some")
    devices, start, end = np.zeros(len(found), np.int64), np.zeros(len(found)), np.zeros(len(found))
    for i, (line, row) in enumerate(found):
        where = f"{path}, line {line}"
        devices[i] = device_number(names, row, where)
        start[i], end[i] = number(row, "start", where, 0.0), number(row, "end", where, 0.0)
        if end[i] <= start[i]:
            raise InputError(f"{where}: end {end[i]:g} is not after start {start[i]:g}; swap them or leave it out")
    order = np.lexsort((start, devices))
    lines = np.array([line for line, _ in found])[order]
    devices, start, end = devices[order], start[order], end[order]
    again = devices[1:] == devices[:-1]
    overlap = np.flatnonzero(again & (start[1:] < end[:-1]))
    if len(overlap):
        i = int(overlap[0])
        raise InputError(
            f"{path}, line {lines[i + 1]}: overlaps line {lines[i]} of the same device, {start[i]:g} to {end[i]:g}; "
            "join the two"
        )
    return trace_of(devices, start, end, len(names))


def trace_of(devices: NDArray[np.int64], start: Numbers, end: Numbers, count: int) -> Trace:
    """A trace from intervals that are in order; those that touch are joined."""
    touches = np.concatenate([[False], (devices[1:] == devices[:-1]) & (start[1:] == end[:-1])])
    starts = np.flatnonzero(~touches)
    ends = np.concatenate([starts[1:] - 1, [len(start) - 1]])
    devices, start, end = devices[starts], start[starts], end[ends]
    first = np.searchsorted(devices, np.arange(count + 1))
    passed = np.concatenate([[0.0], np.cumsum(end - start)])
    return Trace(first, start, end, passed[:-1] - passed[first[devices]])


def read_capacities(path: Path, names: Mapping[str, int]) -> Capacities:
    """What devices can do; an empty cell is not measured."""
    found, lines = np.full((3, len(names)), np.nan), dict[int, int]()
    for line, row in rows_of(path, "edge.capacities", (CAPACITIES,)):
        where = f"{path}, line {line}"
        device = device_number(names, row, where)
        refuse_second(lines, device, line, where)
        for i, column in enumerate(CAPACITIES[1:]):
            if row[column]:
                value = number(row, column, where, 0.0)
                if value == 0:
                    raise InputError(f"{where}: {column} = 0; give a number above 0, or leave it empty")
                found[i, device] = value
    return Capacities(found[0], found[1] * 1e6, found[2] * 1e6)
