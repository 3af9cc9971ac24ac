"""fedcpsl keys, serve, status, join and federation: a federation of real devices, or of processes on one machine."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
WHAT_IS_SENT = """What leaves this device, and nothing else:
  once           how many labelled and unlabelled training samples it has
  in each round  what it learnt: with FedCPSL and most other algorithms the change of its copy of the global model,
                 one number per parameter{protected}; with FedHAR gradients;
                 and how many steps it took; where the algorithm asks for it, a second such change, or the mean loss
                 of a model that it was sent on a few of its labelled samples
  {accuracy}
  {trials}
  where it cannot take part, one line that says why
Around it, in every request: its name, the time, the SHA-256 of what it sends, and a signature of these with its key.
What never leaves it: samples, labels, pseudo-labels, its class frequencies, and what it keeps from round to round,
such as a model of its own or a control variate.
What it receives: the job's settings, the global model, and what its algorithm adds: FedCPSL the global control
variate, FedAMP a model made for this device, SemiFed and FedMatch models of other devices."""
TRIALS = """only where the server searches a step size, before the first round: the same in short trials, trained
                 without a fifth of its labels; and after each trial its mean loss on these labels, and how many they
                 are"""
TRIALS_WITH_NOISE = """only where the server searches a step size, before the first round: the same in short trials,
                 noised as well; no loss, because of --noise"""
NO_TRIALS = "(nothing in trials of step sizes, because of --no-trials)"
UNPROTECTED = (
    "fedcpsl: anyone who can connect to a Flower SuperLink or SuperNode can run code there: keep them on loopback, on "
    "a machine without other accounts"
)


def add_keys(commands: Any) -> None:
    keys = commands.add_parser(
        "keys",
        help="make, renew and revoke the certificates and keys of a federation",
        description="Make what is missing: a certificate authority and the server's certificate once, a key for every "
        "new device. Nothing is ever overwritten. Run it again with more --devices when some join later. With --revoke "
        "or --renew in the folder of a running server, a change takes effect at once.",
        allow_abbrev=False,
    )
    keys.add_argument("folder", type=Path, metavar="FOLDER", help="where the keys are kept")
    keys.add_argument(
        "--server",
        nargs="+",
        default=[],
        metavar="HOST",
        help="host names and IP addresses by which devices reach the server (loopback is always among them)",
    )
    keys.add_argument("--devices", nargs="+", default=[], metavar="NAME", help="devices that need a key")
    keys.add_argument("--days", type=int, metavar="N", help="validity of the server's certificate in days [825]")
    keys.add_argument(
        "--authority-days", type=int, metavar="N", help="validity of the certificate authority in days [3650]"
    )
    keys.add_argument("--revoke", nargs="+", default=[], metavar="NAME", help="reject these devices' keys from now on")
    keys.add_argument(
        "--forget",
        action="store_true",
        help="with --revoke: remove their weight too; all control variates are reset to 0",
    )
    keys.add_argument("--renew", nargs="+", default=[], metavar="NAME", help="make a new key for each of these devices")
    keys.set_defaults(command=_keys)


def _keys(parsed: argparse.Namespace) -> int:
    from fedcpsl.deployment.keys import renew_device_key, revoke_device, warnings_about

    folder = parsed.folder
    if parsed.forget and not parsed.revoke:
        raise InputError("--forget: give --revoke NAME with it")
    if (parsed.revoke or parsed.renew) and (parsed.devices or parsed.server):
        raise InputError("--revoke, --renew: give them without --devices and --server")
    for name in parsed.revoke:
        revoke_device(folder, name, forget=parsed.forget)
        kept = "its weight is removed" if parsed.forget else "it keeps its weight"
        print(f"revoked {name}: a server that uses {folder} rejects it from now on; {kept}")
    for name in parsed.renew:
        path = renew_device_key(folder, name)
        print(f"made {path}")
        print(f"move it to the device, in place of its key {name}; once the server has seen it, it refuses the old one")
    if parsed.revoke or parsed.renew:
        return 0
    for path in _create_missing(folder, parsed.server, parsed.devices, parsed.days, parsed.authority_days):
        print(f"made {path}")
    print("\n".join(_distribution(folder, parsed.devices)))
    for warning in warnings_about(folder):
        print(f"warning: {warning}")
    return 0


def _create_missing(
    folder: Path, hosts: Sequence[str], devices: Sequence[str], days: int | None, authority_days: int | None
) -> Iterator[Path]:
    from fedcpsl.deployment import keys

    known = keys.public_keys(folder)
    wanted = [name for name in dict.fromkeys(devices) if keys.device_key(folder, name).name not in known]
    names = {host: keys.general_name(host) for host in hosts}
    certified = (folder / "server.crt").exists()
    if not certified and not hosts:
        raise InputError("--server: give the host names and addresses by which devices reach the server")
    if certified:
        named = keys.hosts_of(keys.read_certificate(folder / "server.crt"))
        missing = [host for host, name in names.items() if str(name.value) not in named]
        if missing:
            raise InputError(
                f"{folder / 'server.crt'}: is for {', '.join(named)}, not for {', '.join(missing)}; "
                "move server.crt and server.key away to have another made"
            )
    if not (folder / "ca.crt").exists():
        yield keys.make_authority(folder, keys.AUTHORITY_DAYS if authority_days is None else authority_days)
    if not certified:
        yield keys.make_server_certificate(folder, hosts, keys.SERVER_DAYS if days is None else days)
    if not (folder / "operator.pub").exists():
        yield keys.make_operator_key(folder)
    for name in wanted:
        yield keys.make_device_key(folder, name)


def _distribution(folder: Path, devices: Sequence[str]) -> Iterator[str]:
    from fedcpsl.deployment.keys import public_keys

    yield "\nwho gets what:"
    for name in dict.fromkeys(devices):
        yield f"  {name}: ca.crt and devices/{name}, and no other device's key"
    yield "  the operator: ca.crt and operator.key, to ask for the status from elsewhere"
    listed = f"devices/*.pub ({len(public_keys(folder))})"
    yield f"  the server: ca.crt, server.crt, server.key, operator.pub and {listed}"
    if (folder / "ca.key").exists():
        yield "  no one: ca.key; move it offline, it is needed again only for another server certificate"
    if any(path.suffix != ".pub" for path in (folder / "devices").glob("*")):
        yield "once a device has its private key, delete it here"


def add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the server of a federation of real devices",
        description="Run a job with devices that join with `fedcpsl join`, over TLS; only devices whose public keys "
        "are in --keys are accepted. After a crash the same command resumes from the last round. Needs the extra "
        "`federation`.",
        allow_abbrev=False,
    )
    serve.add_argument("job", type=Path, metavar="JOB.toml", help="a run's settings, and [federation]")
    serve.add_argument("--keys", type=Path, metavar="FOLDER", help="what `fedcpsl keys` made")
    serve.add_argument("--insecure", action="store_true", help="no TLS and no keys; only on loopback")
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
        help="show the state of a federation",
        description="Show the devices, the round, accuracies and late devices: from the server's folder, or from "
        "another machine by the server's address with the operator's key. A device's key shows the round and that "
        "device.",
        allow_abbrev=False,
    )
    status.add_argument("server", metavar="SERVER", help="the server's folder, or HOST:PORT as `fedcpsl join` takes it")
    status.add_argument("--keys", type=Path, metavar="FOLDER", help="with ca.crt and operator.key, or a device's key")
    status.add_argument("--name", default="", help="ask as this device, with its key [the operator]")
    status.add_argument("--insecure", action="store_true", help="no TLS and no key; only for a server on loopback")
    status.add_argument("--json", action="store_true", help="as one JSON object")
    status.set_defaults(command=_status)


def keys_or_insecure(keys: Path | None, *, insecure: bool) -> Path | None:
    """Return the folder of keys; None only with --insecure."""
    if keys is None and not insecure:
        raise InputError("--keys: give the folder that `fedcpsl keys` made (or --insecure, on one machine alone)")
    if keys is not None and insecure:
        raise InputError("--insecure: leave it out, or leave out --keys")
    return keys


def _serve(parsed: argparse.Namespace) -> int:
    keys = keys_or_insecure(parsed.keys, insecure=parsed.insecure)
    from fedcpsl.deployment.endpoints import read_status
    from fedcpsl.deployment.serve import ServerConfig, serve_job
    from fedcpsl.report.terminal import print_status

    logging.basicConfig(level=logging.ERROR, format="fedcpsl: %(message)s")
    os.umask(0o077)
    serve_job(
        parsed.job, ServerConfig(parsed.folder, keys, parsed.host, parsed.port), _say, status_printer(), parsed.back_to
    )
    print_status(read_status(parsed.folder))
    return 0


def _say(text: str) -> None:
    print(f"fedcpsl: {text}", file=sys.stderr, flush=True)


def status_printer() -> Callable[[Mapping[str, Any]], None]:
    """Return a function that prints a status as one line; what has not changed is printed once."""
    last, printed = [""], set[str]()

    def say(text: str) -> None:
        if text != last[0]:
            _say(text)
        last[0] = text

    def show(status: Mapping[str, Any]) -> None:
        problems = [d["problem"] for d in status["devices"] if d["problem"]] + list(status["strangers"].values())
        _print_status_line(say, status, [text for text in problems if text not in printed])
        printed.clear()
        printed.update(problems)

    return show


def _print_status_line(say: Callable[[str], None], status: Mapping[str, Any], problems: Sequence[str]) -> None:
    """Print a status, and the problems that are new."""
    trial = "" if status.get("trying") is None else f"trial of step size {status['trying']:g}: "
    if status["waiting_for"]:
        more = f"{status['waiting_for']} more device{'s' * (status['waiting_for'] > 1)}"
        return say("; ".join([f"{trial}waiting for {more}", *status["strangers"].values()]))
    known = [d["accuracy"] for d in status["devices"] if d["accuracy"] is not None]
    mean = (
        f", mean accuracy {100 * sum(known) / len(known):.1f} % of {len(known)} device{'s' * (len(known) > 1)}"
        if known
        else ""
    )
    for problem in problems:
        say(problem)
    for event in status["events"]:
        if event["time"] >= status["updated"] - 1:
            say(event["text"])
    done = "all rounds are done" if status["over"] else f"round {status['round']} of {status['rounds']}"
    private = status["privacy"]
    spent = f", epsilon {private['epsilon']:.2f} at delta {private['delta']:g}" if private else ""
    return say(f"{trial}{done}{mean}{spent}")


def _request_status(server: str, keys: Path | None, name: str) -> dict[str, Any]:
    from fedcpsl.deployment.endpoints import DEVICE, OPERATOR, fetch_status

    if keys is None:
        return fetch_status(server, None, None, "")
    if not name:
        return fetch_status(server, keys / "ca.crt", keys / "operator.key", OPERATOR)
    return fetch_status(server, keys / "ca.crt", device_key_path(keys, name), f"{DEVICE}{name}")


def device_key_path(keys: Path, name: str) -> Path:
    """Return the path of a device's private key, in its own folder or in that of all keys."""
    places = [keys / name, keys / "devices" / name]
    try:
        found = next((place for place in places if place.is_file()), None)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if found is None:
        raise InputError(f"{places[0]}: no such key; `fedcpsl keys` makes it")
    return found


