"""The interface of an algorithm: what it keeps, and the functions that change it.

An algorithm is a module under `fedcpsl/algorithms/` with the functions of `Algorithm` below, each for **one
device** (or, `apply` and `admit`, for the server). They are pure (but that a device may reuse the memory of its own
working state): the caller, a loop, many slots side by side or a real device behind a network, changes speed, never
the answer. Every tensor may carry leading dimensions,
one slot per device, so reduce over named trailing dimensions only; the conformance tests check that.

**An algorithm owns its states.** Each is a NamedTuple of tensors that its file declares; everybody else treats it as
a tree of tensors (`fedcpsl.trees`), and an empty tensor as something that this variant does not have:

    Server      what the server keeps                  Broadcast   what it sends to a device
    Device      what never leaves the device           Upload      device to server: what privacy pays for
    Local       one device's working state in a round  Sum         what the counted uploads of a round add up to
    Hyper       numbers that only scale, one of each per slot, shape [...]

**And its settings**: a dataclass `Settings`, whose fields the command line, TOML files, sweeps and the manual know.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.engine import Network
from fedcpsl.problem import Samples
from fedcpsl.schedule import Draw, Sizes
from fedcpsl.trees import Tree
from fedcpsl.views import Views, mirrored


class Traits(NamedTuple):
    """What everybody must know of an algorithm."""

    unlabelled: bool  # learns from unlabelled samples too
    personal: bool  # every device has a model of its own
    everyone: bool = False  # defined for full participation only
    alone: bool = False  # no server: each device trains for itself
    models: int = 1  # that a local step trains
    gradients_per_step: int = 1  # of minibatches, over all models
    warm_up: int = 0  # active rounds of a device before it uses unlabelled samples
    follows: bool = False  # a device's own model changes whenever the general one does
    views: str | Views = ""  # of the samples of a step: "auto" by the shape of inputs, or see `fedcpsl.views`; "": none
    draws: tuple[Draw, ...] = ()  # of the schedule, beside the minibatch of each step
    per_sample: tuple[str, ...] = ()  # fields of `Device` with a row for each unlabelled sample (`most_unlabelled`)
    positions: bool = False  # whether a step is told where its samples are among the device's (`Samples.which`)
    probe: Draw | None = None  # of what a second exchange of each round asks some devices about
    both_ways: bool = False  # predicts a photograph from itself and its mirror image
    server_data: bool = False  # its server learns from labelled samples of its own, which `receive` is then given


class Method(NamedTuple):
    """What is the same in every slot and needs no samples: the network, the traits, and the algorithm's own rules."""

    network: Network
    traits: Traits
    rules: Hashable  # whatever the algorithm's functions decide by: equal where runs may share a program
    personal_round: bool = False  # whether a device trains its own model alone, the server's being fixed
    rounds: int = 0  # in which the server takes part: for what changes over a run; 0 where nobody knows
    most_unlabelled: int = 0  # samples that a device has, where it keeps something of each; a device may have fewer

    @property
    def draws(self) -> dict[str, Any]:
        """What the schedule draws for its steps, as `fedcpsl.schedule.draw_tasks` asks."""
        network, traits = self.network, self.traits
        return {
            "unlabelled": traits.unlabelled,
            "dropout": network.has_dropout,
            "views": bool(traits.views),
            "extra": traits.draws,
        }

    @property
    def sends_nothing(self) -> bool:
        return self.traits.alone or self.personal_round

    @property
    def both_ways(self) -> bool:
        """Whether a model's answer is the mean over an input and its mirror image."""
        return self.traits.both_ways and mirrored(self.traits.views, self.network.input_shape)

    @property
    def one_way(self) -> "Method":
        """The same method with predictions from the image alone, by which step sizes are searched."""
        return self._replace(traits=self.traits._replace(both_ways=False))


