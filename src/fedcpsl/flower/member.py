"""A device's own process: it holds samples, model and state, and answers while Flower's processes come and go."""

import logging
import socket
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
from fedcpsl.data.roles import Shares
from fedcpsl.data.sources import load_source
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.device import Participant, refusal, respond
from fedcpsl.federation.holdings import holdings_of
from fedcpsl.federation.messages import TRAIN, Message
from fedcpsl.federation.privacy import strictest
from fedcpsl.federation.protection import Protection
from fedcpsl.flower.conditions import Conditions, reluctance
from fedcpsl.flower.frames import Frame, pack, receive, send, unpack
from fedcpsl.flower.job import Job, fitted, read_job, setup_for, stand_in, terms_for
from fedcpsl.flower.tensors import frame_from, message_from
from fedcpsl.runs.files import make_folder, write_whole
from fedcpsl.simulation.shelf import normalise

LOG = logging.getLogger("fedcpsl")
UNFIT = "its data does not fit the job, or its folder cannot be used; its own log says why"
PATIENCE = 60.0  # seconds for a process of this machine to say what it wants


class Owner(NamedTuple):
    """What a device's owner decided."""

    name: str
    data: Data  # where its samples are
    folder: Path  # for its state, a folder for each run
    budget: float = 0.0
    protection: Protection = Protection()
    share_accuracy: bool = False
    conditions: Conditions = Conditions()


def participant_for(owner: Owner, job: Job, run: str) -> Participant:
    """The device as a run's participant; InputError where its data does not fit the job."""
    path = Path(owner.data.file)
    source = fitted(load_source(owner.data), job, path)
    source = source._replace(device=np.zeros(len(source.y), np.int64), names=(owner.name,))
    seed = job.config.run.seed
    try:
        federation = federate(source, Shares(test=owner.data.test), normalise=job.scaling is not None, seed=seed)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    setup = setup_for(job, federation)
    folder = owner.folder / "".join(c for c in run if c.isalnum())[:64]
    make_folder(folder)
    write_whole(folder / "job.toml", job.text)  # so that its model can be used without the server
    protection = strictest(owner.protection, job.protection)
    terms, holdings = terms_for(job, setup), holdings_of(setup)
    return Participant(terms, holdings, folder, owner.budget, protection, owner.share_accuracy)


def predictor(folder: Path) -> Participant:
    """The personal model that a device has by now, from its own folder (the one that `join` keeps)."""
    jobs = sorted(folder.glob("*/job.toml"), key=lambda path: path.stat().st_mtime)
    if not jobs:
        raise InputError(f"{folder}: has no job yet; is it a device's folder, and has the device joined?")
    job = read_job(jobs[-1].read_text(encoding="utf-8"), str(jobs[-1]))
    setup = stand_in(job)
    return Participant(terms_for(job, setup), holdings_of(setup), jobs[-1].parent)


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


class Desk:
    """Answers frames; the last job's participant stays ready between them."""

    def __init__(self, owner: Owner, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner, self._clock = owner, clock
        self._ready: tuple[tuple[str, str], Participant] | None = None

    def answer(self, content: bytes) -> bytes:
        frame = unpack(content, "the server's message")
        return pack(frame_from(self._respond(frame)))

    def _respond(self, frame: Frame) -> Message:
        asked = message_from(frame)
        key = frame.job, str(frame.header.get("run", ""))
        if self._ready is None or self._ready[0] != key:
            try:
                job = read_job(frame.job, "the server's job")
            except InputError as error:
                LOG.warning("%s", error)
                return refusal(asked, str(error))
            try:
                self._ready = key, participant_for(self._owner, job, key[1])
            except (InputError, RunError) as error:  # its text may name files and classes, and quote samples
                LOG.warning("%s", error)
                return refusal(asked, UNFIT)
        reason = reluctance(self._owner.conditions) if frame.header.get("kind") == TRAIN else None
        return refusal(asked, reason) if reason else respond(self._ready[1], asked, self._clock)


def listen(owner: Owner, address: Path, ready: Callable[[], None] = lambda: None) -> None:
    """Answer whoever connects to a socket of this machine, one after another, until interrupted."""
    desk = Desk(owner)
    with socket.socket(socket.AF_UNIX) as door:
        address.unlink(missing_ok=True)
        door.bind(str(address))
        address.chmod(0o600)
        door.listen()
        ready()
        while True:
            connection, _ = door.accept()
            with connection:
                connection.settimeout(PATIENCE)
                try:
                    content = receive(connection)
                    if content is not None:
                        answer = desk.answer(content)
                        connection.settimeout(PATIENCE)
                        send(connection, answer)
                except (OSError, RunError) as error:  # whoever asked is gone, or speaks another language
                    LOG.warning("%s", error)
