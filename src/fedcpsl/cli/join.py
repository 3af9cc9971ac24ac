"""fedcpsl join: take part in a federation, with data that stays here."""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from fedcpsl.cli.serve import key_of, secured
from fedcpsl.errors import InputError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
EXPLAINED = """What leaves this device, and nothing else:
  once           how many labelled and unlabelled training samples it has
  in each round  theta_i - theta, the change of its copy of the global model: one number per parameter{protected};
                 and how many steps it took
  {accuracy}
  where it cannot take part, one line that says why
Around it, in every request: its name, the time, the SHA-256 of what it sends, and a signature of these with its key.
What never leaves it: samples, labels, pseudo-labels, its localized model, its control variate.
What it receives: the global model, the global control variate, the job's settings."""


def add(commands: Any) -> None:
    join = commands.add_parser(
        "join",
        help="take part in a federation with this machine's data",
        description="Join a server that `fedcpsl serve` runs. Samples, labels and the personal model stay here.",
        allow_abbrev=False,
    )
    join.add_argument("server", nargs="?", default="", metavar="HOST:PORT", help="the server")
    join.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz, .csv, .tsv or .parquet file")
    join.add_argument("--label", default="", metavar="COLUMN", help="the column of a table that is the label")
    join.add_argument("--test-column", default="", metavar="COLUMN", help="the column that marks test rows")
    join.add_argument("--name", required=True, help="what this device is called; its key has that name")
    join.add_argument("--keys", type=Path, metavar="FOLDER", help="with ca.crt and this device's key, NAME")
    join.add_argument("--insecure", action="store_true", help="no TLS and no key; a server on this machine alone")
    join.add_argument("--folder", type=Path, metavar="FOLDER", help="where its state is kept [devices/NAME]")
    join.add_argument(
        "--socket",
        type=Path,
        metavar="FILE",
        help="instead of a server: answer at this socket to a SuperNode that you run yourself",
    )
    join.add_argument("--budget", default="", metavar="30s", help="most time for the work of a round")
    join.add_argument("--not-on-battery", action="store_true", help="sit out rounds while it runs on its battery")
    join.add_argument(
        "--most-load", type=float, default=0.0, metavar="LOAD", help="sit out rounds while the load per core is higher"
    )
    join.add_argument("--clip", type=float, default=0.0, metavar="NORM", help="shorten updates to this norm")
    join.add_argument("--noise", type=float, default=0.0, help="Gaussian noise on updates, in units of --clip")
    join.add_argument("--share-accuracy", action="store_true", help="tell the server this device's test accuracy")
    join.add_argument("--explain", action="store_true", help="print what would be sent, and do nothing")
    join.set_defaults(command=_join)


def seconds(text: str) -> float:
    """A time such as 30s, 5m or 1h; 0 for none."""
    if not text:
        return 0.0
    number, unit = (text[:-1], text[-1]) if text[-1] in UNITS else (text, "s")
    try:
        found = float(number) * UNITS[unit]
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise InputError(f"--budget {text}: give a time such as 30s, 5m or 1h")
    return found


def _join(parsed: argparse.Namespace) -> int:
    if parsed.explain:
        protected = ", shortened to --clip and noised" if parsed.clip else ""
        shared = "its test accuracy" if parsed.share_accuracy else "(its test accuracy, only with --share-accuracy)"
        print(EXPLAINED.format(protected=protected, accuracy=shared))
        return 0
    if parsed.socket and (parsed.server or parsed.keys or parsed.insecure):
        raise InputError("--socket: give no server, --keys or --insecure beside it; your own SuperNode has these")
    if not parsed.socket and not parsed.server:
        raise InputError("HOST:PORT: give the server (or --socket, for a SuperNode that you run yourself)")
    keys = None if parsed.socket else secured(parsed.keys, insecure=parsed.insecure)
    budget = seconds(parsed.budget)
    if not parsed.data.exists():
        raise InputError(f"{parsed.data}: no such file")
    from fedcpsl.config import Data
    from fedcpsl.deployment.device_process import Conditions, DeviceConfig, Handler, run_device
    from fedcpsl.federation.privacy import Protection, check_protection

    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="fedcpsl: %(message)s")
    data = Data(
        dataset="own",
        file=str(parsed.data.absolute()),
        label=parsed.label,
        test_column=parsed.test_column,
        partition="iid",
        devices=1,
        labelled=1.0,
    )
    protection = Protection(parsed.clip, parsed.noise)
    check_protection(protection)
    folder = parsed.folder or Path("devices") / parsed.name
    if parsed.most_load < 0:
        raise InputError(f"--most-load {parsed.most_load:g}: give a number of at least 0")
    conditions = Conditions(not parsed.not_on_battery, parsed.most_load)
    owner = DeviceConfig(parsed.name, data, folder, budget, protection, parsed.share_accuracy, conditions)
    if parsed.socket:
        from fedcpsl.flower.local_socket import serve_socket

        serve_socket(parsed.socket, Handler(owner).handle)
    key = None if keys is None else key_of(keys, parsed.name)
    run_device(parsed.server, owner, None if keys is None else keys / "ca.crt", key, _say)
    return 0


def _say(text: str) -> None:
    print(f"fedcpsl: {text}", file=sys.stderr, flush=True)