def _status(parsed: argparse.Namespace) -> int:
    folder = Path(parsed.server)
    if folder.is_dir() or not re.fullmatch(r"[^/]+:[0-9]+", parsed.server):
        if parsed.keys or parsed.name or parsed.insecure:
            raise InputError("--keys, --name, --insecure: leave them out for a folder; a server is given as HOST:PORT")
        from fedcpsl.deployment.endpoints import read_status

        status = read_status(folder)
    else:
        status = _request_status(parsed.server, keys_or_insecure(parsed.keys, insecure=parsed.insecure), parsed.name)
    if parsed.json:
        from fedcpsl.storage import to_json

        print(to_json(status, indent=2))
    else:
        from fedcpsl.report.terminal import print_status

        print_status(status)
    return 0


def add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join",
        help="take part in a federation with this machine's data",
        description="Join a server that `fedcpsl serve` runs. Samples, labels and the personal model stay here.",
        allow_abbrev=False,
    )
    join.add_argument("server", nargs="?", default="", metavar="HOST:PORT", help="the server")
    join.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="a table (.csv, .tsv, .parquet), an .npz file, or a folder LABEL/*.png",
    )
    join.add_argument(
        "--label", default="", metavar="COLUMN", help="the column of a table that is the label, if it has one"
    )
    join.add_argument("--test-column", default="", metavar="COLUMN", help="the column that marks test rows")
    join.add_argument(
        "--drop", default="", metavar="COLUMNS", help="columns to leave out, separated by commas; #2 is the second"
    )
    join.add_argument("--name", required=True, help="the name of this device, which is also that of its key")
    join.add_argument("--keys", type=Path, metavar="FOLDER", help="with ca.crt and this device's key, NAME")
    join.add_argument("--insecure", action="store_true", help="no TLS and no key; only for a server on loopback")
    join.add_argument("--folder", type=Path, metavar="FOLDER", help="where its state is kept [devices/NAME]")
    join.add_argument(
        "--socket",
        type=Path,
        metavar="FILE",
        help="instead of a server: listen on this socket for a Flower SuperNode that you run yourself",
    )
    join.add_argument("--budget", default="", metavar="30s", help="maximum time for the work of a round")
    join.add_argument("--not-on-battery", action="store_true", help="skip rounds while the device runs on battery")
    join.add_argument(
        "--most-load", type=float, default=0.0, metavar="LOAD", help="skip rounds while the load per core is higher"
    )
    join.add_argument("--clip", type=float, default=0.0, metavar="NORM", help="clip updates to this norm")
    join.add_argument("--noise", type=float, default=0.0, help="Gaussian noise on updates, in units of --clip")
    join.add_argument("--share-accuracy", action="store_true", help="send this device's test accuracy to the server")
    join.add_argument(
        "--no-trials", action="store_true", help="take no part where the server searches a step size by trials"
    )
    join.add_argument("--explain", action="store_true", help="print what would be sent, and do nothing")
    join.set_defaults(command=_join)


