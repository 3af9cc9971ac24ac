"""Local rounds on several processes of this machine, or on the ranks of a torchrun job.

On a CPU each core then works alone, without waiting for the others. The workers are forked once, after the data is in
place, so only schedules and short notes pass between them; device states, pseudo-labels, the broadcast and what devices
upload lie in memory that all of them share.

Every rank holds the state of all devices. After its share of a round, it sends what those devices keep, their uploads,
their costs and their new pseudo-labels to all others, as one buffer of bytes. Every rank then sums the uploads in
device order, so that all ranks, and every repetition with as many of them, come to the same bits.
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
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.errors import RunError
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.capture import captured_steps
from fedcpsl.simulation.executors import Finished, LocalRounds, all_finite, example_of, local_rounds
from fedcpsl.simulation.minibatches import is_due
from fedcpsl.simulation.ranks import all_numbers, all_values, join, texts, world
from fedcpsl.simulation.round_request import RoundRequest, TrainingData
from fedcpsl.simulation.store import shared_zeros
from fedcpsl.trees import Tree, leaves, map_tensors, rebuilt

DeviceResult = tuple[Tree, Tree]  # what a device keeps, and its upload
Plans = Sequence[Sequence[DeviceRound]]  # the devices of every run


class ResultNote(NamedTuple):
    """A worker's message about some devices' results, which are in shared memory."""

    run: int
    group: list[DeviceRound]
    row: int  # the first in shared memory
    empty: list[bool]  # which tensors of the result are, where others of the run are not
    numbers: tuple[NDArray[Any], ...]  # costs and finite of `Finished`


def shared_memory_for(request: RoundRequest) -> DeviceResult:
    """Room for as many devices as a round of the run can have; a round overwrites what the one before left.

    Its memory counts once it is used.
    """
    setup = request.setup
    rows = setup.terms.most_active
    return map_tensors(lambda t: shared_zeros((rows, *t.shape), t.dtype), example_of(request, setup.terms.method)[:2])


def write_results(shared: DeviceResult, row: int, finished: Finished) -> ResultNote:
    """Write results into shared memory, from a row on."""
    mine, empty = slice(row, row + len(finished.group)), []
    for room, new in zip(leaves(shared), leaves((finished.device, finished.upload)), strict=True):
        empty.append(not new.numel())
        if new.numel():
            room[mine] = new
    numbers = (finished.costs, finished.finite)
    return ResultNote(finished.run, finished.group, row, empty, tuple(t.numpy() for t in numbers))


def read_results(shared_results: Sequence[DeviceResult], note: ResultNote) -> Finished:
    """The results that a note describes: valid until the next round."""
    shared, mine = shared_results[note.run], slice(note.row, note.row + len(note.group))

    def taken(room: Tensor, *, empty: bool) -> Tensor:
        return room[mine][:, :0] if empty and room.dim() > 1 else room[mine]

    pieces = [taken(room, empty=empty) for room, empty in zip(leaves(shared), note.empty, strict=True)]
    device, upload = rebuilt(shared, pieces)
    costs, finite = map(torch.from_numpy, note.numbers)
    return Finished(note.run, note.group, device, upload, costs, finite)


# glibc keeps what is freed, if not larger than a piece freed before, up to this; else pages are allocated every time
KEPT = 31 << 20


@contextmanager
def choose_backend(
    requests: Sequence[RoundRequest], data: TrainingData, *, on_ranks: bool = True
) -> Iterator[tuple[list[Tree], TrainingData, LocalRounds]]:
    """`local_rounds` on processes, ranks or in this process, and the device states and training data it works on.

    Without `on_ranks` torchrun's other ranks are left out.
    """
    setup, states = requests[0].setup, [request.devices for request in requests]
    here: LocalRounds = local_rounds
    if setup.machine.vectorised and data.targets.is_cuda:
        here = partial(local_rounds, take_steps=captured_steps())
    if world()[1] > 1 and on_ranks:
        yield states, data, partial(_run_on_ranks, here)
        return
    if setup.machine.processes == 1:
        yield states, data, here
        return
    data = data._replace(targets=_shared(data.targets))
    requests = [
        request._replace(
            devices=request.devices if request.setup.sparse else map_tensors(_shared, request.devices),
            broadcast=map_tensors(_shared, request.broadcast),
        )
        for request in requests
    ]
    shared_results = [shared_memory_for(request) for request in requests]
    with _forked(setup.machine.processes, requests, data, shared_results) as pipes:
        yield [request.devices for request in requests], data, partial(_run_shared, pipes, requests, shared_results)


def _run_on_ranks(here: LocalRounds, requests: Sequence[RoundRequest], data: TrainingData) -> Iterator[Finished]:
    """The runs' slots over the ranks of the job."""
    rank, size = world()
    shares = share_out(requests, size)
    mine = [request._replace(plan=plan) for request, plan in zip(requests, shares[rank], strict=True)]
    return exchanged(requests, shares, data, lambda: list(here(mine, data)))


