"""fedcpsl keys: what a federation's server and devices know each other by."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError


def add(commands: Any) -> None:
    keys = commands.add_parser(
        "keys",
        help="make the certificates and keys of a federation on real devices",
        description="Make what is missing: an authority and the server's certificate once, a key for every new "
        "device. Nothing is ever overwritten. Run it again with more --devices when some join later. With --revoke or "
        "--renew in the folder that a running server was given, a change holds at once.",
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
    keys.add_argument(
        "--days", type=int, metavar="N", help="how long the server's certificate lives (default: 825 days)"
    )
    keys.add_argument(
        "--authority-days", type=int, metavar="N", help="how long the authority lives (default: 3650 days)"
    )
    keys.add_argument("--revoke", nargs="+", default=[], metavar="NAME", help="let these devices' keys in no more")
    keys.add_argument(
        "--forget",
        action="store_true",
        help="with --revoke: remove their weight too; all control variates start at 0 again",
    )
    keys.add_argument("--renew", nargs="+", default=[], metavar="NAME", help="make these devices their next key")
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
        print(f"revoked {name}: a server that uses {folder} lets it in no more, at once; {kept}")
    for name in parsed.renew:
        path = renew_device_key(folder, name)
        print(f"made {path}")
        print(f"move it to the device, in place of its key {name}; once the server has seen it, it refuses the old one")
    if parsed.revoke or parsed.renew:
        return 0
    for path in _make_missing(folder, parsed.server, parsed.devices, parsed.days, parsed.authority_days):
        print(f"made {path}")
    print("\n".join(_who_gets_what(folder, parsed.devices)))
    for warning in warnings_about(folder):
        print(f"warning: {warning}")
    return 0


def _make_missing(
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
        strange = [host for host, name in names.items() if str(name.value) not in named]
        if strange:
            raise InputError(
                f"{folder / 'server.crt'}: is for {', '.join(named)}, not for {', '.join(strange)}; "
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


def _who_gets_what(folder: Path, devices: Sequence[str]) -> Iterator[str]:
    from fedcpsl.deployment.keys import public_keys

    yield "\nwho gets what:"
    for name in dict.fromkeys(devices):
        yield f"  {name}: ca.crt and devices/{name}, and no other device's key"
    yield "  the operator: ca.crt and operator.key, to ask for the status from elsewhere"
    listed = f"devices/*.pub ({len(public_keys(folder))})"
    yield f"  the server: ca.crt, server.crt, server.key, operator.pub and {listed}"
    if (folder / "ca.key").exists():
        yield "  nobody: ca.key; move it offline, it is needed again only for another server certificate"
    if any(path.suffix != ".pub" for path in (folder / "devices").glob("*")):
        yield "once a device has its private key, delete it here"
