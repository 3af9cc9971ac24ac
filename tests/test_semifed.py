"""SemiFed: votes of other devices' models, drawn by the schedule and chosen by the server."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedcpsl.algorithms import semifed
from fedcpsl.errors import InputError
from fedcpsl.schedule import Draw, Sizes, Work, draw_extra
from fedcpsl.simulation import simulate
from fedcpsl.simulation.rounds import draw_plan, next_state
from fedcpsl.trees import map_tensors
from fedcpsl.views import views_for

from .conftest import needs_fork
from .test_conformance import WORK, assert_equal, final, make

EASY = {"tau": 0.35, "eta": 0.2, "first_stage": 2}
LONGER = replace(WORK, rounds=7)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_votes_by_hand():
    """Three models, four samples, tau = 0.6; the third model is not there.

    Sample 0: both vote for class 1. Sample 1: 0 against 1, a tie. Sample 2: one vote for 0, the other too unsure.
    Sample 3: nobody is sure.
    """
    first = [[0.1, 0.8, 0.1], [0.7, 0.2, 0.1], [0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]
    other = [[0.2, 0.7, 0.1], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.3, 0.4, 0.3]]
    log_h = number([first, other, first]).log()
    there = number([1.0, 1.0, 0.0])
    assert semifed.agreed(log_h, there, number(0.6), 2).tolist() == [1, -1, -1, -1]
    assert semifed.agreed(log_h, there, number(0.6), 1).tolist() == [1, -1, 0, -1]
    assert semifed.agreed(log_h, number([1.0, 1.0, 1.0]), number(0.6), 2).tolist() == [1, 0, 0, -1]


def test_an_order_of_all_other_devices_is_drawn():
    draw, sizes = Draw("peers", of="devices", per_visit=True), Sizes(np.ones(6, int), np.ones(6, int))
    work = Work(2, "steps", 1, (1, 1), 4, 4, 0.0)
    orders = [draw_extra(draw, 0, r, 2, 1, sizes, work).rows.tolist() for r in range(300)]
    assert all(sorted(order) == [0, 1, 3, 4, 5] for order in orders)
    counts = np.bincount([order[0] for order in orders], minlength=6)
    assert counts[2] == 0
    assert counts[[0, 1, 3, 4, 5]] == pytest.approx(np.full(5, 60), abs=25)


def test_peers_are_the_first_of_the_order_that_were_counted():
    setup = make("semifed", **EASY)
    server = setup.terms.first_server()
    models = torch.arange(5.0, dtype=torch.float64)[:, None].expand_as(server.models)
    server = server._replace(models=models, counted=number([1.0, 0.0, 1.0, 1.0, 0.0]), rounds=number(2.0))
    drawn = {"peers": [[4, 3, 1, 2], [1, 4, 2, 3], [4, 1, 2]]}
    sent = semifed.broadcast_each(setup.terms.method, server, torch.tensor([0, 0, 3]), drawn)
    assert sent.there.tolist() == [[1, 1], [1, 1], [1, 0]]
    assert sent.peers[..., 0].tolist() == [[3, 2], [2, 3], [2, 0]]
    parameters = len(server.theta)
    assert semifed.broadcast_size(None, sent).tolist() == [3 * parameters + 1, 3 * parameters + 1, 2 * parameters + 1]
    early = server._replace(rounds=number(1.0))
    first = semifed.broadcast_each(setup.terms.method, early, torch.tensor([0]), {"peers": [[4, 3, 1, 2]]})
    assert not first.there.any()  # the first stage
    assert not first.second.any()


def test_the_first_stage_is_half_of_all_rounds_by_default():
    setup = make("semifed", work=LONGER)
    assert semifed.rounds_of_first_stage(semifed.Settings(), setup.terms.method) == 3
    assert semifed.decided(semifed.Settings(), setup.terms.method, 0.1).first_stage == 3


def test_labels_are_made_in_the_second_stage_and_forgotten_at_the_next_visit():
    states = []
    for state in simulate(make("semifed", work=LONGER, **EASY)):
        states.append((state.round, state.devices.labels.clone(), state.active_rounds))
    assert all((labels == semifed.NONE).all() for r, labels, _ in states if r <= 2)
    assert (states[-1][1] >= 0).any()
    for (_, before, visits), (_, after, later) in pairwise(states):
        assert torch.equal(before[visits == later], after[visits == later])  # who was not visited keeps them
    sizes = make("semifed").terms.sizes.unlabelled
    assert all((own[count:] == semifed.NONE).all() for own, count in zip(states[-1][1], sizes, strict=True))


@pytest.mark.parametrize("slots", [0, 2])
def test_executors_agree_with_votes(slots):
    reference = final(make("semifed", work=LONGER, **EASY))
    assert_equal(reference, final(make("semifed", "vectorised", work=LONGER, slots=slots, **EASY)))


@needs_fork
def test_processes_agree_with_votes():
    reference = final(make("semifed", work=LONGER, **EASY))
    assert_equal(reference, final(make("semifed", "vectorised", work=LONGER, processes=2, **EASY)))


def test_peers_matter():
    setup = make("semifed", work=LONGER, **EASY)
    *_, state = (s for s in simulate(setup) if s.round <= 4)
    state = state._replace(round=4)
    plan = draw_plan(state)
    none = [task._replace(extra={"peers": task.extra["peers"]._replace(rows=np.empty(0, int))}) for task in plan]
    ours, theirs = (
        next_state(state._replace(devices=map_tensors(torch.clone, state.devices)), p) for p in (plan, none)
    )
    assert not torch.equal(ours.devices.labels, theirs.devices.labels)
    assert not torch.equal(ours.server.theta, theirs.server.theta)


def test_what_is_sent_is_counted_without_padding():
    """Five devices, all active: theta and a number for the stage; then with two peers each."""
    setup = make("semifed", work=replace(LONGER, active=5, loss_rate=0.0, unit="steps", amount=1), **EASY)
    sent, before = [], 0
    for state in simulate(setup):
        sent.append(state.downlink_bytes - before)
        before = state.downlink_bytes
    parameters = len(setup.terms.method.network.initial)
    assert sent[1] == sent[2] == 8 * 5 * (parameters + 1)
    assert sent[3] == 8 * 5 * (3 * parameters + 1)


def test_the_weak_view_is_the_sample():
    x, keys = torch.randn(4, 7), torch.arange(4)
    views = views_for("strong auto", (7,))
    assert torch.equal(views.weak(x, keys), x)
    assert torch.equal(views.strong(x, keys), views_for("auto", (7,)).strong(x, keys))
    with pytest.raises(InputError, match="do not fit"):
        views_for("strong image", (7,))
