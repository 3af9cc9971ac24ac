"""A run of a group that diverges: it is marked as failed, and the others end as they would have without it."""

import os
import re
import signal

import pytest
import torch

from fedcpsl.config import Config, with_settings
from fedcpsl.errors import RunError
from fedcpsl.runs import experiment
from fedcpsl.runs import folder as run_folders
from fedcpsl.runs.checkpoint import checkpoints
from fedcpsl.runs.comparison import Case
from fedcpsl.runs.experiment import GroupMember, build, resume_together, start, start_together
from fedcpsl.runs.folder import failure, is_finished, read_metrics
from fedcpsl.runs.run_groups import Planned, started_groups
from fedcpsl.storage import load_tensors

SETTINGS = {
    "algorithm.name": "fedcpsl",
    "data.devices": 5,
    "work.rounds": 9,
    "work.active": 2,
    "model.hidden": [6],
    "run.device": "cpu",
    "run.dtype": "float64",
    "run.processes": 1,
    "run.executor": "vectorised",
    "run.evaluate_every": 2,
}
ETAS = (0.05, 3e39, 0.1)  # the second ends in numbers that are not finite after some rounds
WIDE_ETAS = (0.05, 1e4, 0.1)  # in float32 that takes less


WIDE = {"run.dtype": "float32", "model.hidden": [200], "work.batch_labelled": 1, "run.keep": "models"}


def planned(folder):
    config = with_settings(Config(), SETTINGS | WIDE)
    return [Planned(Case(str(eta), {}), 1, folder / str(eta), config, same_data=True) for eta in WIDE_ETAS]


def members(folder, watch=lambda *_: None, etas=ETAS, **settings):
    made = []
    for eta in etas:
        given = SETTINGS | {"algorithm.eta": eta, "run.seed": 1} | settings
        made.append(build(with_settings(Config(), given), None, made))
    folders = [folder / str(eta) for eta in etas]
    return [GroupMember(e, f, watch) for e, f in zip(made, folders, strict=True)]


def numbers(folder):
    return [{k: v for k, v in metrics.items() if k != "seconds"} for metrics in read_metrics(folder)]


def test_the_others_go_on_as_they_would_alone(tmp_path):
    done = start_together(members(tmp_path))
    assert all(outcome.finished for outcome in done)
    slow, bad, fast = (tmp_path / str(eta) for eta in ETAS)
    assert "no longer a finite number" in failure(bad)
    assert "use a smaller algorithm.eta" in failure(bad)
    assert not is_finished(bad)
    for eta, folder in ((0.05, slow), (0.1, fast)):
        assert failure(folder) is None
        start(members(tmp_path / "alone", etas=(eta,))[0].experiment, tmp_path / f"alone-{eta}", lambda *_: None)
        ours, theirs = read_metrics(folder), read_metrics(tmp_path / f"alone-{eta}")
        assert [m["round"] for m in ours] == [0, 2, 4, 6, 8, 9]
        for a, b in zip(ours, theirs, strict=True):
            assert a["personal"]["mean"] == pytest.approx(b["personal"]["mean"], abs=1e-10)
            assert a["losses"] == pytest.approx(b["losses"], abs=1e-10)


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """A group in float32 whose runs are wide enough to be rounded differently beside others, to its end."""
    folder = tmp_path_factory.mktemp("through")
    start_together(members(folder, etas=WIDE_ETAS, **WIDE))
    return folder


def compare(folder, through):
    for eta in (WIDE_ETAS[0], WIDE_ETAS[2]):
        ours, theirs = folder / str(eta), through / str(eta)
        assert numbers(ours) == numbers(theirs)
        a, b = (load_tensors(checkpoints(each)[-1])[0] for each in (ours, theirs))
        assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
    bad = str(WIDE_ETAS[1])
    assert failure(folder / bad) == failure(through / bad)
    assert not is_finished(folder / bad)


