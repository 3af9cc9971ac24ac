"""Devices drawn by weights that the server's state gives: who, how often, and wherever a round is computed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcpsl.algorithms import feddyn
from fedcpsl.federation import serve, terms_of
from fedcpsl.federation.device import LoopbackTransport
from fedcpsl.federation.server import draw_devices
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fedcpsl.schedule import draw_by_weight, draw_numbers
from fedcpsl.simulation import initial_state, simulate, simulate_together
from fedcpsl.simulation.rounds import draw_plan

from . import faulty
from .conftest import needs_fork
from .test_conformance import WORK, assert_equal, final, make

WITH_JOINERS = replace(WORK, active=3, joiners=2, join_round=2)


@pytest.fixture
def drawn_by_state(monkeypatch):
    """FedDyn whose devices are drawn by numbers of the server's state, the more the later the round."""

    def weights(_method, server):
        return torch.softmax(40 * server.mean_memory[:5], 0) * (torch.arange(5) != 3)

    monkeypatch.setattr(feddyn, "draw_weights", weights, raising=False)


def test_draws_by_hand():
    """c = (0.25, 0.25, 0.75, 1.0) of c_N = 1: 0.25 draws the first i with c_i > 0.25, which is 2."""
    weights = np.array([0.25, 0.0, 0.5, 0.25])
    assert draw_by_weight(weights, np.array([0.2, 0.25, 0.0, 0.74, 0.75])) == {0: 2, 2: 2, 3: 1}
    assert draw_by_weight(8 * weights, np.array([0.2, 0.999])) == {0: 1, 3: 1}
    assert draw_by_weight(np.zeros(3), np.array([0.5])) == {}
    assert draw_by_weight(np.array([1.0, 0.0]), np.array([np.nextafter(1, 0)])) == {0: 1}


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8),
)
def test_every_number_draws_one_device_that_has_a_weight(weights, numbers):
    found = draw_by_weight(np.array(weights), np.array(numbers))
    assert list(found) == sorted(found)
    assert all(weights[i] > 0 for i in found)
    assert sum(found.values()) == (len(numbers) if sum(weights) > 0 else 0)


def test_more_numbers_are_added_to_the_same():
    assert np.array_equal(draw_numbers(3, 1, 2), draw_numbers(3, 1, 5)[:2])
    assert np.array_equal(draw_numbers(3, 1, 2, skip=2), draw_numbers(3, 1, 4)[2:])


@pytest.mark.usefixtures("drawn_by_state")
@pytest.mark.parametrize("work", [WORK, WITH_JOINERS], ids=["", "joiners"])
def test_executors_agree_on_who_is_drawn(work):
    reference = final(make("feddyn", work=work))
    assert reference.active_rounds[3] == 0
    assert_equal(reference, final(make("feddyn", "vectorised", work=work)))
    assert_equal(reference, final(make("feddyn", "vectorised", work=work, slots=1)))


@needs_fork
@pytest.mark.usefixtures("drawn_by_state")
def test_processes_and_runs_side_by_side_agree():
    alone = [final(make("feddyn", "vectorised", eta=eta)) for eta in (0.05, 0.5)]
    assert not np.array_equal(*(state.active_rounds for state in alone))  # who is drawn depends on the state
    assert_equal(alone[0], final(make("feddyn", "vectorised", eta=0.05, processes=2)))
    *_, together = simulate_together([make("feddyn", "vectorised", eta=eta) for eta in (0.05, 0.5)])
    for one, other in zip(alone, together, strict=True):
        assert_equal(one, other)


@pytest.mark.usefixtures("drawn_by_state")
def test_a_resumed_run_draws_the_same(tmp_path):
    setup = make("feddyn", "vectorised")
    rounds = simulate(setup)
    for _ in range(3):
        state = next(rounds)
    save_checkpoint(tmp_path, state)
    assert_equal(final(setup, load_checkpoint(checkpoints(tmp_path)[-1], setup)), final(setup), tolerance=0)


@pytest.mark.usefixtures("drawn_by_state")
def test_minibatches_of_a_device_do_not_depend_on_who_else_is_active(monkeypatch):
    state = initial_state(make("feddyn"))
    drawn = {task.device: task for task in draw_plan(state)}
    monkeypatch.delattr(feddyn, "draw_weights")
    others = {task.device: task for task in draw_plan(state)}
    assert sum(task.copies for task in drawn.values()) == 4
    common = drawn.keys() & others.keys()
    assert common
    for device in common:
        assert np.array_equal(drawn[device].labelled, others[device].labelled)


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_device_that_is_drawn_twice_counts_twice(executor, monkeypatch):
    """m = 4 numbers draw two devices twice each: the plain mean of FedDyn is that of one draw each; Hbar has 4/N."""

    def server_after(copies):
        monkeypatch.setattr(feddyn, "draw_weights", lambda *_: torch.tensor([1.0, 0, 1.0, 0, 0]), raising=False)
        setup = make("feddyn", executor, work=replace(WORK, rounds=1, loss_rate=0.0))
        monkeypatch.setattr("fedcpsl.simulation.rounds.draw_numbers", lambda *_: np.array([0.1, 0.6] * copies))
        return final(setup).server

    once, twice = server_after(1), server_after(2)
    assert torch.allclose(twice.mean_memory, 2 * once.mean_memory, rtol=1e-12)
    assert torch.allclose(twice.theta - twice.mean_memory, once.theta - once.mean_memory, rtol=1e-12)


@pytest.mark.usefixtures("drawn_by_state")
def test_real_devices_are_drawn_as_in_the_simulator(tmp_path):
    work = replace(faulty.WORK, loss_rate=0.0)
    setup = faulty.make("feddyn", work=work)
    *_, simulated = simulate(setup)
    rules = faulty.rules(setup, min_devices=5)
    devices = faulty.participants(setup, tmp_path)
    drawn = []
    for state in serve(terms_of(setup), rules, tmp_path / "server", LoopbackTransport(devices)):
        drawn.append(draw_devices(terms_of(setup), rules, state) if state.begun and not state.over else {})
    assert torch.allclose(state.server.theta, simulated.server.theta, rtol=1e-10, atol=1e-12)
    assert any(copies > 1 for each in drawn for copies in each.values())


@pytest.mark.usefixtures("drawn_by_state")
def test_a_repeated_attempt_draws_others_and_nobody_who_is_excluded(tmp_path):
    setup = faulty.make("feddyn")
    terms, rules = terms_of(setup), faulty.rules(setup, min_devices=5)
    *_, state = serve(terms, rules, tmp_path / "server", LoopbackTransport(faulty.participants(setup, tmp_path)))
    attempts = [state._replace(attempt=state.attempt._replace(number=number)) for number in range(6)]
    assert len({tuple(draw_devices(terms, rules, each).items()) for each in attempts}) > 1
    drawn = {i for each in attempts for i in draw_devices(terms, rules, each)}
    roster = [m._replace(excluded_until=99) if i in drawn - {4} else m for i, m in enumerate(state.roster)]
    for each in attempts:
        assert set(draw_devices(terms, rules, each._replace(roster=tuple(roster)))).isdisjoint(drawn - {4})
