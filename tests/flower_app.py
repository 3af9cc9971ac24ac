"""Runs the commands that docs/federation.md gives to those who run Flower already; `make flower-app` starts it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedcpsl.deployment.endpoints import free_port
from tests.federation_desk import Desk, furthest

PAGE = Path(__file__).parents[1] / "docs" / "federation.md"
STAY = ("flower-superlink", "flower-supernode", "fedcpsl join")
PORTS = ("8000", "8101", "8102")
LONGEST_S = 300


def documented() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## As a plain Flower app")[2]
    return section.partition("```bash\n")[2].partition("```")[0].splitlines()


def script() -> str:
    """The lines as they are, on free ports: those that stay up in the background, the others when they can."""
    lines = []
    for line in documented():
        if line.startswith("flwr run"):
            lines.append("until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep .2; done")
        if line.startswith("fedcpsl status"):
            lines.append("""until grep -qs '"over": true' server/status.json; do sleep .5; done""")
        lines.append(f"{line} &> {len(lines)}.log &" if line.startswith(STAY) else line)
    text = "\n".join(lines)
    for told in PORTS:
        text = text.replace(told, str(free_port()))
    return text


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        desk = Desk(folder, devices=2, rounds=2, active=2, names=["ward-3", "ward-7"])
        (folder / "server").mkdir()
        (folder / "job.toml").rename(folder / "server" / "job.toml")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        ran = subprocess.Popen(["bash", "-euc", script()], cwd=folder, env=environment, start_new_session=True)
        try:
            code = ran.wait(LONGEST_S)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                time.sleep(3 if number == signal.SIGKILL else 0)
                with_children(ran.pid, number)
        logs = "\n".join(f"--- {log}\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
        assert code == 0, logs
        (folder / "server" / "job.toml").rename(folder / "job.toml")
        gap = furthest(desk)
        print(f"{len(documented())} documented commands, 2 rounds in {time.monotonic() - began:.0f} s")
        print(f"theta, c and every device as the simulator's to {gap:.1e}")
        assert gap < 1e-6


def with_children(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
