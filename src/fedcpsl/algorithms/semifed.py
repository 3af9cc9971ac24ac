"""SemiFed: consistency first, then pseudo-labels on which the models of several devices agree.

The first stage is FedAvg whose devices also make the predictions of strong views follow those of the samples
themselves. In the second stage a device is sent the last models of a few other devices as well: what enough of them
vote for becomes the label of an unlabelled sample, for one visit.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Roster, Traits, Visit
from fedcpsl.averaging import Upload, model_of, stacked
from fedcpsl.engine import Leaves
from fedcpsl.problem import LabelledCosts, Samples
from fedcpsl.schedule import Draw, Sizes
from fedcpsl.settings import AUTO, choice, real, text, whole
from fedcpsl.views import CHOICES

PEERS = "peers"
VARIANTS = {
    "semifed": Traits(
        unlabelled=True,
        personal=False,
        gradients_per_step=2,
        per_sample=("labels",),
        draws=(Draw("peers", of="devices", per_visit=True),),
    )
}
NONE = -1  # a sample without a pseudo-label


@dataclass(frozen=True)
class Settings:
    """SemiFed's own."""

    name: str = text("semifed", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    first_stage: int | str = whole(
        AUTO, "rounds of the first stage, with consistency alone; auto: half of all rounds", 0, also=(AUTO,)
    )
    lam_c: float = real(1.0, "weight of the consistency of strong views, in the first stage", 0)
    lam_p: float = real(1.0, "weight of pseudo-labels, in the second stage", 0)
    peers: int = whole(2, "other devices whose models vote, in the second stage", 0)
    tau: float = real(0.95, "how confident a model must be to vote", 0, 1)
    agree: int = whole(2, "votes that a pseudo-label needs", 1)
    views: str = choice("auto", "strong views of samples; auto: by the shape of inputs", *CHOICES)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    lam_c: Tensor
    lam_p: Tensor
    tau: Tensor


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]
    models: Tensor  # [devices, parameters]: the last counted of each
    counted: Tensor  # [devices]: 1 where there is one
    rounds: Tensor  # so far
    devices: Tensor  # N: how many have joined


class Broadcast(NamedTuple):
    """Server to one device."""

    theta: Tensor  # [..., parameters]
    peers: Tensor  # [..., peers, parameters]
    there: Tensor  # [..., peers]: 1 for those that are sent
    second: Tensor  # [...]: 1 in the second stage


class Device(NamedTuple):
    """What never leaves the device."""

    labels: Tensor  # [..., unlabelled samples]: the class on which models agreed at the last visit, or NONE


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each: w
    labels: Tensor  # [..., unlabelled samples + 1]
    second: Tensor  # [...]
    costs: Tensor  # [..., 1]


commit, general_model, received_model = averaging.commit, averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_general


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Hashable]:
    """Only strong views are made; the rest are the samples themselves."""
    return variant._replace(views=f"strong {settings.views}"), settings


def rules_of(method: Method) -> Settings:
    assert isinstance(method.rules, Settings)
    return method.rules


def decided(settings: Settings, method: Method, eta: float) -> Settings:
    return replace(settings, eta=eta, first_stage=rounds_of_first_stage(settings, method))


def rounds_of_first_stage(settings: Settings, method: Method) -> int:
    """As given, or half of all rounds."""
    return method.rounds // 2 if settings.first_stage == AUTO else int(settings.first_stage)


def alike(method: Method) -> Hashable:
    """Runs may go side by side where as many models vote and as many must agree."""
    return method.traits, rules_of(method).peers, rules_of(method).agree


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {"eta": settings.eta, "lam_c": settings.lam_c, "lam_p": settings.lam_p, "tau": settings.tau}


def init_server(method: Method, devices: int) -> Server:
    """theta^0 as the network was made; nobody was counted."""
    theta = method.network.initial
    nobody, none = theta.new_zeros(devices), theta.new_zeros(())
    return Server(theta.clone(), theta.new_zeros(devices, len(theta)), nobody, none, none.clone())


def admit(_: Method, server: Server, _before: Roster, after: Roster) -> Server:
    """N, and places for devices that the server has none for yet."""
    new = max(0, len(after.labelled) - len(server.counted))
    models, counted = (torch.cat([t, t.new_zeros(new, *t.shape[1:])]) for t in (server.models, server.counted))
    return server._replace(models=models, counted=counted, devices=server.theta.new_tensor(after.devices))


def init_device(method: Method, broadcast: Broadcast) -> Device:
    """No sample has a label."""
    return Device(broadcast.theta.new_full((method.most_unlabelled,), NONE, dtype=torch.int16))


def broadcast_each(
    method: Method, server: Server, devices: Tensor, drawn: Mapping[str, list[list[int]]] | None = None
) -> Broadcast:
    """theta^r, and in the second stage the last models of peers; each device's are the first of its drawn order of all
    others that were counted before.
    """
    settings, count = rules_of(method), len(devices)
    theta = server.theta.expand(count, -1)
    second = (server.rounds >= rounds_of_first_stage(settings, method)).to(theta)
    there, which = theta.new_zeros(count, settings.peers), devices.new_zeros(count, settings.peers)
    if drawn:
        counted = server.counted.bool().tolist()
        for row, order in enumerate(drawn[PEERS]):
            chosen = [device for device in order if counted[device]][: settings.peers]
            there[row, : len(chosen)] = second
            which[row, : len(chosen)] = which.new_tensor(chosen)
    return Broadcast(theta, server.models[which] * there[..., None], there, second.expand(count))


