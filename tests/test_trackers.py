"""Trackers get what a run logs, for real on local files, and can never stop a run."""

import json
import os
import sqlite3
from importlib.util import find_spec

import pytest

from fedcpsl.cli import run_command
from fedcpsl.runs import trackers
from fedcpsl.runs.trackers import flat_values

from .command import QUICK, environment, fedcpsl

ONE = [*QUICK, "--set", "run.processes=1", "--set", "run.executor=sequential"]


def needs(name):
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install 'fedcpsl[{name}]'")


def run(*arguments):
    return run_command(["run", *ONE, *map(str, arguments)])


def logged(folder):
    """What a run's own folder has, as trackers are given it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["round"]: flat_values(line) for line in lines}


def scalars(folder):
    """What TensorBoard would show: values by name and step, of whatever was not purged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {name: {e.step: e.value for e in read.Scalars(name)} for name in read.Tags()["scalars"]}


def assert_all_there(found, folder, tolerance=1e-6):
    wanted = logged(folder)
    assert set(found) == {name for values in wanted.values() for name in values}
    for name, by_round in found.items():
        assert by_round == pytest.approx({r: v[name] for r, v in wanted.items() if name in v}, rel=tolerance)


@needs("tensorboard")
def test_tensorboard_has_every_number(tmp_path, capsys):
    assert run("--out", tmp_path / "a", "--tracker", "tensorboard") == 0
    assert_all_there(scalars(tmp_path / "a"), tmp_path / "a")
    assert f"tracker  tensorboard --logdir {tmp_path / 'a' / 'tensorboard'}" in capsys.readouterr().err


@needs("tensorboard")
def test_a_resumed_run_goes_on_in_tensorboard(tmp_path):
    folder = tmp_path / "a"
    assert run("--out", folder, "--set", "run.checkpoint_seconds=0", "--tracker", "tensorboard") == 0
    (folder / "devices.csv").unlink()  # as if killed after the last round, with its checkpoint not yet written
    _, newest = sorted((folder / "checkpoints").iterdir())
    newest.unlink()
    assert run_command(["run", "--resume", str(folder), "--tracker", "tensorboard"]) == 0
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert_all_there(scalars(folder), folder)


@needs("tensorboard")
def test_every_run_of_a_comparison_is_tracked(tmp_path):
    options = ["--algorithms", "fedcpsl,local", "--seeds", "1", "--out", str(tmp_path / "c")]
    assert run_command(["compare", *ONE, *options, "--tracker", "tensorboard"]) == 0
    for name in ("fedcpsl-seed0", "local-seed0"):
        assert_all_there(scalars(tmp_path / "c" / "runs" / name), tmp_path / "c" / "runs" / name)


@needs("mlflow")
def test_mlflow_has_every_number_in_a_database(tmp_path):
    surroundings = environment() | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONWARNINGS": "default",
    }
    done = fedcpsl("run", *ONE, "--out", "a", "--tracker", "mlflow", cwd=tmp_path, env=surroundings)
    assert done.returncode == 0, done.stderr
    assert "failed at" not in done.stderr
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute("select key, step, value from metrics").fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
        status = database.execute("select status from runs").fetchall()
    database.close()
    found = {}
    for key, step, value in rows:
        found.setdefault(key, {})[step] = value
    assert_all_there(found, tmp_path / "a")
    assert params["algorithm.name"] == "fedcpsl"
    assert status == [("FINISHED",)]


@needs("wandb")
def test_wandb_works_offline(tmp_path):
    surroundings = environment() | {"WANDB_MODE": "offline", "PYTHONWARNINGS": "default", "HOME": str(tmp_path)}
    done = fedcpsl("run", *ONE, "--out", "a", "--tracker", "wandb", cwd=tmp_path, env=surroundings)
    assert done.returncode == 0, done.stderr
    assert "failed at" not in done.stderr
    known = json.loads((tmp_path / "a" / "tracker.json").read_text())["wandb"]
    (written,) = (tmp_path / "a" / "wandb").glob(f"offline-run-*/run-{known}.wandb")
    assert b"personal/mean" in written.read_bytes()
    assert f"tracker  wandb sync a/wandb/{written.parent.name}" in done.stderr


@needs("wandb")
def test_wandb_without_a_login_is_refused_before_anything_runs(tmp_path):
    kept = {key: value for key, value in environment().items() if not key.startswith("WANDB")}
    surroundings = kept | {"PYTHONWARNINGS": "default", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    done = fedcpsl("run", *ONE, "--out", "a", "--tracker", "wandb", cwd=tmp_path, env=surroundings)
    assert done.returncode == 2
    assert "not logged in" in done.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", trackers.OPEN)
def test_a_missing_library_is_named_before_anything_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    assert run("--out", tmp_path / "a", "--tracker", name) == 2
    assert f"pip install 'fedcpsl[{name}]'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("when", ["opening", "writing", "closing"])
def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(when, tmp_path, monkeypatch, capsys):
    asked = []

    def fail(*_):
        asked.append(when)
        raise ConnectionError("the server is gone\nand more")

    def nothing(*_):
        return None

    broken = trackers.Tracker(fail if when == "writing" else nothing, fail if when == "closing" else nothing, "there")
    monkeypatch.setattr(trackers, "require", nothing)
    monkeypatch.setitem(trackers.OPEN, "mlflow", fail if when == "opening" else lambda *_: broken)
    assert run("--out", tmp_path / "a", "--tracker", "mlflow") == 0
    said = capsys.readouterr().err
    assert len(asked) == 1  # nobody asks again
    assert said.count("mlflow failed at") == 1
    assert "the run continues: the server is gone\n" in said
    assert len(logged(tmp_path / "a")) == 4
    assert (tmp_path / "a" / "report.html").exists()


def test_a_tracker_changes_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "require", lambda _: None)
    seen = []
    tracker = trackers.Tracker(lambda round, values: seen.append((round, values)), lambda _: None, "there")
    monkeypatch.setitem(trackers.OPEN, "wandb", lambda *_: tracker)
    assert run("--out", tmp_path / "a", "--tracker", "wandb") == 0
    assert run("--out", tmp_path / "b") == 0
    assert (tmp_path / "a" / "devices.csv").read_bytes() == (tmp_path / "b" / "devices.csv").read_bytes()
    assert (tmp_path / "a" / "models.safetensors").read_bytes() == (tmp_path / "b" / "models.safetensors").read_bytes()
    assert dict(seen) == logged(tmp_path / "a")


def test_values_are_flat_and_finite():
    line = {"round": 3, "personal": {"mean": 0.5, "std": None}, "union": None, "gaps": {"total": 2}, "steps": 7}
    assert flat_values(line) == {"personal/mean": 0.5, "gaps/total": 2.0, "steps": 7.0}


def test_names_agree_with_the_command_line():
    from fedcpsl.cli.options import TRACKERS

    assert tuple(trackers.OPEN) == TRACKERS
