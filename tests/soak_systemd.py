"""The units of deploy/ under a real systemd: the commands of deploy/README.md, run as they stand.

A systemd of its own is started in namespaces of its own, on a copy of this machine's files that is thrown away. There
a server and two devices are installed and run; the server is killed once. `make soak-systemd` runs it, as root; it
needs systemd and the system's own Python of the version that this one has, and takes a minute or two.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.federation_desk import JOB, samples_of

ROOT = Path(__file__).parents[1]
PYTHON = Path("/usr/bin/python3")
SYSTEMD = Path("/lib/systemd/systemd")
DEVICES = ("phone-1", "phone-2")
ROUNDS, LONGEST_S = 100, 150
BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=1g tmpfs "$1"
mkdir "$1"/up "$1"/work "$1"/root
root="$1"/root
mount -t overlay overlay -o lowerdir=/,upperdir="$1"/up,workdir="$1"/work "$root"
mount -t proc proc "$root"/proc
mount -t sysfs sysfs "$root"/sys
mount -t cgroup2 cgroup2 "$root"/sys/fs/cgroup
for each in run tmp dev; do mount -t tmpfs tmpfs "$root"/$each; done
for each in null zero full random urandom tty; do
    touch "$root"/dev/$each
    mount --bind /dev/$each "$root"/dev/$each
done
mkdir "$root"/dev/pts "$root"/dev/shm "$root"/opt/site "$root"/opt/src
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root"/dev/pts
ln -s pts/ptmx "$root"/dev/ptmx
mount -t tmpfs tmpfs "$root"/dev/shm
mount --bind "$2" "$root"/opt/site
mount --bind "$3" "$root"/opt/src
mkdir "$root"/tmp/stage
mount --bind "$4" "$root"/tmp/stage
ip link set lo up
cd "$root"
pivot_root . .
umount -l .
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal
"""
INSTALL = """
set -e
echo '127.0.0.1 fl.example.org' >> /etc/hosts
/usr/bin/python3 -m venv --without-pip /opt/fedcpsl
printf '/opt/site\\n/opt/src\\n' > $(echo /opt/fedcpsl/lib/python3*/site-packages)/here.pth
sed '1s|.*|#!/opt/fedcpsl/bin/python3|' "$1"/fedcpsl > /opt/fedcpsl/bin/fedcpsl
chmod 755 /opt/fedcpsl/bin/fedcpsl
mkdir -p /etc/fedcpsl/keys/devices /srv/fedcpsl
cp /tmp/stage/*.npz /srv/fedcpsl/
"""


