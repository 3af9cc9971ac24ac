"""The tables of a study, rows by panels, and what they show beside accuracies.

That is what its algorithms need, and in edge networks virtual time, energy, bytes, lost uploads and far devices.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.algorithm import optional
from fedcpsl.algorithms import find_algorithm, traits_of
from fedcpsl.errors import InputError
from fedcpsl.report.edge_pictures import halves
from fedcpsl.report.tables import OUTCOMES, duration, joules, size
from fedcpsl.runs.comparison import Interval, interval
from fedcpsl.runs.edge_files import read_devices
from fedcpsl.runs.folder import Metrics, is_finished, read_device_table, read_metrics
from fedcpsl.runs.study import Line, Study
from fedcpsl.settings import toml_value
from fedcpsl.storage import write_whole

ResultRows = Sequence[Mapping[str, Any]]  # rows of `fedcpsl.runs.comparison.final_row`
NEEDS_HEAD = ["gradients", "down", "up", "kept", "bytes down", "up", "kept", "learns from", "server", "chosen"]
NEEDS_CAPTION = (
    "What each needs. Gradients: of a step. Down, up: models that an active device receives and sends in a round, and "
    "bytes of a whole run; kept: what a device keeps from round to round, in models and in bytes. Learns from: L "
    "labels, U unlabelled samples, V views of them, T their order in time, S labelled samples at the server. Server: "
    "adds updates up, or sees whose is whose. Chosen: the settings that were tuned for this data set."
)
MAX_POINTS = 60  # of a curve
COSTS = {"seconds": "virtual time, s", "joules": "energy, J"}


class CaseResults(NamedTuple):
    """A case of a study and the results of its runs, one per seed."""

    line: Line
    folders: list[Path]
    runs: list[dict[str, Any]]


class Matrix(NamedTuple):
    """A table of a study: rows by panels."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def study_matrix(
    study: Study,
    by_place: Mapping[tuple[str, str], CaseResults],
    caption: str,
    text: Callable[[CaseResults], str],
    leave_out: str = "",
) -> Matrix:
    """Return a table with the text of every cell; the row `leave_out` is not in it."""
    shown = [row for row in study.rows if row != leave_out]
    rows = [[row, *(text(by_place[panel, row]) for panel in study.panels)] for row in shown]
    return Matrix(caption, ["", *(panel or "accuracy" for panel in study.panels)], rows)


def with_half(found: Interval | None, sign: str) -> str:
    """Return a mean in % and half of its interval."""
    if found is None or found["mean"] is None:
        return "-"
    half = "" if found["half_width"] is None else f" ± {100 * found['half_width']:.2f}"
    return f"{100 * found['mean']:{sign}.2f}{half}"


def learns_from(algorithm: str) -> str:
    """Return which samples an algorithm learns from, as letters."""
    traits = traits_of(algorithm)
    runs = any(draw.of == "runs" for draw in traits.draws)
    used = {"L": True, "U": traits.unlabelled, "V": bool(traits.views), "T": runs, "S": traits.server_data}
    return " ".join(letter for letter, there in used.items() if there)


def server_of(algorithm: str) -> str:
    """Return what an algorithm's server must see."""
    if traits_of(algorithm).alone:
        return "none"
    return "sees" if optional(find_algorithm(algorithm)[0], "receive") else "adds"


