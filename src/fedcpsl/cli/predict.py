"""fedcpsl predict: what a device's personal model says of new samples."""

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError

ENDINGS = (".csv", ".jsonl", ".json")


def add(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="classes of new samples by a device's personal model",
        description="Ask the personal model of a device: one of a finished run, one that `fedcpsl export` wrote, or "
        "the one that a device of a federation has by now, also while it is being trained. Prints a CSV line per "
        "sample: its number (of images the path), the likeliest class, and the probability of every class. Where the "
        "input has labels, the accuracy goes to standard error.",
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
    from fedcpsl.export.samples import accuracy, read_samples
    from fedcpsl.runs.files import write_whole

    as_json = _wants_json(parsed.out, asked=parsed.json)
    if parsed.out and parsed.out.exists():
        raise InputError(f"{parsed.out}: exists already; give another --out")
    if parsed.out and not parsed.out.parent.is_dir():
        raise InputError(f"{parsed.out.parent}: no such folder; make it, or give another --out")
    predictor = _predictor(parsed)
    samples = read_samples(parsed.input, predictor.about)
    answers = predictor.answer(samples.x)
    text = (_as_json if as_json else _as_csv)(samples.names, predictor.about.classes, answers.tolist())
    if parsed.out:
        write_whole(parsed.out, text)
    else:
        sys.stdout.write(text)
    counted = accuracy(samples, answers)
    if counted:
        right, known = counted
        print(f"accuracy {100 * right / known:.2f} % ({right} of {known} labelled samples)", file=sys.stderr)
    return 0


def _wants_json(out: Path | None, *, asked: bool) -> bool:
    """Whether to write JSON lines: as asked, or as the file's name ends."""
    if out is None:
        return asked
    if out.suffix.lower() not in ENDINGS:
        raise InputError(f"{out}: give a name that ends with {', '.join(ENDINGS)}")
    if asked and out.suffix.lower() == ".csv":
        raise InputError(f"{out}: --json writes JSON lines; leave it out, or give a name that ends with .jsonl")
    return out.suffix.lower() != ".csv"


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
        from fedcpsl.export.chosen import choose, read_kept

        return choose(read_kept(path), parsed.device).predictor
    if not any(path.glob("*/job.toml")):
        raise InputError(f"{path}: is neither a run's folder nor that of a device which has joined; give one of these")
    if parsed.device:
        raise InputError(f"--device {parsed.device}: {path} is no run's folder; leave it out for a device's own")
    return _of_a_federation(path)


def _of_a_federation(folder: Path) -> Any:
    from fedcpsl.deployment.device_process import inputs_for, job_of, predictor
    from fedcpsl.export.about import About, Predictor, shared_config
    from fedcpsl.federation.device import predict

    participant = predictor(folder)
    job = job_of(participant)
    config = shared_config(job.config)
    about = About(
        folder.name, None, job.classes, job.shape, (), job.scaling, None, job.config.algorithm.name, config, ""
    )
    return Predictor(about, lambda x: predict(participant, inputs_for(job, x, folder)).numpy())


def _as_csv(names: Any, classes: tuple[str, ...], answers: list[list[float]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["sample", "class", *classes])
    for name, each in zip(names, answers, strict=True):
        table.writerow([name, _best(classes, each), *(f"{p:.6f}" for p in each)])
    return text.getvalue()


def _as_json(names: Any, classes: tuple[str, ...], answers: list[list[float]]) -> str:
    from fedcpsl.runs.files import to_json

    lines = [
        {"sample": name, "class": _best(classes, each), "probabilities": dict(zip(classes, each, strict=True))}
        for name, each in zip(names, answers, strict=True)
    ]
    return "".join(to_json(line) + "\n" for line in lines)


def _best(classes: tuple[str, ...], each: list[float]) -> str:
    return classes[max(range(len(each)), key=each.__getitem__)]
