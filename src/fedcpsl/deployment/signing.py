"""Who sends a request: every one is signed with a device's key, or the operator's, for one method, path and body."""

import binascii
from base64 import b64decode, b64encode
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from fedcpsl.deployment.certificates import read_certificate  # says what to install, so first
from fedcpsl.deployment.keys import accepted_keys, revoked_keys
from fedcpsl.deployment.status import DEVICE, OPERATOR
from fedcpsl.errors import InputError, RunError

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # isort: skip
from cryptography.hazmat.primitives import hashes, serialization  # isort: skip
from cryptography.hazmat.primitives.asymmetric import ec  # isort: skip

LIFE_S = 300.0  # that a signature is good for, and that clocks may differ
SCHEME = "fedcpsl"
STRANGER = "no key is known that signed this; the server has the public halves of those that may ask"
REVOKED = "this key was revoked"
NOTHING = sha256(b"").hexdigest()  # the digest of a request without a body


class Request(NamedTuple):
    """What is signed of a request."""

    method: str
    path: str
    digest: str = NOTHING  # SHA-256 of its body, in hexadecimal


class Signer(NamedTuple):
    """Who signed a request, and with which public key."""

    who: str
    key: str


def signed_line(who: str, key: Path, ca: Path, now: float, request: Request) -> str:
    """SCHEME WHO TIME SIGNATURE, good for some minutes at the server of this authority and at no other."""
    try:
        private = serialization.load_ssh_private_key(key.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"{key}: cannot be read: {error.strerror}; `fedcpsl keys` makes it") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{key}: is not a private key that `fedcpsl keys` made") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key}: is not a private key that `fedcpsl keys` made")
    signature = private.sign(_signed(who, str(int(now)), ca, request), ec.ECDSA(hashes.SHA384()))
    return f"{SCHEME} {who} {int(now)} {b64encode(signature).decode()}"


def signer_of(line: str, keys: Path, now: float, request: Request) -> Signer:
    """Who signed a request, by the public keys in a folder; RunError where nobody did who may ask."""
    try:
        scheme, who, when, signature = line.split()
        if scheme != SCHEME or len(when) > 20:
            raise RunError(STRANGER)
        content, proof = _signed(who, when, keys / "ca.crt", request), b64decode(signature, validate=True)
        key = next((key for key in _keys_of(who, keys) if _fits(key, proof, content)), None)
        if key is None:
            revoked = any(_fits(key, proof, content) for key in revoked_keys(keys))
            raise RunError(REVOKED if revoked else STRANGER)
        apart = now - int(when)
    except (ValueError, binascii.Error, InputError, OSError) as error:
        raise RunError(STRANGER) from error
    if abs(apart) > LIFE_S:
        raise RunError(f"the clocks of the two machines are {abs(apart):.0f} s apart; set them")
    return Signer(who, key)


def _keys_of(who: str, keys: Path) -> list[str]:
    """The public keys that somebody may sign with, the newest first."""
    if who == OPERATOR:
        return [(keys / "operator.pub").read_text(encoding="utf-8")]
    if not who.startswith(DEVICE):
        raise RunError(STRANGER)
    return accepted_keys(keys, who.removeprefix(DEVICE))[::-1]


def _fits(key: str, signature: bytes, content: bytes) -> bool:
    try:
        public = serialization.load_ssh_public_key(key.encode())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(signature, content, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def _signed(who: str, when: str, ca: Path, request: Request) -> bytes:
    words = [SCHEME, "2", read_certificate(ca).fingerprint(hashes.SHA256()).hex(), who, when, *request]
    return "\n".join(words).encode()
