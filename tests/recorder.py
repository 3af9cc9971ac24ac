"""A proxy that ends TLS as the server would, and keeps what a device and the server send before it passes it on.

It has the server's own certificate, so the device notices nothing. Then every byte is read: HTTP requests, in them
the federation's messages.
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import NamedTuple

WAIT_S = 120
CUT_OFF = b"POST /v2/order "  # what a device may be saying just when the server ends


class Request(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Wire(NamedTuple):
    """What went over one connection, each way in its order."""

    sent: bytearray
    received: bytearray


class Recorder:
    """Listens on a port of its own; `wires` has every connection of its device."""

    def __init__(self, keys: Path, server: str) -> None:
        self._server, self._ca = server, keys / "ca.crt"
        self._secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._secured.load_cert_chain(keys / "server.crt", keys / "server.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.wires: list[Wire] = []
        self._closed = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._listener.close()

    @property
    def sent(self) -> list[bytes]:
        """What the device sent over each connection."""
        return [bytes(wire.sent) for wire in self.wires]

    @property
    def requests(self) -> list[Request]:
        return [request for sent in self.sent for request in requests_in(sent)]

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _pass_on(self, plain: socket.socket) -> None:
        host, _, port = self._server.partition(":")
        with contextlib.suppress(OSError), contextlib.ExitStack() as open_:
            open_.enter_context(plain)
            reached = open_.enter_context(self._connect(host, int(port)))
            plain.settimeout(WAIT_S)
            device = open_.enter_context(self._secured.wrap_socket(plain, server_side=True))
            trusting = ssl.create_default_context(cafile=self._ca)
            server = open_.enter_context(trusting.wrap_socket(reached, server_hostname=host))
            wire = Wire(bytearray(), bytearray())
            self.wires.append(wire)
            _exchange(device, server, wire)

    def _connect(self, host: str, port: int) -> socket.socket:
        """A connection to the server, once it is up."""
        end = time.monotonic() + WAIT_S
        while True:
            try:
                return socket.create_connection((host, port), timeout=WAIT_S)
            except ConnectionRefusedError:
                if time.monotonic() > end or self._closed.wait(0.1):
                    raise


def _exchange(device: ssl.SSLSocket, server: ssl.SSLSocket, wire: Wire) -> None:
    """Pass on both ways until one side closes; one thread, for a TLS connection is not to be used by two at once."""
    while True:
        buffered = [each for each in (device, server) if each.pending()]
        for origin in buffered or select.select([device, server], [], [], WAIT_S)[0]:
            origin.settimeout(0)
            try:
                piece = origin.recv(1 << 16)
            except ssl.SSLWantReadError:  # what came was TLS's own
                continue
            if not piece:
                return
            target, kept = (server, wire.sent) if origin is device else (device, wire.received)
            kept.extend(piece)
            target.settimeout(WAIT_S)
            target.sendall(piece)


def requests_in(sent: bytes) -> list[Request]:
    """The HTTP requests that a connection carried, to its last byte; one that asks for something may be cut off."""
    found = []
    while sent:
        head, divider, sent = sent.partition(b"\r\n\r\n")
        if not divider:
            assert head.startswith(CUT_OFF), head
            break
        first, *lines = head.decode("ascii").split("\r\n")
        method, path, version = first.split(" ")
        assert (method, version) == ("POST", "HTTP/1.1"), first
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        assert len(headers) == len(lines)
        length = int(headers["content-length"])  # no body is sent in chunks of HTTP
        if len(sent) < length:
            assert head.startswith(CUT_OFF), head
            break
        found.append(Request(path, headers, sent[:length]))
        sent = sent[length:]
    return found
