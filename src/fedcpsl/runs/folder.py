"""The folder of a run: its files, and reading and checking them; the tables of a finished run, devices.csv and
confusion.csv, the confusion matrices over all tests. Imports nothing heavy: neither torch nor the simulation."""

import csv
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.config import Config, read_config, read_own_config, sections_of, to_toml, with_settings
from fedcpsl.errors import InputError, RunError
from fedcpsl.storage import MAX_DIGITS, append_line, new_folder, parse_json, read_json, sha256_of, to_json, write_whole
from fedcpsl.torchrun import way_on

if TYPE_CHECKING:
    from torch import Tensor

    from fedcpsl.evaluation import Evaluation
    from fedcpsl.simulation import State

Metrics = dict[str, Any]
ALONE = "alone"  # the subfolder of a run's baseline: its devices, each trained alone
DEVICE_COLUMNS = ("device", "name", "labelled", "unlabelled", "active_rounds", "personal", "global", "localized")
TESTS = "tests"  # a last column, which version 0.1 did not write
COUNTS, ACCURACIES = ("device", "labelled", "unlabelled", "active_rounds"), ("personal", "global", "localized")

CONFUSION_FILE = "confusion.csv"
CONFUSION_COLUMNS = ["model", "class", "predicted", "count"]
MODELS = ("personal", "global")
MAX_COUNTED, MAX_CLASSES = 2000, 100  # classes of a matrix that is written; of one that `class_metrics` returns
Counts = NDArray[np.int64]  # [classes, classes]: samples of a class (row) by the class predicted (column)


def default_folder(config: Config, what: str = "") -> Path:
    """Return runs/<time>-<what, or the algorithm>-<dataset>, with a number appended if that exists."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{stamp}-{what or config.algorithm.name}-{config.data.dataset}"
    names = [first, *(first.with_name(f"{first.name}-{k}") for k in range(2, 1000))]
    return next(name for name in names if not name.exists())


def create_run(folder: Path, config: Config, manifest: dict[str, Any]) -> None:
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
    _is_own_config(folder)
    return with_settings(Config(), read_config(folder / "config.toml"))


def read_config_to_show(folder: Path) -> Config:
    """Return the same, without PyTorch where the config is certainly what fedcpsl wrote."""
    own = (folder / "config.toml").is_file() and _is_own_config(folder)
    return read_own_config(folder / "config.toml") if own else read_run_config(folder)


def _is_own_config(folder: Path) -> bool:
    """Return whether a checksum says that this is the config that the run was started with; InputError if it is not.

    Older folders have no checksum.
    """
    if not (folder / "manifest.json").exists():
        return False
    expected = read_manifest(folder).get("config_sha256")
    if expected not in (None, sha256_of((folder / "config.toml").read_bytes())):
        raise InputError(
            f"{folder / 'config.toml'}: is not the config that the run was started with (its checksum is not that in "
            "manifest.json): restore it, or start another run with it"
        )
    return expected is not None


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
        return f"fedcpsl compare --resume {shlex.quote(str(comparison))}"
    return shlex.join(read_manifest(folder)["command"])


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
    config = read_config_to_show(folder)
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
    config, metrics = read_config_to_show(folder), read_metrics(folder)
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


class Confusion(NamedTuple):
    """The confusion matrices of the devices' own models, and of the global model if there is one."""

    classes: list[str]
    counts: dict[str, Counts]  # by model


def write_tables(folder: Path, state: "State", evaluation: "Evaluation", class_names: Sequence[str]) -> None:
    """Write confusion.csv, then devices.csv, whose existence means that a run is finished."""
    classes = class_names or list(map(str, range(state.setup.terms.method.network.classes)))
    if len(classes) <= MAX_COUNTED:
        write_whole(folder / CONFUSION_FILE, confusion_csv(confusion(state, evaluation, classes)))
    write_whole(folder / "devices.csv", device_table(state, evaluation))


def device_table(state: "State", evaluation: "Evaluation") -> str:
    """Return the content of devices.csv."""
    setup = state.setup
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*DEVICE_COLUMNS, TESTS])
    shown = (evaluation.personal, evaluation.general, evaluation.localized)
    tests = np.diff(setup.data.test.start)
    listed: Sequence[int] = range(setup.terms.devices)
    if state.sparse is not None:
        listed = sorted({*np.flatnonzero(state.sparse.there).tolist(), *evaluation.personal.devices})
    for i in listed:
        accuracies = [a.devices.get(i, "") if a else "" for a in shown]
        sizes = (setup.terms.sizes.labelled[i], setup.terms.sizes.unlabelled[i])
        table.writerow([i, setup.terms.names[i], *sizes, state.active_rounds[i], *accuracies, tests[i]])
    return text.getvalue()


