"""Views that are kept for the next time."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedcpsl.engine.leafwise import cache_last_call


def test_the_same_objects_are_answered_without_work():
    made = []

    @cache_last_call
    def make(a, b=None):
        made.append((a, b))
        return [a, b]

    one, other = object(), object()
    first = make(one, other)
    assert make(one, other) is first
    assert make(one, b=other) is first
    assert make(one) == [one, None]
    assert make(one, other) is not first
    assert len(made) == 3


@pytest.fixture
def _threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_threads_get_their_own_answers():
    @cache_last_call
    def make(a):
        return [a]

    def ask(_):
        mine = object()
        return all(make(mine)[0] is mine for _ in range(20_000))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))
