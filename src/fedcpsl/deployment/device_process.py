"""A device's process: fetch instructions from the server over HTTPS, carry them out, send the replies.

It listens on no port, and no instruction ends it. A reply that did not reach the server needs no special handling: the
server gives out the same instruction again, and the device sends the same reply again.
"""

import json
import logging
import os
import random
import re
import shutil
import ssl
import time
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.config import Data
from fedcpsl.data.federation import Federation, federate
from fedcpsl.data.sources import load_source
from fedcpsl.data.split import UNLABELLED, Shares
from fedcpsl.deployment.endpoints import (
    DEVICE,
    DIGEST_HEADER,
    INSTRUCTION_PATH,
    LONG_POLL_S,
    LOOPBACK,
    REPLY_PATH,
    Notify,
    split_address,
    tls_problem,
)
from fedcpsl.deployment.job import Job, fit_to_job, job_terms, max_message_bytes, read_job
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.device import Participant, refusal, respond
from fedcpsl.federation.local_training import Clock, empty_local_data, local_data_from
from fedcpsl.federation.messages import (
    PROBE,
    TRAIN,
    Message,
    MessagePrefix,
    Packet,
    pack,
    read_message,
    read_prefix,
    unpack,
)
from fedcpsl.federation.privacy import Protection, stricter_protection
from fedcpsl.simulation.device_data import normalise
from fedcpsl.step_size import NothingToHoldBackError, labels_held_back
from fedcpsl.storage import make_folder, write_whole

LOG = logging.getLogger("fedcpsl")
UNFIT = "its data does not fit the job, or its folder cannot be used; its log has the reason"
SERVER = "the server's message"
JOB_FILE = "job.toml"
COLUMNS_FILE = "columns.json"
TABLE_COLUMNS = ("label", "test_column")  # columns of the device's own table that are not features
MAX_RUNS_STORED = 100  # in a device's folder
RESPONSE_TIMEOUT_S = 120.0  # without a byte from the server
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0  # before the next attempt to connect
REPEAT_PROBLEM_S = 60.0  # before the same problem is reported again
MAX_PROBLEM_LENGTH = 300
SUPPLIES = Path("/sys/class/power_supply")


class Conditions(NamedTuple):
    """When a device trains; by default always."""

    on_battery: bool = True
    max_load: float = 0.0  # of the machine, in tasks per core over the last minute; 0: no limit


def reason_to_decline(conditions: Conditions, supplies: Path = SUPPLIES) -> str | None:
    """Return why the device does not train now; None where it does."""
    if not conditions.on_battery and runs_on_battery(supplies):
        return "not now: it runs on its battery"
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if conditions.max_load and load > conditions.max_load:
        return "not now: it is busy with other work"
    return None


def runs_on_battery(supplies: Path = SUPPLIES) -> bool:
    """Return whether a battery gives power and no mains does; False on a machine without batteries."""
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
    """The settings that a device's owner chose."""

    name: str
    data: Data  # where its samples are
    folder: Path  # for its states, one subfolder per run
    budget: float = 0.0
    protection: Protection = Protection()
    share_accuracy: bool = False
    conditions: Conditions = Conditions()
    trials: bool = True  # whether it takes part in trials of step sizes


def make_participant(config: DeviceConfig, job: Job, run: str) -> Participant:
    """Return the device as a participant of a run; InputError where its data does not fit the job."""
    path = Path(config.data.file)
    side = job.config.data.image_size if path.is_dir() else 0
    source = fit_to_job(load_source(replace(config.data, image_size=side), one_device=True), job, path)
    source = source._replace(device=np.zeros(len(source.y), np.int64), names=(config.name,))
    seed = job.config.run.seed
    try:
        split, normalised = Shares(test=config.data.test_share), job.scaling is not None
        federation = federate(source, split, normalise=normalised, seed=seed, labels_needed=False)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    terms = job_terms(job)
    protection = stricter_protection(config.protection, job.protection)
    if job.trial:
        federation = _for_trial(federation, seed, judges=not protection.noise)
        terms = terms._replace(method=terms.method.one_way)
    local_data = local_data_from(federation, terms)
    make_folder(config.folder, private=True)
    folder = config.folder / run
    _remove_trials(config.folder, folder)
    if not folder.exists() and sum(1 for _ in config.folder.iterdir()) >= MAX_RUNS_STORED:
        raise InputError(
            f"{config.folder}: holds the states of {MAX_RUNS_STORED} runs; remove those that are not needed"
        )
    make_folder(folder, private=True)
    columns = {name: getattr(config.data, name) for name in TABLE_COLUMNS}
    write_whole(folder / COLUMNS_FILE, json.dumps(columns), private=True)
    write_whole(folder / JOB_FILE, job.text, private=True)  # so that its model can be used without the server
    shares = config.share_accuracy and not job.trial
    return Participant(terms, local_data, folder, config.budget, protection, shares, job.trial)


