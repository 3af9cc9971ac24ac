"""FedProx (Li et al., 2020): FedAvg whose devices are pulled back to where the round began."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Traits
from fedcpsl.averaging import Broadcast, Nothing, Upload, descend_labelled_towards, model_of, stacked
from fedcpsl.engine import Leaves
from fedcpsl.problem import Samples
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, real, text

VARIANTS = {"fedprox": Traits(unlabelled=False, personal=False)}


@dataclass(frozen=True)
class Settings:
    """FedProx's own."""

    name: str = text("fedprox", "the algorithm")
    eta: float | str = real(AUTO, "step size", 0, open_ends="[", also=(AUTO,))
    mu: float = real(0.01, "how strongly devices are pulled back; 0 is FedAvg", 0)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor
    mu: Tensor


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each
    start: Leaves  # the same: theta^r
    costs: Tensor  # [..., 1]


resolve, decided, alike = averaging.resolve, averaging.decided, averaging.alike
init_server, init_device, broadcast = averaging.init_server, averaging.init_device, averaging.broadcast
commit, contribution, apply, admit = averaging.commit, averaging.contribution, averaging.apply, averaging.admit
reweighted, late = averaging.reweighted, averaging.late
general_model, received_model = averaging.general_model, averaging.received_model
own_model, predict = averaging.no_own_model, averaging.predict_general


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {"eta": settings.eta, "mu": settings.mu}


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Nothing) -> Local:
    """w = theta^r."""
    models, start = (stacked(method, hyper, broadcast.theta) for _ in range(2))
    return Local(models, start, hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """w <- w - eta (g(w; B) + mu (w - theta^r))."""
    costs = descend_labelled_towards(method, local.models, hyper.eta, samples, hyper.mu, local.start)
    return local._replace(costs=local.costs + costs)


def costs(local: Local) -> Tensor:
    """l, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Nothing, local: Local, _steps: Tensor
) -> tuple[Nothing, Upload]:
    """w - theta^r is sent."""
    return device, Upload(model_of(method, hyper, local.models, 0) - broadcast.theta)