def parse_seconds(text: str) -> float:
    """Parse a time such as 30s, 5m or 1h; 0 for an empty text."""
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
        trials = NO_TRIALS if parsed.no_trials else TRIALS_WITH_NOISE if parsed.noise else TRIALS
        print(WHAT_IS_SENT.format(protected=protected, accuracy=shared, trials=trials))
        return 0
    if parsed.socket and (parsed.server or parsed.keys or parsed.insecure):
        raise InputError("--socket: give no server, --keys or --insecure beside it; your own SuperNode has these")
    if not parsed.socket and not parsed.server:
        raise InputError("HOST:PORT: give the server (or --socket, for a SuperNode that you run yourself)")
    keys = None if parsed.socket else keys_or_insecure(parsed.keys, insecure=parsed.insecure)
    budget = parse_seconds(parsed.budget)
    if not parsed.data.exists():
        raise InputError(f"{parsed.data}: no such file")
    from fedcpsl.config import Data
    from fedcpsl.data.sources import check_header
    from fedcpsl.deployment.device_process import Conditions, DeviceConfig, Handler, run_device
    from fedcpsl.federation.privacy import Protection, check_protection

    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="fedcpsl: %(message)s")
    data = Data(
        dataset="own",
        file=str(parsed.data.absolute()),
        label=parsed.label,
        test_column=parsed.test_column,
        drop=parsed.drop,
        partition="iid",
        devices=1,
        labelled=1.0,
    )
    check_header(data)
    protection = Protection(parsed.clip, parsed.noise)
    check_protection(protection)
    folder = parsed.folder or Path("devices") / parsed.name
    if parsed.most_load < 0:
        raise InputError(f"--most-load {parsed.most_load:g}: give a number of at least 0")
    conditions = Conditions(not parsed.not_on_battery, parsed.most_load)
    owner = DeviceConfig(
        parsed.name, data, folder, budget, protection, parsed.share_accuracy, conditions, not parsed.no_trials
    )
    if parsed.socket:
        from fedcpsl.flower.local_socket import serve_socket

        serve_socket(parsed.socket, Handler(owner).handle)
    key = None if keys is None else device_key_path(keys, parsed.name)
    run_device(parsed.server, owner, None if keys is None else keys / "ca.crt", key, _say)
    return 0


