"""A run's devices, each training alone: what the others are worth to them."""

from dataclasses import replace
from pathlib import Path

from fedcpsl.algorithm import optional
from fedcpsl.algorithms import find_algorithm
from fedcpsl.config import Config, with_settings
from fedcpsl.errors import InputError
from fedcpsl.runs import folder as files
from fedcpsl.runs.experiment import build, resume, start
from fedcpsl.runs.metrics_writer import Watch
from fedcpsl.settings import AUTO

FOLDER = "alone"


def alone_config(config: Config) -> Config:
    """The settings of a run for devices without a server, as a comparison would have them beside it."""
    own = optional(find_algorithm(config.algorithm.name)[0], "alone")
    alone = own(config.algorithm) if own else with_settings(config, {"algorithm.name": "local"}).algorithm
    run = replace(
        config.run, gaps=False, keep="metrics", executor=AUTO, slots=0, processes=AUTO, store=AUTO, device=AUTO
    )
    return replace(config, algorithm=alone, run=run, work=replace(config.work, two_phase=False, personal_rounds=0))


def train_alone(folder: Path, watch: Watch) -> Path | None:
    """Train a run's devices alone into <folder>/alone, or go on with that; None where it was asked to stop."""
    inside, config = folder / FOLDER, files.read_run_config(folder)
    if files.is_finished(inside):
        return inside
    if (inside / "config.toml").is_file():
        return inside if resume(inside, watch).finished else None
    experiment = build(alone_config(config))
    if experiment.federation.digest != files.read_manifest(folder)["split_sha256"]:
        raise InputError(f"{folder}: the data has changed since the run began; put the old data back")
    return inside if start(experiment, inside, watch).finished else None
