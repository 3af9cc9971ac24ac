"""Studies, by running them: shared runs, resumed after a kill, tables beside what is in print, failures said."""

import csv
import json
import signal
import time
import tomllib

import numpy as np
import pytest
import torch

from fedcpsl.algorithms import members
from fedcpsl.cli import run_command
from fedcpsl.config import with_settings
from fedcpsl.errors import InputError
from fedcpsl.report.figures import final_accuracies
from fedcpsl.runs import run_groups
from fedcpsl.runs.study import (
    find_study,
    known_studies,
    lines_of,
    on_dataset,
    only_some,
    paper_studies,
    plan_of,
    read_study,
    run_plan,
    with_more,
)

from .command import PATIENCE_S, fedcpsl, spawn
from .test_docs import write_idx

BASE = """
[data]
dataset = "digits"
devices = 4
[model]
hidden = [8]
[work]
rounds = 3
active = 2
[run]
keep = "metrics"
"""
STUDY = """
title = "Two algorithms"
bases = { digits = "base.toml" }
chosen = "chosen.toml"
seeds = 2
reach = { digits = [0.05, 0.999] }

[panels."m = 2"]
work.active = 2
[panels."m = 3"]
work.active = 3

[rows.FedCPSL]
algorithm.name = "fedcpsl"
[rows.APFSL]
algorithm.name = "apfsl"
[rows.FedSHVR]
algorithm.name = "fedshvr"
work.active = "auto"

[published.digits]
"m = 2" = { FedCPSL = 98.2 }
"""
CHOSEN = "[digits.apfsl]\nalgorithm.alpha_p = 0.1\nalgorithm.eta = 0.01\n"


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "chosen.toml").write_text(CHOSEN)
    (tmp_path / "pair.toml").write_text(STUDY)
    return tmp_path


PUBLISHED = """
title = "Published tests"
bases = { mnist = "base-mnist.toml" }
seeds = 2
[rows.FedAvg]
algorithm.name = "fedavg"
[rows.SCAFFOLD]
algorithm.name = "scaffold"
"""


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_on_published_tests_says_how_the_global_model_does_on_all_of_them(desk, monkeypatch):
    monkeypatch.chdir(desk)
    rng = np.random.default_rng(0)
    for name, count in (("train", 200), ("t10k", 60)):
        write_idx(desk / f"mnist/{name}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
        write_idx(desk / f"mnist/{name}-labels-idx1-ubyte", np.arange(count) % 10)
    base = BASE.replace('"digits"', f'"mnist"\ndir = "{desk}"\npartition = "dirichlet"\ntest = "published"')
    (desk / "base-mnist.toml").write_text(base)
    (desk / "tests.toml").write_text(PUBLISHED)
    assert run_command(["paper", "tests.toml", "--out", "o"]) == 0
    results = desk / "o" / "mnist" / "results"
    rows = [row for row in rows_of(results / "tests.csv") if row["row"] == "FedAvg"]
    last = [
        (desk / f"o/mnist/runs/fedavg-seed{row['seed']}/metrics.jsonl").read_text().splitlines()[-1] for row in rows
    ]
    union = [float(row["union"]) for row in rows]
    assert union == pytest.approx([json.loads(line)["union"] for line in last], abs=1e-6)
    assert union != [float(row["global"]) for row in rows]  # devices have unequally many tests
    _, table = (
        (results / "tests.md").read_text().split("The global model on the published test images of all devices, %.")
    )
    assert f"| FedAvg | {100 * np.mean(union):.2f} ± " in table
    (desk / "base-mnist.toml").write_text(base.replace('test = "published"', "test = 0.2"))
    assert run_command(["paper", "tests.toml", "--out", "other"]) == 0
    assert "published test images" not in (desk / "other/mnist/results/tests.md").read_text()
    assert "union" not in rows_of(desk / "other/mnist/results/tests.csv")[0]


def test_a_study_is_run_once_and_its_tables_are_the_means_of_its_runs(desk):
    done = fedcpsl("paper", "pair.toml", "--out", "o", cwd=desk)
    assert done.returncode == 0, done.stderr
    runs = desk / "o" / "digits" / "runs"
    assert len(list(runs.iterdir())) == 10  # FedSHVR's are the same in both panels
    assert {p.name for p in next(runs.iterdir()).iterdir()} - {".lock"} == {
        "config.toml",
        "manifest.json",
        "metrics.jsonl",
        "confusion.csv",
        "devices.csv",
        "split.json",
    }
    results = desk / "o" / "digits" / "results"
    rows = rows_of(results / "pair.csv")
    assert len(rows) == 12
    ours = [float(r["personal"]) for r in rows if (r["panel"], r["row"]) == ("m = 2", "FedCPSL")]
    last = [
        json.loads((runs / f"fedcpsl-seed{seed}" / "metrics.jsonl").read_text().splitlines()[-1]) for seed in (0, 1)
    ]
    assert ours == pytest.approx([m["personal"]["mean"] for m in last], abs=1e-6)
    text = (results / "pair.md").read_text()
    assert f"| FedCPSL | {100 * np.mean(ours):.2f} ± " in text
    assert "(98.2) |" in text
    other = [float(r["personal"]) for r in rows if (r["panel"], r["row"]) == ("m = 2", "APFSL")]
    assert f"| APFSL | {100 * (np.mean(ours) - np.mean(other)):+.2f} ± " in text
    assert "`fedcpsl paper pair.toml`" in text
    assert len(rows_of(results / "pair-curves.csv")) == 12 * 4
    assert (results / "pair.svg").read_text().lstrip().startswith("<?xml")
    assert "Two algorithms" in (results / "pair.html").read_text()

    before = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs.iterdir()}
    again = fedcpsl("paper", "pair.toml", "--out", "o", "--seeds", "3", cwd=desk)
    assert again.returncode == 0, again.stderr
    assert len(list(runs.iterdir())) == 15
    assert all((run / "metrics.jsonl").stat().st_mtime_ns == at for run, at in before.items())

    partial = fedcpsl("paper", "pair.toml", "--out", "o", "--seeds", "4", "--partial", cwd=desk)
    assert partial.returncode == 0, partial.stderr
    assert "(3 of 4 seeds)" in (results / "pair.md").read_text()
    assert len(list(runs.iterdir())) == 15

    (desk / "other.toml").write_text(STUDY.replace("Two algorithms", "Another").replace("work.active = 3", ""))
    planned = fedcpsl("paper", "other.toml", "--out", "o", "--dry-run", cwd=desk)
    assert planned.stdout.splitlines()[-1] == "other on digits: 6 runs, 0 to do"


