"""Layers by hand, for many models at once, against plain PyTorch for one model after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fedcpsl.engine import Network
from fedcpsl.engine.convolution import by_library, by_matmul, geometry_of
from fedcpsl.engine.costs import Differentiated
from fedcpsl.engine.dropout import KeyedDropout, with_keyed_dropout
from fedcpsl.engine.forward_backward import backward, bind, forward
from fedcpsl.engine.layer_kinds import differentiated_by_hand, runs_without_vmap, walk
from fedcpsl.engine.leafwise import has_triton
from fedcpsl.engine.precision import Arithmetic
from fedcpsl.models import ResidualBlock, cnn, mlp
from fedcpsl.settings import Run
from fedcpsl.simulation.setup import choose_executor, choose_slots

WRITTEN_OUT = Differentiated(lambda h: ((h**2).sum((-1, -2)), 2 * h), by_hand=True)

SLOTS, MODELS, SAMPLES = 2, 2, 3


def stacked(module, dtype=torch.float64):
    """Parameters of several models, [slots, models, *shape]."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    return {
        name: torch.randn(SLOTS, MODELS, *shape, generator=generator).to(dtype) / 2 for name, shape in shapes.items()
    }


def by_hand(module, parameters, x, keys=None, arithmetic=None):
    """Outputs, and the gradient of <outputs, weights> in every parameter."""
    totals = {name: torch.ones_like(p) for name, p in parameters.items()}
    bound = bind(walk(module, parameters), parameters, totals, arithmetic or Arithmetic())
    y, pulls = forward(bound, x, keys)
    backward(pulls, weights_like(y))
    return y, {name: total - 1 for name, total in totals.items()}


def weights_like(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)


def one_by_one(module, parameters, x, keys=None):
    """The same by autograd, one model after another."""
    parameters = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    x = x.expand(SLOTS, MODELS, *x.shape[2:])
    rows = []
    for slot in range(SLOTS):
        for model in range(MODELS):
            for layer in module.modules():
                if isinstance(layer, KeyedDropout):
                    layer.keys = None if keys is None else keys.expand(x.shape[:3])[slot, model]
            own = {name: p[slot, model] for name, p in parameters.items()}
            rows.append(functional_call(module, own, (x[slot, model],)))
    y = torch.stack(rows).unflatten(0, (SLOTS, MODELS))
    gradients = torch.autograd.grad((y * weights_like(y)).sum(), list(parameters.values()))
    return y.detach(), dict(zip(parameters, gradients, strict=True))


def assert_agree(module, x, keys=None, tolerance=1e-12):
    """Convolved as on a CPU, and by the matmuls that a GPU may use."""
    module = module.double()
    parameters = stacked(module)
    expected, expected_gradients = one_by_one(module, parameters, x, keys)
    for convolve in (by_library, by_matmul):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedcpsl.engine.convolution.by_library", convolve)
            y, gradients = by_hand(module, parameters, x, keys)
        assert y.shape == expected.shape
        assert torch.allclose(y, expected, rtol=tolerance, atol=tolerance)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected_gradients[name], rtol=tolerance, atol=10 * tolerance), name


def inputs(*shape, shared=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SLOTS, 1 if shared else MODELS, SAMPLES, *shape, generator=generator, dtype=torch.float64)


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@settings(max_examples=60, deadline=None)
@given(
    kernel=pairs(1, 3),
    stride=pairs(1, 3),
    padding=pairs(0, 2),
    dilation=pairs(1, 2),
    spare=pairs(0, 4),
    channels=pairs(1, 3),
    shared=st.booleans(),
    bias=st.booleans(),
    relu=st.booleans(),
)
def test_any_convolution_of_images(kernel, stride, padding, dilation, spare, channels, shared, bias, relu):
    """As the first layer, which has no gradient to hand back, and as the second, after a ReLU or not."""
    inner, outer = channels
    size = [max(1, d * (k - 1) + 1 - 2 * p) + s for k, d, p, s in zip(kernel, dilation, padding, spare, strict=True)]
    conv = nn.Conv2d(inner, outer, kernel, stride, padding, dilation, bias=bias)
    assert_agree(conv, inputs(inner, *size, shared=shared))
    between = [nn.ReLU()] if relu else []
    second = nn.Sequential(nn.Conv2d(2, inner, 1), *between, conv, nn.ReLU(), nn.Flatten())
    assert differentiated_by_hand(walk(second, dict(second.named_parameters())))
    assert_agree(second, inputs(2, *size, shared=shared))


