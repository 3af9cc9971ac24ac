"""The keys of a federation: made once, private, never overwritten, and good for what they are for."""

import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedcpsl[federation]'")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedcpsl.deployment import keys
from fedcpsl.deployment.signing import KeyRing, SignedContent, sign_request, verify_request
from fedcpsl.errors import InputError, RunError
from tests.command import fedcpsl

PRIVATE = ["ca.key", "server.key", "devices/phone-1"]
PUBLIC = ["ca.crt", "server.crt", "devices/phone-1.pub"]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "keys"
    keys.make_authority(folder)
    keys.make_server_certificate(folder, ["fl.example.org", "192.0.2.7", "2001:db8::7"])
    keys.make_device_key(folder, "phone-1")
    return folder


def test_what_is_made_and_who_can_read_it(folder):
    made = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert made == {*PRIVATE, *PUBLIC}
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in made}
    assert modes == dict.fromkeys(PRIVATE, 0o600) | dict.fromkeys(PUBLIC, 0o644)
    assert keys.warnings_about(folder) == []


def test_private_files_are_private_under_any_umask(tmp_path):
    script = "import os, sys, pathlib; os.umask(0); from fedcpsl.deployment import keys; "
    script += "keys.make_device_key(pathlib.Path(sys.argv[1]), 'a')"
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    assert stat.S_IMODE((tmp_path / "devices" / "a").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("make", "files"),
    [
        (keys.make_authority, ["ca.key", "ca.crt"]),
        (lambda folder: keys.make_server_certificate(folder, ["a"]), ["server.key", "server.crt"]),
        (lambda folder: keys.make_device_key(folder, "phone-1"), ["devices/phone-1", "devices/phone-1.pub"]),
    ],
)
def test_nothing_is_overwritten(folder, make, files):
    for kept in files:  # whichever of the files is left, it stays as it is
        before = (folder / kept).read_bytes()
        gone = {name: (folder / name).read_bytes() for name in files if name != kept}
        for name in gone:
            (folder / name).unlink()
        with pytest.raises(InputError, match=f"{kept}: exists already"):
            make(folder)
        assert (folder / kept).read_bytes() == before
        assert not any((folder / name).exists() for name in gone)
        for name, content in gone.items():
            (folder / name).write_bytes(content)


