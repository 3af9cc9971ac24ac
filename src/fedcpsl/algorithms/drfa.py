"""DRFA (Deng et al., 2020): AFL's problem with many local steps; devices are drawn by the weights that it learns.

The weights follow losses at a random moment of the round, for which the server asks some devices once more.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.algorithms.afl import Hyper, ascended, probe_loss, weights_of_roster
from fedcpsl.averaging import Broadcast, Nothing, descend_labelled, model_of, stacked
from fedcpsl.engine import Leaves, where_slots
from fedcpsl.problem import Samples
from fedcpsl.schedule import Draw, Sizes
from fedcpsl.settings import AUTO, choice, real, text, whole

VARIANTS = {"drfa": Traits(unlabelled=False, personal=False)}
RECORDED = {"lambda": "server.weights"}


@dataclass(frozen=True)
class Settings:
    """DRFA's own."""

    name: str = text("drfa", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    eta_lambda: float = real(0.01, "step size of the devices' weights; 0: they stay constant", 0)
    lambda_init: str = choice("uniform", "weights at the start: equal, or by labelled samples", "uniform", "samples")
    batch_p: int = whole(32, "labelled samples of a device on which its loss is computed", 1)


class Server(NamedTuple):
    """What the server keeps; the last two are for the second exchange of a round."""

    theta: Tensor  # [parameters]
    weights: Tensor  # [devices that have joined]: lambda
    devices: Tensor  # N
    snapshot: Tensor  # [parameters]: theta'
    steps: Tensor  # tau


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each
    snapshot: Leaves  # the same: z, once it was taken
    steps: Tensor  # [...]: made so far
    taken_after: Tensor  # [...]: t'_i
    costs: Tensor  # [..., 1]


class Upload(NamedTuple):
    """Device to server."""

    delta: Tensor  # [..., parameters]
    snapshot: Tensor  # [..., parameters]: z - theta^r
    steps: Tensor  # [...]


class Sum(NamedTuple):
    """What the counted uploads of a round add up to."""

    update: Tensor  # [parameters]
    snapshot: Tensor  # [parameters]
    steps: Tensor
    counted: Tensor  # m_c


class Answer(NamedTuple):
    """Device to server in the second exchange."""

    loss: Tensor  # [...]: l_i


decided, alike, commit = averaging.decided, averaging.alike, averaging.commit
init_device, broadcast = averaging.init_device, averaging.broadcast
general_model, received_model = averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_general


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Hashable]:
    """A step of each visit is drawn, and `batch_p` samples for the second exchange."""
    moment = Draw("snapshot", of="step", per_visit=True)
    probe = Draw("probe", size=settings.batch_p, per_visit=True)
    return variant._replace(draws=(moment,), probe=probe), settings


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {"eta": settings.eta}


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made; lambda has nobody yet."""
    theta = method.network.initial
    return Server(theta.clone(), theta.new_zeros(0), theta.new_zeros(()), theta.clone(), theta.new_zeros(()))


def admit(method: Method, server: Server, before: Roster, after: Roster) -> Server:
    """lambda of those who have joined, as AFL has it."""
    weights = weights_of_roster(rules_of(method).lambda_init, server.weights, before, after)
    return server._replace(weights=weights, devices=server.theta.new_tensor(after.devices))


def rules_of(method: Method) -> Settings:
    assert isinstance(method.rules, Settings)
    return method.rules


def draw_weights(_: Method, server: Server) -> Tensor:
    """lambda."""
    return server.weights


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Nothing) -> Local:
    """w = theta^r."""
    models, none = stacked(method, hyper, broadcast.theta), hyper.eta.new_zeros(hyper.eta.shape, dtype=torch.int64)
    snapshot = tuple(map(torch.clone, models))
    return Local(models, snapshot, none, none.clone(), hyper.eta.new_zeros(*hyper.eta.shape, 1))


def use_draws(
    _method: Method, _hyper: Hyper, _broadcast: Broadcast, local: Local, drawn: Mapping[str, Tensor]
) -> Local:
    """t'_i = ceil(s Q_i), with one s in (0, 1] for all devices, as the schedule has drawn it."""
    return local._replace(taken_after=drawn["snapshot"].to(local.taken_after))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta g(w; B), and z = w after t'_i steps."""
    costs = descend_labelled(method, local.models, hyper.eta, samples)
    steps = local.steps + 1
    snapshot = where_slots(steps == local.taken_after, local.models, local.snapshot)
    return local._replace(snapshot=snapshot, steps=steps, costs=local.costs + costs)


def costs(local: Local) -> Tensor:
    """l, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Nothing, local: Local, steps: Tensor
) -> tuple[Nothing, Upload]:
    """w - theta^r and z - theta^r are sent; z is w where a device had to stop before t'_i."""
    snapshot = where_slots(steps < local.taken_after, local.models, local.snapshot)
    delta, z = (model_of(method, hyper, models, 0) - broadcast.theta for models in (local.models, snapshot))
    return device, Upload(delta, z, steps)


def contribution(_: Method, _hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
    """w_i - theta^r and z_i - theta^r: plain means here, whatever the weight, as often as a device was drawn."""
    return Sum(upload.delta, upload.snapshot, upload.steps.to(weight.dtype), torch.ones_like(weight))


def apply(_: Method, server: Server, total: Sum, _devices: int) -> Server:
    """theta <- theta + sum_A (k_i / m_c) (w_i - theta), and theta' likewise of z_i; tau = sum_A k_i Q_i / m_c."""
    theta, snapshot = (server.theta + part / total.counted for part in (total.update, total.snapshot))
    return server._replace(theta=theta, snapshot=snapshot, steps=total.steps / total.counted)


def probe_broadcast(_: Method, server: Server) -> Broadcast:
    """theta'."""
    return Broadcast(server.snapshot)


def probe_upload(method: Method, hyper: Hyper, broadcast: Broadcast, samples: Samples) -> Answer:
    """l_i = l(theta'; probe)."""
    return Answer(probe_loss(method, hyper, broadcast.theta, samples))


def probe_receive(method: Method, server: Server, devices: Tensor, uploads: Answer) -> Server:
    """lambda <- Proj(lambda + tau eta_lambda (N/M) sum l_i e_i), M the number of answers."""
    step_size = server.steps * rules_of(method).eta_lambda * server.devices / len(devices)
    return server._replace(weights=ascended(server.weights, step_size, devices, uploads.loss))
