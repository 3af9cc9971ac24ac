"""FedAMP (Huang et al., 2021): devices whose models are alike attract each other; each is sent a model of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.averaging import Upload, descend_labelled_towards, model_of, stacked
from fedcpsl.engine import Leaves
from fedcpsl.errors import InputError
from fedcpsl.problem import Samples
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, choice, real, text

VARIANTS = {"fedamp": Traits(unlabelled=False, personal=True)}
RECORDED = {"personal": "device.w", "cloud": "broadcast.u"}


@dataclass(frozen=True)
class Settings:
    """FedAMP's own."""

    name: str = text("fedamp", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    attention: str = choice("exponential", "similarity of models: by distance, or by angle", "exponential", "cosine")
    sigma: float = real(100.0, "squared distance at which attraction fades (exponential)", 0, open_ends="[")
    alpha: float | str = real(AUTO, "step of the attraction; auto: sigma / N", 0, open_ends="[", also=(AUTO,))
    lam: float | str = real(AUTO, "weight of the pull towards the cloud model; auto: 0.01 alpha", 0, also=(AUTO,))
    scale: float = real(25.0, "how strongly the most similar models are preferred (cosine)", 0)
    self_weight: float | str = real(AUTO, "weight of a device's own model (cosine); auto: 1/N", 0, 1, also=(AUTO,))


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    pull: Tensor  # lam / alpha


class Server(NamedTuple):
    """What the server keeps of every device."""

    models: Tensor  # [devices, parameters]: W_i, the last counted; theta^0 at first
    counted: Tensor  # [devices]: 1 where there is one
    omega: Tensor  # [devices]: what each weighs in the mean that is reported, 0 while it was not counted


class Broadcast(NamedTuple):
    """Server to one device."""

    u: Tensor  # [..., parameters]: its cloud model


class Device(NamedTuple):
    """What never leaves the device."""

    w: Tensor  # [..., parameters]


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each
    start: Leaves  # the same: u_i
    costs: Tensor  # [..., 1]


resolve, decided, commit = averaging.resolve, averaging.decided, averaging.commit
alike, predict = averaging.alike, averaging.predict_own


def numbers(_: Method, settings: Settings, sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    """lam / alpha; alpha so small that no device's own weight is negative."""
    devices = len(sizes.labelled)
    alpha = _alpha(settings, devices)
    if settings.attention == "exponential" and alpha * (devices - 1) > settings.sigma:
        raise InputError(
            f"algorithm.alpha = {alpha:g}: a device's own weight could be negative with {devices} devices; give at "
            f"most sigma / (N - 1) = {settings.sigma / (devices - 1):g}"
        )
    return {"eta": settings.eta, "pull": 0.01 if settings.lam == AUTO else float(settings.lam) / alpha}


def _alpha(settings: Settings, devices: int) -> float:
    return settings.sigma / devices if settings.alpha == AUTO else float(settings.alpha)


def init_server(method: Method, devices: int) -> Server:
    """W_i = theta^0 of all, nobody counted."""
    theta = method.network.initial
    nobody = theta.new_zeros(devices)
    return Server(theta.expand(devices, -1).clone(), nobody, nobody.clone())


def admit(method: Method, server: Server, _before: Roster, after: Roster) -> Server:
    """W_i = theta^0 of devices that the server has no place for yet; a device that is forgotten leaves S."""
    known = len(server.models)
    new = method.network.initial.expand(max(0, len(after.labelled) - known), -1)
    stays = server.counted.new_tensor([count > 0 for count in after.labelled[:known]])
    rest = server.counted.new_ones(known - len(stays))
    counted, omega = (
        torch.cat([t * torch.cat([stays, rest]), t.new_zeros(len(new))]) for t in (server.counted, server.omega)
    )
    return Server(torch.cat([server.models, new]), counted, omega)


def init_device(_: Method, broadcast: Broadcast) -> Device:
    """w_i = the model first received."""
    return Device(broadcast.u.clone())


def broadcast_each(method: Method, server: Server, devices: Tensor) -> Broadcast:
    """u_i = W_i + sum_{j in S, j != i} xi_ij (W_j - W_i), for some devices, [devices, parameters]."""
    settings = method.rules
    assert isinstance(settings, Settings)
    return Broadcast(cloud_models(settings, server, devices))


def cloud_models(settings: Settings, server: Server, devices: Tensor) -> Tensor:
    """u_i, a step down the gradient of the attraction between W_i and the models of S, [devices, parameters]."""
    every = torch.arange(len(server.models), device=devices.device)
    others = server.counted.bool() & (every != devices[:, None])
    attention = (exponential if settings.attention == "exponential" else cosine)(settings, server, devices, others)
    return (1 - attention.sum(-1, keepdim=True)) * server.models[devices] + attention @ server.models


def exponential(settings: Settings, server: Server, devices: Tensor, others: Tensor) -> Tensor:
    """xi_ij = (alpha / sigma) exp(-|W_i - W_j|^2 / sigma), from differences: models may be nearly equal."""
    how = "donot_use_mm_for_euclid_dist"
    near = (-torch.cdist(server.models[devices], server.models, compute_mode=how).square() / settings.sigma).exp()
    return torch.where(others, _alpha(settings, len(server.models)) / settings.sigma * near, 0.0)


def cosine(settings: Settings, server: Server, devices: Tensor, others: Tensor) -> Tensor:
    """xi_ij = (1 - self_weight) softmax_j(scale cos(W_i, W_j))."""
    own = 1 / len(server.models) if settings.self_weight == AUTO else float(settings.self_weight)
    norms = server.models.norm(dim=-1)
    angles = server.models[devices] @ server.models.T / (norms[devices, None] * norms)
    shares = torch.softmax(torch.where(others, settings.scale * angles, -torch.inf), -1)
    return (1 - own) * torch.where(others.any(-1, keepdim=True), shares, 0.0)


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Device) -> Local:
    """w = u_i."""
    models = stacked(method, hyper, broadcast.u)
    return Local(models, tuple(map(torch.clone, models)), hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta (g(w; B) + (lam/alpha) (w - u_i))."""
    costs = descend_labelled_towards(method, local.models, hyper.eta, samples, hyper.pull, local.start)
    return local._replace(costs=local.costs + costs)


def costs(local: Local) -> Tensor:
    """l, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, _device: Device, local: Local, _steps: Tensor
) -> tuple[Device, Upload]:
    """w is kept, whatever becomes of the upload; w - u_i is sent."""
    w = model_of(method, hyper, local.models, 0)
    return Device(w), Upload(w - broadcast.u)


def receive(method: Method, server: Server, devices: Tensor, uploads: Upload, omega: Tensor) -> Server:
    """W_i = u_i + what device i sent, for every counted upload."""
    models, counted, weights = (t.clone() for t in server)
    models[devices] = broadcast_each(method, server, devices).u + uploads.delta
    counted[devices], weights[devices] = 1.0, omega
    return Server(models, counted, weights)


def general_model(_: Method, server: Server) -> Tensor:
    """sum_S omega_j W_j / sum_S omega_j, for reports alone; theta^0 while nobody was counted."""
    total = server.omega.sum()
    weights = torch.where(total > 0, server.omega / total.clamp_min(1e-300), 1 / max(1, len(server.omega)))
    return weights @ server.models


def received_model(_: Method, _broadcast: Broadcast) -> None:
    """The cloud model answers for nobody."""


def not_deployable(method: Method) -> str:
    """Devices join one by one, and alpha may not be larger than sigma / (N - 1)."""
    given = isinstance(method.rules, Settings) and {method.rules.alpha, method.rules.lam} != {AUTO}
    return (
        "how many devices there will be is not known; leave algorithm.alpha and algorithm.lam at auto" if given else ""
    )


def own_model(_method: Method, _hyper: Hyper, device: Device, _general: Tensor | None) -> Tensor:
    """w_i."""
    return device.w
