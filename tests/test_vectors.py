"""The public test vectors, replayed on every executor; and a replay that must not pass."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedcpsl.errors import InputError
from fedcpsl.recorded_runs import executors, read_vector, replay

FOLDER = Path(__file__).parent / "vectors"
VECTORS = sorted(FOLDER.glob("*.npz"))
RELATED = sorted((FOLDER / "related").glob("*.npz"))


@pytest.mark.parametrize(("executor", "device"), executors())
@pytest.mark.parametrize("path", VECTORS + RELATED, ids=lambda path: path.stem)
def test_vector(path, executor, device):
    differences = list(replay(read_vector(path), executor, device))
    assert len(differences) > 40
    assert [str(d) for d in differences if d.error > 1] == []


@pytest.mark.parametrize(("executor", "device"), executors())
@pytest.mark.parametrize("name", ["fedmatch", "flexmatch", "semifed", "fedhar", "ditto"])
def test_a_run_in_which_nobody_makes_a_step_stays_as_it_was(name, executor, device):
    vector = read_vector(FOLDER / "related" / f"{name}.npz")
    for key in [k for k in vector if k.startswith("in/schedule/")]:
        quantity = key.split("/")[-1]
        if quantity == "steps":
            vector[key] = 0 * vector[key]
        elif "/device" in key and quantity != "peers":
            vector[key] = vector[key][:0]
    for key in [k for k in vector if re.match(r"out/round[1-9]", k)]:
        vector[key] = vector[re.sub(r"round\d+", "round0", key)]
    assert [str(d) for d in replay(vector, executor, device) if d.error > 1] == []


def test_a_wrong_value_is_found_and_named():
    vector = read_vector(VECTORS[0])
    key = "out/round2/device1/theta_lc/0.weight"
    vector[key] = vector[key] + 1e-7
    wrong = [d for d in replay(vector, "vectorised") if d.error > 1]
    assert [str(d) for d in wrong] == ["round 2, device 1: theta_lc differs by 1e-07"]


def test_an_output_that_is_not_understood_is_a_difference():
    vector = read_vector(VECTORS[0])
    vector["out/round1/momentum"] = np.zeros(3)
    assert any(d.quantity == "out/round1/momentum" and d.error > 1 for d in replay(vector, "sequential"))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("feddyn", "out/round2/Hbar/0.weight"),
        ("feddyn", "out/round3/device1/H/1.bias"),
        ("ditto", "out/round2/device1/personal/0.weight"),
        ("fedamp", "out/round2/device0/cloud/0.weight"),
        ("fedamp", "out/round1/theta/1.bias"),
        ("fedamp", "out/round4/device2/prediction"),
        ("afl-one-step-all-active", "out/round2/lambda"),
        ("drfa", "out/round3/lambda"),
        ("drfa-as-many-devices-as-parameters", "out/round3/lambda"),
        ("pfedme", "out/round2/device1/personal/0.weight"),
    ],
)
def test_every_state_of_every_algorithm_is_compared(name, key):
    vector = read_vector(FOLDER / "related" / f"{name}.npz")
    vector[key] = vector[key] + 1e-7
    (wrong,) = [d for d in replay(vector, "vectorised") if d.error > 1]
    assert wrong.largest == pytest.approx(1e-7, rel=1e-3)


def test_a_lost_upload_matters():
    vector = read_vector(FOLDER / "related" / "feddyn-plain-no-labels-lost.npz")
    vector["in/schedule/round2/lost"] = np.empty(0, np.int64)
    assert any(d.quantity == "H" and d.error > 1 for d in replay(vector, "sequential"))


@pytest.mark.parametrize("key", ["uniform", "copies", "snapshot", "probed", "device2/probe"])
def test_every_choice_of_the_server_matters(key):
    vector = read_vector(FOLDER / "related" / "drfa-unequal-no-labels-lost.npz")
    at = f"in/schedule/round1/{key}"
    vector[at] = {
        "uniform": lambda: 0 * vector[at],
        "copies": lambda: vector[at][::-1] + 1,
        "snapshot": lambda: np.maximum(vector[at] - 1, 1),
        "probed": lambda: vector[at][:-1],
        "device2/probe": lambda: 1 - vector[at],
    }[key]()
    assert any(d.error > 1 for d in replay(vector, "vectorised"))


def test_a_changed_schedule_is_noticed():
    vector = read_vector(VECTORS[-1])
    key = next(k for k in vector if k.startswith("in/schedule/round1/device") and k.endswith("batch_l"))
    vector[key] = (vector[key] + 1) % 2
    assert any(d.error > 1 for d in replay(vector, "sequential"))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04broken"])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "v.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"v\.npz"):
        read_vector(tmp_path / "v.npz")


def test_an_archive_of_something_else_is_named(tmp_path):
    np.savez(tmp_path / "v.npz", x=np.zeros(3))
    with pytest.raises(InputError, match="not a test vector"):
        read_vector(tmp_path / "v.npz")
