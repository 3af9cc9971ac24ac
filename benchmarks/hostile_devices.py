"""What hostile devices do to a federation, and what each kind of aggregation leaves of it.

    python benchmarks/hostile_devices.py [--hostile 0 1 2 3] [--times -10] [--seeds 5] [--out FOLDER]

Ten devices share the digits, three classes each, a tenth of the labels; all are active in every round. A hostile device
trains as the others do and sends -10 times its update, or as many times as --times says. Everything is as on real
devices, messages and states on disk too, but that they are in one process. What is told is of the honest devices alone:
the accuracy of the global model on all their test samples, and of their own models, each on its own. FedCPSL as it is
by default; with `trimmed` and `median` control variates are off. A federation that cannot go on is judged as it then
is, and counted.

With --honest it prints how far apart the rates ||update|| / (eta Q~) of honest devices are, which the bound must allow.
"""

import argparse
import csv
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from fedcpsl import Algorithm, Data, Run, Work, load_federation, mlp, prepare
from fedcpsl.errors import RunError
from fedcpsl.federation import Message, Participant, RoundRules, serve, terms_of
from fedcpsl.federation.device import LoopbackTransport, load_device_state
from fedcpsl.federation.local_training import local_data_of, log_predictions
from fedcpsl.federation.messages import TRAIN
from fedcpsl.federation.robustness import AGGREGATIONS, COORDINATE_WISE, Limits, lower_median
from fedcpsl.runs.environment import cpu_name, git_commit

DEVICES, ROUNDS = 10, 30
ROWS = (*AGGREGATIONS, "clipped, no control variates")


class Hostile(NamedTuple):
    """A loopback in which some devices multiply their updates."""

    inner: LoopbackTransport
    names: frozenset[str]
    times: float

    def present(self) -> list[str]:
        return self.inner.present()

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message]]:
        for name, reply in self.inner.send(messages, deadline):
            spoilt = name in self.names and isinstance(reply, Message) and reply.header["kind"] == TRAIN
            yield name, Message(reply.header, {"delta": reply.tensors["delta"] * self.times}) if spoilt else reply


class Outcome(NamedTuple):
    """Of the honest devices after the last round."""

    global_accuracy: float
    personal_accuracy: float
    ended: bool  # before its last round


def federate(aggregation: str, hostile: int, times: float, seed: int, folder: Path) -> Outcome:
    """One federation, from its first round to its last, or to where it cannot go on."""
    data = Data(dataset="digits", devices=DEVICES, classes_per_device=3, partition="classes")
    rule, _, switch = aggregation.partition(", ")
    off = {"control_variates": False} if switch or rule in COORDINATE_WISE else {}
    torch.manual_seed(seed)
    setup = prepare(
        load_federation(data, seed=seed),
        mlp(64, 10, [64]),
        Algorithm(**off),
        Work(rounds=ROUNDS, active=DEVICES),
        Run(seed=seed, executor="sequential", processes=1, device="cpu"),
    )
    devices = {
        name: Participant(terms_of(setup, i), local_data_of(setup, i), folder / name)
        for i, name in enumerate(setup.terms.names)
    }
    bad = frozenset(list(devices)[:hostile])
    rules = RoundRules(ROUNDS, seed, deadline=60.0, min_devices=DEVICES, limits=Limits(aggregation=rule))
    ended = False
    try:
        for state in serve(terms_of(setup), rules, folder / "server", Hostile(LoopbackTransport(devices), bad, times)):
            last = state
    except RunError:
        ended = True
    right_global = right = tests = 0
    own = []
    for name in sorted(set(devices) - bad):
        device, kept = devices[name], load_device_state(devices[name].folder, devices[name].terms)
        x, y = device.local_data.x_test, device.local_data.y_test
        guessed = device.terms.method.network.log_probabilities(last.server.theta, x).argmax(-1)
        right_global, tests = right_global + int((guessed == y).sum()), tests + len(y)
        mixed = log_predictions(device.terms, kept.received, kept.committed, x).argmax(-1)
        right = int((mixed == y).sum())
        own.append(right / len(y))
    return Outcome(right_global / tests, statistics.mean(own), ended)


