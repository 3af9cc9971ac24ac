"""A proxy that ends TLS as the server would, and keeps what a device sends before it passes it on.

It has the server's own certificate, so the device notices nothing. Then every byte is read: HTTP requests, in them
Flower's protobuf, in that the objects of which Flower's messages are made.
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import NamedTuple

from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

WAIT_S = 120


class Request(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Recorder:
    """Listens on a port of its own; `sent` has what came over each connection, in its order."""

    def __init__(self, keys: Path, server: str) -> None:
        self._server, self._ca = server, keys / "ca.crt"
        self._secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._secured.load_cert_chain(keys / "server.crt", keys / "server.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent: list[bytearray] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _pass_on(self, plain: socket.socket) -> None:
        host, _, port = self._server.partition(":")
        with contextlib.suppress(OSError), contextlib.ExitStack() as open_:
            reached = _connect(host, int(port))
            plain.settimeout(WAIT_S)
            device = open_.enter_context(self._secured.wrap_socket(plain, server_side=True))
            trusting = ssl.create_default_context(cafile=self._ca)
            server = open_.enter_context(trusting.wrap_socket(reached, server_hostname=host))
            kept = bytearray()
            self.sent.append(kept)
            _exchange(device, server, kept)


def _connect(host: str, port: int) -> socket.socket:
    """A connection to the server, once it is up."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=WAIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _exchange(device: ssl.SSLSocket, server: ssl.SSLSocket, kept: bytearray) -> None:
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
            target = server if origin is device else device
            if origin is device:
                kept += piece
            target.settimeout(WAIT_S)
            target.sendall(piece)


def requests_in(sent: bytes) -> list[Request]:
    """The HTTP requests that a connection carried, to its last byte."""
    found = []
    while sent:
        head, divider, sent = sent.partition(b"\r\n\r\n")
        assert divider, head
        first, *lines = head.decode("ascii").split("\r\n")
        method, path, version = first.split(" ")
        assert (method, version) == ("POST", "HTTP/1.1"), first
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        assert len(headers) == len(lines)
        length = int(headers["content-length"])  # Flower knows its bodies beforehand: none is sent in chunks of HTTP
        assert len(sent) >= length
        found.append(Request(path, headers, sent[:length]))
        sent = sent[length:]
    return found


def parsed(request: Request):
    """The protobuf of a request; its known fields make up all of its length, so nothing hides in it."""
    read = PROTOBUF_REQUEST_TYPES["POST", request.path].FromString(request.body)
    read.DiscardUnknownFields()
    assert read.ByteSize() == len(request.body), request.path
    return read


def messages_in(requests: list[Request]):
    """Flower's messages, put together from the objects and chunks that they were sent as; every object is of one."""
    contents, trees = {}, []
    for request in requests:
        read = parsed(request)
        if request.path.endswith("/push-object"):
            contents[read.object_id] = read.object_content
        elif request.path.endswith("/push-messages"):
            assert not any(message.content.ByteSize() for message in read.messages_list)  # objects have it
            trees += [tree.object_id for tree in read.message_object_trees]
    messages, used = [], {}
    for object_id in dict.fromkeys(trees):
        message = inflate_object_from_contents(object_id, contents, keep_object_contents=True)
        used |= {each: object_.deflate() for each, object_ in get_all_nested_objects(message).items()}
        messages.append(message)
    assert used == contents  # byte for byte
    return messages
