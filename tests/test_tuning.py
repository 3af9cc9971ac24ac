"""`auto` on a CPU: what is timed, what is chosen, and what is left alone."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcpsl import Algorithm, Federation, Run, Work, prepare, simulate
from fedcpsl.config import Config
from fedcpsl.models import mlp
from fedcpsl.runs import experiment
from fedcpsl.simulation import tuning
from fedcpsl.simulation.tuning import Layout


def small_setup(run=None, active=4):
    rng = np.random.default_rng(0)
    x, y, owner = rng.normal(size=(240, 6)), rng.integers(0, 3, 240), np.arange(240) % 6
    federation = Federation.from_arrays(x, y, owner, np.arange(240) % 5 == 0, normalise=False)
    torch.manual_seed(0)
    work = Work(rounds=2, active=active, unit="steps", amount=3, batch_labelled=4, batch_unlabelled=4)
    run = run or Run(dtype="float64", device="cpu")
    return prepare(federation, mlp(6, 3, (5,)), Algorithm(), work, run)


def test_candidates_are_what_the_settings_leave_open(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("fedcpsl.simulation.setup.has_gpu", lambda: False)
    run = Run(device="cpu")
    found = tuning.candidates_for(small_setup(run), run)
    assert found[0] == Layout("vectorised", 0, 2)
    assert set(found) == {
        *(Layout("sequential", 0, count) for count in (1, 2)),
        *(Layout("vectorised", slots, 2) for slots in (0, 1)),
        *(Layout("vectorised", slots, 1) for slots in (0, 1, 2)),
    }
    run = Run(device="cpu", executor="sequential")
    assert set(tuning.candidates_for(small_setup(run), run)) == {Layout("sequential", 0, n) for n in (1, 2)}
    run = Run(device="cpu", executor="vectorised", processes=1)
    assert tuning.candidates_for(small_setup(run), run) == [Layout("vectorised", 0, 1)]


@pytest.mark.parametrize("active", [2, 4])
def test_no_layout_is_timed_twice(monkeypatch, active):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("fedcpsl.simulation.setup.has_gpu", lambda: False)
    rng = np.random.default_rng(0)
    federation = Federation.from_arrays(rng.normal(size=(40, 1, 6, 6)), rng.integers(0, 3, 40), np.arange(40) % 4)
    for norm in (torch.nn.Identity(), torch.nn.GroupNorm(1, 2)):
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), norm, torch.nn.Flatten(), torch.nn.Linear(32, 3))
        setup = prepare(federation, model, Algorithm(), Work(rounds=1, active=active), Run(device="cpu"))
        found = tuning.candidates_for(setup, Run(device="cpu"))
        shares = [-(-active // layout.processes) for layout in found]
        most = [n if e == "sequential" else min(s or n, n) for (e, s, _), n in zip(found, shares, strict=True)]
        same = [(layout.executor, n, layout.processes) for layout, n in zip(found, most, strict=True)]
        assert len(set(same)) == len(same)


def test_the_fastest_of_given_speeds_is_chosen_and_said(caplog):
    speeds = {Layout("sequential", 0, 1): 10.0, Layout("vectorised", 2, 1): 30.0, Layout("vectorised", 0, 2): 20.0}
    with caplog.at_level(logging.INFO, "fedcpsl"):
        best = tuning.quickest(small_setup(), list(speeds), lambda _, layout, __: speeds[layout])
    assert best == Layout("vectorised", 2, 1)
    assert "auto: vectorised, 2 side by side, 1 process;" in caplog.text
    assert "sequential, 1 process: 10" in caplog.text


def test_the_first_stays_unless_another_is_clearly_faster():
    first, second = Layout("vectorised", 0, 2), Layout("vectorised", 0, 1)
    speeds = {first: 100.0, second: 105.0}
    assert tuning.quickest(small_setup(), list(speeds), lambda _, layout, __: speeds[layout]) == first
    speeds[second] = 130.0
    assert tuning.quickest(small_setup(), list(speeds), lambda _, layout, __: speeds[layout]) == second


def test_no_other_layout_is_tried_when_time_is_up(monkeypatch):
    monkeypatch.setattr(tuning, "BUDGET", 0.0)
    first, second = Layout("sequential", 0, 1), Layout("vectorised", 0, 1)
    assert tuning.quickest(small_setup(), [first, second], lambda *_: 1.0) == first


@pytest.mark.parametrize("layout", [Layout("sequential", 0, 1), Layout("vectorised", 1, 1), Layout("vectorised", 0, 2)])
def test_candidates_are_really_run_and_leave_no_trace(layout):
    setup = small_setup()
    before = setup.data.one_hot.clone(), setup.terms.method.network.batched
    assert tuning.device_steps_per_second(setup, layout, 0.01) > 0
    assert torch.equal(setup.data.one_hot, before[0])
    assert setup.terms.method.network.batched == before[1]


def test_small_runs_are_not_timed(monkeypatch):
    monkeypatch.setattr(tuning, "device_steps_per_second", lambda *_: pytest.fail("timed"))
    setup = small_setup()
    assert tuning.seconds_on_one_core(setup) < tuning.LONG
    assert tuning.fastest(setup, Run(device="cpu")) is setup


@pytest.mark.parametrize("layout", [Layout("sequential", 0, 1), Layout("vectorised", 1, 1), Layout("vectorised", 0, 2)])
def test_results_do_not_depend_on_the_choice(layout, monkeypatch):
    monkeypatch.setattr(tuning, "LONG", 0)
    monkeypatch.setattr(tuning, "quickest", lambda *_: layout)
    run = Run(dtype="float64", device="cpu")
    *_, plain = simulate(small_setup(replace(run, executor="sequential", processes=1)))
    chosen = tuning.fastest(small_setup(run), run)
    expected = layout if layout != Layout("vectorised", 0, 2) else layout._replace(slots=4)  # all of a round's
    assert (chosen.machine.executor, chosen.machine.slots, chosen.machine.processes) == expected
    *_, timed = simulate(chosen)
    assert torch.allclose(timed.server.theta, plain.server.theta, rtol=0, atol=1e-10)


def test_a_resumed_run_keeps_what_was_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "LONG", 0)
    monkeypatch.setattr(tuning, "quickest", lambda *_: Layout("vectorised", 2, 1))
    config = Config()
    config = replace(
        config,
        data=replace(config.data, dataset="digits"),
        work=replace(config.work, rounds=2, active=4, unit="steps", amount=1),
        run=replace(config.run, device="cpu"),
    )
    built = experiment.build(config)
    experiment.start(built, tmp_path / "run", lambda *_: None)
    assert (built.config.run.executor, built.config.run.slots, built.config.run.processes) == ("vectorised", 2, 1)
    monkeypatch.setattr(tuning, "quickest", lambda *_: pytest.fail("timed again"))
    again = experiment.build(experiment.run_folders.read_run_config(tmp_path / "run"))
    assert (again.setup.machine.executor, again.setup.machine.slots, again.setup.machine.processes) == (
        "vectorised",
        2,
        1,
    )