def mean_and_spread(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"


def honest_spread(seed: int, data: Data, work: Work) -> list[float]:
    """How many times the median an honest rate is, for every update, by the votes that the server would judge it by."""
    torch.manual_seed(seed)
    federation = load_federation(data, seed=seed)
    model = mlp(federation.x[0].size, federation.classes, [64])
    run = Run(seed=seed, executor="sequential", processes=1, device="cpu")
    setup = prepare(federation, model, Algorithm(), work, run)
    limits, ratios = Limits(aggregation="none"), []
    with tempfile.TemporaryDirectory() as folder:
        devices = {
            name: Participant(terms_of(setup, i), local_data_of(setup, i), Path(folder) / name)
            for i, name in enumerate(setup.terms.names)
        }
        largest = max(device.local_data.labelled + device.local_data.unlabelled for device in devices.values())
        limits = limits._replace(largest_samples=largest)
        rules = RoundRules(work.rounds, seed, deadline=60.0, min_devices=len(devices), limits=limits)
        for state in serve(terms_of(setup), rules, Path(folder) / "server", LoopbackTransport(devices)):
            votes = {m.name: m.rate for m in state.roster if m.rate is not None}
            ratios += [votes[name] / lower_median(list(votes.values())) for name in state.counted]
    return ratios


def print_honest_spread(seeds: int) -> None:
    cases = {
        "digits, 2 classes each, m = 4 of 20": Data(dataset="digits"),
        "digits, Dirichlet 0.1, m = 4 of 20": Data(dataset="digits", partition="dirichlet", concentration=0.1),
        "digits, unequal quantities, m = 4 of 20": Data(dataset="digits", partition="quantity", concentration=0.3),
    }
    for name, data in cases.items():
        found = [r for seed in range(seeds) for r in honest_spread(seed, data, Work(rounds=100, active=4, amount=1))]
        print(f"{name}: largest {max(found):.2f} times the median, of {len(found)} updates", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hostile", type=int, nargs="+", default=[0, 1, 2, 3])
    options.add_argument("--times", type=float, default=-10.0, help="what a hostile device multiplies its update by")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--aggregations", nargs="+", choices=ROWS, default=ROWS)
    options.add_argument("--out", type=Path, help="a folder for hostile_devices.csv")
    options.add_argument("--honest", action="store_true", help="how far apart the rates of honest devices are")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.honest:
        print_honest_spread(chosen.seeds)
        return
    lines = []
    print("| aggregation | model | " + " | ".join(f"{k} hostile" for k in chosen.hostile) + " |")
    print("|---|---|" + "---|" * len(chosen.hostile))
    for aggregation in chosen.aggregations:
        cells: dict[str, list[str]] = {"global": [], "personal": []}
        for hostile in chosen.hostile:
            found = []
            for seed in range(chosen.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(federate(aggregation, hostile, chosen.times, seed, Path(folder)))
                lines.append([aggregation, hostile, seed, found[-1].global_accuracy, found[-1].personal_accuracy])
            ended = sum(each.ended for each in found)
            note = f" ({ended} of {len(found)} ended)" if ended else ""
            cells["global"].append(mean_and_spread([each.global_accuracy for each in found]) + note)
            cells["personal"].append(mean_and_spread([each.personal_accuracy for each in found]))
        for model, row in cells.items():
            print(f"| `{aggregation}` | {model} | {' | '.join(row)} |", flush=True)
    print(f"{chosen.times:g} times the update, {chosen.seeds} seeds, {ROUNDS} rounds")
    print(f"{cpu_name()}, {date.today()}, commit {git_commit()}")
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        with (chosen.out / "hostile_devices.csv").open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["aggregation", "hostile", "seed", "global_accuracy", "personal_accuracy"])
            table.writerows(lines)


if __name__ == "__main__":
    main()
