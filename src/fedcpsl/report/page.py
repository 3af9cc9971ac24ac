"""One self-contained HTML page about runs: readable offline, in light and dark, on paper, and without scripts."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import fedcpsl
from fedcpsl.report.charts import Chart, all_charts
from fedcpsl.report.figures import accuracy_by_round, accuracy_per_device
from fedcpsl.report.headline import state_of, title_of
from fedcpsl.report.loaded_runs import RunSet, load_runs
from fedcpsl.report.sections import Sections, environment, sections_of
from fedcpsl.report.tables import GENERATOR, check_target
from fedcpsl.storage import to_json, write_whole


def write_report(folder: Path) -> Path:
    """Write plots/*.svg and report.html into a run's folder."""
    run_set = load_runs([folder])
    (run,) = run_set.runs
    pictures = {"accuracy": accuracy_by_round(run.metrics)}
    if run.devices:
        pictures["devices"] = accuracy_per_device(run.devices)
    write_pictures(folder, pictures)
    write_whole(folder / "report.html", page_of(run_set))
    return folder / "report.html"


def write_pictures(folder: Path, pictures: Mapping[str, str]) -> None:
    """Write plots/*.svg."""
    (folder / "plots").mkdir(exist_ok=True)
    for name, svg in pictures.items():
        write_whole(folder / "plots" / f"{name}.svg", svg)


def write_page(paths: Sequence[Path], out: Path) -> Path:
    """Write one page about several runs, comparisons or studies; only a report is ever overwritten."""
    check_target(out, "html")
    write_whole(out, page_of(load_runs(paths)))
    return out


def page_of(run_set: RunSet, title: str = "", summary: str | None = None) -> str:
    """Return the page of some runs; `summary` is HTML in place of the usual table of results."""
    charts = all_charts(run_set)
    sections = sections_of(run_set, charts, title, summary)
    return html_page(title or title_of(run_set), sections, page_data(run_set, charts))


def page_data(run_set: RunSet, charts: Mapping[str, Chart], **more: Any) -> dict[str, Any]:
    """Return what the page's script needs, as plain JSON values."""
    return {"charts": dict(charts), "state": state_of(run_set), "over": run_set.over, **more}


def html_page(title: str, sections: Sections, data: Mapping[str, Any]) -> str:
    """Return the page with its sections, style, script and data."""
    return (
        environment()
        .get_template("page.html")
        .render(
            title=title,
            sections=sections,
            live=bool(data.get("live")),
            data=script_json(data),
            policy=content_security_policy(),
            generator=GENERATOR,
            version=fedcpsl.__version__,
            style=asset("page.css"),
            script=asset("page.js"),
        )
    )


def script_json(value: Any) -> str:
    """Return JSON that may be inside a script element."""
    return to_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def content_security_policy() -> str:
    """Return the policy: only the page's own script runs, it connects only to its server, and nothing else is loaded.

    Style attributes are allowed: the marks of a chart have their positions there, and a style cannot run code.
    """
    script = b64encode(sha256(asset("page.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    """Return a file that is part of every page."""
    return files("fedcpsl.report").joinpath("assets", name).read_text(encoding="utf-8")


def inline_svg(svg: str) -> str:
    """Return a picture without its XML prologue, to be part of a page."""
    return svg[svg.index("<svg") :]
