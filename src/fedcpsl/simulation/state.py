"""Everything that changes during a simulation, and what a round's devices need of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.edge.state import EdgeState, initial_edge_state
from fedcpsl.errors import RunError
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.device_data import keep_labels, load_samples
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.store import Sparse, activate, sparse_states
from fedcpsl.trees import Tree, map_tensors

COUNT_BYTES = 8  # a step count, or one of the sizes n_i and m_i


class FiniteCheck(NamedTuple):
    """Whether a round's numbers are finite: known on a GPU only once it has computed them, while the host goes on."""

    finite: Tensor  # on the host
    known: Any  # an event to wait for, or None
    errors: list[str]  # what to say of each

    @property
    def problem(self) -> str | None:
        """What is not finite; None if all is."""
        if self.known is not None:
            self.known.synchronize()
        return None if self.finite.all() else self.errors[self.finite.tolist().index(False)]

    def raise_if_not_finite(self, run: int) -> None:
        """Raise RunError if something is not finite."""
        if problem := self.problem:
            error = RunError(problem)
            error.run = run
            raise error


class Flight(NamedTuple):
    """A device that has begun and whose upload has not arrived yet."""

    task: DeviceRound
    kept: Tree  # what it keeps from its arrival on
    upload: Tree
    sent: Tree  # what it was sent; one object for devices that were sent the same
    costs: Tensor


class State(NamedTuple):
    """Everything that changes, after `round` rounds. The next round overwrites `devices` and `targets` in place."""

    setup: Setup
    round: int
    server: Tree
    devices: Tree  # stacked, [devices, ...]
    targets: Tensor  # [training rows, classes]: labels, and every device's pseudo-labels nu
    active_rounds: NDArray[np.int64]  # how often each device has taken part
    steps: int  # local steps so far
    uplink_bytes: int
    downlink_bytes: int
    costs: dict[int, Tensor]  # mean costs of this round's steps, by device
    lost: int  # uploads lost so far
    finite_check: FiniteCheck | None = None  # whether this round's numbers are finite
    sparse: Sparse | None = None  # where only devices that have been active have rows in `devices`
    edge: EdgeState | None = None  # of the edge network, where there is one
    flight: tuple[Flight, ...] = ()  # uploads on their way, where rounds do not wait for all

    def nu(self, device: int) -> Tensor:
        """The pseudo-labels of one device, [unlabelled samples, classes]."""
        if self.sparse is None or self.setup.data.supply is None:
            return self.targets[self.setup.data.unlabelled_rows(device)]
        count, classes = int(self.setup.terms.sizes.unlabelled[device]), self.targets.shape[1]
        if self.sparse.there[device] and self.sparse.nu.numel():
            return self.sparse.nu[device, :count].to(self.targets.device)
        return self.targets.new_full((count, classes), 1 / classes)

    def device(self, device: int) -> Tree:
        """What one device keeps."""
        if self.sparse is not None and not self.sparse.there[device]:
            return knowing_labels(self.setup, device, self.sparse.start(int(self.setup.terms.joins[device])))
        return map_tensors(lambda t: t[device].to(self.targets.device), self.devices)

    def hyper(self, device: int) -> Tree:
        """The numbers that one device works with."""
        return map_tensors(lambda t: t[device], self.setup.terms.hyper)


def initial_state(setup: Setup) -> State:
    """Round 0: every device in the roster has been sent theta^0."""
    server = setup.terms.first_server()
    one = setup.terms.first_device(server)
    sparse: Sparse | None = None
    if setup.sparse:
        devices, sparse = sparse_states(
            one,
            setup.terms.devices,
            setup.nu_shape,
            setup.machine.store,
            setup.machine.store_folder,
            setup.data.one_hot,
        )
    else:
        devices = map_tensors(lambda t: t.expand(setup.terms.devices, *t.shape).clone(), one)
        devices = knowing_labels(setup, None, devices)
    return State(
        setup=setup,
        round=0,
        server=server,
        devices=devices,
        targets=setup.data.one_hot.clone(),
        active_rounds=np.zeros(setup.terms.devices, np.int64),
        steps=0,
        uplink_bytes=0 if setup.terms.method.traits.alone else 2 * COUNT_BYTES * len(setup.terms.roster(0)),
        downlink_bytes=0,
        costs={},
        lost=0,
        sparse=sparse,
        edge=initial_edge_state(setup.edge) if setup.edge else None,
    )


def knowing_labels(setup: Setup, device: int | None, kept: Tree) -> Tree:
    """What one device keeps, or all stacked (None), with what the algorithm derives from labels before a visit."""
    with_labels = optional(setup.terms.algorithm, "with_labels")
    if with_labels is None:
        return kept
    method, hyper, counts = setup.terms.kept_method, setup.terms.hyper, setup.data.labels_of
    if device is not None:
        return with_labels(method, map_tensors(lambda t: t[device], hyper), kept, counts(device))
    return with_labels(method, hyper, kept, torch.stack([counts(i) for i in range(setup.terms.devices)]))


def load(state: State, plan: Sequence[DeviceRound]) -> State:
    """Load what a round's devices work with: their states and, where they are made on demand, their samples."""
    setup, sparse, working = state.setup, state.sparse, [task.device for task in plan if task.steps > 0]
    if sparse is None:
        return state
    if setup.data.supply:
        load_samples(setup.data, setup.data.supply, state.targets, sparse.nu, sparse.there, working)
    return state._replace(sparse=activate(state.devices, sparse, working, setup.terms.joins))


def unload(state: State, plan: Sequence[DeviceRound]) -> None:
    """Store the pseudo-labels of samples made on demand, and release memory of what is on disk."""
    sparse = state.sparse
    if sparse is None:
        return
    if state.setup.data.supply:
        which = [task.device for task in plan]
        keep_labels(state.setup.data, state.targets, sparse.nu, sparse.maps[-1], which)
    sparse.release()
