"""A step size for data that nobody has tuned on: short runs with some of the labels held back, which then judge."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedcpsl import config as settings
from fedcpsl.algorithms import traits_of
from fedcpsl.data.federation import Federation
from fedcpsl.data.notes import track
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.split import LABELLED, SERVER, TEST, VALIDATION
from fedcpsl.errors import InputError
from fedcpsl.evaluation import predict
from fedcpsl.problem import Costs
from fedcpsl.schedule import Sizes, draw_steps, stream, work_of
from fedcpsl.settings import SEARCH
from fedcpsl.simulation import Setup, State, simulate_together
from fedcpsl.simulation import prepare as prepare_with_step_size
from fedcpsl.simulation.setup import choose_device, choose_eta
from fedcpsl.simulation.state import FiniteCheck
from fedcpsl.simulation.store import free_bytes
from fedcpsl.simulation.tuning import SHARE, slots_that_fit

CANDIDATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
NEARLY, WORSE = 1.25, 2.0  # times the least loss: good enough; too bad for a margin, and not to try larger ones
DEVICES = 20  # that take part in a search: the first ones
FEWEST_ROUNDS = 5
STEPS = 600  # of a candidate, where more rounds are needed for so many
HELD_BACK = 5  # one of so many labels
COPIES = 3  # of a search's samples: as they are, as numbers, and joined with those of others


class NothingToHoldBackError(InputError):
    """No device has two labels."""


class StepSizeSearch(NamedTuple):
    """What a search found, and what it cost; no losses where there was nothing to search with."""

    eta: float
    losses: dict[float, float]  # of candidates on the labels held back; infinite where one diverged or was not tried
    rounds: int  # of each candidate
    steps: int  # local steps of all candidates
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """What a run's manifest keeps."""
        losses = {f"{eta:g}": loss if isfinite(loss) else None for eta, loss in self.losses.items()}
        return {"eta": self.eta, "losses": losses, "rounds": self.rounds, "steps": self.steps, "seconds": self.seconds}

    def __str__(self) -> str:
        if not self.losses:
            return f"step size {self.eta:g}, not searched: no device has two labels, one of which could be held back"
        return (
            f"step size {self.eta:g}, found in {self.seconds:.1f} s: candidates from {CANDIDATES[0]:g} up, "
            f"{self.rounds} rounds each, {self.steps} local steps in all"
        )


def prepare(
    federation: Federation | OnDemand,
    model: nn.Module,
    algorithm: Any = None,
    work: settings.Work | None = None,
    run: settings.Run | None = None,
    costs: Costs | None = None,
    beside: Setup | None = None,
    edge: settings.Edge | None = None,
) -> Setup:
    """Prepare a run as `fedcpsl.simulation.prepare` does, with fedcpsl2 where no algorithm is given.

    Where `eta` is "search", as it is by default in fedcpsl2, the step size is searched first, by short runs.
    """
    given = work or settings.Work(), run or settings.Run()
    algorithm = settings.new_config({}).algorithm if algorithm is None else algorithm
    if not hasattr(algorithm, "eta") or not hasattr(algorithm, "name"):
        raise InputError(
            f"the third argument is {algorithm!r}; give the settings of an algorithm, such as "
            'Algorithm(name="fedavg"), and others by name: work=Work(...), run=Run(...)'
        )
    algorithm = with_step_size(federation, model, algorithm, *given, costs)
    return prepare_with_step_size(federation, model, algorithm, work, run, costs, beside, edge)


def with_step_size(
    federation: Federation | OnDemand,
    model: nn.Module,
    algorithm: Any,
    work: settings.Work,
    run: settings.Run,
    costs: Costs | None = None,
) -> Any:
    """The settings of an algorithm with the step size that a search finds, where it is to be searched."""
    if algorithm.eta != SEARCH:
        return algorithm
    return replace(algorithm, eta=search_eta(federation, model, algorithm, work, run, costs).eta)


class SearchJob(NamedTuple):
    """A run whose step size is to be searched."""

    federation: Federation | OnDemand
    model: nn.Module
    algorithm: Any
    work: settings.Work
    run: settings.Run
    costs: Costs | None = None


def search_eta(
    federation: Federation | OnDemand,
    model: nn.Module,
    algorithm: Any,
    work: settings.Work,
    run: settings.Run,
    costs: Costs | None = None,
) -> StepSizeSearch:
    """Try step sizes in short runs of the first devices, and choose by the likelihood of labels held back."""
    return search_etas([SearchJob(federation, model, algorithm, work, run, costs)])[0]


