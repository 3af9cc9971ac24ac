"""The sections of a page about runs, each as HTML under its id."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fedcpsl.report import chart_series, summary_tables
from fedcpsl.report.chart_series import Chart
from fedcpsl.report.classes import class_section
from fedcpsl.report.devices import device_section
from fedcpsl.report.headline import sentence
from fedcpsl.report.loaded_runs import Line, RunSet
from fedcpsl.report.rerun import rerun_section
from fedcpsl.report.svg import figure, heat_map
from fedcpsl.report.tables import Column, Table, percent, points, seconds, size, to_html
from fedcpsl.report.verdict import as_sentence, verdicts
from fedcpsl.runs.split_summary import SplitSummary, nonzero_cells, read_split_summary

MOST_SPLITS, MOST_CELLS = 4, 6_000  # of the maps of a page: keeps it small
MOST_FAILED = 5
Parts = dict[str, str]


def all_charts(story: RunSet) -> dict[str, Chart]:
    """The charts of a page, by id."""
    kinds: Sequence[Callable[[RunSet], list[Chart]]] = (
        chart_series.accuracy_charts,
        chart_series.label_charts,
        chart_series.uplink_charts,
        chart_series.gap_charts,
    )
    return {chart["id"]: chart for kind in kinds for chart in kind(story)}


def parts_of(story: RunSet, drawn: Mapping[str, Chart], title: str = "", summary: str | None = None) -> Parts:
    """Every section; an empty one where a story has nothing of its kind. `summary` takes the place of the table."""
    if not story.lines:
        return {"head": _head(story, title), "cards": _nothing(story), "summary": summary or ""}
    return {
        "head": _head(story, title),
        "cards": _cards(story),
        "summary": _summary(story) if summary is None else summary,
        "accuracy": _accuracy(story, drawn),
        "devices": device_section(story),
        "classes": class_section(story),
        "split": _splits(story),
        "labels": _labels(drawn),
        "cost": _cost(story, drawn),
        "gaps": _gaps(drawn),
        "again": rerun_section(story),
    }


def title_of(story: RunSet) -> str:
    if not story.lines:
        return _all_failed(story) if story.over else "waiting for the first round"
    sets = list(dict.fromkeys(run.config.data.title for run in story.runs))
    names = list(dict.fromkeys(line.runs[0].config.algorithm.name for line in story.lines))
    what = ", ".join(names) if len(names) <= 4 else f"{len(names)} algorithms"
    return f"{what} on {', '.join(sets[:3])}{' and more' * (len(sets) > 3)}"


def state_of(story: RunSet) -> str:
    """How far the runs are, in words."""
    unfinished = [run for run in story.runs if not run.finished]
    if story.over:
        return "finished" if story.lines else _all_failed(story)
    if len(story.runs) == 1 and not story.waiting:
        (run,) = story.runs
        return f"round {run.last['round']} of {run.config.work.rounds + run.config.work.personal_rounds}"
    return f"{len(story.runs) - len(unfinished)} of {len(story.runs) + story.waiting} runs finished"


def _all_failed(story: RunSet) -> str:
    return "the run failed" if len(story.failed) == 1 else f"all {len(story.failed)} runs failed"


def _head(story: RunSet, title: str) -> str:
    name, _, on = (title or title_of(story)).partition(" on ")
    heading = f"<h1>{escape(name)}{f' <span>on {escape(on)}</span>' if on else ''}</h1>"
    lead = f'<p class="lead">{escape(sentence(story))}</p>' if story.lines else ""
    if len(story.runs) == 1 and story.runs[0].devices:
        lead += "".join(f"<p>{escape(as_sentence(text))}</p>" for text in verdicts(story.runs[0].folder))
    notes = "" if story.over else f'<p class="say">Not finished: {escape(state_of(story))}.</p>'
    for folder, reason in list(story.failed.items())[:MOST_FAILED]:
        notes += f'<p class="say">Failed and left out: <code>{escape(folder)}</code>: {escape(reason)}</p>'
    if len(story.failed) > MOST_FAILED:
        notes += f'<p class="say">{len(story.failed) - MOST_FAILED} more failed and are left out.</p>'
    return heading + lead + notes


def _nothing(story: RunSet) -> str:
    waits = "No round is finished yet. This page fills by itself while the run goes on."
    says = f"There is nothing to show: {_all_failed(story)}." if story.over else waits
    return f'<div class="waits"><p>{says}</p></div>'


def _card(label: str, value: str, note: str = "") -> str:
    small = f" <small>{escape(note)}</small>" if note else ""
    return f'<div class="card"><b>{escape(value)}{small}</b><span>{escape(label)}</span></div>'


def _cards(story: RunSet) -> str:
    cards = _cards_of_one(story) if len(story.lines) == 1 else _cards_of_many(story)
    columns = len(cards) if len(cards) <= 5 else -(-len(cards) // 2)
    return f'<div class="cards" style="--n:{columns}">{"".join(_card(*card) for card in cards)}</div>'


def _cards_of_one(story: RunSet) -> list[tuple[str, ...]]:
    (line,) = story.lines
    (record,) = summary_tables.summary(story).records
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
        known.insert(2, _gain_card(gain, "over training alone", "training alone is ahead by so much"))
    costs = [("uplink", size(record["uplink_bytes"])), ("time", seconds(record["seconds"]))]
    if len(line.runs) > 1:
        costs.append(("seeds", str(len(line.runs))))
    return [*known, *costs]


def _gain_card(gain: float, ahead: str, behind: str) -> tuple[str, str, str]:
    """What was gained over training alone; of a loss, by how much training alone is ahead."""
    lost = round(gain, 4) < 0
    return (behind, f"{-100 * gain:.2f}", "points") if lost else (ahead, points(gain), "points")


def _mean_and_half(value: Mapping[str, float | None]) -> tuple[str, str]:
    mean, _, half = percent(value).partition(" ± ")
    return f"{mean} %", f"± {half}" if half else ""


def _cards_of_many(story: RunSet) -> list[tuple[str, ...]]:
    records = summary_tables.summary(story).records
    tested = [r for r in records if r["personal"] and r["personal"]["mean"] is not None]
    if not tested:
        return [("runs", str(len(story.runs)))]
    best = max(tested, key=lambda r: r["personal"]["mean"])
    fair = max(tested, key=lambda r: r["worst_tenth"]["mean"])
    cards = [
        (f"best personal accuracy: {best['name']}", *_mean_and_half(best["personal"])),
        (f"best worst tenth: {fair['name']}", *_mean_and_half(fair["worst_tenth"])),
    ]
    served = [r for line, r in zip(story.lines, records, strict=True) if not line.runs[0].alone]
    if served and all(r["gain"] for r in served):  # else the most of some would be taken for that of all
        most = max(served, key=lambda r: r["gain"]["mean"])
        ahead = f"most over training alone: {most['name']}"
        behind = f"training alone is ahead by so much; closest: {most['name']}"
        cards.append(_gain_card(most["gain"]["mean"], ahead, behind))
    spent = sum(run.last["seconds"] for run in story.runs)
    return [*cards, ("runs", str(len(story.runs))), ("time of all", seconds(spent))]


def _summary(story: RunSet) -> str:
    if len(story.lines) == 1 and len(story.runs) == 1:
        return ""
    table = summary_tables.summary(story)
    return f'<h2>Results</h2><p class="say">{escape(table.caption)}</p>{to_html(table)}'


def _accuracy(story: RunSet, drawn: Mapping[str, Chart]) -> str:
    shown = [chart for name, chart in drawn.items() if name.startswith("accuracy")]
    if not shown:
        return '<h2>Accuracy by round</h2><p class="say">No device has a test set, so there is no accuracy to show.</p>'
    one = len(story.lines) == 1
    several = any(len(line.runs) > 1 for line in story.lines)
    over = "devices and seeds" if several else "devices"
    says = f"Mean over {over}, each device on its own test set. "
    says += "The band is one standard deviation over devices" if one else "The band is the 95 % interval over seeds"
    says = says + "." if one or several else says.partition(". ")[0] + "."
    first, *others = shown
    rest = f'<div class="pair">{"".join(figure(chart) for chart in others)}</div>' if others else ""
    return f'<h2>Accuracy by round</h2><p class="say">{escape(says)}</p>{figure(first, heading=bool(rest))}{rest}'


def _splits(story: RunSet) -> str:
    """A map for every split of the runs, the first ones of many."""
    by_split: dict[str, list[tuple[Line, Any]]] = {}
    for line in story.lines:
        for run in line.runs:
            by_split.setdefault(run.manifest["split_sha256"], []).append((line, run))
    maps: list[str] = []
    cells = 0
    for users in list(by_split.values())[:MOST_SPLITS]:
        line, run = users[0]
        found = read_split_summary(run.folder, run.config)
        cells += nonzero_cells(found) if isinstance(found, SplitSummary) else 0
        if maps and cells > MOST_CELLS:
            break
        shared = len({user.name for user, _ in users}) == len(story.lines)
        which = f"seed {run.seed}" if shared else f"{escape(line.name)}, seed {run.seed}"
        drawn = _map(found) if isinstance(found, SplitSummary) else f'<div class="waits"><p>{escape(found)}</p></div>'
        is_first = " open" if not maps else ""
        maps.append(drawn if len(by_split) == 1 else f"<details{is_first}><summary>{which}</summary>{drawn}</details>")
    left = len(by_split) - len(maps)
    more = (
        f'<p class="say">{left} other splits are left out; report a run by itself to see its own.</p>' if left else ""
    )
    says = "Samples that each device sees with and without their labels."
    return f'<h2>Who holds what</h2><p class="say">{says}</p>{"".join(maps)}{more}'


def _map(found: SplitSummary) -> str:
    shown = len(found.names)
    few = f'<p class="say">The first {shown} of {found.devices:,} devices.</p>' if shown < found.devices else ""
    kinds = len(found.classes)
    if kinds < found.all_classes:
        few += f'<p class="say">The first {kinds} of {found.all_classes:,} classes.</p>'
    unknown = '<p class="say">?: unlabelled samples whose class nobody knows.</p>' if any(found.unknown) else ""
    return heat_map(found) + few + unknown


def _labels(drawn: Mapping[str, Chart]) -> str:
    shown = [chart for name, chart in drawn.items() if name.startswith("labels")]
    if not shown:
        return ""
    says = (
        "Of the devices that have taken part: how many of their pseudo-labels are right, and the mean of the largest "
        "entry of a pseudo-label, which is how sure the model is of it."
    )
    logged = any(s["name"] == "confidence" for c in shown for s in c["series"]) or "labels-confidence" in drawn
    old = "" if logged else '<p class="say">This run is from before confidence was logged.</p>'
    figures = "".join(figure(chart, heading=len(shown) > 1) for chart in shown)
    body = figures if len(shown) == 1 else f'<div class="pair">{figures}</div>'
    return f'<h2>Pseudo-labels</h2><p class="say">{says}</p>{old}{body}'


def _cost(story: RunSet, drawn: Mapping[str, Chart]) -> str:
    table = summary_tables.reach(story)
    body = _reach_html(story, table) if table.records else f'<p class="say">{escape(table.empty)}</p>'
    figures = figure(drawn["uplink"]) if "uplink" in drawn else ""
    return f'<h2>What it took</h2><p class="say">{escape(table.caption)}</p>{body}{figures}'


def _reach_html(story: RunSet, table: Table) -> str:
    """One line as it is; of several lines a row each, an accuracy a column."""
    if len(story.lines) == 1:
        return to_html(table._replace(columns=table.columns[1:]))
    targets = summary_tables.targets_of(story)
    records: dict[str, dict[str, Any]] = {line.name: {"name": line.name} for line in story.lines}
    for r in table.records:
        records[r["name"]][f"{r['accuracy']:g}"] = r
    columns = [table.columns[0], *(Column(f"{t:g}", f"{100 * t:g} %", _reached) for t in targets)]
    return to_html(table._replace(columns=columns, records=list(records.values())))


def _reached(record: Mapping[str, Any] | None) -> str:
    if not record or not record["runs"]:
        return "-"
    some = "" if record["runs"] == record["of"] else f" ({record['runs']} of {record['of']})"
    return f"{record['rounds']:.0f} rounds, {size(record['uplink_bytes'])}, {seconds(record['seconds'])}{some}"


def _gaps(drawn: Mapping[str, Chart]) -> str:
    if "gaps" not in drawn:
        return ""
    says = "G of the theory, weighed with L = 1: how far the state is from one that no gradient step would change."
    return f'<h2>Optimality gap</h2><p class="say">{says}</p>{figure(drawn["gaps"], heading=False)}'
