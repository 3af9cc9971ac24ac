"""What users should know of their data is said, and files as people have them are read."""

import gzip
import logging

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcpsl.config import Data
from fedcpsl.data import notes
from fedcpsl.data.federation import natural_order
from fedcpsl.data.readers import dialect_of, kind_of
from fedcpsl.data.sources import load_federation, load_source
from fedcpsl.data.tables import Columns, read_rows
from fedcpsl.errors import InputError
from tests.command import fedcpsl


@pytest.fixture(autouse=True)
def nothing_said_yet(caplog):
    notes._logged.clear()
    caplog.set_level(logging.WARNING, "fedcpsl")


def rows(count=40, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "a": rng.normal(size=count),
            "b": rng.normal(size=count),
            "kind": np.where(np.arange(count) % 2, "cat", "dog"),
            "phone": np.where(np.arange(count) % 4 < 2, "p1", "p2"),
        }
    )


def read(path, **chosen):
    return load_source(
        Data(**{"dataset": "own", "file": str(path), "label": "kind", "device_column": "phone"} | chosen)
    )


def written(frame, path, **how):
    frame.to_csv(path, index=False, **how)
    return path


@pytest.mark.parametrize("word", ["NA", "NaN", "N/A", "null", "none", "?", "unknown", " na ", "UNKNOWN", "Null"])
def test_words_for_no_label_are_read_so_and_said(word, tmp_path, caplog):
    frame = rows()
    frame.loc[:9, "kind"] = word
    path = written(frame, tmp_path / "m.csv")
    source = read(path)
    assert (source.y[:10] < 0).all()
    assert source.class_names == ("cat", "dog")
    assert f"10 rows with {word.strip()!r} in column 'kind' are read as unlabelled" in caplog.text
    as_class = read(path, missing_labels="class")
    assert len(as_class.class_names) == 3
    assert (as_class.y[:10] >= 0).all()


def test_frames_too(caplog):
    from fedcpsl import Federation

    frame = rows()
    frame.loc[:9, "kind"] = "n/a"
    federation = Federation.from_frame(frame, label="kind", device="phone")
    assert federation.class_names == ("cat", "dog")
    assert "the frame: 10 rows with 'n/a'" in caplog.text


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        (
            "is_test",
            lambda n: np.arange(n) % 2,
            "looks like the mark of test rows; if it is, give --test-column is_test",
        ),
        ("split", lambda n: np.arange(n) % 2, "--test-column split"),
        ("patient_id", lambda n: np.arange(n) * 7 % 13, "looks like a number of the row"),
        ("Unnamed: 0", lambda n: np.arange(n) * 2, "--drop Unnamed: 0"),
        ("count", lambda n: np.arange(n) + 5, "looks like a number of the row"),
        ("timestamp", lambda n: np.arange(n) * 3.5, "looks like a time"),
        ("", np.arange, "column #5, which has no name, is read as a feature"),
    ],
)
def test_columns_that_are_perhaps_no_features_are_pointed_out(column, values, words, tmp_path, caplog):
    frame = rows()
    frame[column] = values(len(frame))
    path = written(frame, tmp_path / "m.csv")
    assert read(path).x.shape == (40, 3)
    assert words in caplog.text
    caplog.clear()
    notes._logged.clear()
    dropped = read(path, drop=column or "#5")
    assert dropped.features == ("a", "b")
    assert caplog.text == ""


def test_plain_columns_are_not(tmp_path, caplog):
    frame = rows().assign(width=1.5, identity=2.0, testing=3.7, timeout_ms=4.0, rowing=5.0)
    read(written(frame, tmp_path / "m.csv"))
    assert caplog.text == ""


def test_several_columns_are_dropped_and_a_wrong_one_is_named(tmp_path):
    path = written(rows().assign(c=1.0, d="x"), tmp_path / "m.csv")
    assert read(path, drop="c, d").features == ("a", "b")
    assert read(path, drop="#1,d").features == ("b", "c")
    with pytest.raises(InputError, match=r"m\.csv: has no column 'cc' \(--drop\); did you mean 'c'"):
        read(path, drop="cc")


