"""Algorithm 1's formulas against numbers worked by hand."""

import pytest
import torch

from fedcpsl.algorithm import Method, Roster
from fedcpsl.algorithms import family, traits_of
from fedcpsl.algorithms.family import Broadcast, Device, Hyper, Rules, Server, Sum, Upload
from fedcpsl.engine import Network
from fedcpsl.problem import Costs

from .conftest import small_model


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def hyper(**values):
    chosen = {"eta": 0.1, "eta_lc": 0.2, "gamma": 0.5, "beta": 0.75, "alpha_p": 0.03, "alpha_r": 0.01, "eta_v": 1.0}
    return Hyper(**{k: number(v) for k, v in (chosen | values).items()})


def method(name="fedcpsl", eta_g="mean_steps", **parts):
    network = Network(small_model().double(), torch.zeros(2, 6, dtype=torch.float64), 3)
    changed = family.VARIANTS[name]._replace(**parts)
    return Method(network, traits_of(name), Rules(changed, Costs(), "closed_form", eta_g))


def test_effective_steps():
    # gamma = 0.5, Q = 3: the momentum buffers hold 1, 1.5 and 1.75 gradients: 4.25 in all
    # formula: 3/0.5 - 0.5 (1 - 0.125)/0.25 = 6 - 1.75
    assert family.effective_steps(number(0.5), torch.tensor(3)).item() == pytest.approx(4.25)
    assert family.effective_steps(number(0.0), torch.tensor(7)).item() == 7
    assert family.effective_steps(number(0.8), torch.tensor(1)).item() == pytest.approx(1)
    # gamma = 0.9999, Q = 2: 1 and 1.9999 gradients, also in float32
    assert family.effective_steps(torch.tensor(0.9999), torch.tensor(2)).item() == pytest.approx(2.9999, rel=1e-6)


def test_momentum_keeps_correction_away_from_the_localized_model():
    # gamma 0.5, gradients 10 and 20: mu = 0.5 * 4 + 10 + (c - c_i = 3) = 15; mu_lc = 0.5 * 6 + 20 = 23
    mu, costs = (number([[4.0], [6.0]]),), number([1.0, 2.0])

    def add_gradient(into):
        into[0].add_(number([[10.0], [20.0]]))
        return costs

    assert family.momentum(number(0.5), mu, (number([3.0]),), add_gradient) is costs
    assert mu[0].tolist() == [[15.0], [23.0]]


def test_descend_uses_each_models_own_step():
    # theta = 1 - 0.1 * 5, theta_lc = 2 - 0.2 * 3
    (theta,) = family.descend((number([[1.0], [2.0]]),), number([0.1, 0.2]), (number([[5.0], [3.0]]),))
    assert theta.flatten().tolist() == pytest.approx([0.5, 1.4])


def test_commit():
    # Q~ = 4.25, eta = 0.1: c_i = 2 - (1 + (-0.85)/(0.1 * 4.25)) = 2 - (1 - 2) = 3
    device = Device(number([0.0]), number([2.0]))
    upload = Upload(number([-0.85]), torch.tensor(3))
    after = family.commit(method(), hyper(), Broadcast(number([0.0]), number([1.0])), device, upload)
    assert after.c.item() == pytest.approx(3)
    assert family.mean_gradient(hyper(), upload).item() == pytest.approx(-2)


def test_contribution_normalised_or_not():
    upload = Upload(number([-0.85]), torch.tensor(3))
    # omega = 0.25: 0.25 * (-0.85)/4.25 = -0.05; control: 0.25 * (-2) = -0.5
    added = family.contribution(method(), hyper(), upload, number(0.25))
    assert added.update.item() == pytest.approx(-0.05)
    assert added.control.item() == pytest.approx(-0.5)
    # not normalised: 0.25 * (-0.85)
    plain = family.contribution(method("apfl"), hyper(), upload, number(0.25))
    assert plain.update.item() == pytest.approx(-0.2125)
    assert plain.control.numel() == 0


def total(update, control=(0.0,)):
    return Sum(number([update]), number(control), number(0.5), number(10.0), number(15.0), number(2.0))


def test_server_theta_and_c():
    # N = 8, m = 2, mean steps 5: theta = 1 + 5 * (8/2) * (-0.01) = 0.8
    # c = 4 - (0.5 * 4 + (-1)) = 3
    after = family.apply(method(), Server(number([1.0]), number([4.0])), total(-0.01, [-1.0]), 8)
    assert after.theta.item() == pytest.approx(0.8)
    assert after.c.item() == pytest.approx(3)


