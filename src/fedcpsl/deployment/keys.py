"""The keys of a federation: an authority, the server's certificate, a key for every device.

    ca.key ca.crt            the authority; its key signs server certificates and is kept offline
    server.key server.crt    the server's certificate
    operator.key .pub        for the status of all devices: the private key belongs to the operator
    devices/NAME[.pub]       a device's key: the private key is for the device, the public key for the server
    devices/NAME.new         its next one, while it is being renewed: NAME.pub then has both public keys, one per line
    revoked                  the public keys that are no longer accepted
    forgotten                devices whose weight is to be removed, one name per line

No private key is ever overwritten.
"""

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedcpsl.deployment.endpoints import LOOPBACK
from fedcpsl.errors import InputError, RunError
from fedcpsl.storage import make_folder, write_whole

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise InputError("keys need the package 'cryptography'; run: pip install 'fedcpsl[federation]'") from error

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # the maximum that all current systems accept
SOON_DAYS = 30  # before its end, a certificate gives a warning
PRIVATE, PUBLIC = 0o600, 0o644

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> Path:
    """Make ca.key and ca.crt, the authority that devices trust; return ca.crt."""
    key_path, path = folder / "ca.key", folder / "ca.crt"
    check_absent(key_path, path)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedcpsl authority {secrets.token_hex(4)}")])
    certificate = (
        _certificate(subject, subject, key.public_key(), _end(days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_new(key_path, _pem(key), PRIVATE)
    write_new(path, certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)
    return path


def make_server_certificate(folder: Path, hosts: Sequence[str], days: int = SERVER_DAYS) -> Path:
    """Make server.key and server.crt for these host names and IP addresses and loopback; return server.crt."""
    key_path, path = folder / "server.key", folder / "server.crt"
    check_absent(key_path, path)
    alternatives = [general_name(host) for host in dict.fromkeys([*hosts, *LOOPBACK])]
    authority = read_certificate(folder / "ca.crt")
    authority_key = _read_authority_key(folder, authority)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcpsl server")])
    end = min(_end(days), authority.not_valid_after_utc)
    certificate = (
        _certificate(subject, authority.subject, key.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    write_new(key_path, _pem(key), PRIVATE)
    write_new(path, certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)
    return path


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM format."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; 'fedcpsl keys' makes it") from error
    except ValueError as error:
        raise InputError(f"{path}: is not a certificate in PEM format") from error


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses of a certificate."""
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each) for kind in (x509.DNSName, x509.IPAddress) for each in alternatives.get_values_for_type(kind)]


def general_name(host: str) -> x509.GeneralName:
    """Return a host as a certificate names it: an IP address or a host name, without port."""
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not _HOST.fullmatch(host):
        raise InputError(f"server {host!r}: give a host name or an IP address as devices will use it, without port")
    return x509.DNSName(host.lower())


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))  # for devices whose clock is behind
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _end(days: int) -> datetime:
    if not 1 <= days <= 36500:
        raise InputError(f"{days} days: a certificate is valid for 1 to 36500 days")
    return datetime.now(UTC) + timedelta(days=days)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _read_authority_key(folder: Path, authority: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    path = folder / "ca.key"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError as error:
        raise InputError(f"{path}: does not exist; restore it to sign a server certificate, then remove it") from error
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as a private key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise InputError(f"{path}: is not the key of {folder / 'ca.crt'}; restore the matching pair")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def check_absent(*paths: Path) -> None:
    """Refuse to overwrite existing files."""
    for path in paths:
        if os.path.lexists(path):
            raise InputError(f"{path}: exists already, and keys are never overwritten; move it away first")


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a new file atomically; other accounts cannot read it while it is written."""
    make_folder(path.parent)
    partial = None
    try:
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)
    except FileExistsError:
        check_absent(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if partial:
            os.unlink(partial)


def make_device_key(folder: Path, name: str) -> Path:
    """Make devices/NAME and devices/NAME.pub (ECDSA P-384, OpenSSH's format); return the private one."""
    path = device_key(folder, name)
    return _make_key(path, path.with_name(f"{name}.pub"), name)


def make_operator_key(folder: Path) -> Path:
    """Make operator.key and operator.pub, of the same kind; return the private one."""
    return _make_key(folder / "operator.key", folder / "operator.pub", "operator")


def _make_key(path: Path, public_path: Path, name: str) -> Path:
    check_absent(path, public_path)
    private, public = _key_pair(name)
    write_new(path, private, PRIVATE)
    write_new(public_path, public.encode(), PUBLIC)
    return path


def _key_pair(name: str) -> tuple[bytes, str]:
    """Return a new private key, and the line with its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, f"{public.decode()} {name}\n"


def renew_device_key(folder: Path, name: str) -> Path:
    """Make devices/NAME.new and add its public key to devices/NAME.pub; return the private one.

    The server accepts both until it has seen the new one, and then only that one.
    """
    path = device_key(folder, name)
    public_path, new = path.with_name(f"{name}.pub"), path.with_name(f"{name}.new")
    if not public_path.exists():
        raise InputError(f"device {name!r}: has no key here to renew; {_known(folder)}")
    check_absent(new)
    private, public = _key_pair(name)
    write_new(new, private, PRIVATE)
    write_whole(public_path, public_path.read_text(encoding="utf-8") + public)
    return new


def revoke_device(folder: Path, name: str, *, forget: bool = False) -> None:
    """Revoke a device's keys; `forget`: also have its weight removed from the federation."""
    path = device_key(folder, name)
    public_path = path.with_name(f"{name}.pub")
    listed = folder / "revoked"
    if not public_path.exists() and not (forget and name in {line.split()[-1] for line in _lines(listed)}):
        raise InputError(f"device {name!r}: has no key here to revoke; {_known(folder)}")
    _add_lines(listed, [f"{_key_of(line)} {name}" for line in _lines(public_path)])  # from here on it is rejected
    if forget:
        _add_lines(folder / "forgotten", [name])
    public_path.unlink(missing_ok=True)


def accepted_keys(folder: Path, name: str) -> list[str]:
    """Return the public keys that a device may sign with, the newest last; revoked ones are left out."""
    refused = set(revoked_keys(folder))
    return [
        key for key in map(_key_of, _lines(device_key(folder, name).with_name(f"{name}.pub"))) if key not in refused
    ]


def revoked_keys(folder: Path) -> list[str]:
    """Return the public keys that are revoked."""
    return [_key_of(line) for line in _lines(folder / "revoked")]


def revoked_devices(folder: Path) -> set[str]:
    """Return the devices with a revoked key and no other."""
    named = {line.split()[-1] for line in _lines(folder / "revoked")}
    return {name for name in named if _NAME.fullmatch(name) and not accepted_keys(folder, name)}


def forgotten_devices(folder: Path) -> set[str]:
    """Return the devices whose weight is to be removed."""
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
    """Return the path of a device's private key; its public key is beside it, with '.pub' added."""
    if not _NAME.fullmatch(name) or name.endswith((".pub", ".new")):
        raise InputError(
            f"device {name!r}: a name has 1 to 64 letters, digits, '-', '_' and '.', begins with no '-' or '.' "
            "and does not end in '.pub' or '.new'"
        )
    return folder / "devices" / name


def public_keys(folder: Path) -> dict[str, Path]:
    """Return the devices of a folder, by name, with the paths of their public keys."""
    return {path.name.removesuffix(".pub"): path for path in sorted((folder / "devices").glob("*.pub"))}


def warnings_about(folder: Path, days: int = SOON_DAYS) -> list[str]:
    """Return what is wrong with the keys of a folder, or will be within `days`: one sentence each."""
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
    """Return a sentence for each private key that other accounts of this machine can read."""
    if os.name != "posix":
        return []
    return [
        f"{path}: others on this machine can read it; run: chmod 600 {path}"
        for path in paths
        if path.suffix != ".pub" and path.stat().st_mode & 0o077
    ]