class Algorithm(Protocol):
    """The functions of an algorithm file; `VARIANTS` names the algorithms that it provides, each with its rules.

    Optional, found by being there: `relabel`, once a round over all unlabelled samples; `with_labels`, what a device
    knows by its labels alone, and `prepare_visit`, once a visit over all its samples, both changing what it keeps;
    `review(method, hyper, broadcast, device, upload, visit)`, the same after `finish`, of what the visit left;
    `use_draws(method, hyper, broadcast, local, drawn)`, after `begin`, which returns the `Local` after a look at the
    samples that the `draws` of a visit name, a Mapping of `Samples` by name; `phases`, for personal rounds, and
    `partner`, the model that stays fixed in them; `alike` and `merged`, for runs of several variants side by side;
    `broadcast_each(method, server, devices)` in place of `broadcast`, stacked, [devices, ...] (a fourth argument has
    what was drawn where a draw is of devices), with `broadcast_size(method, broadcast)`, how many numbers each is sent
    where the stack is filled up; and `receive(method, server, devices, uploads, omega)` in place of `contribution` and
    `apply`, where the server must see who sent what; `adapted(method, hyper, general, labelled)` in place of
    `own_model`, a device's own model, made of the general one by gradients on all its labelled samples for every
    prediction and kept nowhere; `newcomer`, the settings of a device that was not in training; `PREDICTS_WITH`, the
    numbers that `predict` needs, and `predicting(method, hyper, device)`, a NamedTuple of them, where the device keeps
    some; for real devices `greeting`, `started_again`, `update_rate`, `not_deployable` and `OWN_NUMBERS` (see
    `fedcpsl.federation`); for edge networks `reweighted(total, factor)`, contributions of devices whose update of the
    general model is multiplied by a factor each, and `late(method, total, sent, server, weight)`, contributions that
    answer an older broadcast, `sent`, as the server is now to add them: an algorithm without it takes no late updates;
    `invariants`, which the conformance suite checks; `RECORDED`, what fields are called in
    recorded runs.

    Where `Traits.server_data` says that the server learns from labelled samples of its own (`data.server`), `receive`
    has a sixth argument, `Samples`: all of them, in an order that is drawn for the round.

    Optional for a reply in the same round: `reply_each(method, server, devices)`, what the server sends to the devices
    whose uploads it has just counted, stacked, [devices, ...], and `use_reply(method, hyper, reply, device, labelled)`,
    what one of them keeps from then on; `labelled` are all its labelled samples, in an order that is drawn for the
    visit. Who was not counted gets no reply.

    Optional at the server: `round_over(server)`, the `Server` after every round of a simulation, also after one in
    which nothing was counted; `draw_weights(method, server)`, [devices], in place of a uniform draw of devices; one
    that is drawn twice works once, and its upload is added, or listed, twice. For a second exchange in a round, after
    `apply` or `receive`, with devices that the schedule draws (`Traits.probe` says about which samples): the server
    sends `probe_broadcast(method, server)`, the same to all, a device answers with `probe_upload(method, hyper,
    broadcast, samples)`, and changes nothing by it, and `probe_receive(method, server, devices, uploads)` is the
    `Server` after the answers that arrived, if any did. A round in which no upload is counted has none.
    """

    @property
    def VARIANTS(self) -> Mapping[str, Any]: ...  # noqa: N802

    @property
    def Settings(self) -> type[Any]: ...  # noqa: N802

    def resolve(self, variant: Any, settings: Any, costs: Any) -> tuple[Traits, Hashable]:
        """What the settings make of a variant; InputError where they do not fit together."""
        ...

    def decided(self, settings: Any, method: Method, eta: float) -> Any:
        """The settings with every `auto` decided, as a run's folder keeps them."""
        ...

    @property
    def Hyper(self) -> type[Any]: ...  # noqa: N802

    def numbers(self, method: Method, settings: Any, sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:
        """The fields of `Hyper`, each a number or one per device; `warming`: while a device does not use
        its unlabelled samples.
        """
        ...

    def init_server(self, method: Method, devices: int) -> Tree: ...

    def init_device(self, method: Method, broadcast: Tree) -> Tree: ...

    def broadcast(self, server: Tree) -> Tree:
        """What every active device is sent; `broadcast_each` in its place where that differs from device to device."""
        ...

    def begin(self, method: Method, hyper: Tree, broadcast: Tree, device: Tree) -> Tree: ...

    def step(self, method: Method, hyper: Tree, local: Tree, samples: Samples) -> Tree:
        """One local step: the only hot code."""
        ...

    def costs(self, local: Tree) -> Tensor:
        """The costs of all steps so far, added up, [..., models]: of what is sent, then of what is kept."""
        ...

    def finish(
        self, method: Method, hyper: Tree, broadcast: Tree, device: Tree, local: Tree, steps: Tensor
    ) -> tuple[Tree, Tree]:
        """The `Device` that is kept whatever becomes of the upload, and the `Upload`."""
        ...

    def commit(self, method: Method, hyper: Tree, broadcast: Tree, device: Tree, upload: Tree) -> Tree:
        """The `Device` once the server counted the upload."""
        ...

    def contribution(self, method: Method, hyper: Tree, upload: Tree, weight: Tensor) -> Tree:
        """The `Sum` of one counted upload."""
        ...

    def apply(self, method: Method, server: Tree, total: Tree, devices: int) -> Tree:
        """The `Server` after a round; `devices` is how many have joined."""
        ...

    def admit(self, method: Method, server: Tree, before: "Roster", after: "Roster") -> Tree:
        """The `Server` after new devices joined; also at the start, after nobody, and after some were forgotten."""
        ...

    def general_model(self, method: Method, server: Tree) -> Tensor | None:
        """The model for devices that have none of their own, [parameters]; None without a server."""
        ...

    def received_model(self, method: Method, broadcast: Tree) -> Tensor | None:
        """The general model as a device finds it in what it was sent; None where it needs none to predict."""
        ...

    def own_model(self, method: Method, hyper: Tree, device: Tree, general: Tensor | None) -> Tensor | None:
        """A device's own model, [..., parameters]; None where it has none. `general` is the general model now."""
        ...

    def predict(self, method: Method, hyper: Tree, log_h: Tensor | None, log_h_own: Tensor | None, /) -> Tensor:
        """A device's answer from those of the general and of its own model, all as log-probabilities: **the only
        truth** about it, which evaluation, export, `adapt`, the classifier and real devices ask.

        `hyper` has the fields `PREDICTS_WITH`: those of `Hyper`, or of what `predicting` returns where it is there.
        """
        ...


class Visit(NamedTuple):
    """What a device holds when it is visited: what `prepare_visit` looks at."""

    labels: Tensor  # [..., classes]: how many of its labelled samples each class has
    unlabelled: Tensor  # [...]: how many unlabelled samples it has
    pieces: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # those samples, some at a time: x [..., rows, *shape], and
    # [..., rows], 1 where there is one and 0 where a row only fills a gap, because another device has more
    labelled: Callable[[Tensor], tuple[Tensor, Tensor]]  # labelled samples at given positions, [..., rows]: x and
    # one-hot labels; something else of the same shape where a device has no sample at a position


def visit_of(labels: Tensor, x: Tensor, x_labelled: Tensor, one_hot: Tensor) -> Visit:
    """What one device holds: its label counts, its unlabelled inputs [samples, ...], its labelled ones and labels."""
    pieces = x.split(4096) if len(x) else ()

    def labelled(positions: Tensor) -> tuple[Tensor, Tensor]:
        if not len(x_labelled):
            return x_labelled.new_zeros(len(positions), *x_labelled.shape[1:]), one_hot.new_zeros(
                len(positions), one_hot.shape[1]
            )
        rows = positions.clamp_max(len(x_labelled) - 1)
        return x_labelled[rows], one_hot[rows]

    found = labels.new_tensor(len(x))
    return Visit(labels, found, lambda: ((some, labels.new_ones(len(some))) for some in pieces), labelled)


class Roster(NamedTuple):
    """The devices that have joined: how many, their samples, and how many labelled ones each has."""

    devices: int
    samples: int
    labelled: Sequence[int] | NDArray[np.int64] = ()  # in the order of joining, which numbers the devices


def predicting(algorithm: Algorithm, method: Method, hyper: Tree, device: Tree) -> Tree:
    """The numbers that a device predicts with: the algorithm's, or with some that the device keeps."""
    own = optional(algorithm, "predicting")
    return own(method, hyper, device) if own else hyper


def log_answers(method: Method, model: Tensor, x: Tensor) -> Tensor:
    """log h(model; x) as `predict` is given it, [..., samples, classes]; both ways round where the method says so."""
    found = method.network.log_probabilities(model, x)
    return mean_of_both(found, method.network.log_probabilities(model, x.flip(-1))) if method.both_ways else found


def mean_of_both(log_h: Tensor, log_h_mirrored: Tensor) -> Tensor:
    """log h(x) = log softmax((z(x) + z(mirror image of x)) / 2), from the log-probabilities of both."""
    return torch.log_softmax((log_h + log_h_mirrored) / 2, -1)


OPTIONAL = frozenset(
    [
        "OWN_NUMBERS",
        "PREDICTS_WITH",
        "RECORDED",
        "adapted",
        "alike",
        "alone",
        "broadcast_each",
        "broadcast_size",
        "draw_weights",
        "greeting",
        "invariants",
        "late",
        "merged",
        "newcomer",
        "not_deployable",
        "partner",
        "phases",
        "predicting",
        "prepare_visit",
        "probe_broadcast",
        "probe_receive",
        "probe_upload",
        "receive",
        "relabel",
        "reply_each",
        "review",
        "reweighted",
        "round_over",
        "started_again",
        "update_rate",
        "use_draws",
        "use_reply",
        "with_labels",
        "without_sums",
    ]
)


def optional(algorithm: Algorithm, name: str) -> Any:
    """A function that an algorithm may have, or None."""
    assert name in OPTIONAL, name
    return getattr(algorithm, name, None)


def merged_method(algorithm: Algorithm, methods: Sequence[Method]) -> Method:
    """One method that serves runs of several variants: the algorithm's own, or the one that all have."""
    merge = optional(algorithm, "merged")
    return merge(methods) if merge and len(set(methods)) > 1 else methods[0]


def alike(algorithm: Algorithm, method: Method) -> Hashable:
    """Equal for methods whose slots may go side by side."""
    same = optional(algorithm, "alike")
    return same(method) if same else method.rules
