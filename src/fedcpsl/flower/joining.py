"""A device's machine: its own process, and Flower's SuperNode kept up beside it."""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower.member import Owner, listen
from fedcpsl.flower.processes import LOOPBACK, environment, free_port, split_address, supernode_command
from fedcpsl.flower.supervisor import Supervisor, complaint_in

LOOK_S = 0.5
COMPLAIN_S = 15.0  # between words about what does not work


def join(server: str, owner: Owner, ca: Path | None, key: Path | None, say: Callable[[str], None]) -> None:
    """Take part in whatever the server runs, until interrupted."""
    host, _ = split_address(server)
    if ca is None and host not in LOOPBACK:
        raise InputError(f"{server}: without TLS only a server on this machine can be joined; give --keys")
    with tempfile.TemporaryDirectory(prefix="fedcpsl-") as private:  # short: a socket's path has 107 characters at most
        door, ready = Path(private) / "door", threading.Event()
        failed: list[BaseException] = []
        threading.Thread(target=_listen, args=(owner, door, ready, failed), daemon=True).start()
        ready.wait()
        node = {"name": owner.name, "socket": str(door)}
        with Supervisor(environment(owner.folder / "flwr"), owner.folder / "logs") as programs:
            programs.start("supernode", supernode_command(server, ca, key, node, free_port()))
            log, when = owner.folder / "logs" / "supernode.log", time.monotonic()
            read = log.stat().st_size
            while not failed:
                programs.tend()
                if time.monotonic() - when > COMPLAIN_S:  # a node that cannot reach its server tries on for ever
                    complaint, when = complaint_in(log, read), time.monotonic()
                    read = log.stat().st_size
                    if complaint:
                        say(complaint)
                time.sleep(LOOK_S)
    raise RunError(f"the device's process failed: {failed[0]}") from failed[0]


def answer_at(door: Path, owner: Owner) -> NoReturn:
    """Answer at a socket of the caller's choice, until interrupted; Flower's programs are the caller's."""
    if door.exists() and not door.is_socket():
        raise InputError(f"{door}: is a file of another kind; give --socket a name that is free")
    try:
        listen(owner, door)
    except OSError as error:
        raise InputError(f"{door}: no socket can be made there: {error}") from error
    raise RunError("the device's process ended")


def _listen(owner: Owner, door: Path, ready: threading.Event, failed: list[BaseException]) -> None:
    try:
        listen(owner, door, ready.set)
    except BaseException as error:
        failed.append(error)
        ready.set()
