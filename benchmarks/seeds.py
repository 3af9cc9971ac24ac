"""What benchmarks of accuracy over seeds share: options, results printed as they are measured, and tables of them."""

import argparse
import csv
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch

from fedcpsl.runs.comparison import interval
from fedcpsl.runs.environment import cpu_name, git_commit
from fedcpsl.storage import write_whole

Measure = Callable[[str, str, int], Sequence[float]]  # of a case, a row and a seed: a share for each measure
Results = dict[tuple[str, str], list[tuple[float, ...]]]  # by case and row: of each measure, a share per seed


def options_for(doc: str | None, seeds: int, rounds: int) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=seeds)
    options.add_argument("--rounds", type=int, default=rounds)
    options.add_argument("--out", type=Path, help="a folder for the table, as CSV and Markdown")
    return options


def compare(
    chosen: argparse.Namespace, cases: Sequence[str], rows: Sequence[str], measures: Sequence[str], measure: Measure
) -> None:
    """Measure every row in every case, print each result as it comes, and write a table where the options name one."""
    torch.set_num_threads(1)
    print(_about(chosen))
    results: Results = {}
    for case in cases:
        for row in rows:
            began = time.monotonic()
            results[case, row] = list(zip(*(measure(case, row, seed) for seed in range(chosen.seeds)), strict=True))
            said = [f"{name} {text}" for name, text in zip(measures, _texts(results[case, row]), strict=True)]
            lead = "" if row == rows[0] else f", {rows[0]} is ahead by {_ahead(results, case, rows[0], row)}"
            print(f"{case:28} {row:28} {', '.join(said)}{lead} ({time.monotonic() - began:.0f} s)", flush=True)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        name = Path(sys.argv[0]).stem
        _write_csv(chosen.out / f"{name}.csv", results, measures)
        write_whole(chosen.out / f"{name}.md", _markdown(chosen, results, rows[0], measures))


def _about(chosen: argparse.Namespace) -> str:
    seeds = f"{chosen.seeds} seeds, {chosen.rounds} rounds"
    return f"{cpu_name()}, commit {git_commit()[:7]}, {date.today().isoformat()}; {seeds}"


def _text(shares: Sequence[float], *, sign: bool = False) -> str:
    """A mean in %, with half a 95 % interval over seeds."""
    found = interval(shares)
    assert found is not None
    half = found["half_width"]
    return f"{100 * found['mean']:{'+' if sign else ''}.2f}" + ("" if half is None else f" ± {100 * half:.2f}")


def _texts(of_measures: Sequence[Sequence[float]]) -> list[str]:
    return [_text(shares) for shares in of_measures]


def _ahead(results: Results, case: str, first: str, row: str) -> str:
    """By how much the first row is ahead in the first measure, paired by seed."""
    pairs = zip(results[case, first][0], results[case, row][0], strict=True)
    return _text([a - b for a, b in pairs], sign=True)


def _write_csv(path: Path, results: Results, measures: Sequence[str]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["case", "row", "seed", *measures])
        for (case, row), of_measures in results.items():
            for seed, shares in enumerate(zip(*of_measures, strict=True)):
                table.writerow([case, row, seed, *(f"{share:.4f}" for share in shares)])


def _markdown(chosen: argparse.Namespace, results: Results, first: str, measures: Sequence[str]) -> str:
    lines = [
        f"|  |  | {' | '.join(measures)} | {first} is ahead by |",
        f"| --- | --- |{' ---: |' * (len(measures) + 1)}",
    ]
    before = ""
    for (case, row), of_measures in results.items():
        lead = "" if row == first else _ahead(results, case, first, row)
        lines.append(f"| {case if case != before else ''} | {row} | {' | '.join(_texts(of_measures))} | {lead} |")
        before = case
    out = sys.argv.index("--out")
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:out], *sys.argv[out + 2 :]]
    made = f"Made with `python {shlex.join(words)}`; ± is half a 95 % interval over seeds; {_about(chosen)}."
    return "\n".join([*lines, "", made, ""])
