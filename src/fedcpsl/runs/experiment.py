"""Running a config into a folder: from the start or a checkpoint, one run or a group of runs side by side."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fedcpsl.algorithm import optional
from fedcpsl.algorithms import find_algorithm
from fedcpsl.config import Config, Data, with_settings
from fedcpsl.data.federation import Federation, Source
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.sources import data_folders, load_federation, load_source, resolve_auto
from fedcpsl.edge.settings import FILES as EDGE_FILES
from fedcpsl.edge.settings import Edge
from fedcpsl.errors import InputError, RunError
from fedcpsl.evaluation import Evaluation, Pending, evaluate, examiner
from fedcpsl.models import choose_model, make_model
from fedcpsl.runs import folder as run_folders
from fedcpsl.runs.checkpoint import checkpoints, drop_checkpoints, load_checkpoint, save_checkpoint, save_models
from fedcpsl.runs.distributed import broadcast_continue, broadcast_runs
from fedcpsl.runs.edge_files import append_round, check_edge_files, keep_rounds_until, write_devices
from fedcpsl.runs.environment import environment, make_manifest, now
from fedcpsl.runs.folder import write_tables
from fedcpsl.runs.split_summary import write_split_summary
from fedcpsl.schedule import stream
from fedcpsl.settings import AUTO, SEARCH, Run
from fedcpsl.simulation import Setup, State, prepare, simulate_together
from fedcpsl.simulation.device_data import choose_tested_count
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.setup import choose_eta
from fedcpsl.simulation.state import FiniteCheck
from fedcpsl.simulation.tuning import Layout, fastest, laid_out, slots_that_fit
from fedcpsl.step_size import SearchJob, StepSizeSearch, search_etas
from fedcpsl.storage import locked, read_numbers
from fedcpsl.theory import applies, gap

Watch = Callable[[int, dict[str, Any] | None], None]  # called with the round, and its metrics if it was evaluated
MAX_SAVES = 8  # runs saved at a time; each has a tensor or two of its own in memory


class Experiment(NamedTuple):
    """A config without any `auto`, its data and its simulation setup."""

    config: Config
    federation: Federation | OnDemand
    setup: Setup
    search: StepSizeSearch | None = None  # for its step size


class Outcome(NamedTuple):
    """How a run ended: after all its rounds, or marked as failed in its folder; or because a stop was requested."""

    folder: Path
    round: int
    finished: bool


def load_data(data: Data) -> Source | None:
    """Load the samples that a config's runs share; None if each run makes its own."""
    return None if data.dataset == "synthetic" else load_source(with_absolute_paths(resolve_auto(data)))


def without_search(config: Config) -> Config:
    """Return a config whose step size need not be searched, for checks."""
    return replace(config, algorithm=replace(config.algorithm, eta=AUTO)) if config.algorithm.eta == SEARCH else config


class Loaded(NamedTuple):
    """A config with the data and the model that it names."""

    config: Config
    federation: Federation | OnDemand
    model: nn.Module


def load_run(config: Config, source: Source | None = None, group: Sequence["Loaded | Experiment"] = ()) -> Loaded:
    """Load the data (unless given) and make the model; runs of the group with the same split share it."""
    config = replace(config, data=with_absolute_paths(resolve_auto(config.data)), edge=with_absolute_files(config.edge))
    same_split = _with_same_split(config, group)
    federation = same_split.federation if same_split else load_federation(config.data, config.run.seed, source)
    torch.manual_seed(int(stream(config.run.seed, "init").integers(2**63)))
    name = choose_model(config.model.name, federation.shape, config.data.dataset)
    model = make_model(name, config.model.hidden, federation.shape, federation.classes)
    return Loaded(replace(config, model=replace(config.model, name=name)), federation, model)


Known = TypeVar("Known", "Loaded", "Experiment", "Loaded | Experiment")


def _with_same_split(config: Config, group: Sequence[Known]) -> Known | None:
    split = config.data, config.run.seed
    return next((e for e in reversed(group) if (e.config.data, e.config.run.seed) == split), None)


def search_step_sizes(runs: Sequence[Loaded]) -> list[StepSizeSearch]:
    """Search the step sizes of runs of one group, side by side."""
    return search_etas(
        [SearchJob(run.federation, run.model, run.config.algorithm, run.config.work, run.config.run) for run in runs]
    )


