"""What docs/results.md says of other papers' settings is in the CSV files that `fedcpsl paper` wrote."""

import csv
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "docs/results.md").read_text(encoding="utf-8").partition("## Other papers' numbers\n")[2]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("|")]


def read(name):
    with (ROOT / f"docs/results/published/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def by_seed(lines, column):
    """The column's numbers by panel and row, a list for each seed."""
    found = defaultdict(lambda: defaultdict(list))
    for line in lines:
        found[line["panel"], line["row"]][line["seed"]].append(float(line[column]))
    return found


def test_rounds_to_97_per_cent_are_those_of_the_runs():
    said = {row[0]: row[1:] for row in ROWS if row[0] in ("IID", "two shards")}
    runs = by_seed(read("fedavg-mnist"), "rounds_to_0.97")
    assert set(said) == {panel for panel, _ in runs}
    for (panel, _), of_seeds in runs.items():
        rounds = [one for (one,) in of_seeds.values()]
        assert said[panel][0] == f"{mean(rounds):.0f} ({', '.join(f'{r:.0f}' for r in rounds)})"


def test_last_and_best_rounds_of_pfedmes_setting_are_those_of_the_runs():
    curves = by_seed(read("pfedme-mnist-curves"), "personal")
    last = by_seed(read("pfedme-mnist"), "personal")
    study = tomllib.loads((ROOT / "experiments/published/pfedme-mnist.toml").read_text())
    said = {(row[0], row[1]): row[2:] for row in ROWS if row[0] in study["panels"]}
    assert said.keys() == curves.keys() == last.keys()
    for case, of_seeds in curves.items():
        theirs = study["published"]["mnist"].get(case[0], {}).get(case[1])
        at_end = mean(100 * one for (one,) in last[case].values())
        at_best = mean(100 * max(accuracies) for accuracies in of_seeds.values())
        assert said[case][:2] == [f"{at_end:.1f}", f"{at_best:.1f}"]
        assert theirs is None or said[case][2] == f"{theirs:.2f}"


@pytest.mark.parametrize("path", sorted((ROOT / "experiments/published").glob("*.toml")), ids=lambda path: path.stem)
def test_a_study_was_run_or_says_that_it_was_not(path):
    was_run = (ROOT / f"docs/results/published/{path.stem}.md").exists()
    assert was_run != bool(re.search("not run yet", path.read_text()))
