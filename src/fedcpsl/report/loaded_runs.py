"""Load runs from their folders, and group those that differ in their seed alone."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.config import Config
from fedcpsl.errors import InputError
from fedcpsl.runs.comparison import is_comparison, read_plan, run_folder
from fedcpsl.runs.folder import (
    ALONE,
    Confusion,
    Metrics,
    failure,
    is_finished,
    is_refused,
    read_confusion,
    read_device_table,
    read_manifest,
    read_metrics,
    read_run_config,
)
from fedcpsl.settings import AUTO

MACHINE_SETTINGS = ("executor", "slots", "processes", "store", "device", "together", "checkpoint_seconds", "keep")


class LoadedRun(NamedTuple):
    """One run as loaded from its folder."""

    folder: Path
    config: Config
    manifest: dict[str, Any]
    metrics: list[Metrics]
    devices: list[dict[str, str]]  # empty until the run is finished
    finished: bool

    @property
    def confusion(self) -> Confusion | None:
        """Return the confusion matrices of its models, if they were counted."""
        names = self.manifest.get("class_names") or list(map(str, range(self.manifest["classes"])))
        return read_confusion(self.folder, names) if self.finished else None

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def last(self) -> Metrics:
        return self.metrics[-1]

    @property
    def alone(self) -> bool:
        """Return whether its devices have no server."""
        from fedcpsl.algorithms import traits_of  # which imports PyTorch

        return traits_of(self.config.algorithm.name).alone

    @property
    def adapted_from(self) -> str:
        """Return the run that `fedcpsl adapt` made it from; empty if it was not adapted."""
        return str(self.manifest.get("adapted_from", {}).get("run", ""))


class SeedGroup(NamedTuple):
    """Runs that differ in their seed alone: one curve of a chart, one row of a table."""

    name: str
    runs: list[LoadedRun]


class RunSet(NamedTuple):
    """All runs of a page."""

    groups: list[SeedGroup]
    references: list[LoadedRun]  # runs without a server, to measure gains against
    failed: dict[str, str]  # by folder, why
    waiting: int  # runs that have no finished round yet, or have not started

    @property
    def runs(self) -> list[LoadedRun]:
        return [run for group in self.groups for run in group.runs]

    @property
    def over(self) -> bool:
        """Return whether every run is finished or has failed."""
        return not self.waiting and bool(self.runs or self.failed) and all(run.finished for run in self.runs)


def load_runs(paths: Sequence[Path]) -> RunSet:
    """Load runs, comparisons, sweeps and studies; raise InputError if a folder is none of these or has no round yet."""
    run_set = try_load_runs(paths)
    if not run_set.groups:
        failed = next(iter(run_set.failed.items()), None)
        why = f"failed: {failed[1]}" if failed else "has no finished round yet; watch it with `fedcpsl watch`, or wait"
        raise InputError(f"{failed[0] if failed else paths[0]}: {why}")
    return run_set


def try_load_runs(paths: Sequence[Path]) -> RunSet:
    """Load runs; without any group if no round is finished yet."""
    found: dict[Path, LoadedRun] = {}
    failed, waiting = {}, 0
    for path in paths:
        known = runs_in(path)
        waiting += len(_planned(path)) - len(known) if is_comparison(path) else 0
        several = len(paths) > 1 or len(known) > 1
        for folder in known:
            reason = failure(folder)
            run = None if reason else load_run(folder)
            if reason:
                failed[str(folder)] = reason
            elif run and run.last["round"] > 0:
                found.setdefault(folder.resolve(), run)
            elif several and known == [path]:
                raise InputError(f"{folder}: has no finished round yet; leave it out, or wait")
            else:
                waiting += 1
    runs = list(found.values())
    references = [run for run in runs if run.alone] + list(_references(runs))
    return RunSet(group_by_seed(runs), references, failed, waiting)


def load_run(folder: Path) -> LoadedRun | None:
    """Load one run; None if it has no metrics."""
    metrics = read_metrics(folder)
    if not metrics:
        return None
    devices: list[dict[str, str]] = []
    if is_finished(folder):
        devices = read_device_table(folder / "devices.csv")
    return LoadedRun(folder, read_run_config(folder), read_manifest(folder), metrics, devices, bool(devices))


def runs_in(path: Path) -> list[Path]:
    """Return the folders of the runs in a folder: itself, or those of a comparison, a sweep or a study."""
    if is_comparison(path):
        return [folder for folder in _planned(path) if _is_started(folder)]
    if (path / "runs").is_dir():
        return [folder for folder in sorted((path / "runs").iterdir()) if _is_started(folder)]
    if not _is_started(path):
        raise InputError(
            f"{path}: {'not a run’s folder' if path.is_dir() else 'no such folder'}; give one that `fedcpsl run`, "
            "`compare`, `sweep` or `paper` made"
        )
    return [path]


def _planned(comparison: Path) -> list[Path]:
    plan = read_plan(comparison)
    return [run_folder(comparison, case, seed) for case in plan.cases for seed in plan.seeds]


def _is_started(folder: Path) -> bool:
    return is_refused(folder) or all((folder / name).is_file() for name in ("config.toml", "manifest.json"))


def _references(runs: Sequence[LoadedRun]) -> Iterator[LoadedRun]:
    """Yield finished runs without a server from the runs' folders, or beside them in a comparison."""
    given = {run.folder.resolve() for run in runs}
    inside = [run.folder / ALONE for run in runs]
    beside = [f for run in runs if run.folder.parent.name == "runs" for f in run.folder.parent.glob("local-*")]
    for folder in dict.fromkeys(f.resolve() for f in (*inside, *beside) if _is_started(f)):
        run = None if folder in given or not is_finished(folder) else load_run(folder)
        if run and run.alone:
            yield run


