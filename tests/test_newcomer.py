"""What a newcomer tried: each once gave a wrong result, a traceback or a misleading line."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pytest
from PIL import Image

from fedcpsl.cli import run_command
from fedcpsl.config import Algorithm, Data, Work
from fedcpsl.data.federation import Federation
from fedcpsl.data.readers import read_image_folder
from fedcpsl.data.sources import load_federation
from fedcpsl.errors import InputError
from fedcpsl.simulation import prepare, simulate

from .conftest import small_federation, small_model
from .small_runs import ask

QUICK = ["--rounds", "2", "--devices", "4", "--active", "2", "--set", "model.hidden=[8]", "--set", "run.processes=1"]
QUICK += ["--set", "algorithm.name=fedcpsl"]


def frame(n=60):
    rng = np.random.default_rng(0)
    labels = rng.choice(["cat", "dog", None], n)
    return pd.DataFrame({"a": rng.normal(size=n), "b": rng.normal(size=n), "kind": labels, "phone": np.arange(n) % 3})


def test_a_shuffled_or_filtered_frame_has_the_same_features():
    for table in (frame().sample(frac=1, random_state=0), frame()[frame().a > -1]):
        assert Federation.from_frame(table, label="kind", device="phone").x.shape[1] == 2


def test_nan_labels_are_unlabelled_whoever_made_the_column():
    table = pl.DataFrame({"a": np.arange(6.0), "y": [0.0, 1.0, float("nan"), 1.0, 0.0, float("nan")], "who": [0] * 6})
    federation = Federation.from_frame(table, label="y", device="who")
    assert federation.class_names == ("0", "1")
    assert federation.y.tolist() == [0, 1, -1, 1, 0, -1]


def test_categories_are_labels():
    table = pl.from_pandas(frame()).with_columns(pl.col("kind").cast(pl.Categorical))
    assert Federation.from_frame(table, label="kind", device="phone").class_names == ("cat", "dog")


def test_words_that_look_like_nothing_are_classes_on_request(tmp_path):
    (tmp_path / "m.csv").write_text("a,kind,phone\n1,NA,x\n2,EU,x\n3,null,x\n4,,x\n5,NA,x\n6,EU,x\n")
    asked = Data(file=str(tmp_path / "m.csv"), label="kind", device_column="phone")
    assert load_federation(asked, 0).class_names == ("EU",)
    assert load_federation(replace(asked, missing_labels="class"), 0).class_names == ("EU", "NA", "null")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (frame().rename(columns={"b": "a"}), "twice|Duplicate"),
        (frame().assign(kind=[[1]] * 60), "cannot be read"),
    ],
)
def test_odd_frames_are_refused(table, words):
    with pytest.raises(InputError, match=words):
        Federation.from_frame(table, label="kind", device="phone")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"test_fraction": -0.2}, "test share"),
        ({"labelled": 5}, "labelled = 5"),
        ({"validation_fraction": 1}, "validation share"),
    ],
)
def test_shares_from_python_are_checked(given, words):
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(InputError, match=words):
        Federation.from_arrays(x, np.arange(20) % 2, np.arange(20) % 2, **given)
    assert Federation.from_arrays(x, np.arange(20) % 2, np.arange(20) % 2, labelled=np.float32(0.5)).devices == 2


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((4, 0)), [0, 1, 0, 1], "one row per sample"),
        (np.zeros((4, 2)), [0, 1, np.inf, 1], "class numbers"),
        (np.zeros((4, 2)), [0, 1, 300000, 1], "number the classes"),
        (np.full((4, 2), 1e300), [0, 1, 0, 1], "too large for float32"),
    ],
)
def test_odd_arrays_are_refused(x, y, words):
    with pytest.raises(InputError, match=words):
        Federation.from_arrays(x, y, [0, 0, 1, 1])


def test_numbers_of_every_kind_are_read():
    y, device = np.arange(20) % 2, np.arange(20) % 2
    reference = np.random.default_rng(0).normal(size=(20, 2))
    for kind in (">f4", np.longdouble, np.float16, ">i2"):
        federation = Federation.from_arrays((4 * reference).astype(kind), y, device)
        assert prepare(federation, small_model(2, 2), Algorithm()).data.x(slice(None)).isfinite().all()


def test_sixteen_bits_per_pixel_are_kept_apart(tmp_path):
    for i, value in enumerate((1000, 30000, 61000)):
        folder = tmp_path / "ann" / "day"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), value, np.uint16)).save(folder / f"{i}.png")
    assert np.unique(read_image_folder(tmp_path).x).tolist() == [3, 116, 237]


def test_a_single_device_is_a_federation_too(tmp_path, monkeypatch, capsys):
    y = np.arange(60) % 3
    np.savez(tmp_path / "one.npz", x=np.random.default_rng(0).normal(size=(60, 4)) + y[:, None], y=y, device=0 * y)
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(capsys, "run", "--data", "one.npz", "--rounds", "2", "--eta", "0.05", "--out", "a")
    assert (code, err) == (0, "")
    assert "of 1 devices" not in out
    assert ask(capsys, "export", "a", "--device", "0", "--format", "safetensors", "--out", "a.safetensors")[0] == 0


def test_everybody_takes_part_in_fedshvr_after_joining():
    work = Work(rounds=3, joiners=2, join_round=1)
    setup = prepare(small_federation(), small_model(), Algorithm(name="fedshvr"), work)
    *_, last = simulate(setup)
    assert last.active_rounds.tolist() == [3, 3, 3, 2, 2]


def test_a_run_that_diverges_in_its_last_step_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one_step = ["--rounds", "1", "--set", "work.unit=steps", "--set", "work.amount=1", "--out", "a"]
    assert run_command(["run", "--algorithm", "fedcpsl", "--eta", "1e38", *one_step, "--set", "run.processes=1"]) == 1
    assert "no longer" in capsys.readouterr().err


BAD = {
    "two values alike": (["sweep", "--grid", "beta=.5,0.5"], "give each value once"),
    "a setting twice": (["sweep", "--grid", "beta=.5", "--grid", "beta=.7"], "is given twice"),
    "a later case": (["sweep", "--grid", "active=2,50"], "work.active = 50"),
    "a later algorithm": (
        ["compare", "--algorithms", "fedcpsl,fedavg", "--set", "work.personal_rounds=1"],
        "fedavg has no personal model",
    ),
    "another's flag": (["compare", "--algorithm", "apfl"], "did you mean '--algorithms'"),
    "a long name": (["run", "--out", "x" * 300], "cannot be a folder"),
    "a file as a folder": (["run", "--out", "afile/x"], "afile: cannot be created"),
    "a huge number": (["run", "--eta", "1" + "0" * 400], "algorithm.eta"),
    "many digits": (["run", "--seed", "1" * 5000], "run.seed"),
    "no module": (["run", "--model", ":"], "cannot be imported"),
    "broken model": (["run", "--model", "broken:make"], "SyntaxError"),
    "failing model": (["run", "--model", "failing:make"], "failed when called"),
    "nowhere to save": (["data", "--save", "nodir/x.npz"], "nodir: no such folder"),
    "split by hand": (["run", "--set", "data.split=hand.npz"], "changed by hand"),
    "late joiners": (["run", "--set", "work.joiners=1", "--set", "work.join_round=9"], "work.join_round = 9"),
    "no device column": (["run", "--data", "m.csv", "--label", "kind"], "which device holds each row"),
    "one column twice": (["run", "--data", "m.csv", "--label", "kind", "--device-column", "kind"], "named twice"),
    "words among numbers": (
        ["run", "--data", "w.csv", "--label", "kind", "--device-column", "phone"],
        "column 'city' has 'Oslo' in row 1, not a number: correct it, encode it, or leave it out (--drop)",
    ),
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("x")
    (tmp_path / "broken.py").write_text("def make(:\n")
    (tmp_path / "failing.py").write_text("def make(shape, classes):\n    raise KeyError('x')\n")
    (tmp_path / "m.csv").write_text("a,kind,phone\n1,u,x\n2,v,y\n")
    (tmp_path / "w.csv").write_text("city,kind,phone\nOslo,u,x\n7,v,y\n")
    assert run_command(["data", *QUICK[2:4], "--save", "hand.npz"]) == 0
    with np.load("hand.npz") as arrays:
        np.savez("hand.npz", **{**dict(arrays), "role": np.full(len(arrays["role"]), 9, np.int8)})
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_one_line_exit_2_and_nothing_written(case, desk, capsys):
    command, words = BAD[case]
    before = sorted(p.name for p in desk.iterdir())
    capsys.readouterr()
    more = [] if command[0] == "data" else QUICK[:2] + QUICK[4:] if "--device-column" in command else QUICK
    code = run_command([*command, *more])
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert words in printed.err
    assert printed.err.count("\n") == 1
    after = sorted(p.name for p in desk.iterdir() if p.name != "__pycache__")
    assert after == before


def test_a_comparison_goes_on_from_any_folder(desk, monkeypatch):
    rng = np.random.default_rng(0)
    np.savez("mine.npz", x=rng.normal(size=(60, 3)), y=np.arange(60) % 2, device=np.arange(60) % 3)
    options = ["--data", "mine.npz", "--algorithms", "fedcpsl,local", "--seeds", "1", "--rounds", "1", "--out", "c"]
    assert run_command(["compare", *options, "--set", "run.processes=1"]) == 0
    (desk / "c" / "runs" / "local-seed0" / "devices.csv").unlink()
    (desk / "else").mkdir()
    monkeypatch.chdir(desk / "else")
    assert run_command(["compare", "--resume", "../c"]) == 0


def test_a_comparison_without_tests_still_has_a_table(desk, capsys):
    lines = ["a,kind,phone", *(f"{i},{'u' if i % 2 else 'v'},{i % 2}" for i in range(6))]
    (desk / "n.csv").write_text("\n".join(lines) + "\n")
    options = ["--data", "n.csv", "--label", "kind", "--device-column", "phone", "--set", "data.test=0.01"]
    code = run_command(["compare", *options, "--algorithms", "fedcpsl,local", "--seeds", "1", "--rounds", "1"])
    assert code == 0, capsys.readouterr().err


def test_a_saved_split_gives_arrays_their_devices(desk):
    np.savez("bare.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 2)
    shared = ["--data", "bare.npz", "--partition", "iid", "--devices", "3"]
    assert run_command(["data", *shared, "--save", "s.npz"]) == 0
    options = ["--data", "bare.npz", "--set", "data.split=s.npz", "--rounds", "1", "--out", "r"]
    assert run_command(["run", *options, "--set", "run.processes=1"]) == 0
    assert json.loads((desk / "r" / "manifest.json").read_text())["devices"] == 3
