"""What a device's process does with orders: it holds samples, model and state, and answers. No order ends it."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.config import Data
from fedcpsl.data.federation import federate
from fedcpsl.data.sources import load_source
from fedcpsl.data.split import Shares
from fedcpsl.deployment.conditions import Conditions, reason_to_decline
from fedcpsl.deployment.job import Job, fitted, message_bytes, read_job, server_terms
from fedcpsl.deployment.wire import About, Packet, pack, unpack
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.device import Participant, refusal, respond
from fedcpsl.federation.local_data import held, no_holdings
from fedcpsl.federation.messages import TRAIN, Message
from fedcpsl.federation.privacy import strictest
from fedcpsl.federation.protection import Protection
from fedcpsl.simulation.device_data import normalise
from fedcpsl.storage import make_folder, write_whole

LOG = logging.getLogger("fedcpsl")
UNFIT = "its data does not fit the job, or its folder cannot be used; its own log says why"
SERVER = "the server's message"
MOST_RUNS = 100  # whose states a device keeps
Clock = Callable[[], float]


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
