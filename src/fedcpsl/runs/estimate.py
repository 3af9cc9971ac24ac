"""Estimates of a run's time, memory and disk: a few of its own rounds are timed with fewer steps, and discarded."""

import os
import shutil
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from fedcpsl.config import Config
from fedcpsl.evaluation import examiner
from fedcpsl.runs.checkpoint import KEPT
from fedcpsl.runs.experiment import Experiment, build
from fedcpsl.schedule import draw_active, draw_steps
from fedcpsl.simulation import Setup, State, simulate
from fedcpsl.simulation.store import free_bytes
from fedcpsl.simulation.tuning import slots_that_fit
from fedcpsl.theory import gap

TRIAL = 1.0  # seconds of rounds of one step, and again of rounds of several
MAX_ROUNDS = 200  # whose steps are counted; those of others are estimated from them
ENDS = 2.5  # seconds for imports before the first round, and for the report after the last
REPORT = 90 << 20  # bytes that drawing a report needs, about
CONTEXT = 500 << 20  # bytes of a GPU that a process uses before it computes anything, about
LESS, MORE = 0.75, 1.35  # minimum relative uncertainty of an estimate of seconds
MORE_MEMORY = 1.25
EXTRAPOLATED = 1.3  # times as uncertain if a complete round was too long to be timed


class Range(NamedTuple):
    """An estimate with its likely minimum and maximum."""

    low: float
    likely: float
    high: float


class Timed(NamedTuple):
    """Seconds of a trial's rounds."""

    first: float  # with the start of processes, compilation and capture
    rounds: list[float]  # the later ones
    first_evaluation: float
    evaluations: list[float]  # the later ones


class Estimate(NamedTuple):
    """What a run needs: time from the command to the prompt, memory, and disk space of its folder."""

    seconds: Range
    host_bytes: Range
    accelerator_bytes: Range | None
    folder_bytes: int
    building_seconds: float
    round_seconds: float
    evaluation_seconds: float
    rounds: int
    steps: int
    parameters: int
    lacks: list[str]  # resources that are too small, and what helps


class Pace(NamedTuple):
    """The speed of a run in seconds, from the fastest rounds of its trials."""

    begins: float  # before the first round: the first evaluation, start of processes, compilation and capture
    idle: float  # of a round without its steps
    step: float  # of one device
    evaluation: float
    slower: list[float]  # times of rounds, relative to the fastest
    extrapolated: bool  # whether a round has more steps than were timed


def estimate(config: Config) -> tuple[Experiment, Estimate]:
    """Build the experiment, time a few rounds, and extrapolate; nothing is written."""
    began = time.perf_counter()
    config, federation, setup, _ = build(config)
    building = time.perf_counter() - began
    machine = setup.machine._replace(slots=config.run.slots or slots_that_fit([setup]))
    setup = setup._replace(machine=machine)
    experiment = Experiment(replace(config, run=replace(config.run, slots=setup.machine.slots)), federation, setup)
    steps = steps_by_round(setup)
    pace, (host, accelerator) = measure_pace(setup, steps, gaps=config.run.gaps)
    rounds = setup.terms.total_rounds * pace.idle + sum(steps) * pace.step
    rounds += setup.terms.personal_rounds * pace.idle * (setup.terms.devices / _active(setup) - 1)
    evaluations = setup.terms.total_rounds // config.run.evaluate_every * pace.evaluation
    found = Estimate(
        seconds=_range(building + pace.begins + ENDS, rounds + evaluations, pace),
        host_bytes=_memory(host + REPORT + _later_state_bytes(setup)),
        accelerator_bytes=None if accelerator is None else _memory(accelerator),
        folder_bytes=folder_bytes(experiment),
        building_seconds=building,
        round_seconds=rounds / setup.terms.total_rounds,
        evaluation_seconds=pace.evaluation,
        rounds=setup.terms.total_rounds,
        steps=sum(steps),
        parameters=setup.terms.method.network.initial.numel(),
        lacks=[],
    )
    return experiment, found._replace(lacks=list(shortages(setup, found, own_bytes())))