def build(
    config: Config,
    source: Source | None = None,
    group: Sequence[Experiment] = (),
    search: StepSizeSearch | None = None,
) -> Experiment:
    """Load the data (unless given), make the model and replace every `auto` by a value; nothing is written.

    `group` are experiments with the same model: all can then be run together. Those with the same data settings and
    seed share the split and all samples. `search` is what a search for the step size has found; where it is left out,
    a step size that is to be searched is searched now.
    """
    config, federation, model = loaded = load_run(config, source, group)
    neighbour = _with_same_split(config, group) or (group[0] if group else None)
    if config.algorithm.eta == SEARCH and search is None:
        (search,) = search_step_sizes([loaded])
    eta = search.eta if search else choose_eta(config.algorithm.eta, config.data.dataset, config.work.unit)
    config = replace(config, algorithm=replace(config.algorithm, eta=eta))
    other = neighbour.setup if neighbour else None
    setup = prepare(federation, model, config.algorithm, config.work, config.run, beside=other, edge=config.edge)
    setup = _layout_of(other, setup, config.run) if other else fastest(setup, config.run)
    if config.run.gaps and setup.terms.method.traits.alone:
        raise InputError(f"run.gaps = true: {config.algorithm.name} has no server, and so no gap; give false")
    if config.run.gaps and not applies(setup.terms.method):
        raise InputError(f"run.gaps = true: the theory does not cover {config.algorithm.name}; give false")
    if config.run.gaps and setup.data.supply is not None:
        raise InputError("run.gaps = true: gaps need the samples of all devices at once; give false")
    algorithm = setup.terms.algorithm.decided(config.algorithm, setup.terms.kept_method, eta)
    where = setup.data.where
    run = replace(
        config.run,
        executor=setup.machine.executor,
        slots=setup.machine.slots,
        processes=setup.machine.processes,
        store=setup.machine.store,
        device=where.type if world()[1] > 1 else str(where),  # ranks choose their own GPUs
        evaluate_devices=choose_tested_count(config.run.evaluate_devices, federation),
    )
    work = replace(config.work, active=setup.terms.work.active)
    return Experiment(replace(config, algorithm=algorithm, run=run, work=work), federation, setup, search)


def _layout_of(other: Setup, setup: Setup, run: Run) -> Setup:
    """Return the setup with the layout that was fastest for another run, where settings are `auto`."""
    return laid_out(
        setup,
        Layout(
            other.machine.executor if run.executor == AUTO else setup.machine.executor,
            run.slots or other.machine.slots,
            other.machine.processes if run.processes == AUTO else setup.machine.processes,
        ),
    )


class Failures:
    """Which runs of a group diverged, by number, and why; each is marked in its folder. A run alone raises RunError."""

    def __init__(self, folders: Sequence[Path], *, alone: bool) -> None:
        self.folders, self.alone = folders, alone
        marked = enumerate([] if alone else map(run_folders.failure, folders))  # before the group was resumed
        self.reasons = {run: reason for run, reason in marked if reason is not None}

    def note(self, problems: Sequence[str | None]) -> None:
        """Note what is wrong with each run, if anything is and nothing was before."""
        for run, problem in enumerate(problems):
            if problem is None or run in self.reasons:
                continue
            if self.alone:
                error = RunError(problem)
                error.run = run
                raise error
            self.reasons[run] = problem
            run_folders.mark_failed(self.folders[run], problem)


