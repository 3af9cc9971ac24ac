"""What becomes of devices that disagree on what is what, with FedCPSL's successor and with others.

    python benchmarks/disagreeing_devices.py [--settings NAME ...] [--seeds 3] [--rounds 100] [--out FOLDER]

The same digits mean other classes on other devices, in four ways: every device has its own permutation of the classes;
two groups of devices, where each digit is the next class in the second; one device of ten disagrees with all others;
devices of two classes each, half of which call them the other way round. A fifth setting has devices that agree.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from seeds import compare, options_for
from sklearn.datasets import load_digits

from fedcpsl import Algorithm, Federation, Run, Work, evaluate, mlp, simulate
from fedcpsl.algorithms import fedcpsl2
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
    options = options_for(__doc__, seeds=3, rounds=100)
    options.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    chosen = options.parse_args()
    measure = partial(accuracies, rounds=chosen.rounds)
    compare(chosen, chosen.settings, list(ROWS), ["personal", "worst tenth"], measure)


if __name__ == "__main__":
    main()
