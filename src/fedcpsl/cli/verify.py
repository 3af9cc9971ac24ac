"""fedcpsl verify: recorded runs replayed."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="replay test vectors on every executor",
        description="Replay recorded runs in float64 on every executor that this machine has; exit 1 at a difference.",
    )
    verify.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an .npz test vector")
    verify.set_defaults(command=_verify)


def _verify(parsed: argparse.Namespace) -> int:
    from fedcpsl.vectors import executors, read_vector, replay

    vectors = {path: read_vector(path) for path in parsed.files}
    failed = False
    for path, vector in vectors.items():
        for executor, device in executors():
            differences = list(replay(vector, executor, device))
            first = next((d for d in differences if d.error > 1), None)
            failed |= first is not None
            worst: dict[str, float] = {}
            for d in differences:
                worst[d.quantity] = max(worst.get(d.quantity, 0.0), d.largest)
            listed = "  ".join(f"{quantity} {error:.1e}" for quantity, error in worst.items())
            print(f"{path.name}  {executor} on {device}: {'DIFFERS' if first else 'exact'}\n  worst error: {listed}")
            if first:
                print(f"  first difference at {first}")
    print("some vectors differ" if failed else f"all {len(vectors)} vectors replayed")
    return int(failed)
