"""The pictures of an edge network: rounds as timelines, and the cell with its devices; assets/sections.html draws."""

from collections.abc import Iterable, Mapping, Sequence
from json import dumps
from math import hypot
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.settings import NONE, Edge
from fedcpsl.report.charts import ticks
from fedcpsl.report.loaded_runs import LoadedRun, RunSet
from fedcpsl.report.tables import duration, joules
from fedcpsl.runs.edge_files import read_devices, read_rounds

MAX_CELLS = 6  # whose pictures a page has
MAX_LANES = 24  # of a timeline
MAX_RECORDS = 2000  # of devices in rounds to choose from: about 100 kB of a page
MAX_PLACES = 300  # of a map
MAX_NAMED = 40  # devices of a map that has their names
PARTS = ("download", "compute", "upload")
MEANINGS = {
    "counted": "its upload was counted",
    "lost": "the channel lost its upload",
    "late": "its upload came after those that were needed",
    "dropped": "it could not make its steps in time",
    "left": "it left before its upload had ended",
    "battery": "its battery ran out",
    "idle": "it made no step",
}
Columns = Mapping[str, Any]


class Bar(NamedTuple):
    """What a device does for some time; places in % of the timeline."""

    kind: str
    left: str
    width: str


class Lane(NamedTuple):
    """A device's part of a round."""

    name: str
    bars: list[Bar]
    outcome: str
    said: str
    tip: str


class Timeline(NamedTuple):
    """A round: who downloads, computes and sends, when, and who is lost."""

    title: str
    description: str
    lanes: list[Lane]
    ticks: list[tuple[str, str]]  # place in %, text
    end: str  # of the round, place in %
    deadline: str  # place in %; empty without one
    left_out: int


class AnyRound(NamedTuple):
    """The rounds that a reader can choose from; assets/page.js draws the chosen one."""

    rounds: str  # JSON: [number, seconds until its end and until the deadline (0: none), left out, lanes] of each;
    # a lane: [device, seconds until it was drawn, of each of PARTS, steps done, planned, outcome, staleness]
    outcomes: str  # JSON: each outcome with its meaning
    names: str  # JSON: of the devices, in order
    first: int
    last: int
    shown: int
    of: int  # rounds that drew somebody


class Place(NamedTuple):
    """A device on the map; places and shares in %."""

    name: str
    left: str
    top: str
    shade: str  # of its accuracy; empty without a test set
    lost: str  # share of its visits
    dark: bool  # whether its shade needs light letters
    tip: str


class Cell(NamedTuple):
    """The devices of a cell around the base station, on rings of equal distance."""

    description: str
    places: list[Place]
    rings: list[tuple[str, str]]  # radius in % of the picture's width, text
    scale: tuple[str, str] | None  # lowest and highest accuracy
    size: str  # of a device's mark: few, some, many
    left_out: int


def pictures_of(run_set: RunSet) -> tuple[list[dict[str, Any]], int]:
    """Return the pictures of a run of every group with an edge network, of many of the first; how many are left out."""
    groups = [group for group in run_set.groups if "edge" in group.runs[0].last]
    found: list[dict[str, Any]] = []
    for group in groups[:MAX_CELLS]:
        run = next((run for run in group.runs if run.finished), group.runs[0])
        pictures = {"timelines": timelines_of(run), "any_round": any_round(run), "cell": cell_of(run)}
        found.append({"name": group.name, "seed": run.seed, **pictures})
    return found, len(groups) - len(found)


def timelines_of(run: LoadedRun) -> list[Timeline]:
    """Return the first round, the one of median length, the longest, and the one that lost most; each of them once."""
    rounds = _rounds(run)
    if not rounds:
        return []
    lengths = np.array([_span(r, run)[1] - _span(r, run)[0] for r in rounds])
    lost = np.array([sum(o not in ("counted", "idle") for o in r["outcome"]) for r in rounds])
    chosen = {0: "the first"}
    chosen.setdefault(int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2]), "of median length")
    chosen.setdefault(int(lengths.argmax()), "the longest")
    if lost.max(initial=0):
        chosen.setdefault(int(lost.argmax()), "most uploads lost")
    names = _names(run)
    return [_timeline(rounds[k], run, which, names) for k, which in sorted(chosen.items())]