@contextmanager
def _forked(
    count: int, requests: Sequence[RoundRequest], data: TrainingData, shared_results: Sequence[DeviceResult]
) -> Iterator[list[Connection]]:
    """Worker processes that know the runs, and the pipes to them."""
    pipes: list[Connection] = []
    processes = []
    for _ in range(count):
        ours, theirs = get_context("fork").Pipe()
        given = (theirs, [*pipes, ours], requests, data, shared_results)
        process = get_context("fork").Process(target=_work, args=given, daemon=True)
        with warnings.catch_warnings():  # forking beside idle threads: the child starts none and uses no lock of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5)
            process.kill()


def _run_shared(
    pipes: Sequence[Connection],
    boards: Sequence[RoundRequest],
    shared_results: Sequence[DeviceResult],
    requests: Sequence[RoundRequest],
    _: TrainingData,
) -> Iterator[Finished]:
    """The runs' slots over the workers; what is broadcast and what comes back go over memory that they share."""
    for board, request in zip(boards, requests, strict=True):
        if request.rows is None:
            map_tensors(lambda mine, new: mine.copy_(new), board.broadcast, request.broadcast)
        else:
            map_tensors(lambda mine, new: mine[: len(new)].copy_(new), board.broadcast, request.broadcast)
    shares = share_out(requests, len(pipes))
    rows = [0] * len(requests)
    for pipe, share in zip(pipes, shares, strict=True):
        _request(pipe.send, (share, rows, [request.rows for request in requests]))
        rows = [first + len(plan) for first, plan in zip(rows, share, strict=True)]
    with one_thread():
        for pipe in pipes:
            while (answer := _request(pipe.recv)) is not None:
                yield read_results(shared_results, answer)


@contextmanager
def one_thread() -> Iterator[None]:
    """Where others use the other cores, or a step is small: threads of our own would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_out(requests: Sequence[RoundRequest], shares: int) -> list[list[list[DeviceRound]]]:
    """Every run's devices to processes, so that all have about as many steps; in device order within each."""
    loads, dealt = [0] * shares, [[list[DeviceRound]() for _ in requests] for _ in range(shares)]
    slots = [(run, task) for run, request in enumerate(requests) for task in request.plan]
    for run, task in sorted(slots, key=lambda slot: (-slot[1].steps, slot[0], slot[1].device)):
        least = loads.index(min(loads))
        dealt[least][run].append(task)
        loads[least] += task.steps
    return [[sorted(plan, key=lambda task: task.device) for plan in share] for share in dealt]


