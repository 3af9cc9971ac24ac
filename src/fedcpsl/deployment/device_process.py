"""A device's process: fetch instructions from the server over HTTPS, carry them out, send the replies.

It listens on no port, and no instruction ends it. A reply that did not reach the server needs no special handling: the
server gives out the same instruction again, and the device sends the same reply again.
"""

import logging
import os
import random
import re
import ssl
import time
from collections.abc import Callable
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.config import Data
from fedcpsl.data.federation import federate
from fedcpsl.data.roles import Shares
from fedcpsl.data.sources import load_source
from fedcpsl.deployment.endpoints import ANSWER, DEVICE, DIGEST, LOOPBACK, ORDER, POLL_S, split_address, tls_problem
from fedcpsl.deployment.job import Job, fitted, message_bytes, read_job, server_terms
from fedcpsl.deployment.wire import About, Packet, finish, pack, read_about, unpack
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.device import Participant, refusal, respond
from fedcpsl.federation.local_training import Clock, held, no_holdings
from fedcpsl.federation.messages import TRAIN, Message
from fedcpsl.federation.privacy import Protection, strictest
from fedcpsl.runs.files import make_folder, write_whole
from fedcpsl.simulation.device_data import normalise

LOG = logging.getLogger("fedcpsl")
UNFIT = "its data does not fit the job, or its folder cannot be used; its own log says why"
SERVER = "the server's message"
MOST_RUNS = 100  # whose states a device keeps
ANSWER_S = 120.0  # without a byte from the server
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
AGAIN_S = 60.0  # before the same problem is said again
LONGEST_PROBLEM = 300
SUPPLIES = Path("/sys/class/power_supply")
Say = Callable[[str], None]


class Conditions(NamedTuple):
    """When a device works; the defaults: always."""

    on_battery: bool = True
    most_load: float = 0.0  # of the machine, in tasks per core over the last minute; 0: any


def reason_to_decline(conditions: Conditions, supplies: Path = SUPPLIES) -> str | None:
    """Why not now; None where nothing stands against it."""
    if not conditions.on_battery and runs_on_battery(supplies):
        return "not now: it runs on its battery"
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if conditions.most_load and load > conditions.most_load:
        return "not now: it is busy with other work"
    return None


def runs_on_battery(supplies: Path = SUPPLIES) -> bool:
    """Whether a battery gives power and no mains does; no on a machine without batteries."""
    if not supplies.is_dir():
        return False
    each = [
        (_word(supply / "type"), _word(supply / "status"), _word(supply / "online")) for supply in supplies.iterdir()
    ]
    plugged = any(kind in ("Mains", "USB") and online == "1" for kind, _, online in each)
    return not plugged and any(kind == "Battery" and status == "Discharging" for kind, status, _ in each)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class DeviceConfig(NamedTuple):
    """What a device's owner decided."""

    name: str
    data: Data  # where its samples are
    folder: Path  # for its state, a folder for each run
    budget: float = 0.0
    protection: Protection = Protection()
    share_accuracy: bool = False
    conditions: Conditions = Conditions()


def participant_for(owner: DeviceConfig, job: Job, run: str) -> Participant:
    """The device as a run's participant; InputError where its data does not fit the job."""
    path = Path(owner.data.file)
    source = fitted(load_source(owner.data), job, path)
    source = source._replace(device=np.zeros(len(source.y), np.int64), names=(owner.name,))
    seed = job.config.run.seed
    try:
        federation = federate(source, Shares(test=owner.data.test), normalise=job.scaling is not None, seed=seed)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    terms = server_terms(job)
    holdings = held(federation, terms)
    make_folder(owner.folder, private=True)
    folder = owner.folder / run
    if not folder.exists() and sum(1 for _ in owner.folder.iterdir()) >= MOST_RUNS:
        raise InputError(f"{owner.folder}: holds the states of {MOST_RUNS} runs; remove those that are not needed")
    make_folder(folder, private=True)
    write_whole(folder / "job.toml", job.text, private=True)  # so that its model can be used without the server
    protection = strictest(owner.protection, job.protection)
    return Participant(terms, holdings, folder, owner.budget, protection, owner.share_accuracy)


