"""Running what a plan still lacks: runs that can go together go side by side."""

import gc
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcpsl.config import Config, with_settings
from fedcpsl.data.federation import Source
from fedcpsl.errors import RunError
from fedcpsl.runs import folder as files
from fedcpsl.runs.comparison import Case, Plan, run_folder, same_data
from fedcpsl.runs.experiment import Member, Outcome, build, load_data, resume_together, start_together
from fedcpsl.runs.metrics_writer import Watch
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.tuning import runs_that_fit


class Planned(NamedTuple):
    """One run of a plan that is not finished."""

    case: Case
    seed: int
    folder: Path
    config: Config


Announce = Callable[[Sequence[Planned], int], Sequence[Watch]]  # runs that go together, and how many were done before


def run_all(folder: Path, plan: Plan, announce: Announce) -> bool:
    """Run, or go on with, everything that is not finished yet; False where a run was asked to stop.

    A run that fails is marked so and left; the others of its company begin anew without it.
    """
    with files.locked(folder):
        planned = [_planned(folder, plan, case, seed) for seed in plan.seeds for case in plan.cases]
        source: Source | None = None
        for begun in begun_together(_left(planned)):
            shared = all(same_data(run.case) for run in begun)
            source = source or (load_data(plan.base.data) if shared else None)
            watches, given = announce(begun, len(planned) - len(_left(planned))), source if shared else None
            if not _came_to_an_end(begun, partial(resume_together, [run.folder for run in begun], watches, given)):
                return False
        most = sys.maxsize
        while waiting := _left(planned):
            if source is None and same_data(waiting[0].case):
                source = load_data(plan.base.data)
            done = len(planned) - len(waiting)
            try:
                if not _run_company(waiting, most, source, announce, done):
                    return False
            except TooManyError as error:
                most = error.runs // 2
                reason = f"{error.runs} runs side by side do not fit into the GPU's memory"
                print(f"fedcpsl: {reason}; they begin anew, {most} at a time", file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()
    return True


class TooManyError(Exception):
    """So many runs did not fit into memory side by side."""

    def __init__(self, runs: int) -> None:
        self.runs = runs


def _run_company(waiting: Sequence[Planned], most: int, source: Source | None, announce: Announce, done: int) -> bool:
    """Run the first that waits and what can go beside it; False where they were asked to stop before the end."""
    first = waiting[0]
    company, experiments = [first], [build(first.config, source if same_data(first.case) else None)]
    most = min(most, runs_that_fit(experiments[0].setup), first.config.run.together or most)
    for run in [run for run in waiting[1:] if _program(run) == _program(first)][: most - 1]:
        company.append(run)
        experiments.append(build(run.config, source if same_data(run.case) else None, experiments))
    runs = zip(experiments, company, announce(company, done), strict=True)
    members = [Member(experiment, run.folder, watch) for experiment, run, watch in runs]
    try:
        return _came_to_an_end(company, partial(start_together, members))
    except torch.OutOfMemoryError:
        if len(company) == 1 or world()[1] > 1:
            raise
    for run in _left(company):
        shutil.rmtree(run.folder, ignore_errors=True)
    raise TooManyError(len(company))


def _left(planned: Sequence[Planned]) -> list[Planned]:
    return [run for run in planned if not (files.is_finished(run.folder) or files.failure(run.folder))]


def _came_to_an_end(company: Sequence[Planned], begin: Callable[[], Sequence[Outcome]]) -> bool:
    """Run a company; False where it was asked to stop before the end."""
    try:
        return all(outcome.finished for outcome in begin())
    except RunError as error:
        if error.run is None or world()[1] > 1:
            raise
        files.mark_failed(company[error.run].folder, str(error.__cause__ or error))
        for other in (run for i, run in enumerate(company) if i != error.run):
            shutil.rmtree(other.folder)
        return True


def _planned(folder: Path, plan: Plan, case: Case, seed: int) -> Planned:
    config = with_settings(plan.base, case.settings | {"run.seed": seed})
    return Planned(case, seed, run_folder(folder, case, seed), config)


def _program(run: Planned) -> Any:
    """Equal for runs that can go together: the same model, kind of data, rounds and way to compute."""
    config = run.config
    reads = asdict(config.data) if not same_data(run.case) else None
    rounds = config.work.rounds + config.work.personal_rounds
    return asdict(config.model), reads, rounds, asdict(replace(config.run, seed=0))


def begun_together(left: Sequence[Planned]) -> list[list[Planned]]:
    """The companies of unfinished runs that were begun; what was killed before it began is cleared away."""
    companies: dict[tuple[str, ...], list[Planned]] = {}
    for run in left:
        if run.folder.exists() and not (run.folder / "config.toml").exists():
            shutil.rmtree(run.folder)
        elif run.folder.exists():
            companies.setdefault(tuple(files.company_of(run.folder)), []).append(run)
    for names, runs in list(companies.items()):
        missing = [name for name in names if not (runs[0].folder.parent / name).exists()]
        if missing and not any((run.folder / "metrics.jsonl").exists() for run in runs):
            for run in companies.pop(names):  # killed while the company's folders were made
                shutil.rmtree(run.folder)
    return list(companies.values())
