"""Runs on several ranks: rank 0 leads, all others follow.

Rank 0 runs the command as a single process would: it alone reads settings, writes, evaluates and prints. It broadcasts
which runs to simulate, from which checkpoints, and after each round whether to continue. The other ranks build the same
runs, simulate their share of them and write nothing. On a single process nothing is broadcast.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedcpsl.config import Config, sections_of, with_settings
from fedcpsl.errors import InputError, LostRankError, RunError
from fedcpsl.runs.checkpoint import load_checkpoint
from fedcpsl.simulation import State, simulate_together
from fedcpsl.simulation.ranks import gone_ranks, hear, join, say, say_last, texts, world
from fedcpsl.torchrun import way_on

if TYPE_CHECKING:
    from fedcpsl.data.federation import Source
    from fedcpsl.runs.experiment import Experiment

END, RUN, FILE, CONTINUE, STOP = range(5)  # message codes
REPORT_SECONDS = 20.0  # in which rank 0 reports an error that all ranks have
LINGER_SECONDS = 5.0  # in which rank 0 can see which rank is gone


@contextmanager
def leading() -> Iterator[None]:
    """Join the other ranks as rank 0, and end them when the command ends, also after an error."""
    join()
    try:
        yield
    finally:
        say_last(END)


def broadcast_runs(folder: Path, runs: Sequence[tuple[Config, str]], checkpoints: Sequence[Path]) -> None:
    """Make all ranks simulate runs (their configs and the digests of their data), from the start or checkpoints."""
    if world()[1] == 1:
        return
    request: dict[str, Any] = {
        "folder": str(folder),
        "configs": [_flat(config) for config, _ in runs],
        "digests": [digest for _, digest in runs],
        "threads": torch.get_num_threads(),
        "checkpoints": len(checkpoints),
    }
    say(RUN, json.dumps(request).encode())
    for rank, problem in enumerate(texts("")):
        if problem:
            raise InputError(f"rank {rank}: {problem}")
    for path in checkpoints:
        say(FILE, path.read_bytes())


def broadcast_continue(further: bool) -> None:
    """Tell all ranks, after every round, whether there is a next one."""
    if world()[1] > 1:
        say(CONTINUE if further else STOP)


def _flat(config: Config) -> dict[str, Any]:
    return {f"{section}.{key}": v for section, values in sections_of(config).items() for key, v in values.items()}


def follow() -> int:
    """Simulate what rank 0 broadcasts until it ends; returns the exit code."""
    errors = sys.stderr
    _silence()
    job = ""
    try:
        join()
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to stop, or is gone
            signal.signal(number, lambda *_: None)
        code, payload = hear()
        while code == RUN:
            request = json.loads(payload)
            job = request["folder"]
            code, payload = hear() if _simulate(request, errors) else (STOP, b"")
    except LostRankError:
        return _report_lost_rank(job, errors)
    finally:
        sys.stderr = errors  # for unexpected errors
    return 0


def _silence() -> None:
    """Drop all output: rank 0 prints what all ranks would print."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _simulate(request: dict[str, Any], errors: Any) -> bool:
    """Simulate one group of runs; False if rank 0 has ended."""
    torch.set_num_threads(request["threads"])
    experiments, problem = _build(request)
    if any(texts(problem)):
        return True
    try:
        states = [_receive_state(experiment) for experiment in experiments] if request["checkpoints"] else None
        for _ in simulate_together([experiment.setup for experiment in experiments], states):
            code, _payload = hear()
            if code != CONTINUE:
                return code == STOP
    except LostRankError:
        raise
    except Exception as error:
        return _handle_error(error, errors)
    return True


def _handle_error(error: Exception, errors: Any) -> bool:
    """Wait for rank 0, which usually has the same error; otherwise end this process, which rank 0 then reports."""
    try:
        return hear(REPORT_SECONDS)[0] != END
    except TimeoutError:
        print(f"fedcpsl: rank {join().rank}: {error}", file=errors, flush=True)
        if not isinstance(error, InputError | RunError):
            traceback.print_exception(error, file=errors)
            errors.flush()
        os._exit(1)


def _build(request: dict[str, Any]) -> "tuple[list[Experiment], str]":
    """Build the experiments of rank 0; also returns what is wrong with them, or an empty text."""
    from fedcpsl.runs.experiment import build, load_data  # which imports this module

    experiments: list[Experiment] = []
    sources: dict[str, Source | None] = {}
    try:
        for settings, digest in zip(request["configs"], request["digests"], strict=True):
            config = with_settings(Config(), settings)
            data = repr(config.data)
            if len(request["configs"]) > 1 and data not in sources:
                sources[data] = load_data(config.data)
            experiments.append(build(config, sources.get(data), experiments))
            if experiments[-1].federation.digest != digest:
                raise InputError("its data is not the data of rank 0; give every machine the same files")
    except Exception as error:
        return [], str(error) or type(error).__name__
    return experiments, ""


def _receive_state(experiment: "Experiment") -> State:
    """Load the state of a run from the checkpoint that rank 0 sends."""
    _, payload = hear()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "round.safetensors"
        path.write_bytes(payload)
        return load_checkpoint(path, experiment.setup)


def _report_lost_rank(job: str, errors: Any) -> int:
    """Rank 0 reports a rank that is gone; if that is rank 0 itself, rank 1 does. Returns the exit code."""
    group = join()
    gone = gone_ranks(group, LINGER_SECONDS)
    if gone == [0] and group.rank == 1 and job:
        command = way_on("run", Path(job), group.size)
        print(f"fedcpsl: rank 0 is gone (killed, or out of memory?); resume with: {command}", file=errors)
    deadline = time.monotonic() + LINGER_SECONDS
    while 0 not in gone_ranks(group, patience=0) and time.monotonic() < deadline:
        time.sleep(0.05)  # so that rank 0 sees which rank is gone, and that this one is not
    return 1