def test_killed_and_asked_again_it_ends_the_same(desk):
    (desk / "base.toml").write_text(BASE.replace("rounds = 3", "rounds = 60") + "checkpoint_seconds = 0.2\n")
    straight = fedcpsl("paper", "pair.toml", "--out", "a", cwd=desk)
    assert straight.returncode == 0, straight.stderr
    process = spawn("paper", "pair.toml", "--out", "b", cwd=desk)
    deadline = time.monotonic() + PATIENCE_S
    while not list((desk / "b").glob("digits/runs/*/checkpoints/*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = fedcpsl("paper", "pair.toml", "--out", "b", cwd=desk)
    assert again.returncode == 0, again.stderr
    for name in ("pair.csv", "pair-curves.csv"):
        a, b = ((desk / out / "digits" / "results" / name).read_text() for out in "ab")
        assert a == b


def test_a_map_and_a_trend(desk):
    grid = (
        "[grid]\nalgorithm.alpha_p = [0.01, 0.1]\nalgorithm.alpha_r = [0.01, 0.03]\n[settings]\ndata.validation = 0.2\n"
    )
    rows = '[rows.FedCPSL]\ngrid.algorithm.eta_g = ["mean_steps", "mean_effective_steps"]\n'
    head = 'title = "Choosing"\nbases = { digits = "base.toml" }\nseeds = 1\n'
    (desk / "tune.toml").write_text(f'{head}shows = "map"\n{grid}{rows}')
    panels = '[panels."10 %"]\ndata.labelled = 0.1\n[panels."50 %"]\ndata.labelled = 0.5\n'
    (desk / "labels.toml").write_text(f'{head}shows = "trend"\n{panels}[rows.FedCPSL]\nalgorithm.name = "fedcpsl"\n')
    done = fedcpsl("paper", "tune.toml", "labels.toml", "--out", "o", cwd=desk)
    assert done.returncode == 0, done.stderr
    results = desk / "o" / "digits" / "results"
    found = rows_of(results / "tune.csv")
    assert len(found) == 8
    best = max(found, key=lambda r: float(r["validation"]))
    line = (results / "tune.md").read_text().splitlines()[4]
    assert best["algorithm.alpha_p"] in line
    assert f"{100 * float(best['validation']):.2f}" in line
    assert "mean_effective_steps" in (results / "tune.svg").read_text()
    assert "50 %" in (results / "labels.svg").read_text()


def test_a_run_that_fails_does_not_take_the_others_with_it(desk):
    (desk / "pair.toml").write_text(STUDY + '[rows."far too fast"]\nalgorithm.name = "fedcpsl"\nalgorithm.eta = 1e30\n')
    done = fedcpsl("paper", "pair.toml", "--out", "o", "--seeds", "1", cwd=desk)
    assert done.returncode == 1
    assert "2 of 7 runs failed" in done.stderr
    assert "use a smaller algorithm.eta" in done.stderr
    text = (desk / "o" / "digits" / "results" / "pair.md").read_text()
    assert "| far too fast | - (1 failed) | - (1 failed) |" in text
    assert "| FedSHVR | " in text


def test_points_of_a_search_may_diverge_and_the_best_is_chosen(desk):
    """So that `paper tune --choose FILE && paper study` goes on."""
    head = 'title = "Choosing"\nbases = { digits = "base.toml" }\nseeds = 1\nshows = "map"\n'
    rows = '[settings]\ndata.validation = 0.2\n[rows.FedCPSL]\nalgorithm.name = "fedcpsl"\n'
    for name, points, code in (("some", "[0.01, 1e30]", 0), ("all", "[1e29, 1e30]", 1)):
        (desk / f"{name}.toml").write_text(f"{head}{rows}grid.algorithm.eta = {points}\n")
        done = fedcpsl("paper", f"{name}.toml", "--out", name, cwd=desk)
        assert done.returncode == code, done.stderr
        assert f"{1 + code} of 2 runs failed" in done.stderr
    done = fedcpsl("paper", "some.toml", "--out", "some", "--choose", "best.toml", cwd=desk)
    assert done.returncode == 0, done.stderr
    assert "eta = 0.01" in (desk / "best.toml").read_text()
    lost = '[rows.FedAvg]\nalgorithm.name = "fedavg"\ngrid.algorithm.eta = [1e30]\n'
    (desk / "lost.toml").write_text(f"{head}{rows}grid.algorithm.eta = [0.01]\n{lost}")
    done = fedcpsl("paper", "lost.toml", "--out", "lost", "--choose", "best.toml", cwd=desk)
    assert done.returncode == 1
    assert "every point of FedAvg failed: none is chosen" in done.stderr


def test_a_group_that_does_not_fit_is_restarted_with_fewer_runs(desk, monkeypatch, capsys):
    """The GPU's memory may be less by then than it was when the group was formed."""
    study = read_study(desk / "pair.toml")
    plan, begin, sizes = plan_of([study], "digits", 1), run_groups.start_together, []

    def out_of_memory(members):
        sizes.append(len(members))
        if len(members) > 2:
            for member in members:
                member.folder.mkdir()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin(members)

    (desk / "o").mkdir()
    monkeypatch.setattr(run_groups, "start_together", out_of_memory)
    assert run_plan(desk / "o" / "digits", plan, lambda group, _: [lambda *_: None] * len(group))
    assert sizes == [5, 2, 2, 1]
    assert "5 runs side by side do not fit into the GPU's memory; they restart, 2 at a time" in capsys.readouterr().err
    assert len(list((desk / "o" / "digits" / "runs").glob("*/devices.csv"))) == 5


def test_a_strip_for_a_grid_of_one_setting(desk):
    (desk / "strip.toml").write_text(
        'title = "Steps"\nshows = "map"\nbases = { digits = "base.toml" }\nseeds = 1\n'
        '[grid]\nalgorithm.eta = [0.01, 0.05]\n[rows.FedAvg]\nalgorithm.name = "fedavg"\n'
    )
    assert fedcpsl("paper", "strip.toml", "--out", "o", cwd=desk).returncode == 0
    assert "0.05" in (desk / "o" / "digits" / "results" / "strip.svg").read_text()


def test_studies_that_come_with_it_can_be_planned():
    assert set(paper_studies()) <= set(known_studies())
    for name in known_studies():
        whole = find_study(name)
        for dataset in whole.bases:
            study = on_dataset(whole, dataset)
            plan = plan_of([study], dataset)
            assert len({case.name for case in plan.cases}) == len(plan.cases)
            for case in plan.cases:
                with_settings(plan.base, case.settings)
            for panel, rows in study.published.get(dataset, {}).items():
                assert panel in study.panels
                assert set(rows) <= set(study.rows)
            if name in paper_studies():
                assert len(plan.seeds) == 5
    table = find_study("table")
    shared = plan_of([find_study(name) for name in ("table", "apfl", "hlu")], "mnist")
    assert len(shared.cases) == len(plan_of([table], "mnist").cases)  # the figures cost nothing more


def test_validation_seeds_are_not_the_reported_ones():
    for name in ("tune", "har-tune", "har-steps", "successor-tune"):
        study = find_study(name)
        assert study.settings["data.validation"] > 0
        assert study.first_seed >= 100


def test_a_data_set_has_panels_and_tuned_rows_of_its_own(desk):
    own = """
[dataset_panels.digits."few"]
work.active = 2
[dataset_panels.digits."many"]
work.active = 4
[tuned.digits."many".APFSL]
algorithm.eta = 0.3
"""
    (desk / "pair.toml").write_text(STUDY + own)
    study = on_dataset(read_study(desk / "pair.toml"), "digits")
    assert list(study.panels) == ["few", "many"]
    found = {
        (line.panel, line.row): with_settings(study.bases["digits"], line.case.settings).algorithm.eta
        for line in lines_of(study, "digits")
    }
    assert found["many", "APFSL"] == 0.3
    assert found["few", "APFSL"] != 0.3
    assert on_dataset(study, "mnist").panels == study.panels  # which has none of its own


def test_a_row_beats_what_was_chosen_and_what_is_given(desk):
    text = STUDY.replace('algorithm.name = "apfsl"', 'algorithm.name = "apfsl"\nalgorithm.eta = 0.02')
    (desk / "pair.toml").write_text(text)
    study = with_more(read_study(desk / "pair.toml"), {"algorithm.eta": 0.5, "algorithm.gamma": 0.1})
    line = next(line for line in lines_of(study, "digits") if line.row == "APFSL")
    config = with_settings(study.bases["digits"], line.case.settings).algorithm
    assert (config.eta, config.alpha_p, config.gamma) == (0.02, 0.1, 0.1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('title = "Two algorithms"', 'titel = "x"', "titel: no such key of a study; did you mean 'title'?"),
        ('title = "Two algorithms"', "", "a study needs title"),
        ("work.active = 2", "work.activ = 2", "did you mean 'active'?"),
        ("seeds = 2", 'seeds = 2\nreference = "FedCPS"', "no such row; did you mean"),
        ("seeds = 2", 'seeds = "2"', "seeds: must be a int"),
        ("seeds = 2", 'seeds = 2\nshows = "bars"', "give one of curves, costs, map, trend, rate"),
        ('"base.toml"', '"bases.toml"', "no such config file"),
        ("work.active = 3", "active = 3", "active stands outside a section"),
    ],
)
def test_a_wrong_study_is_named(desk, old, new, words):
    (desk / "pair.toml").write_text(STUDY.replace(old, new))
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        read_study(desk / "pair.toml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tabel"], "did you mean 'table'?"),
        (["pair.toml", "--dataset", "mnist"], "they have digits"),
        (["pair.toml", "--seed", "3"], "give --seeds N"),
        (["pair.toml", "--seeds", "0"], "at least 1"),
        (["pair.toml", "--gamma", "2"], "algorithm.gamma = 2"),
    ],
)
def test_a_wrong_command_is_one_line(desk, arguments, words):
    done = fedcpsl("paper", *arguments, cwd=desk)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (desk / "runs").exists()


