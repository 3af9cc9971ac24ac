"""Linear layers taken together on a CPU: what autograd finds, whatever their shapes and wherever their inputs lie."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fedcpsl.engine import linear as dense_layers
from fedcpsl.engine.forward_backward import backward, bind, forward
from fedcpsl.engine.layer_kinds import walk
from fedcpsl.engine.precision import Arithmetic

SIZES = st.integers(1, 4)


@st.composite
def stacks(draw):
    """A model of linear layers, some of them rectified."""
    widths = draw(st.lists(SIZES, min_size=2, max_size=4))
    layers = []
    for before, after in pairwise(widths):
        layers.append(nn.Linear(before, after, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers).double()


def expected(model, parameters, x, weights, slots, models):
    """Outputs, and the gradients of their weighted sum, model by model."""
    outputs, gradients = [], []
    for slot in range(slots):
        for each in range(models):
            own = {name: t[slot, each].clone().requires_grad_() for name, t in parameters.items()}
            y = functional_call(model, own, (x[slot, min(each, x.shape[1] - 1)],))
            outputs.append(y.detach())
            gradients.append(torch.autograd.grad((y * weights[slot, each]).sum(), list(own.values())))
    return torch.stack(outputs), [torch.stack(each) for each in zip(*gradients, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    model=stacks(),
    slots=SIZES,
    models=st.integers(1, 2),
    rows=st.lists(SIZES, min_size=1, max_size=2),
    shared=st.booleans(),
    large=st.booleans(),
    seed=st.integers(0, 100),
)
def test_layers_together_are_what_autograd_finds(model, slots, models, rows, shared, large, seed):
    torch.manual_seed(seed)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    parameters = {name: torch.randn(slots, models, *shape).double() for name, shape in shapes.items()}
    totals = {name: torch.randn_like(t) for name, t in parameters.items()}
    before = {name: t.clone() for name, t in totals.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_layers, "LARGE", 0 if large else 1 << 20)
        bound = bind(walk(model, shapes), parameters, totals)
        assert len(bound) == 1
        for _ in range(2):  # what is kept from the first time does no harm in the second
            x = torch.randn(slots, 1 if shared else models, *rows, model[0].in_features).double()
            y, pulls = forward(bound, x, None)
            weights = torch.randn_like(y)
            outputs, gradients = expected(model, parameters, x, weights, slots, models)
            assert torch.allclose(y.flatten(0, 1), outputs, rtol=0, atol=1e-12)
            backward(pulls, weights)
            for total, was, gradient in zip(totals.values(), before.values(), gradients, strict=True):
                was += gradient.unflatten(0, (slots, models))
                assert torch.allclose(total, was, rtol=0, atol=1e-12)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_handed_to_the_layer_before(monkeypatch, shared, large):
    monkeypatch.setattr(dense_layers, "LARGE", 0 if large else 1 << 20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    parameters = {name: torch.randn(3, 2, *shape).double() for name, shape in shapes.items()}
    totals = {name: torch.zeros_like(t) for name, t in parameters.items()}
    (bound,) = bind(walk(model, shapes), parameters, totals)
    x = torch.randn(3, 1 if shared else 2, 5, 3).double().requires_grad_()
    y, pull = bound.dense(x.detach())
    weights = torch.randn_like(y)
    cost = 0.0
    for slot in range(3):
        for each in range(2):
            own = {name: t[slot, each] for name, t in parameters.items()}
            seen = functional_call(model, own, (x[slot, 0 if shared else each],))
            cost = cost + (seen * weights[slot, each]).sum()
    (gradient,) = torch.autograd.grad(cost, x)
    assert torch.allclose(pull(weights, True), gradient, rtol=0, atol=1e-12)


def test_only_what_learns_on_a_cpu_in_full_precision_is_taken_together():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    parameters = {name: torch.randn(1, 1, *shape) for name, shape in shapes.items()}
    layers = walk(model, shapes)
    assert [part.dense is None for part in bind(layers, parameters)] == [True] * len(layers)
    learning = bind(layers, parameters, {name: torch.zeros_like(t) for name, t in parameters.items()})
    assert [part.dense is None for part in learning] == [True, False, True, False]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_single_layer_as_a_gpu_computes_it_also_without_rows(rows, shared):
    """A device without labelled samples has minibatches of no rows."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(2, 2, 4, 3).double(), torch.randn(2, 2, 4).double()
    into = {"weight": torch.zeros_like(weight), "bias": torch.zeros_like(bias)}
    x, gradient = torch.randn(2, 1 if shared else 2, rows, 3).double(), torch.randn(2, 2, rows, 4).double()
    own = dense_layers.matrices_of({"weight": weight, "bias": bias})
    y, pull = dense_layers.linear(x, own, dense_layers.totals_of(into), Arithmetic())
    x_gradient = pull(gradient, True)
    assert torch.allclose(y, x @ weight.mT + bias[:, :, None], rtol=0, atol=1e-12)
    whole = gradient @ weight
    assert torch.allclose(x_gradient, whole.sum(1, keepdim=True) if shared else whole, rtol=0, atol=1e-12)
    assert torch.allclose(into["weight"], gradient.mT @ x.expand(2, 2, rows, 3), rtol=0, atol=1e-12)
    assert torch.allclose(into["bias"], gradient.sum(2), rtol=0, atol=1e-12)
