"""FedCPSL's successor with its defaults on data that its defaults were not chosen on.

    python benchmarks/new_data.py [--data NAME ...] [--seeds 3] [--rounds 60] [--out FOLDER]

Small tables that ship with scikit-learn, tables and windows that are made up, and digits as images, shared in several
ways. The successor and its variants search for their step sizes; FedCPSL and FedAvg have their default. Accuracy in %
on the devices' own tests.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from seeds import compare, options_for
from sklearn import datasets

from fedcpsl import Algorithm, Federation, Run, Work, evaluate, simulate
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.data.split import by_classes, by_dirichlet, by_quantity, iid
from fedcpsl.models import choose_model, make_model
from fedcpsl.step_size import prepare

Samples = tuple[NDArray[Any], NDArray[np.int64]]
Share = Callable[[NDArray[np.int64], int], NDArray[np.int64]]


def made_table(classes: int, noise: float) -> Samples:
    x, y = datasets.make_classification(
        4000, 30, n_informative=10, n_redundant=5, n_classes=classes, flip_y=noise, class_sep=1.5, random_state=0
    )
    return x, y


def windows() -> Samples:
    """Three channels of 64 readings: six classes of frequencies and shapes, with a random phase and noise."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 6, 3000)
    at = np.arange(64) / 64
    phase, strength = rng.random((3000, 3, 1)), 0.5 + rng.random((3000, 3, 1))
    turns = at * (2 + 2 * (y % 3))[:, None, None] + phase
    wave = np.where((y < 3)[:, None, None], np.sin(2 * np.pi * turns), 2 * (turns % 1) - 1)
    return strength * wave + 0.7 * rng.standard_normal(wave.shape), y


def digit_images() -> Samples:
    x, y = datasets.load_digits(return_X_y=True)
    return x.reshape(-1, 1, 8, 8) / 16, y


def by_two(y: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    return by_classes(y, 20, 2, seed)


def by_three(y: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    return by_classes(y, 20, 3, seed)


DATA: dict[str, tuple[Callable[[], Samples], Share, float]] = {
    "breast cancer, Dirichlet": (
        lambda: datasets.load_breast_cancer(return_X_y=True),
        lambda y, seed: by_dirichlet(y, 10, 0.5, seed),
        0.2,
    ),
    "breast cancer, alike": (
        lambda: datasets.load_breast_cancer(return_X_y=True),
        lambda y, seed: iid(len(y), 10, seed),
        0.2,
    ),
    "wine, unequal sizes": (
        lambda: datasets.load_wine(return_X_y=True),
        lambda y, seed: by_quantity(len(y), 5, 2.0, seed),
        0.3,
    ),
    "table of 8 classes, 3 each": (lambda: made_table(8, 0.01), by_three, 0.05),
    "table of 8 classes, alike": (lambda: made_table(8, 0.01), lambda y, seed: iid(len(y), 20, seed), 0.1),
    "noisy table of 3 classes": (lambda: made_table(3, 0.2), lambda y, seed: by_dirichlet(y, 20, 0.3, seed), 0.1),
    "windows, 2 classes each": (windows, by_two, 0.1),
    "windows, alike": (windows, lambda y, seed: iid(len(y), 20, seed), 0.1),
    "digit images, Dirichlet": (digit_images, lambda y, seed: by_dirichlet(y, 20, 0.3, seed), 0.1),
}
ROWS = {
    "fedcpsl2": fedcpsl2.Settings(),
    "fedcpsl": Algorithm(),
    "alone, same views": fedcpsl2.Settings(name="fedcpsl2-alone"),
    "one global model, same views": fedcpsl2.Settings(beta=0.0, independence=0.0, prior="off"),
    "prior only": fedcpsl2.Settings(beta=0.0, independence=0.0),
    "fedavg": Algorithm(name="fedavg"),
}


def accuracies(data: str, row: str, seed: int, rounds: int) -> tuple[float, float]:
    """Personal accuracy after the last round: the mean, and that of the worst tenth of devices."""
    make, share, labelled = DATA[data]
    x, y = make()
    y = y.astype(np.int64)
    owner = share(y, seed)
    federation = Federation.from_arrays(x.astype(np.float32), y, owner, labelled=labelled, seed=seed)
    torch.manual_seed(seed)
    model = make_model(choose_model("auto", federation.shape, "own"), [200, 200], federation.shape, federation.classes)
    work, run = Work(rounds=rounds), Run(seed=seed, device="cpu", processes=1)
    *_, last = simulate(prepare(federation, model, replace(ROWS[row]), work, run))
    personal = evaluate(last).personal
    return personal.mean, personal.worst_tenth


def main() -> None:
    options = options_for(__doc__, seeds=3, rounds=60)
    options.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    chosen = options.parse_args()
    compare(chosen, chosen.data, list(ROWS), ["personal", "worst tenth"], partial(accuracies, rounds=chosen.rounds))


if __name__ == "__main__":
    main()
