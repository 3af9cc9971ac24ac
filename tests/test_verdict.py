"""What came out, in plain words, with numbers worked out by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedcpsl.cli import run_command
from fedcpsl.config import new_config
from fedcpsl.report.verdict import comparison_verdicts, half_width, verdict, verdicts
from fedcpsl.runs import experiment
from fedcpsl.runs.comparison import interval
from fedcpsl.step_size import StepSizeSearch

from .command import QUICK

HEAD = "device,name,labelled,unlabelled,active_rounds,personal,global,localized\n"


def test_half_of_an_interval():
    """1, 2, 3: deviation 1, t = 4.3027 at 2 degrees of freedom: 4.3027 / sqrt(3) = 2.4842."""
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(2.4842, abs=1e-4)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0.9, 0.5), (0.8, 0.5), (0.85, 0.5)], "are better than B: +35.0 points over 3 devices"),
        ([(0.5, 0.9), (0.5, 0.8), (0.5, 0.85)], "are worse than B: -35.0 points over 3 devices"),
        ([(0.9, 0.5), (0.5, 0.9), (0.6, 0.5)], "A and B are not significantly different: +3.3 points over 3 devices"),
        ([(0.9, 0.5)], "+40.0 points on one device; one device is not enough for an interval"),
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


def test_equal_accuracies_are_said_where_devices_have_models(tmp_path):
    (tmp_path / "devices.csv").write_text(HEAD + "0,a,1,1,1,0.9,0.9,0.9\n1,b,1,1,1,0.8,0.8,0.8\n")
    assert verdicts(tmp_path) == ["the personal models are as accurate as the global one on each of 2 devices"]
    (tmp_path / "devices.csv").write_text(HEAD + "0,a,1,1,1,0.9,0.9,\n1,b,1,1,1,0.8,0.8,\n")
    assert verdicts(tmp_path) == []  # there is one model


@pytest.mark.parametrize("algorithm", ["fedcpsl2", "fedcpsl", "fedavg"])
def test_a_run_in_which_no_device_has_tests(algorithm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("m.npz", x=np.random.default_rng(0).normal(size=(8, 3)), y=np.arange(8) % 2, device=np.arange(8))
    words = ["--rounds", "1", "--eta", "0.1", "--set", "run.processes=1"]
    assert run_command(["run", "--data", "m.npz", "--algorithm", algorithm, *words, "--out", "r"]) == 0
    said = capsys.readouterr().out
    assert "no device has a test set, so no accuracy is known" in said
    assert "by round" not in said


def test_devices_alone_are_compared_as_in_a_comparison(tmp_path, monkeypatch, capsys):
    """If the run searched its step size, devices alone do so too, and the verdict names what they ran."""
    monkeypatch.chdir(tmp_path)
    words = ["--devices", "3", "--rounds", "2", "--set", "run.processes=1", "--set", "model.hidden=8,8"]
    for name, given in (("searched", []), ("given", ["--eta", "0.02"])):
        assert run_command(["run", *words, *given, "--out", name]) == 0
        capsys.readouterr()
        assert run_command(["report", name, "--alone"]) == 0
        assert "devices trained alone (fedcpsl2-alone)" in " ".join(capsys.readouterr().out.split())
        manifest = json.loads(Path(name, "alone", "manifest.json").read_text())
        assert ("step_size_search" in manifest) == (name == "searched")


def test_devices_alone_have_the_better_of_pseudo_labels_and_labels_alone(monkeypatch):
    """By the smallest loss of each search on labels held back; a step size that was given is not searched."""
    searches = {1.0: {0.01: 0.9, 0.1: 0.5}, 0.0: {0.01: 0.4, 0.1: 0.8}}

    def build(config, source=None, group=()):  # noqa: ARG001
        losses = searches[config.algorithm.lambda_u]
        found = StepSizeSearch(0.1, losses, 5, 100, 1.0) if config.algorithm.eta == "search" else None
        return SimpleNamespace(config=config, search=found)

    monkeypatch.setattr("fedcpsl.runs.experiment.build", build)
    config = new_config({"algorithm.eta": 0.1})
    assert experiment._alone(config, searched=True).config.algorithm.lambda_u == 0.0
    searches[1.0][0.1] = 0.3
    assert experiment._alone(config, searched=True).config.algorithm.lambda_u == 1.0
    published = new_config({"algorithm.name": "fedcpsl", "algorithm.eta": 0.1})
    monkeypatch.setattr(
        "fedcpsl.runs.experiment.build", lambda config, **_: SimpleNamespace(config=config, search=None)
    )
    assert experiment._alone(published, searched=False).config.algorithm.name == "local"
    given = experiment._alone(config, searched=False).config.algorithm
    assert (given.name, given.eta, given.lambda_u) == ("fedcpsl2-alone", 0.1, 1.0)


def test_zero_has_no_sign():
    pairs = [[(0.5, 0.5), (0.5, 0.5), (0.5, 0.5001)]]
    assert ": 0.0 points over 3 devices (95 % interval 0.0 to 0.0)" in verdict("one", "other", pairs, "")


def test_a_run_says_it(tmp_path, monkeypatch, capsys):
    """With all classes on every device one global model learns more than personal ones do."""
    monkeypatch.chdir(tmp_path)
    words = ["--partition", "iid", "--devices", "5", "--rounds", "20", "--set", "run.processes=1"]
    assert run_command(["run", "--algorithm", "fedcpsl", *words, "--out", "r"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the personal models are worse than the global one" in said
    assert "use the global model (--device global)" in said
    assert "The personal models are worse than the global one" in (tmp_path / "r" / "report.html").read_text()


def case(tmp_path, name, accuracies, general=None, validation=None):
    """A case of a comparison: [seeds][devices] accuracies, and those of a global model."""
    runs = []
    for seed, devices in enumerate(accuracies):
        folder = tmp_path / f"{name}-{seed}"
        folder.mkdir()
        rows = [f"{i},d{i},1,1,1,{a},{'' if general is None else general},{a}" for i, a in enumerate(devices)]
        (folder / "devices.csv").write_text(HEAD + "\n".join(rows) + "\n")
        mean = sum(devices) / len(devices)
        runs.append({"run": str(folder), "personal": mean, "validation": validation and validation[seed]})
    return {
        "name": name,
        "settings": {"algorithm.beta": name},
        "personal": interval([run["personal"] for run in runs]),
        "global": None if general is None else interval([general for _ in runs]),
        "validation": validation and interval(validation),
        "runs": runs,
    }


def compared(kind, *cases):
    for one in cases:
        pairs = zip(one["runs"], cases[0]["runs"], strict=True)
        one["difference"] = interval([a["personal"] - b["personal"] for a, b in pairs])
    return {"kind": kind, "cases": list(cases)}


def test_of_a_comparison(tmp_path):
    """Over seeds 0.9, 0.8, 0.85 against 0.5 and others: 40, 30, 35 points, 35 +- 12.4 as above."""
    ours = case(tmp_path, "ours", [[1.0, 0.8], [0.9, 0.7], [0.95, 0.75]], general=0.5)
    weak = case(tmp_path, "weak", [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], general=0.5)
    strong = case(tmp_path, "strong", [[0.99, 0.99], [0.9, 0.9], [0.93, 0.93]], general=0.5)
    alone = case(tmp_path, "alone", [[0.9, 0.8], [0.95, 0.7], [0.9, 0.75]])
    said = comparison_verdicts(compared("compare", ours, weak, strong, alone))
    assert said == [
        "ours is better than weak (+35.0 points, 95 % interval +22.6 to +47.4)",
        "ours is not significantly different from alone (+1.7 points, 95 % interval -7.8 to +11.2)",
        "ours is worse than strong (-9.0 points, 95 % interval -11.5 to -6.5)",
        "use strong on data like this",
        "the personal models of ours are better than its global one: +35.0 points over 3 seeds (95 % interval +22.6 to "
        "+47.4), better on 6 of 6 devices, worse on 0",
        "the personal models of ours and devices trained alone (alone) are not significantly different: +1.7 points "
        "over 3 seeds (95 % interval -7.8 to +11.2), better on 2 of 6 devices, worse on 1",
    ]
    assert "whether a federation pays is not known" in comparison_verdicts(compared("compare", ours, weak))[-1]


def test_of_a_sweep(tmp_path):
    """What validation samples choose need not be what tests would."""
    low = case(tmp_path, "a", [[0.9, 0.9], [0.9, 0.9]], general=0.9, validation=[0.7, 0.72])
    high = case(tmp_path, "b", [[0.8, 0.8], [0.8, 0.82]], general=0.9, validation=[0.8, 0.82])
    near = case(tmp_path, "c", [[0.8, 0.8], [0.8, 0.8]], general=0.9, validation=[0.79, 0.8])
    best, worse = comparison_verdicts(compared("sweep", low, high, near))
    assert best == (
        "the best of 3 by validation samples: b, 81.00 % (80.50 % on the tests); these are not significantly "
        "different: c"
    )
    assert "the personal models of b are worse than its global one: -9.5 points over 2 seeds" in worse
    levels = {"x": 0.9, "y": 0.8}
    by_tests = [case(tmp_path, name, [[a, a], [a + 0.01, a]], general=a) for name, a in levels.items()]
    only, *_ = comparison_verdicts(compared("sweep", *by_tests))
    assert only == "the best of 2 by the test sets: x, 90.25 %; it is significantly better than every other"


def test_without_a_counted_upload_there_is_no_verdict(tmp_path, capsys):
    """A slot that is too short for any upload: the global model is what it was at the start."""
    cell = ["--edge", "macro", "--set", "edge.deadline=10", "--set", "edge.slot=0.00001", "--algorithm", "fedcpsl"]
    assert run_command(["run", *QUICK, *cell, "--out", str(tmp_path / "a")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "edge: 0 of" in said
    assert "no upload was counted, so the global model is what it was at the start" in said
    assert "better than the global one" not in said