def measure_pace(setup: Setup, steps: Sequence[int], *, gaps: bool) -> tuple[Pace, tuple[int, int | None]]:
    """Time rounds of one step and of more steps; returns the pace, and the memory on the host and the accelerator."""
    devices = _active(setup)
    mean = max(1, round(sum(steps[: setup.terms.rounds]) / setup.terms.rounds / devices))
    one, used = time_rounds(setup, 1, TRIAL, gaps=gaps)
    count, many = 1, one
    while (
        count < mean and min(many.rounds) < 2 * min(one.rounds) + TRIAL / 4
    ):  # else steps are too short to be measured
        count = min(mean, 16 * count)
        many, used = time_rounds(setup, count, TRIAL, gaps=None)
    step = max(min(many.rounds) - min(one.rounds), 0.0) / max(count - 1, 1) / devices
    pace = Pace(
        begins=one.first_evaluation + max(0.0, many.first - min(many.rounds)),
        idle=max(min(one.rounds) - step * devices, 0.0),
        step=step,
        evaluation=min(one.evaluations),
        slower=[seconds / min(timed.rounds) for timed in (one, many) for seconds in timed.rounds],
        extrapolated=count < mean,
    )
    return pace, used


def _active(setup: Setup) -> int:
    return setup.terms.devices if setup.terms.method.traits.everyone else setup.terms.work.active


def steps_by_round(setup: Setup) -> list[int]:
    """Return the local steps of every round; in a long run, some rounds represent their neighbours."""
    total = setup.terms.total_rounds
    counted = np.unique(np.linspace(0, total - 1, min(total, MAX_ROUNDS)).round().astype(np.int64))
    found = {int(r): _steps_of(setup, int(r)) for r in counted}
    nearest = counted[np.abs(np.arange(total)[:, None] - counted).argmin(1)] if len(counted) < total else counted
    return [found[int(r)] for r in nearest]


def _steps_of(setup: Setup, round: int) -> int:
    roster = setup.terms.roster(round)
    all_active = round >= setup.terms.rounds or setup.terms.method.traits.everyone
    active = roster.tolist() if all_active else draw_active(setup.terms.seed, round, roster, setup.terms.work.active)
    unlabelled = setup.terms.method.traits.unlabelled
    return sum(
        draw_steps(setup.terms.seed, round, device, setup.terms.sizes, setup.terms.work, unlabelled)
        for device in active
    )


def time_rounds(setup: Setup, steps: int, seconds: float, *, gaps: bool | None) -> tuple[Timed, tuple[int, int | None]]:
    """Time rounds of `steps` steps per device for about `seconds`.

    Rounds are evaluated too, with the gaps of the theory or without, unless `gaps` is None. Also returns the memory
    used on the host and on the accelerator.
    """
    work = setup.terms.work._replace(unit="steps", amount=steps)
    trial = setup._replace(terms=setup.terms._replace(work=work, rounds=max(setup.terms.rounds, 1_000_000)))
    examine, rounds, evaluations = examiner(), list[float](), list[float]()
    began = before = time.perf_counter()
    with closing(_synchronised(simulate(trial))) as states:
        for state in states:
            now = time.perf_counter()
            if state.round:
                rounds.append(now - before)
            if gaps is not None:
                examine([state]).read()
                if gaps:
                    gap(state)
                evaluations.append(time.perf_counter() - now)
            before = time.perf_counter()
            if state.round > 2 and before - began > seconds:
                break
        used = peak_bytes(), accelerator_bytes(setup.data.where)
    first, *later = evaluations or [0.0, 0.0]
    return Timed(rounds[0], rounds[1:], first, later), used


def _synchronised(states: Iterator[State]) -> Generator[State]:
    """Yield the states, each once everything is computed."""
    for state in states:
        if state.targets.is_cuda:
            torch.cuda.synchronize(state.targets.device)
        if state.finite_check:
            state.finite_check.raise_if_not_finite(0)
        yield state


