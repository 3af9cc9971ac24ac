"""Flower's programs: how each is called, in what environment, and whether it is well."""

import os
import shutil
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower.supervisor import Supervisor, complaint_in
from fedcpsl.runs.files import make_folder

LOOPBACK = ("127.0.0.1", "::1", "localhost")
POLL_S = 0.2


def environment(home: Path) -> dict[str, str]:
    """What Flower's programs need: a home of their own, no calls to the outside, no installing of packages."""
    make_folder(home)
    reached_directly = [*filter(None, os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(",")), *LOOPBACK]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}  # it has some
    return inherited | {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join([_programs(), os.environ.get("PATH", os.defpath)]),  # they start each other by name
        "NO_PROXY": ",".join(reached_directly),
        "no_proxy": ",".join(reached_directly),
        "PYTHONUNBUFFERED": "1",
    }


def superlink_command(keys: Path | None, database: Path, host: str = "127.0.0.1", port: int = 8000) -> list[str]:
    """The server's switchboard: it survives being killed by its database; without keys only on loopback."""
    if keys is None and host not in LOOPBACK:
        raise InputError(
            f"host {host!r}: without keys and TLS a server may only listen on loopback; use 'fedcpsl keys'"
        )
    return [
        *(program("flower-superlink"), "--host", host, "--port", str(port)),
        *("--database", str(database.absolute()), "--isolation", "process"),
        "--disable-runtime-dependency-installation",
        *(["--insecure"] if keys is None else _server_keys(keys)),
    ]


def _server_keys(keys: Path) -> list[str]:
    return [
        *("--ssl-certfile", _file(keys / "server.crt"), "--ssl-keyfile", _file(keys / "server.key")),
        *("--ssl-ca-certfile", _file(keys / "ca.crt"), "--enable-supernode-auth"),
        *("--superexec-auth-secret-file", _file(keys / "server.secret")),
    ]


def superexec_command(keys: Path | None, host: str = "127.0.0.1", port: int = 8000) -> list[str]:
    """The program that runs the server's app, apart from the SuperLink so that each outlives the other."""
    secured = [] if keys is None else ["--superexec-auth-secret-file", _file(keys / "server.secret")]
    ca = None if keys is None else keys / "ca.crt"
    return [program("flower-superexec"), "--runtime-api-address", address(host, port), *_trust(ca), *secured]


def supernode_command(
    server: str,
    ca: Path | None,
    key: Path | None,
    node_config: Mapping[str, str | int | float | bool],
    port: int,
) -> list[str]:
    """A device's end: `server` is HOST:PORT, `port` its own on loopback for the app it runs."""
    if ca is not None and key is None:
        raise InputError(
            "a device that checks the server's certificate needs a key of its own; 'fedcpsl keys' makes it"
        )
    return [
        *(program("flower-supernode"), "--superlink", server, *_trust(ca)),
        *([] if key is None else ["--auth-supernode-private-key", _file(key)]),
        *("--host", "127.0.0.1", "--port", str(port), "--node-config", _toml_pairs(node_config)),
    ]


def address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(server: str) -> tuple[str, int]:
    """HOST and PORT of HOST:PORT."""
    host, _, port = server.rpartition(":")
    if not host.strip("[]") or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{server}: give the server as HOST:PORT")
    return host.strip("[]"), int(port)


def program(name: str) -> str:
    """Where one of Flower's programs is."""
    found = shutil.which(name, path=_programs()) or shutil.which(name)
    if found is None:
        raise InputError(f"{name}: is not installed; run: pip install 'fedcpsl[flower]'")
    return found


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_healthy(url: str, ca: Path | None, seconds: float, supervisor: Supervisor | None = None) -> None:
    """Wait until the SuperLink at this URL answers GET /health, tending the supervised programs meanwhile."""
    end = time.monotonic() + seconds
    while problem := health_problem(url, ca):
        if supervisor is not None:
            supervisor.tend()
        if time.monotonic() > end:
            complaints = [] if supervisor is None else filter(None, map(complaint_in, supervisor.logs()))
            raise RunError("; ".join([f"{url}: not healthy after {seconds:g} s: {problem}", *complaints]))
        time.sleep(POLL_S)


def health_problem(url: str, ca: Path | None, seconds: float = 5.0) -> str | None:
    """Why GET /health is not answered well, or None."""
    trusted = None if ca is None else ssl.create_default_context(cafile=_file(ca))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        *([] if trusted is None else [urllib.request.HTTPSHandler(context=trusted)]),
    )
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=seconds):
            return None
    except (OSError, HTTPException) as error:  # refused, reset, timed out, not trusted, not 200
        return str(getattr(error, "reason", error))


def _programs() -> str:
    return str(Path(sys.executable).parent)


def _trust(ca: Path | None) -> list[str]:
    return ["--insecure"] if ca is None else ["--root-certificates", _file(ca)]


def _file(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"{path}: is not there; 'fedcpsl keys' makes it")
    return str(path.absolute())


def _toml_pairs(config: Mapping[str, str | int | float | bool]) -> str:
    return " ".join(f"{name}={_toml(name, value)}" for name, value in config.items())


def _toml(name: str, value: str | int | float | bool) -> str:
    if not isinstance(value, str):
        return str(value).lower()
    if "'" in value or not value.isprintable():
        raise InputError(f"{name} = {value!r}: can have no quotation mark ' and no control characters")
    return f"'{value}'"
