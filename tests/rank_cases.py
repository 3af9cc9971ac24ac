"""Simulations that `test_ranks.py` compares; started by torchrun, every rank writes what it came to."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fedcpsl import config
from fedcpsl.edge.settings import of_profile
from fedcpsl.errors import RunError
from fedcpsl.simulation import prepare, ranks, simulate, simulate_together, workers
from fedcpsl.simulation.executors import local_rounds

from .conftest import small_federation, small_model
from .test_conformance import WORK, tensors

CASES = {
    "fedcpsl": ({}, {}, {"executor": "vectorised"}),
    "dropout": ({}, {"active": 3}, {"executor": "vectorised"}),
    "personal": ({"name": "fedcpsl"}, {"personal_rounds": 2}, {"executor": "sequential"}),
    "two-phase": ({"name": "fedshvrp", "warm_up": 1}, {"two_phase": True, "personal_rounds": 2}, {}),
    "joiners": ({"name": "scaffold"}, {"joiners": 2, "join_round": 2, "active": 3}, {}),
    "one-device": ({"name": "apfsl"}, {"active": 1}, {}),
    "local": ({"name": "local-pseudo"}, {}, {}),
    "feddyn": ({"name": "feddyn"}, {"joiners": 2, "join_round": 2, "active": 3}, {}),
    "ditto": ({"name": "ditto"}, {"personal_rounds": 1}, {}),
    "fedamp": ({"name": "fedamp"}, {}, {"executor": "vectorised"}),
    "afl": ({"name": "afl"}, {"joiners": 2, "join_round": 2, "active": 3}, {}),
    "drfa": ({"name": "drfa"}, {"joiners": 2, "join_round": 2, "active": 3}, {"executor": "vectorised"}),
    "fedcpsl2": ({"name": "fedcpsl2"}, {"joiners": 2, "join_round": 2, "active": 3}, {}),
    "fedhar": ({"name": "fedhar", "T": 3}, {"personal_rounds": 1}, {"executor": "vectorised"}),
    "semifed": ({"name": "semifed", "tau": 0.35, "first_stage": 2}, {}, {"executor": "vectorised"}),
    "fedmatch": ({"name": "fedmatch", "tau": 0.35, "helper_every": 2, "lam_s": 3.0, "lam_2": 0.2}, {}, {}),
    "perfedavg": ({"name": "perfedavg-hf"}, {}, {}),
    "edge": ({}, {"active": 3}, {"executor": "vectorised"}),
    "semi-async": ({}, {"active": 3, "rounds": 6}, {"executor": "sequential"}),
    "semipfl": ({"name": "semipfl"}, {}, {}),
    "fednova": ({"name": "fednova"}, {}, {}),
    "fedprox": ({"name": "fedprox"}, {}, {"executor": "vectorised"}),
    "pfedme": ({"name": "pfedme"}, {}, {}),
    "perfedavg-fo": ({"name": "perfedavg-fo"}, {}, {"executor": "vectorised"}),
    "fedcpsl2-prior": ({"name": "fedcpsl2-prior"}, {}, {}),
    "fedcpsl2-alone": ({"name": "fedcpsl2-alone"}, {}, {"executor": "vectorised"}),
    "apfl": ({"name": "apfl"}, {}, {}),
    "fedshvr": ({"name": "fedshvr"}, {"active": "auto"}, {}),
    "flexmatch": (
        {"name": "flexmatch", "tau": 0.4},
        {"joiners": 2, "join_round": 2, "active": 3},
        {"executor": "vectorised"},
    ),
}


EDGES = {  # the edge network of a case
    "edge": replace(
        of_profile("macro"), deadline=0.0315, slot=0.03, flops_per_cycle=0.02, bandwidth_up_mhz=0.05, extra=1
    ),
    "semi-async": replace(of_profile("macro"), clock="semi-async", wait_for=1, flops_per_cycle=0.01, upload_bits=8),
}


def setup(name):
    algorithm, work, run = CASES[name]
    model = small_model()
    if name == "dropout":
        model = torch.nn.Sequential(model[0], torch.nn.Dropout(0.3), *model[1:])
    return prepare(
        small_federation(at_server=9 if name == "semipfl" else 0),
        model,
        settings_of(algorithm),
        replace(WORK, **work),
        config.Run(**{"dtype": "float64", "seed": 3, "device": "cpu", "processes": "auto"} | run),
        edge=EDGES.get(name),
    )


def settings_of(given):
    kind = config.algorithm_settings(given.get("name", "fedcpsl"))
    of_family = {"alpha_p": 0.5, "alpha_r": 0.2} if kind is config.Algorithm else {}
    return kind(**{"eta": 0.05} | of_family | given)


def group():
    """Runs that go together."""
    made = [setup("fedcpsl")]
    for numbers in ({"name": "apfl"}, {"beta": 0.3}):
        given = (config.Algorithm(**numbers), WORK, config.Run(dtype="float64", device="cpu", executor="vectorised"))
        made.append(prepare(small_federation(seed=1), small_model(seed=1), *given, beside=made[0]))
    return made


def ends():
    """The last state of every case, as named tensors."""
    found = {}
    for name in CASES:
        *_, last = simulate(setup(name))
        found |= {f"{name}.{field}": t for field, t in tensors(last).items()}
    *_, states = simulate_together(group())
    for i, state in enumerate(states):
        found |= {f"group{i}.{field}": t for field, t in tensors(state).items()}
    return {name: t.clone().contiguous() for name, t in found.items()}


def failing(requests, data):
    if dist.get_rank() == 1:
        raise RuntimeError("no room left")
    return local_rounds(requests, data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out, rank = Path(sys.argv[1]), dist.get_rank()
    for attempt in range(2):
        save_file(ends(), out / f"rank{rank}-{attempt}.safetensors")
    workers.local_rounds = failing
    try:
        list(simulate(setup("fedcpsl")))
    except (RunError, RuntimeError) as error:
        (out / f"error{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    ranks.leave()
    dist.destroy_process_group()
