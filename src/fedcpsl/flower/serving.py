"""The server's machine: Flower's programs kept up, devices let in by their keys, a job that died begun again."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.privacy import check_delta
from fedcpsl.flower import APP
from fedcpsl.flower.job import read_job, server_terms
from fedcpsl.flower.processes import (
    LOOPBACK,
    address,
    environment,
    program,
    superexec_command,
    superlink_command,
    wait_until_healthy,
)
from fedcpsl.flower.registry import CONNECTION, register_missing, write_connection
from fedcpsl.flower.status import read_status
from fedcpsl.flower.status_server import answering
from fedcpsl.flower.supervisor import Supervisor
from fedcpsl.runs.files import make_folder, write_whole
from fedcpsl.runs.folder import locked

LOOK_S = 0.5  # between looks at everything
KEYS_S = 10.0  # between looks for devices with new keys
BEGIN_S = 60.0  # that the job's process has to begin
HEALTHY_S = 60.0
Say = Callable[[str], None]


class Place(NamedTuple):
    """Where a server is: its folder, its keys (None: no TLS, on loopback alone) and where it listens."""

    folder: Path
    keys: Path | None
    host: str
    port: int
    status_host: str = "127.0.0.1"  # where its status is answered, on the next port

    @property
    def home(self) -> Path:
        return self.folder / "flwr"

    @property
    def own_address(self) -> str:
        """How its own programs reach it."""
        return address(self.host if self.host in LOOPBACK else "127.0.0.1", self.port)

    @property
    def ca(self) -> Path | None:
        return None if self.keys is None else self.keys / "ca.crt"


def serve_job(path: Path, place: Place, say: Say, show: Callable[[Mapping[str, Any]], None]) -> None:
    """Serve a job until its last round; `show` is given every new status."""
    if place.keys is None and place.status_host not in LOOPBACK:
        raise InputError(f"--status-host {place.status_host}: without keys the status is told on loopback alone")
    _keep_job(path, place.folder)
    if place.keys is not None:
        from fedcpsl.flower.keys import warnings_about

        for warning in warnings_about(place.keys):
            say(f"warning: {warning}")
    write_connection(place.home, place.own_address, place.ca)
    with (
        locked(place.folder),
        Supervisor(environment(place.home), place.folder / "logs") as programs,
        answering(place.folder, place.keys, place.status_host, place.port + 1, say),
    ):
        programs.start(
            "superlink", superlink_command(place.keys, place.folder / "superlink.db", place.host, place.port)
        )
        scheme = "http" if place.keys is None else "https"
        wait_until_healthy(f"{scheme}://{place.own_address}", place.ca, HEALTHY_S, programs)
        programs.start("superexec", superexec_command(place.keys, "127.0.0.1", place.port))
        say(f"listening on {address(place.host, place.port)}; logs are in {place.folder / 'logs'}")
        _until_over(place, programs, say, show)


def _keep_job(path: Path, folder: Path) -> None:
    """Check the job, and put it where the server's app finds it; a folder keeps its job."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    job = read_job(text, str(path))
    server_terms(job)
    if job.protection.noise:
        check_delta(job.delta)
    make_folder(folder)
    kept = folder / "job.toml"
    if kept.exists() and kept.read_text(encoding="utf-8") != text:
        raise InputError(f"{kept}: is another job than {path}; give another --folder, or the old job")
    write_whole(kept, text)


def _until_over(place: Place, programs: Supervisor, say: Say, show: Callable[[Mapping[str, Any]], None]) -> None:
    begun, looked, seen, known = float("-inf"), float("-inf"), 0.0, set[str]()
    while True:
        for news in programs.tend():
            say(news)
        now = time.monotonic()
        if place.keys is not None and now - looked > KEYS_S:
            known, looked = _let_in(place, known, say), now
        status = _latest(place.folder)
        if status and status["updated"] > seen:
            seen = status["updated"]
            show(status)
            if status["over"]:
                return
        if now - begun > BEGIN_S and not _is_served(place.folder):
            if begun > 0:
                say("the job's process is gone; starting it again from its last round")
            begun = now if _submit(place, say) else now - BEGIN_S + KEYS_S
        time.sleep(LOOK_S)


def _let_in(place: Place, known: set[str], say: Say) -> set[str]:
    """Register devices whose keys are new in the folder of keys."""
    from fedcpsl.flower.keys import public_keys

    assert place.keys is not None
    found = public_keys(place.keys)
    if set(found) == known:
        return known
    try:
        register_missing(place.home, found)
    except RunError as error:  # the SuperLink may just be down; there is a next time
        say(str(error))
        return known
    new = sorted(set(found) - known)
    if new:
        say(f"devices that may join: {', '.join(new)}")
    return set(found)


def _latest(folder: Path) -> dict[str, Any] | None:
    return read_status(folder) if (folder / "status.json").exists() else None


def _is_served(folder: Path) -> bool:
    """Whether the job's process is at work: it holds the lock of its state."""
    state = folder / "server"
    if not state.exists():
        return False
    try:
        with locked(state):
            return False
    except InputError:
        return True


def _submit(place: Place, say: Say) -> bool:
    """Have Flower run the app."""
    config = f"folder={json.dumps(str(place.folder.absolute()))} keys={'false' if place.keys is None else 'true'}"
    command = [program("flwr"), "run", str(APP), CONNECTION, "--run-config", config]
    try:
        done = subprocess.run(
            command,
            env=environment(place.home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BEGIN_S,
        )
    except subprocess.TimeoutExpired:
        say("the job could not be handed to the SuperLink in time; trying again")
        return False
    if done.returncode:
        say(f"the job could not be handed to the SuperLink: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.returncode == 0
