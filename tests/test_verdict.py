"""What came out, in plain words, with numbers worked out by hand."""

import pytest

from fedcpsl.cli import run_command
from fedcpsl.report.verdict import half_width, verdict, verdicts

HEAD = "device,name,labelled,unlabelled,active_rounds,personal,global,localized\n"


def test_half_of_an_interval():
    """1, 2, 3: deviation 1, t = 4.3027 at 2 degrees of freedom: 4.3027 / sqrt(3) = 2.4842."""
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(2.4842, abs=1e-4)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0.9, 0.5), (0.8, 0.5), (0.85, 0.5)], "are better than B: +35.0 points over 3 devices"),
        ([(0.5, 0.9), (0.5, 0.8), (0.5, 0.85)], "are worse than B: -35.0 points over 3 devices"),
        ([(0.9, 0.5), (0.5, 0.9), (0.6, 0.5)], "A and B cannot be told apart: +3.3 points over 3 devices"),
        ([(0.9, 0.5)], "+40.0 points on one device; one device cannot tell more"),
    ],
)
def test_which_is_better(pairs, words):
    said = verdict("A", "B", [pairs], "do C")
    assert words in said
    assert said.endswith("do C") == ("worse" in words)


def test_interval_and_counts():
    """Differences 30, 35, 40: mean 35, deviation 5: 35 +- 4.3027 * 5 / sqrt(3) = 35 +- 12.42."""
    said = verdict("A", "B", [[(0.9, 0.5), (0.85, 0.5), (0.8, 0.5)]], "")
    assert "(95 % interval +22.6 to +47.4), better on 3 of 3 devices, worse on 0" in said
    assert verdict("A", "B", [[(0.5, 0.5), (0.6, 0.6)]], "") == ""  # they are the same model


def test_of_a_folder(tmp_path):
    rows = "0,a,1,1,1,0.9,0.5,0.9\n1,b,1,1,1,0.8,0.5,0.8\n2,c,1,1,1,,,\n3,d,1,1,1,0.85,0.5,0.8\n"
    (tmp_path / "devices.csv").write_text(HEAD + rows)
    (only,) = verdicts(tmp_path)
    assert "are better than the global one: +35.0 points over 3 devices" in only
    (tmp_path / "alone").mkdir()
    alone = "0,d,1,1,1,0.95,,0.9\n1,a,1,1,1,0.97,,0.9\n2,b,1,1,1,0.91,,0.8\n"
    (tmp_path / "alone" / "devices.csv").write_text(HEAD + alone)
    _, beside = verdicts(tmp_path)
    assert "are worse than devices trained alone: -9.3 points over 3 devices" in beside  # -7, -11, -10
    assert beside.endswith("train each alone")


def test_a_run_says_it(tmp_path, monkeypatch, capsys):
    """With all classes on every device one global model learns more than personal ones do."""
    monkeypatch.chdir(tmp_path)
    words = ["--partition", "iid", "--devices", "5", "--rounds", "20", "--set", "run.processes=1"]
    assert run_command(["run", *words, "--out", "r"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the personal models are worse than the global one" in said
    assert "use the global model (--device global)" in said
    assert "the personal models are worse than the global one" in (tmp_path / "r" / "report.html").read_text()
