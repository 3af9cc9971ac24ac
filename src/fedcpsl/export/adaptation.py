"""Adapt a run to a device that was not in training: personal rounds only, the global model fixed."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcpsl.algorithm import optional
from fedcpsl.algorithms import find_algorithm
from fedcpsl.config import Config, Data, to_toml
from fedcpsl.data.federation import Federation, Source, federate
from fedcpsl.data.readers import as_colour
from fedcpsl.data.sources import load_source
from fedcpsl.data.split import TEST, Shares
from fedcpsl.data.tables import column_names, dropped_of, features_in_order, is_table, options_of
from fedcpsl.errors import InputError
from fedcpsl.evaluation import Evaluation, evaluate
from fedcpsl.export.personal_model import with_tensors
from fedcpsl.export.saved_run import SavedRun, general_tensors, on_this_machine, one_device
from fedcpsl.runs.checkpoint import save_models
from fedcpsl.runs.environment import make_manifest
from fedcpsl.runs.folder import write_manifest, write_tables
from fedcpsl.runs.split_summary import write_split_summary
from fedcpsl.simulation import Setup, State, prepare, simulate
from fedcpsl.storage import sha256_of, to_json, write_whole

NORMAL = 1.959964  # standard deviations on either side of a 95 % interval


class Adapted(NamedTuple):
    """A new device's model, and its evaluation on held-out samples."""

    config: Config
    federation: Federation
    state: State
    evaluation: Evaluation

    @property
    def held_out(self) -> int:
        return int(self.federation.counts[0, TEST])

    @property
    def general(self) -> float:
        return self.evaluation.general.mean if self.evaluation.general else float("nan")

    @property
    def personal(self) -> float:
        return self.evaluation.personal.mean

    @property
    def gain(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the personal model's gain over the global one; None if nothing is held out."""
        made, tests = self.evaluation.predictions, self.state.setup.data.test
        if not self.held_out or made.general is None:
            return None
        ours, theirs = (log_h.argmax(-1) == tests.y for log_h in (made.personal, made.general))
        return paired_interval(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), self.held_out)


def paired_interval(better: int, worse: int, samples: int) -> tuple[float, float]:
    """Return the 95 % interval of a difference of two accuracies on the same samples (Agresti and Min, 2005): with two
    pseudo-observations added, so that its coverage holds for few samples.
    """
    count, difference = samples + 2, (better - worse) / (samples + 2)
    half = NORMAL * sqrt((better + worse + 1) / count - difference**2) / sqrt(count)
    return max(difference - half, -1.0), min(difference + half, 1.0)


def rounds_of_a_device(run: SavedRun) -> int:
    """Return for how many rounds a device of the run has trained, on average."""
    work = run.config.work
    active = work.active if isinstance(work.active, int) else run.devices
    return max(1, round(work.rounds * active / run.devices)) + work.personal_rounds


def check_adaptable(run: SavedRun) -> None:
    """Raise InputError if the run has no global model."""
    if not general_tensors(run):
        raise InputError(
            f"{run.folder}: {run.config.algorithm.name} has no global model that a new device could start from"
        )


def adapt(run: SavedRun, data: Data, name: str, rounds: int) -> Adapted:
    """Train theta_lc from the run's theta against h(theta) on the device's own samples, labelled once at theta.

    Where a device's model is made of theta and its labels alone (`adapted`), no round is needed.
    """
    check_adaptable(run)
    algorithm = run.config.algorithm
    read = _with_columns(data, run.config.data, run.features)
    federation = _federation(run, read, name)
    data = replace(read, label=data.label, drop=run.config.data.drop)  # as other tables of the device may have them
    newcomer, adapted = (optional(find_algorithm(algorithm.name)[0], name) for name in ("newcomer", "adapted"))
    if adapted is None and optional(find_algorithm(algorithm.name)[0], "phases") is None:
        raise InputError(
            f"{run.folder}: {algorithm.name} has no personal rounds in which a new device could train; it can use the "
            "global model: fedcpsl export --device global"
        )
    rounds = 0 if adapted else rounds
    config = replace(
        run.config,
        data=replace(data, devices=1, normalise="standard" if run.scaling else "none"),
        algorithm=newcomer(algorithm) if newcomer else algorithm,
        work=replace(one_device(run.config.work), rounds=1, personal_rounds=rounds, two_phase=False),
        run=on_this_machine(run.config.run),
    )
    model = with_tensors(run.model, run.under("global/"))
    prepared = prepare(federation, model, config.algorithm, config.work, config.run)
    config = replace(config, work=replace(config.work, active=prepared.terms.work.active))
    setup = _personal_rounds_alone(prepared, rounds)
    *_, last = simulate(setup)
    return Adapted(config, federation, last, evaluate(last))


