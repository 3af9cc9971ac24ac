"""fedcpsl export: one device's personal model as a file."""

import argparse
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError
from fedcpsl.export import SUFFIXES


def add(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a device's personal model as one file",
        description="Write the personal model of a device (both networks, their weights and the normalisation of "
        "inputs) as one file that takes raw samples and gives probabilities. The file is compared with the run before "
        "it is written.",
        allow_abbrev=False,
    )
    export.add_argument("run", type=Path, metavar="RUN", help="a finished run's folder, or one that adapt made")
    export.add_argument("--device", metavar="NAME", help="a device by name or number, or global: the global model")
    export.add_argument("--format", choices=tuple(SUFFIXES), help="what to write [as --out ends, else onnx]")
    export.add_argument("--out", type=Path, metavar="FILE", help="where to write [RUN/device-<number>.<ending>]")
    export.set_defaults(command=_export)


def _export(parsed: argparse.Namespace) -> int:
    kind = _kind(parsed.format, parsed.out)
    from fedcpsl.export.saved_run import choose, read_kept
    from fedcpsl.export.writing import check_target, export

    if parsed.out:
        check_target(parsed.out)
    chosen = choose(read_kept(parsed.run), parsed.device)
    number = chosen.about.number
    name = chosen.about.device if number is None else f"device-{number}"
    path = parsed.out or parsed.run / f"{name}{SUFFIXES[kind]}"
    check_target(path)
    gap = export(chosen, kind, path)
    print(f"model    {path}\nchecked  its probabilities are within {gap:.1e} of the run's")
    return 0


def _kind(format: str | None, out: Path | None) -> str:
    endings = {suffix: name for name, suffix in SUFFIXES.items()}
    if out is None:
        return format or "onnx"
    found = endings.get(out.suffix.lower())
    if found is None:
        raise InputError(f"{out}: give a name that ends with {', '.join(endings)}")
    if format and format != found:
        raise InputError(f"{out}: --format {format} ends with {SUFFIXES[format]}; give one of the two")
    return found
