"""FlexMatch (Zhang et al., 2021) as federated learning: class thresholds that follow how well each class is learnt.

FedAvg, whose devices learn labels on weak views and their own confident pseudo-labels on strong views. A class that a
device rarely predicts with confidence gets a lower threshold there.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Traits
from fedcpsl.averaging import Broadcast, Upload, model_of, stacked
from fedcpsl.engine import Leaves
from fedcpsl.problem import LabelledCosts, Samples
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, choice, real, text
from fedcpsl.views import CHOICES

VARIANTS = {"flexmatch": Traits(unlabelled=True, personal=False, gradients_per_step=2, per_sample=("selected",))}
NEVER = -1  # a sample that was never confident


@dataclass(frozen=True)
class Settings:
    """FlexMatch's own."""

    name: str = text("flexmatch", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    tau: float = real(0.95, "how confident a prediction must be; the threshold of a class that is learnt well", 0, 1)
    lam_u: float = real(1.0, "weight of unlabelled samples in the costs", 0)
    views: str = choice("auto", "views of samples; auto: by the shape of inputs", *CHOICES)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    tau: Tensor
    lam_u: Tensor


class Device(NamedTuple):
    """What never leaves the device."""

    selected: Tensor  # [..., unlabelled samples]: the class that each had when it was last confident, or NEVER


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each: w
    selected: Tensor  # [..., unlabelled samples + 1]: the last is for rows that mark none
    costs: Tensor  # [..., 1]


decided, alike = averaging.decided, averaging.alike
init_server, broadcast, commit = averaging.init_server, averaging.broadcast, averaging.commit
contribution, apply, admit = averaging.contribution, averaging.apply, averaging.admit
reweighted, late = averaging.reweighted, averaging.late
general_model, received_model = averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_general


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Hashable]:
    """The views are the settings' own."""
    return variant._replace(views=settings.views), settings


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {"eta": settings.eta, "tau": settings.tau, "lam_u": settings.lam_u}


def init_device(method: Method, broadcast: Broadcast) -> Device:
    """s_u = -1: no sample was ever confident."""
    return Device(broadcast.theta.new_full((method.most_unlabelled,), NEVER, dtype=torch.int16))


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """w = theta^r."""
    selected = torch.nn.functional.pad(device.selected, (0, 1), value=NEVER)
    return Local(stacked(method, hyper, broadcast.theta), selected, hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta grad( l(w; weak B) + lam_u (1/|U|) sum_U mask CE(y, h(w; strong u)) ); then the marks."""
    assert samples.strong is not None
    assert samples.which is not None
    assert samples.unlabelled_count is not None
    network, lead, models = method.network, hyper.eta.dim(), local.models
    unlabelled = samples.strong.shape[lead]
    labelled = samples.x.shape[lead] - unlabelled

    def of_unlabelled(rows: Tensor) -> Tensor:
        return rows.narrow(lead, labelled, unlabelled)

    with torch.no_grad():
        q = network.log_probabilities_at(models, of_unlabelled(samples.x).unsqueeze(lead)).squeeze(lead).exp()
        sure, y = q.max(-1)
        learnt = learning_status(local.selected[..., :-1], samples.unlabelled_count, network.classes)
        mask = (sure >= threshold(hyper.tau, learnt, y)).to(q)
        confident = (sure >= hyper.tau[..., None]) & (of_unlabelled(samples.unlabelled) > 0)
        selected = marked(local.selected, of_unlabelled(samples.which), y, confident)
        target = torch.nn.functional.one_hot(y, network.classes).to(q)
    weights = samples.labelled.narrow(lead, 0, labelled), hyper.lam_u[..., None] * of_unlabelled(samples.unlabelled)
    each = samples._replace(
        x=torch.cat([samples.x.narrow(lead, 0, labelled), samples.strong], lead),
        target=torch.cat([samples.target.narrow(lead, 0, labelled), target], lead),
        labelled=torch.cat([weights[0], weights[1] * mask], -1),
    )
    costs = network.descend(models, hyper.eta[..., None], *each.inputs, LabelledCosts(each))
    return local._replace(selected=selected, costs=local.costs + costs)


def learning_status(selected: Tensor, unlabelled_count: Tensor, classes: int) -> Tensor:
    """b_c = count_c / max(count_-1, max_c count_c), over a device's own `unlabelled_count` samples, [..., classes]."""
    each = torch.arange(classes, device=selected.device)
    counts = (selected[..., None] == each).sum(-2).to(unlabelled_count.dtype)
    never = unlabelled_count - counts.sum(-1)
    return counts / torch.maximum(never, counts.amax(-1)).clamp_min(1)[..., None]


def threshold(tau: Tensor, learnt: Tensor, y: Tensor) -> Tensor:
    """tau b_y / (2 - b_y): the threshold of the class y of each row."""
    b = learnt.gather(-1, y)
    return tau[..., None] * b / (2 - b)


def marked(selected: Tensor, which: Tensor, y: Tensor, confident: Tensor) -> Tensor:
    """s_u = y for confident rows, in row order: of a sample that is there twice, its last confident row stays.

    The order is made out before anything is written, because parallel writes to one place have none.
    """
    rows = torch.arange(which.shape[-1], device=which.device)
    later = (which[..., :, None] == which[..., None, :]) & confident[..., None, :] & (rows > rows[:, None])
    stays = confident & ~later.any(-1)
    nowhere = selected.shape[-1] - 1
    value = torch.where(stays, y, NEVER).to(selected.dtype)
    return selected.scatter(-1, torch.where(stays, which, nowhere), value)


def costs(local: Local) -> Tensor:
    """The costs of both terms, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, _device: Device, local: Local, _steps: Tensor
) -> tuple[Device, Upload]:
    """s_u is kept, whatever becomes of the upload; w - theta^r is sent."""
    return Device(local.selected[..., :-1]), Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)
