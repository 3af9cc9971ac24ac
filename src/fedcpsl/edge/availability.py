"""Who is there, when a device leaves, and when somebody comes: functions of virtual time, of many devices at once.

A device is there or not as a function of (seed, device, time) alone, so compared algorithms meet the same devices at
the same time. Functions that take a state change its arrays in place; the caller gives a copy.
"""

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.cell import EdgeTerms
from fedcpsl.edge.measurements import Trace
from fedcpsl.edge.radio import Numbers
from fedcpsl.edge.state import EdgeState, switch_seconds
from fedcpsl.schedule import uniforms

Devices = NDArray[np.int64]
PIECES_OF_A_DAY = 96  # a daily rhythm is drawn again for each
LONGEST_SEARCH = 10_000  # pieces of a day, or moments, after which nobody is expected any more
A_MOMENT = 1e-6  # seconds


def daily_chance(presence: Numbers, seconds: float, day: float, phase: Numbers) -> Numbers:
    """p_i (0.5 + 0.4 sin(2 pi t / day + phase_i)), cut to [0, 1]."""
    found: Numbers = np.clip(presence * (0.5 + 0.4 * np.sin(2 * np.pi * seconds / day + phase)), 0, 1)
    return found


def is_there(terms: EdgeTerms, state: EdgeState, devices: Devices) -> NDArray[np.bool_]:
    """Who of some devices can be drawn now: there, not busy, with a battery that is not empty."""
    now = state.seconds
    there: NDArray[np.bool_] = state.busy_until[devices] <= now
    if terms.settings.availability == "always" and not terms.has_batteries:
        return there
    idle_seconds = _brought_up_to(terms, state, devices, now)
    there &= _present(terms, state, devices, now)
    if terms.has_batteries:
        level = state.battery[devices] + terms.settings.recharge_w * idle_seconds
        state.battery[devices] = np.minimum(level, float(terms.settings.battery))
        state.charged_at[devices] = np.maximum(state.charged_at[devices], now)
        there &= state.battery[devices] > terms.settings.battery_minimum
    return there


def leaves_after(terms: EdgeTerms, state: EdgeState, devices: Devices, horizon: float) -> Numbers:
    """Seconds from now until devices that are there leave; infinite where that is after the horizon, in seconds."""
    kind, now = terms.settings.availability, state.seconds
    if kind == "on-off":
        return state.next_switch[devices] - now
    if kind == "trace":
        assert terms.trace is not None
        return terms.trace.end[np.maximum(_last_begun(terms.trace, devices, now), 0)] - now
    if kind == "daily":
        return _daily_end(terms, devices, now, now + horizon) - now
    return np.full(len(devices), np.inf)


def next_moment(terms: EdgeTerms, state: EdgeState, devices: Devices) -> float | None:
    """The next time at which one of some devices may be drawn, none of which can be now; None: never."""
    now = state.seconds
    coming = np.maximum(_next_presence(terms, state, devices, now), state.busy_until[devices])
    if terms.has_batteries:
        missing = terms.settings.battery_minimum - state.battery[devices]
        with np.errstate(divide="ignore", invalid="ignore"):
            charging = np.where(missing < 0, 0.0, missing / terms.settings.recharge_w + A_MOMENT)
        coming = np.maximum(coming, now + np.where(np.isnan(charging), np.inf, charging))
    soonest = float(coming.min(initial=np.inf))
    return max(soonest, now + A_MOMENT) if np.isfinite(soonest) else None


