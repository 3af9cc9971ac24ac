"""A round's physics: who is drawn, how long each part takes, whose upload is counted, how far the clock moves.

The simulation draws with `drawn_devices`, then asks `play` what becomes of the drawn; it trains accordingly.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.availability import LONGEST_SEARCH, is_there, next_moment
from fedcpsl.edge.cell import EdgeTerms
from fedcpsl.edge.radio import Numbers
from fedcpsl.edge.state import BATTERY, COUNTED, IDLE, LATE, OUTCOMES, EdgeState, Records
from fedcpsl.edge.timeline import Flags, timeline
from fedcpsl.edge.weights import inverse_weight, staleness_weight

FIRST_LOOK = 64  # devices of whom is asked at a time whether they are there


class Drawn(NamedTuple):
    """Who takes part in a round."""

    state: EdgeState  # at the moment of the draw
    devices: NDArray[np.int64]  # in ascending order


class Played(NamedTuple):
    """A round's outcome: the state after it, and what each of the newly drawn is to do, in their order."""

    state: EdgeState
    steps: NDArray[np.int64]
    lost: Flags
    sends: Flags  # whether it uses the uplink
    weight: Numbers  # of its update in theta
    ended: Records  # the devices whose part ends in this round; the drawn, but with the semi-asynchronous clock


def drawn_devices(terms: EdgeTerms, state: EdgeState, order: NDArray[np.int64], wanted: int) -> Drawn:
    """The first devices in a drawn order that are there; where nobody is, at the next moment at which somebody is.

    It changes the state's arrays in place, as the whole round does.
    """
    for _ in range(LONGEST_SEARCH):
        found = _first_there(terms, state, order, wanted)
        if len(found) or wanted == 0 or _in_flight(state):
            break
        moment = next_moment(terms, state, order)
        if moment is None:
            break
        state = state._replace(seconds=moment)
    return Drawn(state, np.sort(found))


