"""What rank 0 says to the other ranks: which runs to simulate, from where, and after each round whether to go on.

Rank 0 runs the command as a process of its own would: it alone reads settings, writes, evaluates and prints. The others
(`fedcpsl.runs.worker_rank`) build the same runs and simulate their share. Without other ranks nothing here acts.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedcpsl.config import Config
from fedcpsl.errors import InputError
from fedcpsl.simulation.ranks import join, say, say_last, texts, world

END, RUN, FILE, ON, STOP = range(5)  # the words


@contextmanager
def leading() -> Iterator[None]:
    """Meet the other ranks, and let them go at the end, whatever that is."""
    join()
    try:
        yield
    finally:
        say_last(END)


def begin(folder: Path, runs: Sequence[tuple[Config, str]], checkpoints: Sequence[Path]) -> None:
    """Have all ranks simulate runs (their configs and the digests of their data), from the start or checkpoints."""
    if world()[1] == 1:
        return
    word: dict[str, Any] = {
        "folder": str(folder),
        "configs": [_flat(config) for config, _ in runs],
        "digests": [digest for _, digest in runs],
        "threads": torch.get_num_threads(),
        "checkpoints": len(checkpoints),
    }
    say(RUN, json.dumps(word).encode())
    for rank, problem in enumerate(texts("")):
        if problem:
            raise InputError(f"rank {rank}: {problem}")
    for path in checkpoints:
        say(FILE, path.read_bytes())


def go_on(further: bool) -> None:
    """After every round: whether there is a next one."""
    if world()[1] > 1:
        say(ON if further else STOP)


def _flat(config: Config) -> dict[str, Any]:
    return {f"{section}.{key}": v for section, values in asdict(config).items() for key, v in values.items()}
