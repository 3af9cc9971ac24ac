"""The models by name: sizes, shapes, what is refused, what `auto` takes, and that each computes and learns."""

import pytest
import torch
from torch import nn

from fedcpsl.engine import Network
from fedcpsl.errors import InputError
from fedcpsl.models import NAMES, choose_model, cnn, cnn1d, logistic, make_model, mlp, resnet8

SMALL = {"mlp": (2, 3), "cnn": (1, 16, 17), "resnet8": (2, 9, 8), "cnn1d": (3, 20), "logistic": (2, 3)}


def small(name, classes=3, seed=0):
    torch.manual_seed(seed)
    return make_model(name, [8], SMALL[name], classes)


def test_every_name_is_tested():
    assert set(SMALL) == set(NAMES)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: mlp(784, 10), 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),  # 199,210
        (lambda: mlp(64, 10, []), 650),
        # 75 * 32 + 32, 800 * 64 + 64, then 32 -> 28 -> 14 -> 10 -> 5: 1600 * 512 + 512, 512 * 10 + 10
        (lambda: cnn((3, 32, 32), 10), 878_538),
        (lambda: cnn((1, 28, 28), 10), 25 * 32 + 32 + 800 * 64 + 64 + 1024 * 512 + 512 + 5130),
        # stem 3 * 16 * 9, with a scale and a shift per channel (32); blocks 2 * 16 * 16 * 9 + 64;
        # (16 + 32) * 32 * 9 + 16 * 32 + 3 * 64; (32 + 64) * 64 * 9 + 32 * 64 + 3 * 128; 64 * 10 + 10
        (lambda: resnet8((3, 32, 32), 10), 464 + 4672 + 14_528 + 57_728 + 650),  # 78,042
        # 6 * 5 * 32 + 32 and 64 for its norm, 32 * 5 * 64 + 64 and 128, 128 * 6 + 6
        (lambda: cnn1d((6, 128), 6), 992 + 64 + 10_304 + 128 + 774),  # 12,262
        (lambda: logistic(784, 10), 7850),
    ],
)
def test_parameter_counts(model, count):
    assert sum(p.numel() for p in model().parameters()) == count


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (64,)),
        ("mlp", (1, 8, 8)),
        ("logistic", (64,)),
        ("logistic", (2, 3, 4, 5)),
        ("cnn", (1, 28, 28)),
        ("cnn", (3, 16, 16)),
        ("cnn", (4, 17, 40)),
        ("resnet8", (1, 8, 8)),
        ("resnet8", (3, 32, 32)),
        ("resnet8", (5, 9, 31)),
        ("cnn1d", (6, 128)),
        ("cnn1d", (1, 1)),
        ("cnn1d", (9, 50)),
    ],
)
def test_a_model_takes_any_shape_of_its_kind(name, shape):
    model = make_model(name, [5], shape, 4)
    x = torch.randn(3, *shape)
    assert model(x).shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("cnn", (64,), 'model.name = "cnn": needs images [channels, height, width], and the data has inputs of shape'),
        ("cnn", (64,), "shape [64]; give mlp"),
        ("cnn", (6, 128), "shape [6, 128]; give cnn1d"),
        ("cnn", (3, 15, 32), "images of at least 16 x 16 pixels, and the data has inputs of shape [3, 15, 32]"),
        ("cnn", (3, 15, 32), "give mlp or resnet8"),
        ("cnn", (3, 32, 7), "give mlp"),
        ("resnet8", (3, 8, 7), "images of at least 8 x 8 pixels"),
        ("resnet8", (28, 28), 'model.name = "resnet8": needs images'),
        (
            "cnn1d",
            (3, 32, 32),
            "needs signals [channels, time], and the data has inputs of shape [3, 32, 32]; give cnn",
        ),
        ("cnn1d", (64,), "give mlp"),
        ("resnet18", (3, 32, 32), "did you mean 'resnet8'?"),
        ("MLP", (6,), "did you mean 'mlp'?"),
        ("aut", (6,), "did you mean 'auto'?"),
        ("transformer-xl", (6,), "package.module:function; known: auto, cnn, cnn1d, logistic, mlp, resnet8"),
        ("math:nothing", (6,), 'model.name = "math:nothing": cannot be imported'),
        ("operator:mul", (), "where an nn.Module is needed"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(name, shape, words):
    with pytest.raises(InputError) as refused:
        make_model(name, [5], shape, 3)
    message = str(refused.value)
    assert words in message
    assert message.startswith("model.name = ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("shape", "dataset", "chosen"),
    [
        ((1, 28, 28), "mnist", "mlp"),
        ((784,), "mnist", "mlp"),
        ((1, 28, 28), "fashion-mnist", "mlp"),
        ((3, 32, 32), "cifar10", "cnn"),
        ((64,), "digits", "mlp"),
        ((6, 128), "har", "cnn1d"),
        ((8, 8), "own", "cnn1d"),
        ((1, 28, 28), "own", "cnn"),
        ((3, 16, 16), "own", "cnn"),
        ((3, 15, 16), "own", "mlp"),
        ((3, 16, 15), "own", "mlp"),
        ((3, 64, 64), "own", "cnn"),
        ((1, 40, 200), "own", "resnet8"),
        ((), "own", "mlp"),
        ((2, 20, 20, 20), "own", "mlp"),
    ],
)
def test_what_auto_takes_can_be_made(shape, dataset, chosen):
    assert choose_model("auto", shape, dataset) == chosen
    assert choose_model("resnet8", shape, dataset) == "resnet8"
    assert choose_model("my.models:net", shape, dataset) == "my.models:net"
    assert isinstance(make_model(chosen, [5], shape, 3), nn.Module)


@pytest.mark.parametrize("name", NAMES)
def test_many_at_once_are_as_one_by_one(name):
    """Outputs, costs and gradients of a stack of models agree with plain PyTorch's."""
    module = small(name).double()
    torch.manual_seed(1)
    x = torch.randn(2, 1, 4, *SMALL[name], dtype=torch.float64)
    thetas = Network(module, x[0, 0], 3).initial + 0.02 * torch.randn(2, 2, 1, dtype=torch.float64)
    found = {}
    for batched in (False, True):
        network = Network(module, x[0, 0], 3, batched=batched)
        into = tuple(torch.ones_like(leaf) for leaf in network.split(thetas))
        costs = network.add_gradient(into, network.split(thetas), x, None, lambda h: (h**2).sum((-1, -2)))
        found[batched] = (network.log_probabilities(thetas, x), costs, network.join(into) - 1)
    for a, b in zip(found[False], found[True], strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)
    theta = thetas[1, 0].clone().requires_grad_()
    log_h = torch.log_softmax(torch.func.functional_call(module, network.named(theta), (x[1, 0],)), -1)
    (expected,) = torch.autograd.grad((log_h**2).sum(), theta)
    assert torch.allclose(found[True][2][1, 0], expected, rtol=1e-10, atol=1e-10)
    assert (expected != 0).double().mean() > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_model_learns_what_is_easy(name):
    """Three classes that differ in how the values rise along the last dimension."""
    model = small(name)
    torch.manual_seed(2)
    y = torch.arange(30) % 3
    rise = torch.linspace(-1, 1, SMALL[name][-1])
    x = (y - 1).view(-1, *[1] * len(SMALL[name])) * rise + 0.1 * torch.randn(30, *SMALL[name])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.8)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (model(x).argmax(-1) == y).float().mean() > 0.95
