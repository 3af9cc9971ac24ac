"""Whether a device has the power and the time to work now, as its owner wants it."""

import os
from pathlib import Path
from typing import NamedTuple

SUPPLIES = Path("/sys/class/power_supply")


class Conditions(NamedTuple):
    """When a device works; the defaults: always."""

    on_battery: bool = True
    most_load: float = 0.0  # of the machine, in tasks per core over the last minute; 0: any


def reason_to_decline(conditions: Conditions, supplies: Path = SUPPLIES) -> str | None:
    """Why not now; None where nothing stands against it."""
    if not conditions.on_battery and runs_on_battery(supplies):
        return "not now: it runs on its battery"
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if conditions.most_load and load > conditions.most_load:
        return "not now: it is busy with other work"
    return None


def runs_on_battery(supplies: Path = SUPPLIES) -> bool:
    """Whether a battery gives power and no mains does; no on a machine without batteries."""
    if not supplies.is_dir():
        return False
    each = [
        (_word(supply / "type"), _word(supply / "status"), _word(supply / "online")) for supply in supplies.iterdir()
    ]
    plugged = any(kind in ("Mains", "USB") and online == "1" for kind, _, online in each)
    return not plugged and any(kind == "Battery" and status == "Discharging" for kind, status, _ in each)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
