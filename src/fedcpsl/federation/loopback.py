"""A federation within one process: for trials, and for tests of everything but the network."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fedcpsl.federation.device import Participant, respond
from fedcpsl.federation.messages import Lost, Message


class Loopback(NamedTuple):
    """A transport that loses nothing."""

    participants: dict[str, Participant]

    def present(self) -> list[str]:
        return list(self.participants)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:  # noqa: ARG002
        for name, message in messages.items():
            yield name, respond(self.participants[name], message)