class MetricsWriter:
    """Writes the metrics of a group of runs; one round late on a GPU, so that it computes meanwhile."""

    def __init__(self, watches: Sequence[Watch], gaps: bool, failures: Failures) -> None:
        self.latest: list[Evaluation] | None = None
        self._folders, self._watches, self._gaps, self._failures = failures.folders, watches, gaps, failures
        self._began = time.monotonic()
        self._spent = [(run_folders.read_metrics(f) or [{}])[-1].get("seconds", 0.0) for f in self._folders]
        self._pending: tuple[Sequence[State], Pending | None] | None = None
        self._examine = examiner()

    def record(self, states: Sequence[State], *, evaluated: bool) -> None:
        """Start to compute a round's metrics, and write those of the round before."""
        pending = self._examine(states) if evaluated else None
        self.flush()
        self._pending = states, pending
        if self._gaps or not states[0].targets.is_cuda:  # gaps are computed from the state, which will change
            self.flush()

    def flush(self) -> None:
        """Write the metrics of the last recorded round."""
        if self._pending is None:
            return
        (states, pending), self._pending = self._pending, None
        if pending:
            self.latest = pending.read()
            evaluated = zip(self.latest, states, strict=True)
            self._failures.note([_loss_not_finite(evaluation, state.round) for evaluation, state in evaluated])
        for i, state in enumerate(states):
            metrics, goes_on = None, i not in self._failures.reasons
            if goes_on and state.edge is not None:
                append_round(self._folders[i], state)
            if goes_on and pending and self.latest:
                metrics = self._metrics(state, self.latest[i], self._spent[i])
                run_folders.append_metrics(self._folders[i], metrics)
            self._watches[i](state.round, metrics)

    def _metrics(self, state: State, evaluation: Evaluation, spent: float) -> dict[str, Any]:
        gaps = gap(state)._asdict() if self._gaps else None
        seconds = spent + (time.monotonic() - self._began) / len(self._folders)  # its share of the group's time
        return evaluation.metrics(state) | {"gaps": gaps, "seconds": seconds}


def _loss_not_finite(evaluation: Evaluation, round: int) -> str | None:
    """Return what to say of a loss that is not finite: weights can be finite and too large for any prediction."""
    bad = [name for name, value in evaluation.losses.items() if value is not None and not isfinite(value)]
    if not bad:
        return None
    return f"the loss {bad[0]} is no longer a finite number after round {round}; use a smaller algorithm.eta"


class GroupMember(NamedTuple):
    """One run of a group."""

    experiment: Experiment
    folder: Path
    watch: Watch


def start(experiment: Experiment, folder: Path, watch: Watch) -> Outcome:
    """Run an experiment from round 0 into a new folder."""
    return start_together([GroupMember(experiment, folder, watch)])[0]


def start_together(members: Sequence[GroupMember]) -> list[Outcome]:
    """Run a group of experiments with the same rounds side by side, each into a new folder."""
    members = _with_slots(members)
    group = [member.folder.name for member in members]
    for member in members:
        manifest = make_manifest(member.experiment.setup, member.experiment.federation, group)
        if member.experiment.search:
            manifest["step_size_search"] = member.experiment.search.summary
        run_folders.create_run(member.folder, member.experiment.config, manifest)
        write_split_summary(member.folder, member.experiment.federation)
    with _all_locked(members), _errors_name_run(members):
        broadcast_runs(members[0].folder, _configs(members), [])
        return _run(members, None)


def _with_slots(members: Sequence[GroupMember]) -> list[GroupMember]:
    """Set the number of slots that fit in memory; it is written to the config, so that resumed runs use the same."""
    chosen = members[0].experiment.config.run.slots
    slots = chosen or slots_that_fit([member.experiment.setup for member in members])
    found = []
    for member in members:
        config, setup = member.experiment.config, member.experiment.setup
        config = replace(config, run=replace(config.run, slots=slots))
        setup = setup._replace(machine=setup.machine._replace(slots=slots, store_folder=member.folder))
        found.append(member._replace(experiment=member.experiment._replace(config=config, setup=setup)))
    return found


def resume(folder: Path, watch: Watch) -> Outcome:
    """Resume a run from its last checkpoint; its results are bit for bit those of an uninterrupted run."""
    if run_folders.is_finished(folder) and not checkpoints(folder):
        raise InputError(f"{folder}: is finished, and has kept its metrics only; there is nothing to resume")
    group = run_folders.group_of(folder)
    if len(group) > 1:
        raise InputError(
            f"{folder}: runs side by side with {len(group) - 1} others; resume all of them: "
            f"{run_folders.command_for_all(folder)}"
        )
    return resume_together([folder], [watch])[0]


