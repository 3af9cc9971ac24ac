"""The page of runs: complete, self-contained, right, and drawn by a real browser."""

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from rich.console import Console

from fedcpsl.cli import run_command
from fedcpsl.config import Config, with_settings
from fedcpsl.data.sources import load_federation
from fedcpsl.report.charts import MAX_POINTS, accuracy_charts, ticks
from fedcpsl.report.loaded_runs import RunSet, SeedGroup, alone_for, load_run, load_runs, try_load_runs
from fedcpsl.report.page import page_of
from fedcpsl.report.sections import cards_section, maps_of_split, render
from fedcpsl.report.tables import (
    Column,
    Table,
    best_and_worst,
    plain,
    points,
    seconds,
    size,
    to_csv,
    to_latex,
    to_markdown,
)
from fedcpsl.report.terminal import progress, sparkline
from fedcpsl.report.verdict import sentence, state_of
from fedcpsl.runs import split_summary

from .browser import CHROMIUM, MISSING, Browser
from .command import QUICK

ONE = [*QUICK, "--set", "run.processes=1", "--set", "run.executor=sequential"]
SECTIONS = (
    "Accuracy by round",
    "Accuracy per device",
    "Who holds what",
    "Pseudo-labels",
    "What it took",
    "Run it again",
)


def fedcpsl(*arguments):
    return run_command([str(argument) for argument in arguments])


def page_data(page):
    """The JSON that a page draws from."""
    return json.loads(re.search(r'<script id="page-data" type="application/json">(.*?)</script>', page, re.S)[1])


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def run(desk):
    assert fedcpsl("run", *ONE, "--gaps", "--out", desk / "a") == 0
    return desk / "a"


@pytest.fixture(scope="module")
def comparison(desk):
    assert fedcpsl("compare", *ONE, "--algorithms", "fedcpsl,local", "--seeds", "2", "--out", desk / "c") == 0
    return desk / "c"


@pytest.fixture(scope="module")
def sweep(desk):
    grids = ["--grid", "beta=.25,.75", "--grid", "gamma=0,.8", "--grid", "amount=1,2"]
    assert fedcpsl("sweep", *grids, "--seeds", "1", *ONE, "--rounds", "2", "--out", desk / "s") == 0
    return desk / "s"


@pytest.fixture(scope="module")
def study(desk):
    (desk / "base.toml").write_text("")
    (desk / "mine.toml").write_text(
        'title = "Alone or not"\nbases = { digits = "base.toml" }\nseeds = 1\n'
        '[rows.FedCPSL]\nalgorithm.name = "fedcpsl"\n[rows.alone]\nalgorithm.name = "local"\n'
    )
    assert fedcpsl("paper", desk / "mine.toml", *ONE, "--out", desk / "p") == 0
    return desk / "p" / "digits"


def is_self_contained(page):
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    outside = [link for link in links if not link.startswith(("#", "data:"))]
    return not outside and "@import" not in page and "url(http" not in page and len(page) < 2_000_000


def test_the_page_is_complete_and_needs_nothing_else(run):
    page = (run / "report.html").read_text()
    for words in (*SECTIONS, "Optimality gap", "personal accuracy", "fedcpsl run config.toml", "worst tenth"):
        assert words in page, words
    assert "fedcpsl on digits: 4 devices, 2 of them active in each of 3 rounds" in page
    assert f"fedcpsl report {run} --alone" in page
    assert 'name = "fedcpsl"' in unescape(page)
    assert is_self_contained(page)
    assert set(page_data(page)["charts"]) == {"accuracy", "labels", "gaps"}
    assert page.count('role="img"') == 3 + 4  # three charts and four devices


def test_plots_and_numbers_agree_with_the_metrics(run):
    assert {p.name for p in (run / "plots").iterdir()} == {"accuracy.svg", "devices.svg"}
    with (run / "devices.csv").open() as file:
        devices = list(csv.DictReader(file))
    mean = sum(float(d["personal"]) for d in devices) / len(devices)
    page = (run / "report.html").read_text()
    assert f"{100 * mean:.2f} %" in page
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    series = {s["name"]: s for s in page_data(page)["charts"]["accuracy"]["series"]}
    assert list(series) == ["personal", "global", "localized"]
    for name, found in series.items():
        assert found["x"] == [0, 1, 2, 3]
        assert found["y"] == pytest.approx([100 * m[name]["mean"] for m in lines], rel=1e-3)
        assert found["devices"] == pytest.approx([100 * m[name]["std"] for m in lines], rel=1e-3, abs=1e-3)
    confidence = page_data(page)["charts"]["labels"]["series"][1]
    assert confidence["name"] == "confidence"
    assert confidence["y"] == pytest.approx(
        [100 * m["pseudo_label_confidence"] for m in lines if m["pseudo_label_confidence"]], rel=1e-3
    )


