"""The server's process: listen for devices, run the job's rounds, and write status.json."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedcpsl.deployment.endpoints import LOOPBACK, Notify, format_address, read_status
from fedcpsl.deployment.job import (
    Job,
    explicit_job,
    explicit_step_size,
    job_terms,
    max_message_bytes,
    read_job,
    trial_of,
)
from fedcpsl.deployment.search import (
    SEARCH_FILE,
    TRIALS_FOLDER,
    States,
    check_found,
    check_search,
    read_search,
    search_step_size,
    with_step_size_found,
)
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import Transport
from fedcpsl.federation.privacy import check_delta, epsilon
from fedcpsl.federation.server import DeviceNames, check_rules, serve
from fedcpsl.federation.server_store import SERVER_FILE, ServerState, go_back
from fedcpsl.settings import DEFAULT_ALGORITHM, SEARCH
from fedcpsl.step_size import CANDIDATES
from fedcpsl.storage import locked, make_folder, to_json, write_whole

if TYPE_CHECKING:  # they need more packages than rounds over another transport do
    from fedcpsl.deployment.http_server import Listener
    from fedcpsl.deployment.signing import KeyRing

LOG = logging.getLogger("fedcpsl")
IDLE_S, MAX_IDLE_S = 1.0, 60.0  # between attempts that counted no update
MAX_EVENTS = 20  # in status.json
STATES_FOLDER = "server"
KEYS_S = 2.0  # between checks of the keys
Show = Callable[[Mapping[str, Any]], None]


class JobTransport(Transport, Protocol):
    """A transport that sends a job with every message."""

    def use_job(self, text: str) -> None:
        """Send this job from now on; no instruction is on its way."""
        ...


def run_job(
    transport: JobTransport,
    job: Job,
    folder: Path,
    follow: Callable[[ServerState], None],
    notify: Notify,
    to_forget: DeviceNames = tuple,
) -> None:
    """Run a job over a transport, after a search for its step size where it asks for one; `follow` gets every state."""
    check_found(job, folder, has_rounds=_has_rounds(folder))

    def rounds_of(some: Job, states: str) -> States:
        transport.use_job(some.text)
        for state in run_rounds(transport, some, folder, to_forget, states):
            follow(state)
            yield state

    if job.config.algorithm.eta == SEARCH:
        job = search_step_size(job, folder, rounds_of, notify)
    for _ in rounds_of(job, STATES_FOLDER):
        pass


def run_rounds(
    transport: Transport, job: Job, folder: Path, to_forget: DeviceNames = tuple, states: str = STATES_FOLDER
) -> Iterator[ServerState]:
    """Run a job over a transport; yield the state after every attempt, and write it to status.json."""
    began, search = time.time(), read_search(folder)
    accuracy: dict[str, float] = {}
    events: list[dict[str, Any]] = []
    for state in serve(job_terms(job), job.rules, folder / states, transport, to_forget):
        accuracy |= state.accuracy
        events = [*events, *({"time": time.time(), "text": text} for text in state.events)][-MAX_EVENTS:]
        online = [] if state.over else transport.present()
        status = status_of(job, state, accuracy, online, began) | {"events": events, "step_size_search": search or None}
        write_whole(folder / "status.json", to_json(status, indent=2) + "\n", private=True)
        for reason in (*state.dropouts.values(), *state.events):
            LOG.warning("%s", reason)
        if state.counted:
            LOG.info("round %s: counted %s", state.round, ", ".join(state.counted))
        yield state


def pause_after(state: ServerState) -> float:
    """Return the seconds until the next attempt: 0 after a counted update, else more and more."""
    if state.counted or state.over:
        return 0.0
    return min(IDLE_S * 2 ** min(state.attempt.number // 4, 10), MAX_IDLE_S)


def status_of(
    job: Job, state: ServerState, accuracy: dict[str, float], online: Iterable[str], began: float
) -> dict[str, Any]:
    """Return the content of status.json."""
    connected = set(online)
    devices = [
        {
            "name": record.name,
            "labelled": record.labelled,
            "unlabelled": record.unlabelled,
            "online": record.name in connected,
            "last_counted": None if record.counted is None else record.counted.round,
            "accuracy": accuracy.get(record.name),
            "offences": record.offences,
            "excluded_until": record.excluded_until if record.excluded_until > state.round else None,
            "forgotten": record.forgotten,
            "problem": state.dropouts.get(record.name),
        }
        for record in state.roster
    ]
    return {
        "run": state.run,
        "round": state.round,
        "rounds": job.rules.rounds,
        "attempt": state.attempt.number,
        "over": state.over and not job.trial,
        "trying": job.config.algorithm.eta if job.trial else None,  # a step size, before the first round
        "began": began,
        "updated": time.time(),
        "privacy": privacy_of(job, state),
        "waiting_for": 0 if state.begun else max(0, job.rules.min_devices - len(state.roster)),
        "devices": devices,
        "strangers": {name: why for name, why in state.dropouts.items() if name not in {d["name"] for d in devices}},
    }


def privacy_of(job: Job, state: ServerState) -> dict[str, float] | None:
    """Return the epsilon of the device that was asked most often; None where the job has no noise."""
    if not job.protection.noise:
        return None
    most = max((record.asked for record in state.roster), default=0)
    return {"epsilon": epsilon(job.protection.noise, most, job.delta), "delta": job.delta, "updates": most}


class ServerConfig(NamedTuple):
    """A server's folder, keys (None: no TLS, only on loopback) and the address that it listens on."""

    folder: Path
    keys: Path | None
    host: str
    port: int


