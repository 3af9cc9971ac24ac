"""fedcpsl verify: recorded runs replayed."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcpsl.recorded_runs import Vector


def add(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="replay test vectors on every executor",
        description="Replay recorded runs in float64 on every executor that this machine has; exit 1 at a difference.",
    )
    verify.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an .npz test vector")
    verify.add_argument("--json", action="store_true", help="as one JSON object")
    verify.set_defaults(command=_verify)


def _verify(parsed: argparse.Namespace) -> int:
    from fedcpsl.recorded_runs import executors, read_vector
    from fedcpsl.storage import to_json

    vectors = {path: read_vector(path) for path in parsed.files}
    replays = []
    for path, vector in vectors.items():
        for executor, device in executors():
            replays.append(_replayed(path, vector, executor, device))
            if not parsed.json:
                _say(replays[-1])
    failed = not all(each["exact"] for each in replays)
    if parsed.json:
        print(to_json({"exact": not failed, "replays": replays}, indent=2))
    else:
        print("some vectors differ" if failed else f"all {len(vectors)} vectors replayed")
    return int(failed)


def _replayed(path: Path, vector: "Vector", executor: str, device: str) -> dict[str, Any]:
    """How one vector came out on one executor: the largest error of every quantity, and the first beyond rounding."""
    from fedcpsl.recorded_runs import replay

    differences = list(replay(vector, executor, device))
    first = next((d for d in differences if d.error > 1), None)
    worst: dict[str, float] = {}
    for d in differences:
        worst[d.quantity] = max(worst.get(d.quantity, 0.0), d.largest)
    return {
        "file": str(path),
        "executor": executor,
        "device": str(device),
        "exact": first is None,
        "worst_error": worst,
        "first_difference": None if first is None else str(first),
    }


def _say(replayed: Mapping[str, Any]) -> None:
    listed = "  ".join(f"{quantity} {error:.1e}" for quantity, error in replayed["worst_error"].items())
    came_out = "exact" if replayed["exact"] else "DIFFERS"
    print(f"{Path(replayed['file']).name}  {replayed['executor']} on {replayed['device']}: {came_out}")
    print(f"  worst error: {listed}")
    if replayed["first_difference"]:
        print(f"  first difference at {replayed['first_difference']}")
