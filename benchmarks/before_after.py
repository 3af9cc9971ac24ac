"""How long a command takes at an earlier commit and now, in turns, on the same machine.

    python benchmarks/before_after.py COMMIT [--turns 5] -- run --rounds 50 --algorithm fedcpsl

What follows `--` is a `fedcpsl` command; {out} in it is a new folder each time. Both versions run in this Python
environment, one after another, the earlier one first in odd turns and second in even ones, so that whatever else the
machine does meets both alike. Seconds are those of the whole command, start of Python included, and of its rounds
where it writes one run to {out}; the ratio is that of the medians.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median

from fedcpsl.runs.environment import cpu_name, git_commit

ROOT = Path(__file__).resolve().parent.parent


def checked_out(commit: str, folder: Path) -> Path:
    """The package and its experiments at a commit."""
    made = subprocess.run(
        ["git", "archive", commit, "src", "experiments"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def timed(version: Path, command: list[str]) -> tuple[float, float | None]:
    """Seconds of the whole command, and of its rounds, if it wrote a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        arguments = [part.replace("{out}", str(out)) for part in command]
        environment = os.environ | {"PYTHONPATH": str(version / "src")}
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "fedcpsl", *arguments],
            check=True,
            env=environment,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
        metrics = out / "metrics.jsonl"
        rounds = json.loads(metrics.read_text().splitlines()[-1])["seconds"] if metrics.is_file() else None
        return seconds, rounds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("commit")
    options.add_argument("--turns", type=int, default=5)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    chosen, command = options.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if not command:
        options.error("give a command of fedcpsl after --")
    with tempfile.TemporaryDirectory() as folder:
        versions = {"before": checked_out(chosen.commit, Path(folder)), "now": ROOT}
        found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in versions}
        for turn in range(chosen.turns):
            for name in sorted(versions, reverse=bool(turn % 2)):
                found[name].append(timed(versions[name], command))
    print(f"{cpu_name()}, {os.environ.get('OMP_NUM_THREADS', 'all')} threads: fedcpsl {' '.join(command)}")
    print(f"before: {chosen.commit}; now: {git_commit()}")
    for what, place in (("whole command", 0), ("in rounds", 1)):
        each = {name: [run[place] for run in runs if run[place] is not None] for name, runs in found.items()}
        if all(each.values()):
            for name, seconds in each.items():
                print(f"{what}, {name}: median {median(seconds):.2f} s of {', '.join(f'{s:.2f}' for s in seconds)}")
            print(f"{what}: now / before = {median(each['now']) / median(each['before']):.3f}")


if __name__ == "__main__":
    main()
