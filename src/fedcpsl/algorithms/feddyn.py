"""FedDyn (Acar et al., 2021): a device's objective carries a linear term that cancels its own gradient at the optimum.

The paper's gradient memory is -alpha_i H_i, and its h is -alpha Hbar.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.averaging import Broadcast, Sum, Upload, descend_labelled_towards, model_of, stacked
from fedcpsl.engine import Leaves
from fedcpsl.problem import Samples
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, choice, real, text

VARIANTS = {"feddyn": Traits(unlabelled=False, personal=False)}
RECORDED = {"Hbar": "server.mean_memory", "H": "device.memory"}


@dataclass(frozen=True)
class Settings:
    """FedDyn's own."""

    name: str = text("feddyn", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    alpha: float = real(0.01, "weight of the linear and of the quadratic term", 0, open_ends="[")
    weighted: bool = choice(
        True, "divide alpha by N omega_i, so that the objective is that of the other algorithms", True, False
    )


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    alpha: Tensor  # alpha_i


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]
    mean_memory: Tensor  # Hbar


class Device(NamedTuple):
    """What never leaves the device."""

    memory: Tensor  # [..., parameters]: H_i


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each
    anchor: Leaves  # the same: theta^r - H_i
    costs: Tensor  # [..., 1]


resolve, decided, alike, broadcast = averaging.resolve, averaging.decided, averaging.alike, averaging.broadcast
general_model, received_model = averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_general


def numbers(_: Method, settings: Settings, sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    """alpha_i = alpha / (N omega_i), or alpha."""
    samples = sizes.labelled + sizes.unlabelled
    even = samples.sum() / (len(samples) * samples.clip(1))
    return {"eta": settings.eta, "alpha": settings.alpha * even if settings.weighted else settings.alpha}


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made, Hbar = 0."""
    theta = method.network.initial.clone()
    return Server(theta, torch.zeros_like(theta))


def init_device(_: Method, broadcast: Broadcast) -> Device:
    """H_i = 0."""
    return Device(torch.zeros_like(broadcast.theta))


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """w = theta^r."""
    models = stacked(method, hyper, broadcast.theta)
    anchor = stacked(method, hyper, broadcast.theta - device.memory)
    return Local(models, anchor, hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta (g(w; B) + alpha_i (H_i + w - theta^r))."""
    costs = descend_labelled_towards(method, local.models, hyper.eta, samples, hyper.alpha, local.anchor)
    return local._replace(costs=local.costs + costs)


def costs(local: Local) -> Tensor:
    """l, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, _steps: Tensor
) -> tuple[Device, Upload]:
    """w - theta^r is sent; H_i waits until it is counted."""
    return device, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)


def commit(_: Method, _hyper: Hyper, _broadcast: Broadcast, device: Device, upload: Upload) -> Device:
    """H_i <- H_i + delta_i."""
    return Device(device.memory + upload.delta)


def contribution(_: Method, _hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
    """delta_i: plain means here, whatever the weight."""
    return Sum(upload.delta, torch.ones_like(weight))


def apply(_: Method, server: Server, total: Sum, devices: int) -> Server:
    """Hbar <- Hbar + (1/N) sum delta_i, then theta <- theta + (1/m) sum delta_i + Hbar."""
    mean_memory = server.mean_memory + total.update / devices
    return Server(server.theta + total.update / total.counted + mean_memory, mean_memory)


def admit(_: Method, server: Server, before: Roster, after: Roster) -> Server:
    """Hbar <- Hbar N_old / N_new: joiners have H_i = 0."""
    return server._replace(mean_memory=server.mean_memory * (before.devices / after.devices))


def started_again(state: Server | Device) -> Server | Device:
    """Hbar, or H_i, at 0; theta stays."""
    if isinstance(state, Device):
        return Device(torch.zeros_like(state.memory))
    return state._replace(mean_memory=torch.zeros_like(state.mean_memory))


def not_deployable(method: Method) -> str:
    """A device does not know N omega_i."""
    weighted = isinstance(method.rules, Settings) and method.rules.weighted
    return "alpha_i depends on the samples of all others; give algorithm.weighted = false" if weighted else ""


def invariants(_: Method, server: Server, devices: Device, _omega: Tensor) -> dict[str, Tensor]:
    """Hbar = (1/N) sum_i H_i, whatever is lost."""
    return {"Hbar - mean H_i": server.mean_memory - devices.memory.mean(0)}
