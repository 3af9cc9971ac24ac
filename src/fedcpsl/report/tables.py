"""Tables about runs: how values are written, tables as Markdown, LaTeX and CSV, and which files may be overwritten;
results, rounds and bytes to accuracies, accuracy per device, per class and per round."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcpsl.errors import InputError
from fedcpsl.report.loaded_runs import LoadedRun, RunSet, SeedGroup, alone_for
from fedcpsl.runs.comparison import interval, reached
from fedcpsl.runs.folder import TESTS, Confusion, Metrics, class_metrics

MODELS = ("personal", "global", "localized")
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)
NOT_REACHED, NOT_TESTED = f"No run got to {100 * TARGETS[0]:g} %.", "No device has a test set"
NO_EDGE = "No run has an edge network."
OUTCOMES = ("counted", "lost", "late", "dropped", "left", "battery", "idle")
MAX_TARGETS, MAX_LISTED = 5, 40
OF_PSEUDO = {"pseudo_label_accuracy": "pseudo-labels right", "pseudo_label_confidence": "their confidence"}


class Column(NamedTuple):
    """A column: its key in the records, its title, and how a value is written."""

    key: str
    title: str
    text: Callable[[Any], str]


class Table(NamedTuple):
    """Records and the columns shown of them; CSV has the plain values under the keys."""

    name: str
    caption: str
    columns: list[Column]
    records: list[Mapping[str, Any]]
    empty: str = "There is nothing to list."  # in place of a table without records

    def rows(self) -> list[list[str]]:
        return [[column.text(record.get(column.key)) for column in self.columns] for record in self.records]


def plain(value: Any) -> str:
    """Return a value as text, a whole number with thousands separators; "-" for none."""
    return "-" if value is None or value == "" else f"{value:,}" if isinstance(value, int) else str(value)


def count(value: Any) -> str:
    """Return a mean of whole numbers as text."""
    return "-" if value is None else f"{value:,.0f}"


def percent(value: Any) -> str:
    """Return a share in %, with half its interval if there is one."""
    mean, half = (value.get("mean"), value.get("half_width")) if isinstance(value, Mapping) else (value, None)
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + (f" ± {100 * half:.2f}" if half is not None else "")


def points(value: Any) -> str:
    """Return a difference of shares in points."""
    mean, half = (value.get("mean"), value.get("half_width")) if isinstance(value, Mapping) else (value, None)
    if mean is None:
        return "-"
    text = f"{100 * mean:+.2f}"
    shown = "0.00" if text in ("+0.00", "-0.00") else text.replace("-", "−")
    return shown + (f" ± {100 * half:.2f}" if half is not None else "")


def size(value: Any) -> str:
    """Return a number of bytes with its unit."""
    if value is None:
        return "-"
    units = ["B", "kB", "MB", "GB", "TB"]
    left = float(value)
    while left >= 1000 and len(units) > 1:
        left, units = left / 1000, units[1:]
    return f"{left:.0f} {units[0]}" if units[0] == "B" else f"{left:.1f} {units[0]}"


def duration(value: Any) -> str:
    """Return a virtual time, of any size, with its unit."""
    return f"{value:.3g} s" if value is not None and value < 100 else seconds(value)


def joules(value: Any) -> str:
    """Return an energy with its unit."""
    if value is None:
        return "-"
    for unit, factor in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)):
        if value >= factor or unit == "mJ":
            return f"{value / factor:.3g} {unit}"
    raise AssertionError


def seconds(value: Any) -> str:
    """Return a time in seconds, minutes or hours."""
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def to_markdown(table: Table) -> str:
    """Return a Markdown table after its caption."""
    if not table.records:
        return f"{table.empty}\n"
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    rows = [[column.title for column in table.columns], rule, *table.rows()]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"{table.caption}\n\n" + "\n".join(lines) + "\n"


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"}


def to_latex(table: Table) -> str:
    """Return a table for booktabs; a comment if it is empty, because an empty table does not compile."""
    if not table.records:
        return f"% {table.empty}\n"

    def safe(text: str) -> str:
        return "".join(LATEX.get(letter, letter) for letter in text)

    head = " & ".join(safe(column.title) for column in table.columns)
    rows = "\n".join("    " + " & ".join(safe(cell) for cell in row) + r" \\" for row in table.rows())
    return (
        f"\\begin{{table}}\n  \\centering\n  \\caption{{{safe(table.caption)}}}\n"
        f"  \\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}\n    \\toprule\n    {head} \\\\\n    \\midrule\n"
        f"{rows}\n    \\bottomrule\n  \\end{{tabular}}\n\\end{{table}}\n"
    )


def to_csv(table: Table) -> str:
    """Return plain values: shares from 0 to 1, bytes, seconds; an interval is two columns."""
    text = io.StringIO()
    wide = [any(isinstance(r.get(c.key), Mapping) for r in table.records) for c in table.columns]
    keys = [[c.key, f"{c.key}_half_width"] if two else [c.key] for c, two in zip(table.columns, wide, strict=True)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([key for pair in keys for key in pair])
    for record in table.records:
        cells: list[Any] = []
        for column, two in zip(table.columns, wide, strict=True):
            value = record.get(column.key)
            as_pair = value if isinstance(value, Mapping) else {"mean": value}
            cells += [as_pair.get("mean"), as_pair.get("half_width")] if two else [value]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


WRITERS: dict[str, Callable[[Table], str]] = {"md": to_markdown, "latex": to_latex, "csv": to_csv}


GENERATOR = '<meta name="generator" content="fedcpsl'
CAPTIONS = (
    "How the runs ended: accuracy on the devices’ own tests",
    "What it took to get to an accuracy: the mean over",
    "Accuracy per device, best first: ",
    "Every evaluated round; accuracies in %",
    r"Every evaluated round; accuracies in \%",
    "What the edge network took and what became of",
)
EMPTY = ("No run got to 50 %.", "No device has a test set: ", "No run has an edge network.")
HEADS = (
    "name,seeds,rounds,personal",
    "name,accuracy,rounds,uplink_bytes,seconds",
    "name,seed,round,personal,global,",
    "device,labelled,unlabelled,active_rounds",
    "name,virtual_seconds,rounds,compute_joules",
)
FIRST_WORDS = {  # of files of a format, by which reports are recognised
    "md": (*CAPTIONS, *EMPTY),
    "latex": (
        *(f"\\begin{{table}}\n  \\centering\n  \\caption{{{caption}" for caption in CAPTIONS),
        *(f"% {words}" for words in EMPTY),
    ),
    "csv": HEADS,
}


def check_report_target(out: Path, form: str) -> None:
    """Raise InputError if `out` cannot be written, or is an existing file that is not a report."""
    if out.is_dir():
        raise InputError(f"{out}: is a folder; give --out a file, for example {out / 'report.html'}")
    if out.exists() and not (out.is_file() and _is_report(out, form)):
        raise InputError(f"{out}: exists and is no report; give another --out")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: no such folder; make it, or give another --out")


def _is_report(path: Path, form: str) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(2000)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give another --out") from error
    return GENERATOR in beginning if form == "html" else beginning.startswith(FIRST_WORDS[form])


def value_of(metrics: Metrics, key: str, part: str = "mean") -> float | None:
    """Return a metric by its name; None if it was not logged or is NaN."""
    found = metrics.get(key)
    value = found.get(part) if isinstance(found, Mapping) else found
    return None if value is None else float(value)


def over_seeds(group: SeedGroup, key: str, part: str = "mean") -> dict[str, float | None] | None:
    """Return a final metric of a group: mean and half a 95 % interval over seeds."""
    return interval([value_of(run.last, key, part) for run in group.runs])


def summary(run_set: RunSet) -> Table:
    """Return the results, a row for every group of runs."""
    records: list[Mapping[str, Any]] = []
    for group in run_set.groups:
        gains = [gain for run in group.runs if (gain := gain_of(run, run_set)) is not None]
        records.append(
            {
                "name": group.name,
                "seeds": len(group.runs),
                "rounds": min(run.last["round"] for run in group.runs),
                "personal": over_seeds(group, "personal"),
                "worst_tenth": over_seeds(group, "personal", "worst_tenth"),
                "gain": interval(gains) if len(gains) == len(group.runs) else None,
                **{key: over_seeds(group, key) for key in ("global", "localized", *OF_PSEUDO)},
                "steps": (over_seeds(group, "steps") or {}).get("mean"),
                "gradients_per_step": group.runs[0].manifest.get("gradients_per_step"),
                "uplink_bytes": (over_seeds(group, "uplink_bytes") or {}).get("mean"),
                "seconds": (over_seeds(group, "seconds") or {}).get("mean"),
                **_edge_costs([run.last for run in group.runs]),
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
        *EDGE_COSTS,
    ]
    always = ("name", "personal", "worst_tenth", "steps", "uplink_bytes", "seconds")
    columns = [c for c in shown if c.key in always or any(record[c.key] is not None for record in records)]
    over = "; ± is half a 95 % interval over seeds" if any(len(group.runs) > 1 for group in run_set.groups) else ""
    caption = f"How the runs ended: accuracy on the devices’ own tests, mean over devices{over}."
    return Table("summary", caption, columns, records)


EDGE_COSTS = (Column("virtual_seconds", "virtual time", duration), Column("joules", "energy", joules))


def _edge_costs(metrics: Sequence[Metrics]) -> dict[str, float | None]:
    """Return the mean virtual time and energy by then; none without an edge network."""
    known = [m["edge"] for m in metrics if "edge" in m]
    if not known or len(known) < len(metrics):
        return {"virtual_seconds": None, "joules": None}
    spent = [edge["compute_joules"] + edge["radio_joules"] for edge in known]
    return {"virtual_seconds": float(np.mean([e["seconds"] for e in known])), "joules": float(np.mean(spent))}


def edge(run_set: RunSet) -> Table:
    """Return for every group with an edge network its virtual time and energy, and what became of drawn devices."""
    records: list[Mapping[str, Any]] = []
    for group in run_set.groups:
        found = [run.last["edge"] for run in group.runs if "edge" in run.last]
        if found:
            means = {key: float(np.mean([e[key] for e in found])) for key in found[0]}
            drawn = sum(means[key] for key in OUTCOMES)
            rounds = min(run.last["round"] for run in group.runs)
            records.append({"name": group.name, "rounds": rounds, "virtual_seconds": means["seconds"], "drawn": drawn})
            records[-1] = {**means, **records[-1], "work": means["steps_done"] / max(means["steps_planned"], 1)}
    said = {
        "partial": "counted, fewer steps",
        **{key: key for key in OUTCOMES[1:]},
        "idle_rounds": "rounds with nobody",
    }
    happened = [key for key in said if any(r[key] for r in records)]
    columns = [
        Column("name", "algorithm", plain),
        Column("virtual_seconds", "virtual time", duration),
        Column("rounds", "rounds", plain),
        Column("compute_joules", "energy to compute", joules),
        Column("radio_joules", "to send", joules),
        Column("drawn", "devices drawn", count),
        Column("counted", "counted", count),
        *(Column(key, said[key], count) for key in happened),
        Column("work", "steps done, %", percent),
    ]
    over = ", means over seeds" if any(len(group.runs) > 1 for group in run_set.groups) else ""
    caption = f"What the edge network took and what became of the devices that were drawn{over}."
    return Table("edge", caption, columns, records, NO_EDGE)


def targets_of(run_set: RunSet) -> list[float]:
    """Return the highest target accuracies that some run reached."""
    best = max((value_of(m, "personal") or 0 for run in run_set.runs for m in run.metrics), default=0)
    return [target for target in TARGETS if target <= best][-MAX_TARGETS:]


def reach(run_set: RunSet) -> Table:
    """Return for every group and target accuracy its first round, and the bytes and seconds until then."""
    records: list[Mapping[str, Any]] = []
    for group in run_set.groups:
        for target in targets_of(run_set):
            first = [_first(run, target) for run in group.runs]
            rows: list[dict[str, Any]] = [
                {"reach_rounds": [m and m["round"]], "reach_bytes": [m and m["uplink_bytes"]], "s": m and m["seconds"]}
                for m in first
            ]
            found = reached(rows, 0)
            spent = [row["s"] for row in rows if row["s"] is not None]
            records.append(
                {
                    "name": group.name,
                    "accuracy": target,
                    "runs": found["runs"],
                    "of": len(group.runs),
                    "rounds": found["rounds"],
                    "uplink_bytes": found["uplink_bytes"],
                    "seconds": float(np.mean(spent)) if spent else None,
                    **_edge_costs([m for m in first if m]),
                }
            )
    columns = [
        Column("name", "algorithm", plain),
        Column("accuracy", "personal accuracy", lambda v: f"{100 * v:g} %"),
        Column("rounds", "rounds", lambda v: "not reached" if v is None else f"{v:.0f}"),
        Column("uplink_bytes", "uplink", size),
        Column("seconds", "time", seconds),
        *(column for column in EDGE_COSTS if any(r[column.key] is not None for r in records)),
    ]
    if any(len(group.runs) > 1 for group in run_set.groups):
        columns += [Column("runs", "runs that got there", plain), Column("of", "of", plain)]
    caption = "What it took to get to an accuracy: the mean over the runs that got there."
    return Table("reach", caption, columns, records, NOT_REACHED)


def _first(run: LoadedRun, target: float) -> Metrics | None:
    return next((m for m in run.metrics if (value_of(m, "personal") or 0) >= target), None)


def device_records(run: LoadedRun, alone: LoadedRun | None) -> list[dict[str, Any]]:
    """Return every tested device, best first, with its gain over training alone if that is known."""
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


def gain_of(run: LoadedRun, run_set: RunSet) -> float | None:
    """Return the mean gain of a run's devices over training alone."""
    alone = alone_for(run, run_set.references)
    gains = [r["gain"] for r in device_records(run, alone) if r["gain"] is not None] if alone else []
    return float(np.mean(gains)) if gains else None


