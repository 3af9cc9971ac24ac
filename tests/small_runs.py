"""Finished runs on tiny data, to take models out of."""

import numpy as np

from fedcpsl.cli import run_command
from fedcpsl.config import Config, with_settings
from fedcpsl.runs.experiment import build, start

QUICK = {
    "work.rounds": 2,
    "work.active": 2,
    "run.processes": 1,
    "run.executor": "sequential",
    "run.device": "cpu",
    "model.hidden": [6],
}


def make_run(folder, **settings):
    """A run into a folder; settings as section__key."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    start(build(with_settings(Config(), QUICK | given)), folder, lambda *_: None)
    return folder


def write_table(path, rows=120, seed=0, phones=("ann", "bob", "cid"), unlabelled=0.3):
    """Two features on quite different scales, a label of two kinds and a phone."""
    rng = np.random.default_rng(seed)
    height, width = rng.normal(170, 10, rows), rng.normal(0.4, 0.01, rows)
    kind = np.where((height - 170) / 10 + (width - 0.4) / 0.01 > 0, "cat", "dog")
    shown = np.where(rng.random(rows) < unlabelled, "", kind)
    phone = rng.choice(phones, rows)
    lines = [f"{h:.3f},{w:.5f},{p},{k}" for h, w, p, k in zip(height, width, phone, shown, strict=True)]
    path.write_text("\n".join(["height,width,phone,kind", *lines]) + "\n")
    return path


def table_run(folder, **settings):
    """A run on `mine.csv` beside its folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    table = write_table(folder.parent / "mine.csv")
    own = {"data__file": str(table), "data__label": "kind", "data__device_column": "phone"}
    return make_run(folder, **own | settings)


def array_run(folder, x, classes=3, devices=3, **settings):
    """A run on arrays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    y = np.arange(len(x)) % classes
    np.savez(folder.parent / f"{folder.name}.npz", x=x, y=y, device=np.arange(len(x)) // classes % devices)
    return make_run(folder, data__file=str(folder.parent / f"{folder.name}.npz"), **settings)


def ask(capsys, *arguments):
    """A command in this process: its exit code, and what it printed and complained of."""
    capsys.readouterr()
    code = run_command([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def answers_of(text):
    """The probabilities of a CSV that `predict` printed."""
    return np.array([[float(p) for p in line.split(",")[2:]] for line in text.splitlines()[1:]])
