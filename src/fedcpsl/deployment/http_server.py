"""All of a server that can be reached: orders, answers and the status, over TLS, for requests signed with a key.

A request is judged by its first lines. Only a device that was asked may send a body, and no larger one than it was
asked for; nothing else is read.
"""

import asyncio
import hmac
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.deployment.addresses import ANSWER, DIGEST, HEALTH, ORDER, POLL_S, STATUS, address
from fedcpsl.deployment.keyring import KeyRing
from fedcpsl.deployment.mailbox import Mailbox
from fedcpsl.deployment.status import DEVICE, OPERATOR, read_status, shown_part
from fedcpsl.deployment.wire import unpack
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.messages import PROTOCOL, Lost, Message

SILENCE_S = 60.0  # in the middle of a body
MOST_AT_ONCE = 10_000  # connections
OLDER = (
    "this is a server of fedcpsl 0.2 or newer, which speaks to no Flower node and runs no Flower app: install the same "
    "fedcpsl on both sides"
)
Sent = MutableMapping[str, Any]
Send = Callable[[Sent], Awaitable[None]]
Say = Callable[[str], None]


class Reply(NamedTuple):
    """What is said to a request."""

    code: int
    content: bytes = b""
    kind: bytes = b"application/octet-stream"


class Refused(Exception):  # noqa: N818 - it is an answer
    """A request that ends here."""

    def __init__(self, code: int, problem: str) -> None:
        self.code, self.problem = code, problem


class Front(NamedTuple):
    """What the server is made of; without a key ring (on loopback alone) names are believed."""

    folder: Path  # where status.json is
    mailbox: Mailbox
    ring: KeyRing | None
    say: Say


