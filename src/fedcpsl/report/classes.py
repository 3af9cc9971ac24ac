"""How every class is recognised: a row with its accuracies, and what is taken for what."""

from html import escape

import numpy as np

from fedcpsl.report.loaded_runs import RunSet
from fedcpsl.report.tables import Column, Table, percent, plain, to_html
from fedcpsl.runs.result_tables import Confusion, Counts, class_metrics

MOST_RUNS = 12  # whose classes are listed
MOST_CLASSES = 30  # of a map


def class_section(story: RunSet) -> str:
    """The first run of every line; nothing where none was counted."""
    ended = [(line.name, next((run for run in line.runs if run.finished), None)) for line in story.lines]
    known = [(name, run, run.confusion) for name, run in ended[:MOST_RUNS] if run]
    shown = [(name, run, confusion) for name, run, confusion in known if confusion and confusion.counts]
    if not shown:
        return ""
    parts = []
    for k, (name, run, confusion) in enumerate(shown):
        body, title = _run(confusion), f"<b>{escape(name)}</b>, seed {run.seed}"
        opened = " open" * (k == 0)
        parts.append(body if len(shown) == 1 else f"<details{opened}><summary>{title}</summary>{body}</details>")
    return f"<h2>Accuracy per class</h2>{''.join(parts)}"


def class_tables(story: RunSet) -> list[Table]:
    """Of every finished run, a row for each class that is tested."""
    known = [(line.name, run, run.confusion) for line in story.lines for run in line.runs if run.finished]
    return [_table(found, f"{name}, seed {run.seed}") for name, run, found in known if found and found.counts]


def _table(confusion: Confusion, name: str) -> Table:
    columns = [Column("class", "class", str), Column("tests", "tests", plain)]
    columns += [Column(model, f"{model}, %", percent) for model in confusion.counts]
    records = [record for record in class_metrics(confusion)["classes"] if record["tests"]]
    return Table("classes", f"Accuracy per class over all tests: {name}.", columns, records)


def _run(confusion: Confusion) -> str:
    f1 = class_metrics(confusion)["macro_f1"]
    said = ", ".join(f"{100 * value:.2f} % for the {model} model" for model, value in f1.items())
    table = to_html(_table(confusion, ""), label="accuracy per class")
    return f'<p class="say">Over the tests of all devices. Macro-F1: {said}.</p>{table}{_maps(confusion)}'


def _maps(confusion: Confusion) -> str:
    there = [
        i for i in range(len(confusion.classes)) if any(c[i].any() or c[:, i].any() for c in confusion.counts.values())
    ]
    if len(there) > MOST_CLASSES:
        return f'<p class="say">With {len(there)} classes the confusions are in <code>confusion.csv</code>.</p>'
    names = [confusion.classes[i] for i in there]
    drawn = [_map(model, counts[np.ix_(there, there)], names) for model, counts in confusion.counts.items()]
    return f'<div class="maps">{"".join(drawn)}</div>'


def _map(model: str, counts: Counts, names: list[str]) -> str:
    """Classes by what was predicted, the darker the larger its share of the class."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = []
    for name, row in zip(names, counts.tolist(), strict=True):
        cells = "".join(_cell(n, sum(row), name, other) for other, n in zip(names, row, strict=True))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    kind = "labelled" if model == "personal" else "unlabelled"  # the two colours of maps
    dense = " dense" if len(names) > 16 else ""
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="confusion matrix, {model} model">'
        f'<table class="heat {kind}{dense}"><caption>{model}: class (row) by prediction (column), tests</caption>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(count: int, of: int, name: str, other: str) -> str:
    if not count:
        return "<td></td>"
    share = round(12 + 88 * count / of)
    tip = escape(f"{count} of {of} tests of class {name} are predicted as {other}", quote=True)
    return f'<td{" class=hi" * (share > 55)} style="--v:{share}%" title="{tip}">{count}</td>'
