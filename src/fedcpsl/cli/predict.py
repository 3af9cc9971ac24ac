"""fedcpsl predict: what a device's personal model says of new samples."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError

ENDINGS = (".csv", ".jsonl", ".json")
Row = tuple[int | str, str | None, list[float]]  # a sample's name, which model answers, the probabilities


def add(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="classes of new samples by a device's personal model",
        description="Ask the personal model of a device: one of a finished run, one that `fedcpsl export` wrote, or "
        "the one that a device of a federation has by now, also while it is being trained. Without --device, a table "
        "with the run's device column is answered row by row: by the device's own model, and for devices that the run "
        "does not know by the global one. Prints a CSV line per sample: its number (of images the path), which model "
        "answered where there are several, the likeliest class, and the probability of every class. Where the input "
        "has labels, the accuracy goes to standard error.",
        allow_abbrev=False,
    )
    predict.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a run's folder, an exported .onnx, .pt2 or .safetensors file, or a device's folder as given to "
        "`fedcpsl join`",
    )
    predict.add_argument(
        "input", type=Path, metavar="INPUT", help="an .npy array, .npz with x, .csv, .parquet, an image or a folder"
    )
    predict.add_argument("--device", metavar="NAME", help="of a run: a device by name or number, or global")
    predict.add_argument("--model", dest="own", default="", metavar="NAME", help="import this package.module:function")
    predict.add_argument("--json", action="store_true", help="a JSON object per sample")
    predict.add_argument(
        "--out", type=Path, metavar="FILE", help="write there, not to standard output; .jsonl or .json: as --json"
    )
    predict.set_defaults(command=_predict)


def _predict(parsed: argparse.Namespace) -> int:
    from fedcpsl.export.samples import accuracy
    from fedcpsl.storage import write_whole

    as_json = _wants_json(parsed.out, asked=parsed.json)
    if parsed.out and parsed.out.exists():
        raise InputError(f"{parsed.out}: exists already; give another --out")
    if parsed.out and not parsed.out.parent.is_dir():
        raise InputError(f"{parsed.out.parent}: no such folder; make it, or give another --out")
    about, samples, answers, models = _answered(parsed)
    rows = list(zip(samples.names, models, answers.tolist(), strict=True))
    text = (_as_json if as_json else _as_csv)(about.classes, rows)
    if parsed.out:
        write_whole(parsed.out, text)
    else:
        sys.stdout.write(text)
    counted = accuracy(samples, answers)
    if counted:
        right, known = counted
        print(f"accuracy {100 * right / known:.2f} % ({right} of {known} labelled samples)", file=sys.stderr)
    return 0


def _answered(parsed: argparse.Namespace) -> tuple[Any, Any, Any, Sequence[str | None]]:
    """What the model is, the samples, the probabilities, and which model answered where there are several."""
    from fedcpsl.export.samples import read_samples

    kept = None if parsed.device else _run_of_many(parsed.model)
    if kept is None:
        predictor = _predictor(parsed)
        samples = read_samples(parsed.input, predictor.about)
        return predictor.about, samples, predictor.answer(samples.x), [None] * len(samples.x)
    from fedcpsl.export.by_device import answer_by_device
    from fedcpsl.export.saved_run import about_of, find_device

    about = about_of(kept)
    samples = read_samples(parsed.input, about)
    if samples.devices is None:
        find_device(kept, None)  # an error that says what to give
    answers, models, note = answer_by_device(kept, samples.x, list(samples.devices or ()))
    if note:
        print(f"fedcpsl: {note}", file=sys.stderr)
    return about, samples, answers, models


def _wants_json(out: Path | None, *, asked: bool) -> bool:
    """Whether to write JSON lines: as asked, or as the file's name ends."""
    if out is None:
        return asked
    if out.suffix.lower() not in ENDINGS:
        raise InputError(f"{out}: give a name that ends with {', '.join(ENDINGS)}")
    if asked and out.suffix.lower() == ".csv":
        raise InputError(f"{out}: --json writes JSON lines; leave it out, or give a name that ends with .jsonl")
    return out.suffix.lower() != ".csv"


def _run_of_many(path: Path) -> Any:
    """What a run has kept, where it is one of several devices."""
    if not (path / "config.toml").is_file():
        return None
    from fedcpsl.export.saved_run import device_names, read_kept

    kept = read_kept(path)
    return kept if len(device_names(kept)) > 1 else None


def _predictor(parsed: argparse.Namespace) -> Any:
    path: Path = parsed.model
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_file():
        from fedcpsl.export.reading import read_model

        predictor = read_model(path, parsed.own)
        about = predictor.about
        if parsed.device not in (None, about.device, str(about.number)):
            raise InputError(f"--device {parsed.device}: {path} is the model of device {about.device}; leave it out")
        return predictor
    if (path / "config.toml").is_file() or (path / "comparison.json").is_file():
        from fedcpsl.export.saved_run import choose, read_kept

        return choose(read_kept(path), parsed.device).predictor
    if not any(path.glob("*/job.toml")):
        raise InputError(f"{path}: is neither a run's folder nor that of a device which has joined; give one of these")
    if parsed.device:
        raise InputError(f"--device {parsed.device}: {path} is no run's folder; leave it out for a device's own")
    return _of_a_federation(path)


def _of_a_federation(folder: Path) -> Any:
    from fedcpsl.deployment.device_process import inputs_for, job_of, predictor
    from fedcpsl.export.model_manifest import About, Predictor, shared_config
    from fedcpsl.federation.device import predict

    participant = predictor(folder)
    job = job_of(participant)
    config = shared_config(job.config)
    about = About(
        folder.name, None, job.classes, job.shape, (), job.scaling, None, job.config.algorithm.name, config, ""
    )
    return Predictor(about, lambda x: predict(participant, inputs_for(job, x, folder)).numpy())


def _as_csv(classes: tuple[str, ...], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    by_device = rows[0][1] is not None
    table.writerow(["sample", *["model"] * by_device, "class", *classes])
    for name, model, each in rows:
        table.writerow([name, *[model] * by_device, _best(classes, each), *(f"{p:.6f}" for p in each)])
    return text.getvalue()


def _as_json(classes: tuple[str, ...], rows: Sequence[Row]) -> str:
    from fedcpsl.storage import to_json

    lines = [
        {"sample": name}
        | ({} if model is None else {"model": model})
        | {"class": _best(classes, each), "probabilities": dict(zip(classes, each, strict=True))}
        for name, model, each in rows
    ]
    return "".join(to_json(line) + "\n" for line in lines)


def _best(classes: tuple[str, ...], each: list[float]) -> str:
    return classes[max(range(len(each)), key=each.__getitem__)]