def _shared(tensor: Tensor) -> Tensor:
    """A copy in memory that forked processes share."""
    if not tensor.numel():
        return tensor
    memory = mmap.mmap(-1, tensor.numel() * tensor.element_size())
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def _work(
    pipe: Connection,
    others: list[Connection],
    requests: Sequence[RoundRequest],
    data: TrainingData,
    shared_results: Sequence[DeviceResult],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:  # so that the pipe ends when the main process does, however it ends
        other.close()
    torch.set_num_threads(1)
    torch.empty(KEPT, dtype=torch.uint8)
    gc.freeze()  # what was there before the fork is never looked at again
    gc.disable()  # a step makes many short-lived objects and no cycles: collect between rounds
    try:
        while True:
            gc.collect()
            _answer(pipe, requests, data, shared_results)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the main process is gone or has stopped listening
        os._exit(0)


def _answer(
    pipe: Connection, requests: Sequence[RoundRequest], data: TrainingData, shared_results: Sequence[DeviceResult]
) -> None:
    plans, rows, broadcast_rows = pipe.recv()
    try:
        mine = [
            request._replace(plan=plan, rows=own)
            for request, plan, own in zip(requests, plans, broadcast_rows, strict=True)
        ]
        for finished in local_rounds(mine, data):
            pipe.send(write_results(shared_results[finished.run], rows[finished.run], finished))
            rows[finished.run] += len(finished.group)
        for request in requests:
            if request.sparse:
                request.sparse.release()
        pipe.send(None)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        pipe.send(error)


def _request(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        answer = call(*arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise RunError("a worker process died (out of memory?); resume the run, or set run.processes = 1") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def exchanged(
    requests: Sequence[RoundRequest],
    shares: Sequence[Plans],
    data: TrainingData,
    work: Callable[[], Sequence[Finished]],
) -> Iterator[Finished]:
    """Do this rank's share of a round and yield everybody's, run by run, in device order."""
    rank = join().rank
    finished, error = _attempted(work)
    _agree(error)
    examples = [_example(request, [plans[run] for plans in shares]) for run, request in enumerate(requests)]
    labels = [_labels(requests, plans, data) for plans in shares]
    rooms = [_rooms(plans, examples, own) for plans, own in zip(shares, labels, strict=True)]
    sent = [t for run, plan in enumerate(shares[rank]) if plan for t in _rows_of(run, plan, finished)] + labels[rank]
    where = data.targets.device
    mine = (
        torch.cat([_as_bytes(t.to(where)) for t in sent]) if sent else torch.zeros(0, dtype=torch.uint8, device=where)
    )
    received = all_values(mine, [sum(map(_byte_count, each)) for each in rooms])
    pieces = [_unpacked(flat, each) for flat, each in zip(received, rooms, strict=True)]
    for other, given in enumerate(pieces):
        if other != rank:
            for here, new in zip(labels[other], given[len(given) - len(labels[other]) :], strict=True):
                here.copy_(new)
    taken = [iter(given) for given in pieces]
    for run, example in enumerate(examples):
        plans = [share[run] for share in shares]
        if example is not None:
            count = len(leaves(example))
            fields = [[next(given) for _ in range(count)] for given, plan in zip(taken, plans, strict=True) if plan]
            yield _together(run, plans, fields, example)


def _attempted(work: Callable[[], Sequence[Finished]]) -> tuple[Sequence[Finished], Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return [], error


def _agree(error: Exception | None) -> None:
    """One rank's error is everybody's."""
    if not any(row[0] for row in all_numbers([int(error is not None)])):
        return
    reasons = texts("" if error is None else str(error) or type(error).__name__)
    if error:
        raise error
    failed = next(rank for rank, reason in enumerate(reasons) if reason)
    raise RunError(f"rank {failed}: {reasons[failed]}")


def _example(request: RoundRequest, plans: Plans) -> Tree | None:
    """What one device of a run leaves behind in this round, by its shapes; None where no device is active."""
    active = [task for plan in plans for task in plan]
    return example_of(request, request.setup.terms.method_of(active[0])) if active else None


def _rows_of(run: int, plan: Sequence[DeviceRound], finished: Sequence[Finished]) -> list[Tensor]:
    """The fields of one run's devices, [devices, ...] each, in the plan's order."""
    own = [each for each in finished if each.run == run]
    place = {task.device: i for i, task in enumerate(task for each in own for task in each.group)}
    order = [place[task.device] for task in plan]
    fields = [leaves((each.device, each.upload, each.costs)) for each in own]
    return [torch.cat(pieces)[order] for pieces in zip(*fields, strict=True)]


def _labels(requests: Sequence[RoundRequest], plans: Plans, data: TrainingData) -> list[Tensor]:
    """The pseudo-labels that some devices renew, as views of the training data."""
    found = []
    for request, plan in zip(requests, plans, strict=True):
        for task in plan:
            if is_due(request, task):
                rows = request.setup.data.unlabelled_rows(task.device)
                found.append(data.targets[request.first_row + rows.start : request.first_row + rows.stop])
    return found


def _rooms(plans: Plans, examples: Sequence[Tree | None], labels: Sequence[Tensor]) -> list[Tensor]:
    """The contents of one rank's buffer, as tensors without memory: the fields of every run, then pseudo-labels."""
    fields = [
        torch.empty(len(plan), *leaf.shape, dtype=leaf.dtype, device="meta")
        for plan, example in zip(plans, examples, strict=True)
        if plan
        for leaf in leaves(example)
    ]
    return fields + [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in labels]


def _byte_count(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def _unpacked(flat: Tensor, rooms: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([_byte_count(room) for room in rooms])
    # a copy of its own for each: a piece need not begin where its numbers may
    return [piece.clone().view(room.dtype).view(room.shape) for piece, room in zip(pieces, rooms, strict=True)]


def _together(run: int, plans: Plans, pieces: Sequence[Sequence[Tensor]], example: Tree) -> Finished:
    """One run's devices from all ranks, in device order."""
    tasks = [task for plan in plans for task in plan]
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].device)
    device, upload, costs = rebuilt(example, [torch.cat(parts)[order] for parts in zip(*pieces, strict=True)])
    return Finished(run, [tasks[i] for i in order], device, upload, costs, all_finite(device, upload, costs))
