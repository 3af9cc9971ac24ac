"""The sections of a page about runs: what each shows. assets/sections.html has their markup."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from fedcpsl.config import to_toml
from fedcpsl.report import charts, tables
from fedcpsl.report.charts import Chart
from fedcpsl.report.edge_pictures import pictures_of
from fedcpsl.report.loaded_runs import LoadedRun, RunSet, SeedGroup, alone_for
from fedcpsl.report.tables import Column, Table, duration, joules, percent, plain, points, seconds, size
from fedcpsl.report.verdict import all_failed, as_sentence, sentence, state_of, title_of, verdicts
from fedcpsl.runs.folder import Confusion, class_metrics
from fedcpsl.runs.split_summary import SplitSummary, nonzero_cells, read_split_summary

MAX_FAILED = 5
MAX_SPLITS, MAX_CELLS = 4, 6_000  # of a page's maps: limits its size
MAX_RUNS = 12  # whose devices, classes and configs are listed
MAX_DEVICES = 24  # of each, if there are several runs
MAX_CLASSES = 30  # of a confusion matrix
Sections = dict[str, str]


@cache
def templates() -> Environment:
    """Return the templates of a page; whatever they are given is escaped."""
    found = Environment(
        loader=PackageLoader("fedcpsl.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.filters |= {"plain": plain, "percent": percent, "points": points, "sort_key": sort_key}
    found.filters |= {"drawn": charts.drawn, "value_text": charts.value_text}
    return found


def render(section: str, **context: Any) -> str:
    """Return a section, or another macro of assets/sections.html, as HTML."""
    return str(getattr(templates().get_template("sections.html").module, section)(**context))


def sort_key(value: Any) -> str:
    """Return the number that a cell is sorted by, if it has one: "2 h 01 min" is more than "3 min 00 s"."""
    number = value.get("mean") if isinstance(value, Mapping) else value
    return f"{float(number):.10g}" if isinstance(number, int | float) else ""


def page_sections(run_set: RunSet, drawn: Mapping[str, Chart], title: str = "", summary: str | None = None) -> Sections:
    """Return every section by its id, empty if there is nothing to show; `summary` replaces the usual table."""
    if not run_set.groups:
        waiting = "No round is finished yet. This page updates itself while the run goes on."
        text = f"There is nothing to show: {all_failed(run_set)}." if run_set.over else waiting
        cards = render("placeholder", text=text)
        return {"head": head_section(run_set, title), "cards": cards, "summary": summary or ""}
    return {
        "head": head_section(run_set, title),
        "cards": cards_section(run_set),
        "summary": summary_section(run_set) if summary is None else summary,
        "accuracy": accuracy_section(run_set, drawn),
        "devices": devices_section(run_set),
        "classes": classes_section(run_set),
        "split": split_section(run_set),
        "labels": labels_section(drawn),
        "cost": cost_section(run_set, drawn),
        "edge": edge_section(run_set, drawn),
        "gaps": render("gaps", chart=drawn["gaps"]) if "gaps" in drawn else "",
        "again": rerun_section(run_set),
    }


def head_section(run_set: RunSet, title: str) -> str:
    """Return the title, what was run, verdicts, and failed runs."""
    name, _, on = (title or title_of(run_set)).partition(" on ")
    single = len(run_set.runs) == 1 and run_set.runs[0].devices
    return render(
        "head",
        name=name,
        on=on,
        lead=sentence(run_set) if run_set.groups else "",
        verdicts=[as_sentence(text) for text in verdicts(run_set.runs[0].folder)] if single else [],
        unfinished="" if run_set.over else state_of(run_set),
        failed=list(run_set.failed.items())[:MAX_FAILED],
        more_failed=max(0, len(run_set.failed) - MAX_FAILED),
    )


def cards_section(run_set: RunSet) -> str:
    """Return the most important numbers."""
    cards = _cards_of_one(run_set) if len(run_set.groups) == 1 else _cards_of_many(run_set)
    columns = len(cards) if len(cards) <= 5 else -(-len(cards) // 2)
    return render("cards", cards=cards, columns=columns)


Card = tuple[str, str, str]  # label, value, note


def _cards_of_one(run_set: RunSet) -> list[Card]:
    (group,) = run_set.groups
    (record,) = tables.summary(run_set).records
    shares = [
        ("personal accuracy", record["personal"]),
        ("worst tenth of devices", record["worst_tenth"]),
        ("global model, own tests", record["global"]),
        ("pseudo-labels right", record["pseudo_label_accuracy"]),
        ("confidence of pseudo-labels", record["pseudo_label_confidence"]),
    ]
    known = [(name, *_mean_and_half(value)) for name, value in shares if value and value["mean"] is not None]
    if record["gain"]:
        gain = record["gain"]["mean"]
        known.insert(2, _gain_card(gain, "over training alone", "training alone is ahead by this much"))
    costs = [("uplink", size(record["uplink_bytes"]), ""), ("time", seconds(record["seconds"]), "")]
    if record["virtual_seconds"] is not None:
        costs += [("virtual time", duration(record["virtual_seconds"]), ""), ("energy", joules(record["joules"]), "")]
    if len(group.runs) > 1:
        costs.append(("seeds", str(len(group.runs)), ""))
    return [*known, *costs]


def _cards_of_many(run_set: RunSet) -> list[Card]:
    records = tables.summary(run_set).records
    tested = [r for r in records if r["personal"] and r["personal"]["mean"] is not None]
    if not tested:
        return [("runs", str(len(run_set.runs)), "")]
    best = max(tested, key=lambda r: r["personal"]["mean"])
    fair = max(tested, key=lambda r: r["worst_tenth"]["mean"])
    cards = [
        (f"best personal accuracy: {best['name']}", *_mean_and_half(best["personal"])),
        (f"best worst tenth: {fair['name']}", *_mean_and_half(fair["worst_tenth"])),
    ]
    served = [r for group, r in zip(run_set.groups, records, strict=True) if not group.runs[0].alone]
    if served and all(r["gain"] for r in served):  # else the maximum of some would be taken for that of all
        most = max(served, key=lambda r: r["gain"]["mean"])
        ahead = f"most over training alone: {most['name']}"
        behind = f"training alone is ahead by this much; closest: {most['name']}"
        cards.append(_gain_card(most["gain"]["mean"], ahead, behind))
    spent = sum(run.last["seconds"] for run in run_set.runs)
    return [*cards, ("runs", str(len(run_set.runs)), ""), ("time of all", seconds(spent), "")]


def _gain_card(gain: float, ahead: str, behind: str) -> Card:
    """Return the gain over training alone; if it is negative, by how much training alone is ahead."""
    lost = round(gain, 4) < 0
    return (behind, f"{-100 * gain:.2f}", "points") if lost else (ahead, points(gain), "points")


def _mean_and_half(value: Mapping[str, float | None]) -> tuple[str, str]:
    mean, _, half = percent(value).partition(" ± ")
    return f"{mean} %", f"± {half}" if half else ""


def summary_section(run_set: RunSet) -> str:
    """Return a row for every group of runs; nothing for a single run."""
    return "" if len(run_set.runs) == 1 else render("summary", table=tables.summary(run_set))


def accuracy_section(run_set: RunSet, drawn: Mapping[str, Chart]) -> str:
    """Return accuracy by round."""
    shown = [chart for name, chart in drawn.items() if name.startswith("accuracy")]
    if not shown:
        return render("accuracy", text="No device has a test set, so there is no accuracy to show.", charts=[])
    several = any(len(group.runs) > 1 for group in run_set.groups)
    text = f"Mean over {'devices and seeds' if several else 'devices'}"
    if len(run_set.groups) == 1:
        text += ", each device on its own test set. The band is one standard deviation over devices."
    elif several:
        text += ", each device on its own test set. The band is the 95 % interval over seeds."
    else:
        text += ", each device on its own test set."
    return render("accuracy", text=text, charts=shown)


def labels_section(drawn: Mapping[str, Chart]) -> str:
    """Return how many pseudo-labels are right, and their confidence."""
    shown = [chart for name, chart in drawn.items() if name.startswith("labels")]
    logged = "labels-confidence" in drawn or any(s["name"] == "confidence" for c in shown for s in c["series"])
    return render("labels", charts=shown, logged=logged) if shown else ""


def cost_section(run_set: RunSet, drawn: Mapping[str, Chart]) -> str:
    """Return rounds, bytes and seconds to accuracies; of several groups a row each, an accuracy a column."""
    table = tables.reach(run_set)
    if table.records:
        table = table._replace(columns=table.columns[1:]) if len(run_set.groups) == 1 else _by_target(run_set, table)
    return render("cost", table=table, uplink=drawn.get("uplink"))


def _by_target(run_set: RunSet, table: Table) -> Table:
    targets = tables.targets_of(run_set)
    records: dict[str, dict[str, Any]] = {group.name: {"name": group.name} for group in run_set.groups}
    for r in table.records:
        records[r["name"]][f"{r['accuracy']:g}"] = r
    columns = [table.columns[0], *(Column(f"{t:g}", f"{100 * t:g} %", _reached) for t in targets)]
    return table._replace(columns=columns, records=list(records.values()))


def _reached(record: Mapping[str, Any] | None) -> str:
    if not record or not record["runs"]:
        return "-"
    some = "" if record["runs"] == record["of"] else f" ({record['runs']} of {record['of']})"
    spent = [size(record["uplink_bytes"]), seconds(record["seconds"])]
    if record["virtual_seconds"] is not None:
        spent[1:] = [duration(record["virtual_seconds"]), joules(record["joules"])]
    return f"{record['rounds']:.0f} rounds, {', '.join(spent)}{some}"


def edge_section(run_set: RunSet, drawn: Mapping[str, Chart]) -> str:
    """Return what an edge network took and lost, accuracy by time and energy, rounds as timelines, and the cell."""
    runs, left_out = pictures_of(run_set)
    shown = [chart for name, chart in drawn.items() if name.startswith("edge-")]
    table, single = tables.edge(run_set), len(run_set.runs) == 1
    return render("edge", table=table, charts=shown, runs=runs, single=single, left_out=left_out) if runs else ""


def devices_section(run_set: RunSet) -> str:
    """Return the accuracy of every device, of the first finished run of each group."""
    shown = [(name, run) for name, run in _first_finished(run_set.groups) if run.devices]
    missing = [run for _, run in shown if not run.alone and alone_for(run, run_set.references) is None]
    runs = []
    for name, run in shown[:MAX_RUNS]:
        alone = alone_for(run, run_set.references)
        runs.append({"name": name, "seed": run.seed, **_devices_of(run, alone, few=len(shown) > 1)})
    return render(
        "devices",
        runs=runs,
        missing=f"fedcpsl report {missing[0].folder} --alone" if missing else "",
        several=len(run_set.runs) > 1,
        left_out=max(0, len(shown) - MAX_RUNS),
    )


def _first_finished(groups: Iterable[SeedGroup]) -> list[tuple[str, LoadedRun]]:
    found = [(group.name, next((run for run in group.runs if run.finished), None)) for group in groups]
    return [(name, run) for name, run in found if run]


def _devices_of(run: LoadedRun, alone: LoadedRun | None, *, few: bool) -> dict[str, Any]:
    """Return a row per device, what they gained, and the marks of the strips."""
    records = tables.device_records(run, alone)
    limits = (MAX_DEVICES,) if few else ()
    listed, left_out = tables.best_and_worst(records, *limits)
    marks = [("p", "personal")]
    marks += [("g", "global model")] * any(r["global"] is not None for r in records)
    marks += [("a", "training alone")] * (alone is not None)
    rows = [record | _strip(record) for record in listed]
    return {
        "rows": rows,
        "left_out": left_out,
        "marks": marks,
        "alone": alone is not None,
        "gains": _gains([r["gain"] for r in records if r["gain"] is not None]),
    }


def _gains(gains: Sequence[float]) -> str:
    if not gains:
        return ""
    better, worse = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
    return (
        f"Over training alone, {better} of {len(gains)} devices are better off and {worse} worse; the mean is "
        f"{points(sum(gains) / len(gains))} points, from {points(min(gains))} to {points(max(gains))}."
    )


def _strip(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a device's accuracies as marks (kind, left, width) from 0 to 100 %, and in words."""
    personal, alone, general = (None if record[k] is None else 100 * record[k] for k in ("personal", "alone", "global"))
    assert personal is not None
    words = [f"device {record['device']}", f"personal {personal:.2f} %"]
    marks: list[tuple[str, str, str]] = []
    if alone is not None:
        low, high = min(personal, alone), max(personal, alone)
        marks.append(("span fell" if personal < alone else "span", f"{low:.1f}", f"{high - low:.1f}"))
        marks.append(("a", f"{alone:.1f}", ""))
        words.append(f"alone {alone:.2f} %")
    if general is not None:
        marks.append(("g", f"{general:.1f}", ""))
        words.append(f"global {general:.2f} %")
    marks.append(("p", f"{personal:.1f}", ""))
    words.append(f"{plain(record['tests'])} tests")
    words.append(f"{record['labelled']} labelled, {record['unlabelled']} unlabelled samples")
    words.append(f"active in {record['active_rounds']} rounds")
    return {"strip": marks, "tip": "; ".join(words)}


