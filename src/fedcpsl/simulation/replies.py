"""Servers that learn from samples of their own, and what they send in the same round to the devices they counted."""

import torch

from fedcpsl.algorithm import optional
from fedcpsl.problem import Samples
from fedcpsl.schedule import draw_order
from fedcpsl.simulation.round_request import RoundRequest
from fedcpsl.simulation.state import State
from fedcpsl.simulation.store import put
from fedcpsl.trees import bytes_of, map_tensors


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
