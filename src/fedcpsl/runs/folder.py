"""The folder of a run: its files, and reading and checking them. Imports nothing heavy."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fedcpsl.config import Config, read_config, sections_of, to_toml, with_settings
from fedcpsl.errors import InputError, RunError
from fedcpsl.runs.result_tables import class_metrics, read_confusion
from fedcpsl.storage import append_line, new_folder, parse_json, read_json, sha256_of, to_json, write_whole
from fedcpsl.torchrun import way_on

Metrics = dict[str, Any]
ALONE = "alone"  # the subfolder of a run's baseline: its devices, each trained alone


def default_folder(config: Config, what: str = "") -> Path:
    """Return runs/<time>-<what, or the algorithm>-<dataset>, with a number appended if that exists."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{stamp}-{what or config.algorithm.name}-{config.data.dataset}"
    names = [first, *(first.with_name(f"{first.name}-{k}") for k in range(2, 1000))]
    return next(name for name in names if not name.exists())


def create(folder: Path, config: Config, manifest: dict[str, Any]) -> None:
    """Create a run's folder with its config and manifest. An existing folder is never changed."""
    make_parent(folder)
    text = to_toml(config)
    try:
        with new_folder(folder) as partial:
            write_manifest(partial, manifest | {"config_sha256": sha256_of(text)})
            write_whole(partial / "config.toml", text)
    except FileExistsError:
        raise InputError(f"{folder}: exists already; give another --out, or --resume {folder} to resume it") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}; give another --out") from error


def make_parent(folder: Path) -> None:
    """Create the parent of a new folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder.parent}: cannot be created: {error.strerror}; give another --out") from error


def read_run_config(folder: Path) -> Config:
    """Return the resolved config that a run was started with."""
    if (folder / "comparison.json").is_file():
        raise InputError(
            f"{folder}: has many runs; resume it with `fedcpsl compare --resume` or `fedcpsl sweep --resume`"
        )
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: not a run's folder (it has no config.toml); give one that `fedcpsl run` made")
    _check_config(folder)
    return with_settings(Config(), read_config(folder / "config.toml"))


def _check_config(folder: Path) -> None:
    """Raise InputError if the config is not the one that the run was started with; older folders have no checksum."""
    if not (folder / "manifest.json").exists():
        return
    expected = read_manifest(folder).get("config_sha256")
    if expected not in (None, sha256_of((folder / "config.toml").read_bytes())):
        raise InputError(
            f"{folder / 'config.toml'}: is not the config that the run was started with (its checksum is not that in "
            "manifest.json): restore it, or start another run with it"
        )


def is_finished(folder: Path) -> bool:
    """Whether a run is finished: the table of its devices is the last file written."""
    return (folder / "devices.csv").exists()


def mark_failed(folder: Path, reason: str) -> None:
    """Record why a run cannot continue."""
    write_whole(folder / "failed.txt", reason + "\n")


def mark_refused(folder: Path, config: Config, reason: str) -> None:
    """Record in a folder of its own why a run was not begun."""
    with new_folder(folder) as partial:
        write_whole(partial / "config.toml", to_toml(config))
        mark_failed(partial, reason)


def is_refused(folder: Path) -> bool:
    """Return whether a run failed before it began."""
    return failure(folder) is not None and not (folder / "manifest.json").exists()


def failure(folder: Path) -> str | None:
    """Return why a run could not continue, or None."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest; InputError if its checksum does not match."""
    path = folder / "manifest.json"
    try:
        manifest = read_json(path)
    except FileNotFoundError as error:
        raise InputError(f"{path}: cannot be read ({error}); is this a run's folder?") from error
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: is not a manifest; was it damaged or changed by hand?")
    digest = manifest.pop("sha256", None)
    if digest not in (None, _manifest_digest(manifest)):
        raise InputError(f"{path}: damaged or changed by hand (its checksum does not match its content): restore it")
    return manifest


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return sha256_of(to_json(manifest))


def check_ranks(folder: Path, manifest: dict[str, Any], ranks: int) -> None:
    """Raise InputError unless a run is resumed with its number of ranks, which its bit-for-bit results need."""
    started = manifest["layout"].get("ranks", 1)
    if started != ranks:
        command, job = ("run", folder) if len(group_of(folder)) == 1 else ("compare", folder.parent.parent)
        raise InputError(
            f"{folder}: was started with {started} rank{'s' * (started > 1)}, not {ranks}; resume it with: "
            f"{way_on(command, job, started)}"
        )


