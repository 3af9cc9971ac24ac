"""Answers GET /status beside the SuperLink: read-only, over TLS, to who signs with a key that the server knows."""

import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower.processes import address
from fedcpsl.flower.status import DEVICE, OPERATOR, PATH, read_status, shown_part

MOST_AT_ONCE = 32
Reply = tuple[int, dict[str, Any]]
Sent = MutableMapping[str, Any]


def reply(method: str, path: str, line: str, folder: Path, keys: Path | None) -> Reply:
    """The status code and the answer to one request; `line` is its header Authorization."""
    if path != PATH:
        return 404, {"problem": "there is nothing here"}
    if method != "GET":
        return 405, {"problem": "the status can only be read"}
    try:
        device = None if keys is None else _device_of(line, keys)
    except RunError as error:
        return 401, {"problem": str(error)}
    try:
        return 200, shown_part(read_status(folder), device)
    except InputError:  # which names the folder
        return 503, {"problem": "the server is up, and its job has not begun yet"}


def _device_of(line: str, keys: Path) -> str | None:
    """The device that asks; None for the operator."""
    from fedcpsl.flower.signing import signer_of

    who = signer_of(line, keys, time.time())
    return None if who == OPERATOR else who.removeprefix(DEVICE)


@contextmanager
def answering(folder: Path, keys: Path | None, host: str, port: int, say: Callable[[str], None]) -> Iterator[None]:
    """Answer in a thread of this process meanwhile. Where the port is taken it is said, and training goes on."""
    import uvicorn

    config = uvicorn.Config(
        _application(folder, keys),
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MOST_AT_ONCE,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        ssl_certfile=None if keys is None else keys / "server.crt",
        ssl_keyfile=None if keys is None else keys / "server.key",
    )
    try:
        config.load()
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        say(f"{address(host, port)}: the status cannot be asked for there: {error}")
        yield
        return
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(5)
        listener.close()


def _application(folder: Path, keys: Path | None) -> Any:
    async def answer(scope: Sent, receive: Any, send: Callable[[Sent], Awaitable[None]]) -> None:  # noqa: ARG001
        headers = dict(scope["headers"])
        line = headers.get(b"authorization", b"").decode("ascii", "replace")
        code, content = reply(scope["method"], scope["path"], line, folder, keys)
        body = json.dumps(content).encode()
        about = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": code, "headers": about})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return answer
