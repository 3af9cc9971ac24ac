"""What one active device sends in one round, in bytes, for every algorithm: measured on the messages themselves.

    python benchmarks/uplink.py [--model cnn|mlp]

Each algorithm runs one round on random data; its upload is written as a safetensors message and its length taken.
SCAFFOLD as first published sends two vectors up, the change of the model and the change of the control variate; here
a device sends one vector and its step count, from which the server works out the other.
"""

import argparse
import json

import numpy as np
import torch
from safetensors.torch import save

from fedcpsl import Federation, Run, Work, prepare
from fedcpsl.algorithms import all_algorithms, traits_of
from fedcpsl.config import algorithm_settings
from fedcpsl.models import make_model
from fedcpsl.simulation import initial_state
from fedcpsl.simulation.executors import local_rounds
from fedcpsl.simulation.round_request import RoundRequest, broadcasts_to, training_data_of
from fedcpsl.simulation.rounds import draw_plan, next_state
from fedcpsl.trees import Tree, named_leaves

SHAPES = {"mlp": (1, 28, 28), "cnn": (3, 32, 32)}


def federation(shape: tuple[int, ...]) -> Federation:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (400, *shape)).astype(np.uint8)
    device = np.arange(400) % 4
    return Federation.from_arrays(x, rng.integers(0, 10, 400), device, labelled=0.2, recording=device, server=0.1)


def uploads(name: str, model: str) -> tuple[int, int]:
    """Bytes that a device sends and is sent in its first round, and what the simulator counts as sent."""
    shape = SHAPES[model]
    torch.manual_seed(0)
    everyone = traits_of(name).everyone
    work = Work(rounds=1, active="auto" if everyone else 2, unit="steps", amount=1)
    network = make_model(model, [200, 200], shape, 10)
    small = {"hyper_width": 2} if name == "semipfl" else {}  # at the server: no message has it
    settings = algorithm_settings(name)(name=name, eta=0.01, **small)
    setup = prepare(federation(shape), network, settings, work, Run(device="cpu", processes=1))
    state = initial_state(setup)
    plan = draw_plan(state)
    sent, rows = broadcasts_to(setup, state.server, [task.device for task in plan])
    request = RoundRequest(setup, plan, state.devices, sent, rows=rows)
    finished = next(iter(local_rounds([request], training_data_of(setup.data, state.targets.clone()))))
    message = 0 if setup.terms.method.traits.alone else len(save(_message(finished.upload)))
    before = initial_state(setup)
    counted = (next_state(before, plan).uplink_bytes - before.uplink_bytes) // len(plan)
    return message, counted


def _message(upload: Tree) -> dict[str, torch.Tensor]:
    """One device's upload as it would travel."""
    return {name: t[0].contiguous().reshape(-1) for name, t in named_leaves(upload).items()}


def scaffold_as_published(model: str) -> int:
    """Two vectors: the change of theta and the change of c_i."""
    count = sum(p.numel() for p in make_model(model, [200, 200], SHAPES[model], 10).parameters())
    return len(save({"delta": torch.zeros(count), "delta_c": torch.zeros(count)}))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", choices=sorted(SHAPES), default="mlp")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    rows = {name: uploads(name, chosen.model) for name in all_algorithms()}
    published = scaffold_as_published(chosen.model)
    reference = rows["fedcpsl"][0]
    if chosen.json:
        print(json.dumps({"messages": rows, "scaffold as published": published}, indent=2))
        return
    print(f"{'algorithm':<24}{'message, bytes':>16}{'counted, bytes':>16}{'of FedCPSL':>12}")
    for name, (message, counted) in rows.items():
        print(f"{name:<24}{message:>16,}{counted:>16,}{message / reference:>12.2f}")
    print(f"{'scaffold as published':<24}{published:>16,}{'':>16}{published / reference:>12.2f}")


if __name__ == "__main__":
    main()
