"""From a federation, a model and settings to everything that stays fixed during a run, and what it is computed on."""

import sys
from copy import copy
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcpsl import config as settings
from fedcpsl import schedule
from fedcpsl.algorithm import Algorithm, Method, Roster, Traits, optional
from fedcpsl.algorithms import traits_of
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.edge.cell import EdgeTerms
from fedcpsl.edge.settings import Edge
from fedcpsl.engine import Network
from fedcpsl.errors import InputError
from fedcpsl.methods import check_recordings, numbers_of, resolved
from fedcpsl.problem import Costs
from fedcpsl.simulation.device_data import DeviceData, device_data_of
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.store import choose_store
from fedcpsl.torchrun import local_rank
from fedcpsl.trees import Tree, bytes_of, map_tensors


class RunTerms(NamedTuple):
    """What a run's server and devices agree on before any data: algorithm, numbers, schedule and sizes."""

    algorithm: Algorithm
    method: Method
    personal_method: Method  # of the personal rounds
    hyper: Tree  # the algorithm's numbers, one of each per device, [devices]
    numbers: NDArray[np.float64]  # the same as one table on the host, [numbers, devices]
    warming: NDArray[np.float64]  # and of devices that use no unlabelled samples yet
    work: schedule.Work
    rounds: int  # in which the server takes part
    personal_rounds: int  # after those
    two_phase: bool
    joins: NDArray[np.int64]  # the round from which a device is in the roster
    sizes: schedule.Sizes
    names: tuple[str, ...]
    seed: int
    spare: int = 0  # devices drawn in a round beyond the m that count

    @property
    def most_active(self) -> int:
        """The most devices that work in a round."""
        return self.devices if self.personal_rounds else self.most_drawn

    @property
    def most_drawn(self) -> int:
        """The most devices that work in a round with the server."""
        everyone = self.method.traits.everyone
        return self.devices if everyone else min(self.work.active + self.spare, self.devices)

    @property
    def devices(self) -> int:
        return len(self.names)

    @property
    def total_rounds(self) -> int:
        return self.rounds + self.personal_rounds

    @property
    def batch_widths(self) -> tuple[int, int]:
        """Labelled and unlabelled samples of a minibatch."""
        return self.work.batch_labelled, self.work.batch_unlabelled if self.method.traits.unlabelled else 0

    @property
    def kept_method(self) -> Method:
        """The method for what a device keeps: with a personal model if it ever has one."""
        return self.personal_method if self.personal_rounds else self.method

    def method_after(self, round: int) -> Method:
        """The method that devices predict with after `round` rounds."""
        return self.personal_method if round > self.rounds else self.method

    def method_of(self, task: schedule.DeviceRound) -> Method:
        return self.personal_method if task.personal else self.method

    def roster(self, round: int) -> NDArray[np.int64]:
        """The devices that have joined before a round."""
        return np.flatnonzero(self.joins <= round)

    def joined(self, round: int) -> Roster:
        """The same devices as an algorithm's server knows them."""
        devices = self.roster(round)
        return Roster(len(devices), self.samples_in(devices), self.sizes.labelled[devices])

    def samples_in(self, roster: NDArray[np.int64]) -> int:
        return int(self.sizes.labelled[roster].sum() + self.sizes.unlabelled[roster].sum())

    @property
    def device_bytes(self) -> int:
        """What one device keeps, its pseudo-labels aside."""
        return bytes_of(self.first_device(self.first_server()))

    def first_server(self) -> Tree:
        """What the server starts with, once the devices of the first round have joined."""
        server, joined = self.algorithm.init_server(self.method, self.devices), self.joined(0)
        return self.algorithm.admit(self.method, server, Roster(0, 0), joined) if joined.samples else server

    def first_device(self, server: Tree, device: int = 0) -> Tree:
        """What a device starts with that joins now."""
        return self.algorithm.init_device(self.kept_method, self.sent_to(server, device))

    def sent_to(self, server: Tree, device: int) -> Tree:
        """What the server sends to one device."""
        each = optional(self.algorithm, "broadcast_each")
        if each is None:
            return self.algorithm.broadcast(server)
        ids = torch.tensor([device], device=self.method.network.initial.device)
        return map_tensors(lambda t: t[0], each(self.method, server, ids))


class Machine(NamedTuple):
    """How a run is computed: changes its speed, never its result."""

    vectorised: bool  # devices side by side, or one after another
    slots: int  # most devices side by side; 0: all
    processes: int  # that share each round's devices
    store: str  # where device states live
    store_folder: Path | None = None  # for those on disk; None: where temporary files go

    @property
    def executor(self) -> str:
        return "vectorised" if self.vectorised else "sequential"


