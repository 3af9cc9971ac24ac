"""How to compute here: as many runs and slots as fit into memory, and on a CPU the way that is fastest.

Before a long run `auto` times a few real steps of each way.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fedcpsl import settings
from fedcpsl.schedule import DeviceRound, draw_tasks
from fedcpsl.simulation.executors import local_rounds
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.round_request import RoundRequest, broadcasts_to, training_data_of
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.store import free_bytes
from fedcpsl.simulation.workers import choose_backend, one_thread
from fedcpsl.trees import bytes_of, map_tensors

SHARE = 0.6  # of the free memory that is planned with
COPIES = 3  # of what one step needs: as captured, as begun and as finished
CACHES = 16 << 20  # bytes that a core of a CPU works on without waiting for memory, about
STATES_OF_SLOT = 5  # two models, two momenta, a correction


def runs_that_fit(setup: Setup) -> int:
    """How many runs like this one can be held at a time."""
    if setup.data.supply is not None:
        return 1  # its samples are made for every round
    device_data = setup.data
    held = [
        device_data.source,
        device_data.one_hot,
        device_data.one_hot,
        device_data.truth,
        device_data.device,
        *device_data.test[:3],
        *device_data.validation[:3],
    ]
    kept = 0 if setup.sparse else setup.terms.devices * setup.terms.device_bytes
    return max(1, int(SHARE * free_bytes(device_data.where) / max(kept + sum(map(bytes_of, held)), 1)))


def slots_that_fit(setups: Sequence[Setup]) -> int:
    """How many devices of these runs go side by side: 0 for all, or as many as there is room for.

    On a GPU that is what one step's memory allows, measured; on a CPU what its caches hold of models and momenta.
    """
    setup = setups[0]
    if not setup.machine.vectorised:
        return 0
    needed = sum(
        terms.devices if terms.method.traits.everyone or terms.personal_rounds else terms.work.active
        for terms in (s.terms for s in setups)
    )
    if setup.data.where.type == "cuda":
        largest = max(setups, key=lambda s: s.terms.device_bytes)
        most = int(SHARE * free_bytes(setup.data.where) / (COPIES * max(bytes_per_slot(largest), 1)))
    else:
        needed = -(-needed // setup.machine.processes)
        most = CACHES // (STATES_OF_SLOT * bytes_of(setup.terms.method.network.initial))
    return 0 if needed <= max(1, most) else max(1, most)


def bytes_per_slot(setup: Setup) -> int:
    """What one more device adds to the peak of a step, measured."""
    peaks = []
    for count in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _take_one_step(setup, min(count, setup.terms.devices))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return peaks[1] - peaks[0] if setup.terms.devices > 1 else peaks[0]


def _take_one_step(setup: Setup, count: int) -> None:
    """One step of the first devices, thrown away."""
    one = setup.terms.work._replace(unit="steps", amount=1)
    drawn = setup.terms.method.draws | {"recordings": setup.data.recordings}
    plan = draw_tasks(setup.terms.seed, 0, range(count), setup.terms.sizes, one, **drawn)
    plan = [task._replace(relabels=False) for task in plan if task.steps]
    server = setup.terms.first_server()
    kept, (broadcast, rows) = setup.terms.first_device(server), broadcasts_to(setup, server, range(count))
    devices = map_tensors(lambda t: t.expand(count, *t.shape).clone(), kept)
    for _ in local_rounds(
        [RoundRequest(setup, plan, devices, broadcast, rows=rows)],
        training_data_of(setup.data, setup.data.one_hot),
    ):
        pass


LONG = 20.0  # seconds of all local steps on one core, about, from which on a run is worth timing
BUDGET = 2.0  # seconds after which no other layout is tried
FIRST, SECOND = 0.06, 0.15  # seconds of steps: of every layout, then of the best ones
FINALISTS, TURNS = 3, 2
CLEARLY = 1.15  # times as fast as the first candidate, to be taken instead: timings are never quite the same
SLOTS = (1, 2, 4)  # side by side, beside all
MANY = 8  # devices that a trial has, if a round has as many
ONE_STEP = 0.15  # seconds of one step of a trial's devices, from which on it has no more than those


class Layout(NamedTuple):
    """A way to compute: devices side by side or not, how many at most (0: all), and on how many processes."""

    executor: str
    slots: int
    processes: int

    def __str__(self) -> str:
        side_by_side = f", {self.slots or 'all'} side by side" if self.executor == "vectorised" else ""
        return f"{self.executor}{side_by_side}, {self.processes} process{'es' if self.processes > 1 else ''}"


Speed = Callable[[Setup, Layout, float], float]  # device-steps per second, measured for a number of seconds


def fastest(setup: Setup, run: settings.Run) -> Setup:
    """The setup as it is, or in the fastest layout, where that is left to us and the run is worth the search."""
    candidates = candidates_for(setup, run)
    if len(candidates) < 2 or seconds_on_one_core(setup) < LONG:
        return setup
    best = quickest(setup, candidates, device_steps_per_second)
    if best.executor == "vectorised" and not best.slots:
        best = best._replace(slots=setup.terms.work.active)  # as many as were timed, also in a group of runs
    return laid_out(setup, best)


def candidates_for(setup: Setup, run: settings.Run) -> list[Layout]:
    """The layouts that the settings leave open, the one that would be taken untimed first; that alone off a CPU."""
    untimed = Layout(setup.machine.executor, setup.machine.slots, setup.machine.processes)
    open_ends = settings.AUTO in (run.executor, run.processes)
    if not open_ends or setup.data.where.type != "cpu" or world()[1] > 1 or setup.data.supply is not None:
        return [untimed]
    processes = (
        list(dict.fromkeys([setup.machine.processes, 1]))
        if run.processes == settings.AUTO
        else [setup.machine.processes]
    )
    executors = ["sequential", "vectorised"] if run.executor == settings.AUTO else [run.executor]
    found = [untimed]
    for count in processes:
        share = -(-setup.terms.work.active // count)  # of each process
        as_all = 0 < share <= setup.machine.slots  # then the slots hold all devices of a process already
        wide = [n for n in (0, *SLOTS) if n < share and (n or not as_all)] if not run.slots else [run.slots]
        found += [
            Layout(executor, slots, count)
            for executor in executors
            for slots in (wide if executor == "vectorised" else [run.slots])
        ]
    return list(dict.fromkeys(found))


def seconds_on_one_core(setup: Setup) -> float:
    """Of all local steps, about."""
    some = _plan(setup, min(setup.terms.work.active, 10), None)
    steps = sum(task.steps for task in some) / max(1, len(some))
    devices = setup.terms.rounds * setup.terms.work.active + setup.terms.personal_rounds * setup.terms.devices
    return seconds_of_step(setup) * steps * devices


def seconds_of_step(setup: Setup) -> float:
    """Of one device on one core: three passes (there and, twice as long, back) of every model over a minibatch."""
    network, inputs = setup.terms.method.network, setup.data.inputs
    x = inputs.take(setup.data.source[:1].expand(sum(setup.terms.batch_widths)))
    models = setup.terms.kept_method.traits.models
    passes = []
    with one_thread(), torch.no_grad():
        for _ in range(3):  # the first one warms up
            began = time.perf_counter()
            network.log_probabilities(network.initial, x)
            passes.append(time.perf_counter() - began)
    return 3 * min(passes) * models


def quickest(setup: Setup, candidates: Sequence[Layout], speed: Speed) -> Layout:
    """The layout with most device-steps per second: all are tried for a moment, the best of them for longer.

    The first candidate stays unless another is clearly faster, so that noise does not choose.
    """
    began, tried = time.monotonic(), dict[Layout, float]()
    for layout in candidates:
        if not tried or time.monotonic() - began < BUDGET:
            tried[layout] = speed(setup, layout, FIRST)
    first, *finalists = sorted(tried, key=lambda layout: (layout != candidates[0], -tried[layout]))[:FINALISTS]
    speeds = dict(tried)
    if time.monotonic() - began < BUDGET:
        turns = [[speed(setup, layout, SECOND) for layout in (first, *finalists)] for _ in range(TURNS)]
        speeds = dict(zip((first, *finalists), map(max, zip(*turns, strict=True)), strict=True))
    best = max(speeds, key=lambda layout: speeds[layout] * (CLEARLY if layout == first else 1))
    timings = "; ".join(f"{layout}: {rate:.4g}" for layout, rate in (tried | speeds).items())
    logging.getLogger("fedcpsl").info("auto: %s; device-steps per second: %s", best, timings)
    return best


def laid_out(setup: Setup, layout: Layout) -> Setup:
    """The setup in a given layout."""
    vectorised = layout.executor == "vectorised"
    setup.terms.method.network.batched = vectorised
    machine = setup.machine._replace(vectorised=vectorised, slots=layout.slots, processes=layout.processes)
    return setup._replace(machine=machine)


def device_steps_per_second(setup: Setup, layout: Layout, seconds: float) -> float:
    """Measured with the devices of one round and the processes themselves, on states that are thrown away."""
    before = setup.terms.method.network.batched
    trial = laid_out(setup, layout)
    count = min(setup.terms.work.active, max(MANY, int(ONE_STEP / seconds_of_step(setup))))
    server = setup.terms.first_server()
    broadcast, rows = broadcasts_to(setup, server, range(count))
    devices = map_tensors(lambda t: t.expand(count, *t.shape).clone(), setup.terms.first_device(server))
    request = RoundRequest(trial, (), devices, broadcast, rows=rows)
    steps, rounds = 1, list[tuple[int, float]]()
    try:
        with choose_backend([request], training_data_of(trial.data, trial.data.one_hot.clone())) as (
            own,
            data,
            run,
        ):
            for share in (0.2, 1.0, 0.0):  # the first round warms up; each says how many steps the next one takes
                plan = _plan(trial, count, steps)
                began = time.perf_counter()
                for _ in run([request._replace(plan=plan, devices=own[0])], data):
                    pass
                rounds.append((sum(task.steps for task in plan), time.perf_counter() - began))
                steps = max(1, int(share * seconds / rounds[-1][1] * steps))
    finally:
        setup.terms.method.network.batched = before
    return _rate(*rounds[1:])


def _rate(short: tuple[int, float], long: tuple[int, float]) -> float:
    """Steps per second from the steps and seconds of two rounds, without what a round takes whatever its steps."""
    more, later = long[0] - short[0], long[1] - short[1]
    return more / later if later > 0 and 2 * more > long[0] else max(short[0] / short[1], long[0] / long[1])


def _plan(setup: Setup, count: int, steps: int | None) -> list[DeviceRound]:
    """Tasks of the first devices, of a given number of steps or of a round's; none renews its labels."""
    work = setup.terms.work if steps is None else setup.terms.work._replace(unit="steps", amount=steps)
    drawn = setup.terms.method.draws | {"recordings": setup.data.recordings}
    plan = draw_tasks(setup.terms.seed, 0, range(count), setup.terms.sizes, work, **drawn)
    return [task._replace(relabels=False) for task in plan if task.steps]
