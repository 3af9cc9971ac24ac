"""The keys that a running server goes by: read from their folder at every request, so that a change holds at once."""

import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fedcpsl.deployment.keys import accepted_keys, forgotten_devices, revoked_devices
from fedcpsl.deployment.signing import Request, signer_of
from fedcpsl.deployment.status import DEVICE
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.storage import write_whole

AGAIN_S = 60.0  # before the same refusal is said again
MOST_REPORTS = 1000
Say = Callable[[str], None]


class KeyRing:
    """Who may ask. Once a device has signed with a newer key, its older ones are let in no more."""

    def __init__(self, keys: Path, folder: Path, say: Say, clock: Callable[[], float] = time.time) -> None:
        self._keys, self._file, self._say, self._clock = keys, folder / "newest_keys.json", say, clock
        self._lock = threading.Lock()
        self._newest: dict[str, str] = _read(self._file)
        self._reported: dict[str, float] = {}
        self._banned: set[str] | None = None
        self._certificate = self._stamp()

    def signer(self, line: str, method: str, path: str, digest: str) -> str:
        """Who signed a request; RunError where nobody did who may ask."""
        request = Request(method, path, digest) if digest else Request(method, path)
        who, key = signer_of(line, self._keys, self._clock(), request)
        if who.startswith(DEVICE):
            self._check_newest(who.removeprefix(DEVICE), key)
        return who

    def knows(self, name: str) -> bool:
        """Whether a device has a key that is let in."""
        try:
            return bool(accepted_keys(self._keys, name))
        except (InputError, RunError):
            return False

    def banned(self) -> set[str]:
        """The devices that were shut out; a new one is said. Where that cannot be read, it is as it was."""
        try:
            found = revoked_devices(self._keys)
        except RunError as error:
            self._say_once_a_minute(str(error))
            return self._banned or set()
        with self._lock:
            for name in sorted(found - (self._banned or set())):
                self._say(f"device {name!r}: its key is revoked; it is shut out, and keeps its weight and its c_i")
            self._banned = found
        return found

    def forgotten(self) -> set[str]:
        """The devices whose weight is to be removed; none where that cannot be read, until it can."""
        try:
            return forgotten_devices(self._keys)
        except RunError as error:
            self._say_once_a_minute(str(error))
            return set()

    def report(self, peer: str, line: str, problem: str) -> None:
        """Say that a request was refused, and by whom it was signed as it says."""
        words = line.split()
        who = printable(words[1], 80) if len(words) > 1 else "nobody"
        self._say_once_a_minute(f"{peer}, as {who}: refused: {problem}")

    def _say_once_a_minute(self, text: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._reported.get(text, -AGAIN_S) < AGAIN_S or len(self._reported) >= MOST_REPORTS:
                self._reported = {t: at for t, at in self._reported.items() if now - at < AGAIN_S}
                return
            self._reported[text] = now
        self._say(text)

    def renew_certificate(self, context: ssl.SSLContext) -> None:
        """Take server.crt and server.key again where they have changed; connections that are open stay as they are."""
        stamp = self._stamp()
        if stamp is None or stamp == self._certificate:
            return
        try:
            context.load_cert_chain(self._keys / "server.crt", self._keys / "server.key")
        except OSError as error:  # half of the pair may be new
            self._say_once_a_minute(f"server.crt: the new certificate cannot be used yet ({error})")
            return
        self._certificate = stamp
        self._say("server.crt was renewed, and is in use")

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
            except RunError as error:  # it holds until a restart
                self._say(str(error))
        if newest is not None:
            self._say(f"device {name!r}: its new key is in use; the one before is let in no more")

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            files = [(self._keys / name).stat() for name in ("server.crt", "server.key")]
        except OSError:
            return None
        return tuple(n for each in files for n in (each.st_mtime_ns, each.st_ino))


def _read(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{path}: cannot be read ({error}); restore it, or remove it: old keys are then let in"
        ) from error
