"""What is shown of edge networks: rounds and cells as pictures in a browser, tables, and studies."""

import csv
import io
import json
import re
import shutil
import tomllib

import numpy as np
import pytest

from fedcpsl.cli import run_command
from fedcpsl.config import with_settings
from fedcpsl.edge.settings import check_edge
from fedcpsl.report import edge_pictures
from fedcpsl.report.loaded_runs import load_run, load_runs
from fedcpsl.report.page import page_loader, write_report
from fedcpsl.report.sections import edge_section
from fedcpsl.report.study import cells_of
from fedcpsl.report.study_tables import curve_by, far_behind_near, near_and_far
from fedcpsl.runs.edge_files import read_devices, read_rounds
from fedcpsl.runs.folder import read_metrics
from fedcpsl.runs.study import edge_studies, find_study, lines_of, on_dataset, plan_of, studies_folder

from .browser import CHROMIUM, MISSING, Browser
from .command import QUICK
from .small_runs import make_run

SMALL = {
    "algorithm__name": "fedcpsl",
    "data__devices": 8,
    "work__rounds": 12,
    "work__active": 3,
    "edge__profile": "macro",
}
NARROW = {"edge__bandwidth_up_mhz": 0.02, "edge__flops_per_cycle": 0.01, "edge__shadowing_db": 10.0}
TIMED = {**NARROW, "edge__deadline": 0.7, "edge__slot": 0.4}
NETWORKS = {
    "waits": NARROW,
    "deadline": TIMED,
    "drop": {**TIMED, "edge__on_deadline": "drop"},
    "extra": {**TIMED, "edge__extra": 2, "work__active": 2},
    "semi-async": {**NARROW, "edge__clock": "semi-async", "edge__wait_for": 2},
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return tmp_path_factory.mktemp("edge-page")


@pytest.fixture(scope="module")
def runs(desk):
    return {name: make_run(desk / name, **(SMALL | settings)) for name, settings in NETWORKS.items()}


def fedcpsl(*arguments):
    return run_command([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_round_of_the_picture_takes_as_long_as_that_of_the_run(runs, name):
    run, rows = load_run(runs[name]), read_rounds(runs[name])
    clock = {m["round"]: m["edge"] for m in run.metrics}
    for r in np.unique(rows["round"]).tolist():
        own = {key: edge_pictures._taken(values, np.flatnonzero(rows["round"] == r)) for key, values in rows.items()}
        begin, end = edge_pictures._span(own, run)
        assert end == pytest.approx(clock[r]["seconds"], rel=1e-6)
        if name != "semi-async":
            assert end - begin == pytest.approx(clock[r]["round_seconds"], rel=1e-6)


def test_networks_have_what_is_to_be_drawn(runs):
    """The other tests would say little about networks that lose nothing."""
    seen = {outcome for folder in runs.values() for outcome in read_rounds(folder)["outcome"]}
    assert {"counted", "lost", "late", "dropped"} <= seen
    assert read_metrics(runs["deadline"])[-1]["edge"]["partial"] > 0
    assert read_rounds(runs["semi-async"])["staleness"].max() > 0


def test_lanes_are_the_lines_of_the_file(runs):
    run, rows = load_run(runs["deadline"]), read_rounds(runs["deadline"])
    timelines = edge_pictures.timelines_of(run)
    titles = [timeline.title for timeline in timelines]
    assert titles[0].startswith("Round 1, the first: ")
    assert sum("the longest" in title or "of median length" in title for title in titles) >= 1
    for timeline in timelines:
        own = np.flatnonzero(rows["round"] == int(timeline.title.split()[1].strip(",")))
        assert sorted(lane.name for lane in timeline.lanes) == sorted(str(d) for d in rows["device"][own])
        assert float(timeline.deadline) <= 100
        for lane in timeline.lanes:
            (i,) = [k for k in own if str(rows["device"][k]) == lane.name]
            assert lane.outcome == rows["outcome"][i]
            takes = [float(rows[f"{part}_seconds"][i]) for part in edge_pictures.PARTS]
            widths = [float(bar.width) for bar in lane.bars]
            assert np.allclose(np.array(widths) / sum(widths), [t / sum(takes) for t in takes if t], atol=2e-3)
            assert ("failed" in lane.bars[-1].kind) == (lane.outcome != "counted" and takes[-1] > 0)
            assert f"{rows['steps_done'][i]} of {rows['steps_planned'][i]} steps" in lane.tip


def test_rounds_of_many_devices_and_large_cells_stay_small(runs, monkeypatch):
    run = load_run(runs["deadline"])
    monkeypatch.setattr(edge_pictures, "MAX_LANES", 2)
    monkeypatch.setattr(edge_pictures, "MAX_PLACES", 3)
    first, cell = edge_pictures.timelines_of(run)[0], edge_pictures.cell_of(run)
    assert (len(first.lanes), first.left_out) == (2, 1)
    assert (len(cell.places), cell.left_out) == (3, 5)
    page = edge_section(load_runs([runs["deadline"]]), {})
    assert "1 devices in between" in page
    assert "5 devices are left out" in page


def test_the_map_is_the_file_of_devices(runs):
    run, found = load_run(runs["deadline"]), read_devices(runs["deadline"])
    cell = edge_pictures.cell_of(run)
    extent = 1.06 * 500
    assert cell.rings[-1] == (f"{50 * 500 / extent:.2f}", "500 m")
    for i, place in enumerate(cell.places):
        assert float(place.left) == pytest.approx(50 + 50 * found["x"][i] / extent, abs=0.006)
        assert float(place.top) == pytest.approx(50 - 50 * found["y"][i] / extent, abs=0.006)
        visits, losses = int(found["visits"][i]), int(found["losses"][i])
        assert float(place.lost) == pytest.approx(100 * losses / max(visits, 1), abs=0.5)
        said = place.tip.split("; ")
        assert said[0] == f"device {found['name'][i]}"
        assert said[1] == f"accuracy {100 * float(run.devices[i]['personal']):.2f} %"
        assert said[2] == f"{found['distance'][i]:.0f} m from the base station"
        assert said[3] == f"path loss {found['path_loss_db'][i]:.1f} dB"
        assert said[4].startswith(f"drawn {visits} times, lost {losses}")


def test_a_run_without_a_network_says_nothing_of_one(desk):
    folder = make_run(desk / "plain")
    page = (folder / "report.html").read_text() if (folder / "report.html").exists() else ""
    assert "Edge network" not in page
    assert edge_section(load_runs([folder]), {}) == ""
    assert page_loader([folder])().sections["edge"] == ""


def test_a_run_that_goes_on_has_rounds_and_no_map_yet(runs, desk):
    going = desk / "going"
    shutil.copytree(runs["deadline"], going)
    for name in ("edge_devices.csv", "devices.csv"):
        (going / name).unlink()
    page = page_loader([going])().sections["edge"]
    assert "Round 1, the first" in page
    assert "map of the cell" not in page


def test_tables_have_virtual_time_and_energy(runs, capsys):
    last = read_metrics(runs["deadline"])[-1]["edge"]
    spent = last["compute_joules"] + last["radio_joules"]

    def table(name):
        assert fedcpsl("report", runs["deadline"], "--format", "csv", "--table", name) == 0
        return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    (summary,), (edge,) = table("summary"), table("edge")
    assert float(summary["virtual_seconds"]) == float(edge["virtual_seconds"]) == pytest.approx(last["seconds"])
    assert float(summary["joules"]) == pytest.approx(spent)
    assert [float(edge[key]) for key in ("counted", "lost", "partial")] == [
        last[k] for k in ("counted", "lost", "partial")
    ]
    rounds = table("rounds")
    by_round = {m["round"]: m["edge"]["seconds"] for m in read_metrics(runs["deadline"])}
    assert all(float(r["virtual_seconds"]) == pytest.approx(by_round[int(r["round"])]) for r in rounds)


@pytest.fixture(scope="module")
def comparison(desk):
    settings = [f"edge.{k.partition('__')[2]}={v}" for k, v in TIMED.items()]
    given = [word for s in settings for word in ("--set", s)]
    names = ["--algorithms", "fedcpsl,fedavg", "--seeds", "2", "--reach", "0.05"]
    assert fedcpsl("compare", *QUICK, *names, "--edge", "macro", *given, "--out", desk / "c") == 0
    return desk / "c"


def test_a_comparison_has_curves_by_time_and_by_energy(comparison):
    page = (comparison / "report.html").read_text()
    found = re.search(r'<script id="page-data" type="application/json">(.*?)</script>', page, re.S)
    charts = json.loads(found[1])["charts"]
    folders = [comparison / "runs" / f"fedavg-seed{k}" for k in (0, 1)]
    for name, cost in (("edge-time", "seconds"), ("edge-energy", "joules")):
        assert [s["name"] for s in charts[name]["series"]] == ["fedcpsl", "fedavg"]
        x, y = curve_by(folders, cost)
        assert charts[name]["series"][1]["x"] == pytest.approx(x, rel=1e-6)
        assert charts[name]["series"][1]["y"] == pytest.approx((100 * y.mean(0)).tolist(), rel=1e-3)


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_browser_shows_rounds_and_cell_and_answers_the_mouse(runs, comparison, tmp_path):
    write_report(runs["deadline"])
    tip = "document.querySelector('.tip').innerText"
    run = load_run(runs["deadline"])
    with Browser(tmp_path / "profile") as browser:
        for page in (runs["deadline"] / "report.html", comparison / "report.html"):
            for width in (1000, 390):
                browser.open(page.as_uri(), width=width)
                assert browser.value("document.documentElement.scrollWidth <= innerWidth")
                inside = (
                    "[...document.querySelectorAll('.map .place')].filter(e => e.checkVisibility()).every(e => {"
                    "const p = e.getBoundingClientRect(), m = e.parentElement.getBoundingClientRect();"
                    "return p.width > 8 && p.left > m.left - 15 && p.right < m.right + 15; })"
                )
                assert browser.value(inside)
                overlap = "document.querySelector('.lane').getBoundingClientRect().width"
                assert browser.value(overlap) > 150
            browser.hover(*browser.middle(".lane"))
            assert re.match(r"device \S+: ", browser.value(tip))
            assert re.search(r"\d+ of \d+ steps", browser.value(tip))
            browser.hover(*browser.middle(".map .place:last-of-type"))
            said = browser.value(tip)
            assert all(word in said for word in ("accuracy", "from the base station", "path loss", "drawn", "to send"))
            chart = "figure[data-chart=edge-time] .plot svg"
            browser.hover(*browser.middle(chart))
            assert re.match(r"[\d.]+k? s\n", browser.value(tip))
        browser.open((runs["deadline"] / "report.html").as_uri(), dark=True, scripts=False)
        names = browser.value("[...document.querySelectorAll('.map .place')].map(e => e.title)")
        assert names == [place.tip for place in edge_pictures.cell_of(run).places]
        assert browser.complaints == []


def test_rounds_to_choose_from_are_the_lines_of_the_file_and_few(runs, monkeypatch):
    run, rows = load_run(runs["deadline"]), read_rounds(runs["deadline"])
    found = edge_pictures.any_round(run)
    rounds = json.loads(found.rounds)
    outcomes = [name for name, _ in json.loads(found.outcomes)]
    assert [each[0] for each in rounds] == np.unique(rows["round"]).tolist()
    assert (found.shown, found.of) == (len(rounds), len(rounds))
    for number, _, deadline, left_out, lanes in rounds:
        assert (deadline, left_out) == (run.config.edge.deadline, 0)
        own = {int(rows["device"][i]): i for i in np.flatnonzero(rows["round"] == number)}
        assert sorted(lane[0] for lane in lanes) == sorted(own)
        for device, start, *parts, done, planned, outcome, _ in lanes:
            i = own[device]
            seconds = [float(rows[f"{part}_seconds"][i]) for part in edge_pictures.PARTS]
            assert [start, *parts] == pytest.approx([0.0, *seconds], rel=1e-3)
            assert (done, planned) == (rows["steps_done"][i], rows["steps_planned"][i])
            assert outcomes[outcome] == rows["outcome"][i]
    per_lane = len(found.rounds) / len(rows["round"])
    assert per_lane * edge_pictures.MAX_RECORDS < 150_000  # characters of a page
    monkeypatch.setattr(edge_pictures, "MAX_RECORDS", 10)  # of rounds of three
    few = edge_pictures.any_round(run)
    assert (few.shown, few.of) == (3, len(rounds))
    assert [each[0] for each in json.loads(few.rounds)][::2] == [rounds[0][0], rounds[-1][0]]
    assert f"3 of {len(rounds)} rounds to choose from, evenly" in edge_section(load_runs([runs["deadline"]]), {})


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_reader_chooses_a_round_with_keys(runs, tmp_path):
    write_report(runs["deadline"])
    rows = read_rounds(runs["deadline"])
    numbers = np.unique(rows["round"]).tolist()
    devices = "[...document.querySelectorAll('.any .lanes b')].map(e => e.textContent).filter(Boolean)"

    def shows(browser, number):
        own = np.flatnonzero(rows["round"] == number)
        assert browser.value("document.querySelector('.any input[type=number]').value") == str(number)
        assert browser.value("document.querySelector('.any [type=range]').ariaValueText") == f"round {number}"
        assert sorted(browser.value(devices)) == sorted(str(d) for d in rows["device"][own])
        counted = sum(rows["outcome"][i] == "counted" for i in own)
        assert f"{counted} of {len(own)} counted" in browser.value("document.querySelector('.any output').value")

    def key(browser, name):
        code = {"ArrowRight": 39, "ArrowUp": 38, "End": 35}[name]
        for kind in ("rawKeyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    with Browser(tmp_path / "profile") as browser:
        for dark in (False, True):
            browser.open((runs["deadline"] / "report.html").as_uri(), dark=dark)
            shows(browser, numbers[0])
            browser.value("document.querySelector('.any [type=range]').focus()")
            key(browser, "ArrowRight")
            shows(browser, numbers[1])
            key(browser, "End")
            shows(browser, numbers[-1])
            browser.value("document.querySelector('.any [type=number]').value = ''")
            browser.value("document.querySelector('.any [type=number]').focus()")
            browser.call("Input.insertText", text=str(numbers[2]))
            shows(browser, numbers[2])
            key(browser, "ArrowUp")
            shows(browser, numbers[3])
            lanes = "[...document.querySelectorAll('.any .lane')]"
            first = "document.querySelector('.timeline:not(.any) .lane')"
            for style in ("backgroundColor", "height"):  # as the lanes of the other rounds
                same = f"{lanes}.every(e => getComputedStyle(e).{style} === getComputedStyle({first}).{style})"
                assert browser.value(same)
            ends = f"{lanes}.every(e => [...e.children].every(b => parseFloat(b.style.left) <= 100.01))"
            assert browser.value(ends)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        browser.open((runs["deadline"] / "report.html").as_uri(), scripts=False)
        assert browser.value("document.querySelector('.any').checkVisibility()") is False
        assert browser.complaints == []


STUDY = """
title = "Deadlines"
shows = "costs"
bases = { digits = "base.toml" }
seeds = 2
reach = { digits = [0.05, 0.999] }

[panels."with a deadline"]
edge = { deadline = 0.7, slot = 0.4 }
[panels."without"]
edge.upload_bits = 8

[rows.waits]
algorithm.name = "fedavg"
edge = { deadline = "none", slot = "none" }
[rows.drops]
algorithm.name = "fedavg"
edge.on_deadline = "drop"
"""
BASE = """
[data]
dataset = "digits"
devices = 8
[model]
hidden = [6]
[work]
rounds = 6
active = 3
[edge]
profile = "macro"
bandwidth_up_mhz = 0.02
flops_per_cycle = 0.01
shadowing_db = 10.0
[run]
keep = "metrics"
"""


def test_a_study_shows_time_energy_and_who_is_lost(tmp_path, capsys):
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "mine.toml").write_text(STUDY)
    assert fedcpsl("paper", tmp_path / "mine.toml", "--out", tmp_path / "runs") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "First round, virtual time, energy and bytes sent until then, at 5 % or more" in said
    results = tmp_path / "runs" / "digits" / "results"
    rows = list(csv.DictReader((results / "mine.csv").read_text().splitlines()))
    study = find_study(str(tmp_path / "mine.toml"))
    cells = cells_of(tmp_path / "runs" / "digits", study, "digits", [0, 1])
    by_place = {(c.line.panel, c.line.row): c for c in cells}
    for row in rows:
        folder = by_place[row["panel"], row["row"]].folders[int(row["seed"])]
        metrics = read_metrics(folder)
        assert float(row["edge_seconds"]) == pytest.approx(metrics[-1]["edge"]["seconds"], abs=1e-5)
        first = next(m for m in metrics if m["personal"]["mean"] >= 0.05)
        assert float(row["seconds_to_0.05"]) == pytest.approx(first["edge"]["seconds"], abs=1e-5)
        assert int(row["bytes_to_0.05"]) == first["uplink_bytes"]
        assert row["seconds_to_0.999"] == row["joules_to_0.999"] == ""
    curves = list(csv.DictReader((results / "mine-curves.csv").read_text().splitlines()))
    assert float(curves[0]["seconds"]) == 0 < float(curves[1]["seconds"])
    assert "virtual time, s" in (results / "mine.svg").read_text()
    text = (results / "mine.md").read_text()
    assert "Virtual time, energy and bytes sent of a run" in text
    drops, waits = (by_place["with a deadline", row].folders for row in ("drops", "waits"))
    found = far_behind_near(drops, waits)
    pairs = [(near_and_far(a), near_and_far(b)) for a, b in zip(drops, waits, strict=True)]
    assert found["mean"] == pytest.approx(np.mean([(a[1] - a[0]) - (b[1] - b[0]) for a, b in pairs]))
    assert f"{100 * found['mean']:+.2f} ± " in text


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10"])
def test_the_studies_of_edge_networks_are_sound(dataset):
    studies = [on_dataset(find_study(name), dataset) for name in edge_studies()]
    plan = plan_of(studies, dataset)
    assert len(plan.seeds) == 5
    assert {case.settings.get("algorithm.name", "fedcpsl") for case in plan.cases} == {
        *("fedcpsl", "fedcpsl2", "apfl", "fedavg", "scaffold")
    }
    for case in plan.cases:
        config = with_settings(plan.base, case.settings)
        check_edge(config.edge)
        assert config.edge.on
    bits = {line.case.settings.get("edge.upload_bits", 0) for line in lines_of(studies[-1], dataset)}
    assert bits == {4, 8, 16, 0}


def test_digits_are_a_miniature_of_cifar10():
    """Bits per hertz, signal to noise and cycles of a visit are those of the CNN in the macro cell.

    The CNN's upload has 28.1 Mbit, which has 10 MHz; that of the digits 64 x 64 + 64 + 64 x 10 + 10 = 4,810 float32.
    """
    base = tomllib.loads((studies_folder() / "edge" / "base" / "digits.toml").read_text())
    bits, edge = 32 * 4810, base["edge"]
    assert edge["bandwidth_up_mhz"] / 10 == pytest.approx(bits / 28.1e6, rel=0.01)
    assert edge["bandwidth_down_mhz"] / 20 == pytest.approx(bits / 28.1e6, rel=0.01)
    assert edge["noise_figure_db"] - 5 == pytest.approx(-10 * np.log10(bits / 28.1e6), abs=0.05)


def test_paper_edge_is_the_four_studies(capsys):
    assert fedcpsl("paper", "edge", "--dataset", "digits", "--seeds", "1", "--dry-run") == 0
    assert ", ".join(edge_studies()) + " on digits: 67 runs" in capsys.readouterr().out


def test_a_case_that_its_cell_refuses_fails_alone(tmp_path, capsys):
    (tmp_path / "base.toml").write_text(BASE)
    tight = '[panels."too short"]\nedge = { deadline = 0.41, slot = 0.4, flops_per_cycle = 1e-4 }\n'
    (tmp_path / "mine.toml").write_text(STUDY.replace("[rows.waits]", f"{tight}[rows.waits]"))
    assert fedcpsl("paper", tmp_path / "mine.toml", "--out", tmp_path / "runs") == 1
    said = capsys.readouterr()
    assert "2 of 12 runs failed" in said.err  # as with any run that fails
    text = (tmp_path / "runs" / "digits" / "results" / "mine.md").read_text()
    (accuracies,) = [line for line in text.splitlines() if line.startswith("| drops |") and "(2 refused)" in line][:1]
    assert re.fullmatch(r"\| drops \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \| - \(2 refused\) \| .*", accuracies)
    for seed in (0, 1):
        why = r"edge.deadline = 0.41: nobody can meet it, the fastest device takes [\d.e+]+ s, .*"
        assert re.search(rf"^\| drops \| too short \| {seed} \| {why}$", text, re.MULTILINE)
    assert fedcpsl("paper", tmp_path / "mine.toml", "--out", tmp_path / "runs") == 1  # again: nothing is run twice
    assert "refused: edge.deadline" in capsys.readouterr().err


def test_points_of_a_sweep_are_checked_and_refused_one_by_one(tmp_path, capsys):
    (tmp_path / "base.toml").write_text(BASE)
    sweep = ["sweep", tmp_path / "base.toml", "--seeds", 1, "--rounds", 2, "--set", "edge.slot=0.4"]
    out = tmp_path / "out"
    # a slot makes no sense without a deadline, which only the points have; nobody can meet the first
    assert fedcpsl(*sweep, "--grid", "edge.deadline=0.4001,30", "--out", out) == 1
    said = capsys.readouterr()
    assert "1 of 2 runs failed" in said.err
    assert "deadline=0.4001-seed0: refused: edge.deadline = 0.4001: nobody can meet it" in said.err
    assert (out / "runs" / "deadline=30-seed0" / "devices.csv").exists()
    assert "nobody can meet it" in (out / "report.html").read_text()
    assert fedcpsl(*sweep, "--grid", "edge.deadline=0.4001,0.4002", "--out", tmp_path / "none") == 2
    assert "no point of it can be run: edge.deadline = 0.4001: nobody can meet it" in capsys.readouterr().err
    assert fedcpsl(*sweep, "--grid", "edge.deadline=30,none", "--out", tmp_path / "none") == 2
    assert "edge.slot" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
