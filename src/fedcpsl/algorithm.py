"""The interface of an algorithm: what it keeps, and the functions that change it.

An algorithm is a module under `fedcpsl/algorithms/` with the functions of `Algorithm` below, each for **one
device** (or, `apply` and `admit`, for the server). They are pure (but that a device may reuse the memory of its own
working state): whoever calls them, a loop, many slots side by side or a real device behind a network, changes
speed, never the answer. Every tensor may carry leading dimensions,
one slot per device, so reduce over named trailing dimensions only; the conformance tests check that.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedcpsl.network import Leaves, Network
from fedcpsl.problem import Costs, Samples


class Parts(NamedTuple):
    """What an algorithm is made of; an ablation is a change of one of these."""

    unlabelled: bool  # pseudo-labels and the terms in alpha_p, alpha_r
    personal: bool  # a localized model of the device's own
    control_variates: bool
    momentum: bool
    normalised: bool  # aggregation of updates divided by the effective steps
    everyone: bool = False  # defined for full participation only
    alone: bool = False  # no server: each device trains its localized model for itself

    @property
    def gradients_per_step(self) -> int:
        """Minibatch gradients of a local step: of each model that is trained, on labelled and on unlabelled samples."""
        return (2 if self.personal and not self.alone else 1) * (2 if self.unlabelled else 1)


class Hyper(NamedTuple):
    """Numbers that only scale: one of each per slot, shape [...]."""

    eta: Tensor
    eta_lc: Tensor
    gamma: Tensor
    beta: Tensor
    alpha_p: Tensor
    alpha_r: Tensor
    eta_v: Tensor


class Method(NamedTuple):
    """What is the same in every slot: the network, the cost functions, the parts and the rules."""

    network: Network
    parts: Parts
    costs: Costs
    pseudo_labels: str  # "closed_form" or "gradient"
    eta_g: str | float  # "mean_steps", "mean_effective_steps" or a number
    labels_from: str = "global"  # whose predictions pseudo-labels are made of: "global" or "mixture"
    personal_round: bool = False  # whether theta_lc is trained against a fixed theta and nothing is sent

    @property
    def trains_localized_alone(self) -> bool:
        return self.parts.alone or self.personal_round


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]
    c: Tensor  # [parameters], or empty without control variates


class Broadcast(NamedTuple):
    """Server to device: what the downlink pays for."""

    theta: Tensor
    c: Tensor


class Device(NamedTuple):
    """What never leaves the device (with its pseudo-labels, one row per unlabelled sample, kept beside it)."""

    theta_lc: Tensor  # [..., parameters], or empty without a personal model
    c: Tensor  # [..., parameters], or empty without control variates


class Local(NamedTuple):
    """One device's working state in a round, owned by it: `step` may reuse its memory.

    Every leaf has a dimension for the models after the leading ones: 0 is theta_i, 1 is theta_lc. Where only one of
    them is trained, that one is 0.
    """

    models: Leaves  # [..., 1 or 2, *shape] each
    momenta: Leaves  # the same shapes; none where a step needs none
    correction: Leaves  # [..., *shape] each: c - c_i; none without control variates
    costs: Tensor  # [..., 1 or 2]: f_i and F_i summed over the steps so far


class Upload(NamedTuple):
    """Device to server: what privacy and the uplink pay for."""

    delta: Tensor  # [..., parameters], or empty where nothing is sent
    steps: Tensor  # [...]


class Sum(NamedTuple):
    """What the counted uploads of a round add up to, in device order."""

    update: Tensor  # [parameters]
    control: Tensor  # [parameters], or empty
    weight: Tensor
    steps: Tensor
    effective_steps: Tensor
    counted: Tensor


class Algorithm(Protocol):
    """The functions of an algorithm file; `VARIANTS` names the algorithms that it provides."""

    @property
    def VARIANTS(self) -> Mapping[str, Parts]: ...  # noqa: N802

    def init_server(self, method: Method) -> Server: ...

    def init_device(self, method: Method, broadcast: Broadcast) -> Device: ...

    def broadcast(self, server: Server) -> Broadcast: ...

    def relabel(
        self,
        method: Method,
        hyper: Hyper,
        broadcast: Broadcast,
        device: Device,
        x: Tensor,
        nu: Tensor,
        count: int,
    ) -> Tensor:
        """New pseudo-labels, sample by sample (the caller may pass some of the `count` rows at a time)."""
        ...

    def begin(self, method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local: ...

    def step(self, method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
        """One local step: the only hot code."""
        ...

    def finish(
        self, method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, steps: Tensor
    ) -> tuple[Device, Upload]:
        """What the device keeps whatever becomes of its upload, and the upload."""
        ...

    def commit(self, method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, upload: Upload) -> Device:
        """What changes on the device only once the server counted the upload."""
        ...

    def contribution(self, method: Method, hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
        """What one counted upload adds."""
        ...

    def apply(self, method: Method, server: Server, total: Sum, devices: int) -> Server: ...

    def admit(self, method: Method, server: Server, samples_before: int, samples_after: int) -> Server:
        """The server after new devices joined the roster."""
        ...

    def predict(self, method: Method, hyper: Hyper, log_h: Tensor, log_h_lc: Tensor | None) -> Tensor:
        """A device's own prediction from those of the global and its localized model, all as log-probabilities."""
        ...


def map_tensors(function: Any, state: Any, *others: Any) -> Any:
    """Apply `function` tensor by tensor to states of one type."""
    if isinstance(state, Tensor):
        return function(state, *others)
    mapped = [map_tensors(function, *fields) for fields in zip(state, *others, strict=True)]
    return type(state)(*mapped) if hasattr(state, "_fields") else tuple(mapped)
