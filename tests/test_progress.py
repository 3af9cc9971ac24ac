"""Progress bars: seen on a terminal, silent elsewhere, and nothing heavy imported for them."""

import io
import subprocess
import sys

from rich.console import Console
from rich.progress import Progress

from fedcpsl import Run, Work
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.data import notes as progress
from fedcpsl.step_size import search_eta
from tests.conftest import small_federation, small_model


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_and_wiped(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.track(iter("abc"), "counting [letters]", total=3)) == ["a", "b", "c"]
    with progress.bytes_bar("fetching", None) as advance:
        advance(1000)
    assert "counting [letters]" in terminal.getvalue()
    assert "fetching" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_progress_is_silent_below_another_bar(monkeypatch):
    """It would be drawn into it; what stderr is while rich shows a bar is no terminal."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with Progress(console=Console(file=terminal, force_terminal=True)):
        assert list(progress.track([1, 2], "counting")) == [1, 2]
    assert "counting" not in terminal.getvalue()


def test_a_search_for_a_step_size_says_what_it_tries(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    work = Work(rounds=2, active=2, unit="steps", amount=1)
    found = search_eta(small_federation(), small_model(), fedcpsl2.Settings(), work, Run(device="cpu", processes=1))
    assert found.losses
    assert "searching a step size: 0.003" in terminal.getvalue()


def test_progress_is_silent_elsewhere(capsys):
    assert list(progress.track([1, 2], "counting")) == [1, 2]
    with progress.bytes_bar("fetching", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = "import sys, fedcpsl.data.download; print({'rich', 'urllib.request'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
