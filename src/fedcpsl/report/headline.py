"""Runs in words: a title, how far they are, and what was run in one sentence."""

from collections.abc import Iterable, Sequence
from typing import Any

from fedcpsl.report.loaded_runs import LoadedRun, RunSet
from fedcpsl.runs.split_summary import read_split_summary


def title_of(run_set: RunSet) -> str:
    """Return the title of a page: algorithms and data sets."""
    if not run_set.groups:
        return all_failed(run_set) if run_set.over else "waiting for the first round"
    sets = list(dict.fromkeys(run.config.data.title for run in run_set.runs))
    names = list(dict.fromkeys(group.runs[0].config.algorithm.name for group in run_set.groups))
    what = ", ".join(names) if len(names) <= 4 else f"{len(names)} algorithms"
    return f"{what} on {', '.join(sets[:3])}{' and more' * (len(sets) > 3)}"


def state_of(run_set: RunSet) -> str:
    """Return how far the runs are, in words."""
    unfinished = [run for run in run_set.runs if not run.finished]
    if run_set.over:
        return "finished" if run_set.groups else all_failed(run_set)
    if len(run_set.runs) == 1 and not run_set.waiting:
        (run,) = run_set.runs
        return f"round {run.last['round']} of {run.config.work.rounds + run.config.work.personal_rounds}"
    return f"{len(run_set.runs) - len(unfinished)} of {len(run_set.runs) + run_set.waiting} runs finished"


def all_failed(run_set: RunSet) -> str:
    """Return that all runs failed, in words."""
    return "the run failed" if len(run_set.failed) == 1 else f"all {len(run_set.failed)} runs failed"


def sentence(run_set: RunSet) -> str:
    """Return what was run, in one sentence."""
    adapted = [run for run in run_set.runs if run.adapted_from]
    trained = [run for run in run_set.runs if not run.adapted_from]
    if not trained:
        return _adapted(adapted)
    more = len(run_set.groups)
    what = trained[0].config.algorithm.name if more == 1 else f"{len(run_set.runs)} runs of {more} kinds"
    work = trained[0].config.work
    rounds = _one_or_many(run.config.work.rounds for run in trained)
    facts = [
        f"{_one_or_many(run.manifest['devices'] for run in trained)} devices",
        f"{_one_or_many(run.config.work.active for run in trained)} of them active in each of {rounds} rounds",
        *([f"then {work.personal_rounds} personal rounds"] if work.personal_rounds else []),
        _labels(trained),
        _seeds(run_set.runs),
    ]
    if adapted:
        facts.append(f"and of the runs {len(adapted)} adapted from another, in personal rounds with no server")
    return f"{what} on {trained[0].config.data.title}: {', '.join(facts)}."


def _adapted(runs: Sequence[LoadedRun]) -> str:
    """Return what `fedcpsl adapt` made, in one sentence."""
    names = ", ".join(dict.fromkeys(run.adapted_from for run in runs))
    rounds = _one_or_many(run.last["round"] for run in runs)
    what = "a personal model" if len(runs) == 1 else f"{len(runs)} personal models"
    return (
        f"{runs[0].config.algorithm.name} on {runs[0].config.data.title}: {what} adapted from {names} in {rounds} "
        f"personal rounds (no rounds with a server), {_labels(runs)}, {_seeds(runs)}."
    )


def _seeds(runs: Sequence[LoadedRun]) -> str:
    seeds = sorted({run.seed for run in runs})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _one_or_many(values: Iterable[Any]) -> str:
    known = sorted(set(values))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def _labels(runs: Sequence[LoadedRun]) -> str:
    """Return how many labels devices see: counted if the data has unlabelled samples of its own, else from settings."""
    splits = {run.manifest["split_sha256"]: run for run in runs}.values()
    counted = [labelled_share(run) for run in splits]
    known = sorted({f"{100 * share:.3g}" for share in counted if share is not None}, key=float)
    if None not in counted:
        return f"{' to '.join(dict.fromkeys([known[0], known[-1]]))} % of the training samples labelled"
    shares = {labels_seen(run.config.data) for run in runs}
    return shares.pop() if len(shares) == 1 and not known else "unequal shares of the labels visible"


def labelled_share(run: LoadedRun) -> float | None:
    """Return labelled / (labelled + unlabelled) of the training samples, if the class of some is unknown."""
    found = read_split_summary(run.folder, run.config) if run.config.data.file else ""
    if isinstance(found, str) or not any(found.unknown):
        return None
    if run.devices:
        seen, hidden = (sum(int(device[key]) for device in run.devices) for key in ("labelled", "unlabelled"))
    else:
        seen, hidden = (sum(map(sum, rows)) for rows in (found.labelled, [*found.unlabelled, found.unknown]))
    return seen / (seen + hidden)


def labels_seen(data: Any) -> str:
    """Return the share of visible labels by settings, in words."""
    share = data.labelled
    seen = f"{100 * min(share):g} to {100 * max(share):g} %" if isinstance(share, list) else f"{100 * share:g} %"
    where = "" if data.labelled_devices == "all" else f" at {data.labelled_devices} devices"
    return f"{seen} of the training labels visible{where}"
