"""The settings that the studies use are the best points of the searches whose results are committed, and no others."""

import csv
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parent.parent


def best_points(dataset, study):
    """For each algorithm the mean and the settings of the point that did best on validation samples."""
    rows = tomllib.loads((ROOT / f"experiments/{study}.toml").read_text())["rows"]
    scores = defaultdict(list)
    table = (ROOT / f"docs/results/{dataset}/{Path(study).name}.csv").read_text().splitlines()
    for line in csv.DictReader(table):
        own = dict(rows[line["row"]]["algorithm"])
        drawn = {key.partition(".")[2]: value for key, value in line.items() if key.startswith("algorithm.") and value}
        point = {key: number(value) for key, value in (own | drawn).items() if key != "name"}
        scores[own["name"], tuple(sorted(point.items()))].append(float(line["validation"]))
    found = {}
    for (name, point), values in scores.items():
        assert len(values) == 2
        found[name] = max(found.get(name, (0.0, {})), (mean(values), dict(point)), key=lambda both: both[0])
    return {name: point for name, (_, point) in found.items()}


def number(value):
    try:
        return float(value)
    except ValueError:
        return value


@pytest.mark.parametrize(
    ("dataset", "studies", "file"),
    [
        ("mnist", ["paper/tune"], "paper"),
        ("cifar10", ["paper/tune"], "paper"),
        ("har", ["har/har-tune", "har/har-steps"], "har"),
    ],
)
def test_the_best_point_of_the_search_is_used(dataset, studies, file):
    chosen = tomllib.loads((ROOT / f"experiments/{file}/base/chosen.toml").read_text())[dataset]
    expected = {name: point for study in studies for name, point in best_points(dataset, study).items()}
    if dataset != "har":
        expected["fedshvr"] = expected["fedshvrp"]  # the same with every device active
    assert {name: settings["algorithm"] for name, settings in chosen.items()} == expected
