"""torchrun: two ranks give the result of one process, and a job that is stopped or loses a rank can go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedcpsl import config
from fedcpsl.cli import run_command
from fedcpsl.errors import InputError
from fedcpsl.runs.folder import read_manifest
from fedcpsl.simulation import prepare
from fedcpsl.torchrun import way_on

from .command import environment
from .conftest import small_federation, small_model
from .test_runs import assert_same_end, metrics, wait_for_rounds
from .test_workers import children, is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SETTINGS = {
    "model.hidden": "[16]",
    "work.unit": "hlu",
    "work.hlu": "[1, 3]",
    "work.personal_rounds": 3,
    "run.dtype": "float64",
    "run.checkpoint_seconds": 0,
    "run.evaluate_every": 2,
}
RUN = [
    "run",
    "--algorithm",
    "fedcpsl",
    "--rounds",
    "60",
    "--devices",
    "5",
    "--active",
    "3",
    "--loss-rate",
    ".2",
    "--processor",
    "cpu",
]
RUN += [f"--set={name}={value}" for name, value in SETTINGS.items()]


def torchrun(*arguments, cwd):
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*program, "-m", *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """A job's exit code, output and errors, once all its processes are gone."""
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def rank_processes(job):
    """The processes of a job by rank."""
    found = {}
    for pid in children(job.pid):
        said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(line[5:]): pid for line in said if line.startswith(b"RANK=")}
    return found


def complaints(errors):
    return [line for line in errors.splitlines() if line.startswith("fedcpsl: ")]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks came to in the cases of rank_cases.py."""
    out = tmp_path_factory.mktemp("cases")
    code, _, errors = ended(torchrun("tests.rank_cases", out, cwd=Path(__file__).parents[1]))
    assert code == 0, errors
    return out


def test_two_ranks_give_the_result_of_one_process(two_ranks):
    from .rank_cases import ends

    together = load_file(two_ranks / "rank0-0.safetensors")
    alone = ends()
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        assert (value - together[name]).abs().max() <= 1e-10 if value.numel() else True, name


def test_all_ranks_and_repetitions_have_the_same_bits(two_ranks):
    first, *others = sorted(two_ranks.glob("*.safetensors"))
    assert len(others) == 3
    for other in others:
        assert other.read_bytes() == first.read_bytes()


def test_an_error_of_one_rank_is_everybodys(two_ranks):
    assert (two_ranks / "error0.txt").read_text() == "RunError: rank 1: no room left"
    assert (two_ranks / "error1.txt").read_text() == "RuntimeError: no room left"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output, errors = ended(torchrun("fedcpsl", *RUN, "--out", "a", cwd=folder))
    assert code == 0, errors
    assert output.count("results  a") == 1
    assert errors == ""
    return folder / "a"


def test_the_command_gives_the_result_of_one_process(uninterrupted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command([*RUN, "--set", "run.processes=1", "--out", "a"]) == 0
    models, alone = (load_file(folder / "models.safetensors") for folder in (uninterrupted, tmp_path / "a"))
    assert models.keys() == alone.keys()
    assert all((models[name] - alone[name]).abs().max() <= 1e-10 for name in alone)
    for one, other in zip(metrics(uninterrupted), metrics(tmp_path / "a"), strict=True):
        for rounded in ("losses", "pseudo_label_confidence"):
            assert one.pop(rounded) == pytest.approx(other.pop(rounded), abs=1e-10)
        assert one == other
    assert read_manifest(uninterrupted)["layout"]["ranks"] == 2
    assert read_manifest(tmp_path / "a")["layout"]["ranks"] == 1


def test_stopped_then_bereft_of_a_rank_it_ends_bit_identical(uninterrupted, tmp_path, monkeypatch, capsys):
    job = torchrun("fedcpsl", *RUN, "--out", "a", cwd=tmp_path)
    wait_for_rounds(tmp_path / "a", 3, job)
    job.send_signal(signal.SIGINT)
    code, _, errors = ended(job)
    assert code != 0
    (line,) = complaints(errors)
    assert line.startswith("fedcpsl: stopped after round ")
    assert line.endswith("resume with: torchrun --nproc-per-node 2 -m fedcpsl run --resume a")

    monkeypatch.chdir(tmp_path)  # one process is not two ranks
    assert run_command(["run", "--resume", "a"]) == 2
    assert "was started with 2 ranks, not 1; resume it with: torchrun --nproc-per-node 2" in capsys.readouterr().err

    rounds = len(metrics(tmp_path / "a"))
    job = torchrun("fedcpsl", "run", "--resume", "a", cwd=tmp_path)
    wait_for_rounds(tmp_path / "a", rounds + 4, job)
    ranks = rank_processes(job)
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, errors = ended(job)
    assert code != 0
    assert time.monotonic() - began < 60
    (line,) = complaints(errors)
    assert line.startswith("fedcpsl: rank 1 is gone")
    assert line.endswith("resume with: torchrun --nproc-per-node 2 -m fedcpsl run --resume a")
    assert not any(is_alive(pid) for pid in ranks.values())
    assert not (tmp_path / "a" / "models.safetensors").exists()

    code, _, errors = ended(torchrun("fedcpsl", "run", "--resume", "a", cwd=tmp_path))
    assert code == 0, errors
    assert_same_end(tmp_path / "a", uninterrupted)


def test_wrong_input_is_said_once(uninterrupted):
    job = torchrun("fedcpsl", *RUN, "--out", "a", cwd=uninterrupted.parent)
    code, output, errors = ended(job)
    assert code != 0
    assert output == ""
    assert complaints(errors) == [
        "fedcpsl: a: exists already; give another --out, or --resume a to resume it",
    ]
    assert "exitcode  : 2" in errors


def test_ranks_are_processes_already(monkeypatch):
    monkeypatch.setattr("fedcpsl.simulation.setup.world", lambda: (0, 2))
    given = (small_federation(), small_model(), config.Algorithm(), config.Work())
    with pytest.raises(InputError, match=r"run\.processes = 2: torchrun's ranks"):
        prepare(*given, config.Run(processes=2, device="cpu"))
    assert prepare(*given, config.Run(device="cpu")).machine.processes == 1


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch):
    from fedcpsl.simulation import setup

    taken = []
    monkeypatch.setattr(setup, "world", lambda: (3, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert setup.choose_device("auto") == torch.device("cuda:1")
    assert taken == [torch.device("cuda:1")]
    with pytest.raises(InputError, match="give cuda"):
        setup.choose_device("cuda:0")


def test_how_to_go_on_is_said_as_it_was_started(monkeypatch):
    assert way_on("run", Path("a"), 1) == "fedcpsl run --resume a"
    said = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in (said | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert way_on("sweep", Path("a"), 4) == "torchrun ... -m fedcpsl sweep --resume a"
    assert way_on("run", Path("a"), 2) == "torchrun --nproc-per-node 2 -m fedcpsl run --resume a"
