"""Local steps as CUDA graphs: captured once, replayed without work on the host.

A step is captured for a few widths, numbers of slots side by side. Everything that it reads or changes lies in buffers
of its own (a `Stage`), which a round fills before it replays: models and momenta, the numbers of every slot, which rows
each step draws, and the number of the step, which the step itself counts up.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Hyper, Local, Method, map_tensors
from fedcpsl.problem import Samples
from fedcpsl.simulation.executors import Feed, LocalSteps, steps_one_by_one, stretches
from fedcpsl.simulation.setup import Setup

WASTE = 1.3  # a stretch runs at most so many times the slots that need it
WARM_UPS = 3  # of a step, before it is captured: libraries choose their algorithms then


class Stage(NamedTuple):
    """The buffers of up to so many slots and steps, and the graphs that work on them, by width."""

    local: Local
    hyper: Hyper
    labelled: Tensor
    unlabelled: Tensor
    rows: Tensor  # [steps, slots, batch]
    keys: Tensor | None
    step: Tensor  # [1]: the number of the next step
    graphs: dict[int, Any]

    def width(self, slots: int) -> int:
        """The smallest width of the ladder that so many slots fit into."""
        return min(width for width in ladder(self.rows.shape[1]) if width >= slots)


def captured_steps() -> LocalSteps:
    """What takes local steps by replaying graphs, with the stages that it has made so far."""
    stages: list[Stage] = []
    refused: list[str] = []

    def take(
        setup: Setup, method: Method, hyper: Hyper, local: Local, feed: Feed, targets: Tensor, counts: Sequence[int]
    ) -> Local:
        if refused or feed.partner is not None:
            return steps_one_by_one(setup, method, hyper, local, feed, targets, counts)
        stage = _stage_for(stages, local, hyper, feed)
        try:
            for width in {stage.width(slots) for _, slots in stretches(counts)} - set(stage.graphs):
                stage.graphs[width] = _capture(setup, method, stage, targets, width)
        except RuntimeError as error:
            refused.append(str(error).splitlines()[0])
            logging.getLogger("fedcpsl").warning(
                "local steps run one by one, this model cannot be captured: %s", refused[0]
            )
            return steps_one_by_one(setup, method, hyper, local, feed, targets, counts)
        _fill(stage, hyper, local, feed)
        return _replay(stage, counts)

    return take


def ladder(slots: int) -> list[int]:
    """Widths from `slots` down, each at least so much smaller that no number of slots wastes more than WASTE."""
    widths = [slots]
    while widths[-1] > 1:
        widths.append(min(widths[-1] - 1, int(widths[-1] / WASTE) + 1))
    return widths


def _replay(stage: Stage, counts: Sequence[int]) -> Local:
    """The steps of a stage that was filled; slots that are done are set aside before others go on."""
    done: list[Local] = []
    left = len(counts)
    for steps, running in stretches(counts):
        done.insert(0, map_tensors(lambda t, a=running, b=left: t[a:b].clone(), stage.local))
        left = running
        graph = stage.graphs[stage.width(running)]
        for _ in steps:
            graph.replay()
    first = map_tensors(lambda t: t[:left].clone(), stage.local)
    together: Local = map_tensors(lambda *pieces: torch.cat(pieces), first, *done)
    return together


def _stage_for(stages: list[Stage], local: Local, hyper: Hyper, feed: Feed) -> Stage:
    """A stage that is large enough; a new one takes the place of one that is not."""
    steps, slots = feed.rows.shape[:2]
    if stages and stages[0].rows.shape[0] >= steps and stages[0].rows.shape[1] >= slots:
        return stages[0]
    if stages:
        steps, slots = max(steps, stages[0].rows.shape[0]), max(slots, stages[0].rows.shape[1])
    steps = 1 << (steps - 1).bit_length()

    def room(t: Tensor) -> Tensor:
        return t.new_zeros(slots, *t.shape[1:])

    batch = feed.rows.shape[2]
    stages[:] = [
        Stage(
            local=map_tensors(room, local),
            hyper=map_tensors(room, hyper),
            labelled=room(feed.labelled),
            unlabelled=room(feed.unlabelled),
            rows=feed.rows.new_zeros(steps, slots, batch),
            keys=None if feed.keys is None else feed.keys.new_zeros(steps, slots, feed.keys.shape[2]),
            step=torch.zeros(1, dtype=torch.int64, device=feed.rows.device),
            graphs={},
        )
    ]
    return stages[0]


def _fill(stage: Stage, hyper: Hyper, local: Local, feed: Feed) -> None:
    """What a round begins with, in the stage's first slots."""
    slots, steps = len(feed.labelled), len(feed.rows)
    for mine, given in ((stage.local, local), (stage.hyper, hyper)):
        map_tensors(lambda to, new: to[:slots].copy_(new), mine, given)
    stage.labelled[:slots].copy_(feed.labelled)
    stage.unlabelled[:slots].copy_(feed.unlabelled)
    stage.rows[:steps, :slots].copy_(feed.rows)
    if stage.keys is not None and feed.keys is not None:
        stage.keys[:steps, :slots].copy_(feed.keys)
    stage.step.zero_()


def _capture(setup: Setup, method: Method, stage: Stage, targets: Tensor, width: int) -> Any:
    """One step of the first `width` slots as a graph; it leaves the stage in disorder."""

    def one_step() -> None:
        # new objects, so that whatever depends on them is computed inside the graph and not remembered from before
        hyper: Hyper = map_tensors(lambda t: t[:width], stage.hyper)
        local: Local = map_tensors(lambda t: t[:width], stage.local)
        rows = stage.rows.index_select(0, stage.step)[0, :width]
        flat = rows.reshape(-1)
        samples = Samples(
            x=setup.shelf.x.index_select(0, flat).view(*rows.shape, *setup.shelf.x.shape[1:]),
            target=targets.index_select(0, flat).view(*rows.shape, -1),
            labelled=stage.labelled[:width],
            unlabelled=stage.unlabelled[:width],
            keys=None if stage.keys is None else stage.keys.index_select(0, stage.step)[0, :width],
        )
        after = setup.algorithm.step(method, hyper, local, samples)
        local.costs.copy_(after.costs)
        stage.step.add_(1)

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_UPS):
            stage.step.zero_()
            one_step()
    torch.cuda.current_stream().wait_stream(beside)
    stage.step.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step()
    return graph