@pytest.mark.parametrize("after", [-1, 0, 1, 3])
def test_stopped_and_resumed_they_end_with_the_same_bits(after, through, tmp_path):
    diverged = int(re.search(r"round (\d+)", failure(through / str(WIDE_ETAS[1])))[1])
    assert 3 <= diverged <= 6
    stops = []

    def stop(round, _):
        if round == diverged + after and not stops:
            stops.append(round)
            os.kill(os.getpid(), signal.SIGTERM)

    assert not any(outcome.finished for outcome in start_together(members(tmp_path, stop, etas=WIDE_ETAS, **WIDE)))
    assert stops
    assert (failure(tmp_path / str(WIDE_ETAS[1])) is not None) == (after >= 0)
    folders = [run.folder for run in started_groups(planned(tmp_path))[0]]
    assert folders == [tmp_path / str(eta) for eta in WIDE_ETAS]  # also the one that failed
    assert all(outcome.finished for outcome in resume_together(folders, [lambda *_: None] * 3))
    compare(tmp_path, through)
    assert not started_groups(planned(tmp_path))


@pytest.mark.parametrize("marked", [False, True])
def test_killed_while_the_failure_is_marked_they_end_with_the_same_bits(marked, through, tmp_path, monkeypatch):
    mark = run_folders.mark_failed

    def killed(folder, reason):
        if marked:
            mark(folder, reason)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_folders, "mark_failed", killed)
        with pytest.raises(KeyboardInterrupt):
            start_together(members(tmp_path, etas=WIDE_ETAS, **WIDE, **{"run.checkpoint_seconds": 0}))
    assert (failure(tmp_path / str(WIDE_ETAS[1])) is not None) == marked
    folders = [run.folder for run in started_groups(planned(tmp_path))[0]]
    resume_together(folders, [lambda *_: None] * 3)
    compare(tmp_path, through)


def test_a_loss_that_is_not_finite_fails_the_run_alone(tmp_path, monkeypatch):
    """Weights can be finite and too large for any prediction."""
    real = experiment._loss_not_finite
    seen = []

    def judged(evaluation, round):
        seen.append(round)
        return f"third after {round}" if len(seen) % 3 == 0 and round >= 4 else real(evaluation, round)

    monkeypatch.setattr(experiment, "_loss_not_finite", judged)
    start_together(members(tmp_path, etas=(0.05, 0.1, 0.2)))
    assert [failure(tmp_path / str(eta)) for eta in (0.05, 0.1, 0.2)] == [None, None, "third after 4"]
    assert [m["round"] for m in read_metrics(tmp_path / "0.2")] == [0, 2]
    assert [is_finished(tmp_path / str(eta)) for eta in (0.05, 0.1, 0.2)] == [True, True, False]


@pytest.mark.parametrize("algorithm", ["afl", "drfa", "fedamp", "fedcpsl2"])
def test_servers_that_look_at_what_devices_send_go_on_for_the_others(algorithm, tmp_path):
    own = {"algorithm.name": algorithm, "work.active": "auto" if algorithm == "afl" else 2}
    etas = (0.05, 1e30, 0.1)
    assert all(outcome.finished for outcome in start_together(members(tmp_path, etas=etas, **WIDE | own)))
    assert [failure(tmp_path / str(eta)) is None for eta in etas] == [True, False, True]
    assert [is_finished(tmp_path / str(eta)) for eta in etas] == [True, False, True]


def test_all_may_diverge(tmp_path):
    etas = (3e39, 4e39)
    assert all(outcome.finished for outcome in start_together(members(tmp_path, etas=etas)))
    assert all(failure(tmp_path / str(eta)) for eta in etas)


def test_alone_it_raises(tmp_path):
    (alone,) = members(tmp_path, etas=(3e39,))
    with pytest.raises(RunError, match="no longer a finite number"):
        start(alone.experiment, alone.folder, alone.watch)
