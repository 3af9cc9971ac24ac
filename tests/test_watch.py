"""Watching a run: a page on this machine alone that follows it, and a terminal that tells how it goes."""

import http.client
import json
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request

import pytest

from fedcpsl.cli import run_command
from fedcpsl.report.page import page_loader, version_of

from .browser import CHROMIUM, MISSING, Browser
from .command import PATIENCE_S, QUICK, spawn
from .terminal import Terminal

ONE = [*QUICK, "--set", "run.processes=1", "--set", "run.executor=sequential"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    assert run_command(["run", *ONE, "--out", str(folder / "a")]) == 0
    return folder / "a"


def begun(run, folder, rounds):
    """The run as it was after so many rounds, and the lines that it wrote later."""
    shutil.copytree(run, folder)
    (folder / "devices.csv").rename(folder / "devices.later")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: rounds + 1]))
    return lines[rounds + 1 :]


class Watching:
    """fedcpsl watch as a process; its address, and how it ended."""

    def __init__(self, *arguments, cwd):
        self.process = spawn("watch", *arguments, "--port", "0", cwd=cwd)
        lines = [self.process.stdout.readline() for _ in range(3)]
        assert lines[1].startswith("open"), self.process.stderr.read()
        self.address = lines[1].split()[1]

    def get(self, path=""):
        with urllib.request.urlopen(self.address + path, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@pytest.fixture
def watching():
    begun = []

    def start(*arguments, cwd):
        begun.append(Watching(*arguments, cwd=cwd))
        return begun[-1]

    yield start
    for each in begun:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


def test_the_page_and_its_news_are_for_this_machine_alone(run, tmp_path, watching, capsys):
    later = begun(run, tmp_path / "a", 0)
    watch = watching("a", cwd=tmp_path)
    status, page = watch.get()
    assert status == 200
    assert "No round is finished yet" in page
    first = json.loads(watch.get("data.json")[1])
    assert first["data"]["live"] is True
    assert watch.get(f"data.json?since={first['data']['version']}") == (204, "")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(later[0] + later[1][:20])  # a line, and one that is being written
    news = json.loads(watch.get(f"data.json?since={first['data']['version']}")[1])
    assert news["data"]["state"] == "round 1 of 3"
    assert news["data"]["over"] is False
    assert news["data"]["charts"]["accuracy"]["series"][0]["x"] == [0, 1]
    assert "Accuracy by round" in news["parts"]["accuracy"]
    port = int(watch.address.rsplit(":", 1)[1].strip("/"))
    assert watch.address == f"http://127.0.0.1:{port}/"
    for path in ("models.safetensors", "../../etc/passwd", "config.toml"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            watch.get(path)
    with urllib.request.urlopen(watch.address) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.endswith("frame-ancestors 'none'")
    assert "unsafe-eval" not in policy
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/", headers={"Host": "elsewhere.example"})  # as after DNS rebinding
    assert connection.getresponse().status == 403
    connection.close()
    assert run_command(["watch", str(run), "--port", str(port)]) == 2
    assert f"--port {port}: cannot be used" in capsys.readouterr().err
    code, out, err = watch.end()
    assert (code, err) == (0, "")
    assert "ended; the runs continue" in out


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_page_follows_a_run_without_being_loaded_again(run, tmp_path, watching):
    later = begun(run, tmp_path / "a", 1)
    watch = watching("a", cwd=tmp_path)
    with Browser(tmp_path / "profile") as browser:
        browser.open(watch.address)
        browser.wait_for("document.querySelector('.state span').textContent === 'round 1 of 3'")
        browser.value("window.before = document.body")
        with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
            file.writelines(later)
        (tmp_path / "a" / "devices.later").rename(tmp_path / "a" / "devices.csv")
        browser.wait_for("document.querySelector('.state span').textContent === 'finished'")
        assert browser.value("window.before === document.body")  # the same page
        assert browser.value("document.querySelectorAll('table.devices tbody tr').length") == 4
        browser.hover(*browser.middle("figure.chart .plot svg"))
        assert browser.value("document.querySelector('.tip').innerText").startswith("round")
        assert browser.complaints == []
        browser.value("(wait => { window.setTimeout = f => wait(f, 100); })(setTimeout)")  # asks again at once
        with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
            file.write("no metrics\n")
        browser.wait_for("document.querySelector('.state span').textContent.includes('was changed by hand?')")
        assert watch.end(signal.SIGTERM)[0] == 0
        browser.wait_for("document.querySelector('.state span').textContent.includes('has ended')")


def test_a_run_that_failed_is_not_waited_for(run, tmp_path):
    begun(run, tmp_path / "a", 0)
    load = page_loader([tmp_path / "a"])
    assert load().title == "waiting for the first round"
    (tmp_path / "a" / "failed.txt").write_text("round 1: not finite\n")
    page = load()
    assert page.title == page.data["state"] == "the run failed"
    assert page.data["over"] is True
    assert "round 1: not finite" in page.sections["head"]
    assert "Not finished" not in page.sections["head"]
    assert "nothing to show: the run failed" in page.sections["cards"]


def test_devices_trained_alone_meanwhile_reach_the_page(run, tmp_path):
    shutil.copytree(run, tmp_path / "a")
    versions = [version_of([tmp_path / "a"])]
    (tmp_path / "a" / "alone").mkdir()
    (tmp_path / "a" / "alone" / "devices.csv").write_text("device\n")
    versions.append(version_of([tmp_path / "a"]))
    (tmp_path / "a" / "manifest.json").write_text("{}\n")
    versions.append(version_of([tmp_path / "a"]))
    assert len(set(versions)) == 3


def test_a_real_run_is_watched(tmp_path, watching):
    running = spawn("run", *ONE, "--rounds", "100000", "--out", "a", cwd=tmp_path)
    try:
        end = time.monotonic() + PATIENCE_S
        while not (tmp_path / "a" / "metrics.jsonl").exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        watch = watching("a", cwd=tmp_path)
        seen = set()
        while len(seen) < 2:
            assert time.monotonic() < end
            seen.add(json.loads(watch.get("data.json")[1])["data"]["state"])
            time.sleep(0.2)
        assert watch.end()[0] == 0
        assert running.poll() is None  # the run did not notice
    finally:
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=PATIENCE_S) == 130
        running.communicate()


def test_what_cannot_be_watched_is_refused_in_a_line(tmp_path, capsys):
    for arguments, words in ((["nowhere"], "no such folder"), ([str(tmp_path), "--port", "-1"], "--port -1: give")):
        assert run_command(["watch", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert words in said


def test_the_terminal_tells_how_it_goes_and_knows_no_colour(tmp_path):
    terminal = Terminal(
        sys.executable, "-m", "fedcpsl", "run", *ONE, "--out", "a", cwd=tmp_path, env={"NO_COLOR": "1"}.items()
    )
    text = terminal.read_until(lambda text: "report   " in text)
    terminal.process.wait(timeout=PATIENCE_S)
    assert "worst tenth" in text
    assert "uplink" in text
    assert not any(f"\x1b[{code}m" in text for code in (*range(30, 38), *range(90, 98)))
    assert "\x1b[38;" not in text
