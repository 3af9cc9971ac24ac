"""Evaluating the same runs after every round: on a GPU what is the same each time is captured once and replayed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import Method
from fedcpsl.evaluation import (
    Pending,
    Predictions,
    has_labelled,
    measure,
    measure_together,
    own_model,
    pending,
    predict,
    versions_of,
)
from fedcpsl.simulation import State
from fedcpsl.simulation.to_device import to_device
from fedcpsl.trees import map_tensors

ROWS_AT_ONCE = 32768  # of models side by side; not by what memory is free, for the same run must be cut the same way

Examine = Callable[[Sequence[State]], Pending]


class Captured(NamedTuple):
    """A graph and what it reads and writes."""

    methods: list[Method]  # that the runs predicted with
    graph: Any
    models: list[Tensor | None]  # the general ones, copied
    judged: list[Tensor]
    measured: list[list[Tensor]]
    predictions: list[Predictions]


def examiner() -> Examine:
    """What has the metrics of some runs computed, round after round, with what it has kept from the rounds before."""
    earlier: list[Predictions] = []
    kept: list[Captured] = []

    def examine(states: Sequence[State]) -> Pending:
        nonlocal earlier
        on_demand = any(state.setup.supply is not None for state in states)
        if not earlier or on_demand or not states[0].targets.is_cuda:
            asked = measure_together(states, earlier or [None] * len(states))
            earlier = asked.predictions
            return asked
        methods = [state.setup.method_after(state.round) for state in states]
        if kept and kept[0].methods != methods:
            kept.clear()
            earlier = measure_together(states, earlier).predictions
        earlier = _with_new_localized(states, earlier)
        if not kept:
            kept.append(_capture(states, earlier, methods))
        return _replay(kept[0], states)

    return examine


@torch.no_grad()
def _with_new_localized(states: Sequence[State], earlier: Sequence[Predictions]) -> list[Predictions]:
    """Predict anew, in place, with the localized models that have changed, those of all runs side by side."""
    tests = [state.setup.device_data.test for state in states]
    changed = [
        (run, int(device))
        for run, (state, made) in enumerate(zip(states, earlier, strict=True))
        if made.localized is not None
        for device in np.flatnonzero((made.made_by != versions_of(state)) & (np.diff(tests[run].start) > 0))
    ]
    for same in {id(states[run].setup.method.network.module): run for run, _ in changed}.values():
        network = states[same].setup.method.network
        theirs = [(r, i) for r, i in changed if states[r].setup.method.network.module is network.module]
        most = max(tests[r].rows(i).stop - tests[r].rows(i).start for r, i in theirs)
        at_once = max(1, ROWS_AT_ONCE // most)
        for some in (theirs[k : k + at_once] for k in range(0, len(theirs), at_once)):
            rows = [tests[r].rows(i) for r, i in some]
            x = tests[same].x.new_zeros(len(some), most, *tests[same].x.shape[1:])
            for place, (run, _), own in zip(x, some, rows, strict=True):
                place[: own.stop - own.start] = tests[run].x[own]
            log_h = network.log_probabilities(torch.stack([own_model(states[r], i) for r, i in some]), x)
            for each, (run, _), own in zip(log_h, some, rows, strict=True):
                localized = earlier[run].localized
                assert localized is not None
                localized[own] = each[: own.stop - own.start]
    return [made._replace(made_by=versions_of(state)) for state, made in zip(states, earlier, strict=True)]


def _capture(states: Sequence[State], earlier: Sequence[Predictions], methods: list[Method]) -> Captured:
    """The part of an evaluation that does the same every time, as a graph."""
    models = [None if model is None else model.clone() for model in _general_models(states)]
    judged = [to_device(has_labelled(state), state.targets.device) for state in states]

    def measure_all() -> tuple[list[Predictions], list[list[Tensor]]]:
        # new objects, so that whatever depends on them is computed inside the graph and not cache_last_call from before
        given = [e._replace(hyper=map_tensors(torch.clone, e.hyper) if e.hyper else None) for e in earlier]
        made = [predict(s, s.setup.device_data.test, e, m) for s, e, m in zip(states, given, models, strict=True)]
        return made, [measure(*each) for each in zip(states, made, judged, models, strict=True)]

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        measure_all()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        predictions, measured = measure_all()
    return Captured(methods, graph, models, judged, measured, predictions)


def _general_models(states: Sequence[State]) -> list[Tensor | None]:
    return [s.setup.algorithm.general_model(s.setup.method_after(s.round), s.server) for s in states]


def _replay(captured: Captured, states: Sequence[State]) -> Pending:
    both = zip(captured.models, _general_models(states), strict=True)
    there = [(copy, model) for copy, model in both if copy is not None and model is not None]
    if there:
        torch._foreach_copy_([copy for copy, _ in there], [model for _, model in there])
    where = states[0].targets.device
    flags = to_device(np.concatenate([has_labelled(state) for state in states]), where)
    torch._foreach_copy_(captured.judged, list(flags.split([state.setup.devices for state in states])))
    captured.graph.replay()
    return pending(states, captured.predictions, captured.measured)