def test_settings_that_are_refused_can_be_corrected(desk):
    """A study whose first run was refused has no runs yet: the corrected command may have another base."""
    arguments = ["paper", "pair.toml", "--out", "o", "--seeds", "1", "--processor", "cpu"]
    refused = fedcpsl(*arguments, "--precision", "tf32", cwd=desk)
    assert (refused.returncode, "give ieee" in refused.stderr) == (2, True)
    assert fedcpsl(*arguments, "--precision", "ieee", cwd=desk).returncode == 0


def test_many_rows_are_drawn_by_how_they_end():
    """Curves of so many rows could not be told apart: a line for each, the best first."""
    ends = {f"row {k}": (50.0 + k, 1.0, 40.0 if k % 2 else None) for k in range(13)}
    picture = final_accuracies({"m = 2": ends})
    places = [picture.index(f">{name}<") for name in reversed(ends)]
    assert places == sorted(places, reverse=True)
    assert "worst tenth of devices" in picture


def test_some_rows_and_panels_of_a_study(desk):
    study = read_study(desk / "pair.toml")
    row, panel = list(study.rows)[-1], next(iter(study.panels))
    some = only_some(study, [row], [panel])
    assert ({line.row for line in lines_of(some, "digits")}, some.reference) == ({row}, row)
    assert {line.panel for line in lines_of(some, "digits")} == {panel}
    assert only_some(study, [], []) == study
    listed = fedcpsl("paper", "pair.toml", "--rows", row, "--panels", panel, "--dry-run", "--seeds", "1", cwd=desk)
    assert (listed.returncode, "1 runs, 1 to do" in listed.stdout) == (0, True)
    wrong = fedcpsl("paper", "pair.toml", "--rows", row + "s", cwd=desk)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert f"--rows {row}s: not in the study pair; did you mean {row}" in wrong.stderr.replace("'", "")