def _first_there(terms: EdgeTerms, state: EdgeState, order: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    found: list[NDArray[np.int64]] = []
    count, first, size = 0, 0, max(FIRST_LOOK, 2 * wanted)
    while count < wanted and first < len(order):
        some = order[first : first + size]
        found.append(some[is_there(terms, state, some)])
        count, first, size = count + len(found[-1]), first + size, 4 * size
    return (found[0] if len(found) == 1 else np.concatenate([order[:0], *found]))[:wanted]


def play(
    terms: EdgeTerms,
    drawn: Drawn,
    round: int,
    planned: NDArray[np.int64],
    *,
    bits_down: Numbers | None = None,
    lost_anyway: Flags | None = None,
    loss_rate: float = 0.0,
    personal: bool = False,
) -> Played:
    """What becomes of the drawn devices, given the steps that each was to make, and the state after the round.

    `lost_anyway` has the uploads that are lost whatever the channel does, and `loss_rate` the chance of that.
    """
    load, count = terms.personal_load if personal else terms.load, len(drawn.devices)
    bits = np.full(count, load.bits_down) if bits_down is None else bits_down
    lost = np.zeros(count, bool) if lost_anyway is None else lost_anyway
    sharing = terms.wanted if terms.semi_async else count
    records = timeline(terms, drawn.state, round, load, drawn.devices, planned, bits, lost, sharing)
    state = _on_their_way(terms, drawn.state, records)
    if terms.semi_async and not personal:
        return _until_enough_arrived(terms, state, round, records)
    records, seconds = _closed(terms, records, terms.wanted if not personal else count)
    weight = np.ones(count)
    if terms.settings.correction == "inverse":
        counted, late = ((records.outcome == kind).sum() for kind in (COUNTED, LATE))
        lost_chance = 1 - (1 - records.outage) * (1 - loss_rate)
        weight = inverse_weight(lost_chance, int(counted), count - int(late), terms.settings.correction_cap)
    return _played(_booked(state, records._replace(staleness=np.zeros(count, np.int64)), seconds), records, weight)


def _played(state: EdgeState, records: Records, weight: Numbers) -> Played:
    assert state.records is not None
    return Played(state, records.steps_done, records.outcome != COUNTED, records.upload > 0, weight, state.records)


def _on_their_way(terms: EdgeTerms, state: EdgeState, records: Records) -> EdgeState:
    """The drawn are busy until their part ends, or the deadline ends the round; their batteries pay for it."""
    ends = ends_of(records)
    if terms.deadline is not None:  # a download may be longer
        ends = np.minimum(ends, records.start + terms.deadline)
    state.busy_until[records.device] = ends
    if terms.has_batteries:
        level = state.battery[records.device] - records.compute_joules - records.radio_joules
        state.battery[records.device] = np.where(records.outcome == BATTERY, 0.0, np.maximum(level, 0.0))
        state.charged_at[records.device] = ends
    return state


def ends_of(records: Records) -> Numbers:
    """Seconds of virtual time at which each device's part ends: start + t_down + t_cmp + t_up."""
    return records.start + (records.download + records.compute + records.upload)


def _closed(terms: EdgeTerms, records: Records, wanted: int) -> tuple[Records, float]:
    """Whose uploads came too late to be counted, and the seconds that the round took.

    The server waits for every upload that it expects, or for as many as it wanted of more; until the deadline where
    one does not come, or, without one, until it knows that.
    """
    if not len(records.device):
        return records, 0.0
    takes = records.download + records.compute + records.upload
    expected, arrived = records.steps_planned > 0, records.outcome == COUNTED
    needed = min(wanted, int(expected.sum()))
    order = np.flatnonzero(arrived)[np.argsort(takes[arrived], kind="stable")]
    if needed and len(order) >= needed:
        outcome = records.outcome.copy()
        outcome[order[needed:]] = LATE
        return records._replace(outcome=outcome), float(takes[order[needed - 1]])
    if terms.deadline is not None and needed:
        return records, terms.deadline
    return records, float(takes.max())


def _booked(state: EdgeState, records: Records, seconds: float) -> EdgeState:
    """The state once the parts of some devices have ended, in a round that took some seconds."""
    counts = dict(state.counts)
    for kind, number in zip(OUTCOMES, np.bincount(records.outcome, minlength=len(OUTCOMES)).tolist(), strict=True):
        counts[kind] += number
    short = (records.outcome == COUNTED) & (records.steps_done < records.steps_planned)
    counts["partial"] += int(short.sum())
    counts["steps_planned"] += int(records.steps_planned.sum())
    counts["steps_done"] += int(records.steps_done.sum())
    counts["idle_rounds"] += not len(records.device)
    state.visits[records.device] += 1
    state.losses[records.device] += (records.outcome != COUNTED) & (records.outcome != IDLE)
    state.joules[:, records.device] += records.compute_joules, records.radio_joules
    return state._replace(
        seconds=state.seconds + seconds,
        round_seconds=seconds,
        compute_joules=state.compute_joules + float(records.compute_joules.sum()),
        radio_joules=state.radio_joules + float(records.radio_joules.sum()),
        counts=counts,
        records=records,
    )


def _in_flight(state: EdgeState) -> int:
    return 0 if state.flight is None else len(state.flight.device)


def _until_enough_arrived(terms: EdgeTerms, state: EdgeState, round: int, new: Records) -> Played:
    """The semi-asynchronous clock: the round ends once `wait_for` of the uploads on their way have arrived."""
    flight = new if state.flight is None else joined(state.flight, new)
    ends = ends_of(flight)
    arriving = np.sort(ends[flight.outcome == COUNTED])
    needed = min(terms.settings.wait_for, len(arriving))
    now = float(arriving[needed - 1] if needed else ends.max(initial=state.seconds))
    over = ends <= now
    ended = chosen(flight, over)
    ended = ended._replace(staleness=round - ended.staleness)
    order = np.argsort(ended.device, kind="stable")
    ended = chosen(ended, order)
    seconds = max(now - state.seconds, 0.0)
    state = _booked(state, ended, seconds)._replace(flight=chosen(flight, ~over))
    return Played(
        state,
        new.steps_done,
        new.outcome != COUNTED,
        new.upload > 0,
        staleness_weight(ended.staleness, terms.settings.staleness),
        ended,
    )


def joined(one: Records, other: Records) -> Records:
    fields: list[Any] = [np.concatenate(pair) for pair in zip(one, other, strict=True)]
    return Records(*fields)


def chosen(records: Records, which: NDArray[np.int64] | Flags) -> Records:
    fields: list[Any] = [field[which] for field in records]
    return Records(*fields)