@settings(max_examples=30, deadline=None)
@given(
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    spare=st.integers(0, 5),
    shared=st.booleans(),
)
def test_any_convolution_of_signals(kernel, stride, padding, dilation, spare, shared):
    length = max(1, dilation * (kernel - 1) + 1 - 2 * padding) + spare
    conv = nn.Conv1d(3, 4, kernel, stride, padding, dilation)
    assert_agree(nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), conv, nn.Flatten()), inputs(2, length, shared=shared))


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 1), (1, 3)])
def test_padding_by_name(padding, kernel):
    assert_agree(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, kernel, padding=padding)), inputs(2, 7, 6))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_same_padding_of_an_even_kernel():
    assert_agree(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, (2, 4), padding="same")), inputs(2, 7, 6))


@pytest.mark.parametrize("conv", [nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")])
def test_other_convolutions_go_through_autograd(conv):
    module = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), conv, nn.ReLU(), nn.Flatten())
    assert not differentiated_by_hand(walk(module, dict(module.named_parameters())))
    assert_agree(module, inputs(2, 5, 5))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 1), (1, 2), ceil_mode=True, dilation=2)]
)
def test_pooling_picks_the_first_of_equals(pool, relu):
    """Few different numbers make many ties; PyTorch's choice decides where the gradient goes."""
    module = nn.Sequential(nn.Conv2d(2, 3, 2), *[nn.ReLU()] * relu, pool, nn.Flatten()).double()
    x = inputs(2, 8, 7).round()
    parameters = {name: p.round() for name, p in stacked(module).items()}
    (y, gradients), (expected, theirs) = by_hand(module, parameters, x), one_by_one(module, parameters, x)
    assert torch.equal(y, expected)
    assert all(torch.allclose(gradients[name], theirs[name], rtol=1e-12, atol=1e-12) for name in theirs)
    assert y.flatten().unique().numel() < y.numel() / 3


def test_pooling_of_signals():
    pools = [nn.MaxPool1d(3, ceil_mode=True), nn.MaxPool1d(2, 1, 1)]
    assert_agree(nn.Sequential(nn.Conv1d(2, 4, 2), nn.ReLU(), *pools, nn.Flatten()), inputs(2, 12))


@pytest.mark.parametrize("drop", [nn.Dropout(0.4), nn.Dropout2d(0.5), nn.Dropout(1.0), nn.Dropout(0.0)])
@pytest.mark.parametrize("keyed", [False, True])
def test_dropout_is_the_keyed_dropout(drop, keyed):
    module = nn.Sequential(nn.Conv2d(2, 4, 2), nn.ReLU(), drop, nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Dropout(0.3))
    with_keyed_dropout(module)
    assert differentiated_by_hand(walk(module, dict(module.named_parameters())))
    keys = torch.randint(-(2**62), 2**62, (SLOTS, 1, SAMPLES), generator=torch.Generator().manual_seed(0))
    assert_agree(module, inputs(2, 5, 6), keys if keyed else None)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("groups", "shape"), [(1, (5, 4)), (2, (5, 4)), (4, (7,))])
def test_group_norm(groups, shape, affine):
    conv = nn.Conv2d if len(shape) == 2 else nn.Conv1d
    norm = nn.GroupNorm(groups, 4, affine=affine)
    module = nn.Sequential(conv(2, 4, 2), norm, nn.ReLU(), conv(4, 2, 2), nn.Flatten())
    assert differentiated_by_hand(walk(module, dict(module.named_parameters())))
    assert_agree(module, inputs(2, *shape), tolerance=1e-10)
    first = nn.Sequential(nn.GroupNorm(1, 2, affine=affine), conv(2, 2, 1), nn.Flatten())
    assert_agree(first, inputs(2, *shape), tolerance=1e-10)


