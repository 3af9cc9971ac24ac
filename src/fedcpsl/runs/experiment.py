"""Running a config from start or from a checkpoint, into a folder."""

import csv
import io
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from fedcpsl.evaluation import Evaluation, evaluate
from fedcpsl.models import choose_model, make_model
from fedcpsl.runs import folder as files
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint, save_tensors
from fedcpsl.runs.files import write_whole
from fedcpsl.runs.manifest import environment, make_manifest, now
from fedcpsl.schedule import stream
from fedcpsl.simulation import Setup, State, prepare, simulate
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


def build(config: Config, source: Source | None = None) -> Experiment:
    """Load the data (unless given), make the model and decide every `auto`; nothing is written."""
    config = replace(config, data=with_whole_paths(resolve(config.data)))
    federation = load_federation(config.data, config.run.seed, source)
    eta = choose_eta(config.algorithm.eta, config.data.dataset, config.work.unit)
    config = replace(config, algorithm=replace(config.algorithm, eta=eta))
    torch.manual_seed(int(stream(config.run.seed, "init").integers(2**63)))
    shape = federation.x.shape[1:]
    name = choose_model(config.model.name, shape, config.data.dataset)
    config = replace(config, model=replace(config.model, name=name))
    model = make_model(name, config.model.hidden, shape, federation.classes)
    setup = prepare(federation, model, config.algorithm, config.work, config.run)
    switches = ("unlabelled", "personal", "control_variates", "momentum", "normalised")
    parts = {name: getattr(setup.kept_method.parts, name) for name in switches}
    if config.run.gaps and setup.method.parts.alone:
        raise InputError(f"run.gaps = true: {config.algorithm.name} has no server whose gap to measure; give false")
    algorithm = replace(config.algorithm, eta_lc=choose_eta_lc(config.algorithm, eta), **parts)
    run = replace(config.run, executor=setup.executor, processes=setup.processes, device=str(setup.shelf.x.device))
    work = replace(config.work, active=setup.work.active)
    return Experiment(replace(config, algorithm=algorithm, run=run, work=work), federation, setup)


def start(experiment: Experiment, folder: Path, watch: Watch) -> Outcome:
    """Run from round 0 into a new folder."""
    files.create(folder, experiment.config, make_manifest(experiment.setup, experiment.federation))
    with files.locked(folder):
        return _run(experiment, folder, None, watch)


def resume(folder: Path, watch: Watch) -> Outcome:
    """Go on from the last checkpoint; ends as the uninterrupted run would have, bit for bit."""
    config, manifest = files.read_run_config(folder), files.read_manifest(folder)
    with files.locked(folder):
        torch.set_num_threads(manifest["layout"]["threads"])
        experiment = build(config)
        if experiment.federation.digest != manifest["split_sha256"]:
            raise InputError(f"{folder}: the data has changed since the run began; put the old data back")
        again = {"at": now(), **environment(experiment.setup.shelf.x.device)}
        files.write_manifest(folder, manifest | {"resumed": [*manifest.get("resumed", []), again]})
        found = checkpoints(folder)
        state = load_checkpoint(found[-1], experiment.setup) if found else None
        files.keep_metrics_until(folder, state.round if state else -1)
        return _run(experiment, folder, state, watch)


def _run(experiment: Experiment, folder: Path, from_state: State | None, watch: Watch) -> Outcome:
    config, setup = experiment.config, experiment.setup
    spent = (files.read_metrics(folder) or [{}])[-1].get("seconds", 0.0)
    began = saved = time.monotonic()
    state, evaluation = from_state, None
    with _stop_requests() as stop_requested:
        for state in simulate(setup, from_state):
            last = state.round == setup.total_rounds
            metrics = None
            if state.round % config.run.evaluate_every == 0 or last:
                evaluation = evaluate(state, evaluation.predictions if evaluation else None)
                _stop_if_lost(evaluation, state.round)
                metrics = evaluation.metrics(state) | {"gaps": gap(state)._asdict() if config.run.gaps else None}
                metrics["seconds"] = spent + time.monotonic() - began
                files.append_metrics(folder, metrics)
            watch(state.round, metrics)
            stopping = stop_requested()
            if last or stopping or time.monotonic() - saved >= config.run.checkpoint_seconds:
                save_checkpoint(folder, state)
                saved = time.monotonic()
            if stopping and not last:
                return Outcome(folder, state.round, finished=False)
    assert state is not None
    _write_results(folder, state, evaluation or evaluate(state), experiment.federation.scaling)
    return Outcome(folder, state.round, finished=True)


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
