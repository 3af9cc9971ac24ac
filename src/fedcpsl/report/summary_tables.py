"""What runs came to, as tables: how they ended, when they got to accuracies, how each device did."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcpsl.report.loaded_runs import Line, LoadedRun, RunSet, alone_for
from fedcpsl.report.tables import Column, Table, count, percent, plain, points, seconds, size
from fedcpsl.runs.comparison import interval, reached
from fedcpsl.runs.folder import Metrics
from fedcpsl.runs.result_tables import TESTS

MODELS = ("personal", "global", "localized")
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)
NOT_REACHED, NOT_TESTED = f"No run got to {100 * TARGETS[0]:g} %.", "No device has a test set"
MOST_TARGETS, MOST_LISTED = 5, 40
OF_PSEUDO = {"pseudo_label_accuracy": "pseudo-labels right", "pseudo_label_confidence": "their confidence"}


def value_of(metrics: Metrics, key: str, part: str = "mean") -> float | None:
    """A metric by its name; None where it was not logged or is no number."""
    found = metrics.get(key)
    value = found.get(part) if isinstance(found, Mapping) else found
    return None if value is None else float(value)


def over_seeds(line: Line, key: str, part: str = "mean") -> dict[str, float | None] | None:
    """How the runs of a line ended: mean and half a 95 % interval over seeds."""
    return interval([value_of(run.last, key, part) for run in line.runs])


def summary(story: RunSet) -> Table:
    """A row for every line."""
    records: list[Mapping[str, Any]] = []
    for line in story.lines:
        gains = [gain for run in line.runs if (gain := gain_of(run, story)) is not None]
        records.append(
            {
                "name": line.name,
                "seeds": len(line.runs),
                "rounds": min(run.last["round"] for run in line.runs),
                "personal": over_seeds(line, "personal"),
                "worst_tenth": over_seeds(line, "personal", "worst_tenth"),
                "gain": interval(gains) if len(gains) == len(line.runs) else None,
                **{key: over_seeds(line, key) for key in ("global", "localized", *OF_PSEUDO)},
                "steps": (over_seeds(line, "steps") or {}).get("mean"),
                "gradients_per_step": line.runs[0].manifest.get("gradients_per_step"),
                "uplink_bytes": (over_seeds(line, "uplink_bytes") or {}).get("mean"),
                "seconds": (over_seeds(line, "seconds") or {}).get("mean"),
            }
        )
    shown = [
        Column("name", "algorithm", plain),
        Column("seeds", "seeds", plain),
        Column("rounds", "rounds", plain),
        Column("personal", "personal, %", percent),
        Column("worst_tenth", "worst tenth, %", percent),
        Column("gain", "over alone, points", points),
        Column("global", "global, %", percent),
        Column("localized", "localized, %", percent),
        *(Column(key, f"{title}, %", percent) for key, title in OF_PSEUDO.items()),
        Column("steps", "local steps", count),
        Column("gradients_per_step", "gradients per step", plain),
        Column("uplink_bytes", "uplink", size),
        Column("seconds", "time", seconds),
    ]
    always = ("name", "personal", "worst_tenth", "steps", "uplink_bytes", "seconds")
    columns = [c for c in shown if c.key in always or any(record[c.key] is not None for record in records)]
    over = "; ± is half a 95 % interval over seeds" if any(len(line.runs) > 1 for line in story.lines) else ""
    caption = f"How the runs ended: accuracy on the devices’ own tests, mean over devices{over}."
    return Table("summary", caption, columns, records)


def targets_of(story: RunSet) -> list[float]:
    """Accuracies worth a row: the highest that some run got to."""
    best = max((value_of(m, "personal") or 0 for run in story.runs for m in run.metrics), default=0)
    return [target for target in TARGETS if target <= best][-MOST_TARGETS:]


def reach(story: RunSet) -> Table:
    """For every line and accuracy, the first round at it, and the bytes and seconds until then."""
    records: list[Mapping[str, Any]] = []
    for line in story.lines:
        for target in targets_of(story):
            first = [_first(run, target) for run in line.runs]
            rows: list[dict[str, Any]] = [
                {"reach_rounds": [m and m["round"]], "reach_bytes": [m and m["uplink_bytes"]], "s": m and m["seconds"]}
                for m in first
            ]
            found = reached(rows, 0)
            spent = [row["s"] for row in rows if row["s"] is not None]
            records.append(
                {
                    "name": line.name,
                    "accuracy": target,
                    "runs": found["runs"],
                    "of": len(line.runs),
                    "rounds": found["rounds"],
                    "uplink_bytes": found["uplink_bytes"],
                    "seconds": float(np.mean(spent)) if spent else None,
                }
            )
    columns = [
        Column("name", "algorithm", plain),
        Column("accuracy", "personal accuracy", lambda v: f"{100 * v:g} %"),
        Column("rounds", "rounds", lambda v: "not reached" if v is None else f"{v:.0f}"),
        Column("uplink_bytes", "uplink", size),
        Column("seconds", "time", seconds),
    ]
    if any(len(line.runs) > 1 for line in story.lines):
        columns += [Column("runs", "runs that got there", plain), Column("of", "of", plain)]
    caption = "What it took to get to an accuracy: the mean over the runs that got there."
    return Table("reach", caption, columns, records, NOT_REACHED)


def _first(run: LoadedRun, target: float) -> Metrics | None:
    return next((m for m in run.metrics if (value_of(m, "personal") or 0) >= target), None)


def device_records(run: LoadedRun, alone: LoadedRun | None) -> list[dict[str, Any]]:
    """Every tested device, best first, and what it gained over training alone where that is known."""
    own = {d["device"]: float(d["personal"]) for d in alone.devices if d["personal"]} if alone else {}
    records = []
    for d in run.devices:
        accuracies = {model: float(d[model]) if d[model] else None for model in MODELS}
        personal, by_itself = accuracies["personal"], own.get(d["device"])
        gain = None if personal is None or by_itself is None else personal - by_itself
        sizes = {key: int(d[key]) for key in ("labelled", "unlabelled", "active_rounds")}
        tests = int(d[TESTS]) if TESTS in d else None
        records.append({"device": d["name"], **sizes, TESTS: tests, **accuracies, "alone": by_itself, "gain": gain})
    tested = [record for record in records if record["personal"] is not None]
    return sorted(tested, key=lambda r: -r["personal"])


def gain_of(run: LoadedRun, story: RunSet) -> float | None:
    """What its devices gained over training alone, on average."""
    alone = alone_for(run, story.references)
    gains = [r["gain"] for r in device_records(run, alone) if r["gain"] is not None] if alone else []
    return float(np.mean(gains)) if gains else None


def devices(run: LoadedRun, alone: LoadedRun | None, name: str) -> Table:
    """One run's devices."""
    columns = [Column("device", "device", plain)]
    columns += [Column(k, k.replace("_", " "), plain) for k in ("labelled", "unlabelled", "active_rounds")]
    records = device_records(run, alone)
    columns += [Column(TESTS, TESTS, plain)] if any(r[TESTS] is not None for r in records) else []
    columns += [Column(m, f"{m}, %", percent) for m in MODELS if any(r[m] is not None for r in records)]
    if alone:
        columns += [Column("alone", "alone, %", percent), Column("gain", "gain, points", points)]
    which = f"{name}, seed {run.seed}."
    caption, empty = f"Accuracy per device, best first: {which}", f"{NOT_TESTED}: {which}"
    return Table("devices", caption, columns, list(records), empty)


