"""After the local steps: what devices keep, what each run's server counts, and what both exchange once more.

A server may ask some devices about some of their samples after it has aggregated (`probed`), or learn from samples of
its own and reply in the same round to the devices that it counted (`replied`).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.problem import Samples
from fedcpsl.schedule import DeviceRound, Probe, draw_order, draw_probes, omega
from fedcpsl.simulation.device_data import load_samples
from fedcpsl.simulation.executors import Finished
from fedcpsl.simulation.minibatches import drawn_once
from fedcpsl.simulation.round_request import RoundRequest, Slot, TrainingData, expanded, hyper_of
from fedcpsl.simulation.state import State
from fedcpsl.simulation.store import put, to_device
from fedcpsl.trees import Tree, bytes_of, leaves, map_tensors, rebuilt

NOTHING = np.empty((1, 0), np.int64)


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


def probed(state: State, request: RoundRequest, data: TrainingData, probes: Sequence[Probe] | None) -> State:
    """The state after the second exchange of the round before it, by a given schedule or the one that is drawn."""
    terms, draw, round = state.setup.terms, state.setup.terms.method.traits.probe, state.round - 1
    assert draw is not None
    if probes is None:
        probes = draw_probes(draw, terms.seed, round, terms.roster(round), terms.sizes, terms.work)
    asked = [probe for probe in probes if probe.drawn.rows.size]  # who has no such samples has no answer
    answering = [probe for probe in asked if not probe.lost]
    sent = optional(terms.algorithm, "probe_broadcast")(terms.method, state.server)
    state = state._replace(downlink_bytes=state.downlink_bytes + len(asked) * bytes_of(sent))
    if not answering:
        return state
    uploads = _answers(state, request, data, answering, sent)
    devices = torch.tensor([probe.device for probe in answering], device=state.setup.data.where)
    one = bytes_of(map_tensors(lambda t: t[0], uploads))
    server = optional(terms.algorithm, "probe_receive")(terms.method, state.server, devices, uploads)
    return state._replace(server=server, uplink_bytes=state.uplink_bytes + len(asked) * one)


def _answers(state: State, request: RoundRequest, data: TrainingData, probes: Sequence[Probe], sent: Tree) -> Tree:
    """What the devices answer, [devices, ...], all at once or one after another."""
    setup, draw = state.setup, state.setup.terms.method.traits.probe
    assert draw is not None
    if setup.data.supply and state.sparse:
        which = [probe.device for probe in probes]
        load_samples(setup.data, setup.data.supply, state.targets, state.sparse.nu, state.sparse.there, which)
    slots = [
        Slot(0, request, DeviceRound(probe.device, 1, NOTHING, NOTHING, extra={draw.name: probe.drawn}))
        for probe in probes
    ]
    answer, method = optional(setup.terms.algorithm, "probe_upload"), setup.terms.method
    if setup.machine.vectorised:
        most = setup.machine.slots or len(slots)
        pieces = [slots[first : first + most] for first in range(0, len(slots), most)]
        each = [answer(method, hyper_of(piece), sent, drawn_once(draw, piece, data)) for piece in pieces]
        together: Tree = map_tensors(lambda *t: torch.cat(t), *each)
        return together
    ones = []
    for slot in slots:
        hyper = map_tensors(lambda t: t[0], hyper_of([slot]))
        ones.append(answer(method, hyper, sent, drawn_once(draw, [slot], data, 0)))
    stacked: Tree = map_tensors(lambda *t: torch.stack(t), *ones)
    return stacked


def samples_at_server(state: State) -> tuple[Samples, ...]:
    """What `receive` is given beside the uploads: the server's samples in the round's order; nothing for most."""
    terms, held = state.setup.terms, state.setup.data.server_source
    if not terms.method.traits.server_data:
        return ()
    assert held is not None, "a run without them is refused when it is prepared"
    return (state.setup.data.server_samples(draw_order(terms.seed, "server", len(held), state.round)),)


def replied(state: State, request: RoundRequest) -> State:
    """The state once the devices that were counted in the round before it have used the server's reply."""
    terms, round = state.setup.terms, state.round - 1
    reply_each, use_reply = (optional(terms.algorithm, name) for name in ("reply_each", "use_reply"))
    counted = [task.device for task in request.plan if not task.lost]
    if reply_each is None or not counted:
        return state
    where = state.setup.data.where
    replies = reply_each(terms.method, state.server, torch.tensor(counted, device=where))
    kept = []
    for row, device in enumerate(counted):
        reply = map_tensors(lambda t, i=row: t[i], replies)
        labelled = _in_drawn_order(state.setup.data.labelled_samples(device), terms.seed, round, device)
        kept.append(use_reply(terms.method, state.hyper(device), reply, state.device(device), labelled))
    put(state.devices, state.sparse, counted, map_tensors(lambda *t: torch.stack(t), *kept))
    sent = len(counted) * bytes_of(map_tensors(lambda t: t[0], replies))
    return state._replace(downlink_bytes=state.downlink_bytes + sent)


def _in_drawn_order(labelled: Samples, seed: int, round: int, device: int) -> Samples:
    order = torch.from_numpy(draw_order(seed, "replies", len(labelled.target), round, device)).to(
        labelled.target.device
    )
    return labelled._replace(x=labelled.x[order], target=labelled.target[order])
