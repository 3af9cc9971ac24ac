"""What a second process is worth: rounds in the paper's MNIST setting by 1 and 2 processes and by 1 and 2 ranks.

    FEDCPSL_DATA=<folder with mnist/*.gz> python benchmarks/processes.py [--rounds 20] [--repeats 3]

Runs `fedcpsl run` with run.processes = 1 and 2, and under torchrun with 1 and 2 ranks (gloo), every process with one
thread, in turns. Seconds a round are the run's own, from the first evaluation to the last, without the start; of the
repeats, the fastest counts. The share is of the machine's matmul rate with all threads, measured before and after each
run (see mnist_cpu.py for what is counted).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mnist_cpu import ROOT, about, flop_per_step, matmul_rate

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
WAYS = [("processes", 1), ("processes", 2), ("ranks", 1), ("ranks", 2)]


def measure(way: str, count: int, rounds: int, active: int) -> dict[str, Any]:
    """One run: its seconds a round and the machine's matmul rate beside it."""
    start = [*TORCHRUN, str(count)] if way == "ranks" else [sys.executable]
    processes = 1 if way == "ranks" else count
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [*start, "-m", "fedcpsl", "run", str(ROOT / "experiments/mnist.toml"), "--out", str(out)]
        command += ["--rounds", str(rounds), "--active", str(active), "--processor", "cpu"]
        command += ["--set", f"run.processes={processes}"]
        before = matmul_rate()
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rate = (before + matmul_rate()) / 2
        first, *_, last = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        layout = json.loads((out / "manifest.json").read_text())["layout"]
    assert layout[way] == count
    seconds = last["seconds"] - first["seconds"]
    flops = last["steps"] * flop_per_step() / seconds
    return {"seconds_a_round": seconds / rounds, "share": flops / rate, "matmul_gflops": rate / 1e9}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--active", type=int, default=4)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--out", type=Path, help="also write the results as JSON")
    chosen = options.parse_args()
    tries: dict[tuple[str, int], list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(chosen.repeats):
        for way in WAYS:
            tries[way].append(measure(*way, chosen.rounds, chosen.active))
    best = {way: min(found, key=lambda one: one["seconds_a_round"]) for way, found in tries.items()}
    for (way, count), one in best.items():
        faster = best[way, 1]["seconds_a_round"] / one["seconds_a_round"]
        print(
            f"{way + ' ' + str(count):<12}"
            f" {one['seconds_a_round']:>7.3f} s a round, {faster:.2f} times the rounds of one, "
            f"{100 * one['share']:.1f} % of {one['matmul_gflops']:.0f} GFLOP/s"
        )
    result = about() | {
        "rounds": chosen.rounds,
        "active": chosen.active,
        "runs": [{"way": way, "count": count} | one for (way, count), one in best.items()],
    }
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
