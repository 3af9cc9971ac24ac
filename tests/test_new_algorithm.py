"""docs/algorithm.md: its file, put where algorithms are found, runs, is right, and passes the conformance suite."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fedcpsl import algorithms
from fedcpsl.cli import run_command
from fedcpsl.runs.folder import read_metrics
from fedcpsl.sklearn import FedCPSLClassifier

from . import test_conformance as suite
from .command import environment, fedcpsl
from .small_runs import answers_of, ask, table_run
from .test_docs import BLOCKS, LESS_WORK, commands

PAGE = [block for block in BLOCKS if block.page == "algorithm.md" and block.language == "python"]


@pytest.fixture
def added(tmp_path, monkeypatch, request):
    """The page's first block, under another name and with more, as a file of the package while a test lasts."""
    more = getattr(request, "param", "")
    (tmp_path / "fedpull.py").write_text(PAGE[0].content.replace("fedprox", "fedpull") + more)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    algorithms.all_algorithms.cache_clear()
    yield "fedpull"
    algorithms.all_algorithms.cache_clear()
    sys.modules.pop("fedcpsl.algorithms.fedpull", None)
    vars(algorithms).pop("fedpull", None)


def test_a_folder_of_ones_own(tmp_path):
    """From the command line, with the setting of its own; a file that is wrong is named in one line."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "fedpull.py").write_text(PAGE[0].content.replace("fedprox", "fedpull"))
    named = {"env": environment() | {"FEDCPSL_ALGORITHMS": str(folder)}, "cwd": tmp_path}
    less = ["--rounds", "2", "--set", "model.hidden=[8]", "--set", "algorithm.mu=0.5", "--out", tmp_path / "run"]
    assert fedcpsl("run", "--algorithm", "fedpull", *less, **named).returncode == 0
    assert fedcpsl("show", tmp_path / "run", **named).returncode == 0
    misspelt = PAGE[0].content.replace("fedprox", "fedpulled") + "\n\ndef relable(targets):\n    return targets\n"
    for text, words in (
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("", "lacks "),
        (misspelt, "fedcpsl does not call 'relable'; did you mean 'relabel'?"),
    ):
        (folder / "wrong.py").write_text(text)
        done = fedcpsl("run", "--dry-run", **named)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"algorithms/wrong.py: {words}" in done.stderr
    absent = environment() | {"FEDCPSL_ALGORITHMS": str(tmp_path / "absent")}
    done = fedcpsl("run", "--dry-run", env=absent, cwd=tmp_path)
    assert (done.returncode, "absent: no such folder" in done.stderr) == (2, True)


FLIPPING = """
import torch

PREDICTS_WITH = ("mu",)


def predict(_, hyper, log_h, _log_h_own):
    return torch.log_softmax(-8 * torch.as_tensor(hyper.mu)[..., None, None] * log_h, -1)
"""


@pytest.mark.parametrize("added", [FLIPPING], indirect=True)
def test_predict_is_asked_where_devices_have_no_model_of_their_own(added, tmp_path, capsys):
    """It takes the least likely class: in evaluation, predictions, exported files and the classifier."""
    run = table_run(tmp_path / "run", algorithm__name=added, algorithm__mu=0.5, algorithm__eta=0.1, data__test=0.3)
    (last,) = read_metrics(run)[-1:]
    assert last["personal"]["mean"] < 0.5 < last["global"]["mean"]
    answers = []
    for device in ("ann", "global"):
        code, out, err = ask(capsys, "predict", run, tmp_path / "mine.csv", "--device", device)
        assert code == 0, err
        answers.append(answers_of(out))
        file = tmp_path / f"{device}.pt2"
        code, _, err = ask(capsys, "export", run, "--device", device, "--format", "torch", "--out", file)
        assert code == 0, err  # which compares the file's answers with the run's own
    rng = np.random.default_rng(0)
    x, phones = rng.normal(size=(90, 2)), np.repeat(["ann", "bob", "cid"], 30)
    y = (x.sum(1) > 0).astype(int)
    more = {"algorithm.mu": 0.5}
    learner = FedCPSLClassifier(algorithm=added, eta=0.1, rounds=5, active=3, settings=more).fit(x, y, device=phones)
    assert learner.score(x, y, device=phones) < 0.4
    assert learner.score(x, y) > 0.6


def test_the_page_shows_the_file_as_it_is():
    assert PAGE[0].content.strip() == (Path(algorithms.__file__).parent / "fedprox.py").read_text().strip()


def test_the_other_blocks_of_the_page_run(capsys):
    names = {"__name__": "docs"}
    for block in PAGE[1:]:
        exec(compile(block.content, f"algorithm.md:{block.line}", "exec"), names)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("fedavg")
    assert second.startswith("fedprox")
    assert first.split()[1] != second.split()[1]  # it does pull


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_round_is_deterministic(added, executor):
    suite.test_a_round_is_deterministic(added, executor)


@pytest.mark.parametrize(
    "check", [suite.test_executors_agree, suite.test_padding_changes_nothing, suite.test_inputs_are_not_modified]
)
def test_it_passes_the_suite(added, check):
    check(added)


@pytest.mark.parametrize("slots", [1, 3])
def test_chunking_changes_nothing(added, slots):
    suite.test_chunking_changes_nothing(added, slots)


def test_states_survive_saving(added, tmp_path):
    suite.test_states_survive_saving(added, tmp_path)


def test_its_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = [block for block in BLOCKS if block.page == "algorithm.md" and block.language == "bash"]
    given = [words for block in shell for words in commands(block)]
    assert [words[0] for words in given] == ["fedcpsl", "fedcpsl", "fedcpsl"]
    for _, command, *arguments in given:
        assert "fedprox" in " ".join(arguments)
        assert run_command([command, *arguments, *LESS_WORK[command]]) == 0
