"""Who, how much, which samples: drawn from keyed streams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl.schedule import PURPOSES, Sizes, Work, draw_active, draw_steps, draw_tasks, steps_per_epoch, stream

WORK = Work(active=3, unit="epochs", amount=2, hlu=(1, 5), batch_labelled=4, batch_unlabelled=8, loss_rate=0.0)
SIZES = Sizes(np.array([10, 0, 7, 3, 0]), np.array([30, 9, 0, 50, 0]))


@given(st.integers(0, 2**70), st.lists(st.integers(0, 2**33), max_size=3))
def test_a_stream_is_that_of_its_numbers(seed, where):
    """As NumPy documents: a run of an earlier version is drawn again, bit for bit."""
    for number, purpose in enumerate(PURPOSES):
        plain = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number, *where])))
        assert stream(seed, purpose, *where).bytes(16) == plain.bytes(16)


def test_steps_per_epoch():
    # ceil(max(10/4, 30/8)) = ceil(3.75) = 4; labels alone: ceil(2.5) = 3
    assert steps_per_epoch(10, 30, WORK, unlabelled=True) == 4
    assert steps_per_epoch(10, 30, WORK, unlabelled=False) == 3
    assert steps_per_epoch(0, 30, WORK, unlabelled=False) == 0


def test_local_work_in_epochs_steps_and_hlu():
    assert draw_steps(0, 0, 0, SIZES, WORK, True) == 8
    assert draw_steps(0, 0, 0, SIZES, WORK._replace(unit="steps", amount=7), True) == 7
    drawn = {draw_steps(0, r, 0, SIZES, WORK._replace(unit="hlu", hlu=(2, 4)), True) for r in range(60)}
    assert drawn == {8, 12, 16}  # 2, 3 and 4 epochs of 4 steps
    for work in (WORK, WORK._replace(unit="steps"), WORK._replace(unit="hlu")):
        assert draw_steps(0, 0, 4, SIZES, work, True) == 0  # no data, no work
        assert draw_steps(0, 0, 1, SIZES, work, False) == 0  # no labels, and labels alone are used


def draw(seed=0, round=0, work=WORK, **switches):
    options = {"unlabelled": True, "dropout": False} | switches
    active = draw_active(seed, round, range(5), work.active)
    return draw_tasks(seed, round, active, SIZES, work, **options)


def test_participation_is_uniform_without_replacement():
    counts = np.zeros(5)
    for r in range(2000):
        active = draw_active(1, r, range(5), 2)
        assert len(set(active)) == 2
        counts[active] += 1
    assert counts == pytest.approx(np.full(5, 800), abs=80)


@given(seed=st.integers(0, 2**32), round=st.integers(0, 1000), small=st.integers(1, 5), large=st.integers(1, 5))
@settings(max_examples=50)
def test_more_active_devices_are_added_to_the_same_ones(seed, round, small, large):
    small, large = sorted((small, large))
    assert set(draw_active(seed, round, range(5), small)) <= set(draw_active(seed, round, range(5), large))


def test_samples_do_not_depend_on_how_many_steps_a_device_manages():
    for short, long in zip(draw(), draw(work=WORK._replace(amount=5)), strict=True):
        assert np.array_equal(short.labelled, long.labelled[: short.steps])
        assert np.array_equal(short.unlabelled, long.unlabelled[: short.steps])


def test_samples_are_the_same_for_algorithms_with_and_without_unlabelled_data():
    for both, labels in zip(draw(dropout=True), draw(unlabelled=False, dropout=True), strict=True):
        steps = min(both.steps, labels.steps)
        assert np.array_equal(both.labelled[:steps], labels.labelled[:steps])
        assert np.array_equal(both.keys[:steps, :4], labels.keys[:steps])


def test_batches_stay_within_the_sets_and_are_empty_where_a_set_is():
    for r in range(20):
        for task in draw(round=r, work=WORK._replace(active=5)):
            n, m = SIZES.labelled[task.device], SIZES.unlabelled[task.device]
            assert task.labelled.shape == (task.steps, 4 if n else 0)
            assert task.unlabelled.shape == (task.steps, 8 if m else 0)
            assert task.labelled.max(initial=-1) < max(n, 1)
            assert task.unlabelled.max(initial=-1) < max(m, 1)


def test_uploads_are_lost_at_the_given_rate():
    lost = [t.lost for r in range(400) for t in draw(round=r, work=WORK._replace(loss_rate=0.25))]
    assert np.mean(lost) == pytest.approx(0.25, abs=0.04)
    assert not any(t.lost for r in range(50) for t in draw(round=r))


def test_seeds_and_rounds_differ_and_repeat():
    first, again = draw(seed=5), draw(seed=5)
    assert all(np.array_equal(a.unlabelled, b.unlabelled) for a, b in zip(first, again, strict=True))
    others = [draw(seed=6), draw(seed=5, round=1)]
    for other in others:
        same = [t for t in other for u in first if t.device == u.device and np.array_equal(t.unlabelled, u.unlabelled)]
        assert not [t for t in same if t.unlabelled.size]