def predictor(folder: Path) -> Participant:
    """The personal model that a device has by now, from its own folder (the one that `join` keeps)."""
    jobs = sorted(folder.glob("*/job.toml"), key=lambda path: path.stat().st_mtime)
    if not jobs:
        raise InputError(f"{folder}: has no job yet; is it a device's folder, and has the device joined?")
    job = read_job(jobs[-1].read_text(encoding="utf-8"), str(jobs[-1]))
    terms = server_terms(job)
    return Participant(terms, no_holdings(terms, job.shape), jobs[-1].parent)


def inputs_for(job: Job, x: NDArray[Any], where: Path) -> Tensor:
    """Samples as the job's network is given them."""
    if x.ndim != len(job.shape) + 1 or x.shape[1:] != job.shape:
        raise InputError(f"{where}: an input has shape {list(x.shape[1:])} where the job's is {list(job.shape)}")
    if not np.issubdtype(x.dtype, np.number) or not np.isfinite(x).all():
        raise InputError(f"{where}: has inputs that are no finite numbers")
    given = torch.from_numpy(np.ascontiguousarray(x)).to(torch.float32)
    return given if job.scaling is None else normalise(given, *(torch.tensor(t).to(given) for t in job.scaling))


def job_of(participant: Participant) -> Job:
    """The job that a predictor belongs to."""
    path = participant.folder / "job.toml"
    return read_job(path.read_text(encoding="utf-8"), str(path))


class Handler:
    """Answers messages; the last job's participant stays ready between them."""

    def __init__(self, owner: DeviceConfig, clock: Clock = time.monotonic) -> None:
        self._owner, self._clock = owner, clock
        self._ready: tuple[tuple[str, str], Participant] | None = None
        self._job: Job | None = None

    def answer(self, content: bytes) -> bytes:
        """The answer to a message as bytes; RunError where it is no message of ours."""
        return self.answer_packet(unpack(content, SERVER))

    def answer_packet(self, packet: Packet) -> bytes:
        """The answer to a message. Whatever it asks for, this process goes on: what fails is logged and refused."""
        asked = packet.message
        try:
            return pack(self._respond(asked, packet.job))
        except Exception as error:
            LOG.exception("an order could not be carried out")
            return pack(refusal(asked, f"it failed there ({type(error).__name__}); its own log says how"))

    def refusal_before_tensors(self, about: About) -> bytes | None:
        """A refusal, where what stands before a message's tensors shows that they need not be read."""
        asked = Message(about.header, {})
        job = self._job_of(about.job, asked)
        if isinstance(job, Message):
            return pack(job)
        most, _ = message_bytes(job)
        if about.tensor_bytes <= most:
            return None
        return pack(
            refusal(asked, f"the order's tensors have {about.tensor_bytes} bytes; the job's model needs {most}")
        )

    def _respond(self, asked: Message, text: str) -> Message:
        run = str(asked.header.get("run", ""))
        job = self._job_of(text, asked)
        if isinstance(job, Message):
            return job
        if not re.fullmatch(r"[0-9A-Za-z]{1,64}", run):
            return refusal(asked, "its run has no name that a folder could have")
        if self._ready is None or self._ready[0] != (text, run):
            try:
                self._ready = (text, run), participant_for(self._owner, job, run)
            except (InputError, RunError) as error:  # its text may name files and classes, and quote samples
                LOG.warning("%s", printable(error))
                return refusal(asked, UNFIT)
        reason = reason_to_decline(self._owner.conditions) if asked.header.get("kind") == TRAIN else None
        if reason:
            return refusal(asked, reason, later=True)
        return respond(self._ready[1], asked, self._clock)

    def _job_of(self, text: str, asked: Message) -> Job | Message:
        """The job of a text, or a refusal of it."""
        if self._job is None or self._job.text != text:
            try:
                self._job = read_job(text, "the server's job")
            except InputError as error:
                LOG.warning("%s", printable(error))
                return refusal(asked, str(error))
        return self._job


class Server(NamedTuple):
    """Where a device's server is, and what the two know each other by; without `ca` and `key`, nothing."""

    host: str
    port: int
    name: str  # the device's
    ca: Path | None
    key: Path | None

    def connect(self) -> HTTPConnection:
        if self.ca is None:
            return HTTPConnection(self.host, self.port, timeout=ANSWER_S)
        return HTTPSConnection(self.host, self.port, timeout=ANSWER_S, context=trusting(self.ca))

    def headers(self, path: str, digest: str = "") -> dict[str, str]:
        """Who asks. The key is read for every request: one that was renewed is used at once."""
        who, body = f"{DEVICE}{self.name}", {DIGEST: digest} if digest else {}
        if self.ca is None or self.key is None:
            return {"Authorization": who} | body
        from fedcpsl.deployment.signing import Request, signed_line

        request = Request("POST", path, digest) if digest else Request("POST", path)
        return {"Authorization": signed_line(who, self.key, self.ca, time.time(), request)} | body