class Setup(NamedTuple):
    """What a simulation reads and never changes."""

    terms: RunTerms
    data: DeviceData
    machine: Machine
    edge: EdgeTerms | None = None  # the edge network, where there is one

    @property
    def sparse(self) -> bool:
        """Whether states take memory only once a device has been active."""
        return self.machine.store != "accelerator" or self.data.supply is not None

    @property
    def nu_shape(self) -> tuple[int, int]:
        """Of one device's pseudo-labels, where they are kept beside its state."""
        kept = self.data.supply is not None and self.terms.method.traits.unlabelled
        return int(self.terms.sizes.unlabelled.max()) if kept else 0, self.terms.method.network.classes

    @property
    def device_bytes(self) -> int:
        """What a device keeps between rounds, with the pseudo-labels that it renews: of the device that has most."""
        renews = self.terms.method.traits.unlabelled and optional(self.terms.algorithm, "relabel") is not None
        rows = int(self.terms.sizes.unlabelled.max()) if renews else 0
        return self.terms.device_bytes + rows * self.terms.method.network.classes * self.data.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """What the states of all devices take once each has been active."""
        return self.terms.devices * (self.terms.device_bytes + prod(self.nu_shape) * self.data.dtype.itemsize)


def prepare(
    federation: Federation | OnDemand,
    model: nn.Module,
    algorithm: settings.Algorithm | None = None,
    work: settings.Work | None = None,
    run: settings.Run | None = None,
    costs: Costs | None = None,
    beside: Setup | None = None,
    edge: Edge | None = None,
) -> Setup:
    """Check settings, data and model once, and move the data to the processor that computes.

    `beside` is the setup of another run with the same model, on the same samples or others: the two then share what
    they can, and `simulate_together` runs their devices side by side. Only the model's starting point is its own.
    `edge` are the settings of an edge network, off by default.
    """
    algorithm, work, run = algorithm or settings.Algorithm(), work or settings.Work(), run or settings.Run()
    for section, values in (("algorithm", algorithm), ("work", work), ("run", run)):
        settings.check_section(section, values)
    algorithm = replace(algorithm, eta=choose_eta(algorithm.eta, "", "epochs"))
    traits = traits_of(algorithm.name)
    device = choose_device(run.device)
    if device.type == "cpu":
        keep_freed_memory()
    dtype = torch.float64 if run.dtype == "float64" else torch.float32
    check_precision(run.precision, device)
    joins = _joins(work, federation.devices)
    active = choose_active(work.active, traits, federation.devices - work.joiners)
    spare = edge.extra if edge is not None and edge.on and not (traits.alone or traits.everyone) else 0
    most = federation.devices if traits.everyone or work.personal_rounds else active + spare
    device_data = device_data_of(federation, device, dtype, beside.data if beside else None, most, run.evaluate_devices)
    network = _network(
        model, device_data, federation.classes, run.precision, beside.terms.method.network if beside else None
    )
    network.set_precision()
    network.batched = choose_executor(run.executor, network, device) == "vectorised"
    found = resolved(algorithm, network, work, costs).for_sizes(federation.sizes)
    check_recordings(found.method, device_data.recordings)
    if device_data.server_source is None and found.method.traits.server_data:
        raise InputError(
            f"algorithm.name = {algorithm.name!r}: its server learns from labelled samples of its own; "
            "give data.server, the share of samples that it holds, such as 0.1"
        )
    kept = found.kept_method(work)
    numbers, warming = numbers_of(found.algorithm, kept, algorithm, federation.sizes)
    terms = RunTerms(
        algorithm=found.algorithm,
        method=found.method,
        personal_method=found.personal_method,
        hyper=found.algorithm.Hyper(*torch.from_numpy(numbers).to(dtype).to(device)),
        numbers=numbers,
        warming=warming,
        work=schedule.work_of(work, active, alone=traits.alone),
        rounds=work.rounds,
        personal_rounds=work.personal_rounds,
        two_phase=work.two_phase,
        joins=joins,
        sizes=federation.sizes,
        names=federation.names,
        seed=run.seed,
        spare=min(spare, federation.devices - work.joiners - active),
    )
    slots, processes = choose_slots(run, network, device), choose_processes(run.processes, device, active)
    setup = Setup(terms, device_data, Machine(network.batched, slots, processes, run.store))
    store = choose_store(run.store, setup.state_bytes, device, on_demand=device_data.supply is not None)
    setup = setup._replace(machine=setup.machine._replace(store=store))
    if edge is None or not edge.on:
        return setup
    from fedcpsl.simulation.edge import with_edge  # which counts what a device does, with all that this module prepares

    settings.check_section("edge", edge)
    return with_edge(setup, edge)


def choose_active(active: int | str, traits: Traits, devices: int) -> int:
    """m: as given, checked; auto is 4, or everyone where the algorithm asks for that."""
    if active == settings.AUTO:
        return devices if traits.everyone else min(4, devices)
    active = int(active)
    if active > devices:
        raise InputError(f"work.active = {active}: there are only {devices} devices to draw from; give at most that")
    if traits.everyone and active != devices:
        raise InputError(f"work.active = {active}: this algorithm needs every device in every round; give {devices}")
    return active


