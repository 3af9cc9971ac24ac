"""What a run will take, before it starts: a few of its own rounds are timed, in less work, and thrown away."""

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
MOST_ROUNDS = 200  # whose steps are counted; from those, more are guessed
ENDS = 2.5  # seconds for imports before the first round, and for the report after the last
REPORT = 90 << 20  # bytes that drawing a report takes, about
CONTEXT = 500 << 20  # bytes of a GPU that a process takes before it computes anything, about
LESS, MORE = 0.75, 1.35  # how far off a guess of seconds may well be, however even the trial was
MORE_MEMORY = 1.25
GUESSED = 1.3  # times as uncertain where a whole round was too long to be tried


class Range(NamedTuple):
    """A guess, and what it will hardly be below and above."""

    low: float
    likely: float
    high: float


class Timed(NamedTuple):
    """Seconds of a trial's rounds."""

    first: float  # with the start of processes, and whatever is compiled or captured
    rounds: list[float]  # the later ones
    first_evaluation: float
    evaluations: list[float]  # the later ones


class Estimate(NamedTuple):
    """What a run takes: time from the command to the prompt, memory, and its folder."""

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
    lacks: list[str]  # what the run would not fit into, and what helps


class Pace(NamedTuple):
    """What trials say of a run, in seconds, by their quickest rounds."""

    begins: float  # before the first round: the first evaluation, and what is started, compiled or captured
    idle: float  # of a round, whatever its steps
    step: float  # of one device
    evaluation: float
    slower: list[float]  # how many times as long as the quickest other rounds took
    guessed: bool  # whether a round has more steps than were tried


def estimate(config: Config) -> tuple[Experiment, Estimate]:
    """Build the experiment, try a few rounds, and work out the rest; nothing is written."""
    began = time.perf_counter()
    config, federation, setup = build(config)
    building = time.perf_counter() - began
    setup = setup._replace(slots=config.run.slots or slots_that_fit([setup]))
    experiment = Experiment(replace(config, run=replace(config.run, slots=setup.slots)), federation, setup)
    steps = steps_by_round(setup)
    pace, (host, accelerator) = paced(setup, steps, gaps=config.run.gaps)
    rounds = setup.total_rounds * pace.idle + sum(steps) * pace.step
    rounds += setup.personal_rounds * pace.idle * (setup.devices / _active(setup) - 1)
    evaluations = setup.total_rounds // config.run.evaluate_every * pace.evaluation
    found = Estimate(
        seconds=_range(building + pace.begins + ENDS, rounds + evaluations, pace),
        host_bytes=_memory(host + REPORT + _grows(setup)),
        accelerator_bytes=None if accelerator is None else _memory(accelerator),
        folder_bytes=folder_bytes(experiment),
        building_seconds=building,
        round_seconds=rounds / setup.total_rounds,
        evaluation_seconds=pace.evaluation,
        rounds=setup.total_rounds,
        steps=sum(steps),
        parameters=setup.method.network.initial.numel(),
        lacks=[],
    )
    return experiment, found._replace(lacks=list(lacks(setup, found, own_bytes())))


def paced(setup: Setup, steps: Sequence[int], *, gaps: bool) -> tuple[Pace, tuple[int, int | None]]:
    """How fast rounds go, from some of one step and some of more; and the memory they took."""
    devices = _active(setup)
    mean = max(1, round(sum(steps[: setup.rounds]) / setup.rounds / devices))
    one, used = tried(setup, 1, TRIAL, gaps=gaps)
    count, many = 1, one
    while count < mean and min(many.rounds) < 2 * min(one.rounds) + TRIAL / 4:  # else steps drown in the rest
        count = min(mean, 16 * count)
        many, used = tried(setup, count, TRIAL, gaps=None)
    step = max(min(many.rounds) - min(one.rounds), 0.0) / max(count - 1, 1) / devices
    pace = Pace(
        begins=one.first_evaluation + max(0.0, many.first - min(many.rounds)),
        idle=max(min(one.rounds) - step * devices, 0.0),
        step=step,
        evaluation=min(one.evaluations),
        slower=[seconds / min(timed.rounds) for timed in (one, many) for seconds in timed.rounds],
        guessed=count < mean,
    )
    return pace, used


def _active(setup: Setup) -> int:
    return setup.devices if setup.method.traits.everyone else setup.work.active


def steps_by_round(setup: Setup) -> list[int]:
    """The local steps of every round; of a long run, those of some rounds stand for their neighbours'."""
    total = setup.total_rounds
    counted = np.unique(np.linspace(0, total - 1, min(total, MOST_ROUNDS)).round().astype(np.int64))
    found = {int(r): _steps_of(setup, int(r)) for r in counted}
    nearest = counted[np.abs(np.arange(total)[:, None] - counted).argmin(1)] if len(counted) < total else counted
    return [found[int(r)] for r in nearest]


