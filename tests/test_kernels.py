"""Our own GPU kernels against the same layers in PyTorch, in float64."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fedcpsl.engine import Network
from fedcpsl.engine.convolution import convolution
from fedcpsl.engine.costs import Differentiated, fused_local_gradient
from fedcpsl.engine.dropout import KeyedDropout, with_keyed_dropout
from fedcpsl.engine.elementwise import dropout
from fedcpsl.engine.forward_backward import backward, bind, forward
from fedcpsl.engine.layer_kinds import Layer, walk
from fedcpsl.engine.linear import linear, matrices_of, totals_of
from fedcpsl.engine.precision import Arithmetic
from fedcpsl.models import resnet8
from fedcpsl.problem import LocalCosts, Samples, local_costs

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and find_spec("triton")), reason="our own kernels need a CUDA GPU and Triton"
)

SLOTS, MODELS, SAMPLES = 3, 2, 5
WAYS = [  # how products are computed, and the relative error that this may make
    (Arithmetic("ieee"), 1e-5),
    (Arithmetic("ieee", "off"), 1e-5),
    (Arithmetic("ieee", "ieee"), 1e-5),
    (Arithmetic("ieee", "tf32x3"), 1e-5),
    (Arithmetic("tf32"), 1e-3),
    (Arithmetic("bf16"), 1e-2),
    (Arithmetic("bf16", "off"), 1e-2),
]
WAYS_OF_NETWORKS = [way for way in WAYS if way[0].kernels != "ieee"]  # each compiles a dozen kernels


def images():
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 5, 12), nn.ReLU(), nn.Dropout(0.5)), (3, 13, 14)


def strided():
    layers = [nn.Conv2d(3, 10, 3, stride=2, padding=1, dilation=(1, 2)), nn.ReLU()]
    layers += [nn.Conv2d(10, 7, (3, 2), stride=(2, 3), padding=(2, 1), bias=False), nn.Dropout2d(0.3)]
    return nn.Sequential(*layers, nn.Conv2d(7, 64, 1), nn.Flatten()), (3, 17, 15)


def pooled():
    layers = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding="same"), nn.MaxPool2d(3, 2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(64, 20, (2, 1)), nn.MaxPool2d((1, 2)), nn.Flatten()), (1, 19, 21)


def signals():
    layers = [nn.Conv1d(6, 32, 5, padding=2), nn.GroupNorm(1, 32), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(32, 64, 5)]
    return nn.Sequential(*layers, nn.ReLU(), nn.MaxPool1d(2), nn.Flatten()), (6, 47)


def residual():
    return resnet8((3, 16, 15), 10), (3, 16, 15)


NETWORKS = [images, strided, pooled, signals, residual]


def given(make):
    """A module, parameters, x and keys on the GPU, in float32."""
    torch.manual_seed(0)
    module, shape = make()
    with_keyed_dropout(module)
    parameters = {name: torch.randn(SLOTS, MODELS, *p.shape) / p[0].numel() ** 0.5 for name, p in params(module)}
    parameters = {name: p.cuda() for name, p in parameters.items()}
    keys = torch.randint(-(2**62), 2**62, (SLOTS, 1, SAMPLES)).cuda()
    return module, parameters, torch.randn(SLOTS, 1, SAMPLES, *shape).cuda(), keys


def params(module):
    return list(module.named_parameters())


def passes(module, parameters, x, keys, arithmetic):
    """Outputs and gradients, one after another."""
    totals = {name: torch.ones_like(p) for name, p in parameters.items()}
    with torch.inference_mode():
        y, pulls = forward(bind(walk(module, parameters), parameters, totals, arithmetic), x, keys)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
        backward(pulls, weights)
    return [y, *(total - 1 for total in totals.values())]


def in_float64(module, parameters, x, keys):
    doubled = {name: p.double() for name, p in parameters.items()}
    return passes(module, doubled, x.double(), keys, Arithmetic(kernels="off"))


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(autouse=True)
def _tf32_is_as_it_was():
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("arithmetic", "tolerance"), WAYS_OF_NETWORKS, ids=str)
def test_outputs_and_gradients_of_networks(make, arithmetic, tolerance):
    """A rounded sum now and then passes another ReLU or wins another window, which moves single gradients."""
    torch.backends.cuda.matmul.allow_tf32 = arithmetic.precision == "tf32"
    known = given(make)
    for found, expected in zip(passes(*known, arithmetic), in_float64(*known), strict=True):
        assert found.shape == expected.shape
        assert error(found, expected) < (tolerance if arithmetic.precision == "ieee" else 0.3)


@pytest.mark.parametrize("make", [images, pooled, signals], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("arithmetic", "tolerance"), [way for way in WAYS if way[0].kernels == "auto"], ids=str)
def test_a_step_straight_to_the_weights(make, arithmetic, tolerance):
    """No layer changes weights that it, or a layer before it, still has to take the gradient back through."""
    torch.backends.cuda.matmul.allow_tf32 = arithmetic.precision == "tf32"
    module, parameters, x, keys = given(make)
    classes = module.cuda()(x[0, 0, :1]).shape[-1]
    network = Network(module, x[0, 0], classes, batched=True, precision=arithmetic.precision)
    models, eta = tuple(parameters[name] for name in network.shapes), torch.rand(SLOTS, MODELS).cuda()

    def gradient_of(log_h):
        return log_h.sum((-1, -2)), torch.randn(log_h.shape, generator=torch.Generator().manual_seed(2)).to(log_h)

    gradients, after = (tuple(map(change, models)) for change in (torch.zeros_like, torch.clone))
    network.add_gradient(gradients, models, x, keys, Differentiated(gradient_of, by_hand=True))
    network.descend(after, eta, x, keys, Differentiated(gradient_of, by_hand=True))
    for old, new, gradient in zip(models, after, gradients, strict=True):
        step = eta.view(*eta.shape, *(1,) * (old.dim() - 2)) * gradient
        assert error(old - new, step.double()) < 10 * tolerance


def one_convolution(conv, x, weight, bias, arithmetic):
    """Outputs and the gradients of x, weight and bias, of a single convolution."""
    parameters = {"weight": weight, "bias": bias}
    totals = {name: torch.ones_like(p) for name, p in parameters.items()}
    layer = Layer(conv, {"weight": "weight", "bias": "bias"})
    y, pull = convolution(layer, parameters, totals, x, arithmetic)
    back = pull(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y), True)
    return [y, back, *(total - 1 for total in totals.values())]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 32, 3), {}),
        ((32, 64, 5), {}),
        ((64, 130, 1), {"stride": 2}),
        ((5, 10, 2), {"stride": 2, "padding": 1}),
        ((32, 64, 3), {"dilation": 2, "padding": (3, 0)}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("arithmetic", "tolerance"), WAYS, ids=str)
def test_one_convolution(shape, options, arithmetic, tolerance):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = arithmetic.precision == "tf32"
    inputs, outputs, kernel = shape
    conv = nn.Conv2d(inputs, outputs, kernel, **options)
    weight = torch.randn(SLOTS, MODELS, *conv.weight.shape).cuda()
    bias, x = torch.randn(SLOTS, MODELS, outputs).cuda(), torch.randn(SLOTS, 1, SAMPLES, inputs, 13, 11).cuda()
    doubles = [t.double() for t in (x, weight, bias)]
    exact = one_convolution(conv, *doubles, Arithmetic(kernels="off"))
    for found, expected in zip(one_convolution(conv, x, weight, bias, arithmetic), exact, strict=True):
        assert found.shape == expected.shape
        assert error(found, expected) < tolerance


@pytest.mark.parametrize("samples", [5, 60])
@pytest.mark.parametrize(
    ("shape", "size", "options"),
    [
        ((3, 20, 5), (12, 15), {}),
        ((10, 20, 4), (9, 10), {"padding": (0, 1)}),
        ((32, 64, 3), (9, 8), {"padding": (1, 0)}),
        ((64, 32, (2, 4)), (7, 11), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("arithmetic", "tolerance"), WAYS_OF_NETWORKS, ids=str)
@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_a_convolution_and_the_pooling_after_it(
    monkeypatch, memory, shape, size, options, samples, arithmetic, tolerance
):
    """As one kernel, and taken back; 60 samples fill the programs that leave out what reaches no output.

    A GPU with less shared memory has a kernel for each.
    """
    monkeypatch.setattr("fedcpsl.engine.launch_convolution._shared_memory", lambda _: memory)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = arithmetic.precision == "tf32"
    inputs, outputs, kernel = shape
    conv = nn.Conv2d(inputs, outputs, kernel, **options)
    layer = Layer(conv, {"weight": "weight", "bias": "bias"}, narrow=True)
    layer = layer._replace(pool=Layer(nn.MaxPool2d(2), {}, rectified=True))
    parameters = {
        "weight": torch.randn(SLOTS, MODELS, *conv.weight.shape).cuda() / conv.weight[0].numel() ** 0.5,
        "bias": torch.randn(SLOTS, MODELS, outputs).cuda(),
    }
    x = torch.randn(SLOTS, 1, samples, inputs, *size).cuda()

    def found(arithmetic, dtype, to_x):
        own = {name: p.to(dtype) for name, p in parameters.items()}
        totals = {name: torch.ones_like(p) for name, p in own.items()}
        with torch.inference_mode():
            y, pull = convolution(layer, own, totals, x.to(dtype), arithmetic)
            back = pull(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y), to_x)
        return [y, *(total - 1 for total in totals.values()), *([back] if to_x else [])]

    for to_x in (True, False):
        pairs = zip(
            found(arithmetic, torch.float32, to_x), found(Arithmetic(kernels="off"), torch.float64, to_x), strict=True
        )
        for i, (mine, expected) in enumerate(pairs):
            assert mine.shape == expected.shape
            loose = 0.02 if arithmetic.precision == "ieee" else 0.3  # a rounding decides a window now and then
            assert error(mine, expected) < (tolerance if i == 0 else loose)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_costs_and_their_gradient_as_one_kernel(mixed, dtype, tolerance):
    torch.manual_seed(0)
    slots, samples, classes = 3, 70, 10
    outputs = 3 * torch.randn(slots, 2 if mixed else 1, samples, classes, dtype=torch.float64).cuda()
    target = torch.softmax(torch.randn(slots, samples, classes, dtype=torch.float64), -1).cuda()
    target[:, :20] = torch.eye(classes, dtype=torch.float64).repeat(2, 1).cuda()
    labelled, unlabelled = (torch.zeros(slots, samples, dtype=torch.float64).cuda() for _ in range(2))
    labelled[:, :20], unlabelled[:, 20:65] = 1 / 20, 1 / 45  # the last five are padding
    alpha_p, alpha_r = torch.rand(2, slots, dtype=torch.float64).cuda()
    beta = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64).cuda()
    samples = Samples(target, target, labelled, unlabelled)
    cost = LocalCosts(samples, alpha_p, alpha_r, beta if mixed else None)
    rounded = Samples(*(t.to(dtype) for t in samples[:4]))
    numbers = (alpha_p.to(dtype), alpha_r.to(dtype), beta.to(dtype) if mixed else None)
    costs, found = fused_local_gradient(LocalCosts(rounded, *numbers), outputs.to(dtype))
    outputs = outputs.requires_grad_()
    expected = local_costs(cost, torch.log_softmax(outputs, -1))
    (gradient,) = torch.autograd.grad(expected.sum(), outputs)
    assert error(costs, expected.detach()) < tolerance
    assert error(found, gradient) < tolerance


@pytest.mark.parametrize("rows", [10, 50])
@pytest.mark.parametrize(("arithmetic", "tolerance"), WAYS, ids=str)
def test_a_wide_linear_layer(rows, arithmetic, tolerance):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = arithmetic.precision == "tf32"
    weight, bias = torch.randn(SLOTS, MODELS, 130, 2100).cuda(), torch.randn(SLOTS, MODELS, 130).cuda()
    x = torch.randn(SLOTS, MODELS, rows, 2100).cuda()

    def found(arithmetic, dtype=torch.float32):
        own = {"weight": weight.to(dtype), "bias": bias.to(dtype)}
        into = {name: torch.ones_like(t) for name, t in own.items()}
        y, pull = linear(x.to(dtype), matrices_of(own), totals_of(into), arithmetic)
        back = pull(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y), True)
        return [y, back, *(total - 1 for total in into.values())]

    for one, exact in zip(found(arithmetic), found(Arithmetic(kernels="off"), torch.float64), strict=True):
        assert one.shape == exact.shape
        assert error(one, exact) < tolerance


@pytest.mark.parametrize("arithmetic", [way for way, _ in WAYS], ids=str)
def test_the_same_inputs_give_the_same_bits(arithmetic):
    known = given(images)
    assert all(torch.equal(*pair) for pair in zip(passes(*known, arithmetic), passes(*known, arithmetic), strict=True))


@pytest.mark.parametrize("p", [0.1, 0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("channelwise", [False, True])
def test_dropout_has_the_same_bits(p, channelwise):
    torch.manual_seed(0)
    module = KeyedDropout(p, 3, channelwise)
    x = torch.randn(SLOTS, MODELS, 40, 33, 7, 5).cuda()
    keys = torch.randint(-(2**62), 2**62, (SLOTS, 1, 40)).cuda()
    (y, pull), (expected, plain) = (dropout(module, x, keys, Arithmetic(kernels=way)) for way in ("auto", "off"))
    assert torch.equal(y != 0, expected != 0)
    assert torch.allclose(y, expected, rtol=1e-6, atol=0)
    assert torch.allclose(pull(x, True), plain(x, True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("arithmetic", [Arithmetic(), Arithmetic("ieee", "ieee")], ids=str)
def test_pooling_picks_the_first_of_equals(relu, arithmetic):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 2), *[nn.ReLU()] * relu, nn.MaxPool2d(2), nn.Flatten())
    parameters = {name: torch.randn(SLOTS, MODELS, *p.shape).round().cuda() for name, p in params(module)}
    x = torch.randn(SLOTS, 1, SAMPLES, 2, 10, 12).round().cuda()
    known = (module, parameters, x, None)
    for found, expected in zip(passes(*known, arithmetic), in_float64(*known), strict=True):
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("arithmetic", [way for way, _ in WAYS], ids=str)
def test_a_captured_step_is_the_step(arithmetic):
    known = given(images)
    expected = passes(*known, arithmetic)
    module, parameters, x, keys = known
    totals = {name: torch.ones_like(p) for name, p in parameters.items()}
    weights = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(2)).cuda()
    bound = bind(walk(module, parameters), parameters, totals, arithmetic)

    def step():
        y, pulls = forward(bound, x, keys)
        backward(pulls, weights)
        return y

    beside = torch.cuda.Stream()
    with torch.inference_mode():
        with torch.cuda.stream(beside):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        for total in totals.values():
            total.fill_(1)
        graph.replay()
    torch.cuda.synchronize()
    for found, again in zip([y, *(total - 1 for total in totals.values())], expected, strict=True):
        assert error(found, again.double()) < 1e-5