def test_flags_of_the_command_line(tmp_path):
    frame = rows(200).assign(is_test=lambda f: (np.arange(len(f)) % 5 == 0).astype(int), row_id=np.arange(200))
    written(frame, tmp_path / "m.csv")
    words = ["--data", "m.csv", "--label", "kind", "--device-column", "phone"]
    shown = fedcpsl("data", *words, "--test-column", "is_test", "--drop", "row_id", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "inputs of shape [2]" in shown.stdout
    warned = fedcpsl("data", *words, cwd=tmp_path)
    assert warned.returncode == 0
    assert warned.stderr.count("note: m.csv: column") == 2


def test_classes_that_are_nearly_the_same_or_alone(tmp_path, caplog):
    frame = rows()
    frame.loc[:3, "kind"] = "Cat"
    frame.loc[4:6, "kind"] = "c at"
    read(written(frame, tmp_path / "m.csv"))
    assert "the classes 'Cat', 'c at', 'cat' differ in case or spaces only" in caplog.text
    read(written(rows().assign(kind="cat"), tmp_path / "one.csv"))
    assert "one.csv: there is one class, 'cat'" in caplog.text


def test_a_class_that_only_tests_ask_for(tmp_path, caplog):
    frame = rows().assign(test=0)
    frame.loc[:3, "kind"] = "bird"
    frame.loc[:3, "test"] = 1
    path = written(frame, tmp_path / "m.csv")
    load_federation(Data(file=str(path), label="kind", device_column="phone", test_column="test"), 0)
    assert "1 of the classes ('bird') occur in tests and in no training label" in caplog.text


def test_a_value_far_beyond_all_others(tmp_path, caplog):
    frame = rows()
    frame.loc[7, "b"] = 1e30
    read(written(frame, tmp_path / "m.csv"))
    assert "column 'b' has 1e+30 in row 8, far beyond its other values" in caplog.text
    x = np.random.default_rng(0).normal(size=(50, 3))
    x[4, 1] = -1e20
    np.savez(tmp_path / "m.npz", x=x, y=np.arange(50) % 2, device=np.arange(50) % 2)
    read(tmp_path / "m.npz", label="", device_column="")
    assert "m.npz: feature 1 has -1e+20 in row 5" in caplog.text


def test_windows_with_time_first(tmp_path, caplog):
    def windows(*shape):
        np.savez(tmp_path / "w.npz", x=np.zeros((20, *shape)), y=np.arange(20) % 2, device=np.arange(20) % 2)
        read(tmp_path / "w.npz", label="", device_column="")

    windows(6, 128)
    assert caplog.text == ""
    windows(128, 6)
    assert "read as 128 channels of 6 times" in caplog.text
    assert "x.transpose(0, 2, 1)" in caplog.text
    shown = fedcpsl("data", "--data", "w.npz", cwd=tmp_path)
    assert "inputs of shape [128, 6]: 128 channels of 6 times" in shown.stdout


def test_what_was_said_is_not_said_again(tmp_path, caplog):
    path = written(rows().assign(id=1.0), tmp_path / "m.csv")
    read(path)
    read(path)
    assert caplog.text.count("'id'") == 1


def test_semicolons_decimal_commas_tabs_gzip_and_a_byte_order_mark(tmp_path):
    frame = rows()
    plain = read(written(frame, tmp_path / "plain.csv"))
    files = [
        written(frame, tmp_path / "semicolons.csv", sep=";"),
        written(frame, tmp_path / "decimal.csv", sep=";", decimal=","),
        written(frame, tmp_path / "tabs.csv", sep="\t"),
        written(frame, tmp_path / "tabs.tsv", sep="\t"),
        written(frame, tmp_path / "mark.csv", encoding="utf-8-sig"),
        written(frame, tmp_path / "packed.csv.gz", compression="gzip"),
        written(frame, tmp_path / "packed.tsv.gz", sep="\t", compression="gzip"),
    ]
    for path in files:
        source = read(path)
        np.testing.assert_array_equal(source.x, plain.x, err_msg=path.name)
        np.testing.assert_array_equal(source.y, plain.y)
        assert (source.features, source.names) == (plain.features, plain.names)
    assert dialect_of(tmp_path / "decimal.csv") == (";", ",")
    assert dialect_of(tmp_path / "semicolons.csv") == (";", ".")
    assert [kind_of(path) for path in files[-2:]] == [".csv", ".tsv"]
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"a,kind\n1,x\n" * 1000)[:60])
    with pytest.raises(InputError, match=r"cut\.csv\.gz: cannot be read"):
        read(tmp_path / "cut.csv.gz", device_column="")