def _steps_of(setup: Setup, round: int) -> int:
    roster = setup.roster(round)
    everybody = round >= setup.rounds or setup.method.traits.everyone
    active = roster.tolist() if everybody else draw_active(setup.seed, round, roster, setup.work.active)
    unlabelled = setup.method.traits.unlabelled
    return sum(draw_steps(setup.seed, round, device, setup.sizes, setup.work, unlabelled) for device in active)


def tried(setup: Setup, steps: int, seconds: float, *, gaps: bool | None) -> tuple[Timed, tuple[int, int | None]]:
    """Rounds of so many steps a device, for about so long; and the memory they took, on the host and beside it.

    They are evaluated too, with the gaps of the theory or without, unless `gaps` is None.
    """
    work = setup.work._replace(unit="steps", amount=steps)
    trial = setup._replace(work=work, rounds=max(setup.rounds, 1_000_000))
    examine, rounds, evaluations = examiner(), list[float](), list[float]()
    began = before = time.perf_counter()
    with closing(_settled(simulate(trial))) as states:
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
        used = peak_bytes(), accelerator_bytes(setup.device_data.where)
    first, *later = evaluations or [0.0, 0.0]
    return Timed(rounds[0], rounds[1:], first, later), used


def _settled(states: Iterator[State]) -> Generator[State]:
    """The states, each once everything has been computed."""
    for state in states:
        if state.targets.is_cuda:
            torch.cuda.synchronize(state.targets.device)
        if state.finite_check:
            state.finite_check.raise_if_not_finite(0)
        yield state


def _range(begins: float, quick: float, pace: Pace) -> Range:
    """From the seconds of a quick run; as wide as trials differed, and never narrow."""
    likely, slowest = begins + quick * median(pace.slower), begins + quick * float(np.quantile(pace.slower, 0.9))
    wide = GUESSED if pace.guessed else 1.0
    return Range(LESS * (begins + quick) / wide, likely, max(MORE * likely, slowest) * wide)


def _memory(likely: float) -> Range:
    return Range(likely / MORE_MEMORY, likely, likely * MORE_MEMORY)


def _grows(setup: Setup) -> int:
    """What states in host memory will take once devices have been active."""
    if not setup.sparse or setup.store != "host":
        return 0
    return int(setup.state_bytes * _ever_active(setup))


def _ever_active(setup: Setup) -> float:
    """The share of devices that take part at least once, on average."""
    if setup.method.traits.everyone or setup.personal_rounds:
        return 1.0
    return float(1 - (1 - setup.work.active / setup.devices) ** setup.rounds)


def folder_bytes(experiment: Experiment) -> int:
    """What the run's folder takes at its largest: checkpoints, models, and states that live on disk."""
    setup, parameters = experiment.setup, experiment.setup.method.network.initial
    share = _ever_active(setup) if setup.sparse else 1.0
    labels = 0 if setup.supply is not None else setup.device_data.one_hot.numel() * parameters.element_size()
    checkpoint = share * setup.state_bytes + labels + 2 * parameters.numel() * parameters.element_size()
    personal = setup.devices * share if setup.kept_method.traits.personal else 0
    models = (1 + personal) * parameters.numel() * parameters.element_size()
    on_disk = share * setup.state_bytes if setup.store == "disk" else 0
    return int(KEPT * checkpoint + checkpoint + models + on_disk)  # a checkpoint is whole before an old one goes


def lacks(setup: Setup, found: Estimate, own: int) -> Iterator[str]:
    """Where the run would not fit, with what helps; `own` bytes of the memory in use are this process's."""
    free = free_bytes(torch.device("cpu")) + own
    if found.host_bytes.likely > free:
        yield f"host memory: {_gb(found.host_bytes.likely)} needed, {_gb(free)} free; use --store disk or --devices"
    where = setup.device_data.where
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
    """The most that this process has used so far, and what its children have of their own now."""
    if sys.platform == "win32":
        return own_bytes()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) + sum(map(_private_bytes, _children()))


def own_bytes() -> int:
    """What this process holds now, on Linux."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _children() -> list[int]:
    """The processes that this one has started, on Linux."""
    with suppress(OSError):
        return [int(p) for task in Path("/proc/self/task").glob("*/children") for p in task.read_text().split()]
    return []


def _private_bytes(process: int) -> int:
    """What a process shares with nobody, on Linux."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def accelerator_bytes(device: torch.device) -> int | None:
    """The most that was held on the accelerator so far; None on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + CONTEXT
    return int(torch.mps.driver_allocated_memory()) if device.type == "mps" else None
