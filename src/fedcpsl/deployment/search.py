"""A step size for data that no server has: the devices try candidates in short trials, with some labels held back.

A trial is a federation of its own, whose states are thrown away. What each candidate ended with is in `search.json`: a
server that was killed goes on with the trial that it was in, and a job whose search is over does not search again.
"""

import json
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import closing
from math import isfinite
from pathlib import Path
from typing import Any

from fedcpsl.deployment.endpoints import Notify
from fedcpsl.deployment.job import Job, job_terms, trial_of, with_step_size
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import MAX_LOSS
from fedcpsl.federation.server import held_back_loss
from fedcpsl.federation.server_store import ServerState
from fedcpsl.settings import AUTO, SEARCH
from fedcpsl.simulation.setup import choose_eta
from fedcpsl.step_size import CANDIDATES, NothingToHoldBackError, chosen_eta, short_rounds, try_candidates
from fedcpsl.storage import to_json, write_whole

SEARCH_FILE, TRIALS_FOLDER = "search.json", "trials"
NOTHING_FOUND: dict[str, Any] = {"rounds": 0, "losses": {}, "eta": None, "seconds": 0.0}
RESTORE = "restore it, or start in another folder"
States = Generator[ServerState, None, None]
RunTrial = Callable[[Job, str], States]  # runs a job; the name is that of the folder for its states


def check_search(job: Job, where: Path, *, explicit: bool) -> None:
    """Refuse a search that the job does not ask for by name: devices send more than without one, or with noise."""
    if not explicit:
        raise InputError(
            f"{where}: algorithm.eta: a server has no samples to choose a step size with; give a number "
            "(`fedcpsl run --data` finds one on samples like those of the devices, see step_size_search in its "
            'manifest.json), or eta = "search": devices then try some in short trials, and tell their loss on labels '
            "that they hold back"
        )
    if job.protection.noise:
        raise InputError(
            f'{where}: algorithm.eta = "search": devices would send losses without noise; give a number, or noise = 0'
        )


def read_search(folder: Path) -> dict[str, Any]:
    """Return what a search has found until now; nothing where none was begun."""
    path = folder / SEARCH_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error}); {RESTORE}") from error
    if not _is_search(found):
        raise RunError(f"{path}: is damaged; {RESTORE}")
    search: dict[str, Any] = found
    return search


def _is_search(found: Any) -> bool:
    """Return whether what was read is what `_search` writes."""
    if not isinstance(found, dict) or set(found) != set(NOTHING_FOUND):
        return False
    losses, eta = found["losses"], found["eta"]
    return (
        isinstance(losses, dict)
        and all(loss is None or _is_number(loss) for loss in losses.values())
        and (eta is None or (_is_number(eta) and eta > 0))
        and _is_number(found["seconds"])
        and type(found["rounds"]) is int
        and found["rounds"] >= 0
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def check_found(job: Job, folder: Path, *, has_rounds: bool) -> None:
    """Refuse a folder whose rounds were made with a step size that is no longer known."""
    if job.config.algorithm.eta == SEARCH and has_rounds and read_search(folder).get("eta") is None:
        raise RunError(
            f"{folder / SEARCH_FILE}: is missing, or of another folder: it has the step size with which the rounds in "
            f"{folder} were made; {RESTORE}"
        )


def with_step_size_found(job: Job, folder: Path) -> Job:
    """Return the job with the step size that its search found; the job itself where it has a number."""
    if job.config.algorithm.eta != SEARCH:
        return job
    found = read_search(folder).get("eta")
    if found is None:
        raise InputError(f"{folder}: there are no rounds yet: the search for a step size has not ended")
    return with_step_size(job, found)


def search_step_size(job: Job, folder: Path, run_trial: RunTrial, notify: Notify) -> Job:
    """Return the job with the step size that trials of its devices find, or have found."""
    if read_search(folder).get("eta") is None:
        _search(job, folder, run_trial, notify)
    return with_step_size_found(job, folder)


def _search(job: Job, folder: Path, run_trial: RunTrial, notify: Notify) -> None:
    began = time.monotonic()
    found = {**NOTHING_FOUND, "losses": {}} | read_search(folder)
    before = found["seconds"]

    def keep() -> None:
        found["seconds"] = before + time.monotonic() - began
        write_whole(folder / SEARCH_FILE, to_json(found, indent=2) + "\n", private=True)

    if not found["rounds"]:
        found["rounds"] = _rounds_of_trials(job, run_trial)
        keep()

    def loss_with(eta: float) -> float:
        name = f"{eta:g}"
        if name not in found["losses"]:
            trial = trial_of(job, eta, found["rounds"])
            loss = _loss_of_trial(trial, run_trial, notify, first=eta == CANDIDATES[0])
            notify(f"step size {name}: " + (f"loss {loss:.4g}" if isfinite(loss) else "diverges"))
            found["losses"][name] = loss if isfinite(loss) else None
            keep()
        known = found["losses"][name]
        return float("inf") if known is None else float(known)

    try:
        found["eta"] = chosen_eta(try_candidates(loss_with))
        text = f"step size {found['eta']:g}, found by trials of {found['rounds']} rounds each in {{:.0f}} s"
    except NothingToHoldBackError:
        found["eta"] = choose_eta(AUTO, "", job.config.work.unit)
        text = f"step size {found['eta']:g}, not searched: no device has two labels and lets them judge"
    keep()
    shutil.rmtree(folder / TRIALS_FOLDER, ignore_errors=True)
    notify(text.format(found["seconds"]))


def _rounds_of_trials(job: Job, run_trial: RunTrial) -> int:
    """Wait until enough devices have joined; then their sizes say how many rounds a trial needs."""
    trial = trial_of(job, CANDIDATES[0], job.rules.rounds)
    with closing(run_trial(trial, f"{TRIALS_FOLDER}/joining")) as states:
        for state in states:
            if state.begun:
                config = trial.config
                return short_rounds(state.sizes, config.algorithm, config.work, job_terms(trial).work.active)
    raise RunError("no device could join the search for a step size")


def _loss_of_trial(trial: Job, run_trial: RunTrial, notify: Notify, *, first: bool) -> float:
    """Return the loss after a trial; infinite where devices that made a trial with a smaller step size fail in it."""
    try:
        *_, last = run_trial(trial, f"{TRIALS_FOLDER}/{trial.config.algorithm.eta:g}")
    except RunError as error:
        if first:
            raise
        notify(str(error))
        return float("inf")
    if first and not last.losses:
        raise NothingToHoldBackError("no device has labels to hold back in a search for a step size")
    loss = held_back_loss(last)
    return loss if loss < MAX_LOSS / 2 else float("inf")
