"""fedcpsl verify: replay recorded runs, evaluate the formulas of edge networks, and compare."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcpsl.errors import InputError

if TYPE_CHECKING:
    from fedcpsl.edge.vectors import Compared
    from fedcpsl.recorded_runs import Difference, Vector


def add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="replay recorded runs and compare every number",
        description="Replay recorded runs in float64 on every executor of this machine, and evaluate the formulas of "
        "edge networks; exit code 1 if one differs.",
    )
    verify.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a recorded run (.npz), or recorded numbers of edge formulas (.json)",
    )
    verify.add_argument("--json", action="store_true", help="as one JSON object")
    verify.set_defaults(command=_verify)


def _verify(parsed: argparse.Namespace) -> int:
    from fedcpsl.edge.vectors import read_formula_vector
    from fedcpsl.recorded_runs import executors, read_vector
    from fedcpsl.storage import to_json

    formulas = {path: read_formula_vector(path) for path in parsed.files if path.suffix == ".json"}
    vectors = {path: read_vector(path) for path in parsed.files if path not in formulas}
    replays = []
    for path, formula in formulas.items():
        replays.append(_evaluated(path, formula))
        if not parsed.json:
            _print_replay(replays[-1])
    for path, vector in vectors.items():
        for executor, device in executors():
            replays.append(_replay(path, vector, executor, device))
            if not parsed.json:
                _print_replay(replays[-1])
    failed = not all(replay["exact"] for replay in replays)
    if parsed.json:
        print(to_json({"exact": not failed, "replays": replays}, indent=2))
    else:
        print("some vectors differ" if failed else f"all {len(vectors) + len(formulas)} vectors replayed")
    return int(failed)


def _evaluated(path: Path, vector: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the formulas of one vector; they are plain NumPy, with no executor."""
    from fedcpsl.edge.vectors import compared

    with _named(path):
        return _summary(path, "formulas", "cpu", list(compared(vector)))


def _replay(path: Path, vector: "Vector", executor: str, device: str) -> dict[str, Any]:
    """Replay one vector on one executor: the largest error per quantity, and the first error beyond rounding."""
    from fedcpsl.recorded_runs import replay

    with _named(path):
        return _summary(path, executor, device, list(replay(vector, executor, device)))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error in what a file holds say which file, since many are given at once."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _summary(path: Path, executor: str, device: str, differences: "Sequence[Difference | Compared]") -> dict[str, Any]:
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


def _print_replay(replay: Mapping[str, Any]) -> None:
    listed = "  ".join(f"{quantity} {error:.1e}" for quantity, error in replay["worst_error"].items())
    result = "exact" if replay["exact"] else "DIFFERS"
    print(f"{Path(replay['file']).name}  {replay['executor']} on {replay['device']}: {result}")
    print(f"  worst error: {listed}")
    if replay["first_difference"]:
        print(f"  first difference at {replay['first_difference']}")