def test_runs_with_other_settings_are_not_mixed(desk):
    assert fedcpsl("paper", "pair.toml", "--out", "o", "--seeds", "1", cwd=desk).returncode == 0
    done = fedcpsl("paper", "pair.toml", "--out", "o", "--seeds", "1", "--rounds", "4", cwd=desk)
    assert done.returncode == 2
    assert "its runs have another work.rounds" in done.stderr
    partial = fedcpsl("paper", "pair.toml", "--out", "o", "--seeds", "1", "--rounds", "4", "--partial", cwd=desk)
    assert (partial.returncode, "its runs have another work.rounds" in partial.stderr) == (2, True)
    run = next((desk / "o" / "digits" / "runs").iterdir())
    resumed = fedcpsl("run", "--resume", run, cwd=desk)
    assert (resumed.returncode, "has kept its metrics only" in resumed.stderr) == (2, True)


# What each needs, and choosing settings.

TUNE = """
title = "Settings"
shows = "map"
bases = { digits = "base.toml", other = "base.toml" }
datasets = ["digits"]
seeds = 2
first_seed = 100

[settings]
data.validation = 0.3

[rows.FedAvg]
algorithm.name = "fedavg"
grid.algorithm.eta = [0.0001, 0.1]
[rows.FedProx]
algorithm.name = "fedprox"
grid.algorithm.eta = [0.1]
grid.algorithm.mu = [0.0, 0.1]
[rows.Elsewhere]
datasets = ["other"]
algorithm.name = "fedhar"
grid.algorithm.eta = [0.1]
"""
FIELD = """
title = "The field"
bases = { digits = "base.toml" }
chosen = "chosen.toml"
needs = true
seeds = 2
reach = { digits = [0.05] }

[rows.FedAvg]
algorithm.name = "fedavg"
[rows.Ditto]
algorithm.name = "ditto"
[rows.SemiPFL]
algorithm.name = "semipfl"
algorithm.hyper_width = 4
data.server = 0.2
"""


