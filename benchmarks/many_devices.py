"""What a round costs with 100 to 100,000 devices of which 20 are active: time, memory and disk.

    python benchmarks/many_devices.py [--devices 100,1000,10000,100000] [--rounds 50] [--repeats 3] [--out FILE.json]

FedCPSL with the MLP on the data set "synthetic", 100 devices tested after every tenth round. Each number of devices
runs in a process of its own, all of them in turn, `--repeats` times over: a shared machine is faster in one minute than
in the next. Time is the median over blocks of ten rounds, each with one evaluation, after the first block, divided by
ten: on the clock, and on the processor, which counts less of what others do there; with one thread. Memory is
the largest resident set of the process (on a GPU also what was allocated there); disk is what the device states take at
the end. The ratios are to the smallest number of devices.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mnist_cpu import matmul_rate

from fedcpsl import Algorithm, Data, Run, Work, evaluate, load_federation, mlp, prepare, simulate
from fedcpsl.runs.environment import cpu_name, git_commit

ACTIVE, BLOCK, BATCH = 20, 10, 64
LAYERS = [(64, 200), (200, 200), (200, 10)]


def run_one(devices: int, store: str, rounds: int, steps: int) -> dict[str, Any]:
    """One simulation in this process."""
    began = time.perf_counter()
    federation = load_federation(Data(dataset="synthetic", devices=devices), seed=0)
    torch.manual_seed(0)
    work = Work(rounds=rounds, active=ACTIVE, unit="steps", amount=steps)
    setup = prepare(federation, mlp(64, 10), Algorithm(), work=work, run=Run(store=store, processes=1))
    torch.set_num_threads(1)  # so that processor time is the time of the work, and not of threads that wait
    seconds, busy, earlier, evaluation = [], [], None, None
    start = time.perf_counter(), time.process_time()
    for state in simulate(setup):
        if state.round % BLOCK == 0:
            evaluation = evaluate(state, earlier)
            earlier = evaluation.predictions
            seconds.append(time.perf_counter() - start[0])
            busy.append(time.process_time() - start[1])
            if state.round == 0:
                prepared = time.perf_counter() - began
            start = time.perf_counter(), time.process_time()
    assert evaluation is not None
    assert state.sparse is not None
    return {
        "devices": devices,
        "store": setup.machine.store,
        "blocks_ms": [round(1000 * s / BLOCK, 2) for s in seconds[2:]],
        "busy_ms": [round(1000 * s / BLOCK, 2) for s in busy[2:]],
        "start_s": round(prepared, 2),
        "resident_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "gpu_mb": round(torch.cuda.max_memory_allocated() / 2**20, 1) if setup.data.where.type == "cuda" else None,
        "disk_mb": round(state.sparse.bytes_on_disk() / 2**20, 1),
        "been_active": int(state.sparse.there.sum()),
        "accuracy": round(evaluation.personal.mean, 4),
    }


def in_own_process(devices: int, store: str, rounds: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", f"{devices},{store}", "--rounds", str(rounds), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def flop_per_round(steps: int) -> int:
    """Forward, weight gradients, and input gradients of all layers but the first, of both models, in all steps."""
    forward = sum(2 * BATCH * a * b for a, b in LAYERS)
    return ACTIVE * steps * 2 * (2 * forward + sum(2 * BATCH * a * b for a, b in LAYERS[1:]))


def summarised(runs: list[dict[str, Any]], rate: float, steps: int) -> dict[str, Any]:
    """The repetitions of one number of devices as one row."""
    blocks, busy = ([block for run in runs for block in run[key]] for key in ("blocks_ms", "busy_ms"))
    row = {key: max(run[key] for run in runs) for key in ("start_s", "resident_mb", "disk_mb", "been_active")}
    return {
        "devices": runs[0]["devices"],
        "store": runs[0]["store"],
        "ms_per_round": round(median(blocks), 2),
        "busy_ms_per_round": round(median(busy), 2),
        "share_of_matmul_rate": round(flop_per_round(steps) / (median(blocks) / 1000) / rate, 4),
        "gpu_mb": runs[0]["gpu_mb"],
        "accuracy": runs[0]["accuracy"],
        **row,
    }


def measure(counts: list[int], store: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of devices, in turn."""
    torch.set_num_threads(1)
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    rates = [matmul_rate()]
    for _ in range(chosen.repeats):
        for count in counts:
            runs[count].append(in_own_process(count, store, chosen.rounds, chosen.steps))
        rates.append(matmul_rate())
    rows = [summarised(each, sum(rates) / len(rates), chosen.steps) for each in runs.values()]
    for row in rows:
        memory = "gpu_mb" if row["gpu_mb"] else "resident_mb"
        row["time_ratio"] = round(row["ms_per_round"] / rows[0]["ms_per_round"], 2)
        row["busy_ratio"] = round(row["busy_ms_per_round"] / rows[0]["busy_ms_per_round"], 2)
        row["memory_ratio"] = round(row[memory] / rows[0][memory], 2)
        gpu = f"{row['gpu_mb']:>8.1f} MB on GPU" if row["gpu_mb"] else ""
        print(
            f"{store:<6}{row['store']:<12}{row['devices']:>8,} devices{row['ms_per_round']:>9.2f} ms a round, times "
            f"{row['time_ratio']:.2f} (processor {row['busy_ms_per_round']:.2f}, times {row['busy_ratio']:.2f}), "
            f"{row['resident_mb']:>7.1f} MB,{gpu} times {row['memory_ratio']:.2f}; {row['been_active']:>5,} have been "
            f"active, {row['disk_mb']:>7.1f} MB on disk; {100 * row['share_of_matmul_rate']:.1f} % of the matmul rate"
        )
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--devices", default="100,1000,10000,100000")
    options.add_argument("--stores", default="auto,disk")
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--steps", type=int, default=10, help="local steps of an active device in a round")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--one", help=argparse.SUPPRESS)
    options.add_argument("--out", type=Path, help="also write the results as JSON")
    chosen = options.parse_args()
    if chosen.one:
        devices, store = chosen.one.split(",")
        print(json.dumps(run_one(int(devices), store, chosen.rounds, chosen.steps)))
        return
    counts = [int(text) for text in chosen.devices.split(",")]
    rows = [row for store in chosen.stores.split(",") for row in measure(counts, store, chosen)]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
        "active": ACTIVE,
        "steps": chosen.steps,
        "rows": rows,
    }
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