def say_what_is_missing() -> str | None:
    if os.geteuid() != 0:
        return "make soak-systemd: starts a systemd of its own, so it needs root; run it with sudo"
    if not SYSTEMD.exists() or shutil.which("unshare") is None:
        return "make soak-systemd: needs systemd and unshare; apt-get install systemd util-linux"
    version = subprocess.run([PYTHON, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    if version.stdout.split() != [str(n) for n in sys.version_info[:2]]:
        return f"make soak-systemd: needs {PYTHON} of version {sys.version_info[0]}.{sys.version_info[1]}"
    return None


@contextmanager
def machine(stage: Path) -> Iterator[Callable[..., str]]:
    """A booted systemd; what is yielded runs a command there and returns what it printed."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    with tempfile.TemporaryDirectory() as folder:
        spaces = ["--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net", "--cgroup"]
        boot = ["unshare", *spaces, "bash", "-c", BOOT, "boot", folder, site, str(ROOT / "src"), str(stage)]
        process = subprocess.Popen(boot, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            (child,) = until(lambda: subprocess.getoutput(f"pgrep -P {process.pid}").split(), 10)
            enter = ["nsenter", "-t", child, "-m", "-p", "-u", "-i", "-n", "-C", "--root", "--wd"]
            clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "COLUMNS=100"]

            def there(*words: str, wrong: bool = False) -> str:
                done = subprocess.run([*enter, *clean, *words], capture_output=True, text=True, timeout=120)
                assert wrong or done.returncode == 0, (words, done.stdout, done.stderr)
                return done.stdout

            until(lambda: there("systemctl", "is-system-running", wrong=True).strip() in ("running", "degraded"), 60)
            yield there
        finally:
            process.kill()  # and all of it with it
            process.wait()


def until(condition: Callable[[], object], seconds: float):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.5)
    return found


def documented(heading: str) -> list[str]:
    """The commands under a heading, without those that another line of this script stands for."""
    page = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    block = page.partition(f"\n## {heading}\n")[2].partition("```bash\n")[2].partition("```")[0]
    return [line for line in block.splitlines() if not line.startswith("python3 -m venv")]


def prepare(stage: Path) -> None:
    """What deploy/README.md takes for granted: its own files, a job, keys and data."""
    shutil.copytree(ROOT / "deploy", stage, dirs_exist_ok=True)
    (stage / "job.toml").write_text(JOB.format(devices=2, rounds=ROUNDS, active=2, deadline=60))
    command = [sys.executable, "-m", "fedcpsl", "keys", "keys", "--server", "fl.example.org", "--devices", *DEVICES]
    subprocess.run(command, cwd=stage, check=True, capture_output=True)
    shutil.copy(stage / "keys" / "ca.crt", stage)
    for i, name in enumerate(DEVICES):
        shutil.move(stage / "keys" / "devices" / name, stage / name)
        np.savez(stage / f"{name}.npz", **samples_of(i, 2))


def try_it(stage: Path) -> None:
    prepare(stage)
    began = time.monotonic()
    with machine(stage) as there:
        there("bash", "-c", INSTALL, "install", str(Path(sys.executable).parent))
        server, (_, *device) = documented("The server"), documented("A device")  # there is one account for all here
        copy = "cp -r keys/ca.crt keys/server.* keys/operator.pub keys/devices /etc/fedcpsl/keys/"
        there("bash", "-ec", "\n".join(["cd /tmp/stage", copy, *server]))
        for name in DEVICES:
            lines = "\n".join(["cd /tmp/stage", *device]).replace("phone-1", name)
            there("bash", "-ec", lines.replace("data.csv", f"{name}.npz"))
        units = ["fedcpsl-server", *(f"fedcpsl-device@{name}" for name in DEVICES)]

        def status() -> dict:
            text = there("cat", "/var/lib/fedcpsl/job/status.json", wrong=True)
            return json.loads(text) if text else {"round": 0, "over": False}

        try:
            until(lambda: status()["round"] >= 2, LONGEST_S)
            assert there("systemctl", "is-active", *units).split() == ["active"] * 3
            there("systemctl", "kill", "--signal=SIGKILL", "fedcpsl-server")
            at = status()["round"]
            print(f"killed the server's unit in round {at + 1}")
            until(lambda: status()["over"], LONGEST_S)
        except AssertionError:
            print(there("journalctl", "--no-pager", "-u", "fedcpsl-*", wrong=True)[-6000:])
            raise
        restarts = there("systemctl", "show", "-P", "NRestarts", "fedcpsl-server").strip()
        until(lambda: there("systemctl", "is-active", "fedcpsl-server", wrong=True).strip() == "inactive", 30)
        there("systemctl", "stop", *units[1:])
        ended = there("systemctl", "show", "-P", "Result", *units).split()
        assert ended == ["success"] * 3, ended
        last = status()
    counted = {device["name"]: device["last_counted"] + 1 for device in last["devices"]}
    print(f"{last['round']} rounds in {time.monotonic() - began:.0f} s, {restarts} restart; last counted: {counted}")
    assert (last["round"], set(counted)) == (ROUNDS, set(DEVICES))


def main() -> None:
    missing = say_what_is_missing()
    if missing:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as folder:
        try_it(Path(folder))


if __name__ == "__main__":
    main()
