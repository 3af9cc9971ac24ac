"""Progress bars: seen on a terminal, silent elsewhere, and nothing heavy imported for them."""

import io
import subprocess
import sys

from fedcpsl.data import notes as progress


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


def test_progress_is_silent_elsewhere(capsys):
    assert list(progress.track([1, 2], "counting")) == [1, 2]
    with progress.bytes_bar("fetching", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = "import sys, fedcpsl.data.download; print({'rich', 'urllib.request'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