def trusting(ca: Path) -> ssl.SSLContext:
    """TLS that trusts one authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise InputError(f"{ca}: cannot be read as a certificate: {error}; `fedcpsl keys` makes it") from error
    return context


def join(server: str, owner: DeviceConfig, ca: Path | None, key: Path | None, say: Say) -> None:
    """Take part in whatever the server runs, until interrupted."""
    host, port = split_address(server)
    if ca is None and host not in LOOPBACK:
        raise InputError(f"{server}: without TLS only a server on this machine can be joined; give --keys")
    if ca is not None and key is not None:
        _check_keys(ca, key, say)
    make_folder(owner.folder, private=True)
    handler, place = Handler(owner), Server(host, port, owner.name, ca, key)
    place.headers(ORDER)  # a key that is none is an error now; later it may be in the middle of being replaced
    problems, pause = _Problems(say), 0.0
    while True:
        try:
            take_part_once(place, handler)
            problems.over()
            pause = 0.0
        except (InputError, RunError, OSError, HTTPException) as error:
            problems.say(f"{server}: {problem_of(error)}")
            pause = min(max(2 * pause, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all devices at once


def take_part_once(server: Server, handler: Handler) -> None:
    """Fetch an order, if there is one, carry it out and send the answer."""
    order = fetch(server, handler)
    if order is None:
        return
    answer = order if isinstance(order, bytes) else handler.answer_packet(order)
    connection = server.connect()
    try:
        digest = sha256(answer).hexdigest()
        connection.request("POST", ANSWER, answer, server.headers(ANSWER, digest))
        response = connection.getresponse()
        if response.status not in (204, 409):  # 409: it came too late, which the next order will show
            raise RunError(_refusal(response))
    finally:
        connection.close()


def fetch(server: Server, handler: Handler) -> Packet | bytes | None:
    """The next order; a refusal where it must not even be read; None where there is none by now."""
    connection = server.connect()
    try:
        connection.timeout = POLL_S + ANSWER_S
        connection.request("POST", ORDER, b"", server.headers(ORDER))
        response = connection.getresponse()
        if response.status == 204:
            return None
        if response.status != 200:
            raise RunError(_refusal(response))
        about = read_about(lambda count: _exactly(response, count), SERVER)
        refused = handler.refusal_before_tensors(about)
        return refused or finish(about, _exactly(response, about.tensor_bytes), SERVER)
    finally:
        connection.close()


def _exactly(response: HTTPResponse, count: int) -> bytes:
    content = response.read(count)
    if len(content) < count:
        raise RunError("the line broke in the middle of an order")
    return content


def _refusal(response: HTTPResponse) -> str:
    """What a server says that gives no order, in words that tell what to do."""
    said = printable(response.read(4 * LONGEST_PROBLEM).decode(errors="replace"))
    if response.status == 401:
        return f"does not let this device in: {said[:LONGEST_PROBLEM]}"
    if response.status == 404 and "problem" not in said:
        return "is no server of this fedcpsl (version 0.1 and Flower's SuperLink have no such path); install the same"
    return f"answers HTTP {response.status}: {said[:LONGEST_PROBLEM]}"


def problem_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{tls_problem(error)} ({error})"
    if isinstance(error, RunError | InputError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be reached ({error.strerror or error}); it is tried for as long as it takes"
    return f"speaks no HTTP that is understood here ({error}); does it want TLS and --keys, or none?"


class _Problems:
    """Says a problem when it is new, and once a minute while it lasts."""

    def __init__(self, say: Say) -> None:
        self._say, self._last, self._at = say, "", 0.0

    def say(self, text: str) -> None:
        if text != self._last or time.monotonic() - self._at > AGAIN_S:
            self._say(text)
            self._last, self._at = text, time.monotonic()

    def over(self) -> None:
        if self._last:
            self._say("connected")
        self._last = ""


def _check_keys(ca: Path, key: Path, say: Say) -> None:
    """As the server does with its own."""
    from fedcpsl.deployment.keys import open_to_others, read_certificate

    read_certificate(ca)
    for warning in open_to_others([key]):
        say(f"warning: {warning}")