def add_federation(commands: Any) -> None:
    federation = commands.add_parser(
        "federation", help="try a federation on this machine", description="Try a federation on this machine."
    )
    kinds = federation.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = kinds.add_parser(
        "demo",
        help="start a server and five devices as separate processes",
        description="Start a server and devices as real processes on loopback, with TLS and keys, train on the digits "
        "and print every device's accuracy.",
        allow_abbrev=False,
    )
    demo.add_argument("--devices", type=int, default=5, help="[5]")
    demo.add_argument("--rounds", type=int, default=6, help="[6]")
    demo.add_argument("--folder", type=Path, default=Path("federation-demo"), help="[federation-demo]")
    demo.set_defaults(command=_demo)
    app = kinds.add_parser(
        "app",
        help="print the path of the Flower app",
        description="Print the folder of the Flower app, for `flwr run` on a SuperLink that you run yourself on this "
        "machine. Flower runs whatever app it is sent, so keep it on loopback; `fedcpsl serve` is the protected way.",
        allow_abbrev=False,
    )
    app.set_defaults(command=_app)


def _app(parsed: argparse.Namespace) -> int:  # noqa: ARG001
    from fedcpsl.flower import APP

    print(APP)
    print(UNPROTECTED, file=sys.stderr)
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    if not 2 <= parsed.devices <= 50 or parsed.rounds < 1:
        raise InputError("--devices, --rounds: give 2 to 50 devices and at least 1 round")
    from fedcpsl.deployment.demo import prepare_demo, run_demo
    from fedcpsl.report.terminal import print_status

    names = prepare_demo(parsed.folder, parsed.devices, parsed.rounds)
    print_status(run_demo(parsed.folder, names, status_printer()))
    print(f"the job, the keys, each device's data and state, and all logs are in {parsed.folder}")
    return 0
