"""The server's process: it listens, lets devices in by their keys, and runs the job's rounds."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.deployment.addresses import LOOPBACK, address
from fedcpsl.deployment.http_server import Front, Listener, listening
from fedcpsl.deployment.job import Job, message_bytes, read_job, server_terms
from fedcpsl.deployment.keyring import KeyRing
from fedcpsl.deployment.mailbox import Mailbox
from fedcpsl.deployment.rounds import pause_after, rounds
from fedcpsl.deployment.status import read_status
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.privacy import check_delta
from fedcpsl.federation.server_store import go_back
from fedcpsl.storage import locked, make_folder, write_whole

KEYS_S = 2.0  # between looks at the keys
Say = Callable[[str], None]
Show = Callable[[Mapping[str, Any]], None]


class Place(NamedTuple):
    """Where a server is: its folder, its keys (None: no TLS, on loopback alone) and where it listens."""

    folder: Path
    keys: Path | None
    host: str
    port: int


def serve_job(path: Path, place: Place, say: Say, show: Show, back_to: int | None = None) -> None:
    """Serve a job until its last round; `show` is given every new status. Nothing is touched before it is ours."""
    if place.keys is None and place.host not in LOOPBACK:
        raise InputError(
            f"--host {place.host}: without keys and TLS a server may only listen on loopback; use 'fedcpsl keys'"
        )
    job = _read(path)
    if place.keys is not None:
        _check_keys(place.keys, say)
    make_folder(place.folder, private=True)
    with locked(place.folder):
        _keep_job(path, job, place.folder)
        ring = None if place.keys is None else KeyRing(place.keys, place.folder, say)
        mailbox = Mailbox(job.text, message_bytes(job)[1], set if ring is None else ring.banned)
        front = Front(place.folder, mailbox, ring, say)
        with listening(front, place.keys, place.host, place.port) as listener:
            if back_to is not None:
                _go_back(job, place.folder, back_to, say)
            say(f"listening on {address(place.host, place.port)}")
            with _watched(ring, listener, say):
                for state in rounds(mailbox, job, place.folder, tuple if ring is None else ring.forgotten):
                    listener.check()
                    show(read_status(place.folder))
                    time.sleep(pause_after(state))


def _read(path: Path) -> Job:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    job = read_job(text, str(path))
    server_terms(job)
    if job.protection.noise:
        check_delta(job.delta)
    return job


def _check_keys(keys: Path, say: Say) -> None:
    from fedcpsl.deployment.keys import warnings_about

    for name in ("ca.crt", "server.crt", "server.key"):
        if not (keys / name).is_file():
            raise InputError(f"{keys / name}: is not there; 'fedcpsl keys' makes it")
    for warning in warnings_about(keys):
        say(f"warning: {warning}")


def _keep_job(path: Path, job: Job, folder: Path) -> None:
    """Put the job where the folder's state is; a folder keeps its job."""
    kept = folder / "job.toml"
    if kept.exists() and kept.read_text(encoding="utf-8", errors="replace") != job.text:
        raise InputError(f"{kept}: is another job than {path}; give another --folder, or the old job")
    write_whole(kept, job.text, private=True)


def _go_back(job: Job, folder: Path, round: int, say: Say) -> None:
    terms = server_terms(job)
    state = go_back(folder / "server", terms, round)
    say(f"back to the state after {state.round} rounds; control variates start at 0 again")


@contextmanager
def _watched(ring: KeyRing | None, listener: Listener, say: Say) -> Iterator[None]:
    """Look at the keys every other second meanwhile: what is revoked or renewed holds at once, also during a round."""
    if ring is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(KEYS_S):
            try:
                ring.banned()
                ring.renew_certificate(listener.ssl)
            except RunError as error:
                say(str(error))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
