"""A run of a group that diverges: it is marked and goes no further, and the others are what they would have been."""

import os
import signal

import pytest
import torch

from fedcpsl.config import Config, with_settings
from fedcpsl.errors import RunError
from fedcpsl.runs import experiment
from fedcpsl.runs.checkpoint import checkpoints
from fedcpsl.runs.experiment import GroupMember, build, resume_together, start, start_together
from fedcpsl.runs.folder import failure, is_finished, read_metrics
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


def test_stopped_and_resumed_they_end_with_the_same_bits(tmp_path):
    start_together(members(tmp_path / "through", **{"run.keep": "models"}))
    stops = []

    def stop(round, _):
        if round == 6 and not stops:
            stops.append(round)
            os.kill(os.getpid(), signal.SIGTERM)

    begun = members(tmp_path / "stopped", stop, **{"run.keep": "models"})
    assert not any(outcome.finished for outcome in start_together(begun))
    slow, bad, fast = (tmp_path / "stopped" / str(eta) for eta in ETAS)
    assert failure(bad) is not None
    assert resume_together([slow, fast], [lambda *_: None] * 2)[0].finished
    for eta, folder in ((0.05, slow), (0.1, fast)):
        through = tmp_path / "through" / str(eta)
        assert numbers(folder) == numbers(through)
        ours, theirs = (load_tensors(checkpoints(each)[-1])[0] for each in (folder, through))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_group_that_was_killed_before_the_failure_was_marked_diverges_again(tmp_path, monkeypatch):
    start_together(members(tmp_path / "through"))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "_mark_failed", killed)
        with pytest.raises(KeyboardInterrupt):
            start_together(members(tmp_path / "killed", **{"run.checkpoint_seconds": 0}))
    folders = [tmp_path / "killed" / str(eta) for eta in ETAS]
    assert failure(folders[1]) is None
    resume_together(folders, [lambda *_: None] * 3)
    assert failure(folders[1]) is not None
    for eta in (ETAS[0], ETAS[2]):
        assert numbers(tmp_path / "killed" / str(eta)) == numbers(tmp_path / "through" / str(eta))


def test_all_may_diverge(tmp_path):
    etas = (3e39, 4e39)
    assert all(outcome.finished for outcome in start_together(members(tmp_path, etas=etas)))
    assert all(failure(tmp_path / str(eta)) for eta in etas)


def test_alone_it_raises(tmp_path):
    (alone,) = members(tmp_path, etas=(3e39,))
    with pytest.raises(RunError, match="no longer a finite number"):
        start(alone.experiment, alone.folder, alone.watch)