def _for_trial(federation: Federation, seed: int, *, judges: bool) -> Federation:
    """Return a device's samples with a fifth of its labels as tests, or no tests where it cannot or must not judge."""
    if judges:
        with suppress(NothingToHoldBackError):
            return labels_held_back(federation, seed)
    trained = np.flatnonzero(federation.role <= UNLABELLED)
    kept = {name: getattr(federation, name)[trained] for name in ("x", "y", "device", "role")}
    return replace(federation, **kept)


def _remove_trials(folder: Path, current: Path) -> None:
    """Remove the states of trials that are over: all but the run that is asked for now."""
    for path in folder.glob(f"*/{JOB_FILE}"):
        if path.parent != current and _is_trial(path):
            shutil.rmtree(path.parent, ignore_errors=True)


def _is_trial(path: Path) -> bool:
    try:
        return read_job(path.read_text(encoding="utf-8"), str(path)).trial
    except (OSError, InputError, UnicodeDecodeError):  # of another version, or damaged: not ours to remove
        return False


def predictor(folder: Path) -> Participant:
    """Return the participant of the latest run in a device's folder, with its personal model and no samples."""
    jobs = sorted(folder.glob(f"*/{JOB_FILE}"), key=lambda path: path.stat().st_mtime)
    if jobs and all(map(_is_trial, jobs)):
        raise InputError(f"{folder}: has no model yet: the server is searching a step size; try again later")
    jobs = [path for path in jobs if not _is_trial(path)]
    if not jobs:
        raise InputError(f"{folder}: has no job yet; is it a device's folder, and has the device joined?")
    job = read_job(jobs[-1].read_text(encoding="utf-8"), str(jobs[-1]))
    terms = job_terms(job)
    return Participant(terms, empty_local_data(terms, job.shape), jobs[-1].parent)


def inputs_for(job: Job, x: NDArray[Any], where: Path) -> Tensor:
    """Return samples as the job's network takes them."""
    if x.ndim != len(job.shape) + 1 or x.shape[1:] != job.shape:
        raise InputError(f"{where}: an input has shape {list(x.shape[1:])} where the job's is {list(job.shape)}")
    if not np.issubdtype(x.dtype, np.number) or not np.isfinite(x).all():
        raise InputError(f"{where}: has inputs that are not finite numbers")
    given = torch.from_numpy(np.ascontiguousarray(x)).to(torch.float32)
    return given if job.scaling is None else normalise(given, *(torch.tensor(t).to(given) for t in job.scaling))


def job_of(participant: Participant) -> Job:
    """Return the job of a participant, from its folder."""
    path = participant.folder / JOB_FILE
    return read_job(path.read_text(encoding="utf-8"), str(path))


def columns_of(participant: Participant) -> dict[str, str]:
    """Return the columns of the device's own table that are not features; none where its folder does not say."""
    path = participant.folder / COLUMNS_FILE
    if not path.exists():  # written by an older version
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: str(found[name]) for name in TABLE_COLUMNS}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: cannot be read; let the device join again, which writes it anew") from error


