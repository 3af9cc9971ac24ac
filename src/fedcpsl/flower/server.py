"""Flower's server app: the federation's rounds, with Flower's grid as their transport."""

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from flwr.app import Context, MessageType
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedcpsl.deployment.job import explicit_job, read_job
from fedcpsl.deployment.serve import check_job, pause_after, run_job
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import Lost, Message, pack, unpack
from fedcpsl.flower.client import from_record, to_record

LOG = logging.getLogger("fedcpsl")
POLL_S = 0.3  # between checks for replies
NAME_TIMEOUT_S = 60.0  # for a node to send its name
MAX_NAME_LENGTH = 64


class GridTransport:
    """A transport over Flower's grid, for trials on one machine: devices' names are not authenticated."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self._job = grid, ""
        self._names: dict[int, str] = {}  # by node
        self._nodes: dict[str, int] = {}

    def use_job(self, text: str) -> None:
        self._job = text

    def present(self) -> list[str]:
        nodes = list(self._grid.get_node_ids())
        self._request_names([node for node in nodes if node not in self._names])
        self._nodes = {self._names[node]: node for node in nodes if node in self._names}
        return sorted(self._nodes)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:
        """Send messages with the deadline as their time to live: no device carries out an instruction that is over."""
        self.present()
        reached = {name: self._nodes[name] for name in messages if name in self._nodes}
        for name in sorted(set(messages) - set(reached)):
            yield name, Lost("it is not connected")
        packed = {name: pack(messages[name], self._job) for name in reached}
        for name, reply in self._exchange(packed, reached, MessageType.TRAIN, deadline):
            yield name, _read(reply, name) if isinstance(reply, bytes) else reply

    def _request_names(self, nodes: list[int]) -> None:
        asked = {str(node): node for node in nodes}
        for who, reply in self._exchange(dict.fromkeys(asked, b"name"), asked, MessageType.QUERY, NAME_TIMEOUT_S):
            if isinstance(reply, bytes) and len(reply) <= MAX_NAME_LENGTH:
                self._names[asked[who]] = reply.decode("utf-8", "replace")

    def _exchange(
        self, messages: Mapping[str, bytes], nodes: Mapping[str, int], kind: str, deadline: float
    ) -> Iterator[tuple[str, bytes | Lost]]:
        """Push all messages, and yield replies as they come, until all have replied or time is up."""
        if not messages:
            return
        end = time.monotonic() + deadline
        sent = [FlowerMessage(to_record(messages[name]), nodes[name], kind, ttl=deadline) for name in messages]
        taken = list(self._grid.push_messages(sent))
        if len(taken) < len(sent):  # Flower accepts all or none; it may be too large
            yield from ((name, Lost("Flower did not accept the message; its log has the reason")) for name in messages)
            return
        waiting = dict(zip(taken, messages, strict=True))
        while waiting:
            for reply in self._grid.pull_messages(list(waiting)):
                name = waiting.pop(reply.metadata.reply_to_message_id, None)
                if name is not None:
                    yield name, _content(reply, name)
            if waiting and time.monotonic() + POLL_S > end:
                return
            if waiting:
                time.sleep(POLL_S)


def _content(reply: FlowerMessage, name: str) -> bytes | Lost:
    if reply.has_error():
        return Lost(f"{reply.error.reason} (Flower's error {reply.error.code})")
    try:
        return from_record(reply.content, f"the reply of device {name!r}")
    except RunError as error:
        return Lost(str(error), fault=True)


def _read(reply: bytes, name: str) -> Message | Lost:
    try:
        return unpack(reply, f"the reply of device {name!r}").message
    except RunError as error:
        return Lost(str(error), fault=True)


def run(grid: Grid, context: Context) -> None:
    """Run the job in the folder that the run's config names, resuming from its state."""
    folder = Path(str(context.run_config["folder"]))
    path = folder / "job.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    job = read_job(explicit_job(text, str(path)), str(path))
    check_job(job, path, text)
    run_job(GridTransport(grid), job, folder, lambda state: time.sleep(pause_after(state)), LOG.info)