class HeatCell(NamedTuple):
    """A count, its share in % for the colour, and its tooltip."""

    value: int
    share: int
    tip: str


class HeatMap(NamedTuple):
    """A table of counts, the darker the larger."""

    kind: str  # labelled or unlabelled: the two colours
    label: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, list[HeatCell]]]
    dense: bool


def _heat_cell(count: int, of: int, tip: str) -> HeatCell:
    return HeatCell(count, round(12 + 88 * count / max(of, 1)), tip)


def classes_section(run_set: RunSet) -> str:
    """Return the accuracy per class and the confusion matrices, of the first finished run of each group."""
    runs = []
    for name, run in _first_finished(run_set.groups[:MAX_RUNS]):
        confusion = run.confusion
        if confusion and confusion.counts:
            runs.append({"name": name, "seed": run.seed, **_classes_of(confusion)})
    return render("classes", runs=runs) if runs else ""


def _classes_of(confusion: Confusion) -> dict[str, Any]:
    f1 = class_metrics(confusion)["macro_f1"]
    counts = confusion.counts
    there = [i for i in range(len(confusion.classes)) if any(c[i].any() or c[:, i].any() for c in counts.values())]
    names = [confusion.classes[i] for i in there]
    few = len(there) <= MAX_CLASSES
    return {
        "macro_f1": ", ".join(f"{100 * value:.2f} % for the {model} model" for model, value in f1.items()),
        "table": tables.classes_of_run(confusion, ""),
        "maps": [_confusion_map(m, c[np.ix_(there, there)], names) for m, c in counts.items()] if few else [],
        "count": len(there),
    }


