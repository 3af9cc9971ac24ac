"""Who gets what, who sees which labels, and splits as files."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl.config import Data
from fedcpsl.data.scaling import fit_scaling
from fedcpsl.data.sources import load_federation
from fedcpsl.data.split import (
    LABELLED,
    TEST,
    UNLABELLED,
    VALIDATION,
    Shares,
    by_dirichlet,
    by_quantity,
    by_shards,
    draw_roles,
    exchange_tests,
    iid,
)
from fedcpsl.errors import InputError

from .command import fedcpsl


@given(
    devices=st.integers(1, 30),
    samples=st.integers(30, 300),
    classes=st.integers(1, 8),
    concentration=st.floats(0.02, 50),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_has_a_device_and_every_device_a_sample(devices, samples, classes, concentration, seed):
    y = np.random.default_rng(seed).integers(0, classes, samples)
    owners = [
        iid(samples, devices, seed),
        by_quantity(samples, devices, concentration, seed),
        by_dirichlet(y, devices, concentration, seed),
        by_shards(y, devices, 1, seed),
    ]
    for owner in owners:
        assert owner.shape == (samples,)
        assert np.bincount(owner, minlength=devices).min() >= 1
        assert owner.max() < devices


def test_iid_shares_are_equal_and_shards_hold_few_classes():
    y = np.repeat(np.arange(10), 100)
    sizes = np.bincount(iid(1000, 7, 0))
    assert sizes.max() - sizes.min() <= 1
    owner = by_shards(y, 20, 2, 0)
    held = [np.unique(y[owner == i]) for i in range(20)]
    assert max(map(len, held)) <= 3  # a shard may straddle two classes
    assert np.bincount(owner).tolist() == [50] * 20


def test_a_small_concentration_is_lopsided_and_a_large_one_even():
    y = np.repeat(np.arange(10), 200)

    def largest_share(concentration):
        owner = by_dirichlet(y, 10, concentration, 0)
        table = np.array([np.bincount(y[owner == i], minlength=10) for i in range(10)])
        return (table.max(1) / table.sum(1)).mean()

    assert largest_share(0.05) > 0.6 > 0.2 > largest_share(100)
    sizes = [np.bincount(by_quantity(2000, 10, c, 0), minlength=10) for c in (0.2, 1000)]
    assert sizes[0].std() > 5 * sizes[1].std()


def roles(shares, seed=0, devices=8, per_device=50, classes=4):
    rng = np.random.default_rng(1)
    device = np.repeat(np.arange(devices), per_device)
    y = rng.integers(0, classes, len(device))
    return draw_roles(y, device, None, shares, seed), y, device


def test_a_share_overall_falls_unevenly_and_a_share_by_device_evenly():
    by_device, _, device = roles(Shares(0.25))
    overall, _, _ = roles(Shares(0.25, by="overall"))
    count = [np.bincount(device[r == LABELLED], minlength=8) for r in (by_device, overall)]
    assert set(count[0]) == {10}
    assert count[1].sum() == 80
    assert len(set(count[1])) > 1


def test_one_share_per_device():
    shares = [0.0, 1.0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    role, _, device = roles(Shares(shares))
    assert np.bincount(device[role == LABELLED], minlength=8).tolist() == [0, 40, 20, 4, 4, 4, 4, 4]


def test_stratified_labels_keep_the_classes_shares():
    role, y, device = roles(Shares(0.25, stratified=True))
    for i in range(8):
        own = (device == i) & (role <= UNLABELLED)
        have = np.bincount(y[own & (role == LABELLED)], minlength=4)
        assert np.abs(have - 0.25 * np.bincount(y[own], minlength=4)).max() <= 1


def test_labels_at_some_devices_only():
    role, _, device = roles(Shares(0.5, labelled_devices=3))
    assert (np.bincount(device[role == LABELLED], minlength=8) > 0).sum() == 3
    again, _, _ = roles(Shares(0.5, labelled_devices=3), seed=1)
    assert set(device[again == LABELLED]) != set(device[role == LABELLED])


def test_a_validation_part_is_cut_from_training_data_and_leaves_the_tests_alone():
    plain, _, device = roles(Shares(1.0))
    cut, _, _ = roles(Shares(1.0, validation=0.25))
    assert np.array_equal(plain == TEST, cut == TEST)
    assert np.bincount(device[cut == VALIDATION]).tolist() == [10] * 8


@given(
    devices=st.integers(2, 12),
    samples=st.integers(60, 300),
    share=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_exchanged_tests_leave_numbers_and_training_as_they_were(devices, samples, share, seed):
    device = iid(samples, devices, seed)
    role = draw_roles(np.zeros(samples, int), device, None, Shares(0.5), seed)
    exchanged = exchange_tests(device, role, share, seed)
    tests = role == TEST
    assert np.array_equal(exchanged[~tests], device[~tests])
    assert np.array_equal(np.bincount(exchanged[tests]), np.bincount(device[tests]))
    numbers = np.bincount(device[tests], minlength=devices)
    if share == 1 and 2 * numbers.max() <= numbers.sum():
        assert not (exchanged == device)[tests].any()
    moved = np.bincount(device[exchanged != device], minlength=devices)
    assert (moved <= np.round(share * numbers)).all()


def test_tests_of_other_devices_hold_other_classes():
    own = load_federation(Data(dataset="digits", labelled=0.1), seed=0)
    foreign = load_federation(Data(dataset="digits", labelled=0.1, foreign_test=1.0), seed=0)
    assert np.array_equal(foreign.class_counts(LABELLED), own.class_counts(LABELLED))
    trained = own.class_counts(LABELLED) + own.class_counts(UNLABELLED) > 0
    assert not (own.class_counts(TEST) * ~trained).any()
    assert (foreign.class_counts(TEST) * ~trained).sum() > 0.6 * foreign.class_counts(TEST).sum()


def test_scaling_is_of_the_training_data_by_feature_or_channel():
    rng = np.random.default_rng(0)
    table = rng.normal(3, 5, (400, 3))
    table[:, 2] = 7
    rows = np.arange(300)
    scaling = fit_scaling(table, rows)
    assert scaling.shift == pytest.approx(table[:300].mean(0))
    assert scaling.scale[:2] == pytest.approx(table[:300, :2].std(0))
    assert scaling.scale[2] == 1
    images = rng.integers(0, 255, (50, 3, 4, 5)).astype(np.uint8)
    by_channel = fit_scaling(images, np.arange(50))
    assert by_channel.shift.shape == (3, 1, 1)
    assert by_channel.shift.ravel() == pytest.approx(images.mean((0, 2, 3)))
    assert by_channel.scale.ravel() == pytest.approx(images.std((0, 2, 3)))


@pytest.mark.parametrize("shape", [(60, 3, 4, 4), (60, 7), (60, 2, 9)])
def test_bytes_are_scaled_as_numbers_are(shape):
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    x[:, 1] = 9  # never varies: shifted, not scaled
    rows = np.arange(0, 60, 2)
    for one, other in zip(fit_scaling(x, rows), fit_scaling(x.astype(np.float64), rows), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"partition": "natural"}, "digits has no devices of its own"),
        ({"labelled": [0.1, 0.2]}, "data.labelled has 2 values for 20 devices"),
        ({"labelled": [0.1] * 20, "labelled_by": "overall"}, "takes one share for all"),
        ({"labelled_devices": 21}, "there are only 20 devices"),
        ({"devices": 2000, "partition": "iid"}, "1797 samples cannot be shared among 2000"),
        ({"split": "nowhere.npz"}, "nowhere.npz: no such file"),
    ],
)
def test_splits_that_cannot_be_are_refused(given, words):
    with pytest.raises(InputError, match=words):
        load_federation(Data(**given), seed=0)


def test_the_data_command_shows_saves_and_reuses_a_split(tmp_path):
    options = ["--partition", "dirichlet", "--devices", "5", "--seed", "3"]
    done = fedcpsl("data", *options, "--save", "s.npz", "--picture", "s.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 devices, 10 classes" in done.stdout
    assert "█" in done.stdout
    assert (tmp_path / "s.svg").read_text().count("<image") == 4  # two maps with their scales
    digest = next(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("split sha256"))
    again = fedcpsl("data", "--set", "data.split=s.npz", "--seed", "9", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert digest in again.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"s.npz", "s.svg"}
    over = fedcpsl("data", *options, "--save", "s.npz", cwd=tmp_path)
    assert (over.returncode, "exists already" in over.stderr) == (2, True)
    run = fedcpsl("run", "--set", "data.split=s.npz", "--rounds", "2", "--out", "a", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert digest in (tmp_path / "a" / "manifest.json").read_text()


def test_a_split_of_other_samples_is_refused(tmp_path):
    fedcpsl("data", "--devices", "4", "--save", "s.npz", cwd=tmp_path)
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(40) % 2, device=np.arange(40) % 4)
    done = fedcpsl("data", "--data", "mine.npz", "--set", "data.split=s.npz", cwd=tmp_path)
    assert done.returncode == 2
    assert "made for other samples" in done.stderr
    np.savez(tmp_path / "bad.npz", device=np.zeros(3))
    wrong = fedcpsl("data", "--set", "data.split=bad.npz", cwd=tmp_path)
    assert (wrong.returncode, "not a saved split" in wrong.stderr) == (2, True)


def test_a_validation_part_is_reported(tmp_path):
    import json

    options = ["--rounds", "2", "--set", "data.validation=0.2", "--set", "model.hidden=[8]"]
    assert fedcpsl("run", *options, "--out", "a", cwd=tmp_path).returncode == 0
    last = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= last["validation"]["mean"] <= 1