def shake_hands(folder, name, trusted):
    """What a client that trusts this authority makes of the server by this name, in a real handshake."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=trusted)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                try:
                    with server.wrap_socket(connection, server_side=True) as secured:
                        secured.sendall(b"hello")
                except OSError:
                    pass  # the client hung up

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=10) as plain,
                client.wrap_socket(plain, server_hostname=name) as secured,
            ):
                return secured.recv(5)
        finally:
            thread.join()


@pytest.mark.parametrize("name", ["fl.example.org", "192.0.2.7", "2001:db8::7", "localhost", "127.0.0.1"])
def test_a_device_trusts_the_server_by_each_of_its_names(folder, name):
    assert shake_hands(folder, name, folder / "ca.crt") == b"hello"


def test_a_device_trusts_no_other_name_and_no_other_authority(folder, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(folder, "evil.example.org", folder / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        shake_hands(folder, "localhost", keys.make_authority(tmp_path / "other"))


def test_a_server_certificate_signs_nothing_and_the_authority_serves_nothing(folder):
    server, authority = (keys.read_certificate(folder / name) for name in ("server.crt", "ca.crt"))
    usages = [each.extensions.get_extension_for_class(keys.x509.KeyUsage).value for each in (server, authority)]
    assert [usage.key_cert_sign for usage in usages] == [False, True]
    assert [usage.digital_signature for usage in usages] == [True, False]


def test_the_device_key_is_an_openssh_key(folder):
    key = serialization.load_ssh_private_key((folder / "devices" / "phone-1").read_bytes(), password=None)
    public = (folder / "devices" / "phone-1.pub").read_bytes()
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert serialization.load_ssh_public_key(public) == key.public_key()
    assert public.split() == [b"ecdsa-sha2-nistp384", public.split()[1], b"phone-1"]
    assert keys.public_keys(folder) == {"phone-1": folder / "devices" / "phone-1.pub"}


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_ssh_reads_the_device_key(folder):
    shown = subprocess.run(
        ["ssh-keygen", "-y", "-f", folder / "devices" / "phone-1"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[:2] == (folder / "devices" / "phone-1.pub").read_text().split()[:2]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-a", ".a", "é", "a\n", "x" * 65, "a.pub", "a.new", "a;b"])
def test_names_that_are_refused(tmp_path, name):
    with pytest.raises(InputError, match="letters, digits"):
        keys.make_device_key(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["", "a:8000", "https://a", "a b", "*.example.org", "-a", "a..b", "é.org", "a\n"])
def test_hosts_that_are_refused(host):
    with pytest.raises(InputError, match="without port"):
        keys.general_name(host)


@pytest.mark.parametrize("days", [0, -1, 40000])
def test_lifetimes_that_are_refused(tmp_path, days):
    with pytest.raises(InputError, match="days"):
        keys.make_authority(tmp_path, days)


def test_a_certificate_does_not_outlive_its_authority(tmp_path):
    keys.make_authority(tmp_path, days=10)
    keys.make_server_certificate(tmp_path, ["a"], days=100)
    authority, server = (keys.read_certificate(tmp_path / name) for name in ("ca.crt", "server.crt"))
    assert server.not_valid_after_utc == authority.not_valid_after_utc


def test_the_authority_key_must_be_there_and_belong(folder, tmp_path):
    (folder / "server.crt").unlink()
    (folder / "server.key").unlink()
    (folder / "ca.key").unlink()
    with pytest.raises(InputError, match=r"ca\.key: does not exist; restore it"):
        keys.make_server_certificate(folder, ["a"])
    keys.make_authority(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "ca.key", folder)
    with pytest.raises(InputError, match="restore the matching pair"):
        keys.make_server_certificate(folder, ["a"])
    assert not (folder / "server.key").exists()


class Later(datetime):
    days = 0

    @classmethod
    def now(cls, zone=None):
        return datetime.now(zone) + timedelta(days=cls.days)


@pytest.mark.parametrize(("days", "says"), [(790, None), (800, "expires on .*, in 24 days"), (830, "expired on")])
def test_warnings_of_an_expiring_certificate(folder, monkeypatch, days, says):
    monkeypatch.setattr(Later, "days", days)
    monkeypatch.setattr(keys, "datetime", Later)
    found = keys.warnings_about(folder)
    assert len(found) == (says is not None)
    if says:
        assert re.search(rf"server\.crt: {says}.*move server\.crt and server\.key away", found[0])


def test_warnings_of_keys_that_others_can_read(folder):
    (folder / "devices" / "phone-1").chmod(0o644)
    assert [w for w in keys.warnings_about(folder) if "chmod 600" in w and "phone-1" in w] == keys.warnings_about(
        folder
    )


def test_the_command_makes_what_is_missing(tmp_path):
    first = fedcpsl("keys", "k", "--server", "fl.example.org", "--devices", "a", "b", "--days", "90", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert "a: ca.crt and devices/a" in first.stdout
    assert "no one: ca.key" in first.stdout
    folder = tmp_path / "k"
    end = keys.read_certificate(folder / "server.crt").not_valid_after_utc
    assert timedelta(days=89) < end - datetime.now(UTC) < timedelta(days=90)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    (folder / "ca.key").unlink()  # offline by now
    (folder / "devices" / "a").unlink()  # and this one is on its device
    again = fedcpsl("keys", "k", "--devices", "a", "b", "c", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert [line for line in again.stdout.splitlines() if line.startswith("made")] == ["made k/devices/c"]
    assert "ca.key" not in again.stdout
    assert all(path.read_bytes() == content for path, content in before.items() if path.exists())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--devices", "a"], "--server: give the host names"),
        (["--server", "a:1"], "without port"),
        (["--server", "a", "--devices", "../b"], "letters, digits"),
        (["--server", "a", "--days", "0"], "1 to 36500"),
    ],
)
def test_the_command_refuses(tmp_path, arguments, says):
    done = fedcpsl("keys", "k", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "k" / "devices").exists()


def test_the_command_does_not_change_what_a_certificate_is_for(folder):
    done = fedcpsl("keys", folder, "--server", "other.example.org", cwd=folder)
    assert done.returncode == 2
    assert "is for fl.example.org, localhost, 192.0.2.7" in done.stderr
    assert "not for other.example.org" in done.stderr
    assert fedcpsl("keys", folder, "--server", "FL.example.org", "192.0.2.7", cwd=folder).returncode == 0


def test_without_cryptography_the_command_says_what_to_install(tmp_path):
    script = "import sys; sys.modules['cryptography'] = None; from fedcpsl.cli import run_command; "
    script += "sys.exit(run_command(['keys', 'k', '--server', 'a']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'fedcpsl[federation]'" in done.stderr


FETCH = SignedContent("POST", "/v2/order")


def line(folder, name, key=None):
    return sign_request(f"device/{name}", key or folder / "devices" / name, folder / "ca.crt", time.time(), FETCH)


def test_a_revoked_key_is_let_in_no_more(folder):
    signed = line(folder, "phone-1")
    assert verify_request(signed, folder, time.time(), FETCH).who == "device/phone-1"
    public = (folder / "devices" / "phone-1.pub").read_text()
    keys.revoke_device(folder, "phone-1")
    with pytest.raises(RunError, match="this key was revoked"):
        verify_request(signed, folder, time.time(), FETCH)
    (folder / "devices" / "phone-1.pub").write_text(public)  # somebody puts it back: the key stays revoked
    with pytest.raises(RunError, match="this key was revoked"):
        verify_request(signed, folder, time.time(), FETCH)
    assert keys.revoked_devices(folder) == {"phone-1"}
    assert keys.forgotten_devices(folder) == set()
    with pytest.raises(InputError, match="has no key here to revoke; there are: phone-1"):
        keys.revoke_device(folder, "phone-2")


def test_a_device_can_be_given_another_key_after_that(folder):
    keys.revoke_device(folder, "phone-1", forget=True)
    (folder / "devices" / "phone-1").unlink()
    keys.make_device_key(folder, "phone-1")
    assert verify_request(line(folder, "phone-1"), folder, time.time(), FETCH).who == "device/phone-1"
    assert keys.revoked_devices(folder) == set()
    assert keys.forgotten_devices(folder) == {"phone-1"}


def test_revoking_first_and_forgetting_later(folder):
    keys.revoke_device(folder, "phone-1")
    keys.revoke_device(folder, "phone-1", forget=True)
    assert keys.forgotten_devices(folder) == {"phone-1"}


def test_a_renewed_key_is_let_in_beside_the_old_one_until_it_is_used(folder, tmp_path):
    said = []
    ring = KeyRing(folder, tmp_path, said.append)
    new = keys.renew_device_key(folder, "phone-1")
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    old_line, new_line = line(folder, "phone-1"), line(folder, "phone-1", new)
    for each in (old_line, old_line, new_line, new_line):
        assert ring.signer(each, "POST", "/v2/order", "") == "device/phone-1"
    assert said == ["device 'phone-1': its new key is in use; the one before is no longer accepted"]
    for again in (ring, KeyRing(folder, tmp_path, said.append)):  # and after a restart
        with pytest.raises(RunError, match="this key was renewed"):
            again.signer(old_line, "POST", "/v2/order", "")
    with pytest.raises(InputError, match=r"phone-1\.new: exists already"):
        keys.renew_device_key(folder, "phone-1")
    with pytest.raises(InputError, match="has no key here to renew"):
        keys.renew_device_key(folder, "phone-2")
    keys.revoke_device(folder, "phone-1")
    for each in (old_line, new_line):
        with pytest.raises(RunError, match="revoked"):
            ring.signer(each, "POST", "/v2/order", "")


def test_the_ring_says_who_was_refused_once_a_minute(folder, tmp_path):
    said = []
    ring = KeyRing(folder, tmp_path, said.append)
    for _ in range(5):
        ring.report("10.0.0.7", "fedcpsl device/x\x1b[31m 1 sig", "no key is known")
    assert said == ["10.0.0.7, as device/x?[31m: refused: no key is known"]
    assert ring.revoked() == set()
    keys.revoke_device(folder, "phone-1")
    for _ in range(3):
        assert ring.revoked() == {"phone-1"}
    assert said[1:] == ["device 'phone-1': its key is revoked; it is rejected, and keeps its weight and its c_i"]
    (tmp_path / "newest_keys.json").write_text("{")
    with pytest.raises(RunError, match=r"newest_keys\.json: cannot be read"):
        KeyRing(folder, tmp_path, said.append)


def test_the_server_takes_a_renewed_certificate(folder, tmp_path):
    said = []
    ring, context = KeyRing(folder, tmp_path, said.append), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ring.renew_certificate(context)
    assert said == []
    old = (folder / "server.key").read_bytes()
    for name in ("server.crt", "server.key"):
        (folder / name).unlink()
    ring.renew_certificate(context)  # it is being renewed
    keys.make_server_certificate(folder, ["fl.example.org"])
    new = (folder / "server.key").read_bytes()
    (folder / "server.key").write_bytes(old)
    ring.renew_certificate(context)
    assert "the new certificate cannot be used yet" in said[0]
    (folder / "server.key").write_bytes(new)
    ring.renew_certificate(context)
    assert said[1:] == ["server.crt was renewed, and is in use"]


def test_the_command_revokes_and_renews(tmp_path):
    fedcpsl("keys", "k", "--server", "h", "--devices", "a", "b", cwd=tmp_path)
    done = fedcpsl("keys", "k", "--revoke", "a", "--forget", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "revoked a: a server that uses k rejects it from now on; its weight is removed" in done.stdout
    done = fedcpsl("keys", "k", "--renew", "b", cwd=tmp_path)
    assert "move it to the device, in place of its key b" in done.stdout
    for words in (["--forget"], ["--revoke", "nobody"], ["--revoke", "b", "--devices", "c"], ["--renew", "a"]):
        refused = fedcpsl("keys", "k", *words, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), words


def test_a_key_with_a_comment_of_its_own_is_revoked_by_the_files_name(folder):
    public = folder / "devices" / "phone-1.pub"
    public.write_text(" ".join([*public.read_text().split()[:2], "nurse@laptop"]) + "\n")
    keys.revoke_device(folder, "phone-1")
    assert keys.revoked_devices(folder) == {"phone-1"}
    (folder / "revoked").write_text((folder / "revoked").read_text() + "by h@nd\n")
    assert keys.revoked_devices(folder) == {"phone-1"}


def test_keys_that_cannot_be_read_keep_everybody_as_it_was(folder, tmp_path):
    said = []
    ring = KeyRing(folder, tmp_path, said.append)
    keys.revoke_device(folder, "phone-1")
    assert ring.revoked() == {"phone-1"}
    (folder / "revoked").unlink()
    (folder / "revoked").mkdir()
    assert ring.revoked() == {"phone-1"}
    assert "revoked: cannot be read" in said[-1]
    (folder / "forgotten").mkdir()
    assert ring.forgotten() == set()
    with pytest.raises(RunError):
        ring.signer(line(folder, "phone-1"), "POST", "/v2/order", "")
