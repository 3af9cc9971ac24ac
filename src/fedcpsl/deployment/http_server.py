"""The HTTP server: instructions, replies and the status over TLS, for requests signed with a key.

An HTTP request is judged by its first lines. Only a device that has an instruction may send a body, and no larger one
than its reply may be; nothing else is read. An instruction stays in the mailbox until its reply came or its time is
up: a device that fetches it again (after a crash or a lost connection) gets the same one, and replies as it did before.
"""

import asyncio
import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.deployment.endpoints import ANSWER, DEVICE, DIGEST, HEALTH, OPERATOR, ORDER, POLL_S, STATUS, address
from fedcpsl.deployment.signing import KeyRing
from fedcpsl.deployment.status import read_status, shown_part
from fedcpsl.deployment.wire import pack, unpack
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.messages import PROTOCOL, TRAIN, Lost, Message

PRESENT_S = 60.0  # after its last request a device counts as connected
GRACE_S = 20.0  # after the start devices have this long to connect before they count as absent
LOOK_S = 0.5
SMALL = 1 << 16  # bytes of an answer without tensors
FIRST_LINES_S = 15.0  # for the first request of a connection
SILENCE_S = 60.0  # in the middle of a body
MOST_AT_ONCE = 10_000  # connections
OLDER = (
    "this is a server of fedcpsl 0.2 or newer, which speaks to no Flower node and runs no Flower app: install the same "
    "fedcpsl on both sides"
)
Sent = MutableMapping[str, Any]
Send = Callable[[Sent], Awaitable[None]]
Say = Callable[[str], None]
Banned = Callable[[], set[str]]


class Mailbox:
    """What the HTTP server and the federation's loop share; a transport for the latter."""

    def __init__(self, job: str, update_bytes: int, banned: Banned = set, clock: Callable[[], float] = time.monotonic):
        self._job, self._update_bytes, self._banned, self._clock = job, update_bytes, banned, clock
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        self._orders: dict[str, Message] = {}
        self._fetched: set[str] = set()
        self._sending: set[str] = set()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._answers: queue.Queue[tuple[str, Message | Lost]] = queue.Queue()
        self._began = clock()

    # For the federation's loop.

    def present(self) -> list[str]:
        """The devices that were heard of lately, or are at work."""
        now, banned = self._clock(), self._banned()
        with self._lock:
            near = {name for name, at in self._seen.items() if now - at < PRESENT_S}
            return sorted((near | self._fetched & set(self._orders) | set(self._waiting)) - banned)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:
        """Offer every device its order, and yield answers as they come until all are there or time is up."""
        end, open_orders = self._clock() + deadline, set(messages)
        self._answers = queue.Queue()
        with self._lock:
            self._orders, self._fetched = dict(messages), set()
            for name in messages:
                self._wake(name)
        try:
            while open_orders:
                for name, why in self._hopeless(open_orders):
                    open_orders.discard(name)
                    yield name, Lost(why)
                with suppress(queue.Empty):
                    name, answer = self._answers.get(timeout=max(0.0, min(LOOK_S, end - self._clock())))
                    open_orders.discard(name)
                    yield name, answer
                if self._clock() >= end:
                    return
        finally:
            with self._lock:
                self._orders = {}

    def _hopeless(self, names: set[str]) -> list[tuple[str, str]]:
        """Who of them cannot answer any more."""
        banned, near = self._banned(), set(self.present())
        started = self._clock() - self._began > GRACE_S
        found = [(name, "its key was revoked") for name in names & banned]
        return found + [(name, "it is not connected") for name in names - banned - near if started]

    # For the HTTP server.

    async def next_order(self, name: str, seconds: float) -> bytes | None:
        """A device's order, as soon as there is one; None after some seconds without."""
        loop = asyncio.get_running_loop()
        waits: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._seen[name] = self._clock()
            nothing_yet = name not in self._orders
            if nothing_yet:
                self._wake(name)  # an earlier request of the same device is answered: there is nothing
                self._waiting[name] = loop, waits
        if nothing_yet:
            with suppress(TimeoutError):
                await asyncio.wait_for(waits, seconds)
        with self._lock:
            self._seen[name] = self._clock()
            if self._waiting.get(name, (loop, None))[1] is waits:
                del self._waiting[name]
            order = self._orders.get(name)
            if order is None:
                return None
            self._fetched.add(name)
        return await asyncio.to_thread(pack, order, self._job)

    def most_bytes(self, name: str) -> int:
        """How large an answer of a device may be now; 0: none is awaited, or one is on its way."""
        with self._lock:
            self._seen[name] = self._clock()
            if name not in self._orders or name in self._sending:
                return 0
            return self._update_bytes + SMALL if self._orders[name].header.get("kind") == TRAIN else SMALL

    def sending(self, name: str, *, now: bool) -> None:
        """Note that an answer of a device is being received, or is no more."""
        with self._lock:
            (self._sending.add if now else self._sending.discard)(name)

    def put(self, name: str, answer: Message | Lost) -> bool:
        """Hand an answer to the loop; False where it is not awaited any more, or is to an earlier order."""
        with self._lock:
            order = self._orders.get(name)
            if order is None or (isinstance(answer, Message) and _turn_of(answer) != _turn_of(order)):
                return False
            del self._orders[name]
            self._answers.put((name, answer))
        return True

    def _wake(self, name: str) -> None:
        loop, waits = self._waiting.pop(name, (None, None))
        if loop is not None and waits is not None:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_finish, waits)


def _turn_of(message: Message) -> tuple[object, ...]:
    return tuple(message.header.get(name) for name in ("run", "round", "attempt"))


def _finish(waits: asyncio.Future[None]) -> None:
    if not waits.done():
        waits.set_result(None)


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

        protocol = _impatient_protocol()
    except ImportError as error:
        raise InputError(f"{error.name}: is not installed; run: pip install 'fedcpsl[federation]'") from error
    config = uvicorn.Config(
        application(front),
        http=protocol,
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


def _impatient_protocol() -> type[Any]:
    """uvicorn's HTTP, which has no limit of its own for the first request of a connection, with one."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class ImpatientProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(FIRST_LINES_S, self._hang_up_on_silence)

        def _hang_up_on_silence(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return ImpatientProtocol
