"""Predictions from arrays, tables and images, by a run's model or an exported one."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.command import fedcpsl
from tests.small_runs import answers_of, array_run, ask, make_run, table_run, write_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return table_run(tmp_path_factory.mktemp("table") / "run", work__rounds=20)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Dark cats and bright dogs, in colour, and a run on them."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for device in ("ann", "bob"):
        for label, base in (("cat", 40), ("dog", 180)):
            (folder / "photos" / device / label).mkdir(parents=True)
            for i in range(6):
                pixels = (base + rng.integers(0, 40, (6, 6, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / device / label / f"{i}.png")
    return make_run(folder / "run", data__file=str(folder / "photos"), model__name="logistic", work__rounds=10)


def test_a_table_by_the_names_of_its_columns(run, tmp_path):
    """As users call it: columns in any order, who holds a row left out, the label for the accuracy alone."""
    table = write_table(tmp_path / "new.csv", rows=50, seed=1, unlabelled=0.2)
    rows = [line.split(",") for line in table.read_text().splitlines()]
    (tmp_path / "turned.csv").write_text("\n".join(f"{k},{w},{h}" for h, w, _, k in rows) + "\n")
    asked = fedcpsl("predict", run, "--device", "ann", "turned.csv", cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    lines = [line.split(",") for line in asked.stdout.splitlines()]
    assert lines[0] == ["sample", "class", "cat", "dog"]
    assert [line[0] for line in lines[1:]] == [str(i) for i in range(50)]
    right = sum(row[3] == line[1] for row, line in zip(rows[1:], lines[1:], strict=True))
    known = sum(row[3] != "" for row in rows[1:])
    assert asked.stderr == f"accuracy {100 * right / known:.2f} % ({right} of {known} labelled samples)\n"
    assert right > known / 2
    assert np.allclose(answers_of(asked.stdout).sum(1), 1, atol=1e-5)


def test_every_kind_of_table_and_array_says_the_same(run, tmp_path, capsys):
    import pandas as pd

    table = write_table(tmp_path / "new.csv", rows=20, seed=1)
    frame = pd.read_csv(table)
    frame.to_parquet(tmp_path / "new.parquet")
    frame.to_csv(tmp_path / "new.tsv", sep="\t", index=False)
    x = frame[["height", "width"]].to_numpy()
    np.save(tmp_path / "new.npy", x.astype(">f8"))
    np.savez(tmp_path / "new.npz", x=x, y=frame.kind.map({"cat": 0, "dog": 1}).fillna(-1).to_numpy(np.int64))
    said = {}
    for ending in ("csv", "tsv", "parquet", "npy", "npz"):
        code, said[ending], err = ask(capsys, "predict", run, "--device", "ann", tmp_path / f"new.{ending}")
        assert code == 0, err
        assert ("accuracy" in err) == (ending != "npy")
    assert len(set(said.values())) == 1


def test_as_json_and_into_a_file(run, tmp_path, capsys):
    table = write_table(tmp_path / "new.csv", rows=3, seed=1)
    plain = ask(capsys, "predict", run, "--device", "bob", table)[1]
    code, out, _ = ask(capsys, "predict", run, "--device", "bob", table, "--json", "--out", tmp_path / "said.jsonl")
    assert (code, out) == (0, "")
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [each["sample"] for each in said] == [0, 1, 2]
    assert np.allclose([list(each["probabilities"].values()) for each in said], answers_of(plain), atol=1e-6)
    assert all(each["class"] == max(each["probabilities"], key=each["probabilities"].get) for each in said)
    code, _, err = ask(capsys, "predict", run, "--device", "bob", table, "--out", tmp_path / "said.jsonl")
    assert code == 2
    assert "exists already" in err
    assert ask(capsys, "predict", run, "--device", "bob", table, "--out", tmp_path / "said.json")[0] == 0
    assert (tmp_path / "said.json").read_text() == (tmp_path / "said.jsonl").read_text()
    for options, words in (
        (["said.txt"], "said.txt: give a name that ends with .csv, .jsonl, .json"),
        (["said.csv", "--json"], "said.csv: --json writes JSON lines"),
    ):
        code, _, err = ask(capsys, "predict", run, table, "--out", *options)
        assert (code, words in err) == (2, True)


def test_devices_that_are_numbers_are_named_from_the_first_to_the_last(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(36, 2))
    run = array_run(tmp_path / "run", x, devices=12, work__rounds=1)
    np.save(tmp_path / "x.npy", x)
    for device, words in (("12", "known: 0 to 11, global\n"), ("globl", "did you mean 'global'?\n")):
        code, _, err = ask(capsys, "predict", run, tmp_path / "x.npy", "--device", device)
        assert (code, words in err) == (2, True), err


def test_classes_that_the_model_does_not_know_count_as_wrong(run, tmp_path, capsys):
    (tmp_path / "new.csv").write_text("height,width,kind\n190,0.42,cow\n190,0.42,cat\n190,0.42,\n")
    _, out, err = ask(capsys, "predict", run, "--device", "ann", tmp_path / "new.csv")
    assert [line.split(",")[1] for line in out.splitlines()[1:]] == ["cat"] * 3
    assert err == "accuracy 50.00 % (1 of 2 labelled samples)\n"


def test_images_one_or_a_folder_of_them(photos, tmp_path, capsys):
    folder = photos.parent / "photos"
    code, out, err = ask(capsys, "predict", photos, "--device", "ann", folder)
    assert code == 0
    lines = [line.split(",") for line in out.splitlines()]
    assert [line[0] for line in lines[1:3]] == ["ann/cat/0.png", "ann/cat/1.png"]
    assert err == "accuracy 100.00 % (24 of 24 labelled samples)\n"
    code, out, err = ask(capsys, "predict", photos, "--device", "ann", folder / "bob" / "dog" / "3.png")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("3.png,dog,")
    Image.fromarray(np.full((6, 6), 200, np.uint8)).save(tmp_path / "grey.png")
    assert ",dog," in ask(capsys, "predict", photos, "--device", "ann", tmp_path / "grey.png")[1]
    Image.fromarray(np.full((7, 6), 200, np.uint8)).save(tmp_path / "large.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("large.png", "shape [3, 7, 6] where the model's is [3, 6, 6]"),
        ("bad.png", "not a readable image"),
        ("empty", "has no images"),
    ):
        code, out, err = ask(capsys, "predict", photos, "--device", "ann", tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_grey_models_take_no_colours(tmp_path, capsys):
    x = np.random.default_rng(0).integers(0, 255, (18, 1, 6, 6)).astype(np.uint8)
    run = array_run(tmp_path / "run", x, model__name="logistic", work__rounds=1)
    Image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(tmp_path / "colour.png")
    Image.fromarray(x[0, 0]).save(tmp_path / "grey.png")
    code, _, err = ask(capsys, "predict", run, "--device", "0", tmp_path / "colour.png")
    assert code == 2
    assert "coloured images where the model's are grey" in err
    np.save(tmp_path / "x.npy", x[:1])
    said = [ask(capsys, "predict", run, "--device", "0", tmp_path / name)[1] for name in ("grey.png", "x.npy")]
    assert np.array_equal(*map(answers_of, said))
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    code, _, err = ask(capsys, "predict", run, "--device", "0", tmp_path / "t.csv")
    assert code == 2
    assert "not trained on a table" in err


def test_what_is_wrong_with_an_input_is_said_in_one_line(run, tmp_path, capsys):
    np.save(tmp_path / "wide.npy", np.zeros((2, 3)))
    np.save(tmp_path / "nan.npy", np.full((2, 2), np.nan))
    np.save(tmp_path / "none.npy", np.zeros((0, 2)))
    np.save(tmp_path / "large.npy", np.full((1, 2), 1e39))
    np.save(tmp_path / "text.npy", np.full((1, 2), "a"))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "no_x.npz", z=np.zeros(2))
    np.savez(tmp_path / "bad_y.npz", x=np.zeros((2, 2)), y=np.zeros(3))
    Image.fromarray(np.zeros((6, 6), np.uint8)).save(tmp_path / "image.png")
    for name, text in (
        ("missing.csv", "height,kind\n1,cat\n"),
        ("near.csv", "height,widht\n1,2\n"),
        ("unknown.csv", "height,width,colour\n1,2,3\n"),
        ("word.csv", "height,width\n1,broad\n"),
        ("hole.csv", "height,width\n1,\n"),
        ("rowless.csv", "height,width\n"),
        ("twice.csv", "height,width,width\n1,2,3\n"),
        ("notes.txt", ""),
    ):
        (tmp_path / name).write_text(text)
    for name, words in (
        ("wide.npy", "shape [3] where the model's is [2]"),
        ("nan.npy", "no finite numbers"),
        ("none.npy", "has no samples"),
        ("large.npy", "too large for float32"),
        ("text.npy", "holds text where the model takes numbers"),
        ("objects.npy", "not a readable .npy array"),
        ("no_x.npz", "has no array 'x'"),
        ("bad_y.npz", "one class number for each of the 2 samples"),
        ("image.png", "no images"),
        ("missing.csv", "has no column 'width', which the model was trained on"),
        ("near.csv", "did you mean 'widht'?"),
        ("unknown.csv", "has the column 'colour', which the model was not trained on"),
        ("word.csv", "column 'width' has 'broad'"),
        ("hole.csv", "column 'width' is empty in row 1"),
        ("rowless.csv", "it has no rows"),
        ("twice.csv", "appears twice"),
        ("notes.txt", "give .npy, .npz"),
        ("absent.npy", "no such file"),
    ):
        code, out, err = ask(capsys, "predict", run, "--device", "ann", tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1), (name, err)
        assert words in err, err


def test_what_is_wrong_with_a_model_is_said_in_one_line(run, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((1, 2)))
    assert ask(capsys, "export", run, "--device", "bob", "--out", tmp_path / "bob.safetensors")[0] == 0
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (["absent.onnx"], "no such file or folder"),
        (["model.bin"], "not a model"),
        (["empty"], "is neither a run's folder nor that of a device"),
        (["empty", "--device", "bob"], "is neither a run's folder nor that of a device"),
        (["bob.safetensors", "--device", "ann"], "is the model of device bob"),
        ([str(run / "models.safetensors")], "is a run's models file, not an exported model; give the run's folder"),
        ([str(run)], "which device's model?"),
    ):
        model, *rest = arguments
        code, out, err = ask(capsys, "predict", tmp_path / model, tmp_path / "x.npy", *rest)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert words in err, err


def test_every_row_by_the_model_of_its_device(run, tmp_path, capsys):
    """Rows of strangers get the global model, and a note says so."""
    table = write_table(tmp_path / "new.csv", rows=30, seed=2, phones=("ann", "cid", "eve", "mal"))
    phones = [line.split(",")[2] for line in table.read_text().splitlines()[1:]]
    code, said, complained = ask(capsys, "predict", run, table)
    assert code == 0, complained
    lines = [line.split(",") for line in said.splitlines()]
    assert lines[0] == ["sample", "model", "class", "cat", "dog"]
    assert [line[1] for line in lines[1:]] == [p if p in ("ann", "cid") else "global" for p in phones]
    strangers = sum(p in ("eve", "mal") for p in phones)
    assert f"{strangers} rows are of devices that the run has no model for (eve, mal): the global model" in complained
    assert "accuracy" in complained
    by_model = {m: ask(capsys, "predict", run, table, "--device", m)[1].splitlines() for m in ("ann", "cid", "global")}
    for row, line in enumerate(lines[1:], 1):
        assert line[2:] == by_model[line[1]][row].split(",")[1:]
    records = [json.loads(line) for line in ask(capsys, "predict", run, table, "--json")[1].splitlines()]
    assert [record["model"] for record in records] == [line[1] for line in lines[1:]]


def test_without_a_device_column_somebody_must_be_named(run, tmp_path, capsys):
    np.save(tmp_path / "new.npy", np.zeros((3, 2)))
    code, _, complained = ask(capsys, "predict", run, tmp_path / "new.npy")
    assert code == 2
    assert (
        "which device's model? Give --device NAME, or --device global, or a table with its column 'phone'" in complained
    )


def test_arrays_may_say_whose_they_are(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    run = array_run(tmp_path / "run", x)
    np.savez(tmp_path / "new.npz", x=x[:4], device=np.array([0, 2, 7, 1]))
    code, said, complained = ask(capsys, "predict", run, tmp_path / "new.npz")
    assert code == 0, complained
    assert [line.split(",")[1] for line in said.splitlines()[1:]] == ["0", "2", "global", "1"]
    np.savez(tmp_path / "odd.npz", x=x[:4], device=np.array([0, 2]))
    assert "device must name a device for each of the 4 samples" in ask(capsys, "predict", run, tmp_path / "odd.npz")[2]


def test_devices_alone_have_nobody_for_a_stranger(tmp_path, capsys):
    run = table_run(tmp_path / "run", algorithm__name="local")
    table = write_table(tmp_path / "new.csv", rows=10, seed=2, phones=("ann", "eve"))
    code, _, complained = ask(capsys, "predict", run, table)
    assert code == 2
    assert "device 'eve' is not in" in complained
    assert "local has no global model" in complained
