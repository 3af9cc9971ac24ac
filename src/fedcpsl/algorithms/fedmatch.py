"""FedMatch (Jeong et al., 2021), labels at the devices: theta = sigma + psi, with helper models of similar devices.

sigma learns from labels and psi from unlabelled samples. Now and then a device is sent the last models of the devices
that are most like it; they vote for its pseudo-labels, and its predictions should agree with theirs.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.averaging import Nothing, add_labelled_gradient, descend, model_of, per_slot, stacked
from fedcpsl.engine import Leaves
from fedcpsl.problem import Samples
from fedcpsl.schedule import Sizes, stream
from fedcpsl.settings import AUTO, choice, real, text, whole
from fedcpsl.views import CHOICES

VARIANTS = {"fedmatch": Traits(unlabelled=True, personal=False, gradients_per_step=3)}


@dataclass(frozen=True)
class Settings:
    """FedMatch's own."""

    name: str = text("fedmatch", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    lam_s: float = real(10.0, "weight of the loss on labels, for sigma", 0)
    lam_a: float = real(0.01, "weight of pseudo-labels on strong views, for psi", 0)
    lam_i: float = real(0.01, "weight of agreement with the helpers, for psi", 0)
    lam_1: float = real(1e-4, "weight of the L1 penalty on psi", 0)
    lam_2: float = real(10.0, "weight of the squared L2 distance of psi from sigma", 0)
    H: int = whole(2, "maximum number of helpers", 0)
    tau: float = real(0.75, "how confident a prediction must be to be learnt from", 0, 1)
    helper_every: int = whole(10, "period, in rounds, at which helpers are sent", 1)
    psi_factor: float = real(0.2, "share of the initial weights that psi starts with; sigma has the rest", 0, 1)
    views: str = choice("auto", "strong views of samples; auto: by the shape of inputs", *CHOICES)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    lam_s: Tensor
    lam_a: Tensor
    lam_i: Tensor
    lam_1: Tensor
    lam_2: Tensor
    tau: Tensor


class Server(NamedTuple):
    """What the server keeps."""

    sigma: Tensor  # [parameters]
    psi: Tensor
    models: Tensor  # [devices, parameters]: M_j, the last counted sum of each
    embeddings: Tensor  # [devices, classes]: e_j
    counted: Tensor  # [devices]: 1 where there is one
    noise: Tensor  # [1, *shape of an input]
    rounds: Tensor  # so far
    devices: Tensor  # N: how many have joined


class Broadcast(NamedTuple):
    """Server to one device."""

    sigma: Tensor  # [..., parameters]
    psi: Tensor
    helpers: Tensor  # [..., helpers, parameters]
    there: Tensor  # [..., helpers]: 1 for those that are sent


class Local(NamedTuple):
    """One device's working state in a round."""

    sigma: Leaves  # [..., 1, *shape] each
    psi: Leaves
    helpers: Leaves  # [..., helpers, *shape] each
    there: Tensor  # [..., helpers]
    costs: Tensor  # [..., 1]


class Upload(NamedTuple):
    """Device to server."""

    sigma: Tensor  # [..., parameters]: what was added to it
    psi: Tensor


decided, init_device, commit = averaging.decided, averaging.init_device, averaging.commit
own_model, predict = averaging.no_own_model, averaging.predict_general


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Hashable]:
    """Only strong views are made; the rest are the samples themselves."""
    return variant._replace(views=f"strong {settings.views}"), settings


def rules_of(method: Method) -> Settings:
    assert isinstance(method.rules, Settings)
    return method.rules


def alike(method: Method) -> Hashable:
    """Runs may go side by side where a device has as many helpers."""
    return method.traits, rules_of(method).H


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {name: getattr(settings, name) for name in Hyper._fields}


def init_server(method: Method, devices: int) -> Server:
    """psi^0 = f theta^0, sigma^0 = (1 - f) theta^0; nobody was counted. The noise is the same in every run."""
    theta, share = method.network.initial, rules_of(method).psi_factor
    nobody, none = theta.new_zeros(devices), theta.new_zeros(())
    noise = stream(0, "extra", crc32(b"noise")).standard_normal((1, *method.network.input_shape))
    return Server(
        sigma=(1 - share) * theta,
        psi=share * theta,
        models=theta.new_zeros(devices, len(theta)),
        embeddings=theta.new_zeros(devices, method.network.classes),
        counted=nobody,
        noise=torch.from_numpy(noise).to(theta),
        rounds=none,
        devices=none.clone(),
    )


