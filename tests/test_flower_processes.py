"""Flower's programs, called and supervised: restarted when they end, and never left behind."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower import processes, supervisor
from fedcpsl.flower.supervisor import Supervisor, complaint_in

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="flwr is not installed: pip install 'fedcpsl[flower]'"
)
pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX")

FAMILY = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); print('up', flush=True); time.sleep(300)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
)


def python(script):
    return [sys.executable, "-c", script]


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def tend_until(programs, condition, seconds=120):
    happened = []
    wait_for(lambda: (happened.extend(programs.tend()), condition())[1], seconds)
    return happened


def is_up(log):
    return log.exists() and "up" in log.read_text()


def alive(group):
    """The processes of a group that are not mere zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[2]) == group and after_name[0] != "Z":
            found.append(int(entry.parent.name))
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to look for processes")


@needs_proc
def test_a_program_and_its_children_are_started_and_stopped(tmp_path):
    with Supervisor(os.environ, tmp_path) as programs:
        programs.start("family", python(FAMILY))
        wait_for(lambda: is_up(tmp_path / "family.log"))
        pid = programs.status()["family"].pid
        assert len(alive(pid)) == 2
        assert programs.tend() == []
        with pytest.raises(ValueError, match="family is supervised already"):
            programs.start("family", python(FAMILY))
    assert alive(pid) == []
    assert programs.status() == {}


@needs_proc
def test_a_program_that_will_not_stop_is_killed(tmp_path):
    programs = Supervisor(os.environ, tmp_path)
    programs.start("first", python(FAMILY))
    programs.start("stubborn", python(STUBBORN))
    pids = [each.pid for each in programs.status().values()]
    wait_for(lambda: is_up(tmp_path / "stubborn.log"))
    began = time.monotonic()
    programs.stop(grace=0.5)
    assert 0.5 <= time.monotonic() - began < 60
    assert [alive(pid) for pid in pids] == [[], []]


@needs_proc
def test_what_ends_is_started_again_after_ever_longer_pauses(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.4)
    with Supervisor(os.environ, tmp_path) as programs:
        programs.start("brief", python("print('up', flush=True)"))  # as a SuperNode whose SuperLink is gone
        happened = tend_until(programs, lambda: programs.status()["brief"].starts > 5)
        endings = [each.removeprefix("brief ended with exit code 0; starting it again in ") for each in happened[::2]]
        assert endings[:5] == ["0.1 s", "0.2 s", "0.4 s", "0.4 s", "0.4 s"]
        assert (tmp_path / "brief.log").read_text().count("up") >= 5  # added to, never begun anew


@needs_proc
def test_what_is_left_of_a_killed_program_is_ended_before_it_starts_again(tmp_path):
    with Supervisor(os.environ, tmp_path) as programs:
        programs.start("family", python(FAMILY))
        wait_for(lambda: is_up(tmp_path / "family.log"))
        pid = programs.status()["family"].pid
        os.kill(pid, signal.SIGKILL)
        happened = tend_until(programs, lambda: programs.status()["family"].pid not in (None, pid))
        assert happened == ["family was ended by SIGKILL; starting it again in 1 s", "family started again"]
        assert alive(pid) == []
        assert programs.status()["family"][1:] == (2, -signal.SIGKILL)


SUPERVISING = """
import os, sys, time
from pathlib import Path
from fedcpsl.flower.supervisor import Supervisor
with Supervisor(os.environ, Path(sys.argv[1])) as programs:
    programs.start("family", [sys.executable, "-c", sys.argv[2]])
    print(programs.status()["family"].pid, flush=True)
    while True:
        programs.tend()
        time.sleep(.1)
"""


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_when_the_supervisor_is_interrupted(tmp_path, number):
    with subprocess.Popen(
        [*python(SUPERVISING), tmp_path, FAMILY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        pid = int(process.stdout.readline())
        wait_for(lambda: is_up(tmp_path / "family.log"))
        assert len(alive(pid)) == 2
        process.send_signal(number)
        assert process.wait(120) == {signal.SIGTERM: 143, signal.SIGHUP: 129}.get(number, -number)
    wait_for(lambda: alive(pid) == [])


@needs_proc
def test_a_guard_that_dies_is_replaced(tmp_path):
    with Supervisor(os.environ, tmp_path) as programs:
        programs.start("family", python(FAMILY))
        guard = programs._guard
        guard.kill()
        guard.wait()
        guard.stdin.close()
        programs.tend()
        assert programs._guard.poll() is None


def test_a_program_that_is_not_there_is_named(tmp_path):
    with Supervisor(os.environ, tmp_path) as programs, pytest.raises(RunError, match="/nowhere/x: cannot be started"):
        programs.start("x", ["/nowhere/x"])


def test_a_program_that_vanishes_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.1)
    path = tmp_path / "brief.sh"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    with Supervisor(os.environ, tmp_path) as programs:
        programs.start("brief", [str(path)])
        wait_for(lambda: programs.status()["brief"].pid is None)
        path.unlink()
        happened = tend_until(programs, lambda: programs._programs["brief"].due > time.monotonic() + 1)
        assert happened[0] == "brief ended with exit code 3; starting it again in 0.1 s"
        assert happened[1].startswith(f"brief is down: {path}: cannot be started: No such file")


@needs_proc
def test_a_long_log_is_put_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LOG_BYTES", 1000)
    script = """
import os, time
print("x" * 2000, flush=True)
while os.fstat(1).st_size:
    time.sleep(0.05)
print("later", flush=True)
time.sleep(300)
"""
    with Supervisor(os.environ, tmp_path) as programs:
        programs.start("wordy", python(script))
        log = tmp_path / "wordy.log"
        tend_until(programs, lambda: "later" in log.read_text())
        assert log.read_text() == "later\n"
        assert (tmp_path / "wordy.log.1").read_text() == "x" * 2000 + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] ... unable to get local issuer certificate", "take ca.crt from the server"),
        ("CERTIFICATE_VERIFY_FAILED: Hostname mismatch, certificate is not valid", "is not for the host"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "has expired"),
        ("Exit Code: 305\n[code: 2004] Failed to activate SuperNode.", "does not let this key in"),
        ("[Errno 98] error while attempting to bind: address already in use", "another program listens"),
        ("[code: 2004] Failed to activate SuperNode.\nSuperNode ID: 12", None),
        ("Connection attempt failed, retrying in 0.50 seconds", "cannot be reached"),
        ("Connection attempt failed\nConnection successful after 0.50 seconds and 2 tries.", None),
        ("all is well", None),
    ],
)
def test_what_is_wrong_is_said_in_words_that_help(tmp_path, text, says):
    log = tmp_path / "phone.log"
    log.write_text(text)
    complaint = complaint_in(log)
    assert complaint is None if says is None else says in complaint
    assert complaint_in(tmp_path / "none.log") is None