def alone_for(run: LoadedRun, references: Sequence[LoadedRun]) -> LoadedRun | None:
    """Return a finished run of the same seed and split whose devices train alone: its own, or one of equal work."""
    if run.alone:
        return None
    same = (run.seed, run.manifest["split_sha256"])
    fit = [r for r in references if (r.seed, r.manifest["split_sha256"]) == same and r.finished]
    own = (run.folder / ALONE).resolve()
    inside = [r for r in fit if r.folder.resolve() == own]
    equal = [r for r in fit if _is_equal_work(r.config, run.config)]
    return next(iter([*inside, *equal]), None)


def _is_equal_work(one: Config, other: Config) -> bool:
    """Return whether two runs train the same model equally long; active devices do not matter without a server."""
    return (one.model, replace(one.work, active=AUTO)) == (other.model, replace(other.work, active=AUTO))


def group_by_seed(runs: Sequence[LoadedRun]) -> list[SeedGroup]:
    """Group runs by their settings without the seed, named by what distinguishes them."""
    groups: dict[tuple[str, int], list[LoadedRun]] = {}
    for run in runs:
        settings = repr(_settings(run.config))
        again = sum(run.seed == other.seed for k, g in groups.items() if k[0] == settings for other in g)
        groups.setdefault((settings, again), []).append(run)  # the same run a second time is a group of its own
    names = _names([group[0].config for group in groups.values()])
    return [SeedGroup(name, sorted(g, key=lambda r: r.seed)) for name, g in zip(names, groups.values(), strict=True)]


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect results, flat: without the seed and those of the machine."""
    flat = {f"{section}.{key}": value for section, keys in asdict(config).items() for key, value in keys.items()}
    ignored = {"run.seed", "data.dir", *(f"run.{key}" for key in MACHINE_SETTINGS)}
    return {key: value for key, value in flat.items() if key not in ignored}


def _names(configs: Sequence[Config]) -> list[str]:
    """Return names: the algorithm, the settings in which runs of it differ, and the data set if there are several."""
    several = len({config.data.title for config in configs}) > 1
    names = []
    for config in configs:
        alike = [_settings(c) for c in configs if c.algorithm.name == config.algorithm.name]
        own = _settings(config)
        differ = [
            key
            for key in own
            if any(other[key] != own[key] for other in alike) and key not in ("data.dataset", "data.file")
        ]
        words = [f"{key.partition('.')[2]}={_text(own[key])}" for key in differ[:4]]
        names.append(", ".join([config.algorithm.name, *words, *([config.data.title] if several else [])]))
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)