def _confusion_map(model: str, counts: np.ndarray, names: list[str]) -> HeatMap:
    """Return classes by predictions, the darker the larger the share of the class."""
    rows = []
    for name, row in zip(names, counts.tolist(), strict=True):
        total = sum(row)
        tips = [
            f"{n} of {total} tests of class {name} are predicted as {other}"
            for other, n in zip(names, row, strict=True)
        ]
        rows.append((name, [_heat_cell(n, total, tip) for n, tip in zip(row, tips, strict=True)]))
    return HeatMap(
        kind="labelled" if model == "personal" else "unlabelled",
        label=f"confusion matrix, {model} model",
        caption=f"{model}: class (row) by prediction (column), tests",
        columns=names,
        rows=rows,
        dense=len(names) > 16,
    )


def split_section(run_set: RunSet) -> str:
    """Return the maps of the runs' splits, the first ones of many."""
    by_split: dict[str, list[tuple[SeedGroup, LoadedRun]]] = {}
    for group in run_set.groups:
        for run in group.runs:
            by_split.setdefault(run.manifest["split_sha256"], []).append((group, run))
    splits: list[dict[str, Any]] = []
    cells = 0
    for users in list(by_split.values())[:MAX_SPLITS]:
        group, run = users[0]
        holdings = read_split_summary(run.folder, run.config)
        cells += nonzero_cells(holdings) if isinstance(holdings, SplitSummary) else 0
        if splits and cells > MAX_CELLS:
            break
        shared = len({user.name for user, _ in users}) == len(run_set.groups)
        splits.append({"name": "" if shared else group.name, "seed": run.seed, **maps_of_split(holdings)})
    return render("split", splits=splits, single=len(by_split) == 1, left_out=len(by_split) - len(splits))


