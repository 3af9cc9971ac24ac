"""How many runs and slots fit into memory at a time."""

from collections.abc import Sequence

import torch

from fedcpsl.schedule import draw_tasks
from fedcpsl.simulation.executors import local_rounds
from fedcpsl.simulation.round_request import RoundRequest, told_to, training_data_of
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.store import free_bytes
from fedcpsl.trees import bytes_of, map_tensors

SHARE = 0.6  # of the free memory that is planned with
COPIES = 3  # of what one step needs: as captured, as begun and as finished
CACHES = 16 << 20  # bytes that a core of a CPU works on without waiting for memory, about
STATES_OF_SLOT = 5  # two models, two momenta, a correction


def runs_that_fit(setup: Setup) -> int:
    """How many runs like this one can be held at a time."""
    if setup.supply is not None:
        return 1  # its samples are made anew for every round
    device_data = setup.device_data
    held = [
        device_data.source,
        device_data.one_hot,
        device_data.one_hot,
        device_data.truth,
        device_data.device,
        *device_data.test[:3],
        *device_data.validation[:3],
    ]
    kept = 0 if setup.sparse else setup.devices * setup.device_bytes
    return max(1, int(SHARE * free_bytes(device_data.where) / max(kept + sum(map(bytes_of, held)), 1)))


def slots_that_fit(setups: Sequence[Setup]) -> int:
    """How many devices of these runs go side by side: 0 for all, or as many as there is room for.

    On a GPU that is what one step's memory allows, measured; on a CPU what its caches hold of models and momenta.
    """
    setup = setups[0]
    if not setup.vectorised:
        return 0
    needed = sum(s.devices if s.method.traits.everyone or s.personal_rounds else s.work.active for s in setups)
    if setup.device_data.where.type == "cuda":
        largest = max(setups, key=lambda s: s.device_bytes)
        most = int(SHARE * free_bytes(setup.device_data.where) / (COPIES * max(bytes_per_slot(largest), 1)))
    else:
        needed = -(-needed // setup.processes)
        most = CACHES // (STATES_OF_SLOT * bytes_of(setup.method.network.initial))
    return 0 if needed <= max(1, most) else max(1, most)


def bytes_per_slot(setup: Setup) -> int:
    """What one more device adds to the peak of a step, measured."""
    peaks = []
    for count in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _take_one_step(setup, min(count, setup.devices))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return peaks[1] - peaks[0] if setup.devices > 1 else peaks[0]


def _take_one_step(setup: Setup, count: int) -> None:
    """One step of the first devices, thrown away."""
    one = setup.work._replace(unit="steps", amount=1)
    dropout, unlabelled = setup.method.network.has_dropout, setup.method.traits.unlabelled
    plan = draw_tasks(setup.seed, 0, range(count), setup.sizes, one, unlabelled=unlabelled, dropout=dropout)
    plan = [task._replace(relabels=False) for task in plan if task.steps]
    server = setup.first_server()
    kept, (broadcast, rows) = setup.first_device(server), told_to(setup, server, range(count))
    devices = map_tensors(lambda t: t.expand(count, *t.shape).clone(), kept)
    for _ in local_rounds(
        [RoundRequest(setup, plan, devices, broadcast, rows=rows)],
        training_data_of(setup.device_data, setup.device_data.one_hot),
    ):
        pass
