"""Comparisons and sweeps, by running them: paired over seeds, resumed after a kill, every run's folder kept."""

import csv
import json
import signal
import time

import numpy as np
import pytest

from fedcpsl.algorithms import all_algorithms, members
from fedcpsl.cli.compare import listed_algorithms
from fedcpsl.config import Config
from fedcpsl.errors import InputError
from fedcpsl.runs.comparison import compare_plan, full_name, interval, summarise, sweep_plan

from .command import PATIENCE_S, fedcpsl, spawn

QUICK = ["--rounds", "3", "--devices", "4", "--active", "2", "--set", "model.hidden=[8]"]
SWEEP = ["sweep", "--algorithm", "fedcpsl", "--grid", "beta=.5,.9"]


def test_algorithms_are_compared_over_seeds(tmp_path):
    options = ["--algorithms", "fedcpsl,fedshvr,local", "--seeds", "2", "--reach", "0.05,0.999", *QUICK]
    done = fedcpsl("compare", *options, "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedshvr" in done.stdout
    assert "±" in done.stdout
    folder = tmp_path / "c"
    assert {p.name for p in (folder / "runs").iterdir()} == {
        f"{name}-seed{seed}" for name in ("fedcpsl", "fedshvr", "local") for seed in (0, 1)
    }
    assert {"comparison.json", "config.toml", "results.csv", "summary.json", "report.html", "plots"} <= {
        p.name for p in folder.iterdir()
    }
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    summary = json.loads((folder / "summary.json").read_text())
    first, _, local = summary["cases"]
    by_hand = [float(r["personal"]) for r in rows if r["case"] == "fedcpsl"]
    assert first["personal"]["mean"] == pytest.approx(np.mean(by_hand))
    assert first["difference"] is None
    of_local = [float(r["personal"]) for r in rows if r["case"] == "local"]
    assert local["difference"]["mean"] == pytest.approx(np.mean(np.subtract(of_local, by_hand)))
    assert local["global"] is None
    assert local["uplink_bytes"]["mean"] == 0
    assert [r["runs"] for r in first["reach"]] == [2, 0]
    splits = [json.loads((folder / "runs" / f"{n}-seed1" / "manifest.json").read_text()) for n in ("fedcpsl", "local")]
    assert splits[0]["split_sha256"] == splits[1]["split_sha256"]
    shown = fedcpsl("show", "c", cwd=tmp_path)
    assert "paired by seed" in shown.stdout
    assert json.loads(fedcpsl("show", "c", "--json", cwd=tmp_path).stdout)["seeds"] == [0, 1]
    again = fedcpsl("compare", *options, "--out", "c", cwd=tmp_path)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_a_run_of_a_group_is_the_run_alone(tmp_path):
    assert (
        fedcpsl("compare", "--algorithms", "apfl", "--seeds", "1", *QUICK, "--out", "c", cwd=tmp_path).returncode == 0
    )
    assert fedcpsl("run", "--algorithm", "apfl", *QUICK, "--out", "r", cwd=tmp_path).returncode == 0
    alone, together = tmp_path / "r", tmp_path / "c" / "runs" / "apfl-seed0"
    assert (alone / "models.safetensors").read_bytes() == (together / "models.safetensors").read_bytes()


def test_killed_and_resumed_it_ends_the_same(tmp_path):
    options = ["--algorithms", "fedcpsl,apfl", "--seeds", "2", *QUICK, "--rounds", "40"]
    straight = fedcpsl("compare", *options, "--out", "a", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    process = spawn("compare", *options, "--out", "b", cwd=tmp_path)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "b" / "runs" / "apfl-seed0" / "metrics.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    unfinished = fedcpsl("show", "b", cwd=tmp_path)
    assert (unfinished.returncode, "--resume b" in unfinished.stderr) == (2, True)
    resumed = fedcpsl("compare", "--resume", "b", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    for run in (tmp_path / "a" / "runs").iterdir():
        other = tmp_path / "b" / "runs" / run.name
        assert (run / "models.safetensors").read_bytes() == (other / "models.safetensors").read_bytes()


def test_asked_to_stop_it_says_how_to_go_on(tmp_path):
    process = spawn("compare", "--algorithms", "fedcpsl", *QUICK, "--rounds", "2000", "--out", "c", cwd=tmp_path)
    while not (tmp_path / "c" / "runs" / "fedcpsl-seed0" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "fedcpsl compare --resume c" in errors


def test_a_sweep_has_every_combination_and_a_heat_map(tmp_path):
    options = ["--grid", "alpha_p=.01,.1", "--grid", "beta=.5,.75,1", "--seeds", "1", "--set", "data.validation=0.2"]
    done = fedcpsl("sweep", "--algorithm", "fedcpsl", *options, *QUICK, "--out", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "s" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["algorithm.alpha_p"], r["algorithm.beta"]) for r in rows} == {
        (p, b) for p in ("0.01", "0.1") for b in ("0.5", "0.75", "1")
    }
    assert "validation" in done.stdout
    picture = (tmp_path / "s" / "plots" / "sweep.svg").read_text()
    assert "alpha_p" in picture
    assert "<image" in picture


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["compare", "--algorithms", "fedcpsl,fedcpls"], "did you mean 'fedcpsl'"),
        (["compare", "--algorithms", "apfl,apfl"], "'apfl' is given twice"),
        (["compare", "--algorithms", ","], "--algorithms: give some"),
        (["compare", "--algorithms", ""], "--algorithms: give some"),
        (["compare", "--seeds", "0"], "--seeds 0: give a whole number"),
        (["compare", "--reach", "95"], "accuracies from 0 to 1"),
        (["compare", "--beta", "7"], "algorithm.beta = 7"),
        (["compare", "--resume", "nowhere"], "not a comparison's folder"),
        (["compare", "--resume", "x", "--seeds", "2"], "give it without other options"),
        (["sweep"], "--grid: give what to sweep"),
        (["sweep", "--grid", "alpah_p=1"], "did you mean 'alpha_p'"),
        (["sweep", "--grid", "beta=.5,3"], "algorithm.beta = 3: give"),
        (["sweep", "--grid", "beta"], "give it as SETTING=A,B"),
        (["sweep", "--grid", "seed=1,2"], "give --seeds N"),
        (["sweep", "--grid", "name=a,b"], "in several sections"),
    ],
)
def test_bad_comparisons_get_one_line_and_write_nothing(command, words, tmp_path):
    done = fedcpsl(*command, *([] if "--resume" in command else QUICK), cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_interval_is_students():
    """1, 2, 3: mean 2, s = 1, s/sqrt(3) = 0.5774, t(0.975, 2) = 4.3027, half width 2.4841."""
    assert interval([1.0, 2.0, 3.0]) == {"mean": 2.0, "half_width": pytest.approx(2.4841, abs=1e-4)}
    assert interval([1.0]) == {"mean": 1.0, "half_width": None}
    assert interval([1.0, None]) is None


def test_plans():
    plan = compare_plan(Config(), ["fedcpsl", "fedshvr"], 3, [0.9])
    assert plan.seeds == [0, 1, 2]
    assert plan.cases[1].settings["work.active"] == "auto"  # it is defined for everybody
    assert full_name("alpha_p") == "algorithm.alpha_p"
    assert full_name("work.amount") == "work.amount"
    with pytest.raises(InputError, match="no such setting"):
        full_name("work.amuont")
    swept = sweep_plan(Config(), {"algorithm.gamma": [0.1, 0.2], "work.amount": [1, 2]}, 1, [])
    assert [case.name for case in swept.cases][:2] == ["gamma=0.1, amount=1", "gamma=0.1, amount=2"]


def test_the_table_says_what_its_reader_must_know(tmp_path):
    """Whether all did the same work, what chose the best, and what being computed side by side does."""
    few = ["--seeds", "1", "--rounds", "1", "--set", "run.processes=1"]
    passes = ["--no-matched-steps", *few, "--out", "a"]
    unequal = fedcpsl("compare", "--algorithms", "fedcpsl,fedavg", *passes, cwd=tmp_path)
    assert unequal.returncode == 0, unequal.stderr
    said = " ".join(unequal.stdout.split())
    assert "unequal work: fedcpsl took" in said
    assert "leave out --no-matched-steps to compare like with like" in said
    assert "computed side by side" in said
    assert " steps gradients " in said
    page = (tmp_path / "a" / "report.html").read_text()
    assert "unequal work: fedcpsl took" in page
    equal = fedcpsl("compare", "--algorithms", "fedcpsl,fedavg", *few, "--out", "b", cwd=tmp_path)
    assert "unequal work" not in equal.stdout
    cases = summarise(tmp_path / "b")["cases"]
    assert cases[0]["steps"] == cases[1]["steps"]
    assert [case["gradients_per_step"] for case in cases] == [4, 1]
    assert "one seed is not enough to compare algorithms" in equal.stdout
    by_tests = fedcpsl(*SWEEP, *few, "--out", "c", cwd=tmp_path)
    assert by_tests.stdout.strip().startswith("sweep of beta on digits, judged by test sets")
    assert "judged by test sets" in (tmp_path / "c" / "report.html").read_text().partition("</h1>")[0]
    assert "chosen by test sets" in " ".join(by_tests.stdout.split())
    kept = fedcpsl(*SWEEP, *few, "--set", "data.validation=0.2", "--out", "d", cwd=tmp_path)
    assert kept.returncode == 0, kept.stderr
    assert "chosen by test sets" not in kept.stdout
    assert "sweep of beta on digits, judged by validation samples" in kept.stdout
    alone = fedcpsl("compare", "--algorithms", "fedcpsl", *few, "--out", "e", cwd=tmp_path)
    assert "computed side by side" not in alone.stdout


def test_groups_leave_out_what_does_not_fit_and_say_why(tmp_path):
    done = fedcpsl("compare", "--algorithms", "fedcpsl,related", "--seeds", "1", *QUICK, "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reasons = [line for line in done.stderr.splitlines() if "is left out" in line]
    assert len(reasons) == 2
    assert "fedhar is left out: algorithm.name = 'fedhar': needs windows in the order of time" in reasons[0]
    assert "semipfl is left out: algorithm.name = 'semipfl': its server learns" in reasons[1]
    cases = [case["name"] for case in json.loads((tmp_path / "c" / "comparison.json").read_text())["cases"]]
    assert cases[0] == "fedcpsl"
    assert sorted(cases[1:]) == sorted({*members("related")} - {"fedhar", "semipfl"})
    assert "fedcpsl2" not in cases


def test_what_groups_there_are():
    assert set(members("all")) == set(all_algorithms())
    assert members("all")[0] == "fedcpsl"
    assert set(members("related")) | set(members("family")) <= set(members("all"))
    assert not set(members("related")) & set(members("family"))
    assert listed_algorithms("fedavg,all")[0] == ["fedavg"]
    assert "fedavg" not in listed_algorithms("fedavg,all,related")[1]


def test_an_algorithm_that_is_named_must_fit(tmp_path):
    done = fedcpsl("compare", "--algorithms", "fedhar,related", "--seeds", "1", *QUICK, "--out", "c", cwd=tmp_path)
    assert done.returncode == 2
    assert "order of time" in done.stderr
