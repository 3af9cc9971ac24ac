"""FedCPSL in the paper's MNIST setting on a GPU: steps captured and replayed against one device after another.

    FEDCPSL_DATA=<folder with mnist/*.gz> python benchmarks/mnist_gpu.py [--rounds 100] [--sequential-rounds 10]

Runs the whole `fedcpsl run` command with evaluation after every round, and prints its wall time, the time in rounds
(evaluation and checkpoints included), and the local steps' arithmetic as a share of the matmul rate measured before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from mnist_cpu import ROOT, flop_per_step


def matmul_rate(n: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a large IEEE float32 matmul."""
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
    a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    return 2 * n**3 * repeats / (time.perf_counter() - start)


def measure(executor: str, rounds: int) -> dict[str, float | int | str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fedcpsl", "run", str(ROOT / "experiments/mnist.toml"), "--out", str(out)]
        command += [
            "--rounds",
            str(rounds),
            "--executor",
            executor,
            "--device",
            "cuda",
            "--set",
            "run.evaluate_every=1",
        ]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wall = time.perf_counter() - start
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    accuracy = last["personal"]["mean"]
    return {"rounds": rounds, "steps": last["steps"], "wall": wall, "in_rounds": last["seconds"], "accuracy": accuracy}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--sequential-rounds", type=int, default=10)
    chosen = options.parse_args()
    rate = matmul_rate()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, matmul {rate / 1e12:.1f} TFLOP/s")
    per_step = {}
    for executor, rounds in (("vectorised", chosen.rounds), ("sequential", chosen.sequential_rounds)):
        found = measure(executor, rounds)
        per_step[executor] = float(found["in_rounds"]) / int(found["steps"])
        share = flop_per_step() / per_step[executor] / rate
        print(
            f"{executor:<11} {rounds:>4} rounds, {found['steps']:>6} steps: {found['in_rounds']:.2f} s in rounds, "
            f"{found['wall']:.2f} s in all, {100 * share:.2f} % of the matmul rate, accuracy {found['accuracy']:.4f}"
        )
    print(f"vectorised is {per_step['sequential'] / per_step['vectorised']:.1f} times as fast, per step")


if __name__ == "__main__":
    main()
