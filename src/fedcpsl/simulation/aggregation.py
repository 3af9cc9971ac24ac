"""After the local steps: what devices keep, and what each run's server counts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.schedule import omega
from fedcpsl.simulation.executors import Finished
from fedcpsl.simulation.hardware import to_device
from fedcpsl.simulation.round_request import RoundRequest, Slot, expanded, hyper_of
from fedcpsl.simulation.state import State
from fedcpsl.simulation.store import put
from fedcpsl.trees import Tree, leaves, map_tensors, rebuilt


class Received(NamedTuple):
    """Uploads as a server gets them that must see who sent what."""

    devices: list[int]
    upload: Tree  # [devices, ...]
    omega: Tensor  # [devices]


Arrived = tuple[Finished, list[int]]  # and which of its devices' uploads were not lost


def keep_and_count(
    states: Sequence[State], requests: Sequence[RoundRequest], all_finished: Sequence[Finished]
) -> Iterator[tuple[int, Tree]]:
    """Store what devices keep, and yield what is counted, with the run; runs of one method are worked out at once.

    On a CPU piece by piece: putting pieces together would copy every upload.
    """
    alike: dict[Any, list[Arrived]] = {}
    for finished in all_finished:
        state = states[finished.run]
        method = state.setup.terms.method_of(finished.group[0])
        arrived = [i for i, task in enumerate(finished.group) if not task.lost]
        if method.sends_nothing or len(arrived) < len(finished.group):
            put(state.devices, state.sparse, [task.device for task in finished.group], finished.device)
        if arrived and not method.sends_nothing:
            key = (
                state.setup.terms.algorithm,
                id(method.network.module),
                method[1:],
                finished.sent is not None and (finished.run, "late"),
            )
            alike.setdefault(key, []).append((finished, arrived))
    for pieces in alike.values():
        for some in [pieces] if pieces[0][0].costs.is_cuda else [[piece] for piece in pieces]:
            yield from _count(states, requests, some)


def _count(
    states: Sequence[State], requests: Sequence[RoundRequest], pieces: Sequence[Arrived]
) -> Iterator[tuple[int, Tree]]:
    """Sum what arrived, run by run, and let those devices know that they were counted."""
    setup, where = states[pieces[0][0].run].setup, states[0].targets.device
    algorithm, method = setup.terms.algorithm, setup.terms.method_of(pieces[0][0].group[0])
    counts = [len(arrived) for _, arrived in pieces]
    hyper = hyper_of([Slot(f.run, requests[f.run], f.group[i]) for f, arrived in pieces for i in arrived])
    device, upload, broadcast = _together(requests, pieces, counts)
    committed = algorithm.commit(method, hyper, broadcast, device, upload)
    shares = []
    for (finished, arrived), first in zip(pieces, accumulate([0, *counts]), strict=False):
        state, counted = states[finished.run], [finished.group[i].device for i in arrived]
        mine = slice(first, first + len(counted))
        put(state.devices, state.sparse, counted, map_tensors(lambda t, i=mine: t[i], committed))
        shares.append(omega(state.setup.terms.sizes, state.setup.terms.roster(state.round), counted))
    weights = to_device(np.concatenate(shares), where).to(setup.data.dtype)
    copies = [[f.group[i].copies for i in arrived] for f, arrived in pieces]
    if max(map(max, copies)) > 1:  # a device that was drawn more than once counts as often
        again = to_device(np.repeat(np.arange(len(weights)), np.concatenate(copies)), where)
        hyper, upload, weights = map_tensors(lambda t: t[again], (hyper, upload, weights))
        counts = list(map(sum, copies))
    if optional(algorithm, "receive"):
        for (finished, arrived), count, first in zip(pieces, counts, accumulate([0, *counts]), strict=False):
            mine = slice(first, first + count)
            sent_by = [finished.group[i].device for i in arrived for _ in range(finished.group[i].copies)]
            yield finished.run, [Received(sent_by, map_tensors(lambda t, i=mine: t[i], upload), weights[mine])]
        return
    added = algorithm.contribution(method, hyper, upload, weights)
    if pieces[0][0].sent is not None:  # each answers the broadcast that it was sent then
        added = optional(algorithm, "late")(method, added, broadcast, states[pieces[0][0].run].server, weights)
    factors = [f.group[i].weight for f, arrived in pieces for i in arrived for _ in range(f.group[i].copies)]
    if any(factor != 1 for factor in factors):
        added = optional(algorithm, "reweighted")(added, to_device(np.array(factors), where).to(weights.dtype))
    by_piece = zip(*(_sums(t, counts) for t in leaves(added)), strict=True)
    for (finished, _), total in zip(pieces, by_piece, strict=True):
        yield finished.run, rebuilt(added, total)


def _together(
    requests: Sequence[RoundRequest], pieces: Sequence[Arrived], counts: Sequence[int]
) -> tuple[Tree, Tree, Tree]:
    """What arrived of all pieces, and what those devices had been sent."""
    where = pieces[0][0].costs.device
    each: list[tuple[Tree, Tree, Tree]] = []
    for (finished, arrived), count in zip(pieces, counts, strict=True):
        own = finished.device, finished.upload, () if finished.sent is None else finished.sent
        if count < len(finished.group):
            rows = to_device(arrived, where)
            own = map_tensors(lambda t, i=rows: t[i], own)
        device, upload, sent = own
        if finished.sent is None:
            request, counted = requests[finished.run], [finished.group[i].device for i in arrived]
            sent = request.broadcast_to_each(counted) if len(pieces) == 1 else expanded(request, counted)
        each.append((device, upload, sent))
    if len(each) == 1:
        return each[0]
    together: tuple[Tree, Tree, Tree] = map_tensors(lambda *t: torch.cat(t), *each)
    return together


def _sums(t: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Sums over pieces of the first dimension."""
    if set(counts) == {1}:
        return t.unbind()
    if len(set(counts)) == 1:
        return t.view(len(counts), counts[0], *t.shape[1:]).sum(1).unbind()
    return [piece.sum(0) for piece in t.split(list(counts))]
