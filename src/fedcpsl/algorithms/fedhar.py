"""FedHAR, semi-supervised: gradients are averaged, not models, and consecutive windows should get alike outputs.

Devices take no local steps: they send the mean gradient of the loss on their labels and that of the temporal
variation of their unlabelled windows, both at theta^r, and the server takes a step of Adam. Personal rounds go on with
Adam on the device.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Traits
from fedcpsl.averaging import (
    Broadcast,
    adam_direction,
    adam_moments,
    add_labelled_gradient,
    descend,
    model_of,
    per_slot,
    stacked,
)
from fedcpsl.engine import Leaves
from fedcpsl.errors import InputError
from fedcpsl.problem import Samples
from fedcpsl.schedule import Draw, Sizes
from fedcpsl.settings import real, text, whole

VARIANTS = {"fedhar": Traits(unlabelled=True, personal=False, gradients_per_step=2)}
RUN = "run"
BETAS = (0.9, 0.99)  # of Adam


@dataclass(frozen=True)
class Settings:
    """FedHAR's own."""

    name: str = text("fedhar", "the algorithm")
    eta: float | str = real(0.001, "step size of the server's Adam", 0, open_ends="[")
    T: int = whole(24, "length of a run of consecutive windows", 2)
    s_max: float = real(0.2, "final weight of the temporal gradient", 0, 1)
    R_s: int = whole(400, "rounds until the temporal gradient has its final weight", 1)
    clip_l: float = real(100.0, "maximum norm of a minibatch's gradient on labels (clipping)", 0, open_ends="[")
    clip_u: float = real(1.0, "maximum norm of a run's temporal gradient (clipping)", 0, open_ends="[")
    weight_decay: float = real(0.0005, "weight decay: this times theta is added to the gradient", 0)
    eta_lc: float = real(0.0001, "step size of Adam on a device, in personal rounds", 0, open_ends="[")
    near: float = real(0.1, "weight of the temporal gradient in personal rounds", 0)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    clip_l: Tensor
    clip_u: Tensor
    weight_decay: Tensor
    eta: Tensor  # on a device, in personal rounds
    near: Tensor


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]
    m: Tensor  # the moments of Adam
    v: Tensor
    updates: Tensor  # that it has made
    rounds: Tensor  # so far


class Device(NamedTuple):
    """What never leaves the device: nothing before personal rounds."""

    p: Tensor  # [..., parameters]
    m: Tensor
    v: Tensor
    updates: Tensor  # [...]


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each: theta^r, or p
    totals: tuple[Leaves, Leaves]  # the same: gL and gU added up; in personal rounds the moments of Adam
    sent: Tensor  # [..., 2]: 1 where there are labels, and where there are runs
    updates: Tensor  # [...]
    costs: Tensor  # [..., 1]


class Upload(NamedTuple):
    """Device to server."""

    gradients: tuple[Tensor, Tensor]  # [..., parameters] each: gL_i and gU_i
    sent: Tensor  # [..., 2], true or false: whether there are labels, and whether there are runs


class Sum(NamedTuple):
    """What the counted uploads of a round add up to."""

    gradients: tuple[Tensor, Tensor]
    sent: Tensor  # [2]: how many sent each


decided, alike, commit, admit = averaging.decided, averaging.alike, averaging.commit, averaging.admit
broadcast, general_model, received_model = averaging.broadcast, averaging.general_model, averaging.received_model
predict = averaging.predict_own


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Hashable]:
    """Runs of T windows are drawn."""
    return variant._replace(draws=(Draw(RUN, of="runs", size=settings.T),)), settings


