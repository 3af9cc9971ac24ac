"""fedcpsl watch: a run's page on this machine, with news while the run goes on."""

import argparse
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError

PORT = 8420


def add(commands: Any) -> None:
    watch = commands.add_parser(
        "watch",
        help="a run's page in your browser while it goes on",
        description="Serve the page of a run, a comparison, a sweep or a study to this machine alone. The page follows "
        "the run by itself. Ctrl-C ends it; the run does not notice.",
        allow_abbrev=False,
    )
    watch.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, comparison or study")
    watch.add_argument("--port", type=int, default=PORT, metavar="N", help=f"where; 0: any that is free [{PORT}]")
    watch.set_defaults(command=_watch)


def _watch(parsed: argparse.Namespace) -> int:
    if not 0 <= parsed.port <= 65535:
        raise InputError(f"--port {parsed.port}: give a number from 0 to 65535")
    from fedcpsl.report.live import serve

    serve(parsed.runs, parsed.port)
    return 0