def broadcast_size(_: Method, broadcast: Broadcast) -> Tensor:
    """How many numbers each device is sent: theta, the peers that there are, and the stage."""
    return broadcast.theta.shape[-1] * (1 + broadcast.there.sum(-1)) + 1


@torch.no_grad()
def prepare_visit(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, visit: Visit) -> Device:
    """The labels of a visit: what theta^r and the peers agree on, of every unlabelled sample; earlier ones are gone."""
    lead, agree = hyper.eta.dim(), rules_of(method).agree
    models = torch.cat([broadcast.theta.unsqueeze(-2), broadcast.peers], -2)
    voting = torch.cat([torch.ones_like(broadcast.second[..., None]), broadcast.there], -1)
    labels = torch.full_like(device.labels, NONE)
    begun = 0
    for x, there in visit.pieces():
        log_h = method.network.log_probabilities(models, x.unsqueeze(lead))
        found = agreed(log_h, voting, hyper.tau, agree).to(labels.dtype)
        rows = there.shape[-1]
        labels[..., begun : begun + rows] = torch.where(there > 0, found, NONE)
        begun += rows
    return Device(torch.where(broadcast.second[..., None] > 0, labels, NONE))


def agreed(log_h: Tensor, voting: Tensor, tau: Tensor, agree: int) -> Tensor:
    """y = arg max_c votes_c where that has at least 'agree' votes and more than any other class, else -1.

    A model votes for arg max h where max h >= tau. log_h is [..., models, samples, classes], voting [..., models].
    """
    sure, which = log_h.max(-1)
    sure_enough = (sure.exp() >= tau[..., None, None]) * voting[..., None]
    votes = (torch.nn.functional.one_hot(which, log_h.shape[-1]) * sure_enough[..., None]).sum(-3)
    most, label = votes.max(-1)
    alone = (votes == most[..., None]).sum(-1) == 1
    return torch.where((most >= agree) & alone, label, NONE)


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """w = theta^r."""
    labels = torch.nn.functional.pad(device.labels, (0, 1), value=NONE)
    models = stacked(method, hyper, broadcast.theta)
    return Local(models, labels, broadcast.second.clone(), hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta grad( l(w; B) + lam_c mean_U KL(h(w; u) || h(w; strong u)) ), no gradient through h(w; u).

    In the second stage the other term is lam_p (1/|U|) sum CE(label, h(w; strong u)), over those u that have a label.
    """
    assert samples.strong is not None
    assert samples.which is not None
    network, lead = method.network, hyper.eta.dim()
    unlabelled = samples.strong.shape[lead]
    labelled = samples.x.shape[lead] - unlabelled

    def of_unlabelled(rows: Tensor) -> Tensor:
        return rows.narrow(lead, labelled, unlabelled)

    second = local.second[..., None]
    with torch.no_grad():
        log_p = network.log_probabilities_at(local.models, of_unlabelled(samples.x).unsqueeze(lead)).squeeze(lead)
        label = local.labels.gather(-1, of_unlabelled(samples.which)).long()
        one_hot = torch.nn.functional.one_hot(label.clamp_min(0), network.classes).to(log_p)
        target = torch.where(second[..., None] > 0, one_hot, log_p.exp())
        factor = torch.where(second > 0, hyper.lam_p[..., None] * (label >= 0), hyper.lam_c[..., None])
        weights = factor * of_unlabelled(samples.unlabelled)
        entropy = (weights * (1 - second) * (log_p.exp() * log_p).sum(-1)).sum(-1, keepdim=True)
    each = samples._replace(
        x=torch.cat([samples.x.narrow(lead, 0, labelled), samples.strong], lead),
        target=torch.cat([samples.target.narrow(lead, 0, labelled), target], lead),
        labelled=torch.cat([samples.labelled.narrow(lead, 0, labelled), weights], -1),
    )
    costs = network.descend(local.models, hyper.eta[..., None], *each.inputs, LabelledCosts(each))
    return local._replace(costs=local.costs + costs + entropy)


def costs(local: Local) -> Tensor:
    """The costs of both terms, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, _steps: Tensor
) -> tuple[Device, Upload]:
    """w - theta^r is sent."""
    return device, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)


def receive(_: Method, server: Server, devices: Tensor, uploads: Upload, omega: Tensor) -> Server:
    """theta <- theta + (N/m) sum_A omega_i (w_i - theta), and w_i is the last model of device i."""
    models, counted = server.models.clone(), server.counted.clone()
    models[devices], counted[devices] = server.theta + uploads.delta, 1.0
    theta = server.theta + server.devices / len(devices) * (omega @ uploads.delta)
    return server._replace(theta=theta, models=models, counted=counted)


def round_over(server: Server) -> Server:
    """r <- r + 1, whatever was counted."""
    return server._replace(rounds=server.rounds + 1)
