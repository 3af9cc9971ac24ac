"""The second exchange of a round: the server asks some devices about some of their samples, after it has aggregated."""

from collections.abc import Sequence

import numpy as np
import torch

from fedcpsl.algorithm import optional
from fedcpsl.schedule import DeviceRound, Probe, draw_probes
from fedcpsl.simulation.device_data import load_samples
from fedcpsl.simulation.minibatches import drawn_once
from fedcpsl.simulation.round_request import RoundRequest, Slot, TrainingData, hyper_of
from fedcpsl.simulation.state import State
from fedcpsl.trees import Tree, bytes_of, map_tensors

NOTHING = np.empty((1, 0), np.int64)


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
