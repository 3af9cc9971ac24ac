"""The page of runs over HTTP, on this machine alone, with news while they go on."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from fedcpsl.errors import InputError, RunError
from fedcpsl.report.loaded_runs import runs_in, try_load_runs
from fedcpsl.report.page import content_security_policy, html_page, told_of
from fedcpsl.report.sections import Parts, all_charts, parts_of, title_of
from fedcpsl.report.tables import embedded

HOST = "127.0.0.1"
FOLLOWED = ("metrics.jsonl", "devices.csv", "failed.txt", "manifest.json", "alone/devices.csv")
EMPTY = ("summary", "accuracy", "devices", "classes", "split", "labels", "cost", "gaps", "again")


class News(NamedTuple):
    """What there is to tell, and a word that changes when it does."""

    version: str
    title: str
    parts: Parts
    told: dict[str, Any]


def teller(paths: Sequence[Path]) -> Callable[[], News]:
    """Tells of runs; reads them again only where their files have changed."""
    lock, known = Lock(), list[News]()

    def tell() -> News:
        with lock:
            version = version_of(paths)
            if not known or known[0].version != version:
                story = try_load_runs(paths)
                drawn = all_charts(story)
                told = told_of(story, drawn, live=True, version=version)
                parts = dict.fromkeys(("head", "cards", *EMPTY), "") | parts_of(story, drawn)
                known[:] = [News(version, title_of(story), parts, told)]
            return known[0]

    return tell


def version_of(paths: Sequence[Path]) -> str:
    """Differs whenever a run that is watched has written something."""
    files = [folder / name for path in paths for folder in runs_in(path) for name in FOLLOWED]
    marks = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            continue
        marks.append((str(file), found.st_mtime_ns, found.st_size))
    return format(hash(tuple(marks)) & (1 << 64) - 1, "x")


def serve(paths: Sequence[Path], port: int) -> None:
    """Until Ctrl-C or SIGTERM."""
    tell = teller(paths)
    tell()  # what cannot be told is said before anybody is asked to look
    with _server(tell, port) as server, _ends_cleanly():
        names = ", ".join(map(str, paths))
        print(f"watching {names}\nopen     http://{HOST}:{server.server_port}/\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended; runs go on without it")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in mid-sentence is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def _server(tell: Callable[[], News], port: int) -> Iterator[ThreadingHTTPServer]:
    try:
        server = _Server((HOST, port), _handler(tell))
    except OSError as error:
        raise InputError(f"--port {port}: cannot be used ({error.strerror}); give another, or 0") from error
    with server:
        yield server


@contextmanager
def _ends_cleanly() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, and both do where the shell had them ignored."""

    def end(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handler(tell: Callable[[], News]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Two things to ask for: the page, and what is new."""

        protocol_version = "HTTP/1.1"
        server_version, sys_version = "fedcpsl", ""

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            if not self._from_here():
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", "for this machine alone\n")
            elif asked.path not in ("/", "/data.json"):
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "nothing here; the page is at /\n")
            else:
                self._tell(asked.path, parse_qs(asked.query).get("since", [""])[0])

        do_HEAD = do_GET  # noqa: N815

        def _tell(self, path: str, since: str) -> None:
            try:
                news = tell()
            except (InputError, RunError, OSError, ValueError) as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
                return
            if path == "/":
                self._answer(HTTPStatus.OK, "text/html", html_page(news.title, news.parts, news.told))
            elif since == news.version:
                self._answer(HTTPStatus.NO_CONTENT, "application/json", "")
            else:
                self._answer(HTTPStatus.OK, "application/json", embedded({"parts": news.parts, "told": news.told}))

        def _from_here(self) -> bool:
            """Whether the page was asked for by its own address: a site elsewhere cannot have a browser read it."""
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            return name in (HOST, "localhost")

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            raw = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", f"{content_security_policy()}; frame-ancestors 'none'")
            self.send_header("Referrer-Policy", "no-referrer")
            if status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if raw and self.command != "HEAD":
                self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            """Who asked for what is nobody's business."""

    return Handler