def admit(_: Method, server: Server, _before: Roster, after: Roster) -> Server:
    """N, and places for devices that the server has none for yet."""
    new = max(0, len(after.labelled) - len(server.counted))
    kept = (torch.cat([t, t.new_zeros(new, *t.shape[1:])]) for t in (server.models, server.embeddings, server.counted))
    models, embeddings, counted = kept
    devices = server.sigma.new_tensor(after.devices)
    return server._replace(models=models, embeddings=embeddings, counted=counted, devices=devices)


def general_model(_: Method, server: Server) -> Tensor:
    """theta = sigma + psi."""
    return server.sigma + server.psi


def received_model(_: Method, broadcast: Broadcast) -> Tensor:
    """theta = sigma + psi, as a device has it."""
    return broadcast.sigma + broadcast.psi


# Helpers.


def broadcast_each(method: Method, server: Server, devices: Tensor) -> Broadcast:
    """sigma and psi; in every `helper_every`-th round, to devices that were counted before, their helpers' models."""
    settings, count = rules_of(method), len(devices)
    due = (server.rounds + 1).remainder(settings.helper_every) == 0
    which, near = nearest(server.embeddings, server.counted, devices, max(settings.H, 1))  # H = 0: a place, never taken
    there = near * (server.counted[devices, None] * due * (settings.H > 0))
    helpers = server.models[which] * there[..., None]
    return Broadcast(server.sigma.expand(count, -1), server.psi.expand(count, -1), helpers, there)