def _present(terms: EdgeTerms, state: EdgeState, devices: Devices, now: float) -> NDArray[np.bool_]:
    kind = terms.settings.availability
    if kind == "on-off":
        found: NDArray[np.bool_] = state.switches[devices] % 2 == 0
        return found
    if kind == "trace":
        assert terms.trace is not None
        last = _last_begun(terms.trace, devices, now)
        begun = last >= terms.trace.first[devices]
        return begun & (now < terms.trace.end[np.maximum(last, 0)])
    if kind == "daily":
        return _in_piece(terms, devices, int(now // _piece(terms)))
    return np.ones(len(devices), bool)


def _brought_up_to(terms: EdgeTerms, state: EdgeState, devices: Devices, now: float) -> Numbers:
    """Switch devices that are on and off up to now; returns the seconds since `charged_at` that each was there."""
    kind = terms.settings.availability
    if not terms.has_batteries and kind != "on-off":
        return np.zeros(len(devices))
    since = state.charged_at[devices] if terms.has_batteries else np.full(len(devices), now)
    if kind == "on-off":
        return _switched(terms, state, devices, since, now)
    if kind == "always":
        return np.maximum(now - since, 0.0)
    if kind == "trace":
        assert terms.trace is not None
        return np.maximum(_seconds_until(terms.trace, devices, now) - _seconds_until(terms.trace, devices, since), 0.0)
    return _daily_seconds(terms, devices, since, now)


def _switched(terms: EdgeTerms, state: EdgeState, devices: Devices, since: Numbers, now: float) -> Numbers:
    """Seconds that devices were there from `since` to now, switching them until then."""
    passed, cursor = np.zeros(len(devices)), since.copy()
    due = np.flatnonzero(state.next_switch[devices] <= now)
    while len(due):
        which = devices[due]
        ends, on = state.next_switch[which], state.switches[which] % 2 == 0
        passed[due] += np.where(on, np.maximum(ends - cursor[due], 0.0), 0.0)
        cursor[due] = np.maximum(cursor[due], ends)
        state.switches[which] += 1
        state.next_switch[which] = ends + switch_seconds(terms, state.switches[which], which)
        due = due[state.next_switch[which] <= now]
    on = state.switches[devices] % 2 == 0
    found: Numbers = passed + np.where(on, np.maximum(now - cursor, 0.0), 0.0)
    return found


def _last_begun(trace: Trace, devices: Devices, now: float | Numbers) -> NDArray[np.int64]:
    """The last of each device's intervals that has begun, by binary search; one before its first where none has."""
    low, high = trace.first[devices], trace.first[devices + 1]
    while (open_ := low < high).any():
        middle = (low + high) // 2
        begun = open_ & (trace.start[np.minimum(middle, len(trace.start) - 1)] <= now)
        low, high = np.where(begun, middle + 1, low), np.where(open_ & ~begun, middle, high)
    found: NDArray[np.int64] = low - 1
    return found


def _seconds_until(trace: Trace, devices: Devices, now: float | Numbers) -> Numbers:
    """Seconds that devices were there until a time."""
    last = _last_begun(trace, devices, now)
    at = np.maximum(last, 0)
    found = trace.before[at] + np.minimum(now, trace.end[at]) - trace.start[at]
    return np.where(last >= trace.first[devices], found, 0.0)


def _piece(terms: EdgeTerms) -> float:
    return terms.settings.day_seconds / PIECES_OF_A_DAY


def _in_piece(terms: EdgeTerms, devices: Devices, piece: int) -> NDArray[np.bool_]:
    """Who is there in a piece of a day: a number drawn for it is at most the chance in its middle."""
    seconds = (piece + 0.5) * _piece(terms)
    cell = terms.cell
    chance = daily_chance(cell.presence[devices], seconds, terms.settings.day_seconds, cell.phase[devices])
    found: NDArray[np.bool_] = uniforms(terms.seed, "presence", piece + 1, devices)[0] <= chance
    return found


def _daily_end(terms: EdgeTerms, devices: Devices, now: float, horizon: float) -> Numbers:
    """When devices that are there leave; infinite after the horizon."""
    ends, piece = np.full(len(devices), np.inf), int(now // _piece(terms))
    staying = np.arange(len(devices))
    for k in range(piece + 1, piece + LONGEST_SEARCH):
        begins = k * _piece(terms)
        if begins >= horizon or not len(staying):
            break
        there = _in_piece(terms, devices[staying], k)
        ends[staying[~there]] = begins
        staying = staying[there]
    return ends


def _daily_seconds(terms: EdgeTerms, devices: Devices, since: Numbers, now: float) -> Numbers:
    """Seconds that devices were there from `since` to now."""
    passed, length = np.zeros(len(devices)), _piece(terms)
    for k in range(int(since.min(initial=now) // length), int(now // length) + 1):
        inside = np.minimum((k + 1) * length, now) - np.maximum(k * length, since)
        which = np.flatnonzero(inside > 0)
        if len(which):
            passed[which] += np.where(_in_piece(terms, devices[which], k), inside[which], 0.0)
    return passed


def _next_presence(terms: EdgeTerms, state: EdgeState, devices: Devices, now: float) -> Numbers:
    """When each device is there, now or next; infinite: never."""
    kind = terms.settings.availability
    present = _present(terms, state, devices, now)
    if kind == "on-off":
        return np.where(present, now, state.next_switch[devices])
    if kind == "trace":
        assert terms.trace is not None
        following = _last_begun(terms.trace, devices, now) + 1
        there = following < terms.trace.first[devices + 1]
        starts = terms.trace.start[np.minimum(following, len(terms.trace.start) - 1)]
        return np.where(present, now, np.where(there, starts, np.inf))
    if kind == "daily":
        return _next_piece(terms, devices, present, now)
    return np.full(len(devices), now)


def _next_piece(terms: EdgeTerms, devices: Devices, present: NDArray[np.bool_], now: float) -> Numbers:
    """When the first of some devices is there again, by pieces of a day; for the others infinite."""
    found, piece = np.where(present, now, np.inf), int(now // _piece(terms))
    for k in range(piece + 1, piece + LONGEST_SEARCH):
        there = _in_piece(terms, devices, k)
        if there.any():
            found[there] = np.minimum(found[there], k * _piece(terms))
            break
    return found
