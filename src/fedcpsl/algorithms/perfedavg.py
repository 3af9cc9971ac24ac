"""Per-FedAvg (Fallah et al., 2020): a model for all from which one gradient step of a device's own does well."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Traits
from fedcpsl.averaging import (
    Broadcast,
    Nothing,
    Upload,
    add_labelled_gradient,
    descend,
    descend_labelled,
    model_of,
    per_slot,
    stacked,
)
from fedcpsl.engine import Leaves
from fedcpsl.problem import Samples
from fedcpsl.schedule import Draw, Sizes
from fedcpsl.settings import AUTO, choice, real, whole

SECOND, THIRD = Draw("batch_l2"), Draw("batch_l3")
VARIANTS = {
    "perfedavg-fo": Traits(unlabelled=False, personal=True, gradients_per_step=2, follows=True, draws=(SECOND,)),
    "perfedavg-hf": Traits(unlabelled=False, personal=True, gradients_per_step=4, follows=True, draws=(SECOND, THIRD)),
}
RECORDED = {"personal": "own_model"}


@dataclass(frozen=True)
class Settings:
    """Per-FedAvg's own."""

    name: str = choice("perfedavg-fo", "the algorithm: first-order, or Hessian-free", *VARIANTS)
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    alpha: float = real(0.02, "step size of the adaptation to a device; 0: none", 0)
    delta: float = real(
        0.001, "step of the finite difference that approximates the Hessian (perfedavg-hf)", 0, open_ends="["
    )
    adapt_steps: int = whole(1, "gradient steps by which a device adapts the model before it predicts", 0)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    alpha: Tensor
    delta: Tensor


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each: w
    costs: Tensor  # [..., 1]


reweighted, late = averaging.reweighted, averaging.late
resolve, decided, alike = averaging.resolve, averaging.decided, averaging.alike
init_server, init_device, broadcast = averaging.init_server, averaging.init_device, averaging.broadcast
commit, contribution, apply, admit = averaging.commit, averaging.contribution, averaging.apply, averaging.admit
general_model, received_model = averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_own


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {"eta": settings.eta, "alpha": settings.alpha, "delta": settings.delta}


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Nothing) -> Local:
    """w = theta^r."""
    return Local(stacked(method, hyper, broadcast.theta), hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta v, v = g(w - alpha g(w; D); D'); with `perfedavg-hf` v is corrected by `hessian_free`."""
    adapted = tuple(map(torch.clone, local.models))
    descend_labelled(method, adapted, hyper.alpha, samples)
    second = samples.extra[SECOND.name]
    if THIRD in method.traits.draws:
        v, costs = gradient(method, adapted, second)
        v = hessian_free(method, hyper, local.models, v, samples.extra[THIRD.name])
        descend(local.models, hyper.eta[..., None], v)
    else:
        costs = descend_labelled(method, local.models, hyper.eta, second, at=adapted)
    return local._replace(costs=local.costs + costs)


def gradient(method: Method, models: Leaves, samples: Samples) -> tuple[Leaves, Tensor]:
    """g(w; B), leaf by leaf, and l(w; B)."""
    into = tuple(map(torch.zeros_like, models))
    costs = add_labelled_gradient(method, into, models, samples)
    return into, costs


def moved(models: Leaves, by: Tensor, along: Leaves) -> Leaves:
    """w + by v, leaf by leaf."""
    return tuple(torch.addcmul(w, per_slot(by, w), v) for w, v in zip(models, along, strict=True))


def hessian_free(method: Method, hyper: Hyper, models: Leaves, v: Leaves, third: Samples) -> Leaves:
    """v <- v - (alpha / (2 delta)) (g(w + delta v; D'') - g(w - delta v; D'')): near (I - alpha Hessian) v."""
    difference, _ = gradient(method, moved(models, hyper.delta, v), third)
    one = torch.ones_like(hyper.delta)
    descend_labelled(method, difference, one, third, at=moved(models, -hyper.delta, v))
    return moved(v, -hyper.alpha / (2 * hyper.delta), difference)


def costs(local: Local) -> Tensor:
    """l(w - alpha g(w; D); D'), summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Nothing, local: Local, _steps: Tensor
) -> tuple[Nothing, Upload]:
    """w - theta^r is sent."""
    return device, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)


def adapted(method: Method, hyper: Hyper, general: Tensor, labelled: Samples) -> Tensor:
    """p <- p - alpha g(p; L_i), `adapt_steps` times from p = theta, on all labelled samples of the device."""
    assert isinstance(method.rules, Settings)
    models = stacked(method, hyper, general)
    for _ in range(method.rules.adapt_steps):
        descend_labelled(method, models, hyper.alpha, labelled)
    return model_of(method, hyper, models, 0)
