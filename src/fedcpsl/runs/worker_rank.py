"""A rank other than 0: it builds the runs that rank 0 names, simulates its share of them, and writes nothing."""

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from fedcpsl.config import Config, with_settings
from fedcpsl.data.federation import Source
from fedcpsl.errors import InputError, LostRankError, RunError
from fedcpsl.runs.checkpoint import load_checkpoint
from fedcpsl.runs.experiment import Experiment, build, load_data
from fedcpsl.runs.rank0 import END, ON, RUN, STOP
from fedcpsl.simulation import State, simulate_together
from fedcpsl.simulation.ranks import gone_ranks, hear, join, texts
from fedcpsl.torchrun import way_on

PATIENCE = 20.0  # seconds in which rank 0 reports an error that all ranks have
LINGER = 5.0  # seconds that rank 0 has to see who is gone


def follow() -> int:
    """Do what rank 0 says until it lets us go; returns the exit code."""
    errors = sys.stderr
    _be_silent()
    job = ""
    try:
        join()
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to stop, or is gone
            signal.signal(number, lambda *_: None)
        heard = hear()
        while heard[0] == RUN:
            word = json.loads(heard[1])
            job = word["folder"]
            heard = hear() if _simulate(word, errors) else (STOP, b"")
    except LostRankError:
        return _left_alone(job, errors)
    finally:
        sys.stderr = errors  # for whatever nobody has thought of
    return 0


def _be_silent() -> None:
    """Rank 0 says everything that all would say."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _simulate(word: dict[str, Any], errors: Any) -> bool:
    """One company of runs; False once rank 0 lets us go."""
    torch.set_num_threads(word["threads"])
    experiments, problem = _built(word)
    if any(texts(problem)):
        return True
    try:
        states = [_received(experiment) for experiment in experiments] if word["checkpoints"] else None
        for _ in simulate_together([experiment.setup for experiment in experiments], states):
            code, _payload = hear()
            if code != ON:
                return code == STOP
    except LostRankError:
        raise
    except Exception as error:
        return _failed(error, errors)
    return True


def _failed(error: Exception, errors: Any) -> bool:
    """Rank 0 knows the error and lets us go; where it does not, this rank ends, which rank 0 then reports."""
    try:
        return hear(PATIENCE)[0] != END
    except TimeoutError:
        print(f"fedcpsl: rank {join().rank}: {error}", file=errors, flush=True)
        if not isinstance(error, InputError | RunError):
            traceback.print_exception(error, file=errors)
            errors.flush()
        os._exit(1)


def _built(word: dict[str, Any]) -> tuple[list[Experiment], str]:
    """The same experiments as rank 0 has, and what is wrong with them, if anything is."""
    experiments: list[Experiment] = []
    sources: dict[str, Source | None] = {}
    try:
        for settings, digest in zip(word["configs"], word["digests"], strict=True):
            config = with_settings(Config(), settings)
            data = repr(config.data)
            if len(word["configs"]) > 1 and data not in sources:
                sources[data] = load_data(config.data)
            experiments.append(build(config, sources.get(data), experiments))
            if experiments[-1].federation.digest != digest:
                raise InputError("its data is not the data of rank 0; give every machine the same files")
    except Exception as error:
        return [], str(error) or type(error).__name__
    return experiments, ""


def _received(experiment: Experiment) -> State:
    """The state of a run from the checkpoint that rank 0 sends."""
    _, payload = hear()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "round.safetensors"
        path.write_bytes(payload)
        return load_checkpoint(path, experiment.setup)


def _left_alone(job: str, errors: Any) -> int:
    """Rank 0 reports whoever is gone; where that is rank 0 itself, rank 1 does."""
    group = join()
    gone = gone_ranks(group, LINGER)
    if gone == [0] and group.rank == 1 and job:
        on = way_on("run", Path(job), group.size)
        print(f"fedcpsl: rank 0 is gone (killed, or out of memory?); go on with: {on}", file=errors)
    deadline = time.monotonic() + LINGER
    while 0 not in gone_ranks(group, patience=0) and time.monotonic() < deadline:
        time.sleep(0.05)  # so that rank 0 sees who is gone, and that we are not
    return 1
