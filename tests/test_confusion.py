"""Accuracy per class, macro-F1 and confusion matrices of a run, beside scikit-learn's."""

import csv
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, f1_score, recall_score

from fedcpsl.errors import InputError
from fedcpsl.runs.folder import Confusion, class_metrics, confusion_csv, macro_f1, per_class, read_confusion
from tests.small_runs import ask, table_run

PAIRS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


@given(PAIRS)
def test_the_numbers_are_those_of_scikit_learn(pairs):
    true, predicted = (np.array(each) for each in zip(*pairs, strict=True))
    counts = confusion_matrix(true, predicted, labels=range(5))
    assert macro_f1(counts) == pytest.approx(f1_score(true, predicted, average="macro", zero_division=0))
    there = sorted(set(true.tolist()))
    recalls = recall_score(true, predicted, labels=there, average=None, zero_division=0)
    found = per_class(counts)
    assert [found[c] for c in there] == pytest.approx(recalls.tolist())
    assert all(found[c] is None for c in range(5) if c not in there)


@given(PAIRS)
def test_a_file_is_read_as_it_was_written(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("run")
    names = ["a", 'b "quoted", here', "c\nd", "-1", ""]
    counts = confusion_matrix(*zip(*pairs, strict=True), labels=range(5))
    written = Confusion(names, {"personal": counts, "global": counts.T.copy()})
    (folder / "confusion.csv").write_text(confusion_csv(written), newline="")
    read = read_confusion(folder, names)
    assert read is not None
    assert all(np.array_equal(read.counts[model], written.counts[model]) for model in written.counts)


def test_nothing_tested_nothing_counted(tmp_path):
    assert read_confusion(tmp_path, ["a", "b"]) is None
    found = class_metrics(Confusion(["a", "b"], {}))
    assert found["macro_f1"] == {}
    assert [record["tests"] for record in found["classes"]] == [0, 0]
    assert macro_f1(np.zeros((2, 2), np.int64)) is None


@pytest.mark.parametrize("damage", ["mdel", "personal,cat,cow,3", "personal,cat,dog,x", "personal,cat", "9" * 99])
def test_a_damaged_file_is_named(tmp_path, damage):
    head = "" if damage == "mdel" else "model,class,predicted,count\n"
    (tmp_path / "confusion.csv").write_text(f"{head}{damage}\n")
    with pytest.raises(InputError, match=r"confusion.csv.*damaged or changed by hand"):
        read_confusion(tmp_path, ["cat", "dog"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return table_run(tmp_path_factory.mktemp("table") / "run", work__rounds=10)


def test_a_run_counts_its_tests(run, capsys):
    """The matrix of the personal models adds up to the devices' accuracies; every test is in it once."""
    found = json.loads(ask(capsys, "show", run, "--json")[1])
    with (run / "devices.csv").open() as file:
        devices = list(csv.DictReader(file))
    counts = {model: np.array(of_model) for model, of_model in found["confusion"].items()}
    assert list(counts) == ["personal", "global"]
    tests = [int(device["tests"]) for device in devices]
    for model, matrix in counts.items():
        assert matrix.sum() == sum(tests)
        right = sum(float(device[model]) * n for device, n in zip(devices, tests, strict=True))
        assert np.trace(matrix) == pytest.approx(right)
        assert found["macro_f1"][model] == pytest.approx(macro_f1(matrix))
    assert [record["class"] for record in found["classes"]] == ["cat", "dog"]
    assert [record["tests"] for record in found["classes"]] == counts["personal"].sum(1).tolist()
    said = ask(capsys, "show", run)[1]
    assert f"macro-F1 of the personal models on all tests {100 * found['macro_f1']['personal']:.2f} %" in said
    assert "fedcpsl on mine.csv" in said


def test_the_page_and_the_tables_have_them(run, capsys):
    assert ask(capsys, "report", run)[0] == 0
    page = (run / "report.html").read_text()
    assert "<h2>Accuracy per class</h2>" in page
    assert "confusion matrix, personal model" in page
    assert "tests of class cat are predicted as" in page
    assert "fedcpsl <span>on mine.csv</span>" in page
    table = ask(capsys, "report", run, "--format", "csv", "--table", "classes")[1].splitlines()
    assert table[0] == "class,tests,personal,global"
    assert [line.split(",")[0] for line in table[1:]] == ["cat", "dog"]
    devices = ask(capsys, "report", run, "--format", "md", "--table", "devices")[1]
    assert "| tests |" in devices


def test_a_run_of_an_earlier_version_has_none(run, tmp_path, capsys):
    old = shutil.copytree(run, tmp_path / "old")
    (old / "confusion.csv").unlink()
    rows = [line.rpartition(",")[0] for line in (old / "devices.csv").read_text().splitlines()]
    (old / "devices.csv").write_text("\n".join(rows) + "\n")
    found = json.loads(ask(capsys, "show", old, "--json")[1])
    assert "confusion" not in found
    assert ask(capsys, "report", old)[0] == 0
    assert "Accuracy per class" not in (old / "report.html").read_text()
