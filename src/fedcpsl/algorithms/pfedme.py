"""pFedMe (Dinh et al., 2020): each device's own model is the best within reach of the one for all."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Traits
from fedcpsl.averaging import Broadcast, Server, Sum, Upload, descend, descend_labelled_towards, model_of, stacked
from fedcpsl.engine import Leaves, differences
from fedcpsl.errors import InputError
from fedcpsl.problem import Samples
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, real, text, whole

VARIANTS = {"pfedme": Traits(unlabelled=False, personal=True)}
RECORDED = {"personal": "device.p"}
ETA_LC = 0.09  # the authors', for their lam


@dataclass(frozen=True)
class Settings:
    """pFedMe's own."""

    name: str = text("pfedme", "the algorithm")
    eta: float | str = real(AUTO, "step size of the global model", 0, open_ends="[", also=(AUTO,))
    eta_lc: float | str = real(
        AUTO, "step size of a device's personal model; auto: 0.09", 0, open_ends="[", also=(AUTO,)
    )
    lam: float = real(
        15.0, "weight of the proximal term that pulls a personal model towards the global one", 0, open_ends="["
    )
    K: int = whole(5, "steps of the personal model in each local step", 1)
    eta_g: float = real(1.0, "step size of the server", 0, open_ends="[")


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    eta_lc: Tensor
    lam: Tensor


class Device(NamedTuple):
    """What never leaves the device."""

    p: Tensor  # [..., parameters]: its own model


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each: w
    own: Leaves  # the same: p
    costs: Tensor  # [..., 1]


alike, init_server, broadcast = averaging.alike, averaging.init_server, averaging.broadcast
commit, contribution, admit = averaging.commit, averaging.contribution, averaging.admit
reweighted, late = averaging.reweighted, averaging.late
general_model, received_model, predict = averaging.general_model, averaging.received_model, averaging.predict_own


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Hashable]:
    """K gradients in each local step, which runs that go side by side have in common."""
    return variant._replace(gradients_per_step=settings.K), settings


def decided(settings: Settings, _: Method, eta: float) -> Settings:
    return replace(settings, eta=eta, eta_lc=ETA_LC if settings.eta_lc == AUTO else settings.eta_lc)


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    """Refuses step sizes with which the pull overshoots."""
    eta_lc = ETA_LC if settings.eta_lc == AUTO else settings.eta_lc
    for name, size in (("eta", settings.eta), ("eta_lc", eta_lc)):
        if float(size) * settings.lam >= 2:
            raise InputError(
                f"algorithm.{name} = {float(size):g}: with lam = {settings.lam:g} its steps overshoot; give less than "
                f"2 / lam = {2 / settings.lam:g}"
            )
    return {"eta": settings.eta, "eta_lc": eta_lc, "lam": settings.lam}


def init_device(_: Method, broadcast: Broadcast) -> Device:
    """p_i = the theta first received."""
    return Device(broadcast.theta.clone())


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Device) -> Local:
    """w = p = theta^r."""
    models, own = (stacked(method, hyper, broadcast.theta) for _ in range(2))
    return Local(models, own, hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """K times p <- p - eta_lc (g(p; B) + lam (p - w)), then w <- w - eta lam (w - p)."""
    total = torch.zeros_like(local.costs)
    for _ in range(_rules(method).K):
        inner = descend_labelled_towards(method, local.own, hyper.eta_lc, samples, hyper.lam, local.models)
        total = total + inner
    descend(local.models, (hyper.eta * hyper.lam)[..., None], differences(local.models, local.own))
    return local._replace(costs=local.costs + total / _rules(method).K)


def _rules(method: Method) -> Settings:
    assert isinstance(method.rules, Settings)
    return method.rules


def costs(local: Local) -> Tensor:
    """l(p), the mean over the K steps, summed over the local steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, _device: Device, local: Local, _steps: Tensor
) -> tuple[Device, Upload]:
    """p is kept, whatever becomes of the upload; w - theta^r is sent."""
    return Device(model_of(method, hyper, local.own, 0)), Upload(
        model_of(method, hyper, local.models, 0) - broadcast.theta
    )


def apply(method: Method, server: Server, total: Sum, devices: int) -> Server:
    """theta <- theta + eta_g (N/m) sum_A omega_i (w_i - theta)."""
    return server._replace(theta=server.theta + _rules(method).eta_g * (devices / total.counted) * total.update)


def own_model(_method: Method, _hyper: Hyper, device: Device, _general: Tensor | None) -> Tensor:
    """p_i."""
    return device.p