def serve_job(path: Path, config: ServerConfig, notify: Notify, show: Show, back_to: int | None = None) -> None:
    """Serve a job until its last round; `show` gets every new status. The folder is locked before it is written to."""
    from fedcpsl.deployment.http_server import HttpContext, Mailbox, listening
    from fedcpsl.deployment.signing import KeyRing

    if config.keys is None and config.host not in LOOPBACK:
        raise InputError(
            f"--host {config.host}: without keys and TLS a server may only listen on loopback; use 'fedcpsl keys'"
        )
    job = _job_to_serve(path, config.folder / "job.toml")
    if config.keys is not None:
        _check_keys(config.keys, notify)
    make_folder(config.folder, private=True)
    with locked(config.folder):
        job = _keep_job(path, job, config.folder)
        if len(job.shape) == 3 and job.scaling is None:
            notify(f"warning: {path} has no shift and scale, so models get pixels from 0 to 255 as they are")
        ring = None if config.keys is None else KeyRing(config.keys, config.folder, notify)
        mailbox = Mailbox(max_message_bytes(_sample(job))[1], set if ring is None else ring.revoked)
        context = HttpContext(config.folder, mailbox, ring, notify)
        with listening(context, config.keys, config.host, config.port) as listener:
            if back_to is not None:
                _go_back(with_step_size_found(job, config.folder), config.folder, back_to, notify)
            notify(f"listening on {format_address(config.host, config.port)}")

            def follow(state: ServerState) -> None:
                listener.check()
                show(read_status(config.folder))
                time.sleep(pause_after(state))

            with _watch_keys(ring, listener, notify):
                run_job(mailbox, job, config.folder, follow, notify, tuple if ring is None else ring.forgotten)


def _sample(job: Job) -> Job:
    """Return the job with some step size, for what does not depend on it."""
    return trial_of(job, CANDIDATES[0], 1) if job.config.algorithm.eta == SEARCH else job


def _job_to_serve(path: Path, kept: Path) -> Job:
    """Return the given job with every setting in it, as devices get it; the folder's own has the algorithm meant."""
    old = read_job(_text_of(kept), str(kept)) if kept.exists() else None
    algorithm = old.config.algorithm.name if old else DEFAULT_ALGORITHM
    job = read_job(explicit_job(_text_of(path), str(path), algorithm), str(path))
    check_job(job, path, _text_of(path))
    return job


def check_job(job: Job, path: Path, text: str) -> None:
    """Refuse a job that cannot be served; `text` is the file as its author wrote it."""
    if job.trial:
        raise InputError(f"{path}: [federation] trial: leave it out; a server sets it for the trials of a step size")
    if job.config.algorithm.eta == SEARCH:
        check_search(job, path, explicit=explicit_step_size(text))
    terms = job_terms(_sample(job))
    try:
        check_rules(terms, job.rules)
    except InputError as error:
        raise InputError(f"{path}: [federation] {error}") from error
    if job.protection.noise:
        check_delta(job.delta)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_keys(keys: Path, notify: Notify) -> None:
    from fedcpsl.deployment.keys import warnings_about

    for name in ("ca.crt", "server.crt", "server.key"):
        if not (keys / name).is_file():
            raise InputError(f"{keys / name}: does not exist; 'fedcpsl keys' makes it")
    for warning in warnings_about(keys):
        notify(f"warning: {warning}")


def _keep_job(path: Path, job: Job, folder: Path) -> Job:
    """Write the job into the folder, or return the same one from there as devices have it; InputError for another.

    A search for a step size can be ended by another job: no round is lost by it.
    """
    kept = folder / "job.toml"
    before = _text_of(kept) if kept.exists() else None
    if before is not None and explicit_job(before, str(kept)) == job.text:
        return read_job(before, str(kept))
    if before is not None and (_has_rounds(folder) or not (folder / SEARCH_FILE).exists()):
        raise InputError(f"{kept}: is another job than {path}; give another --folder, or the old job")
    (folder / SEARCH_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / TRIALS_FOLDER, ignore_errors=True)
    write_whole(kept, job.text, private=True)
    return job


def _has_rounds(folder: Path) -> bool:
    return (folder / STATES_FOLDER / SERVER_FILE).exists()


def _go_back(job: Job, folder: Path, round: int, notify: Notify) -> None:
    terms = job_terms(job)
    state = go_back(folder / STATES_FOLDER, terms, round)
    notify(f"back to the state after {state.round} rounds; control variates are reset to 0")


@contextmanager
def _watch_keys(ring: "KeyRing | None", listener: "Listener", notify: Notify) -> Iterator[None]:
    """Check the keys every other second meanwhile: revoking and renewing take effect at once, also during a round."""
    if ring is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(KEYS_S):
            try:
                ring.revoked()
                ring.renew_certificate(listener.ssl)
            except RunError as error:
                notify(str(error))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
