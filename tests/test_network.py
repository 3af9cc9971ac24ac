"""Any nn.Module classifier, evaluated one by one or as a stack; what is refused and why."""

import pytest
import torch
from torch import nn

from fedcpsl import config
from fedcpsl.engine import Network
from fedcpsl.engine.dropout import keyed_kept, keyed_uniform
from fedcpsl.engine.layer_kinds import pool_before_relu
from fedcpsl.errors import InputError
from fedcpsl.models import make_model, mlp
from fedcpsl.simulation import prepare, simulate

from .conftest import small_federation


class Residual(nn.Module):
    """A module of its own shape: not a Sequential, a parameter of its own, GroupNorm inside."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.relu(self.norm(h)) * self.scale + h.reshape(x.shape[0], -1))


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(8, 3)
    )


def with_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 8, bias=False), nn.Linear(8, 3))


class DropoutInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = with_dropout()

    def forward(self, x):
        return self.layers(x) - 1


def frozen_part():
    model = with_dropout()
    model[0].weight.requires_grad_(False)
    return model


class Skipping(nn.Sequential):
    """A Sequential that is more than its layers."""

    def forward(self, x):
        return super().forward(x) + x


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 3


class Half(nn.ReLU):
    def forward(self, x):
        return super().forward(x) / 2


def one_relu_twice():
    relu = nn.ReLU()
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), relu, nn.Conv2d(4, 4, 1), relu), nn.Flatten(), nn.Linear(8, 3)
    )


def one_layer_twice():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3))


def one_dropout_twice():
    dropout = nn.Dropout(0.4)
    return nn.Sequential(nn.Linear(6, 8), dropout, nn.Linear(8, 8), dropout, nn.Linear(8, 3))


def tied_weights():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


class Named(nn.Sequential):
    """A Sequential that is its layers."""


def skipping():
    return Named(Skipping(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3))


def subclasses():
    return nn.Sequential(Shifted(6, 8), Half(), nn.Linear(8, 3))


def hooked():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].register_forward_hook(lambda *called: 2 * called[-1])
    return model


def patched():
    """Nothing about its kind tells that this ReLU is none."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].forward = torch.tanh
    return model


def frozen_bias():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    return model


MODELS = [Residual, convolutional, with_dropout, DropoutInside, frozen_part, one_relu_twice, one_layer_twice]
MODELS += [one_dropout_twice, tied_weights, skipping, subclasses, hooked, frozen_bias, patched]


def end_of(model, executor, name="fedcpsl", dtype="float64"):
    setup = prepare(
        small_federation(),
        model,
        config.Algorithm(name=name, eta=0.05, alpha_p=0.3, alpha_r=0.1),
        config.Work(rounds=3, active=3, unit="hlu", batch_labelled=3, batch_unlabelled=4),
        config.Run(executor=executor, dtype=dtype, device="cpu", processes=1),
    )
    assert setup.machine.slots == 0
    *_, last = simulate(setup)
    return last


