"""The HTTP server: instructions, replies and the status over TLS, for requests signed with a key.

An HTTP request is accepted or rejected by its head. Only a device that has an instruction may send a body, and no
larger one than its reply may be; nothing else is read. An instruction stays in the mailbox until its reply is received
or its time is up: a device that fetches it again (after a crash or a lost connection) gets the same one, and sends the
same reply.
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

from fedcpsl.deployment.endpoints import (
    DEVICE,
    DIGEST_HEADER,
    HEALTH_PATH,
    INSTRUCTION_PATH,
    LONG_POLL_S,
    OPERATOR,
    REPLY_PATH,
    STATUS_PATH,
    Notify,
    format_address,
    public_status,
    read_status,
)
from fedcpsl.deployment.signing import KeyRing
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.messages import PROBE, PROTOCOL, TRAIN, Lost, Message, pack, unpack

PRESENT_S = 60.0  # a device counts as connected for this long after its last HTTP request
GRACE_S = 20.0  # after the start, before devices that have not connected count as absent
CHECK_S = 0.5  # between checks for devices that cannot reply any more
MAX_PLAIN_REPLY_BYTES = 1 << 16  # bytes of a reply without tensors
FIRST_REQUEST_TIMEOUT_S = 15.0  # for the first request of a connection
BODY_TIMEOUT_S = 60.0  # without a byte of a body
MAX_CONNECTIONS = 10_000
OLD_CLIENT = (
    "this is a server of fedcpsl 0.2 or newer, which accepts no Flower node and runs no Flower app: install the same "
    "fedcpsl on both sides"
)
AsgiMessage = MutableMapping[str, Any]
Send = Callable[[AsgiMessage], Awaitable[None]]
RevokedNames = Callable[[], set[str]]


class Mailbox:
    """The loop's transport: passes instructions and replies between it and the HTTP server's thread."""

    def __init__(self, update_bytes: int, revoked: RevokedNames = set, clock: Callable[[], float] = time.monotonic):
        self._job, self._update_bytes, self._revoked, self._clock = "", update_bytes, revoked, clock
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        self._instructions: dict[str, Message] = {}
        self._fetched: set[str] = set()
        self._receiving: set[str] = set()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._replies: queue.Queue[tuple[str, Message | Lost]] = queue.Queue()
        self._began = clock()
        self.closed = False  # the server stops

    # For the federation's loop.

    def use_job(self, text: str) -> None:
        """Send this job with every instruction from now on."""
        with self._lock:
            self._job = text

    def present(self) -> list[str]:
        """Return the devices that were seen recently, or are working."""
        now, revoked = self._clock(), self._revoked()
        with self._lock:
            seen = {name for name, at in self._seen.items() if now - at < PRESENT_S}
            return sorted((seen | self._fetched & set(self._instructions) | set(self._waiting)) - revoked)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:
        """Offer every device its instruction, and yield replies as they come, until all have replied or time is up."""
        end, pending = self._clock() + deadline, set(messages)
        self._replies = queue.Queue()
        with self._lock:
            self._instructions, self._fetched = dict(messages), set()
            for name in messages:
                self._release(name)
        try:
            while pending:
                for name, why in self._unreachable(pending):
                    pending.discard(name)
                    yield name, Lost(why)
                with suppress(queue.Empty):
                    name, reply = self._replies.get(timeout=max(0.0, min(CHECK_S, end - self._clock())))
                    pending.discard(name)
                    yield name, reply
                if self._clock() >= end:
                    return
        finally:
            with self._lock:
                self._instructions = {}

    def _unreachable(self, names: set[str]) -> list[tuple[str, str]]:
        """Return the devices that cannot reply any more, and why."""
        revoked, present = self._revoked(), set(self.present())
        started = self._clock() - self._began > GRACE_S
        found = [(name, "its key was revoked") for name in names & revoked]
        return found + [(name, "it is not connected") for name in names - revoked - present if started]

    # For the HTTP server.

    async def next_instruction(self, name: str, seconds: float, gone: "asyncio.Future[None]") -> bytes | None:
        """Return a device's instruction as soon as there is one; None after `seconds` without, or once it is `gone`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._seen[name] = self._clock()
            is_empty = name not in self._instructions and not self.closed
            if is_empty:
                self._release(name)  # an earlier request of the same device returns without an instruction
                self._waiting[name] = loop, waiter
        if is_empty:
            await asyncio.wait({waiter, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        with self._lock:
            if self._waiting.get(name, (loop, None))[1] is waiter:
                del self._waiting[name]
                if gone.done():  # its connection was closed, and it has not asked again since
                    self._seen.pop(name, None)
            if gone.done():
                return None
            self._seen[name] = self._clock()
            instruction = self._instructions.get(name)
            if instruction is None:
                return None
            self._fetched.add(name)
            job = self._job
        return await asyncio.to_thread(pack, instruction, job)

    def max_reply_bytes(self, name: str) -> int:
        """Return the maximum size of a device's reply; 0: none is expected, or one is being received."""
        with self._lock:
            self._seen[name] = self._clock()
            if name not in self._instructions or name in self._receiving:
                return 0
            return (
                self._update_bytes + MAX_PLAIN_REPLY_BYTES
                if self._instructions[name].header.get("kind") in (TRAIN, PROBE)
                else MAX_PLAIN_REPLY_BYTES
            )

    def set_receiving(self, name: str, *, now: bool) -> None:
        """Set whether a reply of a device is being received."""
        with self._lock:
            (self._receiving.add if now else self._receiving.discard)(name)

    def put(self, name: str, reply: Message | Lost) -> bool:
        """Pass a reply to the loop; False where it is not expected any more, or belongs to an earlier instruction."""
        with self._lock:
            instruction = self._instructions.get(name)
            if instruction is None or (isinstance(reply, Message) and not _is_reply_to(reply, instruction)):
                return False
            del self._instructions[name]
            self._replies.put((name, reply))
        return True

    def close(self) -> None:
        """Let all waiting requests return, because the server stops."""
        with self._lock:
            self.closed = True
            for name in list(self._waiting):
                self._release(name)

    def _release(self, name: str) -> None:
        loop, waiter = self._waiting.pop(name, (None, None))
        if loop is not None and waiter is not None:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_set_done, waiter)


def _attempt_of(message: Message) -> tuple[object, ...]:
    return tuple(message.header.get(name) for name in ("run", "round", "attempt"))


def _is_reply_to(reply: Message, instruction: Message) -> bool:
    """Return whether a reply is to this instruction; in a second exchange, not to the one that trained before it."""
    kinds = reply.header.get("kind"), instruction.header.get("kind")
    return _attempt_of(reply) == _attempt_of(instruction) and kinds != (TRAIN, PROBE)


def _set_done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class HttpResponse(NamedTuple):
    """The response to an HTTP request."""

    code: int
    content: bytes = b""
    kind: bytes = b"application/octet-stream"


class HttpError(Exception):
    """Rejects an HTTP request with a status code."""

    def __init__(self, code: int, problem: str) -> None:
        self.code, self.problem = code, problem


class HttpContext(NamedTuple):
    """What requests are handled with; without a key ring (only on loopback) names are not authenticated."""

    folder: Path  # where status.json is
    mailbox: Mailbox
    ring: KeyRing | None
    notify: Notify


class HttpRequest(NamedTuple):
    """The head of an HTTP request."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    peer: str

    def header(self, name: str) -> str:
        return self.headers.get(name.lower().encode(), b"").decode("ascii", "replace")


def asgi_app(context: HttpContext) -> Any:
    """Return the ASGI application."""
    routes = {
        ("GET", HEALTH_PATH): _health,
        ("GET", STATUS_PATH): _status,
        ("POST", INSTRUCTION_PATH): _get_instruction,
        ("POST", REPLY_PATH): _post_reply,
    }

    async def handle(scope: AsgiMessage, receive: Any, send: Send) -> None:
        peer = str((scope.get("client") or ("?",))[0])
        request = HttpRequest(scope["method"], scope["path"], dict(scope["headers"]), peer)
        route = routes.get((request.method, request.path))
        try:
            if scope["query_string"] or route is None:
                raise _no_route(context, request, routes)
            response = await route(context, request, receive)
        except HttpError as error:
            response = _json_response(error.code, {"problem": error.problem})
        except Exception as error:  # a bug: reported here, and not to the client
            context.notify(
                f"{peer}: {request.method} {printable(request.path, 80)} failed: {type(error).__name__}: {error}"
            )
            response = _json_response(500, {"problem": "the server failed; its log says how"})
        await _send(send, response, request)

    return handle


def _no_route(context: HttpContext, request: HttpRequest, routes: Any) -> HttpError:
    if request.path.startswith("/v1/"):
        if context.ring is not None:
            context.ring.report(request.peer, "", "it uses Flower's protocol: an older fedcpsl, or not a device")
        return HttpError(426, OLD_CLIENT)
    if any(path == request.path and method != request.method for method, path in routes):
        return HttpError(405, "method not allowed for this path")
    return HttpError(404, "no such path")


async def _health(context: HttpContext, request: HttpRequest, receive: Any) -> HttpResponse:  # noqa: ARG001
    return _json_response(200, {"protocol": PROTOCOL})


async def _status(context: HttpContext, request: HttpRequest, receive: Any) -> HttpResponse:  # noqa: ARG001
    who = _signer(context, request)
    device = who.removeprefix(DEVICE) if who not in ("", OPERATOR) else None
    try:
        return _json_response(200, public_status(read_status(context.folder), device))
    except InputError:  # its text names the folder
        return _json_response(503, {"problem": "the server is up, but its job has not started yet"})


async def _get_instruction(context: HttpContext, request: HttpRequest, receive: Any) -> HttpResponse:
    name = _device(context, request)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        instruction = await context.mailbox.next_instruction(name, LONG_POLL_S, gone)
    finally:
        gone.cancel()
    if instruction is None and context.mailbox.closed:
        raise HttpError(503, "the server stops")
    if context.ring is not None and not context.ring.has_accepted_key(name):  # revoked while it waited
        raise HttpError(401, "this key was revoked")
    return HttpResponse(204) if instruction is None else HttpResponse(200, instruction)


async def _disconnected(receive: Any) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _post_reply(context: HttpContext, request: HttpRequest, receive: Any) -> HttpResponse:
    name, mailbox = _device(context, request), context.mailbox
    most, length = mailbox.max_reply_bytes(name), request.header("content-length")
    if not most:
        raise HttpError(409, "no reply of this device is expected now")
    if not length.isascii() or not length.isdigit() or len(length) > 15:
        raise HttpError(411, "Content-Length is missing or invalid")
    if int(length) > most:
        reason = f"its reply has {int(length)} bytes where at most {most} are accepted"
        mailbox.put(name, Lost(reason, fault=True))
        raise HttpError(413, reason)
    mailbox.set_receiving(name, now=True)
    try:
        content = await _body(receive, int(length))
        message = await asyncio.to_thread(_read_reply, content, request.header(DIGEST_HEADER), name)
    except RunError as error:
        mailbox.put(name, Lost(str(error), fault=True))
        raise HttpError(400, str(error)) from error
    finally:
        mailbox.set_receiving(name, now=False)
    if not mailbox.put(name, message):
        raise HttpError(409, "the reply came too late")
    return HttpResponse(204)


def _read_reply(content: bytes, digest: str, name: str) -> Message:
    if not hmac.compare_digest(sha256(content).hexdigest().encode(), digest.encode()):
        raise RunError(f"the reply of device {name!r} is not what was signed")
    return unpack(content, f"the reply of device {name!r}").message


async def _body(receive: Any, length: int) -> bytes:
    """Read exactly `length` bytes; h11 has already cut off a client that sends more."""
    pieces, received = [], 0
    while received < length:
        try:
            event = await asyncio.wait_for(receive(), BODY_TIMEOUT_S)
        except TimeoutError:
            raise HttpError(408, "the reply was not received completely") from None
        if event["type"] == "http.disconnect":
            raise HttpError(400, "the connection was closed")
        pieces.append(event.get("body", b""))
        received += len(pieces[-1])
        if not event.get("more_body", False):
            break
    if received != length:
        raise HttpError(400, "the reply does not have the length of its Content-Length")
    return b"".join(pieces)


def _signer(context: HttpContext, request: HttpRequest) -> str:
    """Return who signed a request; without keys, who it claims to be from."""
    line = request.header("authorization")
    if context.ring is None:
        return line if line == OPERATOR or line.startswith(DEVICE) else ""
    try:
        return context.ring.signer(line, request.method, request.path, request.header(DIGEST_HEADER))
    except RunError as error:
        context.ring.report(request.peer, line, str(error))
        raise HttpError(401, str(error)) from error


def _device(context: HttpContext, request: HttpRequest) -> str:
    who = _signer(context, request)
    name = who.removeprefix(DEVICE)
    if not who.startswith(DEVICE) or not 0 < len(name) <= 64 or not name.isprintable():
        raise HttpError(401, "a device's key is needed here")
    return name


def _json_response(code: int, content: dict[str, Any]) -> HttpResponse:
    return HttpResponse(code, json.dumps(content).encode(), b"application/json")


async def _send(send: Send, response: HttpResponse, request: HttpRequest) -> None:
    headers = [
        (b"content-type", response.kind),
        (b"content-length", str(len(response.content)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if response.code >= 400:
        headers.append((b"connection", b"close"))  # the rest of the request is not read
    await send({"type": "http.response.start", "status": response.code, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if request.method == "HEAD" else response.content})


class Listener(NamedTuple):
    """An HTTP server that runs in a thread."""

    thread: threading.Thread
    ssl: Any  # its SSLContext, whose certificate can be renewed; None without TLS

    def check(self) -> None:
        """Raise RunError where the thread has ended."""
        if not self.thread.is_alive():
            raise RunError("the server's own thread ended; its log says why")


@contextmanager
def listening(context: HttpContext, keys: Path | None, host: str, port: int) -> Iterator[Listener]:
    """Run the HTTP server meanwhile; InputError where the port is taken or the certificate cannot be used."""
    try:
        import uvicorn

        config = _uvicorn_config(context, keys)
    except ImportError as error:
        raise InputError(f"{error.name}: is not installed; run: pip install 'fedcpsl[federation]'") from error
    try:
        sock = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512
        )
    except (OSError, OverflowError) as error:
        raise InputError(f"{format_address(host, port)}: cannot listen there: {error}; give another --port") from error
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 30
        while not server.started and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        yield Listener(thread, config.ssl)
    finally:
        context.mailbox.close()
        server.should_exit = True
        thread.join(5)
        sock.close()


def _uvicorn_config(context: HttpContext, keys: Path | None) -> Any:
    """Return uvicorn's configuration, loaded; InputError where the certificate cannot be used."""
    import uvicorn

    config = uvicorn.Config(
        asgi_app(context),
        http=_protocol_with_timeout(),
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
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
    return config


def _protocol_with_timeout() -> type[Any]:
    """Return uvicorn's HTTP protocol with a timeout for the first request of a connection, which it lacks."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class FirstRequestTimeoutProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(FIRST_REQUEST_TIMEOUT_S, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return FirstRequestTimeoutProtocol
