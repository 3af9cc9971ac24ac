"""Running what a plan still lacks: runs that can go together go side by side."""

import shutil
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
from fedcpsl.runs.diary import Watch
from fedcpsl.runs.experiment import Member, Outcome, build, load_data, resume_together, start_together
from fedcpsl.simulation.memory import runs_that_fit
from fedcpsl.simulation.ranks import world


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
        while waiting := _left(planned):
            first = waiting[0]
            if source is None and same_data(first.case):
                source = load_data(plan.base.data)
            company, experiments = [first], [build(first.config, source if same_data(first.case) else None)]
            most = runs_that_fit(experiments[0].setup)
            alike = [run for run in waiting[1:] if _program(run) == _program(first)]
            for run in alike[: min(most, first.config.run.together or most) - 1]:
                company.append(run)
                experiments.append(build(run.config, source if same_data(run.case) else None, experiments))
            watches = announce(company, len(planned) - len(waiting))
            runs = zip(experiments, company, watches, strict=True)
            members = [Member(experiment, run.folder, watch) for experiment, run, watch in runs]
            if not _came_to_an_end(company, partial(start_together, members)):
                return False
    return True


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
    except torch.OutOfMemoryError as error:
        if len(company) == 1:
            raise
        for run in company:  # begun together they would go on together, and meet the same end
            shutil.rmtree(run.folder, ignore_errors=True)
        fix = f"give --set run.together={len(company) // 2}; runs that had come to their end are kept"
        raise RunError(f"{len(company)} runs side by side do not fit into the GPU's memory; {fix}") from error


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