def needs_of(runs: ResultRows, chosen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the columns of `NEEDS_HEAD` for one case; `chosen` has the settings that were tuned, by algorithm."""
    algorithm = next((run["algorithm"] for run in runs if run["algorithm"]), None)
    if algorithm is None:
        return ["-"] * len(NEEDS_HEAD)
    settings = [f"{key.partition('.')[2]} {value}" for key, value in chosen.get(algorithm, {}).items()]
    gradients, *models = (_mean(runs, k) for k in ("gradients_per_step", "models_down", "models_up", "models_kept"))
    return [
        "-" if gradients is None else f"{gradients:.0f}",
        *("-" if mean is None else f"{mean:.2f}" for mean in models),
        *(size(_mean(runs, key)) for key in ("downlink_bytes", "uplink_bytes", "device_bytes")),
        learns_from(algorithm),
        server_of(algorithm),
        ", ".join(settings) or "defaults",
    ]


def _mean(runs: ResultRows, key: str) -> float | None:
    known = [run[key] for run in runs if run[key] is not None]
    return float(np.mean(known)) if known else None


def write_choice(path: Path, dataset: str, best: Mapping[tuple[str, ...], Mapping[str, Any]], made_by: str) -> None:
    """Write the best points on one data set, by algorithm or by panel and row; what the file has of others stays."""
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--choose {path}: cannot be read as TOML: {error}") from error
    for (*outer, last), point in best.items():
        here = known.setdefault(dataset, {})
        for name in outer:
            here = here.setdefault(name, {})
        here[last] = nested(point)
    lines = [f"# The best points of `{made_by}`, by mean accuracy on validation samples over its seeds."]
    write_whole(path, "\n".join([*lines, *_tables(known)]) + "\n")


def _tables(content: Mapping[str, Any], *names: str) -> list[str]:
    """Return nested tables as lines of TOML: a table for each that holds sections of settings."""
    if not all(isinstance(value, dict) for of in content.values() for value in of.values()):
        sections = (
            f"{section} = {{ {', '.join(f'{key} = {toml_value(value)}' for key, value in values.items())} }}"
            for section, values in content.items()
        )
        return [f"[{'.'.join(map(_key, names))}]", *sections]
    return [line for name, of in content.items() for line in _tables(of, *names, name)]


def _key(name: str) -> str:
    """Return a key as TOML has it, quoted where it must be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def nested(point: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings by section."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in point.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def has_edge(runs: ResultRows) -> bool:
    """Return whether some of these runs had an edge network."""
    return any("edge_seconds" in run for run in runs)


def edge_tables(study: Study, by_place: Mapping[tuple[str, str], CaseResults]) -> list[Matrix]:
    """Return tables of virtual time, energy and bytes, of uploads and steps, and of far devices if some were lost."""
    caption = "Virtual time, energy and bytes sent of a run, mean over seeds."
    tables = [study_matrix(study, by_place, caption, lambda cell: spent(cell.runs))]
    caption = "Uploads counted, % of those drawn, and local steps done, % of those planned."
    tables.append(study_matrix(study, by_place, caption, lambda cell: counted(cell.folders)))
    if any(loses(cell.folders) for cell in by_place.values()):
        tables.append(_far_devices(study, by_place))
    return tables


def _far_devices(study: Study, by_place: Mapping[tuple[str, str], CaseResults]) -> Matrix:
    """Return how far devices fare worse than near ones, beside the first row of the same algorithm."""
    firsts: dict[str, str] = {}
    for row, settings in study.rows.items():
        firsts.setdefault(settings.get("algorithm.name", ""), row)

    def behind(cell: CaseResults) -> str:
        first = by_place[cell.line.panel, firsts[study.rows[cell.line.row].get("algorithm.name", "")]]
        if cell is first or len(cell.folders) != len(first.folders):
            return "-"
        return with_half(far_behind_near(cell.folders, first.folders), "+")

    caption = (
        "The global model on the half of the devices with the larger path losses, less that on the other half, in "
        "points, less the same of the first row with that algorithm, paired by seed."
    )
    return study_matrix(study, by_place, caption, behind)


def spent(runs: ResultRows) -> str:
    """Return virtual time, energy and bytes sent of a run, means over seeds."""
    known = [run for run in runs if "edge_seconds" in run]
    if not known:
        return "-"
    costs = {"edge_seconds": duration, "edge_joules": joules}
    texts = [_with_half([run[key] for run in known], text) for key, text in costs.items()]
    return ", ".join([*texts, size(float(np.mean([run["uplink_bytes"] for run in known])))])


def costs_until(runs: ResultRows, k: int) -> str:
    """Return the virtual time, energy and bytes of the runs that reached an accuracy; nothing without edge networks."""
    known = [run for run in runs if run["reach_rounds"][k] is not None]
    if not all("reach_joules" in run for run in known):
        return ""
    bytes_sent = float(np.mean([run["reach_bytes"][k] for run in known]))
    costs = {"reach_seconds": duration, "reach_joules": joules}
    texts = [_with_half([run[key][k] for run in known], text) for key, text in costs.items()]
    return ", ".join(["", *texts, size(bytes_sent)])


def _with_half(values: Sequence[float], text: Callable[[Any], str]) -> str:
    """Return a mean and half of its interval over seeds, as text."""
    found = interval(values) or {"mean": None, "half_width": None}
    half = found["half_width"]
    return text(found["mean"]) + (f" ± {text(half)}" if half is not None else "")


def counted(folders: Sequence[Path]) -> str:
    """Return how many uploads of drawn devices were counted, and how many steps were done of those planned, in %."""
    known = _last(folders)
    if not known:
        return "-"
    arrived = np.mean([edge["counted"] / max(sum(edge[key] for key in OUTCOMES), 1) for edge in known])
    done = np.mean([edge["steps_done"] / max(edge["steps_planned"], 1) for edge in known])
    return f"{100 * arrived:.1f}, {100 * done:.1f}"


def loses(folders: Sequence[Path]) -> bool:
    """Return whether uploads were lost in these runs."""
    return any(edge["lost"] for edge in _last(folders))


def _last(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what the edge networks of runs had done at their last evaluation."""
    return [metrics[-1]["edge"] for folder in folders if (metrics := read_metrics(folder)) and "edge" in metrics[-1]]


def near_and_far(folder: Path) -> tuple[float, float] | None:
    """Return the global model's accuracy on the half of devices with the smaller path losses, and on the other half."""
    found = read_devices(folder) if is_finished(folder) else None
    devices = read_device_table(folder / "devices.csv") if found else []
    if found is None or not all(device["global"] for device in devices):
        return None
    accuracy = np.array([float(device["global"]) for device in devices])
    near, far = (float(accuracy[half].mean()) for half in halves(found))
    return near, far


def far_behind_near(folders: Sequence[Path], without: Sequence[Path]) -> Interval | None:
    """Return what far devices lose more than near ones against the same seeds of a reference, mean and interval.

    (far - near) - (far - near of the reference): splits put easier classes near or far, which the reference has too.
    """
    pairs = [(near_and_far(a), near_and_far(b)) for a, b in zip(folders, without, strict=True)]
    known = [(a[1] - a[0]) - (b[1] - b[0]) for a, b in pairs if a and b]
    return interval(known) if len(known) == len(pairs) else None


def cost_of(metrics: Metrics, cost: str) -> float:
    """Return the virtual seconds or the joules of a run until an evaluation."""
    edge = metrics["edge"]
    return float(edge["seconds"] if cost == "seconds" else edge["compute_joules"] + edge["radio_joules"])


def curve_by(folders: Sequence[Path], cost: str) -> tuple[list[float], NDArray[np.float64]]:
    """Return the mean cost over seeds at (some of many) evaluations, and the personal accuracies there, by seed."""
    runs = [read_metrics(folder) for folder in folders]
    length = min(map(len, runs))
    shown = np.unique(np.linspace(0, length - 1, min(length, MAX_POINTS)).round().astype(int)).tolist()
    costs = np.mean([[cost_of(run[i], cost) for i in shown] for run in runs], axis=0)
    means = [[run[i]["personal"]["mean"] for i in shown] for run in runs]
    return costs.tolist(), np.array(means, float)  # NaN where no device has a test set


def cost_curves(study: Study, cells: Sequence[CaseResults]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return for every row and cost the curves of its panels."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row, cost in product(study.rows, COSTS):
        own = [cell for cell in cells if cell.line.row == row and cell.folders]
        curves = {cell.line.panel: curve_by(cell.folders, cost) for cell in own}
        found.setdefault(row, {})[COSTS[cost]] = curves
    return found
