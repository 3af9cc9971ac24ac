"""One self-contained HTML page about runs: readable offline, in light and dark, on paper, and without scripts.

It is a file, or served over HTTP on loopback, with updates while the runs are running.
"""

import signal
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import fedcpsl
from fedcpsl.errors import InputError, RunError
from fedcpsl.report.charts import Chart, all_charts
from fedcpsl.report.figures import accuracy_by_round, accuracy_per_device
from fedcpsl.report.loaded_runs import RunSet, load_runs, runs_in, try_load_runs
from fedcpsl.report.sections import Sections, page_sections, templates
from fedcpsl.report.tables import GENERATOR, check_report_target
from fedcpsl.report.verdict import state_of, title_of
from fedcpsl.storage import to_json, write_whole

HOST = "127.0.0.1"
WATCHED_FILES = ("metrics.jsonl", "devices.csv", "failed.txt", "manifest.json", "alone/devices.csv", "edge_devices.csv")
SECTIONS = (
    *("head", "cards", "summary", "accuracy", "devices", "classes", "split", "labels", "cost", "edge", "gaps", "again"),
)


def write_report(folder: Path) -> Path:
    """Write plots/*.svg and report.html into a run's folder."""
    run_set = load_runs([folder])
    (run,) = run_set.runs
    pictures = {"accuracy": accuracy_by_round(run.metrics)}
    if run.devices:
        pictures["devices"] = accuracy_per_device(run.devices)
    write_pictures(folder, pictures)
    write_whole(folder / "report.html", page_of(run_set))
    return folder / "report.html"


def write_pictures(folder: Path, pictures: Mapping[str, str]) -> None:
    """Write plots/*.svg."""
    (folder / "plots").mkdir(exist_ok=True)
    for name, svg in pictures.items():
        write_whole(folder / "plots" / f"{name}.svg", svg)


def write_page(paths: Sequence[Path], out: Path) -> Path:
    """Write one page about several runs, comparisons or studies; only a report is ever overwritten."""
    check_report_target(out, "html")
    write_whole(out, page_of(load_runs(paths)))
    return out


def page_of(run_set: RunSet, title: str = "", summary: str | None = None) -> str:
    """Return the page of some runs; `summary` is HTML in place of the usual table of results."""
    charts = all_charts(run_set)
    sections = page_sections(run_set, charts, title, summary)
    return html_page(title or title_of(run_set), sections, page_data(run_set, charts))


def page_data(run_set: RunSet, charts: Mapping[str, Chart], **more: Any) -> dict[str, Any]:
    """Return what the page's script needs, as plain JSON values."""
    return {"charts": dict(charts), "state": state_of(run_set), "over": run_set.over, **more}


def html_page(title: str, sections: Sections, data: Mapping[str, Any]) -> str:
    """Return the page with its sections, style, script and data."""
    return (
        templates()
        .get_template("page.html")
        .render(
            title=title,
            sections=sections,
            live=bool(data.get("live")),
            data=script_json(data),
            policy=content_security_policy(),
            generator=GENERATOR,
            version=fedcpsl.__version__,
            style=asset("page.css"),
            script=asset("page.js"),
        )
    )


def script_json(value: Any) -> str:
    """Return JSON that may be inside a script element."""
    return to_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def content_security_policy() -> str:
    """Return the policy: only the page's own script runs, it connects only to its server, and nothing else is loaded.

    Style attributes are allowed: the marks of a chart have their positions there, and a style cannot run code.
    """
    script = b64encode(sha256(asset("page.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    """Return a file that is part of every page."""
    return files("fedcpsl.report").joinpath("assets", name).read_text(encoding="utf-8")


def inline_svg(svg: str) -> str:
    """Return a picture without its XML prologue, to be part of a page."""
    return svg[svg.index("<svg") :]


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
                sections = dict.fromkeys(SECTIONS, "") | page_sections(run_set, charts)
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


def serve_page(paths: Sequence[Path], port: int) -> None:
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
                self._reply(HTTPStatus.OK, "application/json", script_json({"parts": page.sections, "data": page.data}))

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