def test_settings_are_chosen_and_the_table_says_what_each_row_needs(desk):
    (desk / "settings.toml").write_text(TUNE)
    (desk / "field.toml").write_text(FIELD)
    (desk / "chosen.toml").write_text("[har.ditto]\nalgorithm = { lam = 0.5 }\n")
    done = fedcpsl("paper", "settings.toml", "--out", "o", "--choose", "chosen.toml", cwd=desk)
    assert done.returncode == 0, done.stderr
    text = (desk / "chosen.toml").read_text()
    assert "# The best points of `fedcpsl paper settings`" in text
    assert "[har.ditto]\nalgorithm = { lam = 0.5 }" in text  # another data set's stay
    assert "[digits.fedavg]\nalgorithm = { eta = 0.1 }" in text
    rows = rows_of(desk / "o" / "digits" / "results" / "settings.csv")
    assert {row["row"] for row in rows} == {"FedAvg", "FedProx"}
    by_mu = {mu: [float(r["validation"]) for r in rows if r["algorithm.mu"] == mu] for mu in ("0.0", "0.1")}
    best = max(by_mu, key=lambda mu: np.mean(by_mu[mu]))
    assert f"[digits.fedprox]\nalgorithm = {{ eta = 0.1, mu = {best} }}" in text

    done = fedcpsl("paper", "field.toml", "--out", "o", cwd=desk)
    assert done.returncode == 0, done.stderr
    text = (desk / "o" / "digits" / "results" / "field.md").read_text()
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line
    }
    # gradients, models down, up and kept; what it learns from, what its server must see, what was chosen
    assert rows["FedAvg"][2:6] == [
        "1",
        "1.00",
        "1.01",
        "0.00",
    ]  # with its step count, beside a small model
    assert rows["FedAvg"][-3:] == ["L", "adds", "eta 0.1"]
    assert rows["Ditto"][2:6] == ["2", "1.00", "1.00", "1.00"]
    assert rows["Ditto"][-3:] == ["L", "adds", "defaults"]
    assert rows["SemiPFL"][-3:] == ["L U S", "sees", "defaults"]
    assert "| to 5 % |" in text

    refused = fedcpsl("paper", "field.toml", "--out", "o", "--partial", "--choose", "x.toml", cwd=desk)
    assert (refused.returncode, "not a study of settings" in refused.stderr) == (2, True)


