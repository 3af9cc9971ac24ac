"""docs/algorithm.md: its file, put where algorithms are found, runs, is right, and passes the conformance suite."""

import sys

import pytest

from fedcpsl import algorithms
from fedcpsl.cli import run_command

from . import test_conformance as suite
from .test_docs import BLOCKS, LESS_WORK, commands

PAGE = [block for block in BLOCKS if block.page == "algorithm.md" and block.language == "python"]


@pytest.fixture
def fedprox(tmp_path, monkeypatch):
    """The page's first block as a file of the package, for as long as a test lasts."""
    (tmp_path / "fedprox.py").write_text(PAGE[0].content)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    algorithms.all_algorithms.cache_clear()
    yield "fedprox"
    algorithms.all_algorithms.cache_clear()
    sys.modules.pop("fedcpsl.algorithms.fedprox", None)
    vars(algorithms).pop("fedprox", None)


def test_the_other_blocks_of_the_page_run(fedprox, capsys):
    names = {"__name__": "docs"}
    for block in PAGE[1:]:
        exec(compile(block.content, f"algorithm.md:{block.line}", "exec"), names)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("fedavg")
    assert second.startswith(fedprox)
    assert first.split()[1] != second.split()[1]  # it does pull


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_round_is_deterministic(fedprox, executor):
    suite.test_a_round_is_deterministic(fedprox, executor)


@pytest.mark.parametrize(
    "check", [suite.test_executors_agree, suite.test_padding_changes_nothing, suite.test_inputs_are_not_modified]
)
def test_it_passes_the_suite(fedprox, check):
    check(fedprox)


@pytest.mark.parametrize("slots", [1, 3])
def test_chunking_changes_nothing(fedprox, slots):
    suite.test_chunking_changes_nothing(fedprox, slots)


def test_states_survive_saving(fedprox, tmp_path):
    suite.test_states_survive_saving(fedprox, tmp_path)


def test_its_commands_run(fedprox, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = [block for block in BLOCKS if block.page == "algorithm.md" and block.language == "bash"]
    given = [words for block in shell for words in commands(block)]
    assert [words[0] for words in given] == ["fedcpsl", "fedcpsl", "fedcpsl"]
    for _, command, *arguments in given:
        assert fedprox in " ".join(arguments)
        assert run_command([command, *arguments, *LESS_WORK[command]]) == 0
