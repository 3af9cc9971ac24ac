"""How to run it again, and what it was made with."""

import shlex
from html import escape

from fedcpsl.config import to_toml
from fedcpsl.report.loaded_runs import Line, LoadedRun, RunSet

MOST_CONFIGS = 12


def rerun_section(story: RunSet) -> str:
    """The command that was given, every setting, and the machine."""
    commands = dict.fromkeys(shlex.join(run.manifest["command"]) for run in story.runs)
    given = "".join(f"<pre>{escape(command)}</pre>" for command in list(commands)[:5])
    lines = [line for line in story.lines if not line.runs[0].adapted_from]
    configs = "".join(_config(line, is_open=len(lines) == 1) for line in lines[:MOST_CONFIGS])
    left = len(lines) - MOST_CONFIGS
    more = f'<p class="say">{left} more lie in the runs’ folders.</p>' if left > 0 else ""
    return (
        f'<h2>Run it again</h2><p class="say">It was made with</p>{given}{_adapt_again(story)}'
        f"{_run_again(story)}{configs}{more}{_made_with(story)}"
    )


def _run_again(story: RunSet) -> str:
    """The way by the settings; those of a run alone make it again."""
    if all(run.adapted_from for run in story.runs):
        return ""
    of = " of a run" if any(run.adapted_from for run in story.runs) else ""
    return (
        f'<p class="say">Or save the settings{of} below, in which nothing is left to chance or default, as '
        "<code>config.toml</code>, and give</p><pre>fedcpsl run config.toml</pre>"
    )


def _adapt_again(story: RunSet) -> str:
    """The commands for what was adapted from a run, whose settings would make something else."""
    commands = [_adapt(run) for run in story.runs if run.adapted_from]
    if not commands:
        return ""
    given = "".join(f"<pre>{escape(command)}</pre>" for command in commands[:MOST_CONFIGS])
    return f'<p class="say">From the folder of the run that it was adapted from, wherever that lies now</p>{given}'


def _adapt(run: LoadedRun) -> str:
    data, names = run.config.data, [device["name"] for device in run.devices[:1]]
    label = ["--label", data.label] if data.label else []
    name = [word for each in names for word in ("--name", each)]
    words = [run.adapted_from, "--data", data.file, *label, *name, "--rounds", str(run.last["round"])]
    return shlex.join(["fedcpsl", "adapt", *words])


def _config(line: Line, *, is_open: bool) -> str:
    run = line.runs[0]
    others = f" (others: --seed {', '.join(str(r.seed) for r in line.runs[1:])})" if len(line.runs) > 1 else ""
    title = f"<b>config.toml</b> of {escape(line.name)}, seed {run.seed}{others}"
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{title}</summary><pre>{escape(to_toml(run.config))}</pre></details>"


def _made_with(story: RunSet) -> str:
    manifest = story.runs[0].manifest
    facts = {key: value for key, value in manifest.items() if key not in ("command", "resumed")}
    facts["resumed"] = f"{len(manifest.get('resumed', []))} times"
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    of = "" if len(story.runs) == 1 else ", the first run"
    return f'<details><summary><b>Made with</b>{of}</summary><table class="facts">{rows}</table></details>'
