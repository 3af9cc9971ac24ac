"""A device's process: it calls the server, fetches orders, carries them out and sends its answers. It listens nowhere.

An answer that did not reach the server needs no care: the server gives out the same order again, and the device says
what it said before.
"""

import random
import ssl
import time
from collections.abc import Callable
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import NamedTuple

from fedcpsl.deployment.addresses import ANSWER, DIGEST, LOOPBACK, ORDER, POLL_S, split_address
from fedcpsl.deployment.device_process import SERVER, DeviceConfig, Handler
from fedcpsl.deployment.status import DEVICE
from fedcpsl.deployment.status_client import tls_problem
from fedcpsl.deployment.wire import Packet, finish, read_about
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.storage import make_folder

ANSWER_S = 120.0  # without a byte from the server
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
AGAIN_S = 60.0  # before the same problem is said again
LONGEST_PROBLEM = 300
Say = Callable[[str], None]


class Server(NamedTuple):
    """Where a device's server is, and what the two know each other by; without `ca` and `key`, nothing."""

    host: str
    port: int
    name: str  # the device's
    ca: Path | None
    key: Path | None

    def connect(self) -> HTTPConnection:
        if self.ca is None:
            return HTTPConnection(self.host, self.port, timeout=ANSWER_S)
        return HTTPSConnection(self.host, self.port, timeout=ANSWER_S, context=trusting(self.ca))

    def headers(self, path: str, digest: str = "") -> dict[str, str]:
        """Who asks. The key is read for every request: one that was renewed is used at once."""
        who, body = f"{DEVICE}{self.name}", {DIGEST: digest} if digest else {}
        if self.ca is None or self.key is None:
            return {"Authorization": who} | body
        from fedcpsl.deployment.signing import Request, signed_line

        request = Request("POST", path, digest) if digest else Request("POST", path)
        return {"Authorization": signed_line(who, self.key, self.ca, time.time(), request)} | body


def trusting(ca: Path) -> ssl.SSLContext:
    """TLS that trusts one authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise InputError(f"{ca}: cannot be read as a certificate: {error}; `fedcpsl keys` makes it") from error
    return context


def join(server: str, owner: DeviceConfig, ca: Path | None, key: Path | None, say: Say) -> None:
    """Take part in whatever the server runs, until interrupted."""
    host, port = split_address(server)
    if ca is None and host not in LOOPBACK:
        raise InputError(f"{server}: without TLS only a server on this machine can be joined; give --keys")
    if ca is not None and key is not None:
        _check_keys(ca, key, say)
    make_folder(owner.folder, private=True)
    handler, place = Handler(owner), Server(host, port, owner.name, ca, key)
    place.headers(ORDER)  # a key that is none is an error now; later it may be in the middle of being replaced
    problems, pause = _Problems(say), 0.0
    while True:
        try:
            take_part_once(place, handler)
            problems.over()
            pause = 0.0
        except (InputError, RunError, OSError, HTTPException) as error:
            problems.say(f"{server}: {problem_of(error)}")
            pause = min(max(2 * pause, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all devices at once


def take_part_once(server: Server, handler: Handler) -> None:
    """Fetch an order, if there is one, carry it out and send the answer."""
    order = fetch(server, handler)
    if order is None:
        return
    answer = order if isinstance(order, bytes) else handler.answer_packet(order)
    connection = server.connect()
    try:
        digest = sha256(answer).hexdigest()
        connection.request("POST", ANSWER, answer, server.headers(ANSWER, digest))
        response = connection.getresponse()
        if response.status not in (204, 409):  # 409: it came too late, which the next order will show
            raise RunError(_refusal(response))
    finally:
        connection.close()


def fetch(server: Server, handler: Handler) -> Packet | bytes | None:
    """The next order; a refusal where it must not even be read; None where there is none by now."""
    connection = server.connect()
    try:
        connection.timeout = POLL_S + ANSWER_S
        connection.request("POST", ORDER, b"", server.headers(ORDER))
        response = connection.getresponse()
        if response.status == 204:
            return None
        if response.status != 200:
            raise RunError(_refusal(response))
        about = read_about(lambda count: _exactly(response, count), SERVER)
        refused = handler.refusal_before_tensors(about)
        return refused or finish(about, _exactly(response, about.tensor_bytes), SERVER)
    finally:
        connection.close()


def _exactly(response: HTTPResponse, count: int) -> bytes:
    content = response.read(count)
    if len(content) < count:
        raise RunError("the line broke in the middle of an order")
    return content


def _refusal(response: HTTPResponse) -> str:
    """What a server says that gives no order, in words that tell what to do."""
    said = printable(response.read(4 * LONGEST_PROBLEM).decode(errors="replace"))
    if response.status == 401:
        return f"does not let this device in: {said[:LONGEST_PROBLEM]}"
    if response.status == 404 and "problem" not in said:
        return "is no server of this fedcpsl (version 0.1 and Flower's SuperLink have no such path); install the same"
    return f"answers HTTP {response.status}: {said[:LONGEST_PROBLEM]}"


def problem_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{tls_problem(error)} ({error})"
    if isinstance(error, RunError | InputError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be reached ({error.strerror or error}); it is tried for as long as it takes"
    return f"speaks no HTTP that is understood here ({error}); does it want TLS and --keys, or none?"


class _Problems:
    """Says a problem when it is new, and once a minute while it lasts."""

    def __init__(self, say: Say) -> None:
        self._say, self._last, self._at = say, "", 0.0

    def say(self, text: str) -> None:
        if text != self._last or time.monotonic() - self._at > AGAIN_S:
            self._say(text)
            self._last, self._at = text, time.monotonic()

    def over(self) -> None:
        if self._last:
            self._say("connected")
        self._last = ""


def _check_keys(ca: Path, key: Path, say: Say) -> None:
    """As the server does with its own."""
    from fedcpsl.deployment.certificates import read_certificate
    from fedcpsl.deployment.keys import open_to_others

    read_certificate(ca)
    for warning in open_to_others([key]):
        say(f"warning: {warning}")
