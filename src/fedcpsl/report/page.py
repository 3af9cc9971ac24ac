"""One self-contained HTML page about a run, readable offline, light and dark."""

import csv
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedcpsl.config import to_toml
from fedcpsl.report.plots import accuracy_by_round, accuracy_per_device
from fedcpsl.report.terminal import MODELS, percent, size
from fedcpsl.runs.files import write_whole
from fedcpsl.runs.folder import final_metrics, read_manifest, read_metrics, read_run_config


def write_report(folder: Path) -> Path:
    """Write plots/*.svg and report.html into a finished run's folder."""
    metrics, final = read_metrics(folder), final_metrics(folder)
    with (folder / "devices.csv").open(newline="", encoding="utf-8") as file:
        devices = list(csv.DictReader(file))
    pictures = {"accuracy": accuracy_by_round(metrics), "devices": accuracy_per_device(devices)}
    (folder / "plots").mkdir(exist_ok=True)
    for name, svg in pictures.items():
        write_whole(folder / "plots" / f"{name}.svg", svg)
    page = _page(final, pictures, devices, to_toml(read_run_config(folder)), read_manifest(folder))
    write_whole(folder / "report.html", page)
    return folder / "report.html"


def _page(
    final: Mapping[str, Any],
    pictures: Mapping[str, str],
    devices: Sequence[Mapping[str, str]],
    config: str,
    manifest: Mapping[str, Any],
) -> str:
    settings = final["config"]
    sentence = (
        f"{final['algorithm']} on {final['dataset']}: {manifest['devices']} devices, {settings['work']['active']} of "
        f"them active in each of {final['rounds']} rounds, {labels_seen(settings['data'])}, "
        f"seed {final['seed']}."
    )
    cards = [
        ("personal accuracy", percent(final["personal"])),
        ("worst tenth of devices", percent(final["personal"], "worst_tenth")),
        ("global model, own tests", percent(final["global"])),
        ("pseudo-labels right", percent(final, "pseudo_label_accuracy")),
        ("uplink", size(final["uplink_bytes"])),
        ("time", f"{final['seconds']:.1f} s"),
    ]
    facts = {k: v for k, v in manifest.items() if k not in ("command", "resumed")}
    rerun = "fedcpsl run config.toml"
    body = f"""<header><h1>{escape(final["algorithm"])} <span>on {escape(final["dataset"])}</span></h1><p>{escape(sentence)}</p></header>
<section class="cards">{"".join(_card(*card) for card in cards)}</section>
<section><h2>Accuracy by round</h2><figure>{inline_svg(pictures["accuracy"])}<figcaption>Mean over devices, each on its own
test set; the band is one standard deviation over devices.</figcaption></figure></section>
<section><h2>Accuracy per device</h2><figure>{inline_svg(pictures["devices"])}<figcaption>Bars: the device's personal
prediction. Dots: the global model on the same tests.</figcaption></figure></section>
<section><h2>Models</h2>{_model_table(final)}</section>
<section><h2>Devices</h2>{_device_table(devices)}</section>
<section><h2>How to run it again</h2><p>Save the settings below as <code>config.toml</code>, then
<code>{rerun}</code>.</p><details open><summary>config.toml</summary><pre>{escape(config)}</pre></details>
<details><summary>made with</summary><table>{"".join(_row(k, v) for k, v in facts.items())}</table></details></section>
<footer>fedcpsl {escape(manifest["fedcpsl"])}, started {escape(manifest["started"])}</footer>"""
    return html_page(f"{final['algorithm']} on {final['dataset']}", body)


def html_page(title: str, body: str) -> str:
    """A whole page, self-contained, light and dark."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · fedcpsl</title><style>{_STYLE}</style></head><body><main>
{body}
</main></body></html>
"""


def labels_seen(data: Mapping[str, Any]) -> str:
    """How many labels devices may see, in words."""
    share = data["labelled"]
    seen = f"{100 * min(share):g} to {100 * max(share):g} %" if isinstance(share, list) else f"{100 * share:g} %"
    where = "" if data["labelled_devices"] == "all" else f" at {data['labelled_devices']} devices"
    return f"{seen} of the training labels visible{where}"


def _card(label: str, value: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _row(*cells: Any) -> str:
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _model_table(final: Mapping[str, Any]) -> str:
    keys = ("mean", "std", "worst_tenth")
    rows = [_row(model, *(percent(final[model], key) for key in keys)) for model in MODELS if final[model]]
    return f"<table><tr><th>model<th>mean<th>std over devices<th>worst tenth</tr>{''.join(rows)}</table>"


def _device_table(devices: Sequence[Mapping[str, str]]) -> str:
    shown = sorted((d for d in devices if d["personal"]), key=lambda d: -float(d["personal"]))
    if len(shown) > 100:
        shown = [*shown[:50], *shown[-50:]]
    sizes = ("name", "labelled", "unlabelled", "active_rounds")
    rows = [
        _row(*(d[k] for k in sizes), *(f"{100 * float(d[k]):.1f} %" if d[k] else "-" for k in MODELS)) for d in shown
    ]
    head = "<tr><th>device<th>labelled<th>unlabelled<th>active rounds<th>personal<th>global<th>localized</tr>"
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def inline_svg(svg: str) -> str:
    """A picture without its XML prologue, to stand in a page."""
    return svg[svg.index("<svg") :]


_STYLE = """
:root{color-scheme:light dark;--ink:#1c2127;--soft:#5f6b7a;--paper:#fff;--card:#f4f6f8;--line:#dde2e8;--accent:#2f9e6e}
@media (prefers-color-scheme:dark){:root{--ink:#e8ebee;--soft:#9aa5b1;--paper:#14181c;--card:#1e242a;--line:#303840}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.25rem}h1{font-size:2rem;margin:0}h1 span{color:var(--soft);font-weight:400}
h2{font-size:1.15rem;margin:2.5rem 0 .75rem}header p,figcaption,footer{color:var(--soft)}figure{margin:0}
figure svg{width:100%;height:auto;display:block}figure.sweep svg{width:auto;max-width:100%}figcaption{font-size:.85rem;margin-top:.4rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:.75rem;margin-top:1.75rem}
.card{background:var(--card);border-radius:.6rem;padding:.9rem 1rem;display:flex;flex-direction:column}
.card b{font-size:1.45rem;font-variant-numeric:tabular-nums}.card:first-child b{color:var(--accent)}
.card span{color:var(--soft);font-size:.82rem}table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:500}.wide{overflow-x:auto}.wide td,.wide th{white-space:nowrap}
pre{background:var(--card);border-radius:.6rem;padding:1rem;overflow-x:auto;font-size:.82rem}summary{cursor:pointer;color:var(--soft)}
footer{margin-top:3rem;font-size:.82rem}@media print{details>pre{white-space:pre-wrap}main{padding:0}}
"""