def phases(method: Method, _settings: Settings, *, two_phase: bool) -> tuple[Method, Method]:
    """In personal rounds each device goes on from theta with Adam of its own."""
    if two_phase:
        raise InputError("work.two_phase = true: FedHAR labels nothing between its phases; give false")
    own = method.traits._replace(personal=True)
    return method, method._replace(traits=own, personal_round=True)


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {
        "clip_l": settings.clip_l,
        "clip_u": settings.clip_u,
        "weight_decay": settings.weight_decay,
        "eta": settings.eta_lc,
        "near": settings.near,
    }


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made; Adam has seen nothing."""
    theta = method.network.initial.clone()
    none = theta.new_zeros(())
    return Server(theta, torch.zeros_like(theta), torch.zeros_like(theta), none, none.clone())


def init_device(method: Method, broadcast: Broadcast) -> Device:
    """Nothing; room for p and its Adam where there will be personal rounds."""
    p = broadcast.theta.clone() if method.personal_round else broadcast.theta[:0]
    return Device(p, torch.zeros_like(p), torch.zeros_like(p), broadcast.theta.new_zeros(()))


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """w = theta^r, no gradient yet; in personal rounds p and its Adam as the device kept them, theta at first."""
    nothing = hyper.eta.new_zeros(*hyper.eta.shape, 2)
    if method.personal_round:
        models = stacked(method, hyper, tuned_model(device, broadcast.theta))
        first, second = (stacked(method, hyper, t) for t in (device.m, device.v))
    else:
        models = stacked(method, hyper, broadcast.theta)
        first, second = (tuple(map(torch.zeros_like, models)) for _ in range(2))
    return Local(models, (first, second), nothing, device.updates.expand(hyper.eta.shape), nothing[..., :1])


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """gL <- gL + clip(g(theta^r; B), clip_l) and gU <- gU + clip(grad V, clip_u); or a step of Adam on p."""
    run = samples.extra[RUN]
    there = torch.stack([samples.labelled.sum(-1) > 0, run.unlabelled.sum(-1) > 0], -1).to(hyper.eta)
    of_labels, of_run = (tuple(map(torch.zeros_like, local.models)) for _ in range(2))
    costs = add_labelled_gradient(method, of_labels, local.models, samples)
    variation = partial(temporal_variation, there[..., 1])
    method.network.add_gradient(of_run, local.models, *run.inputs, variation, of_outputs=True)
    both = clip(of_labels, hyper.clip_l), clip(of_run, hyper.clip_u)
    local = local._replace(sent=torch.maximum(local.sent, there), costs=local.costs + costs)
    if method.personal_round:
        return tuned(hyper, local, *both)
    first, second = (
        tuple(a + b for a, b in zip(total, new, strict=True)) for total, new in zip(local.totals, both, strict=True)
    )
    return local._replace(totals=(first, second))


def temporal_variation(there: Tensor, outputs: Tensor) -> Tensor:
    """V = mean_{k, c} (o_{k+1} - o_k)^2, over neighbours and outputs before softmax, [..., models, windows, classes].

    It is zero where a device has no run; `there` is 1 for the others.
    """
    return outputs.diff(dim=-2).square().mean((-2, -1)) * there[..., None]


def clip(gradient: Leaves, most: Tensor) -> Leaves:
    """clip(v, c) = v min(1, c / |v|), the norm being over all parameters of a slot."""
    lead = most.dim()
    squares = torch.stack([leaf.square().flatten(lead).sum(-1) for leaf in gradient])
    factor = (most / squares.sum(0).sqrt()).clamp_max(1)
    return tuple(per_slot(factor, leaf) * leaf for leaf in gradient)


def tuned(hyper: Hyper, local: Local, of_labels: Leaves, of_run: Leaves) -> Local:
    """p <- p - eta_lc Adam(gL + near gU + weight_decay p); a device without labels has gU alone."""
    has_labels = local.sent[..., 0]
    near = torch.where(has_labels > 0, hyper.near, 1.0)
    each = zip(local.models, of_labels, of_run, strict=True)
    whole = tuple(a + per_slot(near, b) * b + per_slot(hyper.weight_decay, p) * p for p, a, b in each)
    updates, lead = local.updates + 1, hyper.eta.dim()
    pairs = [adam_moments(m, v, g, BETAS) for m, v, g in zip(*local.totals, whole, strict=True)]
    counts = [updates.reshape(updates.shape + (1,) * (leaf.dim() - lead)) for leaf in whole]
    steps = tuple(adam_direction(m, v, t, BETAS) for (m, v), t in zip(pairs, counts, strict=True))
    descend(local.models, hyper.eta[..., None], steps)
    first, second = tuple(m for m, _ in pairs), tuple(v for _, v in pairs)
    return local._replace(totals=(first, second), updates=updates)


def costs(local: Local) -> Tensor:
    """l, summed over the minibatches so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, _broadcast: Broadcast, device: Device, local: Local, steps: Tensor
) -> tuple[Device, Upload]:
    """gL_i and gU_i, the means over all minibatches, are sent; in personal rounds p is kept and nothing sent."""
    first, second = (model_of(method, hyper, total, 0) for total in local.totals)
    if method.personal_round:
        kept = Device(model_of(method, hyper, local.models, 0), first, second, local.updates)
        return kept, Upload((first[..., :0], second[..., :0]), local.sent[..., :0] > 0)
    count = steps[..., None].to(first.dtype)
    return device, Upload((first / count, second / count), local.sent > 0)


