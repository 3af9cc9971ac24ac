"""The keys of a federation: an authority, the server's certificate, a key for every device.

    ca.key ca.crt            the authority; its key signs server certificates and is kept offline
    server.key server.crt    the server's certificate
    operator.key .pub        who may ask for the status of all devices: the private half is the operator's
    devices/NAME[.pub]       a device's key: the private half is the device's, the public half the server's
    devices/NAME.new         its next one, while it is being renewed: NAME.pub then has both public halves, a line each
    revoked                  the public halves of keys that are let in no more
    forgotten                devices whose weight is to be removed, a name on each line

No private key is ever overwritten.
"""

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedcpsl.deployment.certificates import PRIVATE, PUBLIC, read_certificate, refuse_existing, write_new
from fedcpsl.errors import InputError, RunError
from fedcpsl.storage import write_whole

from cryptography.hazmat.primitives import serialization  # isort: skip
from cryptography.hazmat.primitives.asymmetric import ec  # isort: skip

SOON_DAYS = 30

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def make_device_key(folder: Path, name: str) -> Path:
    """Make devices/NAME and devices/NAME.pub (ECDSA P-384, OpenSSH's format); return the private one."""
    path = device_key(folder, name)
    return _make_key(path, path.with_name(f"{name}.pub"), name)


def make_operator_key(folder: Path) -> Path:
    """Make operator.key and operator.pub, of the same kind; return the private one."""
    return _make_key(folder / "operator.key", folder / "operator.pub", "operator")


def _make_key(path: Path, public_path: Path, name: str) -> Path:
    refuse_existing(path, public_path)
    private, public = _key_pair(name)
    write_new(path, private, PRIVATE)
    write_new(public_path, public.encode(), PUBLIC)
    return path


def _key_pair(name: str) -> tuple[bytes, str]:
    """A private key, and the line that is its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, f"{public.decode()} {name}\n"


def renew_device_key(folder: Path, name: str) -> Path:
    """Make devices/NAME.new and add its public half to devices/NAME.pub; return the private one.

    The server lets in both until it has seen the new one, and then that one alone.
    """
    path = device_key(folder, name)
    public_path, new = path.with_name(f"{name}.pub"), path.with_name(f"{name}.new")
    if not public_path.exists():
        raise InputError(f"device {name!r}: has no key here to renew; {_known(folder)}")
    refuse_existing(new)
    private, public = _key_pair(name)
    write_new(new, private, PRIVATE)
    write_whole(public_path, public_path.read_text(encoding="utf-8") + public)
    return new


def revoke_device(folder: Path, name: str, *, forget: bool = False) -> None:
    """Let a device's keys in no more; `forget`: have its weight removed from the federation too."""
    path = device_key(folder, name)
    public_path = path.with_name(f"{name}.pub")
    listed = folder / "revoked"
    if not public_path.exists() and not (forget and name in {line.split()[-1] for line in _lines(listed)}):
        raise InputError(f"device {name!r}: has no key here to revoke; {_known(folder)}")
    _add_lines(listed, [f"{_key_of(line)} {name}" for line in _lines(public_path)])  # from here on it is shut out
    if forget:
        _add_lines(folder / "forgotten", [name])
    public_path.unlink(missing_ok=True)


def accepted_keys(folder: Path, name: str) -> list[str]:
    """The public halves that a device may sign with, the newest last; none where it has none, or they are revoked."""
    refused = set(revoked_keys(folder))
    return [
        key for key in map(_key_of, _lines(device_key(folder, name).with_name(f"{name}.pub"))) if key not in refused
    ]


def revoked_keys(folder: Path) -> list[str]:
    return [_key_of(line) for line in _lines(folder / "revoked")]


def revoked_devices(folder: Path) -> set[str]:
    """The devices that have had a key revoked, and have no other."""
    named = {line.split()[-1] for line in _lines(folder / "revoked")}
    return {name for name in named if _NAME.fullmatch(name) and not accepted_keys(folder, name)}


def forgotten_devices(folder: Path) -> set[str]:
    """The devices whose weight is to be removed."""
    return set(_lines(folder / "forgotten"))


def _key_of(line: str) -> str:
    return " ".join(line.split()[:2])


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def _add_lines(path: Path, lines: Sequence[str]) -> None:
    together = dict.fromkeys([*_lines(path), *lines])
    write_whole(path, "".join(f"{line}\n" for line in together))


def _known(folder: Path) -> str:
    return f"there are: {', '.join(public_keys(folder)) or 'none'}"


def device_key(folder: Path, name: str) -> Path:
    """Where a device's private key is; its public key is beside it, with '.pub' added."""
    if not _NAME.fullmatch(name) or name.endswith((".pub", ".new")):
        raise InputError(
            f"device {name!r}: a name has 1 to 64 letters, digits, '-', '_' and '.', begins with no '-' or '.' "
            "and does not end in '.pub' or '.new'"
        )
    return folder / "devices" / name


def public_keys(folder: Path) -> dict[str, Path]:
    """The devices of a folder, by name, with their public keys."""
    return {path.name.removesuffix(".pub"): path for path in sorted((folder / "devices").glob("*.pub"))}


def warnings_about(folder: Path, days: int = SOON_DAYS) -> list[str]:
    """What is wrong with the keys of a folder, or will be within these days: one sentence each."""
    found = []
    now = datetime.now(UTC)
    for path, remedy in (
        (folder / "ca.crt", "make new keys in a new folder, and give every device the new ca.crt"),
        (folder / "server.crt", "move server.crt and server.key away and run: fedcpsl keys FOLDER --server HOST"),
    ):
        if path.exists():
            certificate = read_certificate(path)
            end = certificate.not_valid_after_utc
            if certificate.not_valid_before_utc > now:
                found.append(f"{path}: not valid before {certificate.not_valid_before_utc:%Y-%m-%d}; set the clock")
            elif end <= now:
                found.append(f"{path}: expired on {end:%Y-%m-%d}, so no device will connect; {remedy}")
            elif end <= now + timedelta(days=days):
                found.append(f"{path}: expires on {end:%Y-%m-%d}, in {(end - now).days} days; {remedy}")
    return found + open_to_others([*folder.glob("*.key"), *(folder / "devices").glob("*")])


def open_to_others(paths: Sequence[Path]) -> list[str]:
    """Private keys that other accounts of this machine can read: one sentence each."""
    if os.name != "posix":
        return []
    return [
        f"{path}: others on this machine can read it; run: chmod 600 {path}"
        for path in paths
        if path.suffix != ".pub" and path.stat().st_mode & 0o077
    ]