def devices(run: LoadedRun, alone: LoadedRun | None, name: str) -> Table:
    """Return one run's devices."""
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


def best_and_worst(records: Sequence[Mapping[str, Any]], count: int = MAX_LISTED) -> tuple[Sequence[Any], int]:
    """Return at most `count` records, the first and the last ones, and how many between were left out."""
    left_out = len(records) - count
    if left_out <= 0:
        return records, 0
    return [*records[: count // 2], *records[-(count // 2) :]], left_out


def shortened(table: Table) -> Table:
    """Return a table of devices with the best and the worst of many."""
    listed, left_out = best_and_worst(table.records)
    more = f" {left_out:,} devices in between are left out." if left_out else ""
    return table._replace(records=list(listed), caption=table.caption + more)


def rounds(run_set: RunSet) -> Table:
    """Return every evaluated round of every run."""
    keys = ["name", "seed", "round", *MODELS, *OF_PSEUDO, "uplink_bytes", "seconds"]
    records = [
        {"name": group.name, "seed": run.seed, "round": m["round"]}
        | {k: value_of(m, k) for k in keys[3:]}
        | _edge_costs([m])
        for group in run_set.groups
        for run in group.runs
        for m in run.metrics
    ]
    form = {"uplink_bytes": size, "seconds": seconds} | dict.fromkeys([*MODELS, *OF_PSEUDO], percent)
    columns = [Column(key, key.replace("_", " "), form.get(key, plain)) for key in keys]
    columns += [column for column in EDGE_COSTS if any(r[column.key] is not None for r in records)]
    return Table("rounds", "Every evaluated round; accuracies in %, mean over devices.", columns, list(records))


def classes(run_set: RunSet) -> list[Table]:
    """Return of every finished run a table with a row for each tested class."""
    known = [(group.name, run, run.confusion) for group in run_set.groups for run in group.runs if run.finished]
    return [classes_of_run(found, f"{name}, seed {run.seed}") for name, run, found in known if found and found.counts]


def classes_of_run(confusion: Confusion, name: str) -> Table:
    """Return the accuracy per class of one run."""
    columns = [Column("class", "class", str), Column("tests", "tests", plain)]
    columns += [Column(model, f"{model}, %", percent) for model in confusion.counts]
    records = [record for record in class_metrics(confusion)["classes"] if record["tests"]]
    return Table("classes", f"Accuracy per class over all tests: {name}.", columns, records)
