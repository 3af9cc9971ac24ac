"""One self-contained HTML page about runs, readable offline, light and dark, on paper, and with no script too."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import fedcpsl
from fedcpsl.report.chart_series import Chart
from fedcpsl.report.figures import accuracy_by_round, accuracy_per_device
from fedcpsl.report.loaded_runs import RunSet, load_runs
from fedcpsl.report.output_path import GENERATOR, check_target
from fedcpsl.report.sections import Parts, all_charts, parts_of, state_of, title_of
from fedcpsl.report.tables import embedded
from fedcpsl.storage import write_whole


def write_report(folder: Path) -> Path:
    """Write plots/*.svg and report.html into a run's folder."""
    story = load_runs([folder])
    (run,) = story.runs
    pictures = {"accuracy": accuracy_by_round(run.metrics)}
    if run.devices:
        pictures["devices"] = accuracy_per_device(run.devices)
    (folder / "plots").mkdir(exist_ok=True)
    for name, svg in pictures.items():
        write_whole(folder / "plots" / f"{name}.svg", svg)
    write_whole(folder / "report.html", page_of(story))
    return folder / "report.html"


def write_page(paths: Sequence[Path], out: Path) -> Path:
    """One page about several runs, comparisons or studies; a file that is no report of ours is never replaced."""
    check_target(out, "html")
    write_whole(out, page_of(load_runs(paths)))
    return out


def page_of(story: RunSet, title: str = "", summary: str | None = None) -> str:
    """The page of a story; `summary` is a table of its own kind in place of the usual one."""
    drawn = all_charts(story)
    return html_page(title or title_of(story), parts_of(story, drawn, title, summary), told_of(story, drawn))


def told_of(story: RunSet, drawn: Mapping[str, Chart], **more: Any) -> dict[str, Any]:
    """What the page's script draws from."""
    return {"charts": dict(drawn), "state": state_of(story), "over": story.over, **more}


def html_page(title: str, parts: Parts, told: Mapping[str, Any]) -> str:
    """A whole page of sections."""
    live = '<p class="state on" role="status"><i></i><span>watching</span></p>' if told.get("live") else ""
    sections = "".join(
        f'<{tag} id="{name}">{html}</{tag}>{live if name == "head" else ""}'
        for name, html in parts.items()
        for tag in ["header" if name == "head" else "section"]
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{content_security_policy()}"><meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR} {fedcpsl.__version__}"><link rel="icon" href="data:,">
<title>{escape(title)} · fedcpsl</title><style>{asset("page.css")}</style></head><body><main>
{sections}
<footer>fedcpsl {fedcpsl.__version__}</footer></main>
<script id="told" type="application/json">{embedded(told)}</script>
<script>{asset("page.js")}</script></body></html>
"""


@cache
def content_security_policy() -> str:
    """The page's own script alone may run, and speak to nobody but who served the page; nothing else is loaded.

    Styles may stand in attributes: the marks of a chart have their places there, and a style cannot act.
    """
    script = b64encode(sha256(asset("page.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    """A file that goes into every page."""
    return files("fedcpsl.report").joinpath("assets", name).read_text(encoding="utf-8")


def inline_svg(svg: str) -> str:
    """A picture without its XML prologue, to stand in a page."""
    return svg[svg.index("<svg") :]
