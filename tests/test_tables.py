"""CSV, Parquet, pandas and polars: good tables, and every bad one in one line."""

import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import csv

from fedcpsl.config import Data
from fedcpsl.data.federation import Federation
from fedcpsl.data.sources import load_federation
from fedcpsl.data.split import LABELLED, TEST, UNLABELLED
from fedcpsl.data.tables import Columns, options_of, read_rows
from fedcpsl.errors import InputError

from .command import fedcpsl


def frame(n=90, seed=0):
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, n)
    return pd.DataFrame(
        {
            "height": rng.normal(size=n) + kind,
            "phone": np.array(["ann", "bob", "cid"])[np.arange(n) % 3],
            "width": (rng.normal(size=n) * 100).round(),
            "kind": np.where(rng.random(n) < 0.5, None, np.array(["cat", "dog", "emu"])[kind]),
        }
    )


def write(table, path):
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def load(path, **settings):
    given = {"file": str(path), "label": "kind", "device_column": "phone"} | settings
    return load_federation(Data(**given), seed=0)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table(suffix, tmp_path):
    table = frame()
    federation = load(write(table, tmp_path / f"mine{suffix}"))
    assert federation.names == ("ann", "bob", "cid")
    assert federation.class_names == ("cat", "dog", "emu")
    assert federation.x.shape == (90, 2)
    assert np.allclose(federation.x[:, 1], table["width"])
    unknown = table["kind"].isna().to_numpy()
    assert (federation.y[unknown] == -1).all()
    assert (federation.role[unknown] == UNLABELLED).all()
    assert set(federation.role[~unknown]) == {LABELLED, TEST}
    assert [federation.class_names[c] for c in federation.y[~unknown]] == table["kind"][~unknown].tolist()


def test_all_kinds_of_tables_are_the_same_federation(tmp_path):
    table = frame()
    reference = load(write(table, tmp_path / "mine.csv"))
    frames = [table, pl.from_pandas(table), pa.Table.from_pandas(table, preserve_index=False)]
    found = [load(write(table, tmp_path / f"mine{s}")) for s in (".tsv", ".parquet")]
    found += [Federation.from_frame(f, label="kind", device="phone") for f in frames]
    assert {f.digest for f in found} == {reference.digest}


def test_whole_numbers_are_classes_in_their_order_and_minus_one_is_unlabelled():
    table = pd.DataFrame({"a": range(6), "y": [10, 9, None, -1, 9, 10], "who": [2, 10, 2, 10, 2, 10]})
    federation = Federation.from_frame(table, label="y", device="who", test_fraction=0.01)
    assert federation.class_names == ("9", "10")
    assert federation.names == ("2", "10")
    assert federation.y.tolist() == [1, 0, -1, -1, 0, 1]


def test_a_test_column_and_columns_of_many_types(tmp_path):
    table = pd.DataFrame(
        {
            "flag": [True, False, True, False],
            "count": np.array([1, 2, 3, 4], np.int16),
            "y": ["u", "v", "", "u"],
            "who": ["p", "p", "p", "p"],
            "held": ["yes", "no", "no", "no"],
        }
    )
    path = write(table, tmp_path / "t.parquet")
    federation = load(path, label="y", device_column="who", test_column="held")
    assert federation.role.tolist() == [TEST, LABELLED, UNLABELLED, LABELLED]
    assert federation.x[:, 0].tolist() == [1, 0, 1, 0]


def test_a_table_without_devices_is_shared_out(tmp_path):
    path = write(frame(), tmp_path / "mine.csv")
    table = frame().drop(columns="phone")
    shared = load(write(table, tmp_path / "b.csv"), device_column="", partition="iid", devices=4)
    assert shared.devices == 4
    assert shared.counts.sum(1).tolist() == [23, 23, 22, 22]
    with pytest.raises(InputError, match="--device-column"):
        load(tmp_path / "b.csv", device_column="")
    ignored = load(path, partition="quantity", devices=2)
    assert ignored.devices == 2


def text(content):
    return lambda path: path.write_text(content)


