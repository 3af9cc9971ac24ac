"""fedcpsl serve and status: a federation's server."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError


def add(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a federation of real devices",
        description="Serve a job to devices that join with `fedcpsl join`, over TLS, to those whose public keys are "
        "here. After any kill the same command goes on from the last round. Needs `pip install 'fedcpsl[federation]'`.",
        allow_abbrev=False,
    )
    serve.add_argument("job", type=Path, metavar="JOB.toml", help="a run's settings, and [federation]")
    serve.add_argument("--keys", type=Path, metavar="FOLDER", help="what `fedcpsl keys` made")
    serve.add_argument("--insecure", action="store_true", help="no TLS and no keys; on this machine alone")
    serve.add_argument("--folder", type=Path, default=Path("federation"), help="where its state is kept [federation]")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen [127.0.0.1]")
    serve.add_argument("--port", type=int, default=8443, help="[8443]")
    serve.add_argument(
        "--back-to",
        type=int,
        metavar="ROUND",
        help="go back to the state after that round first; the last five are kept",
    )
    serve.set_defaults(command=_serve)
    status = commands.add_parser(
        "status",
        help="how a federation is doing",
        description="Devices, round, accuracy, who is late: from the server's folder, or from anywhere by its address "
        "with the operator's key. A device's key shows the round and that device.",
        allow_abbrev=False,
    )
    status.add_argument("server", metavar="SERVER", help="the server's folder, or HOST:PORT as `fedcpsl join` takes it")
    status.add_argument("--keys", type=Path, metavar="FOLDER", help="with ca.crt and operator.key, or a device's key")
    status.add_argument("--name", default="", help="ask as this device, with its key [the operator]")
    status.add_argument("--insecure", action="store_true", help="no TLS and no key; a server on this machine alone")
    status.add_argument("--json", action="store_true", help="as one JSON object")
    status.set_defaults(command=_status)


def secured(keys: Path | None, *, insecure: bool) -> Path | None:
    """The keys to use; none only where that was asked for."""
    if keys is None and not insecure:
        raise InputError("--keys: give the folder that `fedcpsl keys` made (or --insecure, on one machine alone)")
    if keys is not None and insecure:
        raise InputError("--insecure: leave it out, or leave out --keys")
    return keys


def _serve(parsed: argparse.Namespace) -> int:
    keys = secured(parsed.keys, insecure=parsed.insecure)
    from fedcpsl.deployment.serve import ServerConfig, serve_job

    logging.basicConfig(level=logging.ERROR, format="fedcpsl: %(message)s")
    os.umask(0o077)
    serve_job(
        parsed.job, ServerConfig(parsed.folder, keys, parsed.host, parsed.port), _say, status_sayer(), parsed.back_to
    )
    _print(_read(parsed.folder))
    return 0


def _say(text: str) -> None:
    print(f"fedcpsl: {text}", file=sys.stderr, flush=True)


def status_sayer() -> Callable[[Mapping[str, Any]], None]:
    """Says one line for every turn, and a line that has not changed once."""
    last = [""]

    def say(text: str) -> None:
        if text != last[0]:
            _say(text)
        last[0] = text

    return partial(_say_status, say)


def _say_status(say: Callable[[str], None], status: Mapping[str, Any]) -> None:
    if status["waiting_for"]:
        more = f"{status['waiting_for']} more device{'s' * (status['waiting_for'] > 1)}"
        return say("; ".join([f"waiting for {more}", *status["strangers"].values()]))
    known = [d["accuracy"] for d in status["devices"] if d["accuracy"] is not None]
    mean = f", mean accuracy {100 * sum(known) / len(known):.1f} % of {len(known)} devices" if known else ""
    for problem in [d["problem"] for d in status["devices"] if d["problem"]] + list(status["strangers"].values()):
        say(problem)
    for event in status["events"]:
        if event["time"] >= status["updated"] - 1:
            say(event["text"])
    done = "all rounds are done" if status["over"] else f"round {status['round']} of {status['rounds']}"
    private = status["privacy"]
    spent = f", epsilon {private['epsilon']:.2f} at delta {private['delta']:g}" if private else ""
    return say(f"{done}{mean}{spent}")


def _read(folder: Path) -> dict[str, Any]:
    from fedcpsl.deployment.status import read_status

    return read_status(folder)


def _ask(server: str, keys: Path | None, name: str) -> dict[str, Any]:
    from fedcpsl.deployment.endpoints import DEVICE, OPERATOR
    from fedcpsl.deployment.status import fetch_status

    if keys is None:
        return fetch_status(server, None, None, "")
    if not name:
        return fetch_status(server, keys / "ca.crt", keys / "operator.key", OPERATOR)
    return fetch_status(server, keys / "ca.crt", key_of(keys, name), f"{DEVICE}{name}")


def key_of(keys: Path, name: str) -> Path:
    """A device's private key, in its own folder or in that of all keys."""
    places = [keys / name, keys / "devices" / name]
    try:
        found = next((place for place in places if place.is_file()), None)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if found is None:
        raise InputError(f"{places[0]}: no such key; `fedcpsl keys` makes it")
    return found


def _print(status: Mapping[str, Any]) -> None:
    from fedcpsl.report.federation import print_status

    print_status(status)


def _status(parsed: argparse.Namespace) -> int:
    folder = Path(parsed.server)
    if folder.is_dir() or not re.fullmatch(r"[^/]+:[0-9]+", parsed.server):
        if parsed.keys or parsed.name or parsed.insecure:
            raise InputError("--keys, --name, --insecure: leave them out for a folder; a server is given as HOST:PORT")
        status = _read(folder)
    else:
        status = _ask(parsed.server, secured(parsed.keys, insecure=parsed.insecure), parsed.name)
    if parsed.json:
        from fedcpsl.storage import to_json

        print(to_json(status, indent=2))
    else:
        _print(status)
    return 0
