"""FedCPSL in the paper's MNIST setting on a CPU, as a share of the machine's matmul rate.

    FEDCPSL_DATA=<folder with mnist/*.gz> python benchmarks/mnist_cpu.py [--rounds 100] [--sequential-rounds 20]

Runs the whole `fedcpsl run` command (start of Python, reading data, training, evaluation, checkpoints, models, plots)
and divides the arithmetic of its local steps by its wall time. Counted are forward and backward of both models,
without the first layer's input gradient, and nothing else: evaluation and pseudo-labels are overhead here.

The matmul rate is the best of square float32 matmuls of 512 to 2048 with all threads. A shared machine is faster in one
minute than in the next, so the rate is measured in the same minute: before the run, after it, and every few seconds in
between, while the run stands still (stopped with SIGSTOP; that time is not counted). The share is of the mean of these
measurements; the largest one is given too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from fedcpsl.runs.environment import cpu_name, git_commit

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [(784, 200), (200, 200), (200, 10)]
BATCH = 64  # 32 labelled and 32 unlabelled samples


def matmul_rate(seconds: float = 0.4) -> float:
    """FLOP/s of the best square matmul, each size sustained for a while."""
    rates = []
    for n in (512, 1024, 2048):
        a, b = torch.randn(n, n), torch.randn(n, n)
        a @ b
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            a @ b
            count += 1
        rates.append(2 * n**3 * count / (time.perf_counter() - start))
    return max(rates)


def flop_per_step() -> int:
    """Forward, weight gradients, and input gradients of all layers but the first, of both models."""
    forward = sum(2 * BATCH * a * b for a, b in LAYERS)
    input_gradients = sum(2 * BATCH * a * b for a, b in LAYERS[1:])
    return 2 * (2 * forward + input_gradients)


def timed_beside_matmuls(command: list[str], every: float = 6.0) -> tuple[float, list[float]]:
    """Wall seconds of a command, its pauses left out, and the matmul rates before, in the pauses and after."""
    rates, paused = [matmul_rate()], 0.0
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        while True:
            try:
                process.wait(timeout=every)
                break
            except subprocess.TimeoutExpired:
                began = time.perf_counter()
                os.killpg(process.pid, signal.SIGSTOP)
                rates.append(matmul_rate())
                os.killpg(process.pid, signal.SIGCONT)
                paused += time.perf_counter() - began
        wall = time.perf_counter() - start - paused
        if process.returncode:
            errors.seek(0)
            sys.exit(errors.read().decode())
    return wall, [*rates, matmul_rate()]


def measure(executor: str, rounds: int, active: int) -> dict[str, float | str | int]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fedcpsl", "run", str(ROOT / "experiments/mnist.toml"), "--out", str(out)]
        command += ["--rounds", str(rounds), "--active", str(active), "--executor", executor]
        wall, rates = timed_beside_matmuls(command)
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        layout = json.loads((out / "manifest.json").read_text())["layout"]
    rate = sum(rates) / len(rates)
    flops = last["steps"] * flop_per_step() / wall
    return {
        "executor": executor,
        "processes": layout["processes"],
        "rounds": rounds,
        "active": active,
        "steps": last["steps"],
        "seconds": round(wall, 2),
        "gflops": round(flops / 1e9, 4),
        "matmul_gflops": round(rate / 1e9, 1),
        "matmul_gflops_lowest": round(min(rates) / 1e9, 1),
        "matmul_gflops_highest": round(max(rates) / 1e9, 1),
        "share": round(flops / rate, 3),
        "accuracy": round(last["personal"]["mean"], 4),
    }


def about() -> dict[str, str | int | None]:
    """What a CPU's results are written with."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--sequential-rounds", type=int, default=20, help="fewer: it is the slow one")
    options.add_argument("--active", type=int, default=2)
    options.add_argument("--out", type=Path, help="also write the results as JSON")
    chosen = options.parse_args()
    runs = [
        measure("vectorised", chosen.rounds, chosen.active),
        measure("sequential", chosen.sequential_rounds, chosen.active),
    ]
    for run in runs:
        print(
            f"{run['executor']:<11} {run['rounds']:>4} rounds, {run['steps']:>6} steps in {run['seconds']:>7.2f} s: "
            f"{run['gflops']:>6.1f} of {run['matmul_gflops']:.1f} GFLOP/s "
            f"({run['matmul_gflops_lowest']} to {run['matmul_gflops_highest']}), {100 * float(run['share']):.1f} %"
        )
    ratio = float(runs[0]["gflops"]) / float(runs[1]["gflops"])
    print(f"vectorised is {ratio:.2f} times as fast as sequential, per step")
    result = about() | {"runs": runs, "vectorised_over_sequential": round(ratio, 2)}
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