def search_etas(jobs: Sequence[SearchJob]) -> list[StepSizeSearch]:
    """Search the step sizes of runs that can be simulated together: a candidate's short runs are one program."""
    most = _jobs_at_a_time(jobs) if jobs else 1
    pieces = [jobs[first : first + most] for first in range(0, len(jobs), most)]
    return [found for piece in pieces for found in _search_side_by_side(piece)]


def _jobs_at_a_time(jobs: Sequence[SearchJob]) -> int:
    """How many searches memory has room for."""
    most = max(
        job.federation.x.size // job.federation.devices * min(DEVICES, job.federation.devices)
        if isinstance(job.federation, Federation)
        else sys.maxsize
        for job in jobs
    )
    needed = COPIES * most * (8 if any(job.run.dtype == "float64" for job in jobs) else 4)
    return max(1, int(SHARE * free_bytes(choose_device(jobs[0].run.device)) / needed))


def _search_side_by_side(jobs: Sequence[SearchJob]) -> list[StepSizeSearch]:
    began, short = time.monotonic(), _short_jobs(jobs)
    losses, steps = [dict.fromkeys(CANDIDATES, float("inf")) for _ in jobs], [0] * len(jobs)
    going, setups = list(short), dict[int, Setup]()
    for eta in CANDIDATES:
        for i in going:
            setups[i] = _prepared(short[i], eta, setups.get(i) or _neighbour(short[i], setups))
        for i, (loss, made) in zip(going, _short_runs([setups[i] for i in going], eta), strict=True):
            losses[i][eta] = loss
            steps[i] += made
        going = [i for i in going if is_larger_worth_trying(losses[i], eta)]
    seconds = (time.monotonic() - began) / len(jobs)  # each one's share
    return [
        StepSizeSearch(chosen_eta(losses[i]), losses[i], short[i].work.rounds, steps[i], seconds)
        if i in short
        else StepSizeSearch(choose_eta(settings.AUTO, "", job.work.unit), {}, 0, 0, seconds)
        for i, job in enumerate(jobs)
    ]


def _short_jobs(jobs: Sequence[SearchJob]) -> dict[int, SearchJob]:
    """The short runs of searches, by number, without a step size yet; not of those that can hold no label back."""
    held: dict[tuple[int, int], Federation | None] = {}
    short: dict[int, SearchJob] = {}
    for i, job in enumerate(jobs):
        split = id(job.federation), job.run.seed
        if split not in held:
            held[split] = _held_back(job.federation, job.run.seed)
        if federation := held[split]:
            short[i] = _short_job(job, federation)
    return short


def _short_job(job: SearchJob, federation: Federation) -> SearchJob:
    work = job.work
    active = min(4 if work.active == settings.AUTO else int(work.active), federation.devices)
    rounds = short_rounds(federation.sizes, job.algorithm, work, active)
    work = replace(work, rounds=rounds, active=active, personal_rounds=0, two_phase=False, joiners=0, loss_rate=0.0)
    return job._replace(federation=federation, work=work, run=replace(job.run, store="accelerator", gaps=False))


def _held_back(federation: Federation | OnDemand, seed: int) -> Federation | None:
    try:
        return labels_held_back(federation, seed)
    except NothingToHoldBackError:
        return None


def _neighbour(job: SearchJob, setups: Mapping[int, Setup]) -> Setup | None:
    """A setup whose samples or network can be shared."""
    same = (setup for setup in setups.values() if setup.data.made_of is job.federation)
    return next(same, next(iter(setups.values()), None))


def _prepared(job: SearchJob, eta: float, beside: Setup | None) -> Setup:
    algorithm = replace(job.algorithm, eta=eta)
    setup = prepare_with_step_size(job.federation, job.model, algorithm, job.work, job.run, job.costs, beside)
    return setup._replace(terms=setup.terms._replace(method=setup.terms.method.one_way))


def _short_runs(setups: Sequence[Setup], eta: float) -> list[tuple[float, int]]:
    """The loss of every run on the labels held back, infinite where it diverges, and the steps that it made."""
    if not setups:
        return []
    if len(setups) > 1 and not setups[0].machine.slots:
        slots = slots_that_fit(setups)
        setups = [setup._replace(machine=setup.machine._replace(slots=slots)) for setup in setups]
    checks: list[list[FiniteCheck | None]] = []
    rounds = simulate_together(setups, on_ranks=False, may_diverge=True)
    most = max(setup.terms.total_rounds for setup in setups)
    for states in track(rounds, f"searching a step size: {eta:g}", total=most + 1):
        checks.append([state.finite_check for state in states])
    return [
        (float("inf") if any(check.problem for check in own if check) else held_out_loss(state), state.steps)
        for state, own in zip(states, zip(*checks, strict=True), strict=True)
    ]


