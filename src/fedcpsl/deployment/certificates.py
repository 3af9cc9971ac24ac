"""The authority of a federation and the server's certificate, and files that are never overwritten."""

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedcpsl.errors import InputError, RunError
from fedcpsl.storage import make_folder

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise InputError("keys need the package 'cryptography'; run: pip install 'fedcpsl[federation]'") from error

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # the longest that all current systems accept of a server
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # by which a server can always be reached on its own machine
PRIVATE, PUBLIC = 0o600, 0o644

_HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> Path:
    """Make ca.key and ca.crt, whom devices trust to name the server; return ca.crt."""
    key_path, path = folder / "ca.key", folder / "ca.crt"
    refuse_existing(key_path, path)
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
    refuse_existing(key_path, path)
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
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; 'fedcpsl keys' makes it") from error
    except ValueError as error:
        raise InputError(f"{path}: is not a certificate in PEM format") from error


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The host names and addresses that a certificate is for."""
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each) for kind in (x509.DNSName, x509.IPAddress) for each in alternatives.get_values_for_type(kind)]


def general_name(host: str) -> x509.GeneralName:
    """A host as a certificate names it: an IP address or a host name, without port."""
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
        raise InputError(f"{days} days: a certificate lives for 1 to 36500 days")
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
        raise InputError(f"{path}: is not here; bring it back to sign a server certificate, then remove it") from error
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as a private key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise InputError(f"{path}: is not the key of {folder / 'ca.crt'}; bring back the two that belong together")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def refuse_existing(*paths: Path) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise InputError(f"{path}: is already there, and keys are never overwritten; move it away first")


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file whole that was not there before; nobody else can read it while it grows."""
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
        refuse_existing(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if partial:
            os.unlink(partial)