def test_the_map_shows_what_devices_hold(run):
    holdings = json.loads((run / "split.json").read_text())
    with (run / "devices.csv").open() as file:
        devices = list(csv.DictReader(file))
    assert [sum(row) for row in holdings["labelled"]] == [int(d["labelled"]) for d in devices]
    assert [sum(row) for row in holdings["unlabelled"]] == [int(d["unlabelled"]) for d in devices]
    page = (run / "report.html").read_text()
    assert page.count('class="heat ') == 4  # and two of what is taken for what
    device, kind = next((i, c) for i, row in enumerate(holdings["labelled"]) for c, n in enumerate(row) if n)
    count = holdings["labelled"][device][kind]
    assert f"device {device}, class {kind}: {count} labelled, " in page


def test_gains_come_from_devices_that_train_alone(comparison):
    page = (comparison / "report.html").read_text()
    assert is_self_contained(page)
    assert "over alone" in page
    assert "vs fedcpsl" in page
    assert "--alone" not in page
    accuracies = []
    for name in ("fedcpsl-seed0", "local-seed0"):
        with (comparison / "runs" / name / "devices.csv").open() as file:
            accuracies.append([float(d["personal"]) for d in csv.DictReader(file)])
    gains = [100 * (a - b) for a, b in zip(*accuracies, strict=True)]
    assert f"{sum(g > 0 for g in gains)} of 4 devices are better off and {sum(g < 0 for g in gains)} worse" in page
    charts = page_data(page)["charts"]
    assert [s["name"] for s in charts["accuracy-personal"]["series"]] == ["fedcpsl", "local"]
    assert charts["accuracy-personal"]["series"][0]["n"] == 2
    assert "uplink" in charts


def test_a_run_of_a_comparison_finds_its_neighbour(comparison):
    run_set = load_runs([comparison / "runs" / "fedcpsl-seed1"])
    found = alone_for(run_set.runs[0], run_set.references)
    assert found.folder.name == "local-seed1"
    assert alone_for(load_run(comparison / "runs" / "fedcpsl-seed0"), run_set.references) is not found


def test_gains_are_measured_against_as_much_work(comparison):
    run, beside = (load_run(comparison / "runs" / name) for name in ("fedcpsl-seed0", "local-seed0"))

    def other(loaded, **work):
        return loaded._replace(config=replace(loaded.config, work=replace(loaded.config.work, **work)))

    longer = other(beside, rounds=9)
    smaller = beside._replace(config=replace(beside.config, model=replace(beside.config.model, hidden=[2])))
    assert alone_for(run, [longer, smaller]) is None
    everyone = other(beside, active=4)
    assert alone_for(run, [longer, everyone]) is everyone
    inside = longer._replace(folder=run.folder / "alone")
    assert alone_for(run, [everyone, inside]) is inside


def test_devices_are_trained_alone_on_demand(run, desk, comparison, capsys):
    shutil.copytree(run, desk / "b")
    before = (desk / "b" / "metrics.jsonl").read_bytes()
    assert fedcpsl("report", desk / "b", "--alone") == 0
    page = (desk / "b" / "report.html").read_text()
    assert "over training alone" in page.lower()
    assert (desk / "b" / "metrics.jsonl").read_bytes() == before
    beside = comparison / "runs" / "local-seed0" / "devices.csv"
    assert (desk / "b" / "alone" / "devices.csv").read_text() == beside.read_text()  # as a comparison would have it
    assert fedcpsl("report", desk / "b" / "alone", "--alone") == 2
    assert "train alone already" in capsys.readouterr().err


