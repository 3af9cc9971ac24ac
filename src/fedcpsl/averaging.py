"""What many algorithms share: one model at the server, averaged updates, the loss on labelled samples, and Adam."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.engine import Leaves, differences, subtract_scaled
from fedcpsl.problem import LabelledCosts, Samples

ADAM_EPS = 1e-8
Betas = tuple[float, float]


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]


class Broadcast(NamedTuple):
    """Server to device."""

    theta: Tensor


class Nothing(NamedTuple):
    """What a device keeps that keeps nothing."""


class Upload(NamedTuple):
    """Device to server."""

    delta: Tensor  # [..., parameters], or empty where nothing is sent


class Sum(NamedTuple):
    """What the counted uploads of a round add up to."""

    update: Tensor  # [parameters]
    counted: Tensor


def resolve(variant: Any, settings: Any, _costs: Any) -> tuple[Traits, Hashable]:
    """A variant that is its traits; its settings are its rules."""
    return variant, settings


def decided(settings: Any, _method: Method, eta: float) -> Any:
    """Nothing but the step size is ever `auto`."""
    return replace(settings, eta=eta)


def alike(method: Method) -> Hashable:
    """Runs may go side by side whatever their settings: these are numbers of each slot."""
    return method.traits


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made."""
    return Server(method.network.initial.clone())


def init_device(_method: Method, _broadcast: Any) -> Nothing:
    return Nothing()


def broadcast(server: Any) -> Broadcast:
    """theta^r."""
    return Broadcast(server.theta)


def commit(_method: Method, _hyper: Any, _broadcast: Any, device: Any, _upload: Any) -> Any:
    """Nothing changes on the device by being counted."""
    return device


def contribution(_method: Method, _hyper: Any, upload: Upload, weight: Tensor) -> Sum:
    """omega_i (theta_i^{r+1} - theta^r)."""
    return Sum(weight[..., None] * upload.delta, torch.ones_like(weight))


def reweighted(total: Any, factor: Tensor) -> Any:
    """w_i omega_i (theta_i^{r+1} - theta^r): the update alone, times a factor; `total` has one of each device."""
    return total._replace(update=factor[..., None] * total.update)


def late(_method: Method, total: Any, _sent: Any, _server: Any, _weight: Tensor) -> Any:
    """An update is added whatever theta has become meanwhile."""
    return total


def apply(_method: Method, server: Any, total: Sum, devices: int) -> Any:
    """theta^{r+1} = theta^r + (N/m) sum_i omega_i (theta_i^{r+1} - theta^r)."""
    return server._replace(theta=server.theta + (devices / total.counted) * total.update)


def admit(_method: Method, server: Any, _before: Roster, _after: Roster) -> Any:
    """Who joins changes nothing at the server."""
    return server


def general_model(_method: Method, server: Any) -> Tensor | None:
    """theta."""
    found: Tensor = server.theta
    return found


def received_model(_method: Method, broadcast: Any) -> Tensor | None:
    """theta, as a device has it."""
    found: Tensor = broadcast.theta
    return found


def no_own_model(_method: Method, _hyper: Any, _device: Any, _general: Tensor | None) -> Tensor | None:
    return None


def predict_general(_method: Method, _hyper: Any, log_h: Tensor | None, _log_h_own: Tensor | None) -> Tensor:
    """h(theta; x)."""
    assert log_h is not None
    return log_h


def predict_own(_method: Method, _hyper: Any, log_h: Tensor | None, log_h_own: Tensor | None) -> Tensor:
    """h of the device's own model; the general one's where it has none."""
    found = log_h if log_h_own is None else log_h_own
    assert found is not None
    return found


def per_slot(number: Tensor, leaf: Tensor) -> Tensor:
    """One number per slot, shaped to multiply a leaf, [..., *shape], of as many slots."""
    return number.reshape(number.shape + (1,) * (leaf.dim() - number.dim()))


def stacked(method: Method, hyper: Any, *models: Tensor) -> Leaves:
    """Models as leaves, [..., models, *shape] each, one set per slot: what `add_labelled_gradient` takes."""
    lead, split = hyper.eta.dim(), method.network.split
    each = [split(model.expand(*hyper.eta.shape, -1)) for model in models]
    return tuple(torch.stack(leaves, lead) for leaves in zip(*each, strict=True))


def model_of(method: Method, hyper: Any, models: Leaves, which: int) -> Tensor:
    """One of the stacked models, flat, [..., parameters]."""
    lead = hyper.eta.dim()
    return method.network.join([leaf.select(lead, which) for leaf in models])


def add_labelled_gradient(method: Method, into: Leaves, models: Leaves, samples: Samples) -> Tensor:
    """Adds the gradient of `fedcpsl.problem.labelled_costs` in each model to `into`; returns the costs."""
    return method.network.add_gradient(into, models, *samples.inputs, LabelledCosts(samples))


def descend_labelled(method: Method, models: Leaves, eta: Tensor, samples: Samples, at: Leaves | None = None) -> Tensor:
    """w <- w - eta g(w; B), in place; returns the costs. eta is [...], one for all models of a slot.

    `at`: the models whose gradient it is, where these are others.
    """
    return method.network.descend(models, eta[..., None], *samples.inputs, LabelledCosts(samples), at)


def descend_labelled_towards(
    method: Method, models: Leaves, eta: Tensor, samples: Samples, pull: Tensor, anchor: Leaves
) -> Tensor:
    """w <- w - eta (g(w; B) + pull (w - anchor)), in place; returns the costs. eta and the pull are [...]."""
    away = differences(models, anchor)
    costs = descend_labelled(method, models, eta, samples)
    descend(models, (eta * pull)[..., None], away)
    return costs


def descend(models: Leaves, eta: Tensor, gradient: Leaves) -> None:
    """w <- w - eta gradient, in place; eta is [..., models]."""
    subtract_scaled(models, eta, gradient)


def adam_moments(m: Tensor, v: Tensor, g: Tensor, betas: Betas) -> tuple[Tensor, Tensor]:
    """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2."""
    return betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g.square()


def adam_direction(m: Tensor, v: Tensor, updates: Tensor, betas: Betas) -> Tensor:
    """m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + 1e-8), k being the number of updates with this one."""
    return m / (1 - betas[0] ** updates) / ((v / (1 - betas[1] ** updates)).sqrt() + ADAM_EPS)
