"""Views of samples: what they do to inputs, and that every executor makes the same ones."""

import sys

import numpy as np
import pytest
import torch

from fedcpsl import algorithms, prepare, simulate
from fedcpsl.config import Run, Work, algorithm_settings
from fedcpsl.data.federation import Federation, parse_axes
from fedcpsl.errors import InputError
from fedcpsl.federation.local_training import draw_task, local_data_of, local_minibatches
from fedcpsl.federation.terms import terms_of
from fedcpsl.schedule import Sizes, draw_tasks
from fedcpsl.schedule import Work as Drawn
from fedcpsl.simulation.minibatches import batch_plan, minibatches
from fedcpsl.simulation.round_request import RoundRequest, Slot, training_data_of
from fedcpsl.simulation.rounds import draw_plan
from fedcpsl.simulation.state import initial_state
from fedcpsl.trees import leaves
from fedcpsl.views import (
    Views,
    _affine_maps,
    as_it_is,
    coloured,
    mirrored,
    normalised_axes,
    rotated,
    scaled,
    shaded,
    shifted_images,
    shifted_in_time,
    viewed,
    views_for,
    warped_images,
    with_noise,
    without_readings,
    without_square,
)

VIEWING = '''
"""FedAvg on weak views of labelled samples, and on strong views of unlabelled ones by labels of their weak views."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Traits
from fedcpsl.averaging import *
from fedcpsl.averaging import no_own_model as own_model, predict_general as predict
from fedcpsl.engine import Leaves
from fedcpsl.settings import choice, real

VARIANTS = {"viewing": Traits(unlabelled=True, personal=False, views="auto")}


@dataclass(frozen=True)
class Settings:
    name: str = choice("viewing", "the algorithm", *VARIANTS)
    eta: float | str = real("auto", "the step size", 0, open_ends="[", also=("auto",))


class Hyper(NamedTuple):
    eta: Tensor


class Local(NamedTuple):
    models: Leaves
    costs: Tensor


def numbers(method, settings, sizes, *, warming):
    return {"eta": float(settings.eta)}


def begin(method, hyper, broadcast, device):
    models = stacked(method, hyper, broadcast.theta)
    return Local(tuple(leaf.clone() for leaf in models), torch.zeros_like(hyper.eta)[..., None])


def step(method, hyper, local, samples):
    lead, network = hyper.eta.dim(), method.network
    count = samples.x.shape[lead] - samples.strong.shape[lead]
    labelled, weak = samples.x.narrow(lead, 0, count), samples.x.narrow(lead, count, samples.strong.shape[lead])
    believed = network.log_probabilities(model_of(method, hyper, local.models, 0), weak).exp()
    target = torch.cat([samples.target.narrow(lead, 0, count), believed], lead).unsqueeze(lead)
    weights = (samples.labelled + samples.unlabelled).unsqueeze(lead)

    def cost(log_h):
        return -(weights * (target * log_h).sum(-1)).sum(-1)

    x = torch.cat([labelled, samples.strong], lead).unsqueeze(lead)
    costs = network.descend(local.models, hyper.eta[..., None], x, None, cost)
    return local._replace(costs=local.costs + costs)


def costs(local):
    return local.costs


def finish(method, hyper, broadcast, device, local, steps):
    return device, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)
'''


@pytest.fixture
def viewing(tmp_path, monkeypatch):
    (tmp_path / "viewing.py").write_text(VIEWING)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    algorithms.all_algorithms.cache_clear()
    yield algorithm_settings("viewing")(eta=0.1)
    algorithms.all_algorithms.cache_clear()
    sys.modules.pop("fedcpsl.algorithms.viewing", None)
    vars(algorithms).pop("viewing", None)


def keys(*shape):
    return torch.randint(0, 2**62, shape, generator=torch.Generator().manual_seed(0))


def test_images_are_shifted_and_mirrored_and_their_edges_repeated():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    found = {tuple(shifted_images(image, keys(400)[i : i + 1], 1).flatten().tolist()) for i in range(400)}
    assert len(found) == 2 * 9  # three places along each side
    down_right = torch.tensor([[0.0, 0, 1, 2], [0, 0, 1, 2], [4, 4, 5, 6], [8, 8, 9, 10]])  # first row and column twice
    assert {tuple(seen.flatten().tolist()) for seen in (down_right, down_right.flip(-1))} <= found