def group_of(folder: Path) -> list[str]:
    """Return the names of the runs that were run side by side with this one, including itself."""
    group: list[str] = read_manifest(folder)["layout"].get("company", [folder.name])  # the key since version 0.1
    return group


def command_for_all(folder: Path) -> str:
    """Return the command that resumes a run of a group: a comparison is resumed, a study is started again."""
    comparison = folder.parent.parent
    if (comparison / "comparison.json").is_file():
        return f"fedcpsl compare --resume {comparison}"
    return " ".join(read_manifest(folder)["command"])


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    plain = json.loads(to_json(manifest))  # as it will be read: tuples are lists, NaN and infinity are null
    write_whole(folder / "manifest.json", to_json(plain | {"sha256": _manifest_digest(plain)}, indent=2) + "\n")


def append_metrics(folder: Path, metrics: Metrics) -> None:
    append_line(folder / "metrics.jsonl", to_json(metrics))


def read_metrics(folder: Path) -> list[Metrics]:
    """Return all complete lines of metrics.jsonl; a last line that a crash truncated is ignored."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    complete: list[Metrics] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            metrics = parse_json(line)
        except ValueError as error:
            raise RunError(f"{path}, line {number}: not JSON ({error}); the file was changed by hand?") from error
        if not isinstance(metrics, dict) or not isinstance(metrics.get("round"), int):
            raise RunError(f"{path}, line {number}: not the metrics of a round; the file was changed by hand?")
        if complete and metrics["round"] <= complete[-1]["round"]:
            raise RunError(f"{path}, line {number}: round {metrics['round']} again; the file was changed by hand?")
        complete.append(metrics)
    _check_complete(folder, complete)
    return complete


def _check_complete(folder: Path, metrics: list[Metrics]) -> None:
    """Raise InputError if the metrics of a finished run lack a round."""
    if not is_finished(folder) or "adapted_from" in read_manifest(folder):  # an adapted run has its last round only
        return
    config = read_run_config(folder)
    last, every = config.work.rounds + config.work.personal_rounds, config.run.evaluate_every
    found = [line["round"] for line in metrics]
    expected = sorted({*range(0, last + 1, every), last})
    if found != expected:
        missing = next((round for round in expected if round not in found), last)
        raise InputError(
            f"{folder / 'metrics.jsonl'}: lacks round {missing}, and the run is finished; was it damaged? Restore it"
        )


def metrics_digest(folder: Path) -> dict[str, Any]:
    """Return the present length of metrics.jsonl and its checksum, for a checkpoint."""
    path = folder / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    return {"metrics_bytes": len(content), "metrics_sha256": sha256_of(content)}


def check_metrics(folder: Path, known: Mapping[str, Any]) -> None:
    """Raise RunError if metrics changed since a checkpoint was written; later lines will be computed again."""
    length, path = known.get("metrics_bytes"), folder / "metrics.jsonl"
    if length is None:
        return  # written by version 0.1
    content = path.read_bytes() if path.exists() else b""
    if sha256_of(content[:length]) != known["metrics_sha256"]:
        raise RunError(
            f"{path}: damaged or changed by hand (it is not what it was at the last checkpoint): restore it; without "
            "it the run has no history"
        )


def keep_metrics_until(folder: Path, round: int) -> list[Metrics]:
    """Delete the metrics of rounds after `round`: they will be computed again."""
    kept = [line for line in read_metrics(folder) if line["round"] <= round]
    write_whole(folder / "metrics.jsonl", "".join(to_json(line) + "\n" for line in kept))
    return kept


def final_metrics(folder: Path) -> Metrics:
    """Return a run's last metrics as one object, with its settings."""
    config, metrics = read_run_config(folder), read_metrics(folder)
    if not metrics:
        raise InputError(f"{folder}: has no metrics yet; resume it with `fedcpsl run --resume {folder}`")
    last, manifest = dict(metrics[-1]), read_manifest(folder)
    names = manifest.get("class_names") or list(map(str, range(manifest["classes"])))
    confusion = read_confusion(folder, names) if is_finished(folder) else None
    return {
        "run": str(folder),
        "algorithm": config.algorithm.name,
        "dataset": config.data.dataset,
        "data": config.data.title,
        "seed": config.run.seed,
        "rounds": last.pop("round"),
        "finished": is_finished(folder),
        **last,
        "gradients_per_step": manifest.get("gradients_per_step"),
        "device_bytes": manifest.get("device_bytes"),
        "parameters": manifest.get("parameters"),
        **(class_metrics(confusion) if confusion else {}),
        "config": sections_of(config),
    }