def residual_blocks():
    """At the beginning, with an empty shortcut; then two inside one another, one of which changes the shape."""
    inner = ResidualBlock(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.MaxPool2d(2)), nn.Sequential(nn.MaxPool2d(2)))
    outer = ResidualBlock(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), inner), nn.Sequential(nn.Conv2d(2, 4, 2, 2)))
    first = ResidualBlock(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)), nn.Sequential())
    return nn.Sequential(first, outer, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_residual_blocks():
    module = residual_blocks()
    layers = walk(module, dict(module.named_parameters()))
    assert [len(branch) for branch in layers[1].branches] == [2, 1]
    assert differentiated_by_hand(layers)
    assert_agree(module, inputs(2, 6, 4), tolerance=1e-12)
    assert_agree(nn.Sequential(nn.Conv2d(2, 2, 1), *module), inputs(2, 6, 4), tolerance=1e-12)


def test_residual_blocks_with_layers_that_are_not_known_run_as_one():
    block = ResidualBlock(nn.Sequential(nn.Conv2d(2, 2, 1, groups=2)), nn.Sequential())
    (layer,) = walk(block, dict(block.named_parameters()))
    assert not layer.branches
    assert not runs_without_vmap(layer)
    assert_agree(nn.Sequential(block, nn.Flatten()), inputs(2, 4, 4))
    by_autograd = ResidualBlock(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh()), nn.Sequential(nn.Tanh()))
    (layer,) = walk(by_autograd, dict(by_autograd.named_parameters()))
    assert layer.branches
    assert not differentiated_by_hand([layer])
    assert_agree(nn.Sequential(by_autograd, nn.Flatten()), inputs(2, 4, 4))
    assert_agree(nn.Sequential(nn.Conv2d(2, 2, 1), by_autograd, nn.Flatten()), inputs(2, 4, 4))


@pytest.mark.parametrize(("kind", "shape"), [(nn.AdaptiveAvgPool1d, (7,)), (nn.AdaptiveAvgPool2d, (3, 4))])
def test_the_mean_of_channels(kind, shape):
    conv = nn.Conv1d if len(shape) == 1 else nn.Conv2d
    module = nn.Sequential(conv(2, 3, 2), kind(1), nn.Flatten(), nn.Linear(3, 2))
    assert differentiated_by_hand(walk(module, dict(module.named_parameters())))
    assert_agree(module, inputs(2, *shape))


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias"])
def test_a_partly_frozen_convolution_goes_through_autograd(frozen):
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten()).double()
    parameters = {name: p for name, p in stacked(module).items() if name != frozen}
    (y, gradients), (expected, theirs) = (run(module, parameters, inputs(2, 4, 4)) for run in (by_hand, one_by_one))
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == theirs.keys() == parameters.keys()
    assert all(torch.allclose(gradients[name], theirs[name], rtol=1e-12, atol=1e-12) for name in theirs)


@pytest.mark.parametrize("models", [1, 2])
def test_a_library_convolution_keeps_channels_last(models):
    """All along, so that the next one need not copy its input; of any number of models."""
    conv = nn.Conv2d(3, 4, 3, padding=1)
    parameters = {name: p[:1, :models] for name, p in stacked(conv).items()}
    x = inputs(3, 6, 5, shared=False)[:1, :models].float()
    (layer,) = walk(conv, parameters)
    parameters = {name: p.float() for name, p in parameters.items()}
    y, pull = by_library(layer, geometry_of(conv, (6, 5)), parameters, parameters, x, Arithmetic())
    handed = pull(weights_like(y), True)
    assert handed.shape == x.shape
    assert all(t.movedim(3, -1).is_contiguous() for t in (y, handed))