def choose_executor(name: str, network: Network, device: torch.device) -> str:
    """auto: side by side on an accelerator, and on a cpu where all layers become products."""
    if name != settings.AUTO:
        return name
    return "vectorised" if device.type != "cpu" or network.faster_by_hand else "sequential"


def choose_slots(run: settings.Run, network: Network, device: torch.device) -> int:
    """As given; else all, but with executor auto one on a cpu where convolutions take model after model: in cache."""
    one_by_one = device.type == "cpu" and network.faster_by_hand and not network.fully_linear
    return run.slots or (1 if run.executor == settings.AUTO and one_by_one else 0)


def choose_processes(processes: int | str, device: torch.device, active: int) -> int:
    """auto: one per core that PyTorch would use, where processes can be forked and there is enough to share.

    Where there is a GPU, even if unused, PyTorch's autograd may refuse to work in a forked process: auto is 1 there.
    A rank that torchrun started is one process.
    """
    if world()[1] > 1:
        if processes not in (settings.AUTO, 1):
            raise InputError(f"run.processes = {processes}: torchrun's ranks share the devices already; leave it out")
        return 1
    can_fork = sys.platform == "linux" and device.type == "cpu"
    if processes == settings.AUTO:
        return min(torch.get_num_threads(), active) if can_fork and not has_gpu() else 1
    if int(processes) > 1 and not can_fork:
        raise InputError(f"run.processes = {processes}: needs Linux and the cpu; give 1")
    return int(processes)


def _network(
    model: nn.Module, device_data: DeviceData, classes: int, precision: str, beside: Network | None
) -> Network:
    """A network of its own, or another run's with this model's starting point where only that differs."""
    if beside is None or beside.arithmetic.precision != precision or not _differ_in_start_only(model, beside):
        return Network(model, device_data.inputs.take(device_data.source[:2]), classes, precision=precision)
    own, trained = copy(beside), dict(model.named_parameters())
    own.initial = torch.cat([trained[name].detach().flatten() for name in beside.shapes]).to(beside.initial)
    return own


def _differ_in_start_only(model: nn.Module, network: Network) -> bool:
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    others = network.module.state_dict()
    fixed = {name: t for name, t in model.state_dict().items() if name not in trained}
    return (
        repr(model) == network.described
        and trained == network.shapes
        and all(name in others and torch.equal(t, others[name].to(t)) for name, t in fixed.items())
    )


@cache
def keep_freed_memory() -> None:
    """Let the process keep the memory that tensors of a round free: the next round needs as much again.

    glibc returns blocks above a threshold to the system, which then has to map every page again. Freeing one block of
    almost 32 MiB, whose pages are never touched, raises that threshold to its maximum; other allocators ignore it.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def choose_eta(eta: float | str, dataset: str, unit: str) -> float:
    """The paper's step sizes for its data sets, 0.05 for others."""
    if eta == settings.SEARCH:
        raise InputError('algorithm.eta = "search": there is no data to search with here; give a number')
    if eta != settings.AUTO:
        return float(eta)
    paper = {"mnist": (0.005, 0.002), "cifar10": (0.002, 0.001)}
    return paper.get(dataset, (0.05, 0.05))[unit == "hlu"]


def _joins(work: settings.Work, devices: int) -> NDArray[np.int64]:
    if work.joiners >= devices:
        raise InputError(f"work.joiners = {work.joiners}: leave at least one of the {devices} devices for the start")
    if work.joiners and work.join_round >= work.rounds:
        raise InputError(f"work.join_round = {work.join_round}: that is not before the last of {work.rounds} rounds")
    joins = np.zeros(devices, np.int64)
    joins[devices - work.joiners :] = work.join_round
    return joins


def has_gpu() -> bool:
    """Whether there is a GPU, used or not."""
    return torch.cuda.is_available()


def choose_device(name: str) -> torch.device:
    """Where to compute; auto is cuda where there is one, else the cpu."""
    if name == settings.AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"run.device = {name!r}: no such device; give cpu, cuda, cuda:1, ...") from None
    if device.type == "mps":
        raise InputError(f"run.device = {name!r}: is not supported, since it has no float64; give cpu")
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        raise InputError(f"run.device = {name!r}: this machine has none that PyTorch can use; give cpu")
    return _own_gpu(device) if device.type == "cuda" else device


def _own_gpu(device: torch.device) -> torch.device:
    """The GPU by its number. Every rank of a machine takes that of its own, from the first again if there are few."""
    if world()[1] == 1:
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    if device.index is not None:
        raise InputError(f'run.device = "{device}": each rank takes a GPU of its own; give cuda')
    own = torch.device("cuda", local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def check_precision(name: str, device: torch.device) -> None:
    """Refuse what only a GPU can do."""
    if name != "ieee" and device.type != "cuda":
        raise InputError(f'run.precision = "{name}": is a way in which an NVIDIA GPU multiplies; give ieee')