def test_the_environment_keeps_flower_to_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    found = processes.environment(tmp_path / "home")
    assert found["FLWR_HOME"] == str(tmp_path / "home")
    assert "PYTHONWARNINGS" not in found  # Flower's own would end it
    assert [found[name] for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK")] == ["0", "1"]
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["NO_PROXY"].split(",") == ["intranet", "127.0.0.1", "::1", "localhost"]
    assert found["PATH"].startswith(str(Path(sys.executable).parent))


@needs_flower
def test_commands_that_are_refused(tmp_path):
    with pytest.raises(InputError, match="without keys and TLS a server may only listen on loopback"):
        processes.superlink_command(None, tmp_path / "state.db", host="0.0.0.0")
    with pytest.raises(InputError, match=r"server\.crt: is not there"):
        processes.superlink_command(tmp_path, tmp_path / "state.db")
    with pytest.raises(InputError, match="quotation mark"):
        processes.supernode_command("127.0.0.1:1", None, None, {"name": "it's"}, 1)
    (tmp_path / "ca.crt").touch()
    with pytest.raises(InputError, match="needs a key of its own"):
        processes.supernode_command("127.0.0.1:1", tmp_path / "ca.crt", None, {}, 1)


@needs_flower
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # Flower's own
def test_flower_reads_the_node_config_as_it_was_given():
    from flwr.common.config import parse_config_args

    config = {"name": "phone-1", "data": "/srv/my data/a=b.csv", "share": True, "budget": 30, "rate": 0.5}
    command = processes.supernode_command("127.0.0.1:1", None, None, config, 1)
    assert parse_config_args([command[-1]]) == config


def test_a_server_that_is_not_there_is_not_healthy():
    url = f"http://127.0.0.1:{processes.free_port()}"
    with pytest.raises(RunError, match=r"not healthy after 0\.1 s: .*refused"):
        processes.wait_until_healthy(url, None, 0.1)


@needs_flower
@needs_proc
def test_a_superlink_with_tls_and_keys_is_kept_running(tmp_path):
    from fedcpsl.flower import keys, registry

    folder, home, port = tmp_path / "keys", tmp_path / "home", processes.free_port()
    ca, url = keys.make_authority(folder), f"https://127.0.0.1:{port}"
    keys.make_server_certificate(folder, ["localhost"])
    keys.make_secret(folder)
    keys.make_device_key(folder, "phone-1")
    keys.make_authority(tmp_path / "other")
    with Supervisor(processes.environment(home), tmp_path / "logs") as programs:
        programs.start("superlink", processes.superlink_command(folder, tmp_path / "state.db", port=port))
        processes.wait_until_healthy(url, ca, 60, programs)
        assert "CERTIFICATE_VERIFY_FAILED" in processes.health_problem(url, tmp_path / "other" / "ca.crt")
        assert processes.health_problem(f"http://127.0.0.1:{port}", None) is not None

        registry.write_connection(home, f"127.0.0.1:{port}", ca)
        nodes = registry.register_missing(home, keys.public_keys(folder))
        assert list(nodes) == ["phone-1"]

        pid = programs.status()["superlink"].pid
        os.kill(pid, signal.SIGKILL)
        happened = tend_until(programs, lambda: programs.status()["superlink"].pid not in (None, pid))
        assert happened[0].startswith("superlink was ended by SIGKILL")
        processes.wait_until_healthy(url, ca, 60, programs)
        assert registry.registered(home) == nodes  # its database remembers
        group = programs.status()["superlink"].pid
    assert alive(pid) == alive(group) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