def test_words_and_truth_values_are_features(tmp_path, caplog):
    frame = rows().assign(
        colour=np.array(["red", "green", "blue", None])[np.arange(40) % 4], wet=np.arange(40) % 3 == 0
    )
    expected = ("a", "b", "colour=blue", "colour=green", "colour=red", "wet")
    sources = [read(written(frame, tmp_path / "m.csv"))]
    assert "column 'colour' holds text: read as 3 columns of 0 and 1" in caplog.text
    assert "column 'wet' holds text: read as a number, 0 or 1" in caplog.text
    frame.astype({"colour": "category"}).to_parquet(tmp_path / "m.parquet")
    sources.append(read(tmp_path / "m.parquet"))
    for source in sources:
        assert set(source.features) == set(expected)
        x = dict(zip(source.features, source.x.T, strict=True))
        np.testing.assert_array_equal(x["wet"], np.arange(40) % 3 == 0)
        np.testing.assert_array_equal(x["colour=green"], np.arange(40) % 4 == 1)
        assert sum(x[name][3] for name in expected[2:5]) == 0  # it has none


def test_a_model_of_words_is_asked_with_words(tmp_path):
    path = written(rows().assign(colour=np.where(np.arange(40) % 2, "red", "blue")), tmp_path / "m.csv")
    features = read(path).features
    asked = written(pd.DataFrame({"colour": ["blue", "red"], "b": [3.0, 4.0], "a": [1.0, 2.0]}), tmp_path / "new.csv")
    x = read_rows(asked, features, Columns("kind", "phone")).x
    assert x.tolist() == [[1.0, 3.0, 1.0, 0.0], [2.0, 4.0, 0.0, 1.0]]
    wrong = written(pd.DataFrame({"colour": ["green"], "b": [3.0], "a": [1.0]}), tmp_path / "wrong.csv")
    with pytest.raises(
        InputError, match=r"wrong\.csv: column 'colour' has 'green', which the model was not trained on"
    ):
        read_rows(wrong, features, Columns("kind", "phone"))


def test_a_measured_number_as_label_or_device_is_said(tmp_path, caplog):
    path = written(rows(), tmp_path / "m.csv")
    read(path)
    assert not caplog.records
    read(path, label="a", device_column="b")
    assert "m.csv: 40 labels have 40 classes (" in caplog.text
    assert "m.csv: 40 samples are on 40 devices (" in caplog.text


def test_a_word_among_numbers_is_an_error_and_no_category(tmp_path):
    frame = rows().astype({"a": object})
    frame.loc[5, "a"] = "12..5"
    with pytest.raises(InputError, match=r"column 'a' has '12\.\.5' in row 6, not a number: correct it"):
        read(written(frame, tmp_path / "m.csv"))


def test_devices_and_classes_are_in_natural_order(tmp_path):
    names = [f"p{n}" for n in (10, 2, 1, 11)]
    frame = rows().assign(phone=np.array(names)[np.arange(40) % 4], kind=np.array(["k10", "k9"])[np.arange(40) % 2])
    source = read(written(frame, tmp_path / "m.csv"))
    assert source.names == ("p1", "p2", "p10", "p11")
    assert source.class_names == ("k9", "k10")
    assert [source.names[d] for d in source.device[:4]] == names
    device = np.array(names)[np.arange(40) % 4]
    np.savez(tmp_path / "m.npz", x=np.zeros((40, 2)), y=np.arange(40) % 2, device=device)
    arrays = read(tmp_path / "m.npz", label="", device_column="")
    assert arrays.names == ("p1", "p2", "p10", "p11")
    assert [arrays.names[d] for d in arrays.device[:4]] == names


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-(10**6), 10**6), unique=True))
def test_whole_numbers_are_in_their_order(numbers):
    assert natural_order([str(n) for n in numbers])[0] == [str(n) for n in sorted(numbers)]
