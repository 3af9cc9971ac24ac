"""fedcpsl export, predict and adapt: models from a run as files, their predictions, a model for a new device."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError
from fedcpsl.export import SUFFIXES


def add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a device's personal model as one file",
        description="Write the personal model of a device (its networks, how they are mixed, and the normalisation of "
        "inputs) as one file that takes raw samples and returns class probabilities. Before the file is written, its "
        "predictions are compared with those of the run.",
        allow_abbrev=False,
    )
    export.add_argument("run", type=Path, metavar="RUN", help="a finished run's folder, or one that adapt made")
    export.add_argument("--device", metavar="NAME", help="a device by name or number, or global: the global model")
    export.add_argument("--format", choices=tuple(SUFFIXES), help="what to write [as --out ends, else onnx]")
    export.add_argument("--out", type=Path, metavar="FILE", help="where to write [RUN/device-<number>.<ending>]")
    export.set_defaults(command=_export)


def _export(parsed: argparse.Namespace) -> int:
    kind = _kind(parsed.format, parsed.out)
    from fedcpsl.export.model_files import check_model_target, export
    from fedcpsl.export.saved_run import load_saved_run, model_of_device

    if parsed.out:
        check_model_target(parsed.out)
    model = model_of_device(load_saved_run(parsed.run), parsed.device)
    number = model.manifest.number
    name = model.manifest.device if number is None else f"device-{number}"
    path = parsed.out or parsed.run / f"{name}{SUFFIXES[kind]}"
    check_model_target(path)
    gap = export(model, kind, path)
    print(f"model    {path}\nchecked  its probabilities are within {gap:.1e} of the run's")
    return 0


def _kind(format: str | None, out: Path | None) -> str:
    endings = {suffix: name for name, suffix in SUFFIXES.items()}
    if out is None:
        return format or "onnx"
    found = endings.get(out.suffix.lower())
    if found is None:
        raise InputError(f"{out}: give a name that ends with {', '.join(endings)}")
    if format and format != found:
        raise InputError(f"{out}: --format {format} ends with {SUFFIXES[format]}; give one of the two")
    return found


PREDICTION_SUFFIXES = (".csv", ".jsonl", ".json")
Row = tuple[int | str, str | None, list[float]]  # a sample's name, the model that predicts, the probabilities


def add_predict(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="predict the classes of new samples with a device's personal model",
        description="Predict with the personal model of a device: one of a finished run, one that `fedcpsl export` "
        "wrote, or the current one of a device in a federation, also during training. Without --device, "
        "a table with the run's device column is predicted row by row: by the device's own model, and for devices that "
        "are not in the run by the global one. Prints a CSV line per sample: its number (for an image, its path), the "
        "model that predicted it if there are several, the most likely class, and the probability of every class. If "
        "the input has labels, the accuracy is printed to standard error.",
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
    from fedcpsl.export.model_manifest import accuracy
    from fedcpsl.storage import write_whole

    as_json = _wants_json(parsed.out, requested=parsed.json)
    if parsed.out and parsed.out.exists():
        raise InputError(f"{parsed.out}: exists already; give another --out")
    if parsed.out and not parsed.out.parent.is_dir():
        raise InputError(f"{parsed.out.parent}: no such folder; make it, or give another --out")
    manifest, samples, predictions, models = _predictions(parsed)
    rows = list(zip(samples.names, models, predictions.tolist(), strict=True))
    text = (_as_json if as_json else _as_csv)(manifest.classes, rows)
    if parsed.out:
        write_whole(parsed.out, text)
    else:
        sys.stdout.write(text)
    counts = accuracy(samples, predictions)
    if counts:
        correct, known = counts
        print(f"accuracy {100 * correct / known:.2f} % ({correct} of {known} labelled samples)", file=sys.stderr)
    return 0


def _predictions(parsed: argparse.Namespace) -> tuple[Any, Any, Any, Sequence[str | None]]:
    """Return the model's manifest, the samples, their probabilities, and per sample the model if there are several."""
    from fedcpsl.export.model_manifest import read_samples

    run = None if parsed.device else _run_of_many(parsed.model)
    if run is None:
        predictor = _predictor(parsed)
        samples = read_samples(parsed.input, predictor.manifest)
        return predictor.manifest, samples, predictor.predict(samples.x), [None] * len(samples.x)
    from fedcpsl.export.saved_run import find_device, manifest_of, predict_by_device

    manifest = manifest_of(run)
    samples = read_samples(parsed.input, manifest)
    if samples.devices is None:
        find_device(run, None, in_table=True)  # raises the error that says which options to give
    predictions, models, note = predict_by_device(run, samples.x, list(samples.devices or ()))
    if note:
        print(f"fedcpsl: {note}", file=sys.stderr)
    return manifest, samples, predictions, models


