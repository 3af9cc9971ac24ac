"""A device's machine: its own process, and Flower's SuperNode kept up beside it."""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower.member import Owner, listen
from fedcpsl.flower.processes import LOOPBACK, environment, free_port, supernode_command
from fedcpsl.flower.supervisor import Supervisor, complaint_in

LOOK_S = 0.5
COMPLAIN_S = 15.0  # between words about what does not work


def join(server: str, owner: Owner, ca: Path | None, key: Path | None, say: Callable[[str], None]) -> None:
    """Take part in whatever the server runs, until interrupted."""
    host = server.rpartition(":")[0].strip("[]")
    if not host:
        raise InputError(f"{server}: give the server as HOST:PORT")
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


def _listen(owner: Owner, door: Path, ready: threading.Event, failed: list[BaseException]) -> None:
    try:
        listen(owner, door, ready.set)
    except BaseException as error:
        failed.append(error)
        ready.set()
