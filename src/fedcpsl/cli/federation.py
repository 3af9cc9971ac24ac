"""fedcpsl federation: real processes on this machine, and the app for Flower."""

import argparse
import sys
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError

UNPROTECTED = (
    "fedcpsl: whoever reaches a Flower SuperLink or SuperNode can run code there: keep them on loopback, on a machine "
    "without other accounts"
)


def add(commands: Any) -> None:
    federation = commands.add_parser(
        "federation", help="a federation of real processes, to try", description="Try a federation on this machine."
    )
    kinds = federation.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = kinds.add_parser(
        "demo",
        help="a server and five devices as real processes",
        description="Start a server and devices as real processes on loopback, with TLS and keys, train on the digits "
        "and print every device's accuracy.",
        allow_abbrev=False,
    )
    demo.add_argument("--devices", type=int, default=5, help="[5]")
    demo.add_argument("--rounds", type=int, default=6, help="[6]")
    demo.add_argument("--folder", type=Path, default=Path("federation-demo"), help="[federation-demo]")
    demo.set_defaults(command=_demo)
    app = kinds.add_parser(
        "app",
        help="print where the Flower app is",
        description="Print the folder of the Flower app, for `flwr run` on a SuperLink that you run yourself on this "
        "machine. Flower runs whatever app it is sent, so keep it on loopback; `fedcpsl serve` is the protected way.",
        allow_abbrev=False,
    )
    app.set_defaults(command=_app)


def _app(parsed: argparse.Namespace) -> int:  # noqa: ARG001
    from fedcpsl.flower import APP

    print(APP)
    print(UNPROTECTED, file=sys.stderr)
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    if not 2 <= parsed.devices <= 50 or parsed.rounds < 1:
        raise InputError("--devices, --rounds: give 2 to 50 devices and at least 1 round")
    from fedcpsl.cli.serve import status_sayer
    from fedcpsl.deployment.demo import prepare_demo, run_demo
    from fedcpsl.report.federation import print_status

    names = prepare_demo(parsed.folder, parsed.devices, parsed.rounds)
    print_status(run_demo(parsed.folder, names, status_sayer()))
    print(f"the job, the keys, each device's data and state, and all logs are in {parsed.folder}")
    return 0
