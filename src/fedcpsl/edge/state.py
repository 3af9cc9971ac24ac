"""What changes of an edge network from round to round, and the records of a round."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.cell import EdgeTerms
from fedcpsl.edge.radio import Numbers
from fedcpsl.schedule import uniforms

OUTCOMES = ("counted", "lost", "late", "dropped", "left", "battery", "idle")
COUNTED, LOST, LATE, DROPPED, LEFT, BATTERY, IDLE = range(len(OUTCOMES))
COUNTS = (*OUTCOMES, "partial", "steps_planned", "steps_done", "idle_rounds")


class Records(NamedTuple):
    """Drawn devices of a round, [drawn] each: what each did, and what became of it."""

    device: NDArray[np.int64]
    staleness: NDArray[np.int64]  # rounds between its draw and the end of its part
    start: Numbers  # seconds of virtual time at which it was drawn
    download: Numbers  # seconds
    compute: Numbers
    upload: Numbers
    steps_planned: NDArray[np.int64]
    steps_done: NDArray[np.int64]
    outcome: NDArray[np.int64]  # a number of `OUTCOMES`
    compute_joules: Numbers
    radio_joules: Numbers
    bandwidth: Numbers  # hertz of the uplink
    outage: Numbers  # the probability that its upload would be lost in the slot; 0 without a deadline


class EdgeState(NamedTuple):
    """The clock, energies, batteries and counters after some rounds; of batteries and switches nothing where unused.

    The next round overwrites the arrays of [devices] in place, as it does device states.
    """

    seconds: float  # of virtual time
    round_seconds: float  # of the last round
    compute_joules: float
    radio_joules: float
    counts: dict[str, int]  # by COUNTS
    busy_until: Numbers  # [devices]
    visits: NDArray[np.int64]
    losses: NDArray[np.int64]
    joules: Numbers  # [2, devices]: of computing, of the radio
    battery: Numbers  # joules left
    charged_at: Numbers  # seconds at which that was so
    switches: NDArray[np.int64]  # how often a device has gone or come; odd: it is not there
    next_switch: Numbers  # seconds at which it does next
    records: Records | None = None  # of the devices whose part ended in the last round
    flight: Records | None = None  # of those still under way, `staleness` being the round of their draw; semi-async


ARRAYS = ("busy_until", "visits", "losses", "joules", "battery", "charged_at", "switches", "next_switch")
NUMBERS = ("seconds", "round_seconds", "compute_joules", "radio_joules", "counts")


def initial_edge_state(terms: EdgeTerms) -> EdgeState:
    """Virtual time 0: batteries full, nobody busy."""
    count = terms.devices
    charged = count if terms.has_batteries else 0
    switches, next_switch = np.zeros(0, np.int64), np.zeros(0)
    if terms.settings.availability == "on-off":
        everybody, on, off = np.arange(count), terms.settings.on_seconds, terms.settings.off_seconds
        here = uniforms(terms.seed, "presence", 0, everybody)[1] <= on / (on + off)
        switches = np.where(here, 0, 1)
        next_switch = switch_seconds(terms, switches, everybody)
    return EdgeState(
        seconds=0.0,
        round_seconds=0.0,
        compute_joules=0.0,
        radio_joules=0.0,
        counts=dict.fromkeys(COUNTS, 0),
        busy_until=np.zeros(count),
        visits=np.zeros(count, np.int64),
        losses=np.zeros(count, np.int64),
        joules=np.zeros((2, count)),
        battery=np.full(charged, float(terms.settings.battery) if charged else 0.0),
        charged_at=np.zeros(charged),
        switches=switches,
        next_switch=next_switch,
    )


def switch_seconds(terms: EdgeTerms, switches: NDArray[np.int64], devices: NDArray[np.int64]) -> Numbers:
    """How long devices stay as they are after so many switches: exponential, of the mean of that state."""
    mean = np.where(switches % 2 == 0, terms.settings.on_seconds, terms.settings.off_seconds)
    found: Numbers = -mean * np.log(uniforms(terms.seed, "presence", switches + 1, devices)[0])
    return found


def copied(state: EdgeState) -> EdgeState:
    """The state with arrays of its own, to be changed in place during a round."""
    arrays: dict[str, Any] = {name: getattr(state, name).copy() for name in ARRAYS}
    return state._replace(counts=dict(state.counts), **arrays)


def metrics_of(state: EdgeState) -> dict[str, float | int]:
    """Virtual time, energy and what became of uploads so far, for a line of metrics."""
    return {
        "seconds": state.seconds,
        "round_seconds": state.round_seconds,
        "compute_joules": state.compute_joules,
        "radio_joules": state.radio_joules,
        **state.counts,
    }
