"""Programs that are kept running: started in process groups of their own, restarted when they end, stopped whole."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, Self

from fedcpsl.errors import RunError
from fedcpsl.runs.files import make_folder

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
STEADY_S = 60.0  # a program that ran this long starts its pauses anew
GRACE_S = 10.0
LOG_BYTES = 20_000_000
GUARD = Path(__file__).with_name("guard.py")

_COMPLAINTS = {
    r"hostname mismatch|ip address mismatch": "server.crt is not for the host that was given; make one that is, "
    "with 'fedcpsl keys FOLDER --server HOST'",
    r"certificate has expired": "server.crt has expired, or the clock here is wrong",
    r"certificate_verify_failed": "the server's certificate is not from the authority in ca.crt; "
    "take ca.crt from the server's keys again",
    r"code: 200[14]\]": "the server does not let this key in: its .pub file is not among the server's keys, or two "
    "devices use one key, or this device crashed, when the server keeps its place for about a minute",
    r"address already in use": "another program listens on its port",
    r"connection attempt failed": "the server cannot be reached; it is tried for as long as it takes",
}
_WELL = r"supernode id: |connection successful|uvicorn running on https:"  # what was wrong before is so no longer


class Status(NamedTuple):
    """How a supervised program is doing."""

    pid: int | None  # None while it is down
    starts: int
    last_exit: int | None  # of its latest end: negative for a signal


@dataclass
class _Program:
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    last_exit: int | None = None
    started: float = 0.0
    due: float = 0.0
    pause: float = 0.0


class Supervisor:
    """Keeps programs running while its caller calls `tend` every second or so.

    Used as a context manager it stops all of them at the end, also after SIGINT, SIGTERM or SIGHUP; should this
    process be killed outright, a guard that it started stops them. What the others talk to is started first, and is
    stopped last.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment = dict(environment)
        self._folder = folder
        self._programs: dict[str, _Program] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._handlers: dict[int, object] = {}

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a program and keep it running; its output is added to NAME.log in the folder."""
        if name in self._programs:
            raise ValueError(f"{name} is supervised already")
        make_folder(self._folder)
        self._programs[name] = _Program(list(command), self._folder / f"{name}.log")
        self._launch(self._programs[name])

    def tend(self) -> list[str]:
        """Start again what has ended and whose pause is over; say what happened."""
        self._tend_guard()
        happened = []
        for name, each in self._programs.items():
            if each.process is not None and each.process.poll() is not None:
                self._bury(each)
                happened.append(f"{name} {_ending(each.last_exit)}; starting it again in {each.pause:g} s")
            elif each.process is None and time.monotonic() >= each.due:
                happened.append(f"{name} {self._relaunch(each)}")
            _keep_short(each.log)
        return happened

    def status(self) -> dict[str, Status]:
        """Who is up, as of now."""
        return {
            name: Status(
                each.process.pid if each.process is not None and each.process.poll() is None else None,
                each.starts,
                each.last_exit,
            )
            for name, each in self._programs.items()
        }

    def logs(self) -> list[Path]:
        return [each.log for each in self._programs.values()]

    def stop(self, grace: float = GRACE_S) -> None:
        """Stop all programs with their children: SIGTERM, then SIGKILL for what is left after the grace."""
        first, *others = [each.process for each in self._programs.values()] or [None]
        for wave in (others, [first]):
            _end_groups([process for process in wave if process is not None], grace)
        self._programs.clear()
        if self._guard is not None:
            self._guard.kill()  # before its pipe is closed: the groups that it knows are gone
            self._guard.communicate()
            self._guard = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _leave)
        return self

    def __exit__(self, *_: object) -> None:
        held: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():  # a second signal must not leave programs behind
            held = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            self.stop()
        finally:
            for number, handler in (held | self._handlers).items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers.clear()

    def _launch(self, each: _Program) -> None:
        try:
            with each.log.open("ab") as log:
                each.process = subprocess.Popen(
                    each.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(f"{error.filename or each.command[0]}: cannot be started: {error.strerror}") from error
        each.starts += 1
        each.started = time.monotonic()
        self._tell_guard("+", each.process.pid)

    def _relaunch(self, each: _Program) -> str:
        try:
            self._launch(each)
        except RunError as error:  # an upgrade may be under way
            each.due = time.monotonic() + LONGEST_PAUSE_S
            return f"is down: {error}; trying again in {LONGEST_PAUSE_S:g} s"
        return "started again"

    def _bury(self, each: _Program) -> None:
        """Note how a program ended, end what is left of its group, and set when it is started again."""
        process = each.process
        assert process is not None
        _signal_group(process.pid, signal.SIGKILL)
        self._tell_guard("-", process.pid)
        now = time.monotonic()
        each.process, each.last_exit = None, process.returncode
        steady = each.starts == 1 or now - each.started >= STEADY_S
        each.pause = FIRST_PAUSE_S if steady else min(2 * each.pause, LONGEST_PAUSE_S)
        each.due = now + each.pause

    def _tend_guard(self) -> None:
        if self._guard is None or self._guard.poll() is not None:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for each in self._programs.values():
                if each.process is not None:
                    _write(_pipe(self._guard), "+", each.process.pid)

    def _tell_guard(self, sign: str, group: int) -> None:
        self._tend_guard()
        assert self._guard is not None
        _write(_pipe(self._guard), sign, group)


def complaint_in(log: Path, since: int = 0) -> str | None:
    """What a program's log says is wrong from a byte on, in words that tell what to do; None: nothing that is known."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - 8192))
            text = re.split(_WELL, file.read().decode(errors="replace").lower())[-1]
    except OSError:
        return None
    says = explanation(text)
    return f"{log.stem}: {says} ({log})" if says else None


def explanation(text: str) -> str | None:
    """The latest thing in a text that is known to be wrong, in words that tell what to do."""
    lower = text.lower()
    found = [(match.start(), says) for pattern, says in _COMPLAINTS.items() for match in _last(pattern, lower)]
    return max(found)[1] if found else None


def _last(pattern: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(pattern, text))[-1:]


def _end_groups(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    for process in processes:
        _signal_group(process.pid, signal.SIGTERM)
    end = time.monotonic() + grace
    for process in processes:
        while (process.poll() is None or _signal_group(process.pid, 0)) and time.monotonic() < end:
            time.sleep(0.05)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Whether the group still has a process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _keep_short(log: Path) -> None:
    """Move a log that has grown long to NAME.log.1; the program goes on adding to the emptied file."""
    with suppress(OSError):
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SystemExit(128 + number)


def _pipe(guard: subprocess.Popen[bytes]) -> IO[bytes]:
    assert guard.stdin is not None
    return guard.stdin


def _write(pipe: IO[bytes], sign: str, group: int) -> None:
    with suppress(OSError):
        pipe.write(f"{sign}{group}\n".encode())
        pipe.flush()
