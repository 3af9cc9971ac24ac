"""What is fixed for a run: where devices are, their channels and clocks, and what an algorithm asks of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.measurements import Capacities, Trace, read_capacities, read_positions, read_trace
from fedcpsl.edge.radio import (
    NEAREST,
    Numbers,
    distances,
    free_space_path_loss,
    gain,
    log_distance_path_loss,
    macro_path_loss,
    noise_density,
    watts,
)
from fedcpsl.edge.settings import NONE, Edge
from fedcpsl.errors import InputError
from fedcpsl.schedule import normal, uniforms


class Radio(NamedTuple):
    """The radio's numbers in SI units."""

    power: float  # of a device, watts
    station: float
    noise: float  # watts per hertz
    interference: float
    up: float  # hertz
    down: float


class Cell(NamedTuple):
    """Devices as the radio and the clock see them, [devices] each."""

    x: Numbers
    y: Numbers
    distance: Numbers
    path_loss_db: Numbers
    gain: Numbers
    clock: Numbers  # hertz, before a round's factor
    presence: Numbers  # p_i of the daily rhythm
    phase: Numbers


class Load(NamedTuple):
    """What an algorithm asks of a device: bits and cycles."""

    bits_up: float
    bits_down: float
    cycles: float  # of a step
    cycles_per_sample: float  # once a visit, of each unlabelled sample
    cycles_per_visit: float  # once a visit, whatever it has
    shared: bool = True  # one broadcast for all; False: each device is sent its own
    sends: bool = True  # whether there is a server at all


class EdgeTerms(NamedTuple):
    """All that a round's physics need and that never changes during a run."""

    settings: Edge
    seed: int
    radio: Radio
    cell: Cell
    load: Load
    personal_load: Load  # of personal rounds
    wanted: int  # devices that a round draws, before any extra ones
    unlabelled: NDArray[np.int64]  # samples of each device
    trace: Trace | None = None
    capacities: Capacities | None = None

    @property
    def devices(self) -> int:
        return len(self.cell.gain)

    @property
    def deadline(self) -> float | None:
        return None if self.settings.deadline == NONE else float(self.settings.deadline)

    @property
    def slot(self) -> float:
        return 0.0 if self.settings.slot == NONE else float(self.settings.slot)

    @property
    def has_batteries(self) -> bool:
        return self.settings.battery != NONE

    @property
    def semi_async(self) -> bool:
        return self.settings.clock == "semi-async"

    def once(self, load: Load, devices: NDArray[np.int64]) -> Numbers:
        """Cycles that some devices spend once a visit."""
        found: Numbers = load.cycles_per_visit + load.cycles_per_sample * self.unlabelled[devices].astype(np.float64)
        return found


def radio_of(edge: Edge) -> Radio:
    interference = 0.0 if edge.interference_dbm == NONE else watts(float(edge.interference_dbm))
    return Radio(
        watts(edge.device_dbm),
        watts(edge.station_dbm),
        noise_density(edge.noise_figure_db),
        interference,
        edge.bandwidth_up_mhz * 1e6,
        edge.bandwidth_down_mhz * 1e6,
    )


def cell_of(edge: Edge, names: Sequence[str], seed: int, capacities: Capacities | None, trained_cycles: float) -> Cell:
    """Place the devices, by the seed or as a file says, and draw what is fixed for a run.

    `trained_cycles` are those of training on one sample, by which measured seconds become a clock.
    """
    devices = np.arange(len(names))
    u, angle = uniforms(seed, "placement", 0, devices)
    ground, turned = distances(edge.radius, u), 2 * np.pi * angle
    x, y = ground * np.cos(turned), ground * np.sin(turned)
    if edge.positions:
        x, y = read_positions(Path(edge.positions), numbered(names))
        ground = np.maximum(np.hypot(x, y), NEAREST)
    distance = np.hypot(ground, edge.altitude) if edge.altitude else ground
    shadowing = edge.shadowing_db * normal(*uniforms(seed, "shadowing", 0, devices))
    loss = _path_loss(edge, distance, shadowing)
    fixed = uniforms(seed, "clocks", 0, devices)
    low, high = (1e9 * float(end) for end in edge.clock_ghz)
    clock = low + (high - low) * fixed[0]
    if capacities is not None:
        measured = trained_cycles / capacities.seconds_per_sample
        clock = np.where(np.isnan(measured), clock, measured)
    share, phase = uniforms(seed, "presence", 0, devices)
    presence = edge.presence[0] + (edge.presence[1] - edge.presence[0]) * share
    return Cell(x, y, distance, loss, gain(loss - edge.antenna_dbi), clock, presence, 2 * np.pi * phase)


def _path_loss(edge: Edge, distance: Numbers, shadowing: Numbers) -> Numbers:
    if edge.path_loss == "macro":
        return macro_path_loss(distance, shadowing)
    carrier = edge.carrier_ghz * 1e9
    if edge.path_loss == "free-space":
        return free_space_path_loss(distance, carrier, shadowing)
    return log_distance_path_loss(distance, edge.path_loss_exponent, carrier, shadowing)


def numbered(names: Sequence[str]) -> dict[str, int]:
    """Devices by name."""
    return {name: i for i, name in enumerate(names)}


def edge_terms(
    edge: Edge,
    names: Sequence[str],
    seed: int,
    loads: tuple[Load, Load],
    trained_cycles: float,
    wanted: int,
    unlabelled: NDArray[np.int64],
) -> EdgeTerms:
    """Everything fixed of a run's edge network; reads the files that the settings name."""
    capacities = read_capacities(Path(edge.capacities), numbered(names)) if edge.capacities else None
    trace = read_trace(Path(edge.trace), numbered(names)) if edge.trace else None
    if edge.clock == "semi-async" and edge.wait_for > wanted:
        raise InputError(f"edge.wait_for = {edge.wait_for}: only {wanted} devices are active; give at most that")
    cell = cell_of(edge, names, seed, capacities, trained_cycles)
    return EdgeTerms(edge, seed, radio_of(edge), cell, *loads, wanted, unlabelled, trace, capacities)
