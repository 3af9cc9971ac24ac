"""What came out of a run, in plain words: do personal models pay, by how much, for how many, and what to do if not."""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from fedcpsl.runs.device_table import read_device_table

LEVEL = 0.975  # of a two-sided interval of 95 %


def verdicts(folder: Path) -> list[str]:
    """Of a finished run: its personal models beside the global one, and beside devices that were trained alone."""
    devices = read_device_table(folder / "devices.csv")
    found = []
    if any(row["global"] for row in devices):
        advice = "use the global model (--device global), or give it more weight with a smaller --beta"
        pairs = [(float(row["personal"]), float(row["global"])) for row in devices if row["personal"] and row["global"]]
        found.append(verdict("the personal models", "the global one", pairs, advice))
    path = folder / "alone" / "devices.csv"
    if path.exists():
        alone = {row["name"]: row["personal"] for row in read_device_table(path)}
        pairs = [
            (float(row["personal"]), float(alone[row["name"]]))
            for row in devices
            if row["personal"] and alone.get(row["name"])
        ]
        advice = "a federation does not pay for these devices: train each alone"
        found.append(verdict("the personal models", "devices trained alone", pairs, advice))
    return [text for text in found if text]


def verdict(one: str, other: str, pairs: Sequence[tuple[float, float]], advice: str) -> str:
    """Which of two is better over devices, paired, and whether that is more than chance; nothing where it is one."""
    differences = [100 * (a - b) for a, b in pairs]
    if not any(differences):
        return ""
    count, mean = len(differences), fmean(differences)
    better = sum(d > 0 for d in differences)
    on = f"better on {better} of {count} devices, worse on {sum(d < 0 for d in differences)}"
    if count < 2:
        return f"{one} and {other}: {mean:+.1f} points on one device; one device cannot tell more"
    half = half_width(differences)
    told = f"{mean:+.1f} points over {count} devices (95 % interval {mean - half:+.1f} to {mean + half:+.1f}), {on}"
    if mean - half > 0:
        return f"{one} are better than {other}: {told}"
    if mean + half < 0:
        return f"{one} are worse than {other}: {told}; {advice}"
    return f"{one} and {other} cannot be told apart: {told}"


def half_width(values: Sequence[float]) -> float:
    """Of the mean's 95 % interval, by Student's t."""
    from scipy.stats import t

    return float(t.ppf(LEVEL, len(values) - 1)) * stdev(values) / sqrt(len(values))


def of_run(folder: Path, final: Mapping[str, object]) -> list[str]:
    """The verdicts of a run that has come to its end; none before."""
    return verdicts(folder) if final["finished"] else []
