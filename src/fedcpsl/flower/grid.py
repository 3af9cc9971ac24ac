"""Flower's grid as what carries the federation's messages."""

import time
from collections.abc import Callable, Iterator, Mapping

from flwr.app import Message as FlowerMessage
from flwr.app import MessageType
from flwr.serverapp import Grid

from fedcpsl.errors import RunError
from fedcpsl.federation.messages import Lost, Message
from fedcpsl.flower.frames import Frame
from fedcpsl.flower.records import content_of, frame_of
from fedcpsl.flower.tensors import frame_from, message_from

Names = Callable[[], Mapping[int, str]]  # of nodes, by their ids
POLL = 0.3  # seconds between looks for answers
ASKING = 60.0  # seconds that a node has to say its name


class GridTransport:
    """Devices by their names. `names` tells under which a node's key was registered; without it the device's own word
    is taken, which is for trials on one machine.
    """

    def __init__(self, grid: Grid, job: str, names: Names | None) -> None:
        self._grid, self._job, self._names = grid, job, names
        self._said: dict[int, str] = {}  # names by node, where nodes were asked
        self._nodes: dict[str, int] = {}

    def present(self) -> list[str]:
        nodes = list(self._grid.get_node_ids())
        if self._names is None:
            self._ask_names([node for node in nodes if node not in self._said])
        known = self._said if self._names is None else self._names()
        self._nodes = {known[node]: node for node in nodes if node in known}
        return sorted(self._nodes)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:
        """Time to live is the deadline: nobody carries out an order whose round is over."""
        self.present()
        reached = {name: self._nodes[name] for name in messages if name in self._nodes}
        for name in sorted(set(messages) - set(reached)):
            yield name, Lost("it is not connected")
        frames = {name: frame_from(messages[name], self._job) for name in reached}
        for name, reply in self._exchange(frames, reached, MessageType.TRAIN, deadline):
            yield name, message_from(reply) if isinstance(reply, Frame) else reply

    def _ask_names(self, nodes: list[int]) -> None:
        asked = {str(node): node for node in nodes}
        questions = {who: Frame({"question": "name"}, {}) for who in asked}
        for who, reply in self._exchange(questions, asked, MessageType.QUERY, ASKING):
            if isinstance(reply, Frame) and isinstance(reply.header.get("name"), str):
                self._said[asked[who]] = str(reply.header["name"])

    def _exchange(
        self, frames: Mapping[str, Frame], nodes: Mapping[str, int], kind: str, deadline: float
    ) -> Iterator[tuple[str, Frame | Lost]]:
        """Push all, and yield answers as they come until all are there or time is up."""
        if not frames:
            return
        end = time.monotonic() + deadline
        sent = [FlowerMessage(content_of(frames[name]), nodes[name], kind, ttl=deadline) for name in frames]
        taken = list(self._grid.push_messages(sent))
        if len(taken) < len(sent):  # Flower takes all or none: too large, for example
            yield from ((name, Lost("Flower did not take the message; its log says why")) for name in frames)
            return
        waiting = dict(zip(taken, frames, strict=True))
        while waiting:
            for reply in self._grid.pull_messages(list(waiting)):
                name = waiting.pop(reply.metadata.reply_to_message_id, None)
                if name is not None:
                    yield name, _read(reply, name)
            if waiting and time.monotonic() + POLL > end:
                return
            if waiting:
                time.sleep(POLL)


def _read(reply: FlowerMessage, name: str) -> Frame | Lost:
    if reply.has_error():
        return Lost(f"{reply.error.reason} (Flower's error {reply.error.code})")
    try:
        return frame_of(reply.content, f"the answer of device {name!r}")
    except RunError as error:
        return Lost(str(error))
