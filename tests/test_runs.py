"""Runs that are killed, stopped, filled up and damaged: they end as if nothing had happened, or say what did."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from fedcpsl.errors import RunError
from fedcpsl.runs import experiment
from fedcpsl.runs.checkpoint import drop_checkpoints

from .command import PATIENCE_S, environment, fedcpsl, spawn

RUN = [
    "run",
    "--algorithm",
    "fedcpsl",
    "--rounds",
    "40",
    "--devices",
    "5",
    "--active",
    "3",
    "--loss-rate",
    ".2",
    "--set",
    "model.hidden=[30]",
]
RUN += ["--set", "work.unit=hlu", "--set", "run.checkpoint_seconds=0", "--set", "run.processes=2"]


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def wait_for_rounds(folder, rounds, process):
    path = folder / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().count("\n") > rounds):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = fedcpsl(*RUN, "--out", "a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "a"


def assert_same_end(folder, uninterrupted):
    assert metrics(folder) == metrics(uninterrupted)
    for name in ("models.safetensors", "devices.csv"):
        assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes(), name


@pytest.mark.parametrize("attempt", range(3))
def test_killed_at_random_moments_and_resumed_ends_bit_identical(attempt, tmp_path, uninterrupted):
    moments = random.Random(attempt)
    process = spawn(*RUN, "--out", "a", cwd=tmp_path)
    for _ in range(2):
        rounds_now = len(metrics(tmp_path / "a")) if (tmp_path / "a" / "metrics.jsonl").exists() else 0
        wait_for_rounds(tmp_path / "a", min(rounds_now + moments.randrange(12), 38), process)
        time.sleep(moments.random() * 0.05)
        process.kill()
        process.communicate()
        process = spawn("run", "--resume", "a", cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_same_end(tmp_path / "a", uninterrupted)
    assert len(json.loads((tmp_path / "a" / "manifest.json").read_text())["resumed"]) == 2


def test_killed_before_its_first_checkpoint(tmp_path, uninterrupted):
    process = spawn(*RUN, "--set", "run.checkpoint_seconds=1000", "--out", "a", cwd=tmp_path)
    wait_for_rounds(tmp_path / "a", 3, process)
    process.kill()
    process.communicate()
    done = fedcpsl("run", "--resume", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_end(tmp_path / "a", uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_ends_the_round_and_says_how_to_go_on(number, tmp_path, uninterrupted):
    process = spawn(*RUN, "--set", "run.checkpoint_seconds=1000", "--out", "a", cwd=tmp_path)
    wait_for_rounds(tmp_path / "a", 5, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "fedcpsl run --resume a" in errors
    assert "Traceback" not in errors
    last = metrics(tmp_path / "a")[-1]["round"]
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == [f"round-{last:07d}.safetensors"]
    assert fedcpsl("run", "--resume", "a", cwd=tmp_path).returncode == 0
    assert_same_end(tmp_path / "a", uninterrupted)


def test_a_finished_run_resumes_to_itself(tmp_path, uninterrupted):
    before = (uninterrupted / "models.safetensors").read_bytes()
    assert fedcpsl("run", "--resume", uninterrupted, cwd=tmp_path).returncode == 0
    assert (uninterrupted / "models.safetensors").read_bytes() == before


@pytest.fixture
def stopped(tmp_path):
    """A run with checkpoints of two rounds."""
    process = spawn(*RUN, "--out", "a", cwd=tmp_path)
    wait_for_rounds(tmp_path / "a", 6, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    return tmp_path / "a"


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_serves(damage, stopped, uninterrupted):
    older, newest = sorted((stopped / "checkpoints").iterdir())
    whole = newest.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    newest.write_bytes({"cut": whole[: len(whole) // 2], "flipped": bytes(flipped), "emptied": b""}[damage])
    lines = (stopped / "metrics.jsonl").read_text()
    done = fedcpsl("run", "--resume", "a", cwd=stopped.parent)
    assert done.returncode == 1
    assert newest.name in done.stderr
    assert "corrupt" in done.stderr
    assert "Traceback" not in done.stderr
    assert older.exists()
    assert (stopped / "metrics.jsonl").read_text() == lines
    newest.unlink()
    assert fedcpsl("run", "--resume", "a", cwd=stopped.parent).returncode == 0
    assert_same_end(stopped, uninterrupted)


def limited(size):
    """The command with files limited to `size` bytes, which is how a full disk looks to it."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "from fedcpsl.cli import run_command; sys.exit(run_command(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX resource limits")
@pytest.mark.parametrize("size", [40_000, 2_000])
def test_a_full_disk_ends_in_one_line_with_what_was_good_intact(size, stopped, uninterrupted):
    """A checkpoint needs about 60 kB; the metrics outgrow 2 kB first."""
    before = {p.name: p.read_bytes() for p in (stopped / "checkpoints").iterdir()}
    arguments = ["run", "--resume", "a"]
    done = subprocess.run(
        [*limited(size), *arguments], cwd=stopped.parent, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {p.name: p.read_bytes() for p in (stopped / "checkpoints").iterdir()} == before
    assert not list(stopped.rglob("*.partial"))
    assert fedcpsl("run", "--resume", "a", cwd=stopped.parent).returncode == 0
    assert_same_end(stopped, uninterrupted)


def test_a_loss_that_turns_nan_names_round_and_device(tmp_path):
    done = fedcpsl(*RUN, "--eta", "1e30", "--gamma", "0", "--out", "a", cwd=tmp_path)
    assert done.returncode == 1
    assert "is no longer a finite number in round" in done.stderr
    assert "the loss of device" in done.stderr
    assert "Traceback" not in done.stderr
    checkpoints = list((tmp_path / "a" / "checkpoints").iterdir())
    for path in checkpoints:
        with safe_open(path, "pt") as file:
            assert file.get_tensor("server.theta").isfinite().all()


def test_changed_data_is_noticed(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(80, 4)), "y": rng.integers(0, 2, 80), "device": np.arange(80) % 4}
    np.savez(tmp_path / "mine.npz", **data)
    process = spawn(
        "run", "--algorithm", "fedcpsl", "--data", "mine.npz", "--rounds", "5000", "--out", "a", cwd=tmp_path
    )
    wait_for_rounds(tmp_path / "a", 1, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    data["x"][0, 0] += 1
    np.savez(tmp_path / "mine.npz", **data)
    done = fedcpsl("run", "--resume", "a", cwd=tmp_path)
    assert done.returncode == 2
    assert "data has changed" in done.stderr


def test_two_processes_cannot_work_on_one_run(tmp_path):
    process = spawn(*RUN, "--rounds", "5000", "--out", "a", cwd=tmp_path)
    try:
        wait_for_rounds(tmp_path / "a", 1, process)
        done = fedcpsl("run", "--resume", "a", cwd=tmp_path)
        assert done.returncode == 2
        assert "another process" in done.stderr
    finally:
        process.kill()
        process.communicate()


def test_resume_takes_no_other_settings(tmp_path):
    done = fedcpsl("run", "--resume", "a", "--rounds", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "give it without other options" in done.stderr
    assert fedcpsl("run", "--resume", "nowhere", cwd=tmp_path).returncode == 2
    assert list(Path(tmp_path).iterdir()) == []


def test_a_checkpoint_that_a_kill_left_half_written_goes_with_the_others(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("round-0000002.safetensors", ".round-0000003.safetensors.partial"):
        (tmp_path / "checkpoints" / name).write_bytes(b"")
    drop_checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())
    drop_checkpoints(tmp_path)


def test_a_save_that_fails_beside_others_is_said():
    saved = []

    def save(member, state):
        if member == "second":
            raise RunError(f"{member}: no space left at {state}")
        saved.append(member)

    with pytest.raises(RunError, match="second: no space left at 2"):
        experiment._save_each(["first", "second"], [1, 2], save)
    assert saved == ["first"]
