"""Local rounds on several processes: on a CPU each core then works alone, without waiting for the others.

The workers are forked once, after the data is in place, so nothing but schedules and results passes between them;
device states, pseudo-labels and the broadcast lie in memory that all of them see.
"""

import gc
import mmap
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedcpsl.algorithm import Broadcast, Device, Upload, map_tensors
from fedcpsl.errors import RunError
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.capture import captured_steps
from fedcpsl.simulation.executors import Finished, LocalRounds, local_rounds
from fedcpsl.simulation.setup import Setup


@contextmanager
def shared_rounds(
    setup: Setup, devices: Device, targets: Tensor, broadcast: Broadcast
) -> Iterator[tuple[Device, Tensor, LocalRounds]]:
    """`local_rounds` over `setup.processes` processes, and the device states and targets it works on."""
    if setup.slots and targets.device.type == "cuda":
        yield devices, targets, partial(local_rounds, take_steps=captured_steps())
        return
    if setup.processes == 1:
        yield devices, targets, local_rounds
        return
    devices, targets, board = (map_tensors(_shared, t) for t in (devices, targets, broadcast))
    pipes: list[Connection] = []
    processes = []
    for _ in range(setup.processes):
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(
            target=_work, args=(theirs, [*pipes, ours], setup, devices, targets, board), daemon=True
        )
        with warnings.catch_warnings():  # forking beside idle threads: the child starts none and uses no lock of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)

    def run(_: Setup, plan: Sequence[DeviceRound], __: Device, ___: Tensor, broadcast: Broadcast) -> Iterator[Finished]:
        map_tensors(lambda mine, new: mine.copy_(new), board, broadcast)
        shares = share_out(plan, len(pipes))
        for pipe, share in zip(pipes, shares, strict=True):
            _ask(pipe.send, share)
        with _one_thread():
            for pipe, share in zip(pipes, shares, strict=True):
                for _group in range(0, len(share), setup.slots or 1):
                    yield _received(_ask(pipe.recv))

    try:
        yield devices, targets, run
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5)
            process.kill()


@contextmanager
def _one_thread() -> Iterator[None]:
    """While workers use the other cores, threads of our own would only wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_out(plan: Sequence[DeviceRound], shares: int) -> list[list[DeviceRound]]:
    """Devices to processes, so that all have about as many steps; in device order within each."""
    loads, dealt = [0] * shares, [list[DeviceRound]() for _ in range(shares)]
    for task in sorted(plan, key=lambda task: (-task.steps, task.device)):
        least = loads.index(min(loads))
        dealt[least].append(task)
        loads[least] += task.steps
    return [sorted(share, key=lambda task: task.device) for share in dealt]


def _shared(tensor: Tensor) -> Tensor:
    """A copy in memory that forked processes share."""
    if not tensor.numel():
        return tensor
    memory = mmap.mmap(-1, tensor.numel() * tensor.element_size())
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def _work(
    pipe: Connection, others: list[Connection], setup: Setup, devices: Device, targets: Tensor, board: Broadcast
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:  # so that the pipe ends when the main process does, however it ends
        other.close()
    torch.set_num_threads(1)
    gc.freeze()  # what was there before the fork is never looked at again
    gc.disable()  # a step makes many short-lived objects and no cycles: collect between rounds
    try:
        while True:
            gc.collect()
            _answer(pipe, setup, devices, targets, board)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the main process is gone or has stopped listening
        os._exit(0)


def _answer(pipe: Connection, setup: Setup, devices: Device, targets: Tensor, board: Broadcast) -> None:
    plan = pipe.recv()
    try:
        for finished in local_rounds(setup, plan, devices, targets, board):
            pipe.send(_sendable(finished))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        pipe.send(error)


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        answer = call(*arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise RunError("a worker process died (out of memory?); resume the run, or set run.processes = 1") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _sendable(finished: Finished) -> tuple[Any, ...]:
    device, upload = (tuple(tensor.numpy() for tensor in state) for state in (finished.device, finished.upload))
    return finished.group, device, upload, finished.costs.numpy()


def _received(sent: tuple[Any, ...]) -> Finished:
    group, device, upload, costs = sent
    return Finished(
        group, Device(*map(torch.from_numpy, device)), Upload(*map(torch.from_numpy, upload)), torch.from_numpy(costs)
    )