def any_round(run: LoadedRun) -> AnyRound | None:
    """Return the rounds to choose from: all, or as many as fit, evenly; nothing where the other pictures have all."""
    rounds = _rounds(run)
    if len(rounds) < 2:
        return None
    lanes = np.mean([min(len(rows["device"]), MAX_LANES) for rows in rounds])
    count = min(len(rounds), max(2, int(MAX_RECORDS / lanes)))
    chosen = np.linspace(0, len(rounds) - 1, count).round().astype(int).tolist()
    names, found = _names(run), [_compact(rounds[k], run) for k in chosen]
    return AnyRound(
        rounds=dumps(found, separators=(",", ":")),
        outcomes=dumps(list(MEANINGS.items())),
        names=dumps(names if names != [str(i) for i in range(len(names))] else []),
        first=found[0][0],
        last=found[-1][0],
        shown=len(found),
        of=len(rounds),
    )


def _compact(rows: Columns, run: LoadedRun) -> list[Any]:
    """Return a round in few characters, as `AnyRound` has it."""
    begin, end = _span(rows, run)
    order, until = np.argsort(_ends(rows), kind="stable").tolist(), run.config.edge.deadline
    shown = order if len(order) <= MAX_LANES else [*order[: MAX_LANES // 2], *order[-MAX_LANES // 2 :]]
    lanes = []
    for i in shown:
        seconds = [rows["start"][i] - begin, *(rows[f"{part}_seconds"][i] for part in PARTS)]
        steps = int(rows["steps_done"][i]), int(rows["steps_planned"][i])
        fate = list(MEANINGS).index(rows["outcome"][i]), int(rows["staleness"][i])
        lanes.append([int(rows["device"][i]), *map(_short, seconds), *steps, *fate])
    return [int(rows["round"][0]), _short(end - begin), 0 if until == NONE else until, len(order) - len(shown), lanes]


def _short(seconds: float) -> float:
    short = float(f"{float(seconds):.4g}")
    return int(short) if short.is_integer() else short


def _rounds(run: LoadedRun) -> list[Columns]:
    """Return the records of each round that drew somebody."""
    rows = read_rounds(run.folder)
    if rows is None or not len(rows["round"]):
        return []
    cuts = np.flatnonzero(np.diff(rows["round"])) + 1
    parts = np.split(np.arange(len(rows["round"])), cuts)
    return [{key: _taken(values, part) for key, values in rows.items()} for part in parts]


def _taken(values: Any, part: NDArray[np.int64]) -> Any:
    return [values[i] for i in part.tolist()] if isinstance(values, list) else values[part]


def _names(run: LoadedRun) -> list[str]:
    """Return the devices' names, in order; none before the run is finished."""
    return [device["name"] for device in run.devices]


def _ends(rows: Columns) -> NDArray[np.float64]:
    ends: NDArray[np.float64] = rows["start"] + sum(rows[f"{part}_seconds"] for part in PARTS)
    return ends


def _span(rows: Columns, run: LoadedRun) -> tuple[float, float]:
    """Return when a round began and ended: with the last upload that was needed, or at the deadline if one is missing.

    With the semi-asynchronous clock it begins with the earliest draw of those whose part ends in it.
    """
    edge, begin, ends = run.config.edge, float(rows["start"].min()), _ends(rows)
    counted = np.array([outcome == "counted" for outcome in rows["outcome"]])
    expected = int((rows["steps_planned"] > 0).sum())
    needed = min(int(run.config.work.active), expected) if edge.extra else expected
    if edge.clock == "semi-async" or counted.sum() >= max(needed, 1):
        return begin, float(ends[counted].max() if counted.any() else ends.max())
    return begin, begin + float(edge.deadline) if edge.deadline != NONE and needed else float(ends.max())


def _timeline(rows: Columns, run: LoadedRun, which: str, names: Sequence[str]) -> Timeline:
    begin, end = _span(rows, run)
    timed = run.config.edge.deadline != NONE
    until = begin + float(run.config.edge.deadline) if timed else end
    length = max(float(_ends(rows).max()), end, until) - begin or 1.0

    def place(seconds: float) -> str:
        return f"{100 * (seconds - begin) / length:.2f}"

    order = np.argsort(_ends(rows), kind="stable").tolist()
    lanes = [_lane(rows, i, names, begin, length) for i in order]
    number, count = int(rows["round"][0]), len(lanes)
    counted = sum(lane.outcome == "counted" for lane in lanes)
    title = f"Round {number}, {which}: {duration(end - begin)}"
    description = (
        f"{title}, from {duration(begin)} of virtual time on. {counted} of {count} uploads are counted. "
        + ". ".join(lane.tip for lane in lanes[:MAX_LANES])
        + "."
    )
    return Timeline(
        title=title,
        description=description,
        lanes=lanes if count <= MAX_LANES else [*lanes[: MAX_LANES // 2], *lanes[-MAX_LANES // 2 :]],
        ticks=[(place(begin + t), f"{t:g} s") for t in ticks(0, length, 6)],
        end=place(end),
        deadline=place(until) if timed else "",
        left_out=max(0, count - MAX_LANES),
    )


def _lane(rows: Columns, i: int, names: Sequence[str], begin: float, length: float) -> Lane:
    device, outcome = int(rows["device"][i]), rows["outcome"][i]
    name = names[device] if device < len(names) else str(device)
    done, planned = int(rows["steps_done"][i]), int(rows["steps_planned"][i])
    at, bars = float(rows["start"][i]) - begin, []
    words = [f"device {name}: {MEANINGS.get(outcome, outcome)}"]
    for part in PARTS:
        seconds = float(rows[f"{part}_seconds"][i])
        if not seconds:
            continue
        failed = " failed" if part == "upload" and outcome != "counted" else ""
        bars.append(Bar(part + failed, f"{100 * at / length:.2f}", f"{100 * seconds / length:.2f}"))
        words.append(f"{part} {duration(seconds)}, from {at:.3g} s to {at + seconds:.3g} s")
        at += seconds
    words.append(f"{done} of {planned} steps")
    if rows["bandwidth_hz"][i]:
        words.append(f"{_hertz(float(rows['bandwidth_hz'][i]))} of the uplink")
    if rows["outage_probability"][i]:
        words.append(f"its upload is lost with {100 * float(rows['outage_probability'][i]):.3g} %")
    energy = joules(float(rows["compute_joules"][i])), joules(float(rows["radio_joules"][i]))
    words.append(f"{energy[0]} to compute, {energy[1]} to send")
    if rows["staleness"][i]:
        words.append(f"drawn {int(rows['staleness'][i])} rounds before")
    part_done = f"{done} of {planned} steps" if outcome == "counted" and done < planned else ""
    return Lane(name, bars, outcome, part_done or outcome, "; ".join(words))


def _hertz(value: float) -> str:
    return f"{value / 1e6:.3g} MHz" if value >= 1e6 else f"{value / 1e3:.3g} kHz" if value >= 1e3 else f"{value:.3g} Hz"


def cell_of(run: LoadedRun) -> Cell | None:
    """Return the map of a finished run's cell."""
    found = read_devices(run.folder)
    if found is None or not len(found["device"]) or not run.devices:
        return None
    accuracy = [float(d["personal"]) if d["personal"] else None for d in run.devices]
    known = [a for a in accuracy if a is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    extent = 1.06 * max(_radius(run.config.edge), float(np.hypot(found["x"], found["y"]).max()))
    every = -(-len(accuracy) // MAX_PLACES)
    shown = range(0, len(accuracy), every)
    places = [_place(found, i, accuracy[i], (low, high), extent, len(shown)) for i in shown]
    radius = _radius(run.config.edge)
    rings = [r for r in ticks(0, extent, 4) if 0 < r < (0.9 * radius or extent)] + [radius] * bool(radius)
    return Cell(
        description=_described(found, accuracy),
        places=places,
        rings=[(f"{50 * r / extent:.2f}", f"{r / 1000:g} km" if r >= 1000 else f"{r:g} m") for r in rings],
        scale=(f"{100 * low:.1f} %", f"{100 * high:.1f} %") if known else None,
        size="few" if len(shown) <= MAX_NAMED else "some" if len(shown) <= 3 * MAX_NAMED else "many",
        left_out=len(accuracy) - len(shown),
    )


def _radius(edge: Edge) -> float:
    return 0.0 if edge.positions else edge.radius


def _place(found: Columns, i: int, accuracy: float | None, of: tuple[float, float], extent: float, count: int) -> Place:
    x, y, name = float(found["x"][i]), float(found["y"][i]), found["name"][i]
    visits, losses = int(found["visits"][i]), int(found["losses"][i])
    share = None if accuracy is None else (accuracy - of[0]) / (of[1] - of[0]) if of[1] > of[0] else 1.0
    words = [
        f"device {name}",
        "no test set" if accuracy is None else f"accuracy {100 * accuracy:.2f} %",
        f"{_metres(float(found['distance'][i]))} from the base station ({_metres(hypot(x, y))} on the map)"
        if abs(float(found["distance"][i]) - hypot(x, y)) > 0.5
        else f"{_metres(hypot(x, y))} from the base station",
        f"path loss {found['path_loss_db'][i]:.1f} dB",
        f"drawn {visits} times, lost {losses}" + (f" ({100 * losses / visits:.0f} %)" if visits else ""),
        f"{joules(float(found['compute_joules'][i]))} to compute, {joules(float(found['radio_joules'][i]))} to send",
        f"clock {found['clock_hz'][i] / 1e9:.3g} GHz",
    ]
    if np.isfinite(found["battery_joules"][i]):
        words.append(f"battery {joules(float(found['battery_joules'][i]))} left")
    return Place(
        name=name if count <= MAX_NAMED and len(name) <= 3 else "",
        left=f"{50 + 50 * x / extent:.2f}",
        top=f"{50 - 50 * y / extent:.2f}",
        shade="" if share is None else f"{10 + 90 * share:.0f}",
        lost=f"{100 * losses / visits:.0f}" if visits else "0",
        dark=share is not None and share > 0.5,
        tip="; ".join(words),
    )


def _metres(value: float) -> str:
    return f"{value / 1000:,.4g} km" if value >= 10_000 else f"{value:.0f} m"


def halves(found: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the devices with the smaller path losses, and those with the larger ones."""
    order = np.argsort(found["path_loss_db"], kind="stable")
    return order[: len(order) // 2], order[len(order) // 2 :]


def _described(found: Columns, accuracy: Sequence[float | None]) -> str:
    """Return what the map shows: how the half with small path losses fared, and the other half."""
    if len(accuracy) < 2:
        return "One device."
    near, far = (_of_half(found, accuracy, half.tolist()) for half in halves(found))
    never = int((found["visits"] == 0).sum())
    return (
        f"{len(accuracy):,} devices. The half with the smaller path losses {near}, the other half {far}."
        + f" {never:,} were never drawn." * bool(never)
    )


def _of_half(found: Columns, accuracy: Sequence[float | None], devices: Iterable[int]) -> str:
    which = list(devices)
    known = [value for i in which if (value := accuracy[i]) is not None]
    visits, losses = int(found["visits"][which].sum()), int(found["losses"][which].sum())
    ended = f" and ended at {100 * float(np.mean(known)):.2f} %" if known else ""
    return f"lost {100 * losses / max(visits, 1):.1f} % of {visits:,} visits{ended}"