def try_candidates(loss_with: Callable[[float], float]) -> dict[float, float]:
    """The losses of candidates, tried from the smallest up; infinite where one diverges, and for all that follow one
    that is much worse than the best."""
    losses = dict.fromkeys(CANDIDATES, float("inf"))
    for eta in CANDIDATES:
        losses[eta] = loss_with(eta)
        if not is_larger_worth_trying(losses, eta):
            break
    return losses


def is_larger_worth_trying(losses: Mapping[float, float], eta: float) -> bool:
    """Whether a candidate neither diverged nor is much worse than the best so far."""
    return isfinite(losses[eta]) and losses[eta] <= WORSE * min(losses.values())


def chosen_eta(losses: Mapping[float, float]) -> float:
    """The largest candidate that is nearly as good as the best, where the next larger one is not much worse.

    What a short run bears can be too much for a long one: that is the margin. Where it would leave only step sizes that
    are much worse than the best, it is half as wide: the geometric mean of the best and the candidate below it.
    """
    best = min(losses.values())
    if not isfinite(best):
        raise InputError(f"algorithm.eta: no step size of {CANDIDATES} converges on this data; give one")
    safe = [eta for eta, larger in pairwise(CANDIDATES) if losses[larger] <= WORSE * best] or CANDIDATES[:1]
    least = min(losses[eta] for eta in safe)
    if least > WORSE * best:
        top = min(CANDIDATES, key=lambda eta: losses[eta])
        below = CANDIDATES[max(CANDIDATES.index(top) - 1, 0)]
        return round_to(2, (top * below) ** 0.5)
    return max(eta for eta in safe if losses[eta] <= NEARLY * least)


def round_to(digits: int, number: float) -> float:
    """A number with some significant digits."""
    return float(f"{number:.{digits}g}")


def short_rounds(sizes: Sizes, algorithm: Any, work: settings.Work, active: int) -> int:
    """Rounds that give a candidate some steps: few where visits are long, all of the run's where they are short."""
    traits = traits_of(algorithm.name)
    drawn = work_of(work, active, alone=traits.alone)
    devices = range(len(sizes.labelled))
    steps = float(np.mean([draw_steps(0, 0, i, sizes, drawn, traits.unlabelled) for i in devices]))
    return min(work.rounds, max(FEWEST_ROUNDS, ceil(STEPS / max(active * steps, 1))))


def held_out_loss(state: State) -> float:
    """The mean of -log h_p(x)_y over all samples held back."""
    tests = state.setup.data.test
    log_h = predict(state, tests).personal
    loss = float(-log_h.gather(1, tests.y[:, None]).double().mean())
    return loss if np.isfinite(loss) else float("inf")


def labels_held_back(federation: Federation | OnDemand, seed: int) -> Federation:
    """The first devices with a fifth of their labelled samples as tests, and what the server holds; their own tests are
    left out."""
    chosen = range(min(DEVICES, federation.devices))
    whole = federation.federation_of(chosen) if isinstance(federation, OnDemand) else federation
    device, role = np.where(whole.role == SERVER, 0, whole.device), whole.role.copy()
    rng = stream(seed, "step_size")
    judged = np.concatenate([_some(np.flatnonzero((device == i) & (role == LABELLED)), rng) for i in chosen])
    if not len(judged):
        raise NothingToHoldBackError('algorithm.eta = "search": needs a device with two labels or more; give a number')
    role[(whole.role == TEST) | (whole.role == VALIDATION)] = -1
    role[judged] = TEST
    kept = np.flatnonzero((role >= 0) & (device < len(chosen)))
    return replace(
        whole,
        x=whole.x[kept],
        y=whole.y[kept],
        device=device[kept],
        role=role[kept],
        names=whole.names[: len(chosen)],
        recording=None if whole.recording is None else whole.recording[kept],
    )


def _some(rows: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A fifth of some samples, at least one where there are two."""
    count = max(len(rows) // HELD_BACK, min(len(rows) // 2, 1))
    return rng.permutation(rows)[:count]