def nearest(embeddings: Tensor, counted: Tensor, devices: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` devices j != i counted before with the least |e_i - e_j|, ties to the smaller number, of some devices.

    Also 1 for each that there is, [devices, most] both.
    """
    away = torch.linalg.vector_norm(embeddings[devices, None] - embeddings, dim=-1)
    others = torch.arange(len(embeddings), device=devices.device) != devices[:, None]
    away = torch.where(others & (counted > 0), away, torch.inf)
    ordered = away.sort(dim=-1, stable=True)
    room = (0, max(0, most - len(embeddings)))  # where there are fewer devices than that
    which = torch.nn.functional.pad(ordered.indices[:, :most], room)
    return which, torch.nn.functional.pad(ordered.values[:, :most].isfinite().to(embeddings), room)


def broadcast_size(_: Method, broadcast: Broadcast) -> Tensor:
    """How many numbers each device is sent: sigma, psi and the helpers that there are."""
    return broadcast.sigma.shape[-1] * (2 + broadcast.there.sum(-1))


# A device's round.


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Nothing) -> Local:
    """sigma and psi are the server's."""
    each = broadcast.helpers.unbind(-2)
    return Local(
        stacked(method, hyper, broadcast.sigma),
        stacked(method, hyper, broadcast.psi),
        stacked(method, hyper, *each),
        broadcast.there.clone(),
        hyper.eta.new_zeros(*hyper.eta.shape, 1),
    )


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """sigma <- sigma - eta lam_s g(sigma + psi; B), then psi by `psi_gradient` with the new sigma."""
    assert samples.strong is not None
    lead = hyper.eta.dim()
    unlabelled = samples.strong.shape[lead]
    labelled = samples.x.shape[lead] - unlabelled
    of_labels, of_others = rows_of(samples, lead, 0, labelled), rows_of(samples, lead, labelled, unlabelled)

    gradient = tuple(map(torch.zeros_like, local.sigma))
    loss = add_labelled_gradient(method, gradient, both(local), of_labels)
    descend(local.sigma, (hyper.eta * hyper.lam_s)[..., None], gradient)

    gradient, phi = psi_gradient(method, hyper, local, of_others, samples.strong)
    has_any = (of_others.unlabelled > 0).any(-1).to(hyper.eta)
    descend(local.psi, (hyper.eta * has_any)[..., None], gradient)
    return local._replace(costs=local.costs + hyper.lam_s[..., None] * loss + phi)


def rows_of(samples: Samples, lead: int, first: int, count: int) -> Samples:
    """Some rows of a minibatch."""

    def some(t: Tensor) -> Tensor:
        return t.narrow(lead, first, count)

    keys = None if samples.keys is None else some(samples.keys)
    return Samples(some(samples.x), some(samples.target), some(samples.labelled), some(samples.unlabelled), keys)


def both(local: Local) -> Leaves:
    """sigma + psi, leaf by leaf."""
    return tuple(s + p for s, p in zip(local.sigma, local.psi, strict=True))


def psi_gradient(method: Method, hyper: Hyper, local: Local, samples: Samples, strong: Tensor) -> tuple[Leaves, Tensor]:
    """grad Phi + 2 lam_2 (psi - sigma) + lam_1 sign(psi), and Phi.

    Phi = lam_a mean CE(yhat, h(strong u)) + lam_i (1/H') sum_j mean KL(h(M_j; u) || h(u)), both over the samples whose
    prediction is confident, h at sigma + psi.
    """
    network, lead, models = method.network, hyper.eta.dim(), both(local)
    x = samples.x.unsqueeze(lead)
    with torch.no_grad():
        own = network.log_probabilities_at(models, x).squeeze(lead).exp()
        theirs = network.log_probabilities_at(local.helpers, x).exp()
        sure = own.amax(-1)
        selected = ((sure >= hyper.tau[..., None]) & (samples.unlabelled > 0)).to(own)
        share = selected / selected.sum(-1, keepdim=True).clamp_min(1)
        label = torch.nn.functional.one_hot(voted(own, theirs, local.there), network.classes).to(own)
        helpers = local.there.sum(-1)
        weights = local.there[..., None, None] / helpers.clamp_min(1)[..., None, None, None]
        soft = (weights * theirs).sum(-3)
        of_helpers = (hyper.lam_i * (helpers > 0))[..., None] * share
        entropy = (weights * torch.special.entr(theirs)).sum((-3, -1))
    each = samples._replace(
        x=torch.cat([samples.x, strong], lead),
        target=torch.cat([soft, label], lead),
        labelled=torch.cat([of_helpers, hyper.lam_a[..., None] * share], -1),
        keys=None if samples.keys is None else torch.cat([samples.keys, samples.keys], -1),
    )
    pairs = zip(local.psi, local.sigma, strict=True)
    gradient = tuple(
        per_slot(2 * hyper.lam_2, psi) * (psi - sigma) + per_slot(hyper.lam_1, psi) * psi.sign() for psi, sigma in pairs
    )
    phi = add_labelled_gradient(method, gradient, models, each)
    return gradient, phi - (of_helpers * entropy).sum(-1, keepdim=True)


def voted(own: Tensor, theirs: Tensor, there: Tensor) -> Tensor:
    """yhat = the class with most votes among arg max h(u) and each helper's; among tied ones the device's, or the
    smallest.

    own is [..., samples, classes], theirs [..., helpers, samples, classes], there [..., helpers].
    """
    classes, mine = own.shape[-1], own.argmax(-1)
    votes = torch.nn.functional.one_hot(theirs.argmax(-1), classes) * there[..., None, None]
    votes = votes.sum(-3) + torch.nn.functional.one_hot(mine, classes)
    is_mine = votes.gather(-1, mine[..., None])[..., 0] == votes.amax(-1)
    return torch.where(is_mine, mine, votes.argmax(-1))


def costs(local: Local) -> Tensor:
    """lam_s l + Phi, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Nothing, local: Local, _steps: Tensor
) -> tuple[Nothing, Upload]:
    """sigma_i - sigma and psi_i - psi are sent."""
    sigma, psi = (model_of(method, hyper, leaves, 0) for leaves in (local.sigma, local.psi))
    return device, Upload(sigma - broadcast.sigma, psi - broadcast.psi)


def receive(method: Method, server: Server, devices: Tensor, uploads: Upload, omega: Tensor) -> Server:
    """sigma <- sigma + (N/m) sum_A omega_i (sigma_i - sigma), psi likewise; M_i = sigma_i + psi_i, and e_i of it."""
    share = server.devices / len(devices)
    models, embeddings, counted = (t.clone() for t in (server.models, server.embeddings, server.counted))
    models[devices] = (server.sigma + uploads.sigma) + (server.psi + uploads.psi)
    with torch.no_grad():
        embeddings[devices] = embedding(method, models[devices], server.noise)
    counted[devices] = 1.0
    return server._replace(
        sigma=server.sigma + share * (omega @ uploads.sigma),
        psi=server.psi + share * (omega @ uploads.psi),
        models=models,
        embeddings=embeddings,
        counted=counted,
    )


def embedding(method: Method, models: Tensor, noise: Tensor) -> Tensor:
    """e_j = h(M_j; noise), [devices, classes]."""
    return method.network.log_probabilities(models, noise[None]).exp()[:, 0]


def round_over(server: Server) -> Server:
    """r <- r + 1, whatever was counted."""
    return server._replace(rounds=server.rounds + 1)