def test_runs_side_by_side_on_one_page(run, comparison, desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    assert fedcpsl("report", run, comparison) == 0
    page = (desk / "report.html").read_text()
    assert fedcpsl("report", run, comparison) == 0  # its own page it may replace
    assert is_self_contained(page)
    names = [s["name"] for s in page_data(page)["charts"]["accuracy-personal"]["series"]]
    assert names == ["fedcpsl, gaps=True", "fedcpsl, gaps=False", "local"]
    (desk / "thesis.html").write_text("mine")
    capsys.readouterr()
    assert fedcpsl("report", run, "--out", desk / "thesis.html") == 2
    assert "no report; give another --out" in capsys.readouterr().err
    assert (desk / "thesis.html").read_text() == "mine"


def test_the_same_run_twice_is_not_two_seeds(run, desk):
    shutil.copytree(run, desk / "again")
    run_set = load_runs([run, desk / "again"])
    assert [(group.name, len(group.runs)) for group in run_set.groups] == [("fedcpsl (1)", 1), ("fedcpsl (2)", 1)]


def test_sweeps_and_studies_have_the_same_page(sweep, study):
    page = (sweep / "report.html").read_text()
    assert "beta=0.25, gamma=0, amount=1" in page
    assert 'class="picture sweep"' in page
    page = (study / "results" / "mine.html").read_text()
    assert "Personal accuracy, %, mean over devices and seeds." in page
    assert [s["name"] for s in page_data(page)["charts"]["accuracy-personal"]["series"]] == ["FedCPSL", "alone"]
    assert "over alone" in page
    assert fedcpsl("report", study) == 0
    assert is_self_contained((study / "report.html").read_text())


def test_tables_as_text(run, comparison, desk, capsys):
    assert fedcpsl("report", comparison, "--format", "md") == 0
    text = capsys.readouterr().out
    assert "| algorithm | seeds | rounds |" in text
    assert text.count("Accuracy per device") == 4
    assert fedcpsl("report", run, "--format", "latex", "--out", desk / "t.tex") == 0
    assert (desk / "t.tex").read_text().count(r"\begin{tabular}") == 3
    capsys.readouterr()
    assert fedcpsl("report", run, "--format", "csv", "--table", "rounds") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [float(row["personal"]) for row in rows] == [m["personal"]["mean"] for m in lines]
    assert fedcpsl("report", comparison, "--format", "csv") == 0
    first = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert 0 < float(first["personal"]) < 1
    assert float(first["personal_half_width"]) >= 0
    assert fedcpsl("report", comparison, "--format", "csv", "--table", "devices") == 2


def test_tables_replace_no_file_but_their_own(run, comparison, desk, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    for form in ("md", "latex", "csv"):
        for name in ("metrics.jsonl", "devices.csv", "config.toml"):
            assert fedcpsl("report", run, "--alone", "--format", form, "--out", run / name) == 2
            assert "exists and is no report; give another --out" in capsys.readouterr().err
        for table in ("summary", "reach", "devices", "rounds"):
            for _ in range(2):
                path = desk / f"own-{table}.{form}"
                assert fedcpsl("report", run, "--format", form, "--table", table, "--out", path) == 0
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (run / "alone").exists()  # refused before any work
    assert fedcpsl("report", comparison, "--format", "csv", "--out", desk / "own-summary.csv") == 0
    assert fedcpsl("report", run, "--format", "md", "--out", desk / "nowhere" / "t.md") == 2
    assert "no such folder; make it" in capsys.readouterr().err


def test_a_table_without_rows_is_left_out_and_said(run, desk, capsys):
    shutil.copytree(run, desk / "low")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["personal"]["mean"] = 0.3
    (desk / "low" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for form, begins in (("md", "No run got to 50 %.\n"), ("latex", "% No run got to 50 %.\n")):
        for _ in range(2):  # its own file it may replace
            out = desk / f"low.{form}"
            assert fedcpsl("report", desk / "low", "--format", form, "--table", "reach", "--out", out) == 0
        assert (desk / f"low.{form}").read_text() == begins
    assert fedcpsl("report", desk / "low", "--format", "latex") == 0
    text = capsys.readouterr().out
    assert text.count(r"\begin{tabular}") == 2
    assert "\n\n    \\bottomrule" not in text


def test_samples_without_a_label_of_their_own_are_counted(desk, capsys):
    rows = [f"{i % 7},{i % 5},{'' if i % 5 < 3 else 'ab'[i % 2]},{i % 2}" for i in range(100)]
    (desk / "few.csv").write_text("\n".join(["p,q,kind,who", *rows]) + "\n")
    own = ["--data", desk / "few.csv", "--label", "kind", "--device-column", "who", "--active", "2"]
    assert fedcpsl("run", *own, "--rounds", "1", *ONE[6:], "--out", desk / "few") == 0
    with (desk / "few" / "devices.csv").open() as file:
        devices = list(csv.DictReader(file))
    seen = sum(int(d["labelled"]) for d in devices)
    assert [int(d["unlabelled"]) for d in devices] == [30, 30]
    page = (desk / "few" / "report.html").read_text()
    says = f", {100 * seen / (seen + 60):.3g} % of the training samples labelled, seed 0."
    assert says in page
    assert "<caption>unlabelled, most 30</caption>" in page
    assert '--v:100%" title="device 0, class unknown: 30 unlabelled">30</td>' in page
    assert sentence(RunSet([SeedGroup("a", [load_run(desk / "few")._replace(devices=[])])], [], {}, 0)).endswith(says)
    capsys.readouterr()
    assert fedcpsl("data", *own, "--picture", desk / "few.svg") == 0
    said = capsys.readouterr().out
    assert "unlabelled, most 30" in said
    assert said.count("▕██▏") == 2  # the column of the unknown
    assert ">?</text>" in (desk / "few.svg").read_text()


def test_what_was_gained_is_of_all_or_not_said(comparison):
    run_set = load_runs([comparison])
    (served, alone), references = run_set.groups, run_set.references
    better = [d | {"personal": "1.0"} for d in served.runs[0].devices]
    worse = [d | {"personal": "0.25"} for d in served.runs[0].devices]

    def cards(its, others):
        runs = [run._replace(devices=its) for run in served.runs]
        against = [run._replace(devices=others) for run in references]
        return cards_section(run_set._replace(groups=[SeedGroup("fedcpsl", runs), alone], references=against))

    assert "most over training alone: fedcpsl" in cards(better, worse)
    said = cards(worse, better)  # 25 - 100
    assert "75.00 <small>points</small></b><span>training alone is ahead by this much; closest: fedcpsl" in said
    assert "most over" not in said
    half = run_set._replace(references=[run for run in references if run.seed == 0])
    assert "training alone" not in cards_section(half)


def test_a_table_of_devices_that_lacks_a_column_is_named(run, desk, capsys):
    shutil.copytree(run, desk / "lacks")
    path = desk / "lacks" / "devices.csv"
    path.write_text(path.read_text().replace("active_rounds", "rounds"))
    assert fedcpsl("report", desk / "lacks") == 2
    said = capsys.readouterr().err
    assert f"{path}: has no column 'active_rounds'" in said
    assert said.count("\n") == 1


def test_what_was_adapted_from_a_run_says_so(run, desk):
    shutil.copytree(run, desk / "adapted")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["adapted_from"] = {"run": "r1", "split_sha256": ""}
    del manifest["sha256"]
    (desk / "adapted" / "manifest.json").write_text(json.dumps(manifest))
    assert fedcpsl("report", desk / "adapted") == 0
    page = (desk / "adapted" / "report.html").read_text()
    assert "a personal model adapted from r1 in 3 personal rounds (no rounds with a server)" in page
    assert "fedcpsl adapt r1 --data " in page
    assert "--name 0 --rounds 3</pre>" in page
    assert "fedcpsl run config.toml" not in page
    both = page_of(load_runs([run, desk / "adapted"]))
    assert "and of the runs 1 adapted from another, in personal rounds with no server" in both
    assert "2 runs of 2 kinds" in both
    assert "fedcpsl run config.toml" in both


def test_planned_runs_that_have_not_begun_are_waited_for(comparison, desk):
    shutil.copytree(comparison, desk / "half")
    for name in ("fedcpsl-seed1", "local-seed0", "local-seed1"):
        shutil.rmtree(desk / "half" / "runs" / name)
    run_set = try_load_runs([desk / "half"])
    assert (len(run_set.runs), run_set.waiting, state_of(run_set)) == (1, 3, "1 of 4 runs finished")
    assert fedcpsl("report", desk / "half") == 0
    page = (desk / "half" / "report.html").read_text()
    assert "Not finished: 1 of 4 runs finished." in page
    assert page_data(page)["over"] is False


def test_a_comparison_that_came_to_nothing_has_a_page(comparison, sweep, desk):
    for folder, words in ((comparison, "vs fedcpsl"), (sweep, "3 more failed and are left out")):
        copy = desk / f"failed-{folder.name}"
        shutil.copytree(folder, copy)
        for run in (copy / "runs").iterdir():
            (run / "devices.csv").unlink()
            (run / "metrics.jsonl").unlink()
            (run / "failed.txt").write_text("round 1: not finite\n")
        for name in ("report.html", "results.csv"):
            (copy / name).unlink()
        assert fedcpsl("report", copy) == 0
        page = (copy / "report.html").read_text()
        count = len(list((copy / "runs").iterdir()))
        for said in (words, f"all {count} runs failed", "round 1: not finite", "<h2>Results</h2>"):
            assert said in page
        assert (copy / "results.csv").read_text().count("\n") == 1 + count


def test_what_has_nothing_to_tell_is_refused_in_a_line(run, desk, capsys):
    (desk / "empty").mkdir()
    shutil.copytree(run, desk / "begun")
    for name in ("devices.csv", "report.html"):
        (desk / "begun" / name).unlink()
    first = (desk / "begun" / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (desk / "begun" / "metrics.jsonl").write_text(first)
    for folder, words in (
        ("nowhere", "no such folder"),
        ("empty", "not a run’s folder"),
        ("begun", "no finished round yet"),
    ):
        assert fedcpsl("report", desk / folder) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    (desk / "begun" / "metrics.jsonl").unlink()
    assert fedcpsl("report", desk / "begun") == 2


def test_a_run_that_goes_on_and_one_from_before_are_told(run, desk):
    shutil.copytree(run, desk / "old")
    for name in ("devices.csv", "split.json"):
        (desk / "old" / name).unlink()
    lines = [json.loads(line) for line in (desk / "old" / "metrics.jsonl").read_text().splitlines()][:3]
    for line in lines:
        del line["pseudo_label_confidence"]
    (desk / "old" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert fedcpsl("report", desk / "old") == 0
    page = (desk / "old" / "report.html").read_text()
    assert "Not finished: round 2 of 3" in page
    assert "from before confidence was logged" in page
    assert page.count('class="heat ') == 2  # from the data itself
    assert "appear when a run is finished" in page


def test_classes_that_are_left_out_are_counted(desk):
    y = np.arange(90) % 45
    np.savez(desk / "many.npz", x=np.ones((90, 2)), y=y, device=np.arange(90) // 45)
    data = with_settings(Config(), {"data.file": str(desk / "many.npz"), "data.labelled": 1.0}).data
    found = split_summary.summarise_split(load_federation(data, 0))
    assert (len(found.classes), found.all_classes) == (40, 45)
    assert maps_of_split(found)["notes"] == ["The first 40 of 45 classes."]
    assert maps_of_split(found._replace(all_classes=0))["notes"] == []  # from before


def test_a_report_reads_data_once_and_downloads_nothing(run, desk, monkeypatch):
    shutil.copytree(run, desk / "bare")
    (desk / "bare" / "split.json").unlink()
    asked = []

    def load(data, seed):
        asked.append(data.dataset)
        return load_federation(data, seed)

    monkeypatch.setattr(split_summary, "load_federation", load)
    config = load_run(desk / "bare").config
    first = split_summary.read_split_summary(desk / "bare", config)
    assert split_summary.read_split_summary(desk / "bare", config) is first
    assert first == split_summary.read_split_summary(run, config)
    assert asked == ["digits"]
    monkeypatch.setenv("FEDCPSL_CACHE", str(desk / "cache"))
    monkeypatch.delenv("FEDCPSL_DATA", raising=False)
    for name in ("mnist", "cifar10"):
        (desk / name).mkdir()
        said = split_summary.read_split_summary(desk / name, replace(config, data=replace(config.data, dataset=name)))
        assert said == f"{name} is not on this machine; download it with: fedcpsl data --dataset {name}"
    assert asked == ["digits"]


def test_names_with_brackets_are_names(desk, monkeypatch, capsys):
    rows = [f"{i},{i % 7},{'[/b]y' if i % 2 else '[red]n'},{'[/i]me' if i < 20 else 'you'}" for i in range(40)]
    (desk / "odd.csv").write_text("\n".join(["a,b,kind,who", *rows]) + "\n")
    own = ["--data", desk / "odd.csv", "--label", "kind", "--device-column", "who", "--active", "2"]
    for columns in ("100", "30"):
        monkeypatch.setenv("COLUMNS", columns)
        assert fedcpsl("data", *own) == 0
        assert fedcpsl("run", *own, "--dry-run") == 0
        said = "".join(capsys.readouterr().out.split())
        assert all(name in said for name in ("[/b]y:", "[red]n:", "[/i]me"))


def test_devices_without_tests_have_no_accuracy_in_the_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    nothing = {"mean": float("nan"), "worst_tenth": float("nan")}
    with progress(3, 0, console) as watch:
        watch(0, {"personal": nothing, "global": None, "pseudo_label_accuracy": None, "uplink_bytes": 0})
    assert "nan" not in console.file.getvalue()
    assert sparkline([float("nan"), 0.5]) == "▁▅"


def test_names_cannot_write_into_the_page(run, desk):
    shutil.copytree(run, desk / "odd")
    rows = (desk / "odd" / "devices.csv").read_text().splitlines()
    cells = rows[1].split(",")
    rows[1] = ",".join([cells[0], "<script>alert(1)</script>", *cells[2:]])
    (desk / "odd" / "devices.csv").write_text("\n".join(rows) + "\n")
    assert fedcpsl("report", desk / "odd") == 0
    page = (desk / "odd" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_script_that_got_into_the_page_does_not_run(run, tmp_path):
    """By every way that a name could take, were it ever written into the page as it is."""
    attacks = "<script>document.title = 'in'</script><img src='x' onerror=\"document.title = 'in'\">"
    attacks += "<script src='https://example.org/x.js'></script><iframe src='https://example.org'></iframe>"
    attacks += "<a id='link' href=\"javascript:document.title = 'in'\">here</a>"
    page = tmp_path / "page.html"
    page.write_text((run / "report.html").read_text().replace("<footer>", f"{attacks}<footer>"))
    with Browser(tmp_path / "profile") as browser:
        browser.open(page.as_uri())
        browser.value("document.querySelector('#link').click()")
        browser.value("fetch('https://example.org/').then(() => 1, () => 0)")
        assert browser.value("document.title") != "in"
        assert browser.value("document.querySelectorAll('figure.chart .plot svg .line').length") > 0  # ours runs
        refused = [text for text in browser.complaints if "Content Security Policy" in text]
    assert len(refused) >= 5, refused


def test_long_runs_of_many_lines_stay_small(run, desk):
    shutil.copytree(run, desk / "huge")
    names, full = [f"telephone number {i}" for i in range(60)], [[1000] * 40] * 60
    holdings = {"devices": 60, "names": names, "classes": [f"kind {i}" for i in range(40)], "unknown": [0] * 60}
    (desk / "huge" / "split.json").write_text(json.dumps(holdings | {"labelled": full, "unlabelled": full}))
    one = load_run(desk / "huge")
    many = [one.metrics[-1] | {"round": r} for r in range(1_200)]
    run_set = load_runs([run])
    groups = [SeedGroup(f"case {i}", [one._replace(metrics=many)]) for i in range(12)]
    (chart, *_) = accuracy_charts(run_set._replace(groups=groups))
    assert sum(len(s["x"]) for s in chart["series"]) <= MAX_POINTS
    assert all(s["x"][0] == 0 and s["x"][-1] == 1_199 for s in chart["series"])
    page = page_of(run_set._replace(groups=groups))
    assert is_self_contained(page)
    assert sorted({s["colour"] for s in chart["series"]}) == list(range(9))  # eight and grey


def test_numbers_as_people_write_them():
    assert [size(n) for n in (0, 999, 1000, 88_300_000)] == ["0 B", "999 B", "1.0 kB", "88.3 MB"]
    assert [seconds(s) for s in (4.62, 125, 7260)] == ["4.6 s", "2 min 05 s", "2 h 01 min"]
    assert [points(v) for v in (0.0123, -0.05, 0.0)] == ["+1.23", "−5.00", "0.00"]
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0, 7, 8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert best_and_worst([{"n": i} for i in range(10)], 4) == ([{"n": 0}, {"n": 1}, {"n": 8}, {"n": 9}], 6)
    table = Table("t", "50 % & more", [Column("a", "a_b", plain), Column("b", "b", plain)], [{"a": "x|y", "b": 1200}])
    assert to_markdown(table).splitlines()[2:] == ["| a_b | b |", "| --- | ---: |", "| x\\|y | 1,200 |"]
    assert r"\caption{50 \% \& more}" in to_latex(table)
    assert r"a\_b & b \\" in to_latex(table)
    assert to_csv(table) == "a,b\nx|y,1200\n"
    times = [{"a": "x", "b": 7260.0}, {"a": "y", "b": {"mean": 180.0}}, {"a": "z", "b": None}]
    timed = table._replace(records=times, columns=[table.columns[0], Column("b", "time", str)])
    rows = render("data_table", table=timed)
    assert re.findall(r"<td([^>]*)>", rows) == [' data-v="7260"', ' data-v="180"', ""]  # what a click sorts by


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_browser_draws_them_and_answers_the_mouse(run, comparison, sweep, study, tmp_path):
    pages = [run / "report.html", comparison / "report.html", sweep / "report.html", study / "results" / "mine.html"]
    with Browser(tmp_path / "profile") as browser:
        for page in pages:
            browser.open(page.as_uri())
            assert browser.value("document.querySelectorAll('figure.chart .plot svg .line').length") > 0
            assert browser.value("document.querySelector('.tip').hidden") is True
            x, y = browser.middle("figure.chart .plot svg")
            browser.hover(x, y)
            assert browser.value("document.querySelector('.tip').hidden") is False
            said = browser.value("document.querySelector('.tip').innerText")
            assert re.match(r"round \d", said)
            chart = next(iter(page_data(page.read_text())["charts"].values()))
            assert f"{chart['series'][0]['y'][int(said.split()[1])]:.2f} %" in said
            wide = browser.value("document.documentElement.scrollWidth <= innerWidth")
            assert wide, "the page itself scrolls sideways"
        assert browser.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_it_works_in_the_dark_on_a_phone_by_keyboard_and_without_scripts(run, comparison, tmp_path):
    page = (comparison / "report.html").as_uri()
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, dark=True)
        assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 26)"
        browser.open(page, width=390, height=800)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert browser.value("document.querySelector('.plot svg').getBoundingClientRect().width") < 390  # fits
        browser.value("document.querySelector('.plot svg').focus()")
        for key in ("ArrowRight", "ArrowRight"):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        assert browser.value("document.querySelector('.tip strong').textContent") == "round 1"
        bands = "[...document.querySelector('figure.chart').querySelectorAll('.band')].filter(b => b.checkVisibility())"
        lines = "[...document.querySelectorAll('figure.chart .plot .line')].filter(b => b.checkVisibility())"
        assert browser.value(f"{bands}.length") == 2
        before = browser.value(f"{lines}.length")
        browser.press(*browser.middle("button.key"))
        assert browser.value(f"{lines}.length") == before - 1
        assert browser.value("document.querySelector('button.key').getAttribute('aria-pressed')") == "false"
        browser.press(*browser.middle("button[data-band='']"))
        assert browser.value(f"{bands}.length") == 0
        browser.press(*browser.middle("table.devices thead th:last-child"))
        browser.press(*browser.middle("table.devices thead th:last-child"))
        gains = browser.value(
            "[...document.querySelector('table.devices').tBodies[0].rows].map(r => +r.lastElementChild.dataset.v)"
        )
        assert gains == sorted(gains)
        body = "document.querySelector('table.devices').tBodies[0]"
        browser.value(f"{body}.insertAdjacentHTML('afterbegin', '<tr class=cut><td>5 devices in between</td></tr>')")
        browser.press(*browser.middle("table.devices thead th:last-child"))
        assert browser.value(f"{body}.rows.length") == 5
        assert browser.value(f"{body}.lastElementChild.className") == "cut"
        assert browser.complaints == []
        browser.open((run / "report.html").as_uri(), scripts=False)
        assert browser.picture(tmp_path / "page.png") > 20_000
        assert browser.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_on_paper_nothing_is_cut_off(run, comparison, tmp_path):
    page = page_of(load_runs([run, comparison]))
    (tmp_path / "both.html").write_text(page)
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "both.html").as_uri(), width=700)  # A4 less its margins
        browser.call("Emulation.setEmulatedMedia", media="print")
        browser.value("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        columns = "Math.max(...[...document.querySelectorAll('table.sorts tr')].map(r => r.cells.length))"
        assert browser.value(columns) == 14
        ends = "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right)"
        assert max(browser.value(ends)) <= 700