def resume_together(folders: Sequence[Path], watches: Sequence[Watch], source: Source | None = None) -> list[Outcome]:
    """Resume a group of runs from the last round of which all have a checkpoint."""
    members: list[GroupMember] = []
    for folder, watch in zip(folders, watches, strict=True):
        config, manifest = run_folders.read_run_config(folder), run_folders.read_manifest(folder)
        run_folders.check_ranks(folder, manifest, world()[1])
        torch.set_num_threads(manifest["layout"]["threads"])
        experiment = build(config, source, [member.experiment for member in members])
        if experiment.federation.digest != manifest["split_sha256"]:
            raise InputError(f"{folder}: the data has changed since the run began; restore the old data")
        if experiment.setup.edge is not None:
            check_edge_files(folder, experiment.config.edge, manifest)
        machine = experiment.setup.machine._replace(store_folder=folder)
        experiment = experiment._replace(setup=experiment.setup._replace(machine=machine))
        members.append(GroupMember(experiment, folder, watch))
    with _all_locked(members), _errors_name_run(members):
        for member in members:
            manifest = run_folders.read_manifest(member.folder)
            again = {"at": now(), **environment(member.experiment.setup.data.where)}
            run_folders.write_manifest(member.folder, manifest | {"resumed": [*manifest.get("resumed", []), again]})
        found = [{path.name: path for path in checkpoints(member.folder)} for member in members]
        common = sorted(set.intersection(*(set(paths) for paths in found)))
        states, newest = None, [paths[common[-1]] for paths in found] if common else []
        if common:
            states = [load_checkpoint(p, member.experiment.setup) for p, member in zip(newest, members, strict=True)]
        for member, path in zip(members, newest, strict=False):  # there may be no checkpoint yet
            run_folders.check_metrics(member.folder, read_numbers(path))
        for member in members:
            run_folders.keep_metrics_until(member.folder, states[0].round if states else -1)
            keep_rounds_until(member.folder, states[0].round if states else -1)
        broadcast_runs(members[0].folder, _configs(members), newest)
        return _run(members, states)


def _configs(members: Sequence[GroupMember]) -> list[tuple[Config, str]]:
    """Return the configs of the members and the digests of their data, for other ranks."""
    return [(member.experiment.config, member.experiment.federation.digest) for member in members]


@contextmanager
def _all_locked(members: Sequence[GroupMember]) -> Iterator[None]:
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(locked(member.folder))
        yield


def _run(members: Sequence[GroupMember], from_states: Sequence[State] | None) -> list[Outcome]:
    """Simulate, evaluate and write, until the end or a stop request. All members have the same rounds.

    A run of a group that diverges is marked as failed at once and computed on, since what the others are computed
    beside changes their last bits; a run that goes alone, or on ranks, raises RunError.
    """
    setups, config = [member.experiment.setup for member in members], members[0].experiment.config
    failures = Failures([member.folder for member in members], alone=len(members) == 1 or world()[1] > 1)
    writer = MetricsWriter([member.watch for member in members], config.run.gaps, failures)
    states, saved = from_states, time.monotonic()
    with _stop_requests() as stop_requested:
        for states in _simulated(setups, from_states, failures):
            round = states[0].round
            last = round == setups[0].terms.total_rounds
            writer.record(states, evaluated=round % config.run.evaluate_every == 0 or last)
            stopping = stop_requested()
            if last or stopping or time.monotonic() - saved >= config.run.checkpoint_seconds:
                failures.note(_problems(states))
                writer.flush()
                if not last or config.run.keep == "models":
                    _save_each(members, states, lambda member, state: save_checkpoint(member.folder, state))
                saved = time.monotonic()
            broadcast_continue(not stopping or last)
            if stopping and not last:
                return [Outcome(member.folder, round, finished=False) for member in members]
    assert states is not None
    going = [i for i in range(len(members)) if i not in failures.reasons]
    if config.run.keep == "models":
        some = [members[i] for i in going], [states[i] for i in going]
        _save_each(*some, lambda m, state: save_models(m.folder, state, m.experiment.federation.scaling))
    for i in going:
        write_devices(members[i].folder, states[i])
        evaluation = writer.latest[i] if writer.latest else evaluate(states[i])
        write_tables(members[i].folder, states[i], evaluation, members[i].experiment.federation.class_names)
    if config.run.keep == "metrics":
        for member in members:
            drop_checkpoints(member.folder)
    return [Outcome(member.folder, state.round, finished=True) for member, state in zip(members, states, strict=True)]


def _simulated(
    setups: Sequence[Setup], from_states: Sequence[State] | None, failures: Failures
) -> Iterator[list[State]]:
    """The states after every round, until all runs are done or have failed.

    What diverged in a group is noted: on a GPU while the next round is computed.
    """
    checks: list[FiniteCheck | None] = []
    for states in simulate_together(setups, from_states, may_diverge=not failures.alone):
        if not failures.alone:
            before, checks = checks, [state.finite_check for state in states]
            known = before if states[0].targets.is_cuda else checks
            failures.note([check and check.problem for check in known])
        yield states
        if len(failures.reasons) == len(setups):
            return


