"""Who asks for a server's status: a line signed with a device's key or the operator's."""

import binascii
from base64 import b64decode, b64encode
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower.keys import device_key, read_certificate
from fedcpsl.flower.status import DEVICE, OPERATOR

LIFE_S = 300.0  # that a line is good for, and that clocks may differ
STRANGER = "no key is known that signed this; the server has the public halves of those that may ask"


def signed_line(who: str, key: Path, ca: Path, now: float) -> str:
    """WHO TIME SIGNATURE, good for some minutes at the server of this authority and at no other."""
    try:
        private = serialization.load_ssh_private_key(key.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"{key}: cannot be read: {error.strerror}; `fedcpsl keys` makes it") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{key}: is not a private key that `fedcpsl keys` made") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key}: is not a private key that `fedcpsl keys` made")
    signature = private.sign(_signed(who, str(int(now)), ca), ec.ECDSA(hashes.SHA384()))
    return f"{who} {int(now)} {b64encode(signature).decode()}"


def signer_of(line: str, keys: Path, now: float) -> str:
    """Who signed a line, by the public keys in a folder; RunError where nobody did who may ask."""
    try:
        who, when, signature = line.split()
        path = keys / "operator.pub" if who == OPERATOR else _public_key_of_device(who, keys)
        public = serialization.load_ssh_public_key(path.read_bytes())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise RunError(STRANGER)
        public.verify(
            b64decode(signature, validate=True), _signed(who, when, keys / "ca.crt"), ec.ECDSA(hashes.SHA384())
        )
        apart = now - int(when)
    except (ValueError, binascii.Error, InputError, InvalidSignature, UnsupportedAlgorithm, OSError) as error:
        raise RunError(STRANGER) from error
    if abs(apart) > LIFE_S:
        raise RunError(f"the clocks of the two machines are {abs(apart):.0f} s apart; set them")
    return who


def _public_key_of_device(who: str, keys: Path) -> Path:
    if not who.startswith(DEVICE):
        raise RunError(STRANGER)
    path = device_key(keys, who.removeprefix(DEVICE))
    return path.with_name(f"{path.name}.pub")


def _signed(who: str, when: str, ca: Path) -> bytes:
    return b"fedcpsl status " + read_certificate(ca).fingerprint(hashes.SHA256()) + f" {who} {when}".encode()