def contribution(_: Method, _hyper: Hyper, upload: Upload, _weight: Tensor) -> Sum:
    """gL_i and gU_i: plain means here, whatever the weight; what a device did not send is zero."""
    sent = upload.sent.to(upload.gradients[0])
    labels, runs = (g * there[..., None] for g, there in zip(upload.gradients, sent.unbind(-1), strict=True))
    return Sum((labels, runs), sent)


def apply(method: Method, server: Server, total: Sum, _devices: int) -> Server:
    """theta <- theta - eta Adam(G + weight_decay theta); nothing changes without a G."""
    settings = method.rules
    assert isinstance(settings, Settings)
    share = temporal_weight(settings, server.rounds)
    gradient, came = joint_gradient(total, share)
    m, v = adam_moments(server.m, server.v, gradient + settings.weight_decay * server.theta, BETAS)
    updates = server.updates + 1
    theta = server.theta - float(settings.eta) * adam_direction(m, v, updates, BETAS)
    changed = Server(theta, m, v, updates, server.rounds)
    kept = (torch.where(came, new, old) for new, old in zip(changed, server, strict=True))
    return Server(*kept)


def round_over(server: Server) -> Server:
    """r <- r + 1, whatever was counted."""
    return server._replace(rounds=server.rounds + 1)


def temporal_weight(settings: Settings, rounds: Tensor) -> Tensor:
    """s_r = s_max min(1, r / R_s)."""
    return settings.s_max * (rounds / settings.R_s).clamp_max(1)


def joint_gradient(total: Sum, share: Tensor) -> tuple[Tensor, Tensor]:
    """G = (1 - s_r) gL + s_r gU, or the only one that came, and whether there is one: no gU alone while s_r = 0."""
    labels, runs = (g / n.clamp_min(1) for g, n in zip(total.gradients, total.sent.unbind(-1), strict=True))
    has_labels, has_runs = (total.sent > 0).unbind(-1)
    weight = torch.where(has_runs, torch.where(has_labels, share, 1.0), 0.0)
    return (1 - weight) * labels + weight * runs, has_labels | (has_runs & (share > 0))


def tuned_model(device: Device, general: Tensor) -> Tensor:
    """p, and theta before a device has tuned it."""
    return torch.where(device.updates[..., None] > 0, device.p, general)


def own_model(method: Method, _hyper: Hyper, device: Device, general: Tensor | None) -> Tensor | None:
    """p after personal rounds; without them no model of its own."""
    return tuned_model(device, general) if method.personal_round and general is not None else None


def update_rate(hyper: Hyper, upload: Upload) -> Tensor:
    """max(1, |gL_i| / clip_l, |gU_i| / clip_u): 1 for every device that clips as it should, whatever it sends."""
    norms = zip(upload.gradients, (hyper.clip_l, hyper.clip_u), strict=True)
    return torch.stack([torch.ones_like(hyper.clip_l), *(g.norm() / most for g, most in norms)]).amax(0)
