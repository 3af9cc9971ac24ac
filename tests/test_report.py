"""The page of a run: complete, self-contained, and drawn by a real browser."""

import csv
import re
import shutil
import subprocess

import pytest

from .command import QUICK, fedcpsl

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    done = fedcpsl("run", *QUICK, "--out", "a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "a"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    grids = ["--grid", "beta=.25,.75", "--grid", "gamma=0,.8", "--grid", "amount=1,2"]
    done = fedcpsl("sweep", *grids, "--seeds", "2", *QUICK, "--out", "s", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "s"


def test_the_page_of_a_sweep_is_complete_and_needs_nothing_else(sweep):
    page = (sweep / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "beta=0.25, gamma=0, amount=1" in page
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert len(page) < 2_000_000


def test_the_page_is_complete_and_needs_nothing_else(run):
    page = (run / "report.html").read_text()
    for words in ("Accuracy by round", "Accuracy per device", "How to run it again", "personal accuracy"):
        assert words in page
    assert page.count("<svg") == 2
    assert 'name = "fedcpsl"' in page.replace("&quot;", '"')
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert [link for link in links if not link.startswith("#")] == []
    assert len(page) < 2_000_000


def test_plots_and_table_agree_with_the_metrics(run):
    assert {p.name for p in (run / "plots").iterdir()} == {"accuracy.svg", "devices.svg"}
    with (run / "devices.csv").open() as file:
        devices = list(csv.DictReader(file))
    mean = sum(float(d["personal"]) for d in devices) / len(devices)
    assert f"{100 * mean:.2f} %" in (run / "report.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")
@pytest.mark.parametrize("page", ["run", "sweep"])
def test_a_browser_draws_it_without_complaint(page, request, tmp_path):
    run = request.getfixturevalue(page)
    picture = tmp_path / "page.png"
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--window-size=1000,1400",
            f"--screenshot={picture}",
            (run / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 20_000