NETWORKS = {
    "convolutions": [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 4, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
    "without bias": [nn.Conv2d(2, 3, 2, bias=False), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 2, stride=2)],
    "normalised": [nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.GroupNorm(1, 3)],
    "dropout": [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(3, 3, 2), nn.Dropout2d(0.3)],
    "autograd": [nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.GELU()],
    "linear": [nn.Flatten(), nn.Linear(84, 5), nn.ReLU()],
    "residual": [
        nn.Conv2d(2, 4, 2),
        ResidualBlock(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)), nn.Sequential()),
        ResidualBlock(
            nn.Sequential(nn.Conv2d(4, 3, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.Dropout(0.3)),
            nn.Sequential(nn.Conv2d(4, 3, 1, 2, bias=False), nn.GroupNorm(1, 3)),
        ),
        nn.AdaptiveAvgPool2d(1),
    ],
}


@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_descending_at_once_is_adding_up_a_gradient_first(name, written_out):
    """Even though the parameters change while the gradient is still on its way back."""
    torch.manual_seed(0)
    module = nn.Sequential(*NETWORKS[name], nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = inputs(2, 7, 6)
    module(x[0, 0])
    network = Network(module, x[0, 0], 3, batched=True)
    theta = network.initial + 0.01 * torch.randn(SLOTS, MODELS, len(network.initial), dtype=torch.float64)
    keys = torch.arange(SLOTS * SAMPLES).view(SLOTS, 1, SAMPLES)
    eta = torch.rand(SLOTS, MODELS, dtype=torch.float64)
    given = x, keys, WRITTEN_OUT if written_out else (lambda h: (h**2).sum((-1, -2)))
    gradient = tuple(leaf.contiguous() for leaf in network.split(torch.zeros_like(theta)))
    before, after = (tuple(leaf.contiguous() for leaf in network.split(theta)) for _ in range(2))
    costs = network.add_gradient(gradient, before, *given)
    assert torch.equal(network.descend(after, eta, *given), costs)
    expected = theta - eta[..., None] * network.join(gradient)
    assert torch.allclose(network.join(after), expected, rtol=1e-12, atol=1e-12)


def test_a_cpu_takes_models_one_by_one_where_it_convolves_and_autograd_where_it_normalises():
    x, cpu = torch.zeros(2, 3, 16, 16), torch.device("cpu")
    convolves = Network(cnn((3, 16, 16), 3), x, 3)
    assert (choose_executor("auto", convolves, cpu), choose_slots(Run(), convolves, cpu)) == ("vectorised", 1)
    assert choose_slots(Run(slots=3), convolves, cpu) == 3
    assert choose_slots(Run(executor="vectorised"), convolves, cpu) == 0
    linear = Network(mlp(3 * 256, 3, [5]), x, 3)
    assert (choose_executor("auto", linear, cpu), choose_slots(Run(), linear, cpu)) == ("vectorised", 0)
    for layer in (nn.GroupNorm(1, 3), nn.Conv2d(3, 3, 1, groups=3)):
        other = Network(nn.Sequential(nn.Conv2d(3, 3, 1), layer, nn.Flatten(), nn.Linear(768, 3)), x, 3)
        assert choose_executor("auto", other, cpu) == "sequential"


def rounded(t):
    return t.to(torch.bfloat16).to(t.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shared", [True, False])
def test_bf16_rounds_the_factors_and_nothing_else(shared, dtype):
    for module, shape in ((nn.Conv2d(2, 3, 2, stride=2), (2, 6, 5)), (nn.Linear(7, 4), (7,))):
        module, parameters, x = module.to(dtype), stacked(module, dtype), inputs(*shape, shared=shared).to(dtype)
        y, gradients = by_hand(module, parameters, x, arithmetic=Arithmetic("bf16"))
        rough = {**parameters, "weight": rounded(parameters["weight"])}
        expected, _ = one_by_one(module, rough, rounded(x))
        assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
        weights = rounded(weights_like(y))
        rough = {name: p.clone().requires_grad_() for name, p in rough.items()}
        each = rounded(x).expand(SLOTS, MODELS, *x.shape[2:])
        for slot in range(SLOTS):
            for model in range(MODELS):
                out = functional_call(module, {n: p[slot, model] for n, p in rough.items()}, (each[slot, model],))
                (gradient,) = torch.autograd.grad((out * weights[slot, model]).sum(), rough["weight"])
                found = gradients["weight"][slot, model]
                assert torch.allclose(found, gradient[slot, model], rtol=1e-4, atol=1e-4)
        full = weights_like(y).flatten(4).sum((2, 4)) if y.dim() > 4 else weights_like(y).sum(2)
        assert torch.allclose(gradients["bias"], full, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(by_hand(module, parameters, x)[0], y, rtol=1e-5, atol=1e-5)


def test_large_inputs_are_convolved_in_pieces(monkeypatch):
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2)).double()
    parameters, x = stacked(module), inputs(2, 6, 6)
    bound = bind(walk(module, parameters), parameters)
    whole, _ = forward(bound, x, None)
    monkeypatch.setattr("fedcpsl.engine.convolution.by_library", by_matmul)
    monkeypatch.setattr("fedcpsl.engine.convolution.PATCHES_AT_ONCE", 1)
    assert torch.allclose(forward(bound, x, None)[0], whole, rtol=1e-13, atol=1e-13)


def test_a_cnn_needs_neither_vmap_nor_autograd(monkeypatch):
    """With dropout, and with gradients written out, everything happens in inference mode."""
    module = nn.Sequential(cnn((1, 16, 16), 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x = inputs(1, 16, 16)
    networks = {batched: Network(module, x[0, 0], 3, batched=batched) for batched in (True, False)}
    assert networks[True].fully_batched
    assert not networks[True].fully_linear
    theta = networks[True].initial + 0.01 * torch.randn(SLOTS, MODELS, 1, dtype=torch.float64)
    keys = torch.arange(SLOTS * SAMPLES).view(SLOTS, 1, SAMPLES)
    found = {}
    for batched, network in networks.items():
        leaves = tuple(leaf.contiguous() for leaf in network.split(theta))
        into = tuple(torch.zeros_like(leaf) for leaf in leaves)
        cost = WRITTEN_OUT if batched else (lambda h: (h**2).sum((-1, -2)))
        with monkeypatch.context() as patch:
            if batched:
                patch.setattr("torch.autograd.grad", None)
                patch.setattr("fedcpsl.engine.forward_backward.vmap", None)
            costs = network.add_gradient(into, leaves, x, keys, cost)
        found[batched] = (costs, network.join(into), network.log_probabilities(theta, x))
    for a, b in zip(found[True], found[False], strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_what_is_batched_and_what_is_linear():
    x = torch.zeros(2, 3, 16, 16)
    assert Network(mlp(3 * 256, 3, [5]), x, 3).fully_linear
    assert Network(mlp(3 * 256, 3, [5]), x, 3).fully_batched
    assert Network(cnn((3, 16, 16), 3), x, 3).fully_batched
    assert not Network(cnn((3, 16, 16), 3), x, 3).fully_linear
    grouped = nn.Sequential(nn.Conv2d(3, 3, 16, groups=3), nn.Flatten())
    assert not Network(grouped, x, 3).fully_batched


class ViewsItsInput(nn.Module):
    """Another's own model, which wants its numbers in the order that PyTorch gives them by default."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 3, 2), nn.Linear(27, 3)

    def forward(self, x):
        return self.last(self.conv(x).view(len(x), -1))


def test_one_after_another_is_plain_pytorch_for_any_module():
    x = inputs(2, 4, 4)[0, 0]
    for module in (ViewsItsInput(), nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))):
        network = Network(module, x, 3)
        expected = torch.log_softmax(module.double()(x), -1)
        assert torch.allclose(network.log_probabilities(network.initial, x), expected, rtol=1e-12, atol=1e-12)


def test_a_gpu_without_triton_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr("fedcpsl.engine.leafwise.find_spec", lambda _: None)
    has_triton.cache_clear()
    assert [has_triton(), has_triton()] == [False, False]
    has_triton.cache_clear()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["Triton is not installed"]