def maps_of_split(holdings: SplitSummary | str) -> dict[str, Any]:
    """Return the maps of a split and notes on what they leave out; or why it is missing."""
    if isinstance(holdings, str):
        return {"missing": holdings}
    notes = []
    if len(holdings.names) < holdings.devices:
        notes.append(f"The first {len(holdings.names)} of {holdings.devices:,} devices.")
    if len(holdings.classes) < holdings.all_classes:
        notes.append(f"The first {len(holdings.classes)} of {holdings.all_classes:,} classes.")
    if any(holdings.unknown):
        notes.append("?: unlabelled samples of unknown class.")
    return {"missing": "", "maps": [_split_map(holdings, kind) for kind in ("labelled", "unlabelled")], "notes": notes}


def _split_map(holdings: SplitSummary, kind: str) -> HeatMap:
    """Return devices by classes, the darker the more samples."""
    counts = holdings.labelled if kind == "labelled" else holdings.unlabelled
    unknown = holdings.unknown if kind == "unlabelled" and any(holdings.unknown) else None
    most = max((n for row in [*counts, unknown or []] for n in row), default=0) or 1
    rows = []
    for i, (name, row) in enumerate(zip(holdings.names, counts, strict=True)):
        cells = []
        for c, n in enumerate(row):
            tip = f"device {name}, class {holdings.classes[c]}: {holdings.labelled[i][c]} labelled, "
            cells.append(_heat_cell(n, most, f"{tip}{holdings.unlabelled[i][c]} unlabelled"))
        if unknown:
            cells.append(_heat_cell(unknown[i], most, f"device {name}, class unknown: {unknown[i]} unlabelled"))
        rows.append((name, cells))
    return HeatMap(
        kind=kind,
        label=f"{kind} samples by device and class",
        caption=f"{kind}, most {most}",
        columns=[*holdings.classes, *["?"] * bool(unknown)],
        rows=rows,
        dense=len(holdings.classes) > 16 or most > 999,
    )