def _wants_json(out: Path | None, *, requested: bool) -> bool:
    """Return whether to write JSON lines: as requested, or by the file's suffix."""
    if out is None:
        return requested
    if out.suffix.lower() not in PREDICTION_SUFFIXES:
        raise InputError(f"{out}: give a name that ends with {', '.join(PREDICTION_SUFFIXES)}")
    if requested and out.suffix.lower() == ".csv":
        raise InputError(f"{out}: --json writes JSON lines; leave it out, or give a name that ends with .jsonl")
    return out.suffix.lower() != ".csv"


def _run_of_many(path: Path) -> Any:
    """Load a run if the path is a run's folder with several devices, else return None."""
    if not (path / "config.toml").is_file():
        return None
    from fedcpsl.export.saved_run import device_names, load_saved_run

    run = load_saved_run(path)
    return run if len(device_names(run)) > 1 else None


def _predictor(parsed: argparse.Namespace) -> Any:
    path: Path = parsed.model
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_file():
        from fedcpsl.export.model_files import read_model

        predictor = read_model(path, parsed.own)
        of = predictor.manifest
        if parsed.device not in (None, of.device, str(of.number)):
            raise InputError(f"--device {parsed.device}: {path} is the model of device {of.device}; leave it out")
        return predictor
    if (path / "config.toml").is_file() or (path / "comparison.json").is_file():
        from fedcpsl.export.saved_run import load_saved_run, model_of_device

        return model_of_device(load_saved_run(path), parsed.device).predictor
    if not any(path.glob("*/job.toml")):
        raise InputError(f"{path}: is neither a run's folder nor that of a device which has joined; give one of these")
    if parsed.device:
        raise InputError(f"--device {parsed.device}: {path} is no run's folder; leave it out for a device's own")
    return _predictor_of_a_joined_device(path)


def _predictor_of_a_joined_device(folder: Path) -> Any:
    from fedcpsl.deployment.device_process import columns_of, inputs_for, job_of, predictor
    from fedcpsl.export.model_manifest import ModelManifest, Predictor, shareable_config
    from fedcpsl.federation.device import predict

    participant = predictor(folder)
    job = job_of(participant)
    shapes = (job.classes, job.shape, job.features, job.scaling)
    config = shareable_config(job.config)
    config["data"] |= columns_of(participant)
    manifest = ModelManifest(folder.name, None, *shapes, None, job.config.algorithm.name, config, "")
    return Predictor(manifest, lambda x: predict(participant, inputs_for(job, x, folder)).numpy())


