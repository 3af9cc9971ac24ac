"""The wheel and the sdist, each installed into a clean environment, in an empty folder: the demo, and a federation.

`make package` runs it; it needs a package index, and takes some minutes.
"""

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def try_it(package: Path, folder: Path) -> None:
    began = time.monotonic()
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    wanted = f"{package}[federation]"
    run(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wanted, cwd=folder)
    print(run(programs / "fedcpsl", "--version", cwd=folder).strip(), f"from {package.name}")
    desk = folder / "desk"
    desk.mkdir()
    shown = run(programs / "fedcpsl", "run", cwd=desk)
    print(next(line for line in shown.splitlines() if "personal model" in line))
    shown = run(programs / "fedcpsl", "federation", "demo", "--devices", "2", "--rounds", "2", cwd=desk)
    print(next(line for line in shown.splitlines() if "phone-0" in line))
    print(f"installed and tried in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "build", with_pip=True)
        python = folder / "build" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "build", cwd=folder)
        run(python, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
        packages = sorted((folder / "dist").iterdir())
        assert len(packages) == 2, packages
        for package in packages:
            place = folder / package.name.replace(".", "-")
            place.mkdir()
            try_it(package, place)


if __name__ == "__main__":
    sys.exit(main())
