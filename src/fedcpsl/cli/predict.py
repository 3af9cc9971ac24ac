"""fedcpsl predict: what a device's personal model says of new samples."""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError


def add(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="classes of new samples by a device's personal model",
        description="Use the personal model that a device of a federation has by now, also while it is being trained. "
        "Prints a CSV line per sample: its number, the likeliest class, and the probability of every class.",
        allow_abbrev=False,
    )
    predict.add_argument("device", type=Path, metavar="FOLDER", help="the device's folder, as given to `fedcpsl join`")
    predict.add_argument("input", type=Path, metavar="INPUT", help="an .npy array, or an .npz file with x")
    predict.add_argument("--json", action="store_true", help="a JSON object per sample")
    predict.set_defaults(command=_predict)


def _predict(parsed: argparse.Namespace) -> int:
    from fedcpsl.federation.device import predict
    from fedcpsl.flower.member import inputs_for, job_of, predictor
    from fedcpsl.runs.files import to_json

    participant = predictor(parsed.device)
    job = job_of(participant)
    probabilities = predict(participant, inputs_for(job, _read(parsed.input), parsed.input)).tolist()
    table = csv.writer(sys.stdout, lineterminator="\n")
    if not parsed.json:
        table.writerow(["sample", "class", *job.classes])
    for i, each in enumerate(probabilities):
        best = job.classes[max(range(len(each)), key=each.__getitem__)]
        if parsed.json:
            print(to_json({"sample": i, "class": best, "probabilities": dict(zip(job.classes, each, strict=True))}))
        else:
            table.writerow([i, best, *(f"{p:.6f}" for p in each)])
    return 0


def _read(path: Path) -> Any:
    import numpy as np

    from fedcpsl.data.archive import read_archive

    if path.suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as an array: {error}") from error
    arrays = read_archive(path)
    if "x" not in arrays:
        raise InputError(f"{path}: has no array 'x' (it has {', '.join(arrays) or 'none'}); add it")
    return arrays["x"]
