"""Runs in plain words: a title, how far they are, what was run in one sentence, and conclusions.

Conclusions: are personal models better, by how much, for how many devices, and what to do if not.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcpsl.report.loaded_runs import LoadedRun, RunSet
from fedcpsl.runs.folder import read_config_to_show, read_device_table, read_manifest
from fedcpsl.runs.split_summary import read_split_summary

LEVEL = 0.975  # of a two-sided interval of 95 %
Pairs = Sequence[tuple[float, float]]  # two accuracies of each device
CaseSummary = Mapping[str, Any]
BETTER, EQUAL, WORSE = "is better than", "is not significantly different from", "is worse than"
USE_GLOBAL = "use the global model (--device global), or, where --beta mixes both, a smaller --beta"
NOTHING_COUNTED = (
    "no upload was counted, so the global model is what it was at the start: give devices more time or energy"
)
NO_TESTS = "no device has a test set, so no accuracy is known: give more samples of known class, or a larger data.test"
TRAIN_ALONE = "a federation does not pay for these devices: train each alone"


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


def as_sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop; names of algorithms stay as they are."""
    return (
        f"{text[:1].upper() if text.startswith(('the ', 'whether ', 'one ', 'use ', 'no ')) else text[:1]}{text[1:]}."
    )


def run_verdicts(folder: Path, final: Mapping[str, object]) -> list[str]:
    """Return the verdicts of a finished run, and how to get those that are missing."""
    if not final["finished"]:
        return []
    if not any(row["personal"] for row in read_device_table(folder / "devices.csv")):
        return [NO_TESTS]
    edge = final.get("edge")
    if isinstance(edge, Mapping) and final["global"] is not None and not edge["counted"]:
        return [NOTHING_COUNTED]
    served = final["global"] is not None and "adapted_from" not in read_manifest(folder)
    missing = served and not (folder / "alone" / "devices.csv").exists()
    ask = f"whether devices would do as well alone is not known: run fedcpsl report {folder} --alone"
    return [*verdicts(folder), *[ask] * missing]


def verdicts(folder: Path) -> list[str]:
    """Compare the personal models of a finished run with the global one, and with devices trained alone."""
    devices = read_device_table(folder / "devices.csv")
    pairs = _pairs_with_global(devices)
    found = [verdict("the personal models", "the global one", [pairs], USE_GLOBAL)]
    if pairs and not found[0] and any(row["localized"] for row in devices):
        found = [f"the personal models are as accurate as the global one on {_each_of(pairs)}"]
    path = folder / "alone" / "devices.csv"
    if path.exists():
        pairs = _pairs_with_alone(devices, read_device_table(path))
        config = folder / "alone" / "config.toml"
        name = f" ({read_config_to_show(config.parent).algorithm.name})" if config.exists() else ""
        compared = verdict("the personal models", f"devices trained alone{name}", [pairs], TRAIN_ALONE)
        if pairs and not compared:
            compared = f"the personal models are as accurate as devices trained alone{name} on {_each_of(pairs)}"
        found.append(compared)
    return [text for text in found if text]


def _each_of(pairs: Sequence[object]) -> str:
    return f"each of {len(pairs)} devices" if len(pairs) > 1 else "the one device with tests"


def comparison_verdicts(summary: Mapping[str, Any]) -> list[str]:
    """Compare the first algorithm of a comparison, or the best settings of a sweep, with the others."""
    cases = [case for case in summary["cases"] if case["personal"]]
    if not cases or cases[0] is not summary["cases"][0]:
        return []  # the first one failed, or no device has tests
    if summary["kind"] == "sweep":
        first = max(cases, key=lambda case: score_of(case)["mean"])
        found = [_best_of_sweep(first, cases)]
    else:
        first = cases[0]
        found = _compare_with_others(first, cases[1:])
    tables = _device_tables(first)
    found.append(
        verdict(
            f"the personal models of {first['name']}",
            "its global one",
            list(map(_pairs_with_global, tables)),
            USE_GLOBAL,
        )
    )
    if summary["kind"] == "compare" and not _is_alone(first):
        found.append(_compare_with_alone(first, tables, cases))
    return [text for text in found if text]


def score_of(case: CaseSummary) -> Mapping[str, float]:
    """Return the accuracy that a case is chosen by: on validation samples if there are any, else on the tests."""
    value: Mapping[str, float] = case["validation"] or case["personal"]
    return value


def _is_alone(case: CaseSummary) -> bool:
    return case["global"] is None  # no server, so no model of its own