class Handler:
    """Handles messages; the last job's participant is kept between them."""

    def __init__(self, config: DeviceConfig, clock: Clock = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._ready: tuple[tuple[str, str], Participant] | None = None
        self._job: Job | None = None
        self._logged = ""

    def handle(self, content: bytes) -> bytes:
        """Return the reply to a message, both as bytes; RunError where it is not a message of fedcpsl."""
        return self.handle_packet(unpack(content, SERVER))

    def handle_packet(self, packet: Packet) -> bytes:
        """Return the reply to a message. This process always continues: a failure is logged and the message refused."""
        message = packet.message
        try:
            return pack(self._respond(message, packet.job))
        except Exception as error:
            LOG.exception("an instruction could not be carried out")
            return pack(refusal(message, f"it failed there ({type(error).__name__}); its log has the details"))

    def refusal_before_tensors(self, prefix: MessagePrefix) -> bytes | None:
        """Return a refusal where the prefix of a message shows that its tensors need not be read; else None."""
        message = Message(prefix.header, {})
        job = self._job_of(prefix.job, message)
        if isinstance(job, Message):
            return pack(job)
        most, _ = max_message_bytes(job)
        if prefix.tensor_bytes <= most:
            return None
        return pack(
            refusal(
                message, f"the instruction's tensors have {prefix.tensor_bytes} bytes; the job's model needs {most}"
            )
        )

    def _respond(self, message: Message, text: str) -> Message:
        run = str(message.header.get("run", ""))
        job = self._job_of(text, message)
        if isinstance(job, Message):
            return job
        if not re.fullmatch(r"[0-9A-Za-z]{1,64}", run):
            return refusal(message, "its run is not a valid folder name")
        if job.trial and not self._config.trials:
            self._log_once("the server tries step sizes: this device takes no part until it is done (--no-trials)")
            return refusal(message, "its owner does not let it take part in trials of step sizes", later=True)
        if self._ready is None or self._ready[0] != (text, run):
            try:
                self._ready = (text, run), make_participant(self._config, job, run)
            except (InputError, RunError) as error:  # its text may name files and classes, and quote samples
                self._log_once(str(error))
                return refusal(message, UNFIT)
        reason = reason_to_decline(self._config.conditions) if message.header.get("kind") in (TRAIN, PROBE) else None
        if reason:
            return refusal(message, reason, later=True)
        return respond(self._ready[1], message, self._clock)

    def _log_once(self, text: str) -> None:
        """Log a reason to refuse; the server asks again and again."""
        if text != self._logged:
            LOG.warning("%s", printable(text))
        self._logged = text

    def _job_of(self, text: str, message: Message) -> Job | Message:
        """Return the job of a text, or a refusal of it."""
        if self._job is None or self._job.text != text:
            try:
                self._job = read_job(text, "the server's job")
            except InputError as error:
                LOG.warning("%s", printable(error))
                return refusal(message, str(error))
        return self._job


class ServerEndpoint(NamedTuple):
    """A device's server, and the files that authenticate both sides; without `ca` and `key`, neither is."""

    host: str
    port: int
    name: str  # the device's
    ca: Path | None
    key: Path | None

    def connect(self) -> HTTPConnection:
        if self.ca is None:
            return HTTPConnection(self.host, self.port, timeout=RESPONSE_TIMEOUT_S)
        return HTTPSConnection(self.host, self.port, timeout=RESPONSE_TIMEOUT_S, context=tls_context(self.ca))

    def headers(self, path: str, digest: str = "") -> dict[str, str]:
        """Return the headers of a signed request. The key is read every time: a renewed one is used at once."""
        who, body = f"{DEVICE}{self.name}", {DIGEST_HEADER: digest} if digest else {}
        if self.ca is None or self.key is None:
            return {"Authorization": who} | body
        from fedcpsl.deployment.signing import SignedContent, sign_request

        request = SignedContent("POST", path, digest) if digest else SignedContent("POST", path)
        return {"Authorization": sign_request(who, self.key, self.ca, time.time(), request)} | body


def tls_context(ca: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts only one authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise InputError(f"{ca}: cannot be read as a certificate: {error}; `fedcpsl keys` makes it") from error
    return context


def run_device(server: str, config: DeviceConfig, ca: Path | None, key: Path | None, notify: Notify) -> None:
    """Fetch and carry out the server's instructions until interrupted."""
    host, port = split_address(server)
    if ca is None and host not in LOOPBACK:
        raise InputError(f"{server}: without TLS only a server on this machine can be joined; give --keys")
    if ca is not None and key is not None:
        _check_keys(ca, key, notify)
    make_folder(config.folder, private=True)
    handler, endpoint = Handler(config), ServerEndpoint(host, port, config.name, ca, key)
    endpoint.headers(INSTRUCTION_PATH)  # an invalid key is an error now; later it may just be being replaced
    problems, pause = _Problems(notify), 0.0
    while True:
        try:
            process_next_instruction(endpoint, handler)
            problems.over()
            pause = 0.0
        except (InputError, RunError, OSError, HTTPException) as error:
            problems.report(f"{server}: {problem_of(error)}")
            pause = min(max(2 * pause, FIRST_PAUSE_S), MAX_PAUSE_S)
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all devices at once


def process_next_instruction(server: ServerEndpoint, handler: Handler) -> None:
    """Fetch an instruction, if there is one, carry it out and send the reply."""
    instruction = fetch_instruction(server, handler)
    if instruction is None:
        return
    reply = instruction if isinstance(instruction, bytes) else handler.handle_packet(instruction)
    connection = server.connect()
    try:
        digest = sha256(reply).hexdigest()
        connection.request("POST", REPLY_PATH, reply, server.headers(REPLY_PATH, digest))
        response = connection.getresponse()
        if response.status not in (204, 409):  # 409: it came too late, which the next instruction will show
            raise RunError(_refusal(response))
    finally:
        connection.close()


def fetch_instruction(server: ServerEndpoint, handler: Handler) -> Packet | bytes | None:
    """Return the next instruction; a refusal where it must not be read; None where there is none yet."""
    connection = server.connect()
    try:
        connection.timeout = LONG_POLL_S + RESPONSE_TIMEOUT_S
        connection.request("POST", INSTRUCTION_PATH, b"", server.headers(INSTRUCTION_PATH))
        response = connection.getresponse()
        if response.status == 204:
            return None
        if response.status != 200:
            raise RunError(_refusal(response))
        prefix = read_prefix(lambda count: _exactly(response, count), SERVER)
        refused = handler.refusal_before_tensors(prefix)
        return refused or read_message(prefix, _exactly(response, prefix.tensor_bytes), SERVER)
    finally:
        connection.close()


def _exactly(response: HTTPResponse, count: int) -> bytes:
    content = response.read(count)
    if len(content) < count:
        raise RunError("the connection was closed in the middle of an instruction")
    return content


def _refusal(response: HTTPResponse) -> str:
    """Return why a server gave no instruction, and what to do."""
    text = printable(response.read(4 * MAX_PROBLEM_LENGTH).decode(errors="replace"))
    is_ours = "problem" in text
    with suppress(ValueError, TypeError, KeyError):
        text = printable(json.loads(text)["problem"])
    if response.status == 401:
        return f"does not accept this device: {text[:MAX_PROBLEM_LENGTH]}"
    if response.status == 404 and not is_ours:
        return (
            "is not a server of this fedcpsl (version 0.1 and Flower's SuperLink have no such path); install the same"
        )
    return f"answers HTTP {response.status}: {text[:MAX_PROBLEM_LENGTH]}"


def problem_of(error: Exception) -> str:
    """Return what is wrong with a connection, and what to do."""
    if isinstance(error, ssl.SSLError):
        return f"{tls_problem(error)} ({error})"
    if isinstance(error, RunError | InputError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be reached ({error.strerror or error}); retrying"
    return f"does not answer in HTTP ({error}); does it need TLS and --keys, or neither?"


class _Problems:
    """Reports a problem when it is new, and once a minute while it lasts."""

    def __init__(self, notify: Notify) -> None:
        self._notify, self._last, self._at = notify, "not connected yet", 0.0

    def report(self, text: str) -> None:
        if text != self._last or time.monotonic() - self._at > REPEAT_PROBLEM_S:
            self._notify(text)
            self._last, self._at = text, time.monotonic()

    def over(self) -> None:
        if self._last:
            self._notify("connected; this device takes part until you stop it (Ctrl-C)")
        self._last = ""


def _check_keys(ca: Path, key: Path, notify: Notify) -> None:
    """Check the certificate, and warn about a key that others can read."""
    from fedcpsl.deployment.keys import open_to_others, read_certificate

    read_certificate(ca)
    for warning in open_to_others([key]):
        notify(f"warning: {warning}")
