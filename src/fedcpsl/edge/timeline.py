"""What each drawn device does in its part of a round: downloads, computes, sends; and what stops it."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge import allocation
from fedcpsl.edge.availability import leaves_after
from fedcpsl.edge.cell import EdgeTerms, Load
from fedcpsl.edge.compute import clock, compute_joules, compute_seconds, steps_in_time, visit_cycles
from fedcpsl.edge.radio import (
    Numbers,
    is_lost,
    outage,
    packet_error,
    rate,
    rayleigh,
    transmission_joules,
    transmission_seconds,
)
from fedcpsl.edge.state import BATTERY, COUNTED, DROPPED, IDLE, LEFT, LOST, EdgeState, Records
from fedcpsl.schedule import normal, uniforms

Flags = NDArray[np.bool_]
ROUNDS_AT_ONCE, FEW = 16, 64  # of so few devices, numbers of several rounds take hardly longer than those of one


@lru_cache(maxsize=1024)  # more than runs go side by side
def _numbers_of_rounds(seed: int, block: int, devices: int) -> Numbers:
    """The numbers of all devices in a block of rounds, [4, rounds, devices]."""
    rounds = np.arange(block * ROUNDS_AT_ONCE, (block + 1) * ROUNDS_AT_ONCE)
    everybody = np.tile(np.arange(devices), len(rounds))
    return uniforms(seed, "channel", np.repeat(rounds, devices), everybody, 4).reshape(4, len(rounds), devices)


def channel_numbers(seed: int, round: int, which: NDArray[np.int64], devices: int) -> Numbers:
    """Four numbers in (0, 1) of each device for its fading and clock, [4, which], keyed by (seed, round, device)."""
    if devices > FEW:
        return uniforms(seed, "channel", round, which, 4)
    return _numbers_of_rounds(seed, round // ROUNDS_AT_ONCE, devices)[:, round % ROUNDS_AT_ONCE, which]


def fades_and_clocks(terms: EdgeTerms, round: int, devices: NDArray[np.int64]) -> tuple[Numbers, Numbers, Numbers]:
    """A round's fading of some devices' channels, down and up, and their clocks."""
    down, up, u, v = channel_numbers(terms.seed, round, devices, terms.devices)
    hertz = clock(terms.cell.clock[devices], terms.settings.clock_sigma, normal(u, v))
    if terms.settings.fading == "none":
        return np.ones(len(devices)), np.ones(len(devices)), hertz
    return rayleigh(down), rayleigh(up), hertz


def download_seconds(
    terms: EdgeTerms, load: Load, devices: NDArray[np.int64], fading: Numbers, bits: Numbers
) -> Numbers:
    """t_down_i = bits_down / (W_dn log2(1 + p_bs g_i a_dn_i / (W_dn N0))): everybody drawn receives."""
    if terms.settings.download == "free" or not load.sends:
        return np.zeros(len(devices))
    radio = terms.radio
    width = radio.down / (1 if load.shared else max(len(devices), 1))
    rates = rate(width, radio.station, terms.cell.gain[devices], fading, radio.noise)
    if terms.capacities is not None:
        measured = terms.capacities.down[devices]
        rates = np.where(np.isnan(measured), rates, measured)
    return transmission_seconds(bits, rates)


def bandwidths(
    terms: EdgeTerms, load: Load, devices: NDArray[np.int64], fading: Numbers, before: Numbers, sharing: int
) -> Numbers:
    """W_i of some devices, as the settings divide the uplink; `before`: t_down + t_cmp."""
    radio, kind = terms.radio, terms.settings.allocation
    if kind == "equal" or not len(devices):
        return np.full(len(devices), radio.up / max(sharing, 1))
    bits, gains = np.full(len(devices), load.bits_up), terms.cell.gain[devices]
    if kind == "equal-time":
        received = gains * fading
        return allocation.equal_time(
            radio.up, before, bits, radio.power, received, radio.noise, radio.interference
        ).bandwidth
    given = radio.up, bits, terms.slot, radio.power, gains, radio.noise, radio.interference
    return allocation.equal_outage(*given).bandwidth


def timeline(
    terms: EdgeTerms,
    state: EdgeState,
    round: int,
    load: Load,
    devices: NDArray[np.int64],
    planned: NDArray[np.int64],
    bits_down: Numbers,
    lost_anyway: Flags,
    sharing: int,
) -> Records:
    """Each drawn device's part of a round that begins now; the outcome of what arrives is `counted`.

    `sharing` is among how many the uplink is divided; `lost_anyway`: uploads that are lost whatever the channel.
    """
    down_fade, up_fade, hertz = fades_and_clocks(terms, round, devices)
    once = terms.once(load, devices)
    download = download_seconds(terms, load, devices, down_fade, bits_down)
    steps, dropped = _steps(terms, load, planned, download, hertz, once)
    cycles = visit_cycles(steps, load.cycles, once)
    if dropped.any():  # they compute until the slot would begin
        assert terms.deadline is not None
        cycles = np.where(dropped, np.maximum(terms.deadline - _slot(terms, load) - download, 0.0) * hertz, cycles)
    compute = compute_seconds(cycles, hertz)
    sends = (steps > 0) & ~dropped & load.sends
    width = bandwidths(terms, load, devices, up_fade, download + compute, sharing)
    upload, lost, chance = _upload(terms, load, round, devices, up_fade, width)
    records = Records(
        device=devices,
        staleness=np.full(len(devices), round),  # until its part has ended
        start=np.full(len(devices), state.seconds),
        download=download,
        compute=compute,
        upload=np.where(sends, upload, 0.0),
        steps_planned=planned,
        steps_done=steps,
        outcome=np.where(dropped, DROPPED, np.where(steps == 0, IDLE, (sends & (lost | lost_anyway)) * LOST)),
        compute_joules=compute_joules(cycles, hertz, terms.settings.kappa),
        radio_joules=np.zeros(len(devices)),
        bandwidth=np.where(sends, width, 0.0),
        outage=np.where(sends, chance, 0.0),
    )
    if load.sends:
        records = _without_those_who_leave(terms, state, records)
    records = records._replace(radio_joules=transmission_joules(terms.radio.power, records.upload))
    return _while_batteries_last(terms, state, records, hertz, load.cycles, once) if terms.has_batteries else records


def _slot(terms: EdgeTerms, load: Load) -> float:
    return terms.slot if load.sends else 0.0


def _steps(
    terms: EdgeTerms, load: Load, planned: NDArray[np.int64], download: Numbers, hertz: Numbers, once: Numbers
) -> tuple[NDArray[np.int64], Flags]:
    """The steps that each device makes, and who is dropped for making fewer than planned."""
    if terms.deadline is None:
        return planned, np.zeros(len(planned), bool)
    steps = steps_in_time(planned, terms.deadline, download, _slot(terms, load), load.cycles, hertz, once)
    return steps, (steps < planned) & (terms.settings.on_deadline == "drop")


def _upload(
    terms: EdgeTerms, load: Load, round: int, devices: NDArray[np.int64], fading: Numbers, width: Numbers
) -> tuple[Numbers, Flags, Numbers]:
    """Seconds of each upload, whether the channel loses it, and the probability of that."""
    never, nothing = np.zeros(len(devices), bool), np.zeros(len(devices))
    if not load.sends:
        return nothing, never, nothing
    radio, gains, bits = terms.radio, terms.cell.gain[devices], load.bits_up
    rates = rate(width, radio.power, gains, fading, radio.noise, radio.interference)
    unmeasured: Flags | bool = True
    if terms.capacities is not None:
        measured = terms.capacities.up[devices]
        unmeasured = np.isnan(measured)
        rates = np.where(unmeasured, rates, measured)
    if terms.deadline is None:
        return transmission_seconds(bits, rates), never, nothing
    slot = np.full(len(devices), terms.slot)
    lost = is_lost(rates, bits, terms.slot)
    if terms.settings.error_rule == "waterfall":
        given = width, radio.power, gains, fading, radio.noise, radio.interference
        chance = packet_error(terms.settings.waterfall_margin, *given)
        by_chance = uniforms(terms.seed, "packets", round, devices)[0] <= chance
        return slot, np.where(unmeasured, by_chance, lost), np.where(unmeasured, chance, lost)
    if terms.settings.fading == "none":
        return slot, lost, lost.astype(float)
    chance = outage(width, radio.power, gains, radio.noise, radio.interference, bits, terms.slot)
    return slot, lost, np.where(unmeasured, chance, lost)


def _without_those_who_leave(terms: EdgeTerms, state: EdgeState, records: Records) -> Records:
    """Who leaves before its upload has ended is lost; it sends until then, and computes on."""
    if terms.settings.availability == "always":
        return records
    ready = records.download + records.compute
    finish = ready + records.upload
    away = leaves_after(terms, state, records.device, float(finish.max(initial=0.0)))
    left = (away < finish) & ((records.outcome == COUNTED) | (records.outcome == LOST))
    return records._replace(
        outcome=np.where(left, LEFT, records.outcome),
        upload=np.where(left, np.clip(away - ready, 0.0, records.upload), records.upload),
    )


def _while_batteries_last(
    terms: EdgeTerms, state: EdgeState, records: Records, hertz: Numbers, cycles: float, once: Numbers
) -> Records:
    """A device whose battery runs out computes and sends until then, and is lost."""
    level = state.battery[records.device]
    dies = (records.compute_joules + records.radio_joules > level) & (records.outcome != IDLE)
    if not dies.any():
        return records
    computing = np.minimum(records.compute_joules, level)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(records.compute_joules > 0, computing / records.compute_joules, 1.0)
    compute, sending = records.compute * share, np.clip(level - records.compute_joules, 0.0, records.radio_joules)
    managed = np.floor((compute * hertz - once) / cycles) if cycles else records.steps_done
    steps = np.where(share < 1, np.clip(managed, 0, records.steps_done), records.steps_done).astype(np.int64)
    return records._replace(
        outcome=np.where(dies, BATTERY, records.outcome),
        compute=np.where(dies, compute, records.compute),
        upload=np.where(dies, sending / terms.radio.power, records.upload),
        steps_done=np.where(dies, steps, records.steps_done),
        compute_joules=np.where(dies, computing, records.compute_joules),
        radio_joules=np.where(dies, sending, records.radio_joules),
    )