PER_PANEL = """
[panels."m = 2"]
work.active = 2
[panels."m = 3"]
work.active = 3
[tuned.digits."m = 2".FedAvg]
algorithm.gamma = 0.0
"""
COMPARED = """
title = "Compared"
bases = { digits = "base.toml" }
chosen_by_panel = "tuned.toml"
[panels."m = 2"]
work.active = 2
[panels."m = 3"]
work.active = 3
[rows.FedAvg]
algorithm.name = "fedavg"
[rows.FedProx]
algorithm.name = "fedprox"
[tuned.digits."m = 3".FedProx]
algorithm.mu = 0.7
"""


def test_settings_are_chosen_panel_by_panel(desk, monkeypatch):
    monkeypatch.chdir(desk)
    (desk / "settings.toml").write_text(TUNE + PER_PANEL)
    (desk / "compared.toml").write_text(COMPARED)
    (desk / "tuned.toml").write_text('[har."a panel".FedAvg]\nalgorithm = { eta = 0.3 }\n')
    for panel in ("m = 2", "m = 3"):  # what the file has of other panels stays
        command = ["paper", "settings.toml", "--out", "o", "--panels", panel, "--choose", "tuned.toml"]
        assert run_command([*command, "--dataset", "digits"]) == 0
    text = (desk / "tuned.toml").read_text()
    assert '[har."a panel".FedAvg]\nalgorithm = { eta = 0.3 }' in text
    found = tomllib.loads(text)["digits"]
    assert found["m = 2"]["FedAvg"] == {"algorithm": {"gamma": 0.0, "eta": 0.1}}  # what the row was given too
    assert found["m = 3"]["FedAvg"] == {"algorithm": {"eta": 0.1}}
    mu = found["m = 2"]["FedProx"]["algorithm"]["mu"]
    chosen = {(line.panel, line.row): line.case.settings for line in lines_of(find_study("compared.toml"), "digits")}
    assert chosen["m = 2", "FedAvg"]["algorithm.eta"] == 0.1
    assert chosen["m = 2", "FedAvg"]["algorithm.gamma"] == 0.0
    assert chosen["m = 2", "FedProx"]["algorithm.mu"] == mu
    assert chosen["m = 3", "FedProx"] == {"algorithm.name": "fedprox", "algorithm.mu": 0.7, "work.active": 3}


def test_the_study_of_the_field_has_everybody_with_equal_effort():
    """A new algorithm by others belongs into it."""
    study, tune = find_study("related"), find_study("related-tune")
    assert list(study.rows) == list(tune.rows)
    names = {settings["algorithm.name"] for settings in study.rows.values()}
    assert set(members("related")) | {"fedcpsl", "fedcpsl2", "fedavg", "local"} == names
    for row, grid in tune.grids.items():
        assert np.prod([len(values) for values in grid.values()]) == 4, row
    assert tune.seeds == 2
    assert 2 * tune.settings["work.rounds"] == study.bases["mnist"].work.rounds
    assert not set(range(study.first_seed, study.seeds)) & {tune.first_seed, tune.first_seed + 1}
    for dataset in study.bases:
        both = [on_dataset(each, dataset) for each in (study, tune)]
        assert ("FedHAR" in both[0].rows) == (dataset == "har")
        assert len(lines_of(both[1], dataset)) == 4 * len(both[0].rows)
        for line in lines_of(both[0], dataset):
            assert with_settings(study.bases[dataset], line.case.settings).work.matched_steps


def test_a_row_for_a_data_set_that_the_study_lacks_is_refused(desk):
    (desk / "wrong.toml").write_text(TUNE.replace('["other"]', '["digts"]'))
    with pytest.raises(InputError, match="did you mean 'digits'"):
        read_study(desk / "wrong.toml")
