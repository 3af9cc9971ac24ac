"""Running a config from start or from a checkpoint, into a folder."""

import csv
import io
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from fedcpsl.config import Config, Data
from fedcpsl.data.federation import Federation, Source
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.sources import data_folders, load_federation, load_source, resolve
from fedcpsl.errors import InputError, RunError
from fedcpsl.evaluation import Evaluation, evaluate, evaluate_together
from fedcpsl.models import choose_model, make_model
from fedcpsl.runs import folder as files
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint, save_tensors
from fedcpsl.runs.files import write_whole
from fedcpsl.runs.manifest import environment, make_manifest, now
from fedcpsl.schedule import stream
from fedcpsl.simulation import Setup, State, prepare, simulate_together
from fedcpsl.simulation.memory import slots_that_fit
from fedcpsl.simulation.setup import choose_eta, choose_eta_lc
from fedcpsl.theory import gap


class Experiment(NamedTuple):
    """A config with everything decided, its data and what simulates it."""

    config: Config
    federation: Federation
    setup: Setup


class Outcome(NamedTuple):
    """How a run ended."""

    folder: Path
    round: int
    finished: bool


Watch = Callable[[int, dict[str, Any] | None], None]  # told the round, and its metrics where evaluated


def load_data(data: Data) -> Source:
    """The samples that a config's runs share."""
    return load_source(with_whole_paths(resolve(data)))


def build(config: Config, source: Source | None = None, beside: Experiment | None = None) -> Experiment:
    """Load the data (unless given), make the model and decide every `auto`; nothing is written.

    `beside` is an experiment with the same model: the two can then be run together.
    """
    config = replace(config, data=with_whole_paths(resolve(config.data)))
    federation = load_federation(config.data, config.run.seed, source)
    eta = choose_eta(config.algorithm.eta, config.data.dataset, config.work.unit)
    config = replace(config, algorithm=replace(config.algorithm, eta=eta))
    torch.manual_seed(int(stream(config.run.seed, "init").integers(2**63)))
    shape = federation.x.shape[1:]
    name = choose_model(config.model.name, shape, config.data.dataset)
    config = replace(config, model=replace(config.model, name=name))
    model = make_model(name, config.model.hidden, shape, federation.classes)
    setup = prepare(
        federation, model, config.algorithm, config.work, config.run, beside=beside.setup if beside else None
    )
    switches = ("unlabelled", "personal", "control_variates", "momentum", "normalised")
    parts = {name: getattr(setup.kept_method.parts, name) for name in switches}
    if config.run.gaps and setup.method.parts.alone:
        raise InputError(f"run.gaps = true: {config.algorithm.name} has no server whose gap to measure; give false")
    algorithm = replace(config.algorithm, eta_lc=choose_eta_lc(config.algorithm, eta), **parts)
    run = replace(config.run, executor=setup.executor, processes=setup.processes, device=str(setup.shelf.where))
    work = replace(config.work, active=setup.work.active)
    return Experiment(replace(config, algorithm=algorithm, run=run, work=work), federation, setup)


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
    with _all_locked(members):
        return _run(members, None)


def _laid_out(members: Sequence[Member]) -> list[Member]:
    """The members with the number of slots decided that fit side by side; a resumed run then finds it in its config."""
    chosen = members[0].experiment.config.run.slots
    slots = chosen or slots_that_fit([member.experiment.setup for member in members])
    laid_out = []
    for member in members:
        config, federation, setup = member.experiment
        config = replace(config, run=replace(config.run, slots=slots))
        laid_out.append(member._replace(experiment=Experiment(config, federation, setup._replace(slots=slots))))
    return laid_out


def resume(folder: Path, watch: Watch) -> Outcome:
    """Go on from the last checkpoint; ends as the uninterrupted run would have, bit for bit."""
    company = files.company_of(folder)
    if len(company) > 1:
        raise InputError(
            f"{folder}: runs side by side with {len(company) - 1} others; go on with all of them: "
            f"fedcpsl compare --resume {folder.parent.parent}"
        )
    return resume_together([folder], [watch])[0]


def resume_together(folders: Sequence[Path], watches: Sequence[Watch], source: Source | None = None) -> list[Outcome]:
    """Go on with runs that went together, from the last round of which all have a checkpoint."""
    members: list[Member] = []
    for folder, watch in zip(folders, watches, strict=True):
        config, manifest = files.read_run_config(folder), files.read_manifest(folder)
        torch.set_num_threads(manifest["layout"]["threads"])
        experiment = build(config, source, members[0].experiment if members else None)
        if experiment.federation.digest != manifest["split_sha256"]:
            raise InputError(f"{folder}: the data has changed since the run began; put the old data back")
        members.append(Member(experiment, folder, watch))
    with _all_locked(members):
        for member in members:
            manifest = files.read_manifest(member.folder)
            again = {"at": now(), **environment(member.experiment.setup.shelf.where)}
            files.write_manifest(member.folder, manifest | {"resumed": [*manifest.get("resumed", []), again]})
        found = [{path.name: path for path in checkpoints(member.folder)} for member in members]
        common = sorted(set.intersection(*(set(paths) for paths in found)))
        states = None
        if common:
            pairs = zip(members, found, strict=True)
            states = [load_checkpoint(paths[common[-1]], member.experiment.setup) for member, paths in pairs]
        for member in members:
            files.keep_metrics_until(member.folder, states[0].round if states else -1)
        return _run(members, states)


