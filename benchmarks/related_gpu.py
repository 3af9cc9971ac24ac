"""What a local gradient costs in every algorithm that uses labels alone, as a ratio to FedAvg's: runs side by side.

    FEDCPSL_DATA=<folder> python benchmarks/related_gpu.py [--runs 20] [--rounds 20] [--device cuda]

The runs of each algorithm (seeds 0 to runs - 1) are computed together, on MNIST in the paper's setting with equal local
steps. Algorithms take turns, one round each, in one process, so that whatever else the machine does meets all of them
alike; a turn's time is divided by its local steps and by the gradients of a step, and by FedAvg's of the same turn.
Medians over turns are printed. Evaluation is left out; the first turns, with captures and allocations, do not count.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from fedcpsl.algorithms import all_algorithms, traits_of
from fedcpsl.config import Config, algorithm_settings, read_config, with_settings
from fedcpsl.data.federation import Federation
from fedcpsl.data.sources import load_federation, load_source
from fedcpsl.models import choose_model, make_model
from fedcpsl.runs.environment import cpu_name, git_commit
from fedcpsl.schedule import stream
from fedcpsl.simulation import Setup, State, prepare
from fedcpsl.simulation.rounds import simulate_together

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "fedavg"
WARM = 2  # turns that do not count


def supervised() -> list[str]:
    """Those that use labels alone and have a server, the reference first."""
    kinds = {name: traits_of(name) for name in all_algorithms()}
    names = sorted(n for n, t in kinds.items() if not (t.unlabelled or t.alone or t.everyone or n == REFERENCE))
    return [REFERENCE, *names]


def setups_of(name: str, config: Config, federations: list[Federation], rounds: int, device: str) -> list[Setup]:
    """Runs of one algorithm that share what they can, one for each federation and seed."""
    settings = algorithm_settings(name)(name=name, eta=0.01)
    made: list[Setup] = []
    for seed, federation in enumerate(federations):
        torch.manual_seed(int(stream(seed, "init").integers(2**63)))
        model_name = choose_model(config.model.name, federation.shape, config.data.dataset)
        model = make_model(model_name, config.model.hidden, federation.shape, federation.classes)
        own = {"run.seed": seed, "run.device": device, "run.executor": "vectorised", "run.processes": 1}
        chosen = with_settings(config, {**own, "work.rounds": rounds, "work.matched_steps": True})
        made.append(prepare(federation, model, settings, chosen.work, chosen.run, beside=made[0] if made else None))
    return made


def turn(rounds: Iterator[list[State]], before: int) -> tuple[float, int]:
    """Seconds of one round of all runs, and their local steps so far."""
    began = time.perf_counter()
    states = next(rounds)
    if states[0].targets.is_cuda:
        torch.cuda.synchronize()
    seconds, steps = time.perf_counter() - began, sum(state.steps for state in states)
    return seconds / max(steps - before, 1), steps


def measure(names: list[str], config: Config, runs: int, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds per gradient of each algorithm in each turn that counts."""
    source = load_source(config.data)
    federations = [load_federation(config.data, seed, source) for seed in range(runs)]
    simulations, gradients = {}, {}
    for name in names:
        setups = setups_of(name, config, federations, rounds, device)
        gradients[name] = setups[0].terms.method.traits.gradients_per_step
        simulations[name] = simulate_together(setups, may_diverge=True)  # what a step costs does not depend on it
        next(simulations[name])
    steps, found = dict.fromkeys(names, 0), dict[str, list[float]]((name, []) for name in names)
    for number in range(rounds):
        for name in names:
            per_step, steps[name] = turn(simulations[name], steps[name])
            if number >= min(WARM, rounds - 1):
                found[name].append(per_step / gradients[name])
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--algorithms", default="", metavar="A,B,...", help="in place of all that use labels alone")
    options.add_argument("--precision", default="ieee", choices=("ieee", "tf32", "bf16"))
    options.add_argument("--out", type=Path, help="also write the results as JSON")
    chosen = options.parse_args()
    base = with_settings(Config(), read_config(ROOT / "experiments/mnist.toml"))
    config = with_settings(base, {"work.active": 4, "run.precision": chosen.precision})
    names = list(dict.fromkeys([REFERENCE, *filter(None, chosen.algorithms.split(","))])) if chosen.algorithms else []
    found = measure(names or supervised(), config, chosen.runs, chosen.rounds, chosen.device)
    where = torch.cuda.get_device_name() if chosen.device.startswith("cuda") else cpu_name()
    print(f"{where}, PyTorch {torch.__version__}, {chosen.runs} runs side by side, {chosen.precision}")
    print(f"{'algorithm':<16}{'us per gradient':>16}{'ratio to ' + REFERENCE:>20}")
    results = {}
    for name, each in found.items():
        ratio = median(own / theirs for own, theirs in zip(each, found[REFERENCE], strict=True))
        results[name] = {"seconds_per_gradient": median(each), "ratio": ratio}
        print(f"{name:<16}{1e6 * median(each):>16.1f}{ratio:>20.2f}")
    if chosen.out:
        facts = {"git_commit": git_commit(), "device": where, "torch": torch.__version__, "runs": chosen.runs}
        chosen.out.write_text(json.dumps(facts | {"rounds": chosen.rounds, "measured": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