def _personal_rounds_alone(setup: Setup, rounds: int) -> Setup:
    """Return a setup without rounds with the server; the device first labels its samples, as in two phases."""
    return setup._replace(terms=setup.terms._replace(rounds=0, personal_rounds=rounds, two_phase=True))


def _with_columns(data: Data, of_run: Data, features: Sequence[str]) -> Data:
    """Return the device's data with the run's device and test columns, if its table has them, and read as the run's."""
    path = Path(data.file)
    if not is_table(path):
        return data
    columns = {name: getattr(of_run, name) for name in ("device_column", "test_column")}
    there = column_names(path, [*columns.values(), data.label])
    kept = {name: column for name, column in columns.items() if column in there}
    left_out = dropped_of(there, options_of(of_run.drop, "").drop, features)
    label = "" if data.label == of_run.label and data.label not in there else data.label  # nothing is labelled
    return replace(data, label=label, drop=",".join(left_out), missing_labels=of_run.missing_labels, **kept)


def _federation(run: SavedRun, data: Data, name: str) -> Federation:
    """Return the device's samples with the run's classes and normalisation."""
    path = Path(data.file)
    source = _aligned(load_source(replace(data, partition="iid"), one_device=True), run, path)
    source = source._replace(device=np.zeros(len(source.y), np.int64), names=(name,))
    shares, seed = Shares(test=data.test_share), run.config.run.seed
    try:
        return federate(source, shares, normalise=run.scaling is not None, seed=seed, labels_needed=False)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _aligned(source: Source, run: SavedRun, path: Path) -> Source:
    """Return the samples in the run's form: its columns in its order, its classes by name, its scaling."""
    x, names = source.x, source.class_names
    if run.features and source.features:
        there = set(source.features) | {name.partition("=")[0] for name in source.features}
        missing = [name for name in run.features if not {name, name.partition("=")[0]} & there]
        if missing:
            raise InputError(
                f"{path}: column {missing[0]!r} is missing, a feature of the run; give the columns that the run was "
                "trained on"
            )
        try:
            x = features_in_order(x, source.features, run.features, "is not a feature of the run")
        except InputError as error:
            raise InputError(f"{path}: {error}; give the columns that the run was trained on") from error
    if x.ndim == 4 and x.shape[1] == 1 and run.shape[:1] == (3,):  # grey images among coloured ones
        x = as_colour(x)
    if x.shape[1:] != run.shape:
        raise InputError(f"{path}: an input has shape {list(x.shape[1:])} where the run's is {list(run.shape)}")
    if path.suffix == ".npz":  # its classes are numbers
        names = run.classes[: len(names)] + names[len(run.classes) :]
    place = {name: i for i, name in enumerate(run.classes)}
    unknown = [name for i, name in enumerate(names) if name not in place and (source.y == i).any()]
    if unknown:
        raise InputError(f"{path}: the run has no class {unknown[0]!r}; it has {', '.join(run.classes)}")
    into = np.array([*(place.get(name, -1) for name in names), -1])
    return source._replace(x=x, y=into[source.y], class_names=run.classes, scaling=run.scaling, features=run.features)


def write_adapted(adapted: Adapted, run: SavedRun, folder: Path) -> None:
    """Write a folder like a run's, atomically."""
    partial = folder.with_name(f".{folder.name}.partial")
    _clear(partial)
    try:
        partial.mkdir(parents=True)
        manifest = make_manifest(adapted.state.setup, adapted.federation, [folder.name])
        manifest["adapted_from"] = {"run": run.folder.name, "split_sha256": run.digest}
        metrics = adapted.evaluation.metrics(adapted.state) | {"gaps": None, "seconds": 0.0}
        text = to_toml(adapted.config)
        write_manifest(partial, manifest | {"config_sha256": sha256_of(text)})
        write_whole(partial / "config.toml", text)
        write_whole(partial / "metrics.jsonl", to_json(metrics) + "\n")
        write_split_summary(partial, adapted.federation)
        save_models(partial, adapted.state, adapted.federation.scaling)
        write_tables(partial, adapted.state, adapted.evaluation, adapted.federation.class_names)
        partial.replace(folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}; give another --out") from error
    finally:
        _clear(partial)


def _clear(folder: Path) -> None:
    """Remove the folder of an interrupted attempt."""
    for path in folder.glob("*"):
        path.unlink()
    if folder.exists():
        folder.rmdir()
