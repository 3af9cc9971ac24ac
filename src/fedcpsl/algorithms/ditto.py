"""Ditto (Li et al., 2021): FedAvg's model for all, and on each device one of its own that is pulled towards it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Traits
from fedcpsl.averaging import Broadcast, Upload, descend, model_of, stacked
from fedcpsl.engine import Leaves, differences
from fedcpsl.errors import InputError
from fedcpsl.problem import LabelledCosts, Samples
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, real, text

VARIANTS = {"ditto": Traits(unlabelled=False, personal=True, models=2, gradients_per_step=2)}
RECORDED = {"personal": "device.v"}


@dataclass(frozen=True)
class Settings:
    """Ditto's own."""

    name: str = text("ditto", "the algorithm")
    eta: float | str = real(AUTO, "step size of the global model", 0, open_ends="[", also=(AUTO,))
    eta_lc: float | str = real(
        AUTO, "step size of a device's personal model; auto: eta", 0, open_ends="[", also=(AUTO,)
    )
    lam: float = real(1.0, "weight of the proximal term that pulls a personal model towards the global one; 0: none", 0)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    eta_lc: Tensor
    lam: Tensor


class Device(NamedTuple):
    """What never leaves the device."""

    v: Tensor  # [..., parameters]: its own model


class Local(NamedTuple):
    """One device's working state in a round: w, then v; v alone in a personal round."""

    models: Leaves  # [..., 1 or 2, *shape] each
    start: Leaves  # [..., 1, *shape] each: theta^r
    costs: Tensor  # [..., 1 or 2]


resolve, alike, init_server, broadcast, commit = (
    averaging.resolve,
    averaging.alike,
    averaging.init_server,
    averaging.broadcast,
    averaging.commit,
)
contribution, apply, admit, general_model, received_model, predict = (
    averaging.contribution,
    averaging.apply,
    averaging.admit,
    averaging.general_model,
    averaging.received_model,
    averaging.predict_own,
)
reweighted, late = averaging.reweighted, averaging.late


def decided(settings: Settings, _: Method, eta: float) -> Settings:
    return replace(settings, eta=eta, eta_lc=eta if settings.eta_lc == AUTO else settings.eta_lc)


def phases(method: Method, _settings: Settings, *, two_phase: bool) -> tuple[Method, Method]:
    """Personal rounds go on with v alone."""
    if two_phase:
        raise InputError("work.two_phase = true: Ditto trains its own models in every round; give false")
    alone = method.traits._replace(models=1, gradients_per_step=1)
    return method, method._replace(traits=alone, personal_round=True)


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    eta_lc = settings.eta if settings.eta_lc == AUTO else settings.eta_lc
    return {"eta": settings.eta, "eta_lc": eta_lc, "lam": settings.lam}


def init_device(_: Method, broadcast: Broadcast) -> Device:
    """v_i = the theta first received."""
    return Device(broadcast.theta.clone())


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """w = theta^r; v as the device kept it."""
    trained = [device.v] if method.personal_round else [broadcast.theta, device.v]
    start = stacked(method, hyper, broadcast.theta)
    return Local(stacked(method, hyper, *trained), start, hyper.eta.new_zeros(*hyper.eta.shape, len(trained)))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta g(w; B) and v <- v - eta_lc (g(v; B) + lam (v - theta^r)), on the same minibatch."""
    v = own_leaves(local.models, hyper.eta.dim())
    away = differences(v, local.start)
    etas = torch.stack([hyper.eta_lc] if method.personal_round else [hyper.eta, hyper.eta_lc], -1)
    costs = method.network.descend(local.models, etas, *samples.inputs, LabelledCosts(samples))
    descend(v, (hyper.eta_lc * hyper.lam)[..., None], away)
    return local._replace(costs=local.costs + costs)


def own_leaves(models: Leaves, lead: int) -> Leaves:
    """v, the last of the models, [..., 1, *shape] each: views."""
    return tuple(leaf.narrow(lead, leaf.shape[lead] - 1, 1) for leaf in models)


def costs(local: Local) -> Tensor:
    """l(w) and l(v), or l(v), summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, _device: Device, local: Local, _steps: Tensor
) -> tuple[Device, Upload]:
    """v is kept; w - theta^r is sent."""
    kept = Device(model_of(method, hyper, local.models, -1))
    if method.personal_round:
        return kept, Upload(kept.v[..., :0])
    return kept, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)


def own_model(_method: Method, _hyper: Hyper, device: Device, _general: Tensor | None) -> Tensor:
    """v_i."""
    return device.v
