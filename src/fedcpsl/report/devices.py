"""How every device did: a row with its accuracies on one scale, and what it gained over training alone."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedcpsl.report.loaded_runs import LoadedRun, RunSet, alone_for
from fedcpsl.report.summary_tables import best_and_worst, device_records
from fedcpsl.report.tables import percent, plain, points

MOST_RUNS = 12  # whose devices are listed
FEWER = 24  # devices of each, where there are several runs


def device_section(story: RunSet) -> str:
    """The first run of every line, one after another; where a server helped nobody, that is seen too."""
    ended = [(line, next((run for run in line.runs if run.finished), None)) for line in story.lines]
    shown = [(line.name, run) for line, run in ended if run and run.devices]
    if not shown:
        return _section('<div class="waits"><p>The devices’ accuracies appear when a run is finished.</p></div>')
    missing = [run for _, run in shown if not run.alone and alone_for(run, story.references) is None]
    parts = [_how_to_get_it(missing, single=len(story.runs) == 1)] if missing else []
    for k, (name, run) in enumerate(shown[:MOST_RUNS]):
        alone = alone_for(run, story.references)
        table = _run(run, alone, few=len(shown) > 1)
        title = f"<b>{escape(name)}</b>, seed {run.seed}"
        parts.append(
            table if len(shown) == 1 else f"<details{' open' * (k == 0)}><summary>{title}</summary>{table}</details>"
        )
    if len(shown) > MOST_RUNS:
        parts.append(f'<p class="say">{len(shown) - MOST_RUNS} more are left out; report them by themselves.</p>')
    return _section("".join(parts))


def _section(body: str) -> str:
    return f"<h2>Accuracy per device</h2>{body}"


def _how_to_get_it(runs: Sequence[LoadedRun], *, single: bool) -> str:
    command = f"fedcpsl report {runs[0].folder} --alone"
    other = "" if single else " In a comparison, have <code>local</code> among the algorithms."
    return (
        '<div class="waits"><p>What a device gains over training alone is not known here. '
        f"This trains the same devices without a server, into the run’s folder, and writes the page again:</p>"
        f"<p><code>{escape(command)}</code></p>{f'<p>{other}</p>' if other else ''}</div>"
    )


def _run(run: LoadedRun, alone: LoadedRun | None, *, few: bool) -> str:
    records = device_records(run, alone)
    if not records:
        return '<p class="say">No device has a test set.</p>'
    listed, left_out = best_and_worst(records, FEWER) if few else best_and_worst(records)
    with_global = any(r["global"] is not None for r in records)
    rows = [_row(record, gains=alone is not None) for record in listed]
    columns = 5 + (alone is not None)
    if left_out:
        cut = f'<tr class="cut"><td colspan="{columns}">{left_out:,} devices in between</td></tr>'
        rows.insert(len(listed) // 2, cut)
    head = '<th scope="col">device</th><th scope="col" class="rest">labelled</th>'
    head += '<th scope="col" class="rest">unlabelled</th><th scope="col" class="bar">0 to 100 %</th>'
    head += '<th scope="col" class="rest">tests</th><th scope="col" aria-sort="descending">personal, %</th>'
    head += '<th scope="col">over alone</th>' if alone else ""
    return (
        f"{_gains(records) if alone else ''}{_marks(with_global, alone is not None)}"
        '<div class="wide" role="region" tabindex="0" aria-label="accuracy per device"><table class="sorts devices">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _gains(records: Sequence[Mapping[str, Any]]) -> str:
    gains = [r["gain"] for r in records if r["gain"] is not None]
    if not gains:
        return ""
    better, worse = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
    mean = points(sum(gains) / len(gains))
    return (
        f'<p class="say">Over training alone, {better} of {len(gains)} devices are better off and {worse} worse; '
        f"the mean is {mean} points, from {points(min(gains))} to {points(max(gains))}.</p>"
    )


def _marks(with_global: bool, with_alone: bool) -> str:
    kinds = [("p", "personal")] + [("g", "global model")] * with_global + [("a", "training alone")] * with_alone
    marks = "".join(f'<span><span class="strip"><i class="{kind}"></i></span>{text}</span>' for kind, text in kinds)
    return f'<div class="marks" aria-hidden="true">{marks}</div>'


def _row(record: Mapping[str, Any], *, gains: bool) -> str:
    name = escape(str(record["device"]))
    sizes = "".join(f'<td class="rest">{record[key]:,}</td>' for key in ("labelled", "unlabelled"))
    cells = f'<td class="bar">{_strip(record)}</td><td class="rest">{plain(record["tests"])}</td>'
    cells += f"<td>{percent(record['personal'])}</td>"
    if gains:
        gain = record["gain"]
        side = "" if not gain else "up" if gain > 0 else "down"
        order = "" if gain is None else f' data-v="{gain:.6f}"'
        cells += f'<td class="{side}"{order}>{points(gain)}</td>'
    return f'<tr><th scope="row">{name}</th>{sizes}{cells}</tr>'


def _strip(record: Mapping[str, Any]) -> str:
    """A device's accuracies as marks on a line from 0 to 100 %."""
    personal, alone, general = (None if record[k] is None else 100 * record[k] for k in ("personal", "alone", "global"))
    assert personal is not None
    words = [f"device {record['device']}", f"personal {personal:.2f} %"]
    marks = ""
    if alone is not None:
        fell = " fell" if personal < alone else ""
        low, high = min(personal, alone), max(personal, alone)
        marks += f'<i class="span{fell}" style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
        marks += f'<i class="a" style="left:{alone:.1f}%"></i>'
        words.append(f"alone {alone:.2f} %")
    if general is not None:
        marks += f'<i class="g" style="left:{general:.1f}%"></i>'
        words.append(f"global {general:.2f} %")
    marks += f'<i class="p" style="left:{personal:.1f}%"></i>'
    words.append(f"{plain(record['tests'])} tests")
    words.append(f"{record['labelled']} labelled, {record['unlabelled']} unlabelled samples")
    words.append(f"active in {record['active_rounds']} rounds")
    tip = escape("; ".join(words), quote=True)
    return f'<span class="strip" role="img" title="{tip}" aria-label="{tip}">{marks}</span>'