def _as_csv(classes: tuple[str, ...], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    by_device = rows[0][1] is not None
    table.writerow(["sample", *["model"] * by_device, "class", *classes])
    for name, model, probabilities in rows:
        table.writerow(
            [name, *[model] * by_device, _likeliest(classes, probabilities), *(f"{p:.6f}" for p in probabilities)]
        )
    return text.getvalue()


def _as_json(classes: tuple[str, ...], rows: Sequence[Row]) -> str:
    from fedcpsl.storage import to_json

    lines = [
        {"sample": name}
        | ({} if model is None else {"model": model})
        | {"class": _likeliest(classes, probabilities), "probabilities": dict(zip(classes, probabilities, strict=True))}
        for name, model, probabilities in rows
    ]
    return "".join(to_json(line) + "\n" for line in lines)


def _likeliest(classes: tuple[str, ...], probabilities: list[float]) -> str:
    return classes[max(range(len(probabilities)), key=probabilities.__getitem__)]


def add_adapt(commands: Any) -> None:
    adapt = commands.add_parser(
        "adapt",
        help="make a personal model for a new device, from a run's global model",
        description="Make a personal model for a device that was not in training. It starts from the global model, "
        "which is not changed, and is trained on the device's samples alone, labelled and unlabelled. Some labelled "
        "samples are held out to measure the gain.",
        allow_abbrev=False,
    )
    adapt.add_argument("run", type=Path, metavar="RUN", help="a finished run's folder")
    adapt.add_argument("--data", type=Path, required=True, metavar="FILE", help="the device's samples, as for `run`")
    adapt.add_argument("--label", metavar="COLUMN", help="the label column, if it has another name than in the run")
    adapt.add_argument("--name", default="new", help="the name of the device [new]")
    adapt.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="personal rounds; 0: no training, only the device's class prior, if the algorithm has one "
        "[as many rounds as a device of the run was active on average]",
    )
    adapt.add_argument("--out", type=Path, metavar="FOLDER", help="where to write [adapted/<name>]")
    adapt.add_argument("--json", action="store_true", help="the result as one JSON object")
    adapt.set_defaults(command=_adapt)


def _adapt(parsed: argparse.Namespace) -> int:
    folder = parsed.out or Path("adapted") / "".join(c if c.isalnum() or c in "-_." else "-" for c in parsed.name)
    if parsed.rounds is not None and parsed.rounds < 0:
        raise InputError(f"--rounds {parsed.rounds}: give at least 0")
    if not parsed.data.exists():
        raise InputError(f"{parsed.data}: no such file")
    from fedcpsl.export.adaptation import adapt, check_adaptable, rounds_of_a_device, write_adapted
    from fedcpsl.export.saved_run import load_saved_run
    from fedcpsl.settings import PUBLISHED_TESTS, Data
    from fedcpsl.storage import to_json

    run = load_saved_run(parsed.run)
    check_adaptable(run)
    if folder.exists():
        fix = "give another --out" if parsed.out else "give another --name, or --out FOLDER"
        raise InputError(f"{folder}: exists already; {fix}")
    trained = run.config.data
    label, test = parsed.label or trained.label, Data().test if trained.test == PUBLISHED_TESTS else trained.test
    file, side = str(parsed.data.absolute()), trained.image_size if parsed.data.is_dir() else 0
    data = Data(dataset="own", file=file, image_size=side, label=label, labelled=1.0, test=test)
    rounds = rounds_of_a_device(run) if parsed.rounds is None else parsed.rounds
    adapted = adapt(run, data, parsed.name, rounds)
    write_adapted(adapted, run, folder)
    result = {
        "folder": str(folder),
        "rounds": adapted.state.round,
        "held_out": adapted.held_out,
        "global": adapted.general,
        "personal": adapted.personal,
        "gain": adapted.personal - adapted.general,
        "gain_interval": adapted.gain,
    }
    print(to_json(result) if parsed.json else "\n".join([*_judgement(result), f"model    {folder}"]))
    return 0


def _judgement(result: dict[str, Any]) -> list[str]:
    """Say what was gained, on how many samples, and whether that is more than chance."""
    if not result["held_out"]:
        return ["no labelled sample could be held out, so the gain is not known: give more labels"]
    low, high = result["gain_interval"]
    count = result["held_out"]
    on = f"{count} sample{'s' * (count > 1)}"
    if low > 0:
        verdict = "the personal model is better than the global one"
    elif high < 0:
        verdict = "the global model is the better one here: use it with --device global"
    else:
        verdict = f"whether that is a gain cannot be known from {on}: more labelled samples would tell"
    return [
        f"on {on} held out:",
        f"  global model    {100 * result['global']:6.2f} %",
        f"  personal model  {100 * result['personal']:6.2f} %",
        f"  gain            {100 * result['gain']:+6.2f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})",
        verdict,
    ]