def test_drawings_are_rotated_sheared_and_scaled_a_little():
    """A pixel is read from where some affine map of bounded size takes it, rounded.

    With the angle a, the shear s, the heights and widths 1 + t and 1 + w, s, t and w within 0.6 x 0.2 = 0.12, 45 pixels
    to the right become 45 ((1 + t) sin a, (1 + w) cos a), as row and column, and 45 down 45 ((1 + t) cos a,
    (1 + w) (s - sin a)): rows of the one and columns of the other differ in sign, but for the shear.
    """
    along = torch.arange(101.0)
    where = torch.stack([along[:, None].expand(101, 101), along.expand(101, 101)]).expand(300, 2, 101, 101)
    moved = warped_images(where, keys(300), 1, 0.2) - 50  # from the middle, [images, row or column, row, column]
    centre = moved[:, :, 50, 50]
    assert centre.abs().max() == 1.0  # shifted by up to 1.5 pixels, rounded to an even number
    assert len(centre.unique(dim=0)) == 9
    right, down = moved[:, :, 50, 95] - centre, moved[:, :, 95, 50] - centre
    turn = torch.atan2(right[:, 0], right[:, 1])
    assert 0.15 < turn.abs().max() < 0.27  # tan a (1 + t) / (1 + w) is at most 0.26
    assert turn.mean().abs() < 0.04
    sheared = (right[:, 0] + down[:, 1]) / 45
    assert 0.7 * 0.12 / 3**0.5 < sheared.std() < 1.4 * 0.12 / 3**0.5  # of numbers that are uniform within 0.12
    for length in (right[:, 1] / 45, down[:, 0] / 45):
        assert 0.85 < length.min() < 0.92
        assert 1.05 < length.max() < 1.13
    assert torch.equal(warped_images(where, keys(300), 0, 0.0)[:, :, 1:-1, 1:-1], where[:, :, 1:-1, 1:-1])


def test_no_two_maps_of_drawings_are_alike_and_none_leaves_them_as_they_are():
    maps = _affine_maps(28, 28, 2, 0.17, torch.device("cpu"))
    assert len(maps.unique(dim=0)) == len(maps) == 256
    assert (maps != torch.arange(28 * 28)).any(1).all()


def test_photographs_are_mirrored_and_drawings_warped():
    x = torch.randn(200, 1, 16, 16)
    drawn, seen = (views_for("auto", (channels, 16, 16)) for channels in (1, 3))
    for view in drawn:
        moved = view(x, keys(200))
        assert not any(torch.equal(a, b.flip(-1)) for a, b in zip(moved, x, strict=True))
        assert (moved != x).flatten(1).any(1).all()
    assert is_mirrored(seen, 3)


def is_mirrored(views, channels):
    rising = torch.ones(50, channels, 16, 16) * torch.arange(16.0)
    return bool((views.weak(rising, keys(50))[:, 0, 8, 0] > 8).any())


@pytest.mark.parametrize(("kind", "channels", "turned"), [("drawing", 3, False), ("photograph", 1, True)])
def test_which_images_are_drawings_can_be_said(kind, channels, turned):
    shape = (channels, 16, 16)
    assert mirrored(kind, shape) == mirrored(f"strong {kind}", shape) == turned
    assert is_mirrored(views_for(kind, shape), channels) == turned
    assert views_for(f"strong {kind}", shape).weak is as_it_is


def test_large_drawings_have_fewer_maps(monkeypatch):
    monkeypatch.setattr("fedcpsl.views.MAP_PIXELS", 70 * 12 * 12)
    x = torch.randn(1, 12, 12).expand(3000, 1, 12, 12)
    assert 60 < len(warped_images(x, keys(3000), 2, 0.3).unique(dim=0)) <= 70


def test_contrast_keeps_the_mean_and_brightness_moves_it():
    x = torch.randn(50, 3, 8, 8, dtype=torch.float64)
    contrasted = shaded(x, keys(50), 0.6, 0.0)
    assert torch.allclose(contrasted.mean((1, 2, 3)), x.mean((1, 2, 3)))
    ratio = contrasted.std((1, 2, 3)) / x.std((1, 2, 3))
    assert ratio.min() >= 0.4
    assert ratio.max() <= 1.6
    assert ratio.max() - ratio.min() > 0.9
    moved = (shaded(x, keys(50), 0.0, 0.6) - x).flatten(1)
    assert moved.std(1).max() < 1e-12
    assert moved.abs().max() <= 0.6


def test_colours_are_scaled_and_moved_channel_by_channel():
    x = torch.randn(400, 3, 6, 6, dtype=torch.float64)
    y = coloured(x, keys(400), 0.3)
    scale = y.std((2, 3)) / x.std((2, 3))  # [images, channels]
    offset = (y - scale[..., None, None] * x).flatten(2)
    assert offset.std(-1).max() < 1e-12  # nothing but a scale and an offset
    offset = offset.mean(-1)
    for number, middle in ((scale, 1.0), (offset, 0.0)):
        assert middle - 0.3 <= number.min() < middle - 0.28
        assert middle + 0.28 < number.max() <= middle + 0.3
        assert number.mean().sub(middle).abs() < 0.02
    independent = torch.corrcoef(torch.cat([scale, offset], 1).T) - torch.eye(6, dtype=torch.float64)
    assert independent.abs().max() < 0.2