def _problems(states: Sequence[State]) -> list[str | None]:
    """What is not finite in each run."""
    return [state.finite_check and state.finite_check.problem for state in states]


def _save_each(
    members: Sequence[GroupMember], states: Sequence[State], save: Callable[[GroupMember, State], None]
) -> None:
    """Call `save` for every run, some in parallel: one computes its checksum while another waits for the disk."""
    with ThreadPoolExecutor(MAX_SAVES) as pool:
        for _ in pool.map(save, members, states):
            pass


@contextmanager
def _errors_name_run(members: Sequence[GroupMember]) -> Iterator[None]:
    """Add the folder of the failed run to errors of a group."""
    try:
        yield
    except RunError as error:
        if len(members) == 1 or error.run is None:
            raise
        named = RunError(f"{members[error.run].folder}: {error}")
        named.run = error.run
        raise named from error


def with_absolute_paths(data: Data) -> Data:
    """Return the settings with absolute paths, and with the data folder that the environment gives."""
    folders = [] if data.file or data.dataset in ("digits", "synthetic") else data_folders(data.dir)
    return replace(
        data,
        file=str(Path(data.file).absolute()) if data.file else "",
        split=str(Path(data.split).absolute()) if data.split else "",
        dir=str(folders[0].absolute()) if folders else "",
    )


def with_absolute_files(edge: Edge) -> Edge:
    """Return the settings of an edge network with absolute paths."""
    given = {name: getattr(edge, name) for name in EDGE_FILES}
    absolute: dict[str, Any] = {name: str(Path(path).absolute()) for name, path in given.items() if path}
    return replace(edge, **absolute)


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Make Ctrl-C and SIGTERM stop the run after the round; a second Ctrl-C stops at once.

    Yields a function that returns whether a stop was requested.
    """
    requested = False

    def request(number: int, _: FrameType | None) -> None:
        nonlocal requested
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        if world()[1] == 1:  # torchrun sends SIGTERM to all others when one rank is gone: print the error before ending
            for number, handler in before.items():
                signal.signal(number, handler)


def alone_configs(config: Config, *, searched: bool = False) -> list[Config]:
    """Return the settings of a run whose devices train alone, as in a comparison with this run.

    Where the run's step size was searched, that of devices alone is searched too, and there may be several: the one
    with the smallest loss on labels held back is then the baseline.
    """
    own = optional(find_algorithm(config.algorithm.name)[0], "alone")
    alone = own(config.algorithm) if own else [with_settings(config, {"algorithm.name": "local"}).algorithm]
    alone = [replace(each, eta=SEARCH) for each in alone] if searched and own else alone[:1]
    run = replace(
        config.run, gaps=False, keep="metrics", executor=AUTO, slots=0, processes=AUTO, store=AUTO, device=AUTO
    )
    work = replace(config.work, two_phase=False, personal_rounds=0)
    return [replace(config, algorithm=each, run=run, work=work) for each in alone]


def _alone(config: Config, *, searched: bool) -> Experiment:
    """Return the experiment of devices that train alone, with the best of their settings."""
    first, *others = alone_configs(config, searched=searched)
    experiments = [build(first)]
    experiments += [build(each, group=experiments[:1]) for each in others]
    return min(experiments, key=_held_back_loss)


def _held_back_loss(experiment: Experiment) -> float:
    """Return the smallest loss of a search for the step size; 0 without one."""
    return min(experiment.search.losses.values(), default=0.0) if experiment.search else 0.0


def train_alone(folder: Path, watch: Watch) -> Path | None:
    """Train a run's devices alone into <folder>/alone, or resume that; None if a stop was requested.

    It is the baseline that shows what devices gain from each other.
    """
    inside, config = folder / run_folders.ALONE, run_folders.read_run_config(folder)
    if run_folders.is_finished(inside):
        return inside
    if (inside / "config.toml").is_file():
        return inside if resume(inside, watch).finished else None
    manifest = run_folders.read_manifest(folder)
    experiment = _alone(config, searched="step_size_search" in manifest)
    if experiment.federation.digest != manifest["split_sha256"]:
        raise InputError(f"{folder}: the data has changed since the run began; restore the old data")
    return inside if start(experiment, inside, watch).finished else None