@pytest.mark.parametrize("name", ["fedcpsl", "apfsl"])  # the latter, without momenta, steps straight to the weights
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_executors_agree_on_any_model(make, name):
    torch.manual_seed(0)
    model = make()
    one, all_at_once = end_of(model, "sequential", name), end_of(model, "vectorised", name)
    for a, b in zip((*one.server, *one.devices), (*all_at_once.server, *all_at_once.devices), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)
    assert (one.server.theta - one.setup.terms.method.network.initial).abs().max() > 1e-3


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_are_those_of_plain_autograd(make):
    torch.manual_seed(1)
    x = torch.randn(5, 6, dtype=torch.float64)
    module = make().double().eval()
    thetas = torch.stack([Network(module, x, 3).initial + 0.1 * k for k in range(3)])
    found = {}
    for batched in (False, True):
        network = Network(module, x, 3, batched=batched)
        into = tuple(torch.ones_like(leaf) for leaf in network.split(thetas))
        costs = network.add_gradient(into, network.split(thetas), x[None], None, lambda h: (h**2).sum((-1, -2)))
        found[batched] = (costs, network.join(into) - 1)
    for a, b in zip(found[False], found[True], strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    theta = thetas[1].clone().requires_grad_()
    network = Network(module, x, 3)
    named = dict(zip(network.shapes, network.split(theta), strict=True))
    log_h = torch.log_softmax(torch.func.functional_call(module, named, (x,)), -1)
    (expected,) = torch.autograd.grad((log_h**2).sum(), theta)
    assert torch.allclose(found[True][1][1], expected, rtol=1e-10, atol=1e-10)


def test_a_model_that_is_more_than_its_layers_is_named(caplog):
    Network(patched(), torch.zeros(1, 6), 3, batched=True)
    assert "more than its layers" in caplog.text
    caplog.clear()
    for make in (one_relu_twice, subclasses, skipping):
        Network(make(), torch.zeros(1, 6), 3, batched=True)
    assert not caplog.text


def test_gradients_that_a_copy_would_swallow_are_refused():
    x = torch.randn(2, 4, 1, 5, 6)
    network = Network(with_dropout(), x[0, 0, 0], 3, batched=True)
    across = [leaf.transpose(0, 1) for leaf in network.split(network.initial.expand(4, 2, 3, -1).clone())]
    with pytest.raises(AssertionError, match="lost"):
        network.add_gradient(tuple(across), tuple(across), x, None, lambda h: (h**2).sum((-1, -2)))


def test_a_cost_may_have_one_gradient_for_all():
    x = torch.randn(2, 1, 5, 6)
    network = Network(with_dropout(), x[0, 0], 3, batched=True)
    before, after = (network.split(network.initial.expand(2, 1, -1).clone()) for _ in range(2))
    into = tuple(map(torch.zeros_like, before))
    network.add_gradient(into, before, x, None, lambda h: h.sum((-1, -2)))
    network.descend(after, torch.full((2, 1), 0.5), x, None, lambda h: h.sum((-1, -2)))
    for old, new, gradient in zip(before, after, into, strict=True):
        assert torch.allclose(new, old - 0.5 * gradient, atol=1e-6)


def test_split_and_join_are_inverse():
    network = Network(Residual(), torch.zeros(2, 6), 3)
    theta = torch.randn(4, 2, network.initial.numel())
    assert torch.equal(network.join(network.split(theta)), theta)
    assert {name: t.shape[2:] for name, t in network.named(theta).items()} == network.shapes


def test_the_given_model_is_left_alone():
    model = with_dropout()
    before = [p.clone() for p in model.parameters()]
    end_of(model, "vectorised", dtype="float32")
    assert isinstance(model[2], nn.Dropout)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_dropout_is_active_in_training_only():
    torch.manual_seed(0)
    x = torch.randn(50, 6)
    network = Network(with_dropout(), x, 3)
    theta = network.initial
    calm = network.log_probabilities(theta, x)
    assert torch.equal(calm, network.log_probabilities(theta, x))
    heard = []
    into = tuple(torch.zeros_like(leaf) for leaf in network.split(theta))
    for keys in (torch.arange(50), torch.arange(50), torch.arange(50) + 1):
        network.add_gradient(into, network.split(theta), x, keys, lambda h: (heard.append(h.detach()), h.sum())[1])
    assert torch.equal(heard[0], heard[1])
    assert not torch.equal(heard[0], heard[2])
    assert not torch.equal(heard[0], calm)


def test_keyed_numbers_are_uniform_and_unrelated():
    numbers = keyed_uniform(torch.arange(200), 0, 500)
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.005)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=0.002)
    correlations = torch.corrcoef(torch.cat([numbers[:20], keyed_uniform(torch.arange(20), 1, 500)]))
    assert (correlations - torch.eye(40)).abs().max() < 0.25


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), "'1'.*BatchNorm1d.*GroupNorm"),
        (nn.Linear(6, 4), r"output does not match the classes.*\[4\].*3 classes"),
        (nn.Linear(5, 3), r"does not accept inputs of shape \[6\]"),
        (nn.Sequential(nn.Linear(6, 3), nn.RReLU()), "draws random numbers.*nn.Dropout"),
        (nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1)), "outputs are probabilities.*leave out the softmax"),
        (nn.Flatten(), "no trainable parameters"),
    ],
)
def test_what_is_refused(model, words):
    with pytest.raises(InputError, match=words):
        Network(model, torch.ones(2, 6), 3)


def test_models_by_name():
    assert sum(p.numel() for p in mlp(784, 10).parameters()) == 199_210
    assert make_model("mlp", [5], (2, 3), 4)(torch.zeros(7, 2, 3)).shape == (7, 4)
    for name, words in [
        ("mpl", "give mlp"),
        ("no.such:thing", "cannot be imported"),
        ("math:nothing", "cannot be imp"),
    ]:
        with pytest.raises(InputError, match=words):
            make_model(name, [5], (6,), 3)
    with pytest.raises(InputError, match="is needed"):
        make_model("operator:mul", [], (6,), 3)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.3, 0.5, 0.999])
def test_masks_on_a_cpu_have_the_bits_of_the_numbers(p):
    keys = torch.randint(-(2**63), 2**63 - 1, (3, 7))
    assert torch.equal(keyed_kept(keys, 5, 1000, p), keyed_uniform(keys, 5, 1000) >= p)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True)])
def test_pooling_before_a_relu_changes_no_bit(pool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), pool)
    x, ends = torch.randn(5, 2, 9, 9), []
    for _ in range(2):
        y = model(x)
        ends.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
        pool_before_relu(model)
    assert type(model[2]) is nn.ReLU
    assert all(map(torch.equal, *ends))