@contextmanager
def _all_locked(members: Sequence[Member]) -> Iterator[None]:
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(files.locked(member.folder))
        yield


def _run(members: Sequence[Member], from_states: Sequence[State] | None) -> list[Outcome]:
    """Simulate, evaluate and write, until the end or until asked to stop. All members have the same rounds."""
    states = from_states
    setups, config = [member.experiment.setup for member in members], members[0].experiment.config
    spent = [(files.read_metrics(member.folder) or [{}])[-1].get("seconds", 0.0) for member in members]
    began = saved = time.monotonic()
    evaluations: list[Evaluation | None] = [None] * len(members)
    with _stop_requests() as stop_requested:
        for states in _simulated(members, setups, from_states):
            round = states[0].round
            last = round == setups[0].total_rounds
            due = round % config.run.evaluate_every == 0 or last
            if due:
                earlier = [e.predictions if e else None for e in evaluations]
                evaluations = list(evaluate_together(states, earlier))
            for i, (member, state, evaluation) in enumerate(zip(members, states, evaluations, strict=True)):
                metrics = None
                if due and evaluation:
                    _stop_if_lost(evaluation, round)
                    gaps = gap(state)._asdict() if config.run.gaps else None
                    seconds = spent[i] + (time.monotonic() - began) / len(members)  # its share of everybody's time
                    metrics = evaluation.metrics(state) | {"gaps": gaps, "seconds": seconds}
                    files.append_metrics(member.folder, metrics)
                member.watch(round, metrics)
            stopping = stop_requested()
            if last or stopping or time.monotonic() - saved >= config.run.checkpoint_seconds:
                for member, state in zip(members, states, strict=True):
                    save_checkpoint(member.folder, state)
                saved = time.monotonic()
            if stopping and not last:
                return [Outcome(member.folder, round, finished=False) for member in members]
    assert states is not None
    for member, state, evaluation in zip(members, states, evaluations, strict=True):
        _write_results(member.folder, state, evaluation or evaluate(state), member.experiment.federation.scaling)
    return [Outcome(member.folder, state.round, finished=True) for member, state in zip(members, states, strict=True)]


def _simulated(
    members: Sequence[Member], setups: Sequence[Setup], states: Sequence[State] | None
) -> Iterator[list[State]]:
    """The rounds; what goes wrong in one of many runs is said of that run."""
    try:
        yield from simulate_together(setups, states)
    except RunError as error:
        if len(members) > 1 and error.run is not None:
            raise RunError(f"{members[error.run].folder}: {error}") from error
        raise


def _stop_if_lost(evaluation: Evaluation, round: int) -> None:
    """Weights can grow absurd and still be numbers; then no prediction is one."""
    lost = [name for name, value in evaluation.losses.items() if value is not None and not isfinite(value)]
    if lost:
        raise RunError(
            f"the loss {lost[0]} is no longer a finite number after round {round}; use a smaller algorithm.eta"
        )


def _write_results(folder: Path, state: State, evaluation: Evaluation, scaling: Scaling | None) -> None:
    """Final models and the table of devices."""
    network = state.setup.method.network
    alone = state.setup.method.parts.alone
    models = {} if alone else {f"global/{name}": t for name, t in network.named(state.server.theta).items()}
    if state.setup.kept_method.parts.personal:
        for i, theta_lc in enumerate(state.devices.theta_lc):
            models |= {f"device{i}/localized/{name}": t for name, t in network.named(theta_lc).items()}
        models["beta"] = state.setup.hyper.beta
    if scaling:
        models |= {"input/shift": torch.from_numpy(scaling.shift), "input/scale": torch.from_numpy(scaling.scale)}
    save_tensors(folder / "models.safetensors", models, {"round": state.round, "devices": state.setup.devices})
    write_whole(folder / "devices.csv", _device_table(state, evaluation))


def _device_table(state: State, evaluation: Evaluation) -> str:
    setup = state.setup
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["device", "name", "labelled", "unlabelled", "active_rounds", "personal", "global", "localized"])
    for i, name in enumerate(setup.names):
        shown = (evaluation.personal, evaluation.general, evaluation.localized)
        accuracies = [a.devices.get(i, "") if a else "" for a in shown]
        sizes = (setup.sizes.labelled[i], setup.sizes.unlabelled[i])
        table.writerow([i, name, *sizes, state.active_rounds[i], *accuracies])
    return text.getvalue()


def with_whole_paths(data: Data) -> Data:
    """The settings with paths that mean the same from any folder, and the folder that the environment names."""
    folders = [] if data.file or data.dataset == "digits" else data_folders(data.dir)
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
        for number, handler in before.items():
            signal.signal(number, handler)