def best_and_worst(records: Sequence[Mapping[str, Any]], most: int = MOST_LISTED) -> tuple[Sequence[Any], int]:
    """The records where they are few, else the first and the last of them, and how many were left out between."""
    left_out = len(records) - most
    if left_out <= 0:
        return records, 0
    return [*records[: most // 2], *records[-(most // 2) :]], left_out


def shortened(table: Table) -> Table:
    """A table of devices for people: the best and the worst of many."""
    listed, left_out = best_and_worst(table.records)
    more = f" {left_out:,} devices in between are left out." if left_out else ""
    return table._replace(records=list(listed), caption=table.caption + more)


def rounds(story: RunSet) -> Table:
    """Every evaluated round of every run."""
    keys = ["name", "seed", "round", *MODELS, *OF_PSEUDO, "uplink_bytes", "seconds"]
    records = [
        {"name": line.name, "seed": run.seed, "round": m["round"]} | {k: value_of(m, k) for k in keys[3:]}
        for line in story.lines
        for run in line.runs
        for m in run.metrics
    ]
    form = {"uplink_bytes": size, "seconds": seconds} | dict.fromkeys([*MODELS, *OF_PSEUDO], percent)
    columns = [Column(key, key.replace("_", " "), form.get(key, plain)) for key in keys]
    return Table("rounds", "Every evaluated round; accuracies in %, mean over devices.", columns, list(records))
