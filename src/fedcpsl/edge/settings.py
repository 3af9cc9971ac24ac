"""The settings of edge networks, in the units that are customary for each. Nothing here imports torch or NumPy."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.settings import choice, real, setting_of, text, whole

OFF, NONE = "off", "none"
FILES = ("positions", "capacities", "trace")  # settings that name a file


def _is_bits(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 16


def positive_range(default: list[float], help: str, low: float, high: float) -> Any:
    """Two numbers of an interval, the smaller first."""

    def test(value: Any) -> bool:
        plain = isinstance(value, list) and len(value) == 2 and not any(isinstance(v, bool | str) for v in value)
        return plain and all(isinstance(v, int | float) for v in value) and low <= value[0] <= value[1] <= high

    return setting_of(default, help, f"two numbers from {low:g} to {high:g}, the smaller first", test)


@dataclass(frozen=True)
class Edge:
    """Edge networks: a radio, a virtual clock and batteries. Off unless a setting of this section is given."""

    profile: str = choice(
        OFF,
        "kind of edge network, which sets the defaults of [edge]; off: no radio and no virtual clock",
        OFF,
        "macro",
        "small-cell",
        "wifi",
        "satellite",
        "ideal",
    )
    radius: float = real(
        500.0, "metres from the base station within which devices are placed, evenly over the area", 10, 1e9
    )
    altitude: float = real(0.0, "metres of the base station above the devices, as of a satellite", 0, 1e9)
    positions: str = text("", "a CSV file of where devices are: device,x,y or device,distance, in metres")
    path_loss: str = choice(
        "macro",
        "path loss: 128.1 + 37.6 log10(km) dB, free space, or free space up to 1 m and an exponent from there",
        "macro",
        "free-space",
        "log-distance",
    )
    path_loss_exponent: float = real(3.5, 'exponent of path_loss "log-distance"', 1, 8)
    carrier_ghz: float = real(2.0, 'carrier frequency, for path_loss "free-space" and "log-distance"', 0.01, 1000)
    antenna_dbi: float = real(0.0, "antenna gains of both ends together", -50, 100)
    shadowing_db: float = real(8.0, "standard deviation of shadowing, which is fixed for a run", 0, 40)
    fading: str = choice("rayleigh", "block fading, drawn each round, down and up; none: no fading", "rayleigh", "none")
    noise_figure_db: float = real(5.0, "noise figure of receivers, above -174 dBm/Hz", 0, 40)
    interference_dbm: float | str = real(NONE, "interference at the base station", -200, 60, also=(NONE,))
    device_dbm: float = real(23.0, "transmit power of devices", -50, 60)
    station_dbm: float = real(43.0, "transmit power of the base station", -50, 100)
    bandwidth_up_mhz: float = real(10.0, "bandwidth that a round's devices share for uploads", 1e-6, 1e6)
    bandwidth_down_mhz: float = real(
        20.0, "bandwidth of the broadcast; shared equally where each device is sent its own", 1e-6, 1e6
    )
    download: str = choice("radio", "whether downloads take time", "radio", "free")
    allocation: str = choice(
        "equal",
        "how uploads share the bandwidth: equally; so that all finish together (no deadline); so that all are lost "
        "equally often (with a deadline)",
        "equal",
        "equal-time",
        "equal-outage",
    )
    flops_per_cycle: float = real(64.0, "floating-point operations of a processor cycle", 1e-9, 1e9)
    clock_ghz: list[float] = positive_range(
        [0.5, 2.0], "range of the devices' clocks, uniform, fixed for a run", 1e-6, 1e3
    )
    clock_sigma: float = real(0.1, "spread of a log-normal factor of each clock, drawn each round", 0, 3)
    kappa: float = real(1e-28, "energy of a cycle is kappa f^2 joules, f in hertz", 0, 1)
    capacities: str = text(
        "", "a CSV file of measurements: device,seconds_per_sample,up_mbit,down_mbit; empty cells: as computed"
    )
    deadline: float | str = real(
        NONE, "seconds after which a round ends; none: the server waits", 0, 1e9, open_ends="[", also=(NONE,)
    )
    slot: float | str = real(
        NONE, "seconds of an upload under a deadline, at a fixed rate", 0, 1e9, open_ends="[", also=(NONE,)
    )
    on_deadline: str = choice(
        "partial",
        "a device that cannot make its steps in time makes fewer, or is dropped",
        "partial",
        "drop",
    )
    error_rule: str = choice(
        "outage",
        "when an upload in a slot is lost: when the fade does not carry its rate, or by a waterfall packet error",
        "outage",
        "waterfall",
    )
    waterfall_margin: float = real(
        1.0, 'm of the waterfall 1 - exp(-m noise / signal) (error_rule "waterfall")', 0, 1e6
    )
    extra: int = whole(0, "devices drawn beyond work.active; the first work.active uploads to arrive count", 0)
    availability: str = choice(
        "always",
        "who is there: all; each on and off for exponential times; by the time of day; as a trace says",
        "always",
        "on-off",
        "daily",
        "trace",
    )
    on_seconds: float = real(600.0, 'mean seconds that a device is there (availability "on-off")', 0.001, 1e12)
    off_seconds: float = real(600.0, 'mean seconds that it is not (availability "on-off")', 0.001, 1e12)
    day_seconds: float = real(86400.0, 'seconds of a day (availability "daily")', 1, 1e12)
    presence: list[float] = positive_range(
        [1.0, 1.0], 'range of p_i: a device is there with p_i (0.5 + 0.4 sin(...)) (availability "daily")', 1e-6, 1e3
    )
    trace: str = text("", 'a CSV file of who is there, device,start,end in seconds (availability "trace")')
    battery: float | str = real(
        NONE, "joules that a device has at the start, and at most", 0, 1e15, open_ends="[", also=(NONE,)
    )
    battery_minimum: float = real(0.0, "joules at or below which a device does not take part", 0, 1e15)
    recharge_w: float = real(0.0, "watts that recharge a battery while its device is idle and there", 0, 1e9)
    upload_bits: int = setting_of(
        0, "bits of an entry of an upload, rounded stochastically; 0: as it is", "a whole number from 0 to 16", _is_bits
    )
    correction: str = choice(
        "none", "of the bias of lost uploads: inverse divides theta's terms by the chance to arrive", "none", "inverse"
    )
    correction_cap: float = real(10.0, "the largest factor of that correction", 1, 1e6)
    clock: str = choice(
        "rounds",
        "rounds: the server waits for all; semi-async: it updates once wait_for uploads have arrived, later ones count "
        "in a later round",
        "rounds",
        "semi-async",
    )
    wait_for: int = whole(0, 'uploads for which the server waits (clock "semi-async")', 0)
    staleness: float = real(
        0.5, 'a: an update that is s rounds late weighs (1 + s)^-a in theta (clock "semi-async")', 0, 10
    )

    @property
    def on(self) -> bool:
        return self.profile != OFF


PROFILES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        OFF: {},
        "macro": {},
        "small-cell": {
            "radius": 100.0,
            "path_loss": "log-distance",
            "path_loss_exponent": 3.5,
            "carrier_ghz": 3.5,
            "shadowing_db": 6.0,
            "device_dbm": 20.0,
            "station_dbm": 30.0,
            "bandwidth_up_mhz": 20.0,
            "bandwidth_down_mhz": 40.0,
        },
        "wifi": {
            "radius": 30.0,
            "path_loss": "log-distance",
            "path_loss_exponent": 3.0,
            "carrier_ghz": 5.2,
            "shadowing_db": 5.0,
            "noise_figure_db": 7.0,
            "device_dbm": 15.0,
            "station_dbm": 20.0,
            "bandwidth_up_mhz": 20.0,
            "bandwidth_down_mhz": 20.0,
        },
        "satellite": {
            "radius": 100_000.0,
            "altitude": 600_000.0,
            "path_loss": "free-space",
            "carrier_ghz": 2.0,
            "antenna_dbi": 30.0,
            "shadowing_db": 3.0,
            "fading": "none",
            "device_dbm": 23.0,
            "station_dbm": 46.0,
            "bandwidth_up_mhz": 5.0,
            "bandwidth_down_mhz": 10.0,
        },
        "ideal": {
            "radius": 100.0,
            "shadowing_db": 0.0,
            "fading": "none",
            "bandwidth_up_mhz": 1000.0,
            "bandwidth_down_mhz": 1000.0,
            "download": "free",
            "clock_ghz": [1.0, 1.0],
            "clock_sigma": 0.0,
        },
    }
)


def of_profile(name: Any) -> Edge:
    """The settings of a profile."""
    if not isinstance(name, str) or name not in PROFILES:
        shown = name if isinstance(name, str) else ""
        raise InputError(f"edge.profile = {name!r}: no such profile; {did_you_mean(shown, list(PROFILES))}")
    return replace(Edge(), profile=name, **PROFILES[name])


def with_profile(settings: Edge, name: Any) -> Edge:
    """The settings of another profile; those that were given stay as they were."""
    before = of_profile(settings.profile)
    given = {f.name: getattr(settings, f.name) for f in fields(Edge) if f.name != "profile"}
    return replace(of_profile(name), **{key: value for key, value in given.items() if value != getattr(before, key)})


def check_edge(edge: Edge) -> None:
    """Refuse settings that do not fit together, each in one line; whatever needs devices or data is checked later."""
    for wrong, message in _contradictions(edge):
        if wrong:
            raise InputError(message)


def _contradictions(edge: Edge) -> list[tuple[bool, str]]:
    timed, semi = edge.deadline != NONE, edge.clock == "semi-async"
    short = timed and edge.slot != NONE and float(edge.slot) >= float(edge.deadline)
    return [
        (timed and edge.slot == NONE, "edge.deadline: needs an upload slot; give edge.slot, in seconds"),
        (not timed and edge.slot != NONE, "edge.slot: is part of a deadline; give edge.deadline too"),
        (
            short,
            f"edge.slot = {edge.slot}: leaves no time to compute before edge.deadline = {edge.deadline}; give less",
        ),
        (
            timed and edge.allocation == "equal-time",
            'edge.allocation = "equal-time": works without a deadline only; give "equal" or "equal-outage"',
        ),
        (
            not timed and edge.allocation == "equal-outage",
            'edge.allocation = "equal-outage": nothing is lost without a deadline; give edge.deadline and edge.slot',
        ),
        (
            edge.allocation == "equal-outage" and (edge.fading == "none" or edge.error_rule == "waterfall"),
            'edge.allocation = "equal-outage": is for fading "rayleigh" and error_rule "outage"; give "equal"',
        ),
        (
            edge.correction == "inverse" and not timed,
            'edge.correction = "inverse": is for uploads that the channel loses in the slots of a deadline; give '
            "edge.deadline and edge.slot",
        ),
        (
            edge.availability == "trace" and not edge.trace,
            'edge.availability = "trace": give the file, edge.trace',
        ),
        (
            edge.availability != "trace" and bool(edge.trace),
            f'edge.trace: is not used by edge.availability = "{edge.availability}"; give edge.availability = "trace"',
        ),
        (
            edge.battery != NONE and float(edge.battery) <= edge.battery_minimum,
            f"edge.battery = {edge.battery}: never lets a device start, with edge.battery_minimum = "
            f"{edge.battery_minimum}; give more",
        ),
        (
            edge.battery == NONE and (edge.recharge_w > 0 or edge.battery_minimum > 0),
            "edge.recharge_w and edge.battery_minimum: are about batteries; give edge.battery, in joules",
        ),
        (semi and not edge.wait_for, 'edge.clock = "semi-async": give edge.wait_for, the uploads to wait for'),
        (not semi and edge.wait_for > 0, 'edge.wait_for: give edge.clock = "semi-async" too'),
        (semi and timed, 'edge.clock = "semi-async": has no deadline; leave edge.deadline out'),
        (semi and edge.extra > 0, 'edge.clock = "semi-async": draws nobody beyond work.active; give edge.extra = 0'),
        (
            semi and edge.allocation != "equal",
            'edge.clock = "semi-async": devices begin at different times; give edge.allocation = "equal"',
        ),
    ]