@pytest.mark.parametrize(("kind", "cast"), [("photograph", True), ("drawing", False)])
def test_photographs_alone_have_a_colour_cast(kind, cast):
    x = torch.randn(1, 1, 16, 16, dtype=torch.float64).expand(40, 3, 16, 16)  # all channels alike
    weak, strong = (view(x, keys(40)) for view in views_for(kind, (3, 16, 16)))
    assert torch.equal(weak, weak[:, :1].expand(weak.shape))
    assert (strong != strong[:, :1]).flatten(1).any(1).all() == cast
    assert torch.equal(strong, strong[:, :1].expand(strong.shape)) != cast


def test_a_square_and_readings_are_blank():
    blank = (without_square(torch.ones(300, 2, 9, 9), keys(300), 3) == 0).sum((1, 2, 3))
    assert blank.max() == 2 * 9
    assert blank.min() == 2 * 4  # in a corner
    blank = (without_readings(torch.ones(300, 2, 9), keys(300), 3) == 0).sum((1, 2))
    assert (blank.min(), blank.max()) == (2 * 2, 2 * 3)


def test_windows_are_shifted_scaled_and_noisy():
    x = torch.arange(8.0, dtype=torch.float64).expand(100, 2, 8)
    firsts = shifted_in_time(x, keys(100), 2)[:, 0, 0].unique()
    assert firsts.tolist() == [0, 1, 2]  # what lies before the first reading is the first reading
    ratio = scaled(x, keys(100), 0.1)[:, 0, 7] / 7
    assert ratio.min() >= 0.9
    assert ratio.max() <= 1.1
    noise = with_noise(torch.zeros(1000, 3, 4, dtype=torch.float64), keys(1000), 0.05)
    assert noise.std().item() == pytest.approx(0.05, rel=0.03)
    assert noise.mean().abs() < 0.002
    assert len(noise.unique()) > 11000  # each number on its own


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 28, 28), (6, 32), (64,)])
def test_views_do_not_depend_on_who_else_is_there(shape):
    """Slots side by side or one alone: the same rows and keys give the same views."""
    x, given = torch.randn(2, 3, 10, *shape, dtype=torch.float64), keys(2, 3, 10 + 6)
    weak, strong = viewed(views_for("auto", shape), x, given)
    assert (weak.shape, strong.shape) == (x.shape, (2, 3, 6, *shape))
    for i, j in np.ndindex(2, 3):
        alone = viewed(views_for("auto", shape), x[i, j], given[i, j])
        assert torch.allclose(alone[0], weak[i, j], rtol=0, atol=1e-14)
        assert torch.allclose(alone[1], strong[i, j], rtol=0, atol=1e-14)
    assert not torch.equal(strong, x[..., 4:, *[slice(None)] * len(shape)])


def test_views_that_do_not_fit_are_refused():
    assert views_for("", (3,)) is None
    with pytest.raises(InputError, match="do not fit inputs of shape"):
        views_for("image", (64,))
    with pytest.raises(InputError, match="'drawing': do not fit inputs of shape"):
        views_for("drawing", (6, 128))
    with pytest.raises(InputError, match="give Views"):
        views_for("auto", (2, 3, 4, 5))
    mine = Views(lambda x, _: x, lambda x, _: -x)
    assert views_for(mine, (2, 3, 4, 5)) is mine


def test_keys_do_not_depend_on_how_many_steps_a_device_manages():
    sizes = Sizes(np.array([5]), np.array([9]))
    few, many = (
        draw_tasks(
            1, 2, [0], sizes, Drawn(1, "steps", n, (1, 1), 4, 3, 0.0), unlabelled=True, dropout=False, views=True
        )
        for n in (2, 7)
    )
    assert few[0].views.shape == (2, 4 + 3 + 3)
    assert (few[0].views == many[0].views[:2]).all()
    assert len(np.unique(many[0].views)) == many[0].views.size


def make(settings, shape=(1, 8, 8), **run):
    rng = np.random.default_rng(0)
    x, y, device = rng.normal(size=(200, *shape)), rng.integers(0, 3, 200), np.arange(200) % 5
    test = (np.arange(200) % 8 == 0) & (device < 4)
    y[device == 4] = -1  # no labels at all
    federation = Federation.from_arrays(x, y, device, test, labelled=0.4)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), 6), torch.nn.Linear(6, 3))
    work = Work(rounds=3, active=4, unit="steps", amount=3, batch_labelled=6, batch_unlabelled=5)
    return prepare(federation, model, settings, work, Run(dtype="float64", device="cpu", **run))


