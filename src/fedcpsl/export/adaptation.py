"""A personal model for a device that was not in training: a joiner's personal rounds, the global model fixed."""

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcpsl.algorithm import optional
from fedcpsl.algorithms import find_algorithm, traits_of
from fedcpsl.config import Config, Data, to_toml
from fedcpsl.data.federation import Federation, Source, federate
from fedcpsl.data.sources import load_source
from fedcpsl.data.split import TEST, Shares
from fedcpsl.data.tables import column_names, is_table
from fedcpsl.errors import InputError
from fedcpsl.evaluation import Evaluation, evaluate
from fedcpsl.export.graph import with_tensors
from fedcpsl.export.saved_run import Kept, on_this_machine, one_device
from fedcpsl.runs.checkpoint import save_models
from fedcpsl.runs.environment import make_manifest
from fedcpsl.runs.folder import write_manifest
from fedcpsl.runs.result_tables import write_tables
from fedcpsl.runs.split_summary import write_split_summary
from fedcpsl.simulation import Setup, State, prepare, simulate
from fedcpsl.storage import sha256_of, to_json, write_whole

NORMAL = 1.959964  # standard deviations on either side of a 95 % interval


class Adapted(NamedTuple):
    """A new device's model, and how good it is on what was held out."""

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
        """The 95 % interval of what the personal model gains over the global one; None where nothing is held out."""
        made, tests = self.evaluation.predictions, self.state.setup.device_data.test
        if not self.held_out or made.general is None:
            return None
        ours, theirs = (log_h.argmax(-1) == tests.y for log_h in (made.personal, made.general))
        return paired_interval(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), self.held_out)


def paired_interval(better: int, worse: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of a difference of two accuracies on the same samples (Agresti and Min, 2005): as if two more
    samples had been seen, which keeps it honest where samples are few.
    """
    count, difference = samples + 2, (better - worse) / (samples + 2)
    half = NORMAL * sqrt((better + worse + 1) / count - difference**2) / sqrt(count)
    return max(difference - half, -1.0), min(difference + half, 1.0)


def rounds_of_a_device(kept: Kept) -> int:
    """How many rounds a device of the run has trained for, on average."""
    work = kept.config.work
    active = work.active if isinstance(work.active, int) else kept.devices
    return max(1, round(work.rounds * active / kept.devices)) + work.personal_rounds


def check_adaptable(kept: Kept) -> None:
    """Refuse a run whose devices were alone."""
    name = kept.config.algorithm.name
    if traits_of(name).alone:
        raise InputError(f"{kept.folder}: {name} has no global model that a new device could start from")


def adapt(kept: Kept, data: Data, name: str, rounds: int) -> Adapted:
    """Train theta_lc from the run's theta against h(theta) on the device's own samples, labelled once at theta."""
    check_adaptable(kept)
    algorithm = kept.config.algorithm
    data = _with_columns(data, kept.config.data)
    federation = _federation(kept, data, name)
    newcomer = optional(find_algorithm(algorithm.name)[0], "newcomer")
    config = replace(
        kept.config,
        data=replace(data, devices=1, normalise="standard" if kept.scaling else "none"),
        algorithm=newcomer(algorithm) if newcomer else algorithm,
        work=replace(one_device(kept.config.work), rounds=1, personal_rounds=rounds, two_phase=False),
        run=on_this_machine(kept.config.run),
    )
    model = with_tensors(kept.model, kept.under("global/"))
    prepared = prepare(federation, model, config.algorithm, config.work, config.run)
    config = replace(config, work=replace(config.work, active=prepared.work.active))
    setup = _personal_rounds_alone(prepared, rounds)
    *_, last = simulate(setup)
    return Adapted(config, federation, last, evaluate(last))


def _personal_rounds_alone(setup: Setup, rounds: int) -> Setup:
    """No round with the server; before the first of its own, the device labels its samples, as in two phases."""
    return setup._replace(rounds=0, personal_rounds=rounds, two_phase=True)


def _with_columns(data: Data, of_run: Data) -> Data:
    """The device's file with the run's columns, where it has them: it may or may not say whose its rows are."""
    path = Path(data.file)
    there = column_names(path) if is_table(path) else []
    columns = {name: getattr(of_run, name) for name in ("device_column", "test_column")}
    return replace(data, **{name: column for name, column in columns.items() if column in there})


def _federation(kept: Kept, data: Data, name: str) -> Federation:
    """The device's samples, with the run's classes and normalisation."""
    path = Path(data.file)
    source = _fitted(load_source(replace(data, partition="iid")), kept, path)
    source = source._replace(device=np.zeros(len(source.y), np.int64), names=(name,))
    try:
        return federate(source, Shares(test=data.test), normalise=kept.scaling is not None, seed=kept.config.run.seed)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _fitted(source: Source, kept: Kept, path: Path) -> Source:
    """The samples as the run's were: its columns in its order, its classes by name, its scaling."""
    x, names = source.x, source.class_names
    if kept.features and source.features:
        if sorted(source.features) != sorted(kept.features):
            odd = next(iter(sorted({*source.features} ^ {*kept.features})))
            what = "is not a feature of the run" if odd in source.features else "is missing, a feature of the run"
            raise InputError(f"{path}: column {odd!r} {what}; give the columns that the run was trained on")
        x = x[:, [source.features.index(name) for name in kept.features]]
    if x.ndim == 4 and x.shape[1] == 1 and kept.shape[:1] == (3,):  # grey images among coloured ones
        x = np.repeat(x, 3, 1)
    if x.shape[1:] != kept.shape:
        raise InputError(f"{path}: an input has shape {list(x.shape[1:])} where the run's is {list(kept.shape)}")
    if path.suffix == ".npz":  # its classes are numbers
        names = kept.classes[: len(names)] + names[len(kept.classes) :]
    place = {name: i for i, name in enumerate(kept.classes)}
    unknown = [name for i, name in enumerate(names) if name not in place and (source.y == i).any()]
    if unknown:
        raise InputError(f"{path}: the run has no class {unknown[0]!r}; it has {', '.join(kept.classes)}")
    into = np.array([*(place.get(name, -1) for name in names), -1])
    return source._replace(
        x=x, y=into[source.y], class_names=kept.classes, scaling=kept.scaling, features=kept.features
    )


def write_adapted(adapted: Adapted, kept: Kept, folder: Path) -> None:
    """A folder like a run's, which is there whole or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    _clear(partial)
    try:
        partial.mkdir(parents=True)
        manifest = make_manifest(adapted.state.setup, adapted.federation, [folder.name])
        manifest["adapted_from"] = {"run": kept.folder.name, "split_sha256": kept.digest}
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
    """Remove what a broken attempt has left."""
    for path in folder.glob("*"):
        path.unlink()
    if folder.exists():
        folder.rmdir()
