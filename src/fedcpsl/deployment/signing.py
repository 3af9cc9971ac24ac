"""Signed HTTP requests: each is signed with a device's or the operator's key, for one method, path and body.

A running server reads the keys from their folder at every request, so that a change takes effect at once.
"""

import binascii
import json
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from fedcpsl.deployment.endpoints import DEVICE, OPERATOR, Notify
from fedcpsl.deployment.keys import (  # before cryptography: its error says what to install
    accepted_keys,
    forgotten_devices,
    read_certificate,
    revoked_devices,
    revoked_keys,
)
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.storage import write_whole

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # isort: skip
from cryptography.hazmat.primitives import hashes, serialization  # isort: skip
from cryptography.hazmat.primitives.asymmetric import ec  # isort: skip

REPEAT_REPORT_S = 60.0  # before the same refusal is reported again
MAX_REPORTS = 1000
MAX_AGE_S = 300.0  # of a signature, and the maximum difference of clocks
SCHEME = "fedcpsl"
UNKNOWN_KEY = "not signed with a known key; the server has the public keys that it accepts"
REVOKED = "this key was revoked"
EMPTY_DIGEST = sha256(b"").hexdigest()  # the digest of a request without a body


class SignedContent(NamedTuple):
    """The parts of an HTTP request that its signature covers."""

    method: str
    path: str
    digest: str = EMPTY_DIGEST  # SHA-256 of its body, in hexadecimal


class Signer(NamedTuple):
    """Who signed a request, and with which public key."""

    who: str
    key: str


def sign_request(who: str, key: Path, ca: Path, now: float, request: SignedContent) -> str:
    """Return SCHEME WHO TIME SIGNATURE, valid for some minutes, only at the server of this authority."""
    try:
        private = serialization.load_ssh_private_key(key.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"{key}: cannot be read: {error.strerror}; `fedcpsl keys` makes it") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{key}: is not a private key that `fedcpsl keys` made") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key}: is not a private key that `fedcpsl keys` made")
    signature = private.sign(_signed_bytes(who, str(int(now)), ca, request), ec.ECDSA(hashes.SHA384()))
    return f"{SCHEME} {who} {int(now)} {b64encode(signature).decode()}"


def verify_request(line: str, keys: Path, now: float, request: SignedContent) -> Signer:
    """Return who signed a request, by the public keys in a folder; RunError where the signature is not accepted."""
    try:
        scheme, who, when, signature = line.split()
        if scheme != SCHEME or len(when) > 20:
            raise RunError(UNKNOWN_KEY)
        content, proof = _signed_bytes(who, when, keys / "ca.crt", request), b64decode(signature, validate=True)
        key = next((key for key in _keys_of(who, keys) if _verifies(key, proof, content)), None)
        if key is None:
            revoked = any(_verifies(key, proof, content) for key in revoked_keys(keys))
            raise RunError(REVOKED if revoked else UNKNOWN_KEY)
        apart = now - int(when)
    except (ValueError, binascii.Error, InputError, OSError) as error:
        raise RunError(UNKNOWN_KEY) from error
    if abs(apart) > MAX_AGE_S:
        raise RunError(f"the clocks of the two machines are {abs(apart):.0f} s apart; set them")
    return Signer(who, key)


def _keys_of(who: str, keys: Path) -> list[str]:
    """Return the public keys that the operator or a device may sign with, the newest first."""
    if who == OPERATOR:
        return [(keys / "operator.pub").read_text(encoding="utf-8")]
    if not who.startswith(DEVICE):
        raise RunError(UNKNOWN_KEY)
    return accepted_keys(keys, who.removeprefix(DEVICE))[::-1]


