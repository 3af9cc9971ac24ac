"""Formula vectors: a cell's inputs and what the formulas must make of them, as JSON; `fedcpsl verify` compares."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.allocation import equal, equal_outage, equal_time
from fedcpsl.edge.compute import compute_joules, compute_seconds, steps_in_time, visit_cycles
from fedcpsl.edge.radio import (
    gain,
    is_lost,
    macro_path_loss,
    noise_density,
    outage,
    rate,
    transmission_joules,
    transmission_seconds,
    watts,
)
from fedcpsl.errors import InputError
from fedcpsl.storage import read_json

RELATIVE, RELATIVE_SOLVED = 1e-9, 1e-6  # the second: of bandwidths that are solved for, and what follows from them
EXACT = ("lost_in_slot", "steps_partial")
FROM_BANDWIDTH = ("bandwidth", "rate", "t_up", "e_up", "p_outage_in_slot", "outage", "finish")


class Compared(NamedTuple):
    """One quantity of a vector: `error` is relative to the tolerance, so above 1 is a failure."""

    quantity: str
    error: float
    largest: float  # the largest absolute difference

    def __str__(self) -> str:
        return f"{self.quantity} differs by {self.largest:.3g}"


def read_formula_vector(path: Path) -> dict[str, Any]:
    """Read a vector: `inputs` and `expected`."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(k), dict) for k in ("inputs", "expected")):
        raise InputError(f"{path}: not a formula vector: it needs `inputs` and `expected`")
    return content


def compared(vector: Mapping[str, Any]) -> Iterator[Compared]:
    """Yield the difference of every expected quantity; one that is not known here is a difference."""
    try:
        found, solved = computed(vector["inputs"]), vector["inputs"]["allocation"] != "equal"
    except (KeyError, TypeError) as error:
        raise InputError(f"not a formula vector: {error} is missing or no number") from error
    for quantity, expected in vector["expected"].items():
        if quantity not in found:
            yield Compared(quantity, float("inf"), float("inf"))
            continue
        relative = RELATIVE_SOLVED if solved and quantity in FROM_BANDWIDTH else RELATIVE
        yield _difference(quantity, np.asarray(found[quantity]), np.asarray(expected), relative)


def _difference(quantity: str, found: NDArray[Any], expected: NDArray[Any], relative: float) -> Compared:
    if found.shape != expected.shape:
        return Compared(quantity, float("inf"), float("inf"))
    gap = np.abs(found.astype(float) - expected.astype(float))
    if quantity in EXACT:
        return Compared(quantity, float("inf") if gap.any() else 0.0, float(gap.max(initial=0.0)))
    worst = float((gap / np.maximum(relative * np.abs(expected), 1e-300)).max(initial=0.0))
    return Compared(quantity, worst if worst == worst else float("inf"), float(gap.max(initial=0.0)))


def computed(given: Mapping[str, Any]) -> dict[str, Any]:
    """All quantities of EDGE formulas, from a vector's inputs, in SI units."""
    lists = ("distance_m", "shadowing_db", "fading_up", "fading_down", "clock_hz")
    distance, shadowing, fade_up, fade_down, clock = (np.asarray(given[name], float) for name in lists)
    steps, cycles = np.asarray(given["steps"], np.int64), float(given["cycles_per_step"])
    noise, interference = noise_density(given["noise_figure_db"]), float(given["interference_w"])
    power, station = watts(given["device_dbm"]), watts(given["station_dbm"])
    loss = macro_path_loss(distance, shadowing)
    gains, bits = gain(loss), np.full(len(distance), float(given["bits_up"]))
    down = rate(np.full(len(gains), float(given["bandwidth_down_hz"])), station, gains, fade_down, noise)
    t_down = transmission_seconds(np.full(len(gains), float(given["bits_down"])), down)
    worked = visit_cycles(steps, cycles)
    t_compute = compute_seconds(worked, clock)
    found: dict[str, Any] = {
        "path_loss_db": loss,
        "gain": gains,
        "t_down": t_down,
        "t_compute": t_compute,
        "e_compute": compute_joules(worked, clock, float(given["kappa"])),
    }
    total, slot, deadline = float(given["bandwidth_up_hz"]), given["upload_slot_s"], given["deadline_s"]
    if given["allocation"] == "equal":
        bandwidth = equal(total, len(gains))
    elif given["allocation"] == "equal-time":
        bandwidth, found["finish"] = equal_time(
            total, t_down + t_compute, bits, power, gains * fade_up, noise, interference
        )
    elif given["allocation"] == "equal-outage":
        bandwidth, found["outage"] = equal_outage(total, bits, slot, power, gains, noise, interference)
    else:
        raise InputError(f"not a formula vector: allocation {given['allocation']!r} is not known")
    rates = rate(bandwidth, power, gains, fade_up, noise, interference)
    t_up = transmission_seconds(bits, rates)
    found |= {"bandwidth": bandwidth, "rate": rates, "t_up": t_up, "e_up": transmission_joules(power, t_up)}
    if slot is not None:
        found["p_outage_in_slot"] = outage(bandwidth, power, gains, noise, interference, bits, slot)
        found["lost_in_slot"] = is_lost(rates, bits, slot)
        found["e_up_booked"] = transmission_joules(power, np.full(len(gains), float(slot)))
    if deadline is not None:
        found["steps_partial"] = steps_in_time(steps, deadline, t_down, slot or 0.0, cycles, clock)
    return found
