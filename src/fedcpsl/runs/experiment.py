"""Running a config from start or from a checkpoint, into a folder."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from fedcpsl.config import Config, Data
from fedcpsl.data.federation import Federation, Source
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.sources import data_folders, load_federation, load_source, resolve
from fedcpsl.errors import InputError, RunError
from fedcpsl.evaluation import evaluate
from fedcpsl.models import choose_model, make_model
from fedcpsl.runs import folder as files
from fedcpsl.runs.checkpoint import checkpoints, drop_checkpoints, load_checkpoint, numbers_of, save_checkpoint
from fedcpsl.runs.manifest import environment, make_manifest, now
from fedcpsl.runs.metrics_writer import MetricsWriter, Watch
from fedcpsl.runs.outputs import save_models, write_tables
from fedcpsl.runs.rank0 import begin, go_on
from fedcpsl.runs.split_summary import write_holdings
from fedcpsl.schedule import stream
from fedcpsl.settings import AUTO, Run
from fedcpsl.simulation import Setup, State, prepare, simulate_together
from fedcpsl.simulation.device_data import choose_tested_count
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.rounds import raise_if_not_finite
from fedcpsl.simulation.setup import choose_eta
from fedcpsl.simulation.tuning import Layout, fastest, laid_out, slots_that_fit
from fedcpsl.theory import applies

SAVED_AT_ONCE = 8  # runs; each has a tensor or two of its own in memory


class Experiment(NamedTuple):
    """A config with everything decided, its data and what simulates it."""

    config: Config
    federation: Federation | OnDemand
    setup: Setup


class Outcome(NamedTuple):
    """How a run ended."""

    folder: Path
    round: int
    finished: bool


def load_data(data: Data) -> Source | None:
    """The samples that a config's runs share; None where each makes its own."""
    return None if data.dataset == "synthetic" else load_source(with_whole_paths(resolve(data)))


def build(config: Config, source: Source | None = None, beside: Sequence[Experiment] = ()) -> Experiment:
    """Load the data (unless given), make the model and decide every `auto`; nothing is written.

    `beside` are experiments with the same model: all can then be run together. Those with the same data settings and
    seed share the split and all samples.
    """
    config = replace(config, data=with_whole_paths(resolve(config.data)))
    drawn = config.data, config.run.seed
    alike = next((e for e in reversed(beside) if (e.config.data, e.config.run.seed) == drawn), None)
    neighbour = alike or (beside[0] if beside else None)
    federation = alike.federation if alike else load_federation(config.data, config.run.seed, source)
    eta = choose_eta(config.algorithm.eta, config.data.dataset, config.work.unit)
    config = replace(config, algorithm=replace(config.algorithm, eta=eta))
    torch.manual_seed(int(stream(config.run.seed, "init").integers(2**63)))
    name = choose_model(config.model.name, federation.shape, config.data.dataset)
    config = replace(config, model=replace(config.model, name=name))
    model = make_model(name, config.model.hidden, federation.shape, federation.classes)
    other = neighbour.setup if neighbour else None
    setup = prepare(federation, model, config.algorithm, config.work, config.run, beside=other)
    setup = _as_beside(setup, other, config.run) if other else fastest(setup, config.run)
    if config.run.gaps and setup.method.traits.alone:
        raise InputError(f"run.gaps = true: {config.algorithm.name} has no server whose gap to measure; give false")
    if config.run.gaps and not applies(setup.method):
        raise InputError(f"run.gaps = true: the theory does not speak of {config.algorithm.name}; give false")
    if config.run.gaps and setup.supply is not None:
        raise InputError("run.gaps = true: gaps need the samples of all devices at a time; give false for these")
    algorithm = setup.algorithm.decided(config.algorithm, setup.kept_method, eta)
    where = (
        setup.device_data.where.type if world()[1] > 1 else str(setup.device_data.where)
    )  # ranks choose their own GPUs
    run = replace(
        config.run,
        executor=setup.executor,
        slots=setup.slots,
        processes=setup.processes,
        store=setup.store,
        device=where,
        evaluate_devices=choose_tested_count(config.run.evaluate_devices, federation),
    )
    work = replace(config.work, active=setup.work.active)
    return Experiment(replace(config, algorithm=algorithm, run=run, work=work), federation, setup)


