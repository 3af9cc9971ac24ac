"""What an edge network adds to a simulated round: rounds with and without one, in turns, in one process.

    python benchmarks/edge_cost.py [--rounds 150] [--only WORDS]

It prints a line of a table for each case: the median milliseconds of a run's round without an edge network, the median
of what one with it takes longer (paired: the two go in turns, and take turns in going first), that as a share, and
whether it is within the aim, which is at most 3 % or 1 ms for each run and round, whichever is more. Milliseconds are
those of the thread's own time. Both do the same local work: everybody is there, no step is cut short, and where the
server waits for some of those under way, the round without a network has as many as it waits for.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from fedcpsl import Algorithm, Data, Edge, Run, Work, load_federation, mlp, prepare, simulate_together
from fedcpsl.edge.settings import of_profile

MACRO = of_profile("macro")
NETWORKS = {
    "no deadline": MACRO,
    "equal-time": replace(MACRO, allocation="equal-time"),
    "deadline, equal-outage, inverse": replace(
        MACRO, deadline=60.0, slot=0.2, allocation="equal-outage", correction="inverse"
    ),
    "on-off, batteries": replace(MACRO, availability="on-off", on_seconds=1e9, battery=1e6, recharge_w=1.0),
    "daily": replace(MACRO, availability="daily", presence=[10.0, 10.0]),
    "8 bits": replace(MACRO, upload_bits=8),
    "semi-async": replace(MACRO, clock="semi-async"),
}
MANY = 100_000


class Case(NamedTuple):
    network: str
    hidden: tuple[int, ...] = (32,)
    active: int = 4
    runs: int = 1
    devices: int = 20  # MANY: the data set "synthetic", with a trace

    @property
    def title(self) -> str:
        model = "-".join(map(str, self.hidden))
        return f"{self.network} | {model} | {self.devices:,} | {self.active} | {self.runs}"


CASES = [
    *(Case(name, hidden, active) for hidden in ((32,), (200, 200)) for active in (4, 16) for name in NETWORKS),
    *(Case(name, active=4, runs=8) for name in NETWORKS),
    *(Case("trace", active=active, devices=MANY) for active in (4, 16)),
    Case("trace, batteries", devices=MANY),
]


def edge_of(case: Case, folder: Path) -> Edge:
    """The case's network; a trace in which everybody is there for two intervals, the second without end."""
    if case.devices != MANY:
        edge = NETWORKS[case.network]
        return replace(edge, wait_for=case.active) if edge.clock == "semi-async" else edge
    trace = folder / "trace.csv"
    if not trace.exists():
        lines = (f"{i},0,0.01\n{i},0.01001,1e12\n" for i in range(MANY))
        trace.write_text("device,start,end\n" + "".join(lines))
    edge = replace(MACRO, availability="trace", trace=str(trace))
    return replace(edge, battery=1e6, recharge_w=1.0) if "batteries" in case.network else edge


def setups_of(case: Case, edge: Edge | None, rounds: int) -> list:
    data = Data(dataset="synthetic", devices=MANY) if case.devices == MANY else Data(dataset="digits")
    federation = load_federation(data, seed=0)
    torch.manual_seed(0)
    model = mlp(64, 10, list(case.hidden))
    under_way = 2 * case.active if edge is not None and edge.clock == "semi-async" else case.active
    active = min(under_way, case.devices)
    work = Work(rounds=rounds, active=active, unit="steps", amount=6)
    return [
        prepare(federation, model, Algorithm(), work, Run(seed=seed, processes=1, device="cpu"), edge=edge)
        for seed in range(case.runs)
    ]


def seconds_of(setups: list) -> Iterator[float]:
    """Yield the seconds of each round of runs side by side."""
    states = simulate_together(setups)
    next(states)
    while True:
        began = time.thread_time()
        next(states)
        yield time.thread_time() - began


def measured(case: Case, rounds: int, folder: Path) -> tuple[float, float]:
    """The median seconds of a run's round without an edge network, and of what one with it takes longer."""
    both = [seconds_of(setups_of(case, edge, rounds)) for edge in (None, edge_of(case, folder))]
    pairs = np.zeros((rounds, 2))
    for i in range(rounds):
        for j in (0, 1) if i % 2 else (1, 0):
            pairs[i, j] = next(both[j])
    later = pairs[5:] / case.runs
    return median(later[:, 0]), median(later[:, 1] - later[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--only", default="", help="cases whose line has these words")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | hidden | devices | active | runs | ms a round | more, ms | more | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if given.only in case.title:
                plain, more = measured(case, given.rounds, Path(folder))
                verdict = "within" if more <= max(1e-3, 0.03 * plain) else "over"
                share = f"{1e3 * plain:.2f} | {1e3 * more:+.2f} | {100 * more / plain:+.1f} %"
                print(f"| {case.title} | {share} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
