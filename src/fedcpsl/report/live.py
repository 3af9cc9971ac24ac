"""Serve the page of runs over HTTP on loopback, with updates while they are running."""

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
from fedcpsl.report.charts import all_charts
from fedcpsl.report.headline import title_of
from fedcpsl.report.loaded_runs import runs_in, try_load_runs
from fedcpsl.report.page import content_security_policy, html_page, page_data, script_json
from fedcpsl.report.sections import Sections, sections_of

HOST = "127.0.0.1"
WATCHED_FILES = ("metrics.jsonl", "devices.csv", "failed.txt", "manifest.json", "alone/devices.csv", "edge_devices.csv")
SECTIONS = (
    *("head", "cards", "summary", "accuracy", "devices", "classes", "split", "labels", "cost", "edge", "gaps", "again"),
)


class PageState(NamedTuple):
    """The content of a page, and a version that changes with it."""

    version: str
    title: str
    sections: Sections
    data: dict[str, Any]


def page_loader(paths: Sequence[Path]) -> Callable[[], PageState]:
    """Return a function that loads the page; it reads the runs again only if their files have changed."""
    lock, cached = Lock(), list[PageState]()

    def load() -> PageState:
        with lock:
            version = version_of(paths)
            if not cached or cached[0].version != version:
                run_set = try_load_runs(paths)
                charts = all_charts(run_set)
                data = page_data(run_set, charts, live=True, version=version)
                sections = dict.fromkeys(SECTIONS, "") | sections_of(run_set, charts)
                cached[:] = [PageState(version, title_of(run_set), sections, data)]
            return cached[0]

    return load


def version_of(paths: Sequence[Path]) -> str:
    """Return a text that changes whenever a watched run has written something."""
    files = [folder / name for path in paths for folder in runs_in(path) for name in WATCHED_FILES]
    stats = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            continue
        stats.append((str(file), found.st_mtime_ns, found.st_size))
    return format(hash(tuple(stats)) & (1 << 64) - 1, "x")


def serve(paths: Sequence[Path], port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    load = page_loader(paths)
    load()  # errors come before the address is printed
    with _server(load, port) as server, _interrupted_by_signals():
        names = ", ".join(map(str, paths))
        print(f"watching {names}\nopen     http://{HOST}:{server.server_port}/\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended; the runs continue")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def _server(load: Callable[[], PageState], port: int) -> Iterator[ThreadingHTTPServer]:
    try:
        server = _Server((HOST, port), _handler(load))
    except OSError as error:
        raise InputError(f"--port {port}: cannot be used ({error.strerror}); give another, or 0") from error
    with server:
        yield server


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGINT, even if the shell had them ignored."""

    def end(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handler(load: Callable[[], PageState]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers two requests: the page, and its update."""

        protocol_version = "HTTP/1.1"
        server_version, sys_version = "fedcpsl", ""

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if not self._has_local_host():
                self._reply(HTTPStatus.FORBIDDEN, "text/plain", "for this machine alone\n")
            elif url.path not in ("/", "/data.json"):
                self._reply(HTTPStatus.NOT_FOUND, "text/plain", "nothing here; the page is at /\n")
            else:
                self._reply_page(url.path, parse_qs(url.query).get("since", [""])[0])

        do_HEAD = do_GET  # noqa: N815

        def _reply_page(self, path: str, since: str) -> None:
            try:
                page = load()
            except (InputError, RunError, OSError, ValueError) as error:
                self._reply(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
                return
            if path == "/":
                self._reply(HTTPStatus.OK, "text/html", html_page(page.title, page.sections, page.data))
            elif since == page.version:
                self._reply(HTTPStatus.NO_CONTENT, "application/json", "")
            else:
                self._reply(HTTPStatus.OK, "application/json", script_json({"parts": page.sections, "told": page.data}))

        def _has_local_host(self) -> bool:
            """Return whether the Host header is this machine's: a guard against DNS rebinding by other sites."""
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            return name in (HOST, "localhost")

        def _reply(self, status: HTTPStatus, kind: str, text: str) -> None:
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
            """Log no requests."""

    return Handler