def _as_beside(setup: Setup, other: Setup, run: Run) -> Setup:
    """What another run has found fastest, where it is left to us."""
    return laid_out(
        setup,
        Layout(
            other.executor if run.executor == AUTO else setup.executor,
            run.slots or other.slots,
            other.processes if run.processes == AUTO else setup.processes,
        ),
    )


class Member(NamedTuple):
    """One of the runs that go together."""

    experiment: Experiment
    folder: Path
    watch: Watch


def start(experiment: Experiment, folder: Path, watch: Watch) -> Outcome:
    """Run from round 0 into a new folder."""
    return start_together([Member(experiment, folder, watch)])[0]


def start_together(members: Sequence[Member]) -> list[Outcome]:
    """Run experiments with the same rounds side by side, each into a new folder."""
    members = _laid_out(members)
    company = [member.folder.name for member in members]
    for member in members:
        manifest = make_manifest(member.experiment.setup, member.experiment.federation, company)
        files.create(member.folder, member.experiment.config, manifest)
        write_holdings(member.folder, member.experiment.federation)
    with _all_locked(members), _named(members):
        begin(members[0].folder, _known(members), [])
        return _run(members, None)


def _laid_out(members: Sequence[Member]) -> list[Member]:
    """The members with the number of slots decided that fit side by side; a resumed run then finds it in its config."""
    chosen = members[0].experiment.config.run.slots
    slots = chosen or slots_that_fit([member.experiment.setup for member in members])
    laid_out = []
    for member in members:
        config, federation, setup = member.experiment
        config = replace(config, run=replace(config.run, slots=slots))
        setup = setup._replace(slots=slots, store_folder=member.folder)
        laid_out.append(member._replace(experiment=Experiment(config, federation, setup)))
    return laid_out


def resume(folder: Path, watch: Watch) -> Outcome:
    """Go on from the last checkpoint; ends as the uninterrupted run would have, bit for bit."""
    if files.is_finished(folder) and not checkpoints(folder):
        raise InputError(f"{folder}: is finished, and has kept its metrics alone; there is nothing to go on with")
    company = files.company_of(folder)
    if len(company) > 1:
        raise InputError(
            f"{folder}: runs side by side with {len(company) - 1} others; go on with all of them: "
            f"{files.command_for_all(folder)}"
        )
    return resume_together([folder], [watch])[0]


def resume_together(folders: Sequence[Path], watches: Sequence[Watch], source: Source | None = None) -> list[Outcome]:
    """Go on with runs that went together, from the last round of which all have a checkpoint."""
    members: list[Member] = []
    for folder, watch in zip(folders, watches, strict=True):
        config, manifest = files.read_run_config(folder), files.read_manifest(folder)
        files.check_ranks(folder, manifest, world()[1])
        torch.set_num_threads(manifest["layout"]["threads"])
        experiment = build(config, source, [member.experiment for member in members])
        if experiment.federation.digest != manifest["split_sha256"]:
            raise InputError(f"{folder}: the data has changed since the run began; put the old data back")
        experiment = experiment._replace(setup=experiment.setup._replace(store_folder=folder))
        members.append(Member(experiment, folder, watch))
    with _all_locked(members), _named(members):
        for member in members:
            manifest = files.read_manifest(member.folder)
            again = {"at": now(), **environment(member.experiment.setup.device_data.where)}
            files.write_manifest(member.folder, manifest | {"resumed": [*manifest.get("resumed", []), again]})
        found = [{path.name: path for path in checkpoints(member.folder)} for member in members]
        common = sorted(set.intersection(*(set(paths) for paths in found)))
        states, newest = None, [paths[common[-1]] for paths in found] if common else []
        if common:
            states = [load_checkpoint(p, member.experiment.setup) for p, member in zip(newest, members, strict=True)]
        for member, path in zip(members, newest, strict=False):  # there may be no checkpoint yet
            files.check_metrics(member.folder, numbers_of(path))
        for member in members:
            files.keep_metrics_until(member.folder, states[0].round if states else -1)
        begin(members[0].folder, _known(members), newest)
        return _run(members, states)


