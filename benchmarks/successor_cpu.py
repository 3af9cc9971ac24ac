"""The CPU time of a local step of FedCPSL's successor beside one of FedCPSL, with equal minibatches.

    python benchmarks/successor_cpu.py [--dataset mnist] [--turns 5] [--steps 60]

Both take turns, on one thread. CPU time is counted, of the steps alone: what a device does once a visit (its class
prior, labels held out) is given apart. The share of the views is that of making weak and strong views.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from typing import Any
from unittest import mock

import torch

from fedcpsl import Algorithm, Data, Run, Work, simulate
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.config import Config, Model
from fedcpsl.runs.environment import cpu_name, git_commit
from fedcpsl.runs.experiment import build
from fedcpsl.simulation import executors, minibatches

DATA = {
    "mnist": (Data(dataset="mnist", devices=20, classes_per_device=2, test=0.2), Model(name="mlp", hidden=[200, 200])),
    "digits": (Data(dataset="digits"), Model()),
}
ROWS = {"fedcpsl": Algorithm(eta=0.005), "fedcpsl2": fedcpsl2.Settings(eta=0.005)}


@contextmanager
def timed(times: dict[str, float], **parts: tuple[Any, str]) -> Iterator[None]:
    """CPU time of some functions, added up by the name of the part."""

    def counted(call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            result = call(*arguments, **named)
            times[part] += time.process_time() - began
            return result

        return wrapper

    with ExitStack() as stack:
        for part, (module, name) in parts.items():
            stack.enter_context(mock.patch.object(module, name, counted(getattr(module, name), part)))
        yield


def measure(dataset: str, row: str, steps: int) -> dict[str, float]:
    """Microseconds a device's step: all of the steps, the views in them, and what is done once a visit."""
    data, model = DATA[dataset]
    work = Work(rounds=3, active=2, unit="steps", amount=steps)
    run = Run(device="cpu", processes=1, executor="vectorised", evaluate_every=1000)
    rounds = simulate(build(Config(data, model, ROWS[row], work, run)).setup)
    next(rounds), next(rounds)  # the first round sets up buffers
    times: dict[str, float] = defaultdict(float)
    parts = {
        "views": (minibatches, "viewed"),
        "visits": (executors, "prepared"),
        "steps": (executors, "steps_one_by_one"),
    }
    with timed(times, **parts):
        for _ in rounds:
            pass
    return {part: 1e6 * times[part] / (2 * 2 * steps) for part in ("steps", "views", "visits")}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dataset", choices=DATA, default="mnist")
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--steps", type=int, default=60, help="of a visit")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
    for _ in range(chosen.turns):
        for row, each in found.items():
            each.append(measure(chosen.dataset, row, chosen.steps))
    best = {row: min(each, key=lambda one: one["steps"]) for row, each in found.items()}
    for row, one in best.items():
        print(
            f"{row:9} {one['steps']:6.0f} us a step, views {one['views']:5.0f} of it; visits {one['visits']:5.0f} more"
        )
    successor, ratio = best["fedcpsl2"], best["fedcpsl2"]["steps"] / best["fedcpsl"]["steps"]
    share = 100 * successor["views"] / successor["steps"]
    print(
        f"{chosen.dataset}: a step of fedcpsl2 takes {ratio:.2f} times that of fedcpsl; views are {share:.0f} % of it"
    )
    print(f"{cpu_name()}, one thread, {date.today()}, commit {git_commit()}, best of {chosen.turns} turns")


if __name__ == "__main__":
    main()