@pytest.mark.parametrize(("eta_g", "step"), [("mean_steps", 5.0), ("mean_effective_steps", 7.5), (1.7, 1.7)])
def test_server_step(eta_g, step):
    assert float(family.server_step(method(eta_g=eta_g), total(0.0))) == pytest.approx(step)


def test_server_step_is_one_where_not_normalised():
    assert family.server_step(method("fedavg", eta_g=1.7), total(0.0)) == 1


def test_admit_shrinks_c_by_the_share_of_old_samples():
    # 300 samples before, 400 after: c = 4 * 0.75
    rosters = Roster(3, 300), Roster(4, 400)
    assert family.admit(method(), Server(number([1.0]), number([4.0])), *rosters).c.item() == pytest.approx(3)
    fedavg = Server(number([1.0]), number([]))
    assert len(family.admit(method("fedavg"), fedavg, *rosters).c) == 0


def test_step_by_hand():
    """A network of one weight per class and one labelled sample, worked through two steps with momentum."""
    # logits = W x with x = 1, two classes, W = (0, 0): h = (1/2, 1/2); y = class 0
    # g = h - y = (-1/2, 1/2); correction c - c_i = (0.1, 0)
    # step 1: mu = (-0.4, 0.5), theta = -0.1 mu = (0.04, -0.05)
    # theta_lc: beta = 1, so F's gradient is that of h(theta_lc): mu_lc = (-.5, .5), theta_lc = -0.2 mu_lc = (.1, -.1)
    module = torch.nn.Linear(1, 2, bias=False).double()
    torch.nn.init.zeros_(module.weight)
    network = Network(module, torch.ones(2, 1, dtype=torch.float64), 2)
    how = method()._replace(network=network)
    numbers = hyper(beta=1.0, alpha_p=0.0, alpha_r=0.0)
    zeros = torch.zeros(2, dtype=torch.float64)
    local = family.begin(how, numbers, Broadcast(zeros, number([0.1, 0.0])), Device(zeros, zeros))
    from fedcpsl.problem import Samples

    batch = Samples(number([[1.0]]), number([[1.0, 0.0]]), number([1.0]), number([0.0]))
    local = family.step(how, numbers, local, batch)
    assert local.models[0].flatten().tolist() == pytest.approx([0.04, -0.05, 0.1, -0.1])
    # step 2: h_1(theta) = 1/(1 + e^-0.09) = 0.522485, g = (-0.477515, 0.477515)
    # mu = 0.5 (-0.4, 0.5) + g + (0.1, 0) = (-0.577515, 0.727515); theta = (0.0977515, -0.1227515)
    # h_1(theta_lc) = 1/(1 + e^-0.2) = 0.549834; mu_lc = 0.5 (-.5, .5) + (-.450166, .450166) = (-.700166, .700166)
    # theta_lc = (0.2400332, -0.2400332)
    local = family.step(how, numbers, local, batch)
    expected = [0.0977515, -0.1227515, 0.2400332, -0.2400332]
    assert local.models[0].flatten().tolist() == pytest.approx(expected, abs=1e-6)
    # costs so far: log 2 + log(1 + e^-0.09), and log 2 + log(1 + e^-0.2)
    assert local.costs.tolist() == pytest.approx([0.693147 + 0.649160, 0.693147 + 0.598139], abs=1e-5)
    device, upload = family.finish(how, numbers, Broadcast(zeros, zeros), Device(zeros, zeros), local, torch.tensor(2))
    assert upload.delta.tolist() == pytest.approx(expected[:2], abs=1e-6)
    assert device.theta_lc.tolist() == pytest.approx(expected[2:], abs=1e-6)
    # and c_i after it is the weighted mean gradient: b = (1.5, 1), Q~ = 2.5:
    # (1.5 (-0.5, 0.5) + (-0.477515, 0.477515)) / 2.5 = (-0.491006, 0.491006)
    sent = Broadcast(zeros, number([0.1, 0.0]))
    after = family.commit(how, numbers, sent, device._replace(c=zeros), upload)
    assert after.c.tolist() == pytest.approx([-0.491006, 0.491006], abs=1e-6)


def test_the_family_is_as_the_paper_lists_it():
    parts = family.VARIANTS
    assert parts["fedcpsl"][:5] == (True, True, True, True, True)
    assert parts["fedshvr"] == parts["fedshvrp"]._replace(everyone=True)
    assert parts["apfsl"]._replace(unlabelled=False) == parts["apfl"]
    assert parts["scaffold"]._replace(control_variates=False) == parts["fedavg"]
