"""AFL (Mohri et al., 2019): the model that is best for the worst mixture of devices, whose weights the server learns.

With one local step of every device in every round this is the paper's algorithm; with more, AFL with local steps.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.averaging import Broadcast, Nothing, descend_labelled, model_of, stacked
from fedcpsl.engine import Leaves
from fedcpsl.problem import LabelledCosts, Samples, project_to_simplex
from fedcpsl.schedule import Draw, Sizes
from fedcpsl.settings import AUTO, choice, real, text, whole

VARIANTS = {"afl": Traits(unlabelled=False, personal=False)}
RECORDED = {"lambda": "server.weights"}


@dataclass(frozen=True)
class Settings:
    """AFL's own."""

    name: str = text("afl", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    eta_lambda: float = real(0.01, "step size of the devices' weights; 0: they stay constant", 0)
    lambda_init: str = choice("uniform", "weights at the start: equal, or by labelled samples", "uniform", "samples")
    batch_p: int = whole(32, "labelled samples of a device on which its loss is computed", 1)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]
    weights: Tensor  # [devices that have joined]: lambda
    devices: Tensor  # N


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each
    costs: Tensor  # [..., 1]
    loss: Tensor  # [...]: l_i


class Upload(NamedTuple):
    """Device to server."""

    delta: Tensor  # [..., parameters]
    loss: Tensor  # [...]: l_i


decided, alike, commit = averaging.decided, averaging.alike, averaging.commit
init_device, broadcast = averaging.init_device, averaging.broadcast
general_model, received_model = averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_general


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Hashable]:
    """A device is asked for its loss on `batch_p` samples before its steps."""
    return variant._replace(draws=(Draw("probe", size=settings.batch_p, per_visit=True),)), settings


def rules_of(method: Method) -> Settings:
    assert isinstance(method.rules, Settings)
    return method.rules


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {"eta": settings.eta}


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made; lambda has nobody yet."""
    theta = method.network.initial.clone()
    return Server(theta, theta.new_zeros(0), theta.new_zeros(()))


def admit(method: Method, server: Server, before: Roster, after: Roster) -> Server:
    """lambda of those who have joined, and N."""
    weights = weights_of_roster(rules_of(method).lambda_init, server.weights, before, after)
    return server._replace(weights=weights, devices=server.theta.new_tensor(after.devices))


def weights_of_roster(rule: str, weights: Tensor, before: Roster, after: Roster) -> Tensor:
    """lambda as it begins where nobody had joined before, else with those who joined and without who was forgotten."""
    labelled = weights.new_tensor(list(after.labelled))
    return weights_after_joining(weights, labelled) if before.devices else starting_weights(rule, labelled)


def starting_weights(rule: str, labelled: Tensor) -> Tensor:
    """lambda_i = 1 / (number of devices with labels) where n_i > 0, else 0; n_i / n where the rule is `samples`."""
    weights = labelled if rule == "samples" else (labelled > 0).to(labelled)
    return weights / weights.sum().clamp_min(1)


def weights_after_joining(weights: Tensor, labelled: Tensor) -> Tensor:
    """lambda_j = 1/M of a joiner with labels, M devices with labels now, the rest of lambda times 1 - 1/M.

    So for one after another, which is M_old/M for several. Whoever has no labels (any more) has 0.
    """
    has_labels = (labelled > 0).to(weights)
    old, new = has_labels[: len(weights)], has_labels[len(weights) :]
    kept = weights * old
    total = kept.sum()
    shares = torch.where(total > 0, kept / torch.where(total > 0, total, 1.0), old / old.sum().clamp_min(1))
    return torch.cat([old.sum() * shares, new]) / has_labels.sum().clamp_min(1)


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Nothing) -> Local:
    """w = theta^r."""
    zero = hyper.eta.new_zeros(hyper.eta.shape)
    return Local(stacked(method, hyper, broadcast.theta), zero[..., None].clone(), zero)


def use_draws(method: Method, hyper: Hyper, broadcast: Broadcast, local: Local, drawn: Mapping[str, Samples]) -> Local:
    """l_i = l(theta^r; probe), the loss of the broadcast model."""
    return local._replace(loss=probe_loss(method, hyper, broadcast.theta, drawn["probe"]))


def probe_loss(method: Method, hyper: Hyper, theta: Tensor, samples: Samples) -> Tensor:
    """l(theta; probe), in evaluation mode, [...]."""
    log_h = method.network.log_probabilities(theta.expand(*hyper.eta.shape, -1), samples.x)
    return LabelledCosts(samples)(log_h.unsqueeze(-3))[..., 0]


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta g(w; B)."""
    costs = descend_labelled(method, local.models, hyper.eta, samples)
    return local._replace(costs=local.costs + costs)


def costs(local: Local) -> Tensor:
    """l, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Nothing, local: Local, _steps: Tensor
) -> tuple[Nothing, Upload]:
    """w - theta^r and l_i are sent."""
    return device, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta, local.loss)


def receive(method: Method, server: Server, devices: Tensor, uploads: Upload, _omega: Tensor) -> Server:
    """theta <- theta + (N/m) sum_A lambda_i (w_i - theta), and lambda by the losses; both from the old values."""
    share = server.devices / len(devices)
    theta = server.theta + share * (server.weights[devices] @ uploads.delta)
    weights = ascended(server.weights, rules_of(method).eta_lambda * share, devices, uploads.loss)
    return server._replace(theta=theta, weights=weights)


def ascended(weights: Tensor, step_size: Tensor, devices: Tensor, losses: Tensor) -> Tensor:
    """lambda <- Proj(lambda + s sum_i l_i e_i), Proj the Euclidean projection onto the simplex."""
    return project_to_simplex(weights.index_add(0, devices, step_size * losses))