def rerun_section(run_set: RunSet) -> str:
    """Return the commands and settings that make the runs again, and the environment that they were made with."""
    groups = [group for group in run_set.groups if not group.runs[0].adapted_from]
    manifest = run_set.runs[0].manifest
    facts = {key: value for key, value in manifest.items() if key not in ("command", "resumed")}
    facts["resumed"] = f"{len(manifest.get('resumed', []))} times"
    commands = dict.fromkeys(shlex.join(run.manifest["command"]) for run in run_set.runs)
    return render(
        "again",
        commands=list(commands)[:5],
        adapted=[_adapt_command(run) for run in run_set.runs if run.adapted_from][:MAX_RUNS],
        runs_again=not all(run.adapted_from for run in run_set.runs),
        configs=[_config_of(group) for group in groups[:MAX_RUNS]],
        left_out=max(0, len(groups) - MAX_RUNS),
        facts=list(facts.items()),
        several=len(run_set.runs) > 1,
    )


def _adapt_command(run: LoadedRun) -> str:
    """Return the command that adapts the run again; its settings as a config would make something else."""
    data, names = run.config.data, [device["name"] for device in run.devices[:1]]
    label = ["--label", data.label] if data.label else []
    name = [word for device in names for word in ("--name", device)]
    words = [run.adapted_from, "--data", data.file, *label, *name, "--rounds", str(run.last["round"])]
    return shlex.join(["fedcpsl", "adapt", *words])


def _config_of(group: SeedGroup) -> tuple[str, int, list[int], str]:
    """Return a group's name, its first seed, the other seeds, and the config of the first run."""
    first, *others = group.runs
    return group.name, first.seed, [run.seed for run in others], to_toml(first.config)
