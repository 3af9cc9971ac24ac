"""The ranks of a job that torchrun started: who they are, and how they talk to each other.

Rank 0 leads: it says a word to all others (`say`, `hear`), and all can tell each other a text (`texts`) or numbers
(`all_numbers`). Words go over gloo, from host to host, so that a rank that is gone is noticed at once; numbers of a GPU
go over NCCL where every rank has a GPU of its own.
"""

import atexit
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fedcpsl.errors import LostRankError
from fedcpsl.torchrun import place

WAIT = timedelta(hours=1)  # for a rank that is there and says nothing; one that is gone is noticed at once
AT_ONCE = 1 << 28  # bytes of a payload that are sent at a time


class Group(NamedTuple):
    """The ranks that have met."""

    rank: int
    size: int
    words: Any  # the process group that goes from host to host; None: the default one
    hosts: list[tuple[str, int]]  # every rank's machine and process


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) for a process of its own."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return place()


@cache
def join() -> Group:
    """Meet the other ranks; a process group that the caller made already is left alone."""
    with _lost_ranks_noticed():
        if dist.is_initialized():
            words = dist.new_group(backend="gloo", timeout=WAIT)
        else:
            dist.init_process_group("gloo", timeout=WAIT)
            words = None
        atexit.register(leave)
    group = Group(dist.get_rank(), dist.get_world_size(), words, [])
    known = _texts(group, json.dumps([socket.gethostname(), os.getpid()]))
    group.hosts.extend((host, pid) for host, pid in map(json.loads, known))
    return group


def leave() -> None:
    """Leave the other ranks, and end the threads that talk to them.

    A thread of gloo that lets go of a tensor while the interpreter shuts down ends the process with an abort: nothing
    may hold a process group until then. A process group that the caller made is left alone here too.
    """
    if join.cache_info().currsize:
        ours = join().words
        with suppress(Exception):
            dist.destroy_process_group(ours)
        del ours
    join.cache_clear()
    _over_nccl.cache_clear()


@contextmanager
def _lost_ranks_noticed(group: Group | None = None) -> Iterator[None]:
    """A broken connection as an error that names who is gone."""
    try:
        yield
    except RuntimeError as error:
        gone = gone_ranks(group) if group else []
        if gone:
            who = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} are"
            raise LostRankError(f"{who} gone (killed, or out of memory?)") from error
        raise LostRankError(f"the connection to another rank is lost ({str(error).splitlines()[0]})") from error


def gone_ranks(group: Group, patience: float = 2.0) -> list[int]:
    """The ranks of this machine whose processes have ended, once there is one; none where there is none in time."""
    here, deadline = socket.gethostname(), time.monotonic() + patience
    while True:
        gone = [rank for rank, (host, pid) in enumerate(group.hosts) if host == here and not _is_alive(pid)]
        if gone or time.monotonic() > deadline:
            return gone
        time.sleep(0.005)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it has ended since, or there is no /proc
        return not Path("/proc/self").exists()


def say(code: int, payload: bytes = b"") -> None:
    """Rank 0 to all others: a word, and what goes with it."""
    group = join()
    with _lost_ranks_noticed(group):
        dist.broadcast(torch.tensor([code, len(payload)]), 0, group.words)
        for piece in _pieces(payload):
            dist.broadcast(piece, 0, group.words)


def hear(patience: float | None = None) -> tuple[int, bytes]:
    """The next message of rank 0; with a patience in seconds, a TimeoutError if none comes in that time."""
    group, word = join(), torch.zeros(2, dtype=torch.int64)
    with _lost_ranks_noticed(group):
        if patience is not None and not _done_within(patience, dist.broadcast(word, 0, group.words, async_op=True)):
            raise TimeoutError
        if patience is None:
            dist.broadcast(word, 0, group.words)
        code, length = word.tolist()
        payload = bytearray(length)
        for piece in _pieces(payload):
            dist.broadcast(piece, 0, group.words)
    return code, bytes(payload)


def say_last(code: int, patience: float = 5.0) -> None:
    """A message to the ranks that still listen; waits for none of them."""
    with suppress(RuntimeError):
        _done_within(patience, dist.broadcast(torch.tensor([code, 0]), 0, join().words, async_op=True))


def _done_within(seconds: float, work: Any) -> bool:
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    work.wait()  # raises what went wrong
    return True


def _pieces(payload: bytes | bytearray) -> Iterator[Tensor]:
    """A payload's bytes as tensors, on the same memory where it can be written."""
    if payload:
        whole = torch.frombuffer(payload if isinstance(payload, bytearray) else bytearray(payload), dtype=torch.uint8)
        yield from whole.split(AT_ONCE)


def texts(mine: str) -> list[str]:
    """Every rank's text, at every rank."""
    return _texts(join(), mine)


def _texts(group: Group, mine: str) -> list[str]:
    raw = torch.frombuffer(bytearray(mine.encode() + b"\0"), dtype=torch.uint8)
    lengths = [int(row) for row in _gathered(group, torch.tensor([len(raw)]))]
    padded = raw.new_zeros(max(lengths))
    padded[: len(raw)] = raw
    return [bytes(row[: n - 1].tolist()).decode() for row, n in zip(_gathered(group, padded), lengths, strict=True)]


def all_numbers(mine: Sequence[int]) -> list[list[int]]:
    """Every rank's whole numbers, as many at each, at every rank."""
    return [row.tolist() for row in _gathered(join(), torch.tensor(mine, dtype=torch.int64))]


def all_values(mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Every rank's values, `sizes` of them at each, at every rank."""
    padded = mine.new_zeros(max(sizes))
    padded[: len(mine)] = mine
    if not len(padded):
        return [padded for _ in sizes]
    if mine.is_cuda and (own := _over_nccl(mine.device)):
        rows = _gathered(join()._replace(words=own), padded)
    else:
        rows = [row.to(mine.device) for row in _gathered(join(), padded.cpu())]
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _gathered(group: Group, mine: Tensor) -> list[Tensor]:
    rows = list(mine.new_empty(group.size, *mine.shape).unbind())
    with _lost_ranks_noticed(group):
        dist.all_gather(rows, mine, group.words)
    return rows


@cache
def _over_nccl(device: torch.device) -> Any:
    """The process group of GPUs, where every rank has its own; else None, and numbers go over the host."""
    used = texts(str(torch.cuda.get_device_properties(device).uuid))
    if len(set(used)) == len(used):
        return dist.new_group(backend="nccl", timeout=WAIT)
    if join().rank == 0:
        logging.getLogger("fedcpsl").warning(
            "%d ranks share %d GPU(s): what they exchange goes over the host with gloo, as NCCL needs one GPU each",
            len(used),
            len(set(used)),
        )
    return None
