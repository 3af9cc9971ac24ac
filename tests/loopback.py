"""A web server on this machine, and what downloads from it are checked by."""

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedcpsl.data.download import Published
from fedcpsl.errors import InputError


@contextmanager
def server(pages):
    """A web server on this machine: `pages` maps paths to their bytes, or to a function that answers by itself."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers["User-Agent"]))
            page = pages.get(self.path)
            if page is None:
                self.send_error(404)
            elif callable(page):
                page(self)
            else:
                send(self, page, len(page))

        def log_message(self, *_):
            pass

    seen = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", seen
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def send(handler, content, length):
    handler.send_response(200)
    if length is not None:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(content)


def published(content, name="some-file.gz", url="http://127.0.0.1:9/unused", size=0):
    return Published(name, hashlib.md5(content).hexdigest(), url, size)


def files_in(folder):
    """Everything there but empty folders named after data sets."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() or p.name.endswith(".partial"))


def refusal(call):
    """The one line that `call` is refused with."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message
