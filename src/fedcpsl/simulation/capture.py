"""Local steps as CUDA graphs: captured once, replayed without work on the host.

Steps are captured for a few widths, numbers of slots side by side, several steps in a row and one alone. Everything
that they read or change lies in buffers of their own (a `Stage`), which a round fills before it replays: models and
momenta, the numbers of every slot, which rows each step draws, and the number of the step, which they count up.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.problem import Samples
from fedcpsl.simulation.executors import LocalSteps, Program, steps_one_by_one, stretches
from fedcpsl.simulation.minibatches import BatchPlan, taken
from fedcpsl.simulation.round_request import TrainingData
from fedcpsl.trees import Tree, map_tensors
from fedcpsl.views import viewed

WASTE = 1.3  # a stretch runs at most this factor more slots than need it
WARM_UPS = 3  # before the first capture of a program: libraries start and choose their algorithms then
BY_STEP = ("rows", "inputs", "keys", "view_keys", "which")  # fields of a plan with steps first, then slots
IN_A_ROW = 8  # steps of a longer graph: they gather their samples at once and share what depends on no step


class Stage(NamedTuple):
    """Buffers for a number of slots and steps, and the graphs that work on them, by width and steps."""

    local: Tree
    hyper: Tree
    batches: BatchPlan  # rows, inputs and keys are [steps, slots, batch]
    step: Tensor  # [1]: the number of the next step
    graphs: dict[tuple[int, int], Any]

    def width(self, slots: int) -> int:
        """The smallest width of the ladder that holds this number of slots."""
        return min(width for width in ladder(self.batches.rows.shape[1]) if width >= slots)

    def holds(self, batches: BatchPlan) -> bool:
        return all(
            mine >= needed for mine, needed in zip(self.batches.rows.shape[:2], batches.rows.shape[:2], strict=True)
        )


def captured_steps() -> LocalSteps:
    """What takes local steps by replaying graphs, with the stages that it has made so far, one for each program."""
    stages: dict[Any, Stage] = {}
    refused: dict[Any, str] = {}
    memory = torch.cuda.graph_pool_handle()  # one for all graphs: no two replay at a time

    def take(program: Program, hyper: Tree, local: Tree, batches: BatchPlan, counts: Sequence[int]) -> Tree:
        if program.key in refused or batches.partner is not None:
            return steps_one_by_one(program, hyper, local, batches, counts)
        stage = stages.get(program.key)
        if stage is None or not stage.holds(batches):
            stage = stages[program.key] = _room_for(local, hyper, batches, program.widest, stage)
        try:
            for size in sorted({size for size, _ in _replays(stage, counts)} - set(stage.graphs)):
                stage.graphs[size] = _capture(program, stage, *size, memory)
        except RuntimeError as error:
            refused[program.key] = str(error).splitlines()[0]
            logging.getLogger("fedcpsl").warning(
                "local steps run one by one, this model cannot be captured: %s", refused[program.key]
            )
            return steps_one_by_one(program, hyper, local, batches, counts)
        _fill(stage, hyper, local, batches)
        return _replay(stage, counts)

    return take


def ladder(slots: int) -> list[int]:
    """Widths from `slots` down, spaced so that no number of slots wastes more than a factor of WASTE."""
    widths = [slots]
    while widths[-1] > 1:
        widths.append(min(widths[-1] - 1, int(widths[-1] / WASTE) + 1))
    return widths


def _replays(stage: Stage, counts: Sequence[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Which graphs (width and steps) are replayed one after the other, and how many slots each is for."""
    for steps, running in stretches(counts):
        width = stage.width(running)
        for _ in range(len(steps) // IN_A_ROW):
            yield (width, IN_A_ROW), running
        for _ in range(len(steps) % IN_A_ROW):
            yield (width, 1), running


def _replay(stage: Stage, counts: Sequence[int]) -> Tree:
    """The steps of a stage that was filled; slots that are done are set aside before others go on."""
    done: list[Tree] = []
    left = len(counts)
    for size, running in _replays(stage, counts):
        if running < left:
            done.insert(0, map_tensors(lambda t, a=running, b=left: t[a:b].clone(), stage.local))
        left = running
        stage.graphs[size].replay()
    first = map_tensors(lambda t: t[:left].clone(), stage.local)
    together: Tree = map_tensors(lambda *pieces: torch.cat(pieces), first, *done) if done else first
    return together


def _room_for(local: Tree, hyper: Tree, batches: BatchPlan, widest: int, smaller: Stage | None) -> Stage:
    """A stage that is large enough for any round's slots, and for the steps of the one that it replaces."""
    steps, slots = len(batches.rows), max(batches.rows.shape[1], widest)
    if smaller:
        steps, slots = (max(a, b) for a, b in zip((steps, slots), smaller.batches.rows.shape[:2], strict=True))
    steps = 1 << (steps - 1).bit_length()

    def by_slot(t: Tensor | None) -> Any:
        return None if t is None else t.new_zeros(slots, *t.shape[1:])

    def by_step(t: Tensor | None) -> Any:
        return None if t is None else t.new_zeros(steps, slots, *t.shape[2:])

    def room(plan: BatchPlan) -> BatchPlan:
        return BatchPlan(
            by_step(plan.rows),
            by_step(plan.inputs),
            by_slot(plan.labelled),
            by_slot(plan.unlabelled),
            by_step(plan.keys),
            by_slot(plan.shift),
            by_slot(plan.scale),
            view_keys=by_step(plan.view_keys),
            views=plan.views,
            extra={name: room(more) for name, more in plan.extra.items()},
            which=by_step(plan.which),
            unlabelled_count=by_slot(plan.unlabelled_count),
        )

    return Stage(
        local=map_tensors(by_slot, local),
        hyper=map_tensors(by_slot, hyper),
        batches=room(batches),
        step=torch.zeros(1, dtype=torch.int64, device=batches.rows.device),
        graphs={},
    )


def _fill(stage: Stage, hyper: Tree, local: Tree, batches: BatchPlan) -> None:
    """What a round begins with, in the stage's first slots."""
    slots = len(batches.labelled)
    for mine, given in ((stage.local, local), (stage.hyper, hyper)):
        map_tensors(lambda to, new: to[:slots].copy_(new), mine, given)
    _fill_batches(stage.batches, batches)
    stage.step.zero_()


def _fill_batches(room: BatchPlan, batches: BatchPlan) -> None:
    slots, steps = len(batches.labelled), len(batches.rows)
    for name, given in batches._asdict().items():
        to = None if name in ("views", "extra") else getattr(room, name)
        if to is not None and name in BY_STEP:
            to[:steps, :slots].copy_(given)
        elif to is not None:
            to[:slots].copy_(given)
    for name, more in batches.extra.items():
        _fill_batches(room.extra[name], more)


def _capture(program: Program, stage: Stage, width: int, steps: int, memory: Any) -> Any:
    """Some steps of the first `width` slots as a graph; it leaves the stage in disorder.

    Caches are emptied only where memory is short: `torch.cuda.graph` would do it each time, and what is freed must be
    allocated again.
    """

    def take_steps() -> None:
        # new objects, so that whatever depends on them is computed inside the graph and not cached from before
        hyper: Tree = map_tensors(lambda t: t[:width], stage.hyper)
        local: Tree = map_tensors(lambda t: t[:width], stage.local)
        begun = local
        ahead = stage.step + torch.arange(steps, device=stage.step.device)
        for samples in _samples(program.data, stage.batches.of_slots(slice(0, width)), ahead):
            local = program.algorithm.step(program.method, hyper, local, samples)
        map_tensors(_copy_back, begun, local)
        stage.step.add_(steps)

    graph, beside = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(1 if stage.graphs else WARM_UPS):  # kernels for these shapes are compiled and loaded
            stage.step.zero_()
            take_steps()
        stage.step.zero_()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        if free < total / 2:
            torch.cuda.empty_cache()
        graph.capture_begin(pool=memory)
        try:
            take_steps()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(beside)
    return graph


@cache
def _stream(_: int) -> Any:
    """The one stream that a GPU's steps are captured on: libraries keep memory for each."""
    return torch.cuda.Stream()


def _copy_back(buffer: Tensor, value: Tensor) -> None:
    """Have the stage's own buffer hold what a step returned, where it did not work in place."""
    if value.data_ptr() != buffer.data_ptr() or value.shape != buffer.shape:
        buffer.copy_(value)


def _samples(data: TrainingData, batches: BatchPlan, steps: Tensor) -> Iterator[Samples]:
    """The minibatches of some steps, gathered at once; the numbers of the steps are on the device."""
    rows, sources = (t.index_select(0, steps) for t in (batches.rows, batches.inputs))
    shape = rows.shape
    x = taken(data.raw, sources.reshape(-1), shape, batches.shift, batches.scale)
    target = data.targets.index_select(0, rows.reshape(-1)).view(*shape, -1)
    keys = [None] * len(steps) if batches.keys is None else batches.keys.index_select(0, steps).unbind()
    strong: Sequence[Tensor | None] = [None] * len(steps)
    if batches.views is not None and batches.view_keys is not None:
        x, of_unlabelled = viewed(batches.views, x, batches.view_keys.index_select(0, steps))
        strong = of_unlabelled.unbind()
    which = [None] * len(steps) if batches.which is None else batches.which.index_select(0, steps).unbind()
    extra = {name: _samples(data, more, steps) for name, more in batches.extra.items()}
    for own_x, own_target, own_keys, own_strong, own_which in zip(
        x.unbind(), target.unbind(), keys, strong, which, strict=True
    ):
        yield Samples(
            own_x,
            own_target,
            batches.labelled,
            batches.unlabelled,
            own_keys,
            strong=own_strong,
            extra={name: next(others) for name, others in extra.items()},
            which=own_which,
            unlabelled_count=batches.unlabelled_count,
        )