def _verifies(key: str, signature: bytes, content: bytes) -> bool:
    try:
        public = serialization.load_ssh_public_key(key.encode())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(signature, content, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def _signed_bytes(who: str, when: str, ca: Path, request: SignedContent) -> bytes:
    words = [SCHEME, "2", read_certificate(ca).fingerprint(hashes.SHA256()).hex(), who, when, *request]
    return "\n".join(words).encode()


class KeyRing:
    """The keys that a server accepts. Once a device has signed with a newer key, its older ones are rejected."""

    def __init__(self, keys: Path, folder: Path, notify: Notify, clock: Callable[[], float] = time.time) -> None:
        self._keys, self._file, self._notify, self._clock = keys, folder / "newest_keys.json", notify, clock
        self._lock = threading.Lock()
        self._newest: dict[str, str] = _read_newest(self._file)
        self._reported: dict[str, float] = {}
        self._revoked: set[str] | None = None
        self._certificate = self._stamp()

    def signer(self, line: str, method: str, path: str, digest: str) -> str:
        """Return who signed a request; RunError where the signature is not accepted."""
        request = SignedContent(method, path, digest) if digest else SignedContent(method, path)
        who, key = verify_request(line, self._keys, self._clock(), request)
        if who.startswith(DEVICE):
            self._check_newest(who.removeprefix(DEVICE), key)
        return who

    def has_accepted_key(self, name: str) -> bool:
        """Return whether a device has a key that is accepted."""
        try:
            return bool(accepted_keys(self._keys, name))
        except (InputError, RunError):
            return False

    def revoked(self) -> set[str]:
        """Return the devices whose keys are revoked, and report new ones. An unreadable file changes nothing."""
        try:
            found = revoked_devices(self._keys)
        except RunError as error:
            self._notify_once_a_minute(str(error))
            return self._revoked or set()
        with self._lock:
            for name in sorted(found - (self._revoked or set())):
                self._notify(f"device {name!r}: its key is revoked; it is rejected, and keeps its weight and its c_i")
            self._revoked = found
        return found

    def forgotten(self) -> set[str]:
        """Return the devices whose weight is to be removed; none while the file is unreadable."""
        try:
            return forgotten_devices(self._keys)
        except RunError as error:
            self._notify_once_a_minute(str(error))
            return set()

    def report(self, peer: str, line: str, problem: str) -> None:
        """Report that a request was refused, and who it claims to be from."""
        words = line.split()
        who = printable(words[1], 80) if len(words) > 1 else "anonymous"
        self._notify_once_a_minute(f"{peer}, as {who}: refused: {problem}")

    def _notify_once_a_minute(self, text: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._reported.get(text, -REPEAT_REPORT_S) < REPEAT_REPORT_S or len(self._reported) >= MAX_REPORTS:
                self._reported = {t: at for t, at in self._reported.items() if now - at < REPEAT_REPORT_S}
                return
            self._reported[text] = now
        self._notify(text)

    def renew_certificate(self, context: ssl.SSLContext) -> None:
        """Load server.crt and server.key again where they have changed; open connections stay as they are."""
        stamp = self._stamp()
        if stamp is None or stamp == self._certificate:
            return
        try:
            context.load_cert_chain(self._keys / "server.crt", self._keys / "server.key")
        except OSError as error:  # half of the pair may be new
            self._notify_once_a_minute(f"server.crt: the new certificate cannot be used yet ({error})")
            return
        self._certificate = stamp
        self._notify("server.crt was renewed, and is in use")

    def _check_newest(self, name: str, key: str) -> None:
        accepted = accepted_keys(self._keys, name)
        with self._lock:
            newest = self._newest.get(name)
            if newest == key or key not in accepted:
                return
            if newest in accepted and accepted.index(key) < accepted.index(newest):
                raise RunError("this key was renewed, and its successor is in use")
            self._newest[name] = key
            try:
                write_whole(self._file, json.dumps(self._newest, indent=1), private=True)
            except RunError as error:  # it is remembered until a restart
                self._notify(str(error))
        if newest is not None:
            self._notify(f"device {name!r}: its new key is in use; the one before is no longer accepted")

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            files = [(self._keys / name).stat() for name in ("server.crt", "server.key")]
        except OSError:
            return None
        return tuple(n for each in files for n in (each.st_mtime_ns, each.st_ino))


def _read_newest(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{path}: cannot be read ({error}); restore it, or remove it: old keys are then accepted"
        ) from error