def _range(begins: float, fastest: float, pace: Pace) -> Range:
    """Return the range around the seconds of the fastest run; as wide as trials differed, with a minimum width."""
    likely, slowest = begins + fastest * median(pace.slower), begins + fastest * float(np.quantile(pace.slower, 0.9))
    wide = EXTRAPOLATED if pace.extrapolated else 1.0
    return Range(LESS * (begins + fastest) / wide, likely, max(MORE * likely, slowest) * wide)


def _memory(likely: float) -> Range:
    return Range(likely / MORE_MEMORY, likely, likely * MORE_MEMORY)


def _later_state_bytes(setup: Setup) -> int:
    """Return the bytes that states in host memory will use once devices have been active."""
    if not setup.sparse or setup.machine.store != "host":
        return 0
    return int(setup.state_bytes * _ever_active(setup))


def _ever_active(setup: Setup) -> float:
    """Return the expected share of devices that are active at least once."""
    if setup.terms.method.traits.everyone or setup.terms.personal_rounds:
        return 1.0
    return float(1 - (1 - setup.terms.work.active / setup.terms.devices) ** setup.terms.rounds)


def folder_bytes(experiment: Experiment) -> int:
    """Return the maximum bytes of the run's folder: checkpoints, models, and states on disk."""
    setup, parameters = experiment.setup, experiment.setup.terms.method.network.initial
    share = _ever_active(setup) if setup.sparse else 1.0
    labels = 0 if setup.data.supply is not None else setup.data.one_hot.numel() * parameters.element_size()
    checkpoint = share * setup.state_bytes + labels + 2 * parameters.numel() * parameters.element_size()
    personal = setup.terms.devices * share if setup.terms.kept_method.traits.personal else 0
    models = (1 + personal) * parameters.numel() * parameters.element_size()
    on_disk = share * setup.state_bytes if setup.machine.store == "disk" else 0
    return int(
        KEPT * checkpoint + checkpoint + models + on_disk
    )  # a checkpoint is complete before an old one is deleted


def shortages(setup: Setup, found: Estimate, own: int) -> Iterator[str]:
    """Yield the resources that are too small, with what helps; `own` bytes of the memory in use are this process's."""
    free = free_bytes(torch.device("cpu")) + own
    if found.host_bytes.likely > free:
        yield f"host memory: {_gb(found.host_bytes.likely)} needed, {_gb(free)} free; use --store disk or --devices"
    where = setup.data.where
    if found.accelerator_bytes and where.type == "cuda":
        free = free_bytes(where) + torch.cuda.memory_reserved(where)
        if found.accelerator_bytes.likely > free + CONTEXT:
            need = _gb(found.accelerator_bytes.likely)
            yield f"GPU memory: {need} needed, {_gb(free)} free; use --store host or --set run.slots=1"
    with suppress(OSError):
        room = shutil.disk_usage(Path.cwd()).free
        if found.folder_bytes > room:
            need = _gb(found.folder_bytes)
            yield f"disk: {need} needed, {_gb(room)} free here; use --out elsewhere or --set run.keep=metrics"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def peak_bytes() -> int:
    """Return the maximum memory of this process so far, plus the private memory of its children now."""
    if sys.platform == "win32":
        return own_bytes()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) + sum(map(_private_bytes, _children()))


def own_bytes() -> int:
    """Return the resident memory of this process, on Linux."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _children() -> list[int]:
    """Return the process ids of the children, on Linux."""
    with suppress(OSError):
        return [int(p) for task in Path("/proc/self/task").glob("*/children") for p in task.read_text().split()]
    return []


def _private_bytes(process: int) -> int:
    """Return the private memory of a process, on Linux."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def accelerator_bytes(device: torch.device) -> int | None:
    """Return the maximum memory used on the accelerator so far; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) + CONTEXT if device.type == "cuda" else None