@pytest.mark.parametrize("shape", [(1, 8, 8), (4, 16), (7,)])
def test_executors_and_processes_agree(viewing, shape):
    ends, vectorised = [], {"executor": "vectorised", "processes": 1}
    forks = sys.platform == "linux" and not torch.cuda.is_available()
    others = {"executor": "sequential"}, {}, {"slots": 1}, *([{"processes": 2}] if forks else [])
    for run in (vectorised | other for other in others):
        *_, state = simulate(make(viewing, shape, **run))
        ends.append(torch.cat([t.flatten() for t in leaves(state.server)]))
    for end in ends[1:]:
        assert torch.allclose(end, ends[0], rtol=0, atol=1e-10)


def test_a_real_device_sees_the_same_views(viewing):
    setup = make(viewing, executor="sequential", processes=1)
    state = initial_state(setup)
    for task in draw_plan(state):
        request = RoundRequest(setup, [task], state.devices, setup.terms.algorithm.broadcast(state.server))
        data = training_data_of(setup.data, state.targets)
        plan = batch_plan([Slot(0, request, task)], data).of_slots(0)
        terms, own = terms_of(setup, task.device), local_data_of(setup, task.device)
        there = draw_task(terms, own, setup.terms.seed, 0, task.device, task.steps)
        nu = torch.full((own.unlabelled, 3), 1 / 3, dtype=torch.float64)
        for mine, theirs in zip(
            minibatches(data, plan, range(task.steps)), local_minibatches(terms, own, nu, there), strict=True
        ):
            real = mine.labelled + mine.unlabelled > 0  # the simulator pads what a device does not have
            assert torch.allclose(mine.x[real], theirs.x, rtol=0, atol=1e-14)
            assert torch.allclose(mine.strong, theirs.strong, rtol=0, atol=1e-14)


def test_sensors_are_rotated_together_and_as_they_were_measured():
    generator = torch.Generator().manual_seed(0)
    readings = torch.randn(4, 7, 10, generator=generator, dtype=torch.float64)  # two sensors, and a channel of its own
    shift, scale = (
        torch.rand(7, 1, generator=generator, dtype=torch.float64),
        0.5 + torch.rand(7, 1, generator=generator, dtype=torch.float64),
    )
    keys = torch.arange(4) + 100
    axes = normalised_axes([(0, 1, 2), (4, 5, 6)], shift.flatten().tolist(), scale.flatten().tolist())
    turned = rotated((readings - shift) / scale, keys, axes, 15.0) * scale + shift
    assert torch.allclose(turned[:, 3], readings[:, 3])
    for channels in ([0, 1, 2], [4, 5, 6]):
        before, after = readings[:, channels], turned[:, channels]
        assert torch.allclose(before.norm(dim=1), after.norm(dim=1))  # lengths stay
        assert not torch.allclose(before, after, atol=1e-3)
        cosines = (before * after).sum(1) / before.norm(dim=1) ** 2
        assert cosines.min() >= np.cos(15 * np.pi / 180) - 1e-9
    both = torch.linalg.lstsq(readings[0, :3].T, turned[0, :3].T).solution.T
    other = torch.linalg.lstsq(readings[0, 4:].T, turned[0, 4:].T).solution.T
    assert torch.allclose(both, other)  # one rotation for all sensors of a window
    assert torch.linalg.det(both) == pytest.approx(1)
    assert torch.equal(rotated(readings, keys, axes, 15.0)[2:], rotated(readings[2:], keys[2:], axes, 15.0))


def test_axes_are_read_and_checked():
    assert parse_axes("0 1 2, 3 4 5", 6) == ((0, 1, 2), (3, 4, 5))
    assert parse_axes("", 6) == ()
    for wrong, message in [("0 1", "in threes"), ("a b c", "in threes"), ("0 1 1", "different"), ("4 5 6", "0 to 5")]:
        with pytest.raises(InputError, match=message):
            parse_axes(wrong, 6)


def test_small_images_are_hardly_moved():
    """A pixel of eight comes from one beside it at most in the middle, and seldom from farther away at the edge."""
    row, column = torch.arange(8.0).view(1, 1, 8, 1).expand(1, 1, 8, 8), torch.arange(8.0).expand(1, 1, 8, 8)
    where = torch.cat([row, column], 1)
    weak = views_for("auto", (2, 8, 8)).weak(where.expand(300, 2, 8, 8), keys(300))
    far = (weak - where).abs().amax(1)
    assert far[:, 3:5, 3:5].max() <= 1
    assert far.max() <= 2
    assert (far == 0).float().mean() > 0.5