def read_device_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of devices.csv, each checked; InputError with the line of a damaged one."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = [column for column in DEVICE_COLUMNS if column not in (table.fieldnames or ())]
            if missing:
                raise InputError(
                    f"{path}: has no column {missing[0]!r}; was it changed by hand? It needs {','.join(DEVICE_COLUMNS)}"
                )
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error
    for number, row in enumerate(rows, 2):
        try:
            _check_device(row)
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}, line {number}: {error}; was it damaged or changed by hand?") from error
    if not rows:
        raise InputError(f"{path}: has no device; was it damaged or changed by hand?")
    return rows


def _check_device(row: dict[str, str]) -> None:
    for column in (*COUNTS, TESTS) if TESTS in row else COUNTS:
        if len(row[column]) > MAX_DIGITS or int(row[column]) < 0:
            raise ValueError(f"{column} = {row[column][:40]!r} is no count")
    for column in ACCURACIES:
        if row[column] is None or (row[column] and not 0 <= float(row[column]) <= 1):
            raise ValueError(f"{column} = {row[column]!r} is no accuracy")


def confusion(state: "State", evaluation: "Evaluation", classes: Sequence[str]) -> Confusion:
    """Count classes and predicted classes over the tests of all evaluated devices."""
    tests, made = state.setup.data.test, evaluation.predictions
    tested = np.zeros(state.setup.terms.devices, bool)
    tested[list(evaluation.personal.devices)] = True
    here = np.repeat(tested, np.diff(tests.start))
    y = tests.y.cpu().numpy()[here]

    def count(log_h: "Tensor") -> Counts:
        pairs = y * len(classes) + log_h.argmax(-1).cpu().numpy()[here]
        return np.bincount(pairs, minlength=len(classes) ** 2).reshape(len(classes), len(classes))

    models = {"personal": made.personal, "global": made.general}
    return Confusion(list(classes), {name: count(m) for name, m in models.items() if m is not None and len(y)})


def confusion_csv(confusion: Confusion) -> str:
    """Return the content of confusion.csv: a line for every pair of classes that occurred."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(CONFUSION_COLUMNS)
    for model, counts in confusion.counts.items():
        for true, predicted in np.argwhere(counts).tolist():
            row = [model, confusion.classes[true], confusion.classes[predicted], counts[true, predicted]]
            table.writerow(row)
    return text.getvalue()


def read_confusion(folder: Path, classes: Sequence[str]) -> Confusion | None:
    """Read confusion.csv; None if the run is not finished, or older than this file."""
    path = folder / CONFUSION_FILE
    number_of = {name: i for i, name in enumerate(classes)}
    counts: dict[str, Counts] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            head, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); was it damaged or changed by hand?") from error
    if head != CONFUSION_COLUMNS:
        raise InputError(f"{path}: has no columns {','.join(CONFUSION_COLUMNS)}; was it damaged or changed by hand?")
    for number, row in enumerate(rows, 2):
        try:
            model, true, predicted, count = row
            if model not in MODELS or len(count) > MAX_DIGITS or int(count) < 1:
                raise ValueError
            matrix = counts.setdefault(model, np.zeros((len(classes), len(classes)), np.int64))
            matrix[number_of[true], number_of[predicted]] += int(count)
        except (ValueError, KeyError, OverflowError):
            raise InputError(f"{path}, line {number}: is no count; was it damaged or changed by hand?") from None
    return Confusion(list(classes), counts)


def class_metrics(confusion: Confusion) -> dict[str, Any]:
    """Return accuracy by class, macro-F1 and the matrices, as plain values."""
    tests = next(iter(confusion.counts.values())).sum(1) if confusion.counts else np.zeros(len(confusion.classes), int)
    accuracies = {model: per_class(counts) for model, counts in confusion.counts.items()}
    return {
        "macro_f1": {model: macro_f1(counts) for model, counts in confusion.counts.items()},
        "classes": [
            {"class": name, "tests": int(tests[i])} | {model: values[i] for model, values in accuracies.items()}
            for i, name in enumerate(confusion.classes)
        ],
        "confusion": _as_lists(confusion.counts) if len(confusion.classes) <= MAX_CLASSES else None,
    }


def _as_lists(counts: Mapping[str, Counts]) -> dict[str, list[list[int]]]:
    return {model: matrix.tolist() for model, matrix in counts.items()}


def per_class(counts: Counts) -> list[float | None]:
    """Return the recall of each class; None if it has no sample."""
    pairs = zip(np.diag(counts).tolist(), counts.sum(1).tolist(), strict=True)
    return [right / samples if samples else None for right, samples in pairs]


def macro_f1(counts: Counts) -> float | None:
    """Return the mean of F1 over the classes that occur or are predicted, as scikit-learn computes it."""
    right, total = np.diag(counts), counts.sum(0) + counts.sum(1)
    present = total > 0
    return float((2 * right[present] / total[present]).mean()) if present.any() else None