class Asked(NamedTuple):
    """The first lines of a request."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    peer: str

    def header(self, name: str) -> str:
        return self.headers.get(name.lower().encode(), b"").decode("ascii", "replace")


def application(front: Front) -> Any:
    """The ASGI application."""
    routes = {("GET", HEALTH): _health, ("GET", STATUS): _status, ("POST", ORDER): _order, ("POST", ANSWER): _answer}

    async def answer(scope: Sent, receive: Any, send: Send) -> None:
        peer = str((scope.get("client") or ("?",))[0])
        asked = Asked(scope["method"], scope["path"], dict(scope["headers"]), peer)
        route = routes.get((asked.method, asked.path))
        try:
            if scope["query_string"] or route is None:
                raise _no_route(front, asked, routes)
            reply = await route(front, asked, receive)
        except Refused as refused:
            reply = _told(refused.code, {"problem": refused.problem})
        except Exception as error:  # a fault of ours: said here, and not told to who asked
            front.say(f"{peer}: {asked.method} {printable(asked.path, 80)} failed: {type(error).__name__}: {error}")
            reply = _told(500, {"problem": "the server failed; its log says how"})
        await _send(send, reply, asked)

    return answer


def _no_route(front: Front, asked: Asked, routes: Any) -> Refused:
    if asked.path.startswith("/v1/"):
        if front.ring is not None:
            front.ring.report(asked.peer, "", "it speaks to Flower: an older fedcpsl, or no device at all")
        return Refused(426, OLDER)
    if any(path == asked.path and method != asked.method for method, path in routes):
        return Refused(405, "this path has another method")
    return Refused(404, "there is nothing here")


async def _health(front: Front, asked: Asked, receive: Any) -> Reply:  # noqa: ARG001
    return _told(200, {"protocol": PROTOCOL})


async def _status(front: Front, asked: Asked, receive: Any) -> Reply:  # noqa: ARG001
    who = _signer(front, asked)
    device = who.removeprefix(DEVICE) if who not in ("", OPERATOR) else None
    try:
        return _told(200, shown_part(read_status(front.folder), device))
    except InputError:  # which names the folder
        return _told(503, {"problem": "the server is up, and its job has not begun yet"})


async def _order(front: Front, asked: Asked, receive: Any) -> Reply:  # noqa: ARG001
    name = _device(front, asked)
    order = await front.mailbox.next_order(name, POLL_S)
    if front.ring is not None and not front.ring.knows(name):  # revoked while it waited
        raise Refused(401, "this key was revoked")
    return Reply(204) if order is None else Reply(200, order)


async def _answer(front: Front, asked: Asked, receive: Any) -> Reply:
    name, mailbox = _device(front, asked), front.mailbox
    most, length = mailbox.most_bytes(name), asked.header("content-length")
    if not most:
        raise Refused(409, "no answer is awaited of this device now")
    if not length.isascii() or not length.isdigit() or len(length) > 15:
        raise Refused(411, "say how long the answer is")
    if int(length) > most:
        reason = f"its answer has {int(length)} bytes where at most {most} are taken"
        mailbox.put(name, Lost(reason, fault=True))
        raise Refused(413, reason)
    mailbox.sending(name, now=True)
    try:
        content = await _body(receive, int(length))
        message = await asyncio.to_thread(_read, content, asked.header(DIGEST), name)
    except RunError as error:
        mailbox.put(name, Lost(str(error), fault=True))
        raise Refused(400, str(error)) from error
    finally:
        mailbox.sending(name, now=False)
    if not mailbox.put(name, message):
        raise Refused(409, "the answer came too late")
    return Reply(204)


def _read(content: bytes, digest: str, name: str) -> Message:
    if not hmac.compare_digest(sha256(content).hexdigest().encode(), digest.encode()):
        raise RunError(f"the answer of device {name!r} is not what was signed")
    return unpack(content, f"the answer of device {name!r}").message


async def _body(receive: Any, length: int) -> bytes:
    """So many bytes: a client that sends more is one that lies, and h11 has cut it off by then."""
    pieces, there = [], 0
    while there < length:
        try:
            event = await asyncio.wait_for(receive(), SILENCE_S)
        except TimeoutError:
            raise Refused(408, "the answer did not come to its end") from None
        if event["type"] == "http.disconnect":
            raise Refused(400, "the line broke")
        pieces.append(event.get("body", b""))
        there += len(pieces[-1])
        if not event.get("more_body", False):
            break
    if there != length:
        raise Refused(400, "the answer is not as long as it says")
    return b"".join(pieces)


def _signer(front: Front, asked: Asked) -> str:
    """Who asks; the word of the asker where there are no keys."""
    line = asked.header("authorization")
    if front.ring is None:
        return line if line == OPERATOR or line.startswith(DEVICE) else ""
    try:
        return front.ring.signer(line, asked.method, asked.path, asked.header(DIGEST))
    except RunError as error:
        front.ring.report(asked.peer, line, str(error))
        raise Refused(401, str(error)) from error


def _device(front: Front, asked: Asked) -> str:
    who = _signer(front, asked)
    name = who.removeprefix(DEVICE)
    if not who.startswith(DEVICE) or not 0 < len(name) <= 64 or not name.isprintable():
        raise Refused(401, "a device's key is needed here")
    return name


def _told(code: int, content: dict[str, Any]) -> Reply:
    return Reply(code, json.dumps(content).encode(), b"application/json")


async def _send(send: Send, reply: Reply, asked: Asked) -> None:
    about = [
        (b"content-type", reply.kind),
        (b"content-length", str(len(reply.content)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if reply.code >= 400:
        about.append((b"connection", b"close"))  # whatever else it was going to send is not read
    await send({"type": "http.response.start", "status": reply.code, "headers": about})
    await send({"type": "http.response.body", "body": b"" if asked.method == "HEAD" else reply.content})


class Listener(NamedTuple):
    """A server that answers in a thread of its own."""

    thread: threading.Thread
    ssl: Any  # its SSLContext, whose certificate can be renewed; None without TLS

    def check(self) -> None:
        if not self.thread.is_alive():
            raise RunError("the server's own thread ended; its log says why")


@contextmanager
def listening(front: Front, keys: Path | None, host: str, port: int) -> Iterator[Listener]:
    """Answer meanwhile; InputError where the port is taken or the certificate cannot be used."""
    try:
        import uvicorn

        from fedcpsl.deployment.http_protocol import ImpatientProtocol
    except ImportError as error:
        raise InputError(f"{error.name}: is not installed; run: pip install 'fedcpsl[federation]'") from error
    config = uvicorn.Config(
        application(front),
        http=ImpatientProtocol,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MOST_AT_ONCE,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        ssl_certfile=None if keys is None else keys / "server.crt",
        ssl_keyfile=None if keys is None else keys / "server.key",
        ssl_ciphers="ECDHE+AESGCM:ECDHE+CHACHA20",
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise InputError(f"{keys}: server.crt and server.key cannot be used: {error}") from error
    try:
        door = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512
        )
    except (OSError, OverflowError) as error:
        raise InputError(f"{address(host, port)}: cannot be listened on: {error}; give another --port") from error
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([door],), daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 30
        while not server.started and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        yield Listener(thread, config.ssl)
    finally:
        server.should_exit = True
        thread.join(5)
        door.close()
