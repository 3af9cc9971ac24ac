"""The server's process: it listens, lets devices in by their keys, runs the job's rounds, and writes status.json."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedcpsl.deployment.endpoints import LOOPBACK, address
from fedcpsl.deployment.job import Job, message_bytes, read_job, server_terms
from fedcpsl.deployment.status import read_status
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import Transport
from fedcpsl.federation.privacy import check_delta, epsilon
from fedcpsl.federation.server import Names, serve
from fedcpsl.federation.server_store import Serving, go_back
from fedcpsl.runs.files import make_folder, to_json, write_whole
from fedcpsl.runs.folder import locked

if TYPE_CHECKING:  # which need more packages than the rounds over another transport
    from fedcpsl.deployment.http_server import Listener
    from fedcpsl.deployment.signing import KeyRing

LOG = logging.getLogger("fedcpsl")
IDLE_S, LONGEST_IDLE_S = 1.0, 60.0  # between turns in which nobody was counted
MOST_EVENTS = 20
KEYS_S = 2.0  # between looks at the keys
Say = Callable[[str], None]
Show = Callable[[Mapping[str, Any]], None]


def rounds(transport: Transport, job: Job, folder: Path, to_forget: Names = tuple) -> Iterator[Serving]:
    """Every turn of the job; status.json tells of each."""
    began = time.time()
    accuracy: dict[str, float] = {}
    events: list[dict[str, Any]] = []
    for state in serve(server_terms(job), job.rules, folder / "server", transport, to_forget):
        accuracy |= state.accuracy
        events = [*events, *({"time": time.time(), "text": text} for text in state.events)][-MOST_EVENTS:]
        online = [] if state.over else transport.present()
        status = status_of(job, state, accuracy, online, began) | {"events": events}
        write_whole(folder / "status.json", to_json(status, indent=2) + "\n", private=True)
        for reason in (*state.dropouts.values(), *state.events):
            LOG.warning("%s", reason)
        if state.counted:
            LOG.info("round %s: counted %s", state.round, ", ".join(state.counted))
        yield state


def pause_after(state: Serving) -> float:
    """Seconds until the next turn: none where somebody was counted, longer and longer where nobody is."""
    if state.counted or state.over:
        return 0.0
    return min(IDLE_S * 2 ** min(state.turn.attempt // 4, 10), LONGEST_IDLE_S)


def status_of(
    job: Job, state: Serving, accuracy: dict[str, float], online: Iterable[str], began: float
) -> dict[str, Any]:
    """What `fedcpsl status` shows."""
    connected = set(online)
    devices = [
        {
            "name": member.name,
            "labelled": member.labelled,
            "unlabelled": member.unlabelled,
            "online": member.name in connected,
            "last_counted": None if member.counted is None else member.counted.round,
            "accuracy": accuracy.get(member.name),
            "offences": member.offences,
            "excluded_until": member.excluded_until if member.excluded_until > state.round else None,
            "forgotten": member.forgotten,
            "problem": state.dropouts.get(member.name),
        }
        for member in state.roster
    ]
    return {
        "run": state.run,
        "round": state.round,
        "rounds": job.rules.rounds,
        "attempt": state.turn.attempt,
        "over": state.over,
        "began": began,
        "updated": time.time(),
        "privacy": privacy_of(job, state),
        "waiting_for": 0 if state.begun else max(0, job.rules.least - len(state.roster)),
        "devices": devices,
        "strangers": {name: why for name, why in state.dropouts.items() if name not in {d["name"] for d in devices}},
    }


def privacy_of(job: Job, state: Serving) -> dict[str, float] | None:
    """The epsilon of the device that was asked most often; None where the job asks for no noise."""
    if not job.protection.noise:
        return None
    most = max((member.asked for member in state.roster), default=0)
    return {"epsilon": epsilon(job.protection.noise, most, job.delta), "delta": job.delta, "updates": most}


class Place(NamedTuple):
    """Where a server is: its folder, its keys (None: no TLS, on loopback alone) and where it listens."""

    folder: Path
    keys: Path | None
    host: str
    port: int


def serve_job(path: Path, place: Place, say: Say, show: Show, back_to: int | None = None) -> None:
    """Serve a job until its last round; `show` is given every new status. Nothing is touched before it is ours."""
    from fedcpsl.deployment.http_server import Front, Mailbox, listening
    from fedcpsl.deployment.signing import KeyRing

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
def _watched(ring: "KeyRing | None", listener: "Listener", say: Say) -> Iterator[None]:
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
