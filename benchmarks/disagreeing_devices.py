"""What becomes of devices that disagree on what is what, with FedCPSL's successor and with others.

    python benchmarks/disagreeing_devices.py [--settings NAME ...] [--seeds 3] [--rounds 100] [--out FOLDER]

The same digits mean other classes on other devices, in four ways: every device has its own permutation of the classes;
two groups of devices, where each digit is the next class in the second; one device of ten disagrees with all others;
devices of two classes each, half of which call them the other way round. A fifth setting has devices that agree.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedcpsl import Algorithm, Federation, Run, Work, evaluate, mlp, simulate
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.runs.environment import cpu_name, git_commit
from fedcpsl.step_size import prepare

Labels = NDArray[np.int64]
Owners = NDArray[np.int64]


def spread(digits: Labels, devices: int, rng: np.random.Generator) -> Owners:
    """Every device has about as many of the samples, at random."""
    owners: Owners = rng.permutation(np.arange(len(digits)) % devices)
    return owners


def own_permutations(digits: Labels, rng: np.random.Generator) -> tuple[Labels, Owners]:
    owner = spread(digits, 10, rng)
    return np.stack([rng.permutation(10) for _ in range(10)])[owner, digits], owner


def two_groups(digits: Labels, rng: np.random.Generator) -> tuple[Labels, Owners]:
    owner = spread(digits, 20, rng)
    return (digits + owner % 2) % 10, owner


def one_of_ten(digits: Labels, rng: np.random.Generator) -> tuple[Labels, Owners]:
    owner = spread(digits, 10, rng)
    return (digits + (owner == 3)) % 10, owner


def swapped_pairs(digits: Labels, rng: np.random.Generator) -> tuple[Labels, Owners]:
    owner = np.empty_like(digits)
    for pair in range(5):
        rows = np.flatnonzero(digits // 2 == pair)
        owner[rows] = 4 * pair + rng.permutation(len(rows)) % 4
    return np.where(owner % 2 == 1, digits ^ 1, digits), owner


def all_agree(digits: Labels, rng: np.random.Generator) -> tuple[Labels, Owners]:
    return digits, spread(digits, 10, rng)


SETTINGS: dict[str, tuple[Callable[[Labels, np.random.Generator], tuple[Labels, Owners]], float]] = {
    "own permutations": (own_permutations, 0.5),  # and the share of samples that are labelled
    "two groups": (two_groups, 0.5),
    "one of ten": (one_of_ten, 0.3),
    "swapped pairs": (swapped_pairs, 0.3),
    "all agree": (all_agree, 0.3),
}
ROWS = {
    "fedcpsl2": fedcpsl2.Settings(),
    "fedcpsl2, independence = 0": fedcpsl2.Settings(independence=0.0),
    "fedcpsl2, independence = 1": fedcpsl2.Settings(independence=1.0),
    "fedcpsl2-alone": fedcpsl2.Settings(name="fedcpsl2-alone"),
    "fedcpsl": Algorithm(eta=0.05),
}


def federation_of(setting: str, seed: int) -> Federation:
    x, digits = load_digits(return_X_y=True)
    make, labelled = SETTINGS[setting]
    y, owner = make(digits.astype(np.int64), np.random.default_rng(seed))
    return Federation.from_arrays((x / 16).astype(np.float32), y, owner, labelled=labelled, stratified=True, seed=seed)


def accuracies(setting: str, row: str, seed: int, rounds: int) -> tuple[float, float]:
    """Personal accuracy after the last round: the mean, and that of the worst tenth of devices."""
    federation = federation_of(setting, seed)
    torch.manual_seed(seed)
    model = mlp(64, federation.classes)
    work, run = Work(rounds=rounds, active=4), Run(seed=seed, device="cpu", processes=1)
    *_, last = simulate(prepare(federation, model, replace(ROWS[row]), work, run))
    personal = evaluate(last).personal
    return personal.mean, personal.worst_tenth


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(
        f"{cpu_name()}, commit {git_commit()}, {date.today().isoformat()}; {chosen.seeds} seeds, {chosen.rounds} rounds"
    )
    lines = []
    for setting in chosen.settings:
        for row in ROWS:
            began = time.monotonic()
            found = [accuracies(setting, row, seed, chosen.rounds) for seed in range(chosen.seeds)]
            mean, worst = (statistics.mean(each) for each in zip(*found, strict=True))
            spread_of = statistics.stdev(mean for mean, _ in found) if len(found) > 1 else 0.0
            lines.append([setting, row, f"{mean:.4f}", f"{spread_of:.4f}", f"{worst:.4f}", len(found), chosen.rounds])
            print(
                f"{setting:18} {row:28} {100 * mean:6.2f} ± {100 * spread_of:.2f}, worst tenth {100 * worst:6.2f} "
                f"({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        with (chosen.out / "disagreeing_devices.csv").open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["setting", "algorithm", "personal", "std_over_seeds", "worst_tenth", "seeds", "rounds"])
            table.writerows(lines)


if __name__ == "__main__":
    main()
