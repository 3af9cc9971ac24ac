"""Draws that an algorithm asks for beside the minibatch of a step: the same for all executors and real devices."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedcpsl import algorithms
from fedcpsl.federation.device import LoopbackTransport
from fedcpsl.schedule import Draw, Sizes, Work, draw_extra, draw_tasks

from .conftest import needs_fork
from .faulty import failing_disk, participants
from .faulty import make as make_federation
from .test_conformance import WORK, assert_equal, final, make
from .test_federation import assert_same, served

DRAWING = '''
"""FedAvg on two minibatches a step, its step scaled by the loss of theta^r on samples drawn for the visit."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Traits
from fedcpsl.averaging import *
from fedcpsl.averaging import no_own_model as own_model, predict_general as predict
from fedcpsl.engine import Leaves
from fedcpsl.problem import LabelledCosts
from fedcpsl.schedule import Draw
from fedcpsl.settings import choice, real

DRAWS = (Draw("second"), Draw("probe", size=5, per_visit=True), Draw("others", of="unlabelled", size=2))
VARIANTS = {"drawing": Traits(unlabelled=True, personal=False, draws=DRAWS)}


@dataclass(frozen=True)
class Settings:
    name: str = choice("drawing", "the algorithm", *VARIANTS)
    eta: float | str = real("auto", "the step size", 0, open_ends="[", also=("auto",))


class Hyper(NamedTuple):
    eta: Tensor


class Device(NamedTuple):
    loss: Tensor


class Local(NamedTuple):
    models: Leaves
    costs: Tensor
    loss: Tensor


def numbers(method, settings, sizes, *, warming):
    return {"eta": float(settings.eta)}


def init_device(method, broadcast):
    return Device(broadcast.theta.new_zeros(()))


def begin(method, hyper, broadcast, device):
    models = stacked(method, hyper, broadcast.theta)
    return Local(tuple(leaf.clone() for leaf in models), torch.zeros_like(hyper.eta)[..., None], device.loss)


def use_draws(method, hyper, broadcast, local, drawn):
    probe, lead = drawn["probe"], hyper.eta.dim()
    theta = broadcast.theta.expand(*hyper.eta.shape, -1)
    log_h = method.network.log_probabilities(theta, probe.x).unsqueeze(lead)
    return local._replace(loss=LabelledCosts(probe)(log_h)[..., 0])


def step(method, hyper, local, samples):
    gradient = tuple(map(torch.zeros_like, local.models))
    costs = add_labelled_gradient(method, gradient, local.models, samples)
    add_labelled_gradient(method, gradient, local.models, samples.extra["second"])
    others = samples.extra["others"]
    as_labelled = others._replace(labelled=others.unlabelled, target=others.target * 2)
    add_labelled_gradient(method, gradient, local.models, as_labelled)
    descend(local.models, (hyper.eta * (1 + local.loss))[..., None], gradient)
    return local._replace(costs=local.costs + costs)


def costs(local):
    return local.costs


def finish(method, hyper, broadcast, device, local, steps):
    return Device(local.loss), Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)
'''


@pytest.fixture
def drawing(tmp_path, monkeypatch):
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    algorithms.all_algorithms.cache_clear()
    yield "drawing"
    algorithms.all_algorithms.cache_clear()
    sys.modules.pop("fedcpsl.algorithms.drawing", None)
    vars(algorithms).pop("drawing", None)


SIZES = Sizes(np.array([10, 0, 7]), np.array([30, 9, 0]))
STEPS = Work(1, "steps", 6, (1, 1), 4, 8, 0.0)
TWO = (Draw("second"), Draw("others", of="unlabelled", size=3), Draw("probe", size=5, per_visit=True))


def test_draws_have_their_shapes_and_are_of_the_devices_samples():
    first, second, third = (task.extra for task in draw(TWO))
    assert [first[name].rows.shape for name in first] == [(6, 4), (6, 3), (5,)]
    assert first["second"].rows.max() < 10 <= first["others"].rows.max() < 30
    assert [second[name].rows.shape for name in second] == [(6, 0), (6, 3), (0,)]  # it has no labels
    assert third["others"].rows.shape == (6, 0)


def draw(extra, steps=6, **options):
    work = STEPS._replace(amount=steps)
    return draw_tasks(1, 2, range(3), SIZES, work, **{"unlabelled": True, "dropout": False} | options, extra=extra)


def test_a_draw_shifts_no_other():
    """Neither the minibatches, nor other extra draws, nor the first steps of a device that manages more."""
    plain, one, all_three, longer = draw(()), draw(TWO[1:2]), draw(TWO), draw(TWO, steps=9)
    for a, b, c, d in zip(plain, one, all_three, longer, strict=True):
        assert np.array_equal(a.labelled, c.labelled)
        assert np.array_equal(a.unlabelled, c.unlabelled)
        assert np.array_equal(b.extra["others"].rows, c.extra["others"].rows)
        assert np.array_equal(c.extra["second"].rows, d.extra["second"].rows[:6])
        assert np.array_equal(c.extra["probe"].rows, d.extra["probe"].rows)
    again = draw_extra(TWO[2], 1, 2, 0, 0, SIZES, STEPS)  # of a device that takes no steps
    assert np.array_equal(again.rows, all_three[0].extra["probe"].rows)
    with_keys = draw(TWO, dropout=True)[0].extra
    assert with_keys["second"].keys.shape == (6, 4)
    assert with_keys["probe"].keys is None


DROPOUT = {"model": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))}


@pytest.mark.parametrize("given", [{}, DROPOUT], ids=["plain", "dropout"])
def test_executors_agree(drawing, given):
    reference = final(make(drawing, **given))
    assert reference.devices.loss.min() == 0  # without labels, or never active
    assert (reference.devices.loss > 0).sum() > 2
    assert_equal(reference, final(make(drawing, "vectorised", **given)))
    assert_equal(reference, final(make(drawing, "vectorised", slots=2, **given)))


@needs_fork
def test_processes_agree(drawing):
    assert_equal(final(make(drawing)), final(make(drawing, "vectorised", processes=2)))


def test_side_by_side_with_another_run(drawing):
    from fedcpsl.simulation import simulate_together

    alone = make(drawing, "vectorised")
    setups = [alone, make(drawing, "vectorised", eta=0.1)]
    *_, states = simulate_together(setups)
    assert_equal(states[0], final(alone))


def test_every_draw_matters(drawing):
    from fedcpsl.simulation import initial_state
    from fedcpsl.simulation.rounds import draw_plan, next_state

    setup = make(drawing)
    plan = draw_plan(initial_state(setup))
    before = next_state(initial_state(setup), plan).server.theta
    for name in ("second", "probe", "others"):
        moved = [task._replace(extra=task.extra | {name: other(task.extra[name])}) for task in plan]
        assert not torch.allclose(before, next_state(initial_state(setup), moved).server.theta)


def other(drawn):
    return drawn._replace(rows=np.zeros_like(drawn.rows))


@pytest.mark.parametrize("given", [{}, DROPOUT], ids=["plain", "dropout"])
def test_real_devices_draw_the_same(drawing, given, tmp_path):
    with failing_disk():
        setup = make_federation(drawing, work=replace(WORK, loss_rate=0.0), **given)
        devices = participants(setup, tmp_path)
        last = served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1]
        assert_same(setup, last, devices)
