"""fedcpsl adapt: a personal model for a device that was not in training."""

import argparse
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError


def add(commands: Any) -> None:
    adapt = commands.add_parser(
        "adapt",
        help="a personal model for a new device, from a run's global model",
        description="Personalise for a device that was not in training. Its own model starts from the global one, "
        "which stays as it is, and is trained on the device's samples alone, labelled and unlabelled. Some labelled "
        "samples are held out, to tell what was gained.",
        allow_abbrev=False,
    )
    adapt.add_argument("run", type=Path, metavar="RUN", help="a finished run's folder")
    adapt.add_argument("--data", type=Path, required=True, metavar="FILE", help="the device's samples, as for `run`")
    adapt.add_argument("--label", metavar="COLUMN", help="the label's column, where it is not that of the run")
    adapt.add_argument("--name", default="new", help="what to call the device [new]")
    adapt.add_argument("--rounds", type=int, metavar="N", help="rounds [as many as the run's devices had on average]")
    adapt.add_argument("--out", type=Path, metavar="FOLDER", help="where to write [adapted/<name>]")
    adapt.add_argument("--json", action="store_true", help="the result as one JSON object")
    adapt.set_defaults(command=_adapt)


def _adapt(parsed: argparse.Namespace) -> int:
    folder = parsed.out or Path("adapted") / "".join(c if c.isalnum() or c in "-_." else "-" for c in parsed.name)
    if parsed.rounds is not None and parsed.rounds < 1:
        raise InputError(f"--rounds {parsed.rounds}: give at least 1")
    if not parsed.data.exists():
        raise InputError(f"{parsed.data}: no such file")
    from fedcpsl.export.adaptation import adapt, check_adaptable, rounds_of_a_device, write_adapted
    from fedcpsl.export.saved_run import read_kept
    from fedcpsl.settings import Data
    from fedcpsl.storage import to_json

    kept = read_kept(parsed.run)
    check_adaptable(kept)
    if folder.exists():
        fix = "give another --out" if parsed.out else "give another --name, or --out FOLDER"
        raise InputError(f"{folder}: exists already; {fix}")
    label, test = parsed.label or kept.config.data.label, kept.config.data.test
    data = Data(dataset="own", file=str(parsed.data.absolute()), label=label, labelled=1.0, test=test)
    adapted = adapt(kept, data, parsed.name, parsed.rounds or rounds_of_a_device(kept))
    write_adapted(adapted, kept, folder)
    found = {
        "folder": str(folder),
        "rounds": adapted.state.round,
        "held_out": adapted.held_out,
        "global": adapted.general,
        "personal": adapted.personal,
        "gain": adapted.personal - adapted.general,
        "gain_interval": adapted.gain,
    }
    print(to_json(found) if parsed.json else _in_words(found))
    return 0


def _in_words(found: dict[str, Any]) -> str:
    return "\n".join([*_judgement(found), f"model    {found['folder']}"])


def _judgement(found: dict[str, Any]) -> list[str]:
    """What was gained, over how many samples, and whether that is more than chance."""
    if not found["held_out"]:
        return ["no labelled sample could be held out, so what was gained is not known: give more labels"]
    low, high = found["gain_interval"]
    count = found["held_out"]
    on = f"{count} sample{'s' * (count > 1)}"
    if low > 0:
        said = "the personal model is better than the global one"
    elif high < 0:
        said = "the global model is the better one here: use it with --device global"
    else:
        said = f"whether that is a gain cannot be known from {on}: more labelled samples would tell"
    return [
        f"on {on} held out:",
        f"  global model    {100 * found['global']:6.2f} %",
        f"  personal model  {100 * found['personal']:6.2f} %",
        f"  gain            {100 * found['gain']:+6.2f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})",
        said,
    ]