def _known(members: Sequence[Member]) -> list[tuple[Config, str]]:
    """What other ranks must know of the members."""
    return [(member.experiment.config, member.experiment.federation.digest) for member in members]


@contextmanager
def _all_locked(members: Sequence[Member]) -> Iterator[None]:
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(files.locked(member.folder))
        yield


def _run(members: Sequence[Member], from_states: Sequence[State] | None) -> list[Outcome]:
    """Simulate, evaluate and write, until the end or until asked to stop. All members have the same rounds."""
    setups, config = [member.experiment.setup for member in members], members[0].experiment.config
    diary = MetricsWriter([member.folder for member in members], [member.watch for member in members], config.run.gaps)
    states, saved = from_states, time.monotonic()
    with _stop_requests() as stop_requested:
        for states in simulate_together(setups, from_states):
            round = states[0].round
            last = round == setups[0].total_rounds
            diary.note(states, evaluated=round % config.run.evaluate_every == 0 or last)
            stopping = stop_requested()
            if last or stopping or time.monotonic() - saved >= config.run.checkpoint_seconds:
                diary.flush()
                raise_if_not_finite(states)
                if not last or config.run.keep == "models":
                    _for_each(members, states, lambda member, state: save_checkpoint(member.folder, state))
                saved = time.monotonic()
            go_on(not stopping or last)
            if stopping and not last:
                return [Outcome(member.folder, round, finished=False) for member in members]
    assert states is not None
    evaluations = diary.latest or [evaluate(state) for state in states]
    if config.run.keep == "models":
        _for_each(members, states, lambda m, state: save_models(m.folder, state, m.experiment.federation.scaling))
    for member, state, evaluation in zip(members, states, evaluations, strict=True):
        write_tables(member.folder, state, evaluation, member.experiment.federation.class_names)
        if config.run.keep == "metrics":
            drop_checkpoints(member.folder)
    return [Outcome(member.folder, state.round, finished=True) for member, state in zip(members, states, strict=True)]


def _for_each(members: Sequence[Member], states: Sequence[State], save: Callable[[Member, State], None]) -> None:
    """Save something of every run, some at a time: one's checksum is computed while another waits for the disk."""
    with ThreadPoolExecutor(SAVED_AT_ONCE) as pool:
        for _ in pool.map(save, members, states):
            pass


@contextmanager
def _named(members: Sequence[Member]) -> Iterator[None]:
    """What goes wrong in one of many runs is said of that run."""
    try:
        yield
    except RunError as error:
        if len(members) == 1 or error.run is None:
            raise
        named = RunError(f"{members[error.run].folder}: {error}")
        named.run = error.run
        raise named from error


def with_whole_paths(data: Data) -> Data:
    """The settings with paths that mean the same from any folder, and the folder that the environment names."""
    folders = [] if data.file or data.dataset in ("digits", "synthetic") else data_folders(data.dir)
    return replace(
        data,
        file=str(Path(data.file).absolute()) if data.file else "",
        split=str(Path(data.split).absolute()) if data.split else "",
        dir=str(folders[0].absolute()) if folders else "",
    )


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop after the round; a second Ctrl-C stops at once."""
    asked = False

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        if world()[1] == 1:  # torchrun asks all others to stop when one rank is gone: say what happened before ending
            for number, handler in before.items():
                signal.signal(number, handler)
