"""The files of a run and where they are."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fedcpsl.config import Config, read_config, to_toml, with_settings
from fedcpsl.errors import InputError, RunError
from fedcpsl.runs.confusion import class_metrics, read_confusion
from fedcpsl.runs.files import append_line, new_folder, parse_json, read_json, sha256_of, to_json, write_whole
from fedcpsl.torchrun import way_on

Metrics = dict[str, Any]


def default_folder(config: Config, what: str = "") -> Path:
    """runs/<time>-<what, or the algorithm>-<dataset>, with a number behind it where that exists."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{stamp}-{what or config.algorithm.name}-{config.data.dataset}"
    names = [first, *(first.with_name(f"{first.name}-{k}") for k in range(2, 1000))]
    return next(name for name in names if not name.exists())


def create(folder: Path, config: Config, manifest: dict[str, Any]) -> None:
    """A new run folder with its config and manifest. An existing folder is never touched."""
    make_parent(folder)
    text = to_toml(config)
    try:
        with new_folder(folder) as partial:
            write_manifest(partial, manifest | {"config_sha256": sha256_of(text)})
            write_whole(partial / "config.toml", text)
    except FileExistsError:
        raise InputError(
            f"{folder}: exists already; give another --out, or --resume {folder} to go on with it"
        ) from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}; give another --out") from error


def make_parent(folder: Path) -> None:
    """The folder that a new one goes into."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder.parent}: cannot be made a folder: {error.strerror}; give another --out") from error


def read_run_config(folder: Path) -> Config:
    """The resolved config that a run was started with."""
    if (folder / "comparison.json").is_file():
        raise InputError(
            f"{folder}: holds many runs; go on with `fedcpsl compare --resume` or `fedcpsl sweep --resume`"
        )
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: not a run's folder (it has no config.toml); give one that `fedcpsl run` made")
    _check_config(folder)
    return with_settings(Config(), read_config(folder / "config.toml"))


def _check_config(folder: Path) -> None:
    """Refuse a config that is not the one that the run was begun with; older folders do not say."""
    if not (folder / "manifest.json").exists():
        return
    begun_with = read_manifest(folder).get("config_sha256")
    if begun_with not in (None, sha256_of((folder / "config.toml").read_bytes())):
        raise InputError(
            f"{folder / 'config.toml'}: is not the config that the run was begun with (its checksum is not that in "
            "manifest.json): restore it, or begin another run with it"
        )


def is_finished(folder: Path) -> bool:
    """Whether a run has come to its end: the table of its devices is the last file written."""
    return (folder / "devices.csv").exists()


def mark_failed(folder: Path, reason: str) -> None:
    """Have it known that a run cannot go on."""
    write_whole(folder / "failed.txt", reason + "\n")


def failure(folder: Path) -> str | None:
    """Why a run could not go on, if so."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def read_manifest(folder: Path) -> dict[str, Any]:
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
    """A run goes on with as many ranks as it was begun with, so that it ends with the same bits."""
    begun = manifest["layout"].get("ranks", 1)
    if begun != ranks:
        command, whole = ("run", folder) if len(company_of(folder)) == 1 else ("compare", folder.parent.parent)
        raise InputError(
            f"{folder}: was begun with {begun} rank{'s' * (begun > 1)}, not {ranks}; go on with: "
            f"{way_on(command, whole, begun)}"
        )


def company_of(folder: Path) -> list[str]:
    """The runs that went side by side with this one, itself among them."""
    company: list[str] = read_manifest(folder)["layout"].get("company", [folder.name])
    return company


def command_for_all(folder: Path) -> str:
    """What goes on with a run that belongs to many: a comparison is resumed, a study is asked for again."""
    whole = folder.parent.parent
    if (whole / "comparison.json").is_file():
        return f"fedcpsl compare --resume {whole}"
    return " ".join(read_manifest(folder)["command"])


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    plain = json.loads(to_json(manifest))  # as it will be read: tuples are lists, what is not finite is null
    write_whole(folder / "manifest.json", to_json(plain | {"sha256": _manifest_digest(plain)}, indent=2) + "\n")


def append_metrics(folder: Path, metrics: Metrics) -> None:
    append_line(folder / "metrics.jsonl", to_json(metrics))


def read_metrics(folder: Path) -> list[Metrics]:
    """All whole lines of metrics.jsonl; a last line cut off by a crash is passed over."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    whole: list[Metrics] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            metrics = parse_json(line)
        except ValueError as error:
            raise RunError(f"{path}, line {number}: not JSON ({error}); the file was changed by hand?") from error
        if not isinstance(metrics, dict) or not isinstance(metrics.get("round"), int):
            raise RunError(f"{path}, line {number}: not the metrics of a round; the file was changed by hand?")
        if whole and metrics["round"] <= whole[-1]["round"]:
            raise RunError(f"{path}, line {number}: round {metrics['round']} again; the file was changed by hand?")
        whole.append(metrics)
    _check_complete(folder, whole)
    return whole


def _check_complete(folder: Path, metrics: list[Metrics]) -> None:
    """Refuse the metrics of a finished run that end before its last round, or leave some out."""
    if not is_finished(folder) or "adapted_from" in read_manifest(folder):  # which has its last round alone
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
    """How long metrics.jsonl is by now, and its checksum: for a checkpoint."""
    path = folder / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    return {"metrics_bytes": len(content), "metrics_sha256": sha256_of(content)}


def check_metrics(folder: Path, known: Mapping[str, Any]) -> None:
    """Refuse metrics that are not what they were when a checkpoint was written; later ones will be computed again."""
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
    """Drop the metrics of rounds after `round`: they will be computed again."""
    kept = [line for line in read_metrics(folder) if line["round"] <= round]
    write_whole(folder / "metrics.jsonl", "".join(to_json(line) + "\n" for line in kept))
    return kept


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process off the run while this one works on it; a crash frees the lock."""
    if os.name != "posix":
        yield
        return
    import fcntl

    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another process is working on this run; wait for it or stop it") from None
        yield


def final_metrics(folder: Path) -> Metrics:
    """A run's last metrics as one object, with what it was."""
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
        **(class_metrics(confusion) if confusion else {}),
        "config": asdict(config),
    }