def _compare_with_others(first: CaseSummary, others: Sequence[CaseSummary]) -> list[str]:
    """Say which algorithms the first one beats, which beat it, and which are not significantly different."""
    kinds: dict[str, list[str]] = {BETTER: [], EQUAL: [], WORSE: []}
    best = first
    for case in others:
        lead, half = -case["difference"]["mean"], case["difference"]["half_width"]
        if half is None:
            continue
        kind = BETTER if lead - half > 0 else WORSE if lead + half < 0 else EQUAL
        short = f"{_signed(100 * lead)}, {_signed(100 * (lead - half))} to {_signed(100 * (lead + half))}"
        full = f"{_signed(100 * lead)} points, {_interval(100 * lead, 100 * half)}"
        kinds[kind].append(f"{case['name']} ({short if kinds[kind] else full})")
        if kind == WORSE and case["personal"]["mean"] > best["personal"]["mean"]:
            best = case
    if others and not any(kinds.values()):
        return ["one seed is not enough to compare algorithms: give --seeds 5"]
    lines = [f"{first['name']} {kind} {', '.join(names)}" for kind, names in kinds.items() if names]
    return [*lines, f"use {best['name']} on data like this"] if best is not first else lines


def _compare_with_alone(
    first: CaseSummary, tables: Sequence[list[dict[str, str]]], cases: Sequence[CaseSummary]
) -> str:
    alone = [case for case in cases if _is_alone(case)]
    if not alone:
        return "whether a federation pays is not known: add local to --algorithms, devices that train alone"
    best = max(alone, key=lambda case: case["personal"]["mean"])
    pairs = [_pairs_with_alone(*both) for both in zip(tables, _device_tables(best), strict=True)]
    return verdict(
        f"the personal models of {first['name']}", f"devices trained alone ({best['name']})", pairs, TRAIN_ALONE
    )


def _best_of_sweep(best: CaseSummary, cases: Sequence[CaseSummary]) -> str:
    key = "validation" if best["validation"] else "personal"
    by = "validation samples" if best["validation"] else "the test sets"
    of = score_of(best)
    text = f"the best of {len(cases)} by {by}: {best['name']}, {100 * of['mean']:.2f} %"
    if best["validation"]:
        text += f" ({100 * best['personal']['mean']:.2f} % on the tests)"
    equal = [case["name"] for case in cases if case is not best and not _is_ahead(best, case, key)]
    if len(best["runs"]) < 2:
        return f"{text}; one seed is not enough to compare settings: give --seeds 3"
    if not equal:
        return f"{text}; it is significantly better than every other"
    some = ", ".join(equal[:3]) + f" and {len(equal) - 3} more" * (len(equal) > 3)
    return f"{text}; these are not significantly different: {some}"


def _is_ahead(best: CaseSummary, case: CaseSummary, key: str) -> bool:
    pairs = zip(best["runs"], case["runs"], strict=True)
    leads = [a[key] - b[key] for a, b in pairs if a[key] is not None and b[key] is not None]
    return len(leads) > 1 and fmean(leads) - half_width(leads) > 0


def _device_tables(case: CaseSummary) -> list[list[dict[str, str]]]:
    return [read_device_table(Path(run["run"]) / "devices.csv") for run in case["runs"]]


def _pairs_with_global(devices: Sequence[Mapping[str, str]]) -> Pairs:
    return [(float(row["personal"]), float(row["global"])) for row in devices if row["personal"] and row["global"]]


def _pairs_with_alone(devices: Sequence[Mapping[str, str]], alone: Sequence[Mapping[str, str]]) -> Pairs:
    own = {row["name"]: row["personal"] for row in alone}
    return [
        (float(row["personal"]), float(own[row["name"]])) for row in devices if row["personal"] and own.get(row["name"])
    ]


def verdict(one: str, other: str, groups: Sequence[Pairs], advice: str) -> str:
    """Say which of two is better, paired, and whether that is significant; nothing if they are equal everywhere.

    The interval is over devices of one group (of one seed), and over seeds of several groups.
    """
    each = [[100 * (a - b) for a, b in pairs] for pairs in groups if pairs]
    devices = [difference for seed in each for difference in seed]
    if not any(devices):
        return ""
    samples = [fmean(seed) for seed in each] if len(each) > 1 else devices
    count, mean = len(devices), fmean(samples)
    on = f"better on {sum(d > 0 for d in devices)} of {count} devices, worse on {sum(d < 0 for d in devices)}"
    if len(samples) < 2:
        return f"{one} and {other}: {_signed(mean)} points on one device; one device is not enough for an interval"
    half = half_width(samples)
    over = f"{len(samples)} {'seeds' if len(each) > 1 else 'devices'}"
    facts = f"{_signed(mean)} points over {over} ({_interval(mean, half)}), {on}"
    if mean - half > 0:
        return f"{one} are better than {other}: {facts}"
    if mean + half < 0:
        return f"{one} are worse than {other}: {facts}; {advice}"
    return f"{one} and {other} are not significantly different: {facts}"


def _interval(mean: float, half: float) -> str:
    return f"95 % interval {_signed(mean - half)} to {_signed(mean + half)}"


def _signed(points: float) -> str:
    """Return points with their sign; zero has none."""
    return f"{points:+.1f}" if round(points, 1) else "0.0"


def half_width(values: Sequence[float]) -> float:
    """Return half the 95 % interval of a mean, by Student's t."""
    from scipy.stats import t

    return float(t.ppf(LEVEL, len(values) - 1)) * stdev(values) / sqrt(len(values))