HEAD = "height,phone,width,kind\n"
BAD = {
    "missing": (".csv", lambda _: None, "no such file"),
    "empty": (".csv", text(""), "the file is empty"),
    "no rows": (".csv", text(HEAD), "no rows"),
    "no label column": (".csv", text("height,phone,width\n1,a,2\n"), r"no column 'kind' \(--label\)"),
    "misspelt device": (".csv", text("height,phones,width,kind\n1,a,2,x\n"), "did you mean 'phones'"),
    "text in a feature": (".csv", text(HEAD + "1,a,2,x\n1,a,two,x\n"), "two"),
    "a hole": (".csv", text(HEAD + "1,a,2,x\n1,a,,x\n"), "column 'width' is empty in row 2"),
    "infinite": (".csv", text(HEAD + "1,a,2,x\ninf,a,2,x\n"), "column 'height' is not a finite number in row 2"),
    "no device": (".csv", text(HEAD + "1,a,2,x\n1,,2,x\n"), "column 'phone' is empty in row 2"),
    "no label at all": (".csv", text(HEAD + "1,a,2,\n1,b,2,\n"), "no label in any row"),
    "ragged": (".csv", text(HEAD + "1,a,2,x\n1,a\n"), "cannot be read as a table"),
    "a column twice": (".csv", text("a,a,phone,kind\n1,2,b,x\n"), "'a' appears twice"),
    "no features": (".csv", text("phone,kind\nb,x\n"), "no feature columns"),
    "not text": (".csv", lambda p: p.write_bytes(b"\xff\xfe\x00\x01" * 50), "cannot be read as a table"),
    "not parquet": (".parquet", text("hello"), "cannot be read as a table"),
    "many words": (
        ".parquet",
        lambda p: write(frame().assign(city=[f"c{i}" for i in range(len(frame()))]), p),
        r"column 'city' holds \d+ different texts.*--drop",
    ),
    "cut off": (".parquet", lambda p: p.write_bytes(write(frame(), p).read_bytes()[:-100]), "cannot be read"),
    "dates": (".parquet", lambda p: write(frame().assign(day=pd.Timestamp("2026-01-01")), p), "column 'day' holds"),
    "unknown format": (".xlsx", text("x"), "give an .npz, .csv, .tsv or .parquet file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_named(case, tmp_path):
    suffix, make, words = BAD[case]
    path = tmp_path / f"mine{suffix}"
    make(path)
    with pytest.raises(InputError, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_from_the_command_line_one_line_exit_2_and_nothing_written(tmp_path):
    (tmp_path / "mine.csv").write_text(HEAD + "1,a,,x\n")
    done = fedcpsl("run", "--data", "mine.csv", "--label", "kind", "--device-column", "phone", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "column 'width' is empty in row 1" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.csv"]
    with pytest.raises(InputError, match=r"nope\.csv: no such file"):
        load(tmp_path / "nope.csv", label="")
    unnamed = fedcpsl("run", "--data", "mine.csv", cwd=tmp_path)
    assert (unnamed.returncode, "--label COLUMN" in unnamed.stderr) == (2, True)


def test_a_run_on_a_table(tmp_path):
    write(frame(300), tmp_path / "mine.parquet")
    options = ["--data", "mine.parquet", "--label", "kind", "--device-column", "phone", "--rounds", "3", "--out", "a"]
    done = fedcpsl("run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "devices.csv").read_text().splitlines()[1].startswith("0,ann,")


def test_what_is_not_a_frame_is_refused():
    with pytest.raises(InputError, match="not a table"):
        Federation.from_frame({"a": [1]}, label="y", device="d")


def test_a_csv_is_read_within_twice_its_size_in_memory(tmp_path):
    """In a process of its own; what importing takes is left out."""
    path = tmp_path / "large.csv"
    rng = np.random.default_rng(0)
    columns = {f"f{i}": rng.normal(size=200_000).round(4) for i in range(50)}
    table = pa.table(columns | {"kind": rng.choice(["", "a", "b"], 200_000), "phone": rng.integers(0, 50, 200_000)})
    csv.write_csv(table, path)
    script = (
        "import resource, sys; from pathlib import Path; import pyarrow.csv\n"
        "from fedcpsl.data.tables import Columns, read_table\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak(); source = read_table(Path(sys.argv[1]), Columns('kind', 'phone'))\n"
        "print(source.x.shape[0], peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    rows, used = map(int, done.stdout.split())
    assert rows == 200_000
    assert used < 2 * path.stat().st_size


def test_large_tables_take_little_more_than_their_size():
    """Pieces are joined one by one: peak memory stays near twice the array, whatever the number of pieces."""
    import tracemalloc

    from fedcpsl.data.tables import _concatenate

    parts = [np.ones((1000, 50), np.float32) for _ in range(200)]
    size = sum(part.nbytes for part in parts)
    tracemalloc.start()
    joined = _concatenate(parts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert joined.nbytes == size
    assert peak < 1.1 * size
    assert parts == []


def test_devices_without_labels_without_unlabelled_data_or_with_one_sample(tmp_path):
    table = frame(30).assign(kind=["cat"] * 10 + [None] * 20, phone=["ann"] * 9 + ["one"] + ["bob"] * 20)
    federation = load(write(table, tmp_path / "mine.csv"), test=0.2)
    assert federation.names == ("ann", "bob", "one")
    labelled, unlabelled, test, _ = federation.counts.T
    assert (labelled[1], unlabelled[0], test[1]) == (0, 0, 0)
    assert federation.counts[2].tolist() == [1, 0, 0, 0]


def test_the_index_of_a_frame_is_no_feature(tmp_path):
    table = frame().sample(frac=1, random_state=0)
    table.to_parquet(tmp_path / "mine.parquet")  # with the index, which has the order before
    assert load(tmp_path / "mine.parquet").features == ("height", "width")
    table.set_index("phone").to_parquet(tmp_path / "phones.parquet")
    assert load(tmp_path / "phones.parquet").names == ("ann", "bob", "cid")  # where it is named, it is read


def test_whole_numbers_that_pandas_wrote_as_floats_are_whole(tmp_path):
    table = frame()
    table["kind"] = np.where(np.arange(90) % 4 == 0, -1.0, np.arange(90) % 3)
    table["phone"] = (np.arange(90) % 3).astype(float)
    csv_file, parquet = load(write(table, tmp_path / "a.csv")), load(write(table, tmp_path / "a.parquet"))
    for federation in (csv_file, parquet):
        assert federation.class_names == ("0", "1", "2")
        assert federation.names == ("0", "1", "2")
        assert (federation.y == -1).sum() == 23
    assert csv_file.digest == parquet.digest


def test_an_empty_cell_of_yes_and_no_does_not_matter_later(tmp_path):
    table = frame()
    table["ok"] = np.array(["yes", "no", None], object)[np.arange(90) % 3]
    trained = load(write(table, tmp_path / "a.csv")).features
    assert trained == ("height", "width", "ok=no", "ok=yes")
    table["ok"] = np.array(["yes", "no"])[np.arange(90) % 2]
    x = read_rows(write(table, tmp_path / "b.csv"), trained, Columns("kind", "phone")).x
    assert x[:4, 2:].tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    table["ok"] = np.array(["A1", "B2"])[np.arange(90) % 2]
    trained = load(write(table, tmp_path / "c.csv")).features
    table["ok"] = "12"  # a word that looks like a number
    with pytest.raises(InputError, match="column 'ok' has '12', which the model was not trained on"):
        read_rows(write(table, tmp_path / "d.csv"), trained, Columns("kind", "phone"))


@pytest.mark.parametrize("drop", ["extra", "#1"])
def test_what_was_left_out_of_training_is_left_out_later(drop, tmp_path):
    table = frame()
    table.insert(0, "extra", np.arange(90))
    path = write(table, tmp_path / "a.csv")
    trained = load(path, drop=drop).features
    assert trained == ("height", "width")
    rows = read_rows(path, trained, Columns("kind", "phone"), options_of(drop, ""))
    assert rows.x.shape == (90, 2)
    without = write(table.drop(columns="extra"), tmp_path / "b.csv")  # where #1 is a feature
    assert (read_rows(without, trained, Columns("kind", "phone"), options_of(drop, "")).x == rows.x).all()


def test_missing_labels_that_were_classes_are_classes_later(tmp_path):
    table = frame()
    table["kind"] = table["kind"].fillna("NA")
    path = write(table, tmp_path / "a.csv")
    features, columns = ("height", "width"), Columns("kind", "phone")
    assert "NA" in load(path, missing_labels="class").class_names
    assert "NA" in read_rows(path, features, columns, options_of("", "class")).label
    assert "NA" not in read_rows(path, features, columns).label
