"""What the algorithms of a study need beside what they reach, and what a study of settings has chosen."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcpsl.algorithm import optional
from fedcpsl.algorithms import find_algorithm, traits_of
from fedcpsl.errors import InputError
from fedcpsl.report.tables import size
from fedcpsl.settings import toml_value
from fedcpsl.storage import write_whole

Runs = Sequence[Mapping[str, Any]]  # rows of `fedcpsl.runs.comparison.final_row`
HEAD = ["gradients", "down", "up", "kept", "bytes down", "up", "kept", "learns from", "server", "chosen"]
CAPTION = (
    "What each needs. Gradients: of a step. Down, up: models that an active device receives and sends in a round, and "
    "bytes of a whole run; kept: what a device keeps from round to round, in models and in bytes. Learns from: L "
    "labels, U unlabelled samples, V views of them, T their order in time, S labelled samples at the server. Server: "
    "adds updates up, or sees whose is whose. Chosen: the settings that were tuned for this data set."
)


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


def needs_of(runs: Runs, chosen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the columns of `HEAD` for one case; `chosen` has the settings that were tuned, by algorithm."""
    algorithm = next((run["algorithm"] for run in runs if run["algorithm"]), None)
    if algorithm is None:
        return ["-"] * len(HEAD)
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


def _mean(runs: Runs, key: str) -> float | None:
    known = [run[key] for run in runs if run[key] is not None]
    return float(np.mean(known)) if known else None


def write_choice(path: Path, dataset: str, best: Mapping[str, Mapping[str, Any]], made_by: str) -> None:
    """Write the best point of every algorithm on one data set; what the file has of others stays."""
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--choose {path}: cannot be read as TOML: {error}") from error
    lines = [f"# The best points of `{made_by}`, by mean accuracy on validation samples over its seeds."]
    for name, of in (known | {dataset: {a: nested(point) for a, point in best.items()}}).items():
        for algorithm, sections in of.items():
            lines.append(f"[{name}.{algorithm}]")
            for section, values in sections.items():
                given = ", ".join(f"{key} = {toml_value(value)}" for key, value in values.items())
                lines.append(f"{section} = {{ {given} }}")
    write_whole(path, "\n".join(lines) + "\n")


def nested(point: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings by section."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in point.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found
