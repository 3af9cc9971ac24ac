"""What the doctor says of a machine and of a run."""

import json
import time
from importlib import metadata
from pathlib import Path

import pytest

from fedcpsl.cli import run_command
from fedcpsl.config import Config, Data, with_settings
from fedcpsl.runs import environment
from fedcpsl.runs import estimate as estimates
from fedcpsl.runs.environment import inspect_datasets, inspect_extras, inspect_programs
from fedcpsl.runs.estimate import estimate, folder_bytes, steps_by_round
from fedcpsl.runs.experiment import build

from .command import QUICK
from .test_docs import write_idx

SMALL = {"data.devices": 4, "work.rounds": 3, "work.active": 2, "model.hidden": [8], "run.processes": 1}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(estimates, "TRIAL", 0.1)


def test_the_machine_in_words_and_as_json(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCPSL_DATA", raising=False)
    monkeypatch.setenv("FEDCPSL_CACHE", str(tmp_path / "cache"))
    assert run_command(["doctor"]) == 0
    words = capsys.readouterr().out
    for part in ("machine", "cores", "PyTorch", "can do", "data sets", "digits", "extras", "programs", "missing"):
        assert part in words
    assert "    fedcpsl data --dataset mnist\n" in words  # on a line of its own
    assert run_command(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {"machine", "able", "extras", "programs", "datasets", "missing"}
    assert 1 <= said["machine"]["usable_cores"] <= said["machine"]["cores"]
    assert 0 < said["machine"]["free_memory_bytes"] <= said["machine"]["memory_bytes"]
    assert {part["name"] for part in said["missing"]} >= {"mnist", "cifar10", "har"}
    assert list(tmp_path.iterdir()) == []


def test_data_sets_are_found_where_runs_find_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCPSL_CACHE", str(tmp_path / "cache"))
    import numpy as np

    for kind, shape in (("images-idx3", (4, 28, 28)), ("labels-idx1", (4,))):
        write_idx(tmp_path / "mnist" / f"train-{kind}-ubyte", np.zeros(shape))
    found = {part.name: part for part in inspect_datasets(Data(dir=str(tmp_path)))}
    assert found["mnist"].found == str(tmp_path / "mnist")
    assert found["mnist"].fix is None
    assert found["fashion-mnist"].found is None
    assert found["fashion-mnist"].fix == "fedcpsl data --dataset fashion-mnist"
    assert found["digits"].found
    wanted = Data(dataset="mnist", dir=str(tmp_path), test="published")
    lacking = {part.name: part for part in inspect_datasets(wanted)}["mnist"]
    assert (lacking.found, lacking.fix) == (None, "fedcpsl data --dataset mnist --set data.test=published")
    for kind, shape in (("images-idx3", (4, 28, 28)), ("labels-idx1", (4,))):
        write_idx(tmp_path / "mnist" / f"t10k-{kind}-ubyte", np.zeros(shape))
    assert {part.name: part for part in inspect_datasets(wanted)}["mnist"].found == str(tmp_path / "mnist")
    (tmp_path / "cache" / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    for number in range(1, 6):
        (tmp_path / "cache" / "cifar10" / "cifar-10-batches-bin" / f"data_batch_{number}.bin").touch()
    found = {part.name: part for part in inspect_datasets(Data(dir=str(tmp_path)))}
    assert Path(found["cifar10"].found).name == "cifar-10-batches-bin"
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "data_batch_1.bin").touch()
    broken = {part.name: part for part in inspect_datasets(Data(dir=str(tmp_path)))}["cifar10"]
    assert (broken.found, "unpack them all again" in broken.purpose) == (None, True)


def test_what_is_missing_comes_with_its_command(monkeypatch):
    real = metadata.version

    def without_flower(name):
        if name == "flwr":
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "pyarrow" else real(name)  # older than is asked for

    monkeypatch.setattr(environment.metadata, "version", without_flower)
    monkeypatch.setattr(environment, "_declared", lambda: {"flower": ["flwr==1.41.*"], "tables": ["pyarrow>=16"]})
    flower, tables = inspect_extras()
    for part, extra in ((flower, "flower"), (tables, "tables")):
        assert part.found is None
        assert "-m pip install" in part.fix
        assert f"[{extra}]" in part.fix
    able = environment.able({"accelerators": [], "usable_cores": 2}, [flower, tables])
    assert able["your own tables"] == "no, needs the extra tables"
    monkeypatch.setattr(environment.shutil, "which", lambda name, **_: "/apt" if name == "apt-get" else None)
    fixes = {part.name: part.fix for part in inspect_programs()}
    assert fixes["git"] == "sudo apt-get install git"
    assert "[flower]" in fixes["flower-superlink"]


def test_an_estimate_is_of_the_right_order(tmp_path, monkeypatch):
    """Loosely: how long a run takes depends on who else is at work."""
    monkeypatch.chdir(tmp_path)
    config = with_settings(Config(), SMALL | {"work.rounds": 40})
    experiment, found = estimate(config)
    assert list(tmp_path.iterdir()) == []
    began = time.monotonic()
    assert run_command(["run", *QUICK[2:], "--rounds", "40", "--set", "run.processes=1", "--out", "a"]) == 0
    seconds = time.monotonic() - began
    assert found.seconds.low < found.seconds.likely < found.seconds.high
    assert found.seconds.low / 10 < seconds < 10 * found.seconds.high
    metrics = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert found.steps == metrics["steps"]
    assert found.lacks == []
    kept = sum(path.stat().st_size for path in (tmp_path / "a").rglob("*.safetensors"))
    assert kept / 2 < folder_bytes(experiment) < 4 * kept
    assert 50e6 < found.host_bytes.likely < 20e9
    assert found.accelerator_bytes is None or found.accelerator_bytes.likely > 0


def test_steps_are_counted_whatever_the_rounds():
    for more in (
        {},
        {"work.unit": "hlu"},
        {"work.personal_rounds": 2},
        {"algorithm.name": "fedshvr", "work.active": 4},
    ):
        setup = build(with_settings(Config(), SMALL | more)).setup
        steps = steps_by_round(setup)
        assert len(steps) == setup.terms.total_rounds
        assert all(steps)
    long = build(with_settings(Config(), SMALL | {"work.rounds": 1000, "work.unit": "steps", "work.amount": 3})).setup
    assert steps_by_round(long) == [6] * 1000  # 2 devices of 3 steps


def test_a_config_and_its_estimate_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[work]\nrounds = 3\nactive = 2\n[data]\ndevices = 4\n[run]\nprocesses = 1\n")
    assert run_command(["doctor", "mine.toml", "--set", "model.hidden=[8]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    assert found["rounds"] == 3
    assert found["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    assert found["seconds"]["low"] < found["seconds"]["high"]
    assert found["device"].startswith(("cpu", "cuda"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    monkeypatch.setattr(estimates, "free_bytes", lambda _: -(1 << 60))
    assert run_command(["doctor", "mine.toml"]) == 1
    said = capsys.readouterr().out
    assert "this run" in said
    assert "it does not fit:\n  host memory: " in said
    assert run_command(["doctor", "--rounds", "0"]) == 2
    assert run_command(["doctor", "--dataset", "digit"]) == 2
    assert "did you mean 'digits'" in capsys.readouterr().err


def test_a_data_set_that_is_not_here_is_told_and_not_fetched(tmp_path, monkeypatch, capsys):
    from fedcpsl.data import download

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCPSL_DATA", raising=False)
    monkeypatch.setenv("FEDCPSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_downloaded_chunks", lambda *_: pytest.fail("a download"))
    assert run_command(["doctor", "--dataset", "cifar10"]) == 1
    said = capsys.readouterr()
    words = "cifar10 is missing (downloaded when first used, 170 MB), so there is no estimate; get it with:"
    assert said.out.endswith(f"this run\n  {words}\n    fedcpsl data --dataset cifar10\n")
    assert said.err == ""
    assert run_command(["doctor", "--dataset", "har", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["estimate"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_file_is_said_alone(tmp_path, capsys):
    assert run_command(["doctor", "--data", str(tmp_path / "nope.csv")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"fedcpsl: {tmp_path / 'nope.csv'}: no such file\n")
