"""Running the unfinished runs of a plan, in groups of runs side by side."""

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
from fedcpsl.errors import RefusedError, RunError
from fedcpsl.runs import folder as run_folders
from fedcpsl.runs.comparison import Case, Plan, run_folder
from fedcpsl.runs.experiment import (
    Experiment,
    GroupMember,
    Loaded,
    Outcome,
    Watch,
    build,
    load_data,
    load_run,
    resume_together,
    search_step_sizes,
    start_together,
    without_search,
)
from fedcpsl.settings import SEARCH
from fedcpsl.simulation import prepare
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.tuning import runs_that_fit
from fedcpsl.step_size import StepSizeSearch
from fedcpsl.storage import locked


class Planned(NamedTuple):
    """One run of a plan that is not finished."""

    case: Case
    seed: int
    folder: Path
    config: Config
    same_data: bool  # whether it uses the samples that the plan's base config names


Announce = Callable[[Sequence[Planned], int], Sequence[Watch]]  # a group of runs, and the number of runs done before


def run_all(folder: Path, plan: Plan, announce: Announce) -> bool:
    """Start or resume all unfinished runs; False if a stop was requested.

    A run that fails or is refused is marked as failed; the other runs of its group go on without it.
    """
    with locked(folder):
        planned = [_planned(folder, plan, case, seed) for seed in plan.seeds for case in plan.cases]
        source: Source | None = None
        for group in started_groups(planned):
            shared = all(run.same_data for run in group)
            source = source or (load_data(plan.base.data) if shared else None)
            watches, given = announce(group, len(planned) - len(_unfinished(planned))), source if shared else None
            if not _run_to_end(group, partial(resume_together, [run.folder for run in group], watches, given)):
                return False
        maximum = sys.maxsize
        while waiting := _unfinished(planned):
            if source is None and waiting[0].same_data:
                source = load_data(plan.base.data)
            done = len(planned) - len(waiting)
            try:
                if not _run_group(waiting, maximum, source, announce, done):
                    return False
            except TooManyError as error:
                maximum = error.runs // 2
                reason = f"{error.runs} runs side by side do not fit into the GPU's memory"
                print(f"fedcpsl: {reason}; they restart, {maximum} at a time", file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()
    return True


class TooManyError(Exception):
    """A group of runs did not fit into memory."""

    def __init__(self, runs: int) -> None:
        self.runs = runs


def _run_group(waiting: Sequence[Planned], maximum: int, source: Source | None, announce: Announce, done: int) -> bool:
    """Run the first waiting run and those that can run beside it; False if a stop was requested before the end."""
    first = waiting[0]
    alike = [run for run in waiting if _program(run) == _program(first)]
    searches = _searched(alike, maximum, source)
    group, experiments = list[Planned](), list[Experiment]()
    for run in alike:
        if len(group) == maximum:
            break
        if experiment := _built(run, source, experiments, searches.get(run.folder)):
            if not group:
                maximum = min(maximum, runs_that_fit(experiment.setup), first.config.run.together or maximum)
            group.append(run)
            experiments.append(experiment)
    if not group:
        return True
    runs = zip(experiments, group, announce(group, done), strict=True)
    members = [GroupMember(experiment, run.folder, watch) for experiment, run, watch in runs]
    try:
        return _run_to_end(group, partial(start_together, members))
    except torch.OutOfMemoryError:
        if len(group) == 1 or world()[1] > 1:
            raise
    for run in _unfinished(group):
        shutil.rmtree(run.folder, ignore_errors=True)
    raise TooManyError(len(group))


def _searched(alike: Sequence[Planned], maximum: int, source: Source | None) -> dict[Path, StepSizeSearch]:
    """Search the step sizes of the runs that will go side by side, side by side as well, where there are several.

    Not those of further groups: what they are searched beside must not depend on when the command was stopped.
    """
    if sum(run.config.algorithm.eta == SEARCH for run in alike) < 2:
        return {}
    together = alike[: _most_together(alike[0], maximum, source)]
    runs, loaded = [run for run in together if run.config.algorithm.eta == SEARCH], list[Loaded]()
    for run in runs:
        loaded.append(load_run(run.config, source if run.same_data else None, loaded))
    try:
        found = search_step_sizes(loaded)
    except torch.OutOfMemoryError:
        if len(runs) == 1:
            raise
        raise TooManyError(len(runs)) from None
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # what memory is free then decides how many runs go side by side
    return {run.folder: search for run, search in zip(runs, found, strict=True)}


def _most_together(first: Planned, maximum: int, source: Source | None) -> int:
    """Return how many runs like the first one go side by side; none where it is refused."""
    config, federation, model = load_run(without_search(first.config), source if first.same_data else None)
    try:
        setup = prepare(federation, model, config.algorithm, config.work, config.run, edge=config.edge)
    except RefusedError:
        return 0
    return min(maximum, runs_that_fit(setup), config.run.together or maximum)


def _built(
    run: Planned, source: Source | None, beside: Sequence[Experiment], search: StepSizeSearch | None
) -> Experiment | None:
    """Build one run of a group; one that is refused is marked as failed, and the others go on without it."""
    try:
        return build(run.config, source if run.same_data else None, beside, search)
    except RefusedError as error:
        run_folders.mark_refused(run.folder, run.config, f"refused: {error}")
        return None


def _unfinished(planned: Sequence[Planned]) -> list[Planned]:
    return [run for run in planned if not (run_folders.is_finished(run.folder) or run_folders.failure(run.folder))]


def _run_to_end(group: Sequence[Planned], run: Callable[[], Sequence[Outcome]]) -> bool:
    """Run a group; False if a stop was requested before the end. A run that goes alone may fail with an error."""
    try:
        return all(outcome.finished for outcome in run())
    except RunError as error:
        if error.run is None or world()[1] > 1:
            raise
        run_folders.mark_failed(group[error.run].folder, str(error.__cause__ or error))
        return True


def _planned(folder: Path, plan: Plan, case: Case, seed: int) -> Planned:
    config = with_settings(plan.base, case.settings | {"run.seed": seed})
    shares = config.data.reads == plan.base.data.reads
    return Planned(case, seed, run_folder(folder, case, seed), config, shares)


def _program(run: Planned) -> Any:
    """Return a key that is equal for runs of one group: the same model, kind of data, rounds and run settings."""
    config = run.config
    reads = asdict(config.data) if not run.same_data else None
    rounds = config.work.rounds + config.work.personal_rounds
    return asdict(config.model), reads, rounds, asdict(replace(config.run, seed=0))


def started_groups(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Return the groups of runs that were started and are not finished, whole: also those of their runs that failed.

    Folders of runs killed before that are removed.
    """
    groups: dict[tuple[str, ...], list[Planned]] = {}
    for run in _unfinished(planned):
        if run.folder.exists() and not (run.folder / "config.toml").exists():
            shutil.rmtree(run.folder)
        elif run.folder.exists():
            groups.setdefault(tuple(run_folders.group_of(run.folder)), []).append(run)
    by_name = {run.folder.name: run for run in planned}
    for names, runs in list(groups.items()):
        missing = [name for name in names if not (runs[0].folder.parent / name).exists()]
        if missing and not any((run.folder / "metrics.jsonl").exists() for run in runs):
            for run in groups.pop(names):  # killed while the group's folders were created
                shutil.rmtree(run.folder)
        else:
            failed = [by_name[name] for name in names if name in by_name and run_folders.failure(by_name[name].folder)]
            groups[names] = sorted([*runs, *failed], key=lambda run: names.index(run.folder.name))
    return list(groups.values())
