"""FedNova (Wang et al., 2020): the server removes what unequal amounts of local work do to the devices' weights."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Traits
from fedcpsl.averaging import (
    Broadcast,
    Nothing,
    Server,
    add_labelled_gradient,
    descend,
    descend_labelled,
    model_of,
    stacked,
)
from fedcpsl.engine import Leaves, differences, scale_and_add
from fedcpsl.errors import InputError
from fedcpsl.problem import Samples
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, real, text

VARIANTS = {"fednova": Traits(unlabelled=False, personal=False)}


@dataclass(frozen=True)
class Settings:
    """FedNova's own."""

    name: str = text("fednova", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    gamma: float = real(0.0, "momentum of local steps", 0, 1, open_ends="]")
    mu: float = real(
        0.0, "weight of the proximal term, which pulls devices back to the model at the start of the round", 0
    )


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    gamma: Tensor
    mu: Tensor


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each
    start: Leaves  # the same: theta^r
    momenta: Leaves  # the same: u; none without momentum
    costs: Tensor  # [..., 1]


class Upload(NamedTuple):
    """Device to server: the step count stands for s_i, which follows from it."""

    delta: Tensor  # [..., parameters]
    steps: Tensor  # [...]


class Sum(NamedTuple):
    """What the counted uploads of a round add up to."""

    update: Tensor  # [parameters]: omega_i delta_i / s_i
    steps: Tensor  # omega_i s_i
    weight: Tensor  # omega_i
    counted: Tensor


resolve, decided = averaging.resolve, averaging.decided
init_server, init_device, broadcast = averaging.init_server, averaging.init_device, averaging.broadcast
commit, admit = averaging.commit, averaging.admit
reweighted, late = averaging.reweighted, averaging.late
general_model, received_model = averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_general


def rules_of(method: Method) -> Settings:
    assert isinstance(method.rules, Settings)
    return method.rules


def alike(method: Method) -> Hashable:
    """Runs may go side by side where all have momentum or none has, and likewise a pull."""
    settings = rules_of(method)
    return method.traits, settings.gamma > 0, settings.mu > 0


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    """Refuses eta mu > 1, where s_i is not what a device's gradients add up to."""
    if float(settings.eta) * settings.mu > 1:
        raise InputError(f"algorithm.mu = {settings.mu:g}: eta mu must not be above 1; give at most 1 / algorithm.eta")
    return {"eta": settings.eta, "gamma": settings.gamma, "mu": settings.mu}


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Nothing) -> Local:
    """w = theta^r, u = 0."""
    models, start = (stacked(method, hyper, broadcast.theta) for _ in range(2))
    momenta = tuple(map(torch.zeros_like, models)) if rules_of(method).gamma else ()
    return Local(models, start, momenta, hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """u <- gamma u + g(w; B), then w <- w - eta (u + mu (w - theta^r))."""
    w, u, settings = local.models, local.momenta, rules_of(method)
    away = differences(w, local.start) if settings.mu else ()
    if settings.gamma:
        scale_and_add(u, hyper.gamma, ())
        costs = add_labelled_gradient(method, u, w, samples)
        descend(w, hyper.eta[..., None], u)
    else:
        costs = descend_labelled(method, w, hyper.eta, samples)
    if settings.mu:
        descend(w, (hyper.eta * hyper.mu)[..., None], away)
    return local._replace(costs=local.costs + costs)


def costs(local: Local) -> Tensor:
    """l, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Nothing, local: Local, steps: Tensor
) -> tuple[Nothing, Upload]:
    """w - theta^r and the step count are sent."""
    return device, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta, steps)


def effective_steps(hyper: Hyper, steps: Tensor) -> Tensor:
    """s_i = sum_{t=1}^{Q_i} (1 - eta mu)^{Q_i - t} (1 - gamma^t) / (1 - gamma): what the step gradients add up to.

    It is what k <- gamma k + 1, s <- (1 - eta mu) s + k comes to: Q_i for plain steps.
    """
    kept, steps = 1 - hyper.eta * hyper.mu, steps.to(hyper.eta.dtype)
    larger, smaller = torch.maximum(kept, hyper.gamma), torch.minimum(kept, hyper.gamma)
    ratio = torch.where(larger > 0, smaller / torch.where(larger > 0, larger, 1.0), 0.0)
    mixed = larger ** (steps - 1) * powers(ratio, steps)  # sum_j kept^(Q - 1 - j) gamma^j
    return (powers(kept, steps) - hyper.gamma * mixed) / (1 - hyper.gamma)


def powers(x: Tensor, count: Tensor) -> Tensor:
    """1 + x + .. + x^(Q - 1), for x from 0 to 1; exact also where x is nearly 1."""
    log = torch.where(x < 1, x, 0.5).log()
    return torch.where(x < 1, (count * log).expm1() / log.expm1(), count)


def contribution(_: Method, hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
    """omega_i delta_i / s_i, omega_i s_i and omega_i."""
    steps = effective_steps(hyper, upload.steps)
    return Sum((weight / steps)[..., None] * upload.delta, weight * steps, weight, torch.ones_like(weight))


def apply(_: Method, server: Server, total: Sum, devices: int) -> Server:
    """theta <- theta + tau (N/m) sum_A omega_i delta_i / s_i, tau = sum_A omega_i s_i / sum_A omega_i."""
    tau = total.steps / total.weight
    return server._replace(theta=server.theta + tau * (devices / total.counted) * total.update)


def update_rate(hyper: Hyper, upload: Upload) -> Tensor:
    """norm(w - theta^r) / (eta s_i), what the device's mean gradient would have to be; in float64."""
    exact = Hyper(*(number.double() for number in hyper))
    return upload.delta.double().norm() / (exact.eta * effective_steps(exact, upload.steps))
