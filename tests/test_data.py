"""Federations from arrays, files and data sets; who gets what; and every bad file."""

import gzip
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl.cli import run_command
from fedcpsl.config import Data
from fedcpsl.data.federation import Federation
from fedcpsl.data.sources import NAMED, digits, load_federation, resolve_auto
from fedcpsl.data.split import LABELLED, TEST, UNLABELLED, by_classes, by_dirichlet, like_training
from fedcpsl.errors import InputError
from fedcpsl.models import mlp
from fedcpsl.simulation import prepare


@given(devices=st.integers(1, 40), per_device=st.integers(1, 5), classes=st.integers(2, 10), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_device_gets_distinct_classes_in_equal_pieces(devices, per_device, classes, seed):
    per_device = min(per_device, classes)
    y = np.repeat(np.arange(classes), 200)
    owner = by_classes(y, devices, per_device, seed)
    held = [set(y[owner == i].tolist()) for i in range(devices)]
    assert all(len(h) == per_device for h in held)
    pieces = [sum(c in h for h in held) for c in range(classes)]
    assert max(pieces) - min(pieces) <= 1
    for c in range(classes):
        sizes = [((owner == i) & (y == c)).sum() for i in range(devices) if c in held[i]]
        assert sum(sizes) == (200 if sizes else 0)
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_the_papers_split_of_digits():
    federation = load_federation(Data(), seed=0)
    assert federation.devices == 20
    assert len(federation.y) == len(digits().y)
    labelled, unlabelled, test, _ = federation.counts.T
    assert all((federation.class_counts(r) > 0).sum(1).max() <= 2 for r in (LABELLED, UNLABELLED, TEST))
    assert test / federation.counts.sum(1) == pytest.approx(np.full(20, 0.2), abs=0.01)
    assert labelled / (labelled + unlabelled) == pytest.approx(np.full(20, 0.1), abs=0.01)
    assert federation.digest == load_federation(Data(), seed=0).digest
    assert federation.digest != load_federation(Data(), seed=1).digest


def arrays(n=60, devices=3, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, n)
    return {"x": rng.normal(size=(n, 5)), "y": np.where(rng.random(n) < 0.5, -1, y), "device": np.arange(n) % devices}


def test_from_arrays_keeps_labels_and_sets_a_test_share_aside():
    a = arrays()
    federation = Federation.from_arrays(**a)
    assert federation.names == ("0", "1", "2")
    assert federation.classes == 4
    unknown = a["y"] == -1
    assert (federation.role[unknown] == UNLABELLED).all()
    known = ~unknown
    assert set(federation.role[known]) == {LABELLED, TEST}
    for i in range(3):
        mine = known & (a["device"] == i)
        assert (federation.role[mine] == TEST).sum() == round(0.2 * mine.sum())


def test_from_arrays_takes_names_a_test_mask_and_hides_labels():
    a = arrays()
    a["device"] = np.array(["tablet", "phone", "watch"])[a["device"]]
    a["y"] = np.abs(a["y"])
    test = np.zeros(60, bool)
    test[:12] = True
    federation = Federation.from_arrays(**a, test=test, labelled=0.25)
    assert federation.names == ("phone", "tablet", "watch")
    assert (federation.role[:12] == TEST).all()
    assert (federation.role[12:] == LABELLED).sum() == 12
    assert (federation.y[federation.role == UNLABELLED] >= 0).all()  # the truth, to score pseudo-labels with


@given(st.integers(0, 1000), st.floats(0.05, 1), st.floats(0.05, 0.5))
@settings(max_examples=30, deadline=None)
def test_every_sample_has_one_role_and_its_device(seed, labelled, share):
    federation = Federation.from_arrays(**arrays(seed=seed), labelled=labelled, test_fraction=share)
    assert federation.counts.sum() == 60
    ordered = federation.order
    assert sorted(ordered.tolist()) == list(range(60))
    key = federation.device[ordered] * 3 + federation.role[ordered]
    assert (np.diff(key) >= 0).all()


def broken(**changes):
    return {k: v for k, v in (arrays() | changes).items() if v is not None}


nan = arrays()["x"].copy()
nan[3, 2] = np.nan
BAD = {
    "no device": (broken(device=None), "no array 'device'"),
    "no x": (broken(x=None), "no array 'x'"),
    "NaN in x": (broken(x=nan), r"NaN or infinite value at \[3, 2\]"),
    "lengths differ": (broken(y=np.zeros(59, int)), r"y has shape \[59\] where x has 60"),
    "device too short": (broken(device=np.zeros(5, int)), r"device has shape \[5\]"),
    "labels below -1": (broken(y=np.full(60, -2)), "label -2"),
    "no label at all": (broken(y=np.full(60, -1)), "no sample has a label"),
    "fractional labels": (broken(y=np.full(60, 0.5)), "class numbers"),
    "text in x": (broken(x=np.full((60, 2), "a")), "dtype"),
    "one dimension": (broken(x=np.zeros(60)), "one row per sample"),
    "empty": ({"x": np.zeros((0, 3)), "y": np.zeros(0, int), "device": np.zeros(0, int)}, "empty"),
    "bad test": (broken(test=np.full(60, 7)), "test must be 0 or 1"),
    "test without label": (broken(test=np.ones(60)), "whose class is unknown"),
    "all test": (broken(y=np.zeros(60, int), test=np.ones(60)), "no device has a labelled"),
    "objects": (broken(x=np.array([[1, "a"]] * 60, dtype=object)), "Python objects"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_named(case, tmp_path):
    content, words = BAD[case]
    path = tmp_path / "data.npz"
    np.savez(path, **content)
    with pytest.raises(InputError, match=words) as caught:
        load_federation(Data(file=str(path)), seed=0)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "data.npz"
    with pytest.raises(InputError, match="no such file"):
        load_federation(Data(file=str(path)), seed=0)
    np.savez(path, **arrays())
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a readable"):
            load_federation(Data(file=str(path)), seed=0)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match="a single array"):
        load_federation(Data(file=str(tmp_path / "one.npy")), seed=0)


def write_idx(path, array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def idx_folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    write_idx(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", rng.integers(0, 256, (200, 28, 28)))
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", np.arange(200) % 10)
    return tmp_path


def mnist(folder):
    return NAMED["mnist"].read([folder])


def test_mnist_is_read_from_its_idx_files(idx_folder, monkeypatch):
    source = mnist(idx_folder)
    assert source.x.shape == (200, 1, 28, 28)
    assert source.x.dtype == np.uint8
    assert source.y.tolist() == [i % 10 for i in range(200)]
    monkeypatch.setenv("FEDCPSL_DATA", str(idx_folder))
    federation = load_federation(Data(dataset="mnist", devices=5), seed=0)
    assert federation.devices == 5
    x = prepare(federation, mlp(784, 10)).data.x(slice(None))
    assert x.min().item() == pytest.approx(-0.1307 / 0.3081, abs=1e-3)
    assert x.max().item() == pytest.approx((1 - 0.1307) / 0.3081, abs=1e-3)
    unscaled = load_federation(Data(dataset="mnist", devices=5, normalise="none"), seed=0)
    assert prepare(unscaled, mlp(784, 10)).data.x(slice(None)).max().item() == 255
    plain = idx_folder / "train-labels-idx1-ubyte"
    write_idx(plain, np.arange(200) % 10)  # not compressed, and beside the folder's own
    (idx_folder / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    assert len(mnist(idx_folder).y) == 200


@pytest.mark.parametrize("partition", ["classes", "dirichlet", "iid"])
def test_published_tests_are_the_tests_and_nothing_else_is(idx_folder, partition):
    rng = np.random.default_rng(1)
    write_idx(idx_folder / "mnist" / "t10k-images-idx3-ubyte.gz", rng.integers(0, 256, (60, 28, 28)))
    write_idx(idx_folder / "mnist" / "t10k-labels-idx1-ubyte.gz", np.arange(60) % 10)
    data = Data(dataset="mnist", dir=str(idx_folder), devices=5, test="published", partition=partition, labelled=0.5)
    federation = load_federation(data, seed=0)
    tests = federation.role == TEST
    published = NAMED["mnist"].read_tests([idx_folder])
    assert sorted(map(bytes, federation.x[tests])) == sorted(map(bytes, published.x))
    assert sorted(map(bytes, federation.x[~tests])) == sorted(map(bytes, mnist(idx_folder).x))
    if partition == "classes":  # a device is tested on the classes that it trains on
        for device in range(5):
            own = federation.device == device
            assert set(federation.y[own & tests]) == set(federation.y[own & ~tests])


def test_a_split_with_published_tests_is_saved_and_used_again(idx_folder, tmp_path, monkeypatch, capsys):
    write_idx(
        idx_folder / "mnist" / "t10k-images-idx3-ubyte.gz", np.random.default_rng(1).integers(0, 256, (60, 28, 28))
    )
    write_idx(idx_folder / "mnist" / "t10k-labels-idx1-ubyte.gz", np.arange(60) % 10)
    monkeypatch.setenv("FEDCPSL_DATA", str(idx_folder))
    monkeypatch.chdir(tmp_path)
    options = ["--dataset", "mnist", "--devices", "5", "--set", "data.test=published"]
    assert run_command(["data", *options, "--save", "s.npz"]) == 0
    assert "--set data.split=s.npz --set data.test=published" in " ".join(capsys.readouterr().out.split())
    data = Data(dataset="mnist", devices=5, test="published")
    drawn, again = (load_federation(replace(data, split=split), seed=0) for split in ("", "s.npz"))
    assert (drawn.digest, (drawn.role == TEST).sum()) == (again.digest, 60)
    with pytest.raises(InputError, match="made for other samples"):
        load_federation(replace(data, split="s.npz", test=0.2), seed=0)


def test_a_misspelt_test_set_is_refused():
    with pytest.raises(InputError, match="'publishd': give a number between 0 and 1, or"):
        load_federation(Data(dataset="digits", test="publishd"), seed=0)


def test_published_tests_are_divided_as_the_training_images_are():
    y, owner = np.array([0] * 6 + [1] * 4 + [2]), np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, -1])
    tests = np.array([0] * 3 + [1] * 2 + [2])
    found = like_training(y, owner, tests, 3, seed=0)
    assert sorted(found[:3].tolist()) == [0, 0, 1]  # four of device 0 and two of device 1
    assert found[3:].tolist() == [1, 1, -1]  # a class of device 1 alone, and one that nobody holds
    for seed in range(20):  # however unequal, a device with tests has training samples
        y, tests = np.arange(200) % 10, np.arange(60) % 10
        owner = by_dirichlet(y, 30, 0.05, seed)
        given = like_training(y, owner, tests, 30, seed)
        assert set(given) <= set(owner)
        assert len(given) == 60


def test_published_tests_of_another_size_are_refused(idx_folder):
    write_idx(idx_folder / "mnist" / "t10k-images-idx3-ubyte.gz", np.zeros((60, 32, 32)))
    write_idx(idx_folder / "mnist" / "t10k-labels-idx1-ubyte.gz", np.arange(60) % 10)
    with pytest.raises(InputError, match=r"differ in size \(1 x 28 x 28 and 1 x 32 x 32\)"):
        load_federation(Data(dataset="mnist", dir=str(idx_folder), test="published"), seed=0)


@pytest.mark.parametrize(
    ("base", "given", "same"),
    [
        (0.2, {}, True),
        (0.2, {"test": 0.1}, True),
        (0.2, {"partition": "iid", "labelled": 0.5, "validation": 0.1}, True),
        (0.2, {"test": "published"}, False),
        ("published", {}, True),
        ("published", {"test": 0.1}, False),
        (0.2, {"dataset": "mnist"}, False),
        (0.2, {"image_size": 16}, False),
        (0.2, {"drop": "age"}, False),
        (0.2, {"missing_labels": "class"}, False),
        (0.2, {"axes": "0 1 2"}, False),
    ],
)
def test_cases_read_the_same_samples_unless_a_setting_says_otherwise(base, given, same):
    assert (Data(test=base).reads == replace(Data(test=base), **given).reads) == same


def test_published_tests_are_refused_where_there_are_none(idx_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCPSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDCPSL_MIRROR", "http://127.0.0.1:9")  # where nobody answers
    for dataset in ("digits", "synthetic", "har"):
        with pytest.raises(InputError, match=f"{dataset} has no test set apart from the rest; give a share"):
            load_federation(Data(dataset=dataset, test="published"), seed=0)
    with pytest.raises(InputError, match="or mark tests in a column"):
        load_federation(Data(file="mine.csv", label="kind", test="published"), seed=0)
    with pytest.raises(InputError, match=r"t10k-images-idx3-ubyte.gz: cannot be downloaded"):
        load_federation(Data(dataset="mnist", dir=str(idx_folder), test="published"), seed=0)


def test_bad_mnist_files_are_named(idx_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCPSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDCPSL_MIRROR", "http://127.0.0.1:9")  # where nobody answers
    path = idx_folder / "mnist" / "train-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    for content, words in [
        (whole[:-9], "cannot be read"),
        (gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\xc8abc"), "header says 200"),
        (gzip.compress(b"nonsense"), "not an IDX file"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=words):
            mnist(idx_folder)
    path.unlink()
    with pytest.raises(InputError, match=r"train-labels-idx1-ubyte.gz"):
        mnist(idx_folder)


def test_fashion_mnist_is_normalised_by_its_own_training_data(idx_folder):
    (idx_folder / "mnist").rename(idx_folder / "fashion-mnist")
    federation = load_federation(Data(dataset="fashion-mnist", dir=str(idx_folder), devices=5), seed=0)
    assert federation.class_names[9] == "ankle boot"
    x = prepare(federation, mlp(784, 10)).data.x(slice(None))
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x.std().item() == pytest.approx(1, abs=1e-3)


@pytest.fixture
def har_folder(tmp_path):
    """Three people, two recordings each, of which the last is the test."""
    (tmp_path / "har").mkdir()
    recording = np.repeat([1, 2, 3, 4, 5, 6], 12)
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "har" / "har_windows.npz",
        x=rng.integers(-700, 700, (72, 128, 6)).astype(np.int16),
        y=np.arange(72) % 6,
        user=(recording + 1) // 2,
        exp=recording,
        scale=np.full(6, 1 / 720),
        classes=np.array(["WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING"]),
    )
    return tmp_path


def test_har_is_one_person_a_device_with_tests_by_recording(har_folder):
    federation = load_federation(Data(dataset="har", dir=str(har_folder), labelled=0.5), seed=0)
    assert federation.names == ("person 1", "person 2", "person 3")
    assert federation.class_names[1] == "walking upstairs"
    assert federation.x.shape == (72, 6, 128)
    assert (np.flatnonzero(federation.role == TEST) // 12 % 2 == 1).all()
    assert federation.counts.tolist() == [[6, 6, 12, 0]] * 3
    assert federation.scaling.shift.shape == (6, 1)


def test_har_files_that_are_not_there_or_wrong_are_named(har_folder, tmp_path):
    path = har_folder / "har" / "har_windows.npz"
    with np.load(path) as arrays:
        np.savez(path, **{name: arrays[name] for name in arrays.files if name != "exp"})
    with pytest.raises(InputError, match="has no array 'exp'"):
        load_federation(Data(dataset="har", dir=str(har_folder)), seed=0)
    path.unlink()
    with pytest.raises(InputError, match=r"har_windows.npz: no such file"):
        load_federation(Data(dataset="har", dir=str(har_folder)), seed=0)
    with pytest.raises(InputError, match="har has devices of its own"):
        load_federation(Data(dataset="har", dir=str(tmp_path), partition="iid"), seed=0)


def test_settings_that_do_not_fit_are_named(monkeypatch):
    monkeypatch.delenv("FEDCPSL_DATA", raising=False)
    for data, words in [
        (Data(dataset="minst"), "did you mean 'mnist'"),
        (Data(dataset="own"), "--data FILE"),
        (Data(dataset="digits", partition="natural"), "no devices of its own"),
    ]:
        with pytest.raises(InputError, match=words):
            resolve_auto(data)
    with pytest.raises(InputError, match="no such folder"):
        load_federation(Data(dataset="mnist", dir="nowhere"), 0)
    with pytest.raises(InputError, match="only 10 classes"):
        load_federation(Data(classes_per_device=11), 0)
    with pytest.raises(InputError, match="use fewer devices"):
        load_federation(Data(devices=5000), 0)
