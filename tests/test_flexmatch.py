"""FlexMatch, and a state of each unlabelled sample: wherever devices keep anything."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl import config
from fedcpsl.algorithms import flexmatch
from fedcpsl.data.ondemand import from_function
from fedcpsl.federation.device import LoopbackTransport, load_device_state
from fedcpsl.federation.terms import terms_from
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fedcpsl.simulation import prepare, simulate, simulate_together
from fedcpsl.simulation.store import device_rows

from .conftest import small_federation, small_model
from .faulty import failing_disk, participants
from .faulty import make as make_federation
from .test_conformance import WORK, assert_equal, final, make
from .test_federation import assert_same, served

EASY = {"tau": 0.45, "eta": 0.3}  # so that samples become confident
MORE = replace(WORK, rounds=8)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_thresholds_by_hand():
    """6 samples: two of class 0, one of class 1, three never: b = (2, 1, 0) / max(3, 2); tau b / (2 - b), tau = 0.8."""
    selected = torch.tensor([0, 1, -1, 0, -1, -1, -1, -1])  # the last two are not the device's
    learnt = flexmatch.learning_status(selected, number(6.0), 3)
    assert learnt.tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    found = flexmatch.threshold(number(0.8), learnt, torch.tensor([0, 1, 2, 0]))
    assert found.tolist() == pytest.approx([0.8 * 0.5, 0.8 * 0.2, 0.0, 0.8 * 0.5])  # (2/3)/(4/3), (1/3)/(5/3)
    # four of class 0 and one of class 1: most are learnt, so b_0 = 1 and its threshold is tau
    learnt = flexmatch.learning_status(torch.tensor([0, 0, 0, 0, 1, -1]), number(6.0), 2)
    assert learnt.tolist() == [1.0, 0.25]
    assert flexmatch.learning_status(torch.tensor([-1]), number(0.0), 2).tolist() == [0.0, 0.0]


@settings(max_examples=80)
@given(st.data(), st.integers(1, 6), st.integers(0, 9))
def test_marks_are_those_of_a_loop_over_rows(data, samples, rows):
    """The last confident row of a sample stays."""
    which = data.draw(st.lists(st.integers(0, samples - 1), min_size=rows, max_size=rows))
    y = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    confident = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    expected = [-1] * samples
    for u, label, sure in zip(which, y, confident, strict=True):
        if sure:
            expected[u] = label
    before = torch.full((2, samples + 1), -1, dtype=torch.int16)
    given_rows = (torch.tensor(t, dtype=kind).expand(2, rows) for t, kind in ((which, torch.int64), (y, torch.int64)))
    found = flexmatch.marked(before, *given_rows, torch.tensor(confident, dtype=torch.bool).expand(2, rows))
    assert found.tolist() == [[*expected, -1]] * 2
    assert (before == -1).all()


def run_with(store="accelerator", executor="vectorised", federation=None, **run):
    given = config.Run(executor=executor, store=store, dtype="float64", seed=3, device="cpu", **{"processes": 1} | run)
    chosen = flexmatch.Settings(**EASY)
    return prepare(federation or small_federation(), small_model(), chosen, MORE, given)


def kept(state):
    return torch.stack([state.device(i).selected for i in range(state.setup.terms.devices)])


def test_samples_do_become_confident_and_stay_within_the_devices_own():
    state = final(run_with())
    sizes = state.setup.terms.sizes.unlabelled
    assert state.setup.terms.method.most_unlabelled == sizes.max() == 7
    assert (kept(state) >= 0).sum() > 5
    assert len(kept(state).unique()) > 2
    for own, count in zip(kept(state), sizes, strict=True):
        assert (own[count:] == flexmatch.NEVER).all()


@pytest.mark.parametrize("store", ["host", "disk"])
def test_stores_keep_it(store):
    reference, other = final(run_with()), final(run_with(store))
    assert torch.equal(kept(reference), kept(other))
    assert torch.equal(reference.server.theta, other.server.theta)


def test_samples_made_on_demand_have_it():
    held = small_federation()

    def samples(device):
        rows = held.order[held.device[held.order] == device]
        return held.x[rows], held.y[rows]

    n, m = held.sizes
    made = from_function(samples, devices=5, classes=3, labelled=n, unlabelled=m, tests=4)
    reference, other = final(run_with()), final(run_with("host", federation=made))
    assert torch.equal(kept(reference), kept(other))
    assert torch.allclose(reference.server.theta, other.server.theta, atol=1e-12)


@pytest.mark.parametrize("store", ["accelerator", "disk"])
def test_a_checkpoint_in_between_changes_no_bit(store, tmp_path):
    setup = run_with(store)
    rounds = simulate(setup)
    for _ in range(5):
        state = next(rounds)
    save_checkpoint(tmp_path, state)
    resumed = final(setup, load_checkpoint(checkpoints(tmp_path)[-1], setup))
    straight = final(setup)
    assert torch.equal(kept(resumed), kept(straight))
    assert torch.equal(resumed.server.theta, straight.server.theta)


def test_runs_with_other_sizes_go_on_beside_it():
    other = small_federation(((3, 9), (2, 4), (1, 1), (0, 2), (6, 3)), seed=1)
    first = run_with()
    both = [first, prepare(other, small_model(), flexmatch.Settings(**EASY), MORE, config.Run(**RUN), beside=first)]
    *_, states = simulate_together(both)
    assert_equal(states[0], final(first))
    assert_equal(states[1], final(both[1]))


RUN = {"executor": "vectorised", "dtype": "float64", "seed": 3, "device": "cpu", "processes": 1}


def test_real_devices_keep_it(tmp_path):
    with failing_disk():
        setup = make_federation("flexmatch", work=replace(MORE, loss_rate=0.0), **EASY)
        devices = participants(setup, tmp_path)
        last = served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1]
        assert_same(setup, last, devices)
        device = devices["phone-0"]
        assert (load_device_state(device.folder, device.terms).committed.selected >= 0).any()


def test_a_device_that_knows_only_its_own_samples_has_room_for_them(tmp_path):
    """A job's terms come without anybody's sizes."""
    setup = make_federation("flexmatch", **EASY)
    with failing_disk():
        devices = participants(setup, tmp_path)
        terms = terms_from(flexmatch.Settings(**EASY), setup.terms.method.network, replace(WORK, active=4), 4)
        devices = {name: device._replace(terms=terms) for name, device in devices.items()}
        assert terms.method.most_unlabelled == 0
        served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)
        rooms = [len(load_device_state(d.folder, d.terms).committed.selected) for d in devices.values()]
    assert rooms == setup.terms.sizes.unlabelled.tolist()


def test_a_lost_upload_leaves_the_marks():
    """They never leave the device, so they change whatever becomes of the upload."""
    lost = final(make("flexmatch", work=replace(MORE, loss_rate=1.0), **EASY))
    assert torch.equal(lost.server.theta, lost.setup.terms.method.network.initial)
    assert (lost.devices.selected >= 0).any()


def test_rows_are_taken_with_the_rest():
    state = final(run_with())
    some = device_rows(state.devices, torch.tensor([2, 0]))
    assert torch.equal(some.selected, state.devices.selected[[2, 0]])
    assert np.issubdtype(state.devices.selected.numpy().dtype, np.int16)
