"""Where device states live changes nothing, and neither do samples that are made on demand."""

import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedcpsl
from fedcpsl import config
from fedcpsl.cli import run_command
from fedcpsl.errors import InputError, RunError
from fedcpsl.evaluation import evaluate, prediction_numbers
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fedcpsl.runs.folder import read_metrics
from fedcpsl.simulation import initial_state, prepare, simulate, simulate_together
from fedcpsl.simulation.store import choose_store
from fedcpsl.storage import load_tensors
from fedcpsl.theory import gap, objectives
from fedcpsl.trees import leaves

from .command import fedcpsl as fedcpsl_command
from .command import spawn
from .conftest import needs_fork, needs_gpu, small_federation, small_model
from .test_conformance import NAMES, WORK, settings_for, traits_of

SIZES = ((3, 5), (1, 7), (4, 2), (0, 6), (5, 0))
JOINING = replace(WORK, active=2, joiners=2, join_round=2)


def make(name, store, *, federation=None, work=WORK, processes=1, executor="vectorised", device="cpu"):
    if traits_of(name).everyone:
        work = replace(work, active="auto")
    return prepare(
        federation or small_federation(at_server=7 if traits_of(name).server_data else 0),
        small_model(),
        settings_for(name),
        work,
        config.Run(executor=executor, processes=processes, dtype="float64", seed=3, device=device, store=store),
    )


def final(setup, start=None):
    *_, last = simulate(setup, start)
    return last


def assert_same(a, b):
    """Everything that can be asked of two states, to the bit."""
    assert all(map(torch.equal, leaves(a.server), leaves(b.server)))
    for i in range(a.setup.terms.devices):
        for mine, other in zip(a.device(i), b.device(i), strict=True):
            assert torch.equal(mine, other), i
        assert torch.equal(a.nu(i), b.nu(i)), i
    metrics = [evaluate(state).metrics(state) for state in (a, b)]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("work", [WORK, JOINING], ids=["lost uploads", "joiners"])
@pytest.mark.parametrize("name", NAMES)
def test_every_store_gives_the_same(name, work):
    reference = final(make(name, "accelerator", work=work))
    for store in ("host", "disk"):
        assert_same(final(make(name, store, work=work)), reference)


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_one_after_another_and_personal_rounds_too(store, executor):
    work = replace(JOINING, personal_rounds=2)
    reference = final(make("fedcpsl", "accelerator", work=work, executor=executor))
    assert_same(final(make("fedcpsl", store, work=work, executor=executor)), reference)


@needs_fork
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("name", ["fedcpsl", "fedavg"])
def test_workers_see_what_is_stored(name, store):
    reference = final(make(name, "accelerator", processes=2, work=JOINING))
    assert_same(final(make(name, store, processes=2, work=JOINING)), reference)


def test_runs_of_a_group_may_use_any_store():
    alone = [final(make("fedcpsl", "accelerator")), final(make("apfl", "accelerator"))]
    first = make("fedcpsl", "host")
    *_, last = simulate_together([first, make("apfl", "disk")])
    for mine, other in zip(last, alone, strict=True):
        assert torch.allclose(mine.server.theta, other.server.theta, atol=1e-10)


def test_theory_asks_for_states_wherever_they_are():
    states = [final(make("fedcpsl", store, work=JOINING)) for store in ("accelerator", "disk")]
    assert objectives(states[0]) == objectives(states[1])
    assert gap(states[0]) == gap(states[1])


def test_auto_takes_the_fastest_place_that_all_states_fit_into(monkeypatch):
    monkeypatch.setattr("fedcpsl.simulation.store.free_bytes", lambda device: 1000 if device.type == "cpu" else 100)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_store("auto", 500, cpu, on_demand=False) == "accelerator"
    assert choose_store("auto", 250, cpu, on_demand=True) == "host"
    assert choose_store("auto", 251, cpu, on_demand=True) == "disk"
    assert choose_store("auto", 501, cpu, on_demand=False) == "disk"
    assert choose_store("auto", 51, gpu, on_demand=False) == "host"
    assert choose_store("disk", 1, gpu, on_demand=False) == "disk"


def test_an_unknown_store_is_refused():
    with pytest.raises(InputError, match=r'run\.store = "tape": give one of "auto", "accelerator", "host", "disk"'):
        make("fedcpsl", "tape")


def test_only_devices_that_have_been_active_take_room_on_disk():
    setup = prepare(
        supply(devices=2000),
        fedcpsl.mlp(6, 3, [200, 200]),
        work=config.Work(rounds=4, active=3),
        run=config.Run(store="disk", processes=1, device="cpu"),
    )
    one = 2 * setup.terms.method.network.initial.numel() * 4
    for state in simulate(setup):
        there = int(state.sparse.there.sum())
        assert there == (state.active_rounds > 0).sum() <= 3 * state.round
        pages = 3 * 2 * os.sysconf("SC_PAGE_SIZE")  # a row begins and ends within one
        assert there * one <= state.sparse.bytes_on_disk() <= there * (one + pages)


def test_a_full_disk_is_told(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=r"cannot be stored: No space left on device; free some disk space"):
        final(make("fedcpsl", "disk"))


def test_a_folder_that_is_not_there_is_told(tmp_path):
    setup = make("fedcpsl", "disk")
    setup = setup._replace(machine=setup.machine._replace(store_folder=tmp_path / "no"))
    with pytest.raises(RunError, match="cannot hold device states"):
        initial_state(setup)


def from_seed(device, sizes=SIZES, tests=4):
    """The samples of one of `supply`'s devices."""
    n, m = sizes[device % len(sizes)]
    rng = np.random.default_rng(device)
    y = rng.integers(0, 3, n + m + tests)
    return rng.normal(size=(len(y), 6)) + np.eye(3, 6)[y], y


def supply(devices=5, make=from_seed, **given):
    each = np.array([SIZES[i % len(SIZES)] for i in range(devices)])
    sizes = {"labelled": each[:, 0], "unlabelled": each[:, 1], "tests": 4}
    return fedcpsl.from_function(make, devices=devices, classes=3, **(sizes | given))


@pytest.mark.parametrize("store", ["accelerator", "host", "disk"])
@pytest.mark.parametrize("work", [WORK, JOINING, replace(JOINING, personal_rounds=2)])
def test_samples_made_on_demand_are_those_held_in_memory(store, work):
    made = supply()
    held = final(make("fedcpsl", "accelerator", federation=made.federation_of(range(5)), work=work))
    end = final(make("fedcpsl", store, federation=made, work=work))
    assert all(map(torch.equal, leaves(end.server), leaves(held.server)))
    for i in range(5):
        assert torch.equal(end.device(i).theta_lc, held.device(i).theta_lc)
        assert torch.equal(end.nu(i), held.nu(i))
    assert evaluate(end).personal == evaluate(held).personal


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fedhar", "semipfl")])  # they need more
@needs_fork
def test_workers_see_samples_made_on_demand(name):
    made = supply()
    held = final(make(name, "accelerator", federation=made.federation_of(range(5)), processes=2))
    end = final(make(name, "disk", federation=made, processes=2))
    assert all(map(torch.equal, leaves(end.server), leaves(held.server)))
    assert all(torch.equal(end.nu(i), held.nu(i)) for i in range(5))


@needs_gpu
@pytest.mark.parametrize("store", ["accelerator", "host", "disk"])
def test_on_a_gpu_too(store, tmp_path):
    made, work = supply(), replace(JOINING, personal_rounds=2)
    held = final(make("fedcpsl", "accelerator", federation=made.federation_of(range(5)), work=work, device="cuda"))
    for federation in (made, made.federation_of(range(5))):
        setup = make("fedcpsl", store, federation=federation, work=work, device="cuda")
        end = final(setup)
        assert torch.allclose(end.server.theta, held.server.theta, atol=1e-10)
        for i in range(5):
            assert torch.allclose(end.device(i).theta_lc, held.device(i).theta_lc, atol=1e-10)
            assert torch.allclose(end.nu(i), held.nu(i), atol=1e-10)
        assert evaluate(end).personal.mean == pytest.approx(evaluate(held).personal.mean)
        save_checkpoint(tmp_path, end)
        loaded = load_checkpoint(checkpoints(tmp_path)[-1], setup)
        assert all(torch.equal(loaded.device(i).theta_lc, end.device(i).theta_lc) for i in range(5))
        assert all(torch.equal(loaded.nu(i), end.nu(i)) for i in range(5))


@pytest.mark.parametrize("name", ["fedcpsl2", "fedcpsl2-prior"])
def test_devices_never_visited_know_their_labels_though_their_samples_are_made_on_demand(name):
    made, work = supply(devices=9), replace(WORK, rounds=1, active=3)
    held = final(make(name, "accelerator", federation=made.federation_of(range(9)), work=work))
    end = final(make(name, "disk", federation=made, work=work))
    never = np.flatnonzero(end.active_rounds == 0).tolist()
    assert len(never) > 3
    for i in never:
        assert torch.equal(end.device(i).pi, held.device(i).pi)
    assert any((end.device(i).pi - 1 / 3).abs().max() > 0.05 for i in never)
    numbers, others = (prediction_numbers(state, range(9)) for state in (end, held))  # one by one, and all at once
    assert torch.allclose(numbers.log_pi, others.log_pi, rtol=0, atol=1e-12)
    assert evaluate(end).personal == evaluate(held).personal


@pytest.mark.parametrize("name", ["fedprox", "fedmatch", "fedcpsl2-prior", "ditto"])
def test_any_store_is_resumed_also_of_devices_that_keep_nothing(name, tmp_path):
    setup = make(name, "host", work=JOINING)
    for state in simulate(setup):
        if state.round == 3:
            save_checkpoint(tmp_path, state)
            break
    assert_same(final(setup, load_checkpoint(checkpoints(tmp_path)[-1], setup)), final(setup))


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_checkpoint_in_between_changes_no_bit(store, on_demand, tmp_path):
    setup = make("fedcpsl", store, work=JOINING, federation=supply() if on_demand else None)
    for state in simulate(setup):
        if state.round == 3:
            save_checkpoint(tmp_path, state)
            break
    loaded = load_checkpoint(checkpoints(tmp_path)[-1], setup)
    assert not on_demand or evaluate(loaded).pseudo_label_accuracy is None  # nobody's samples are there
    assert_same(final(setup, loaded), final(setup))
    tensors, _ = load_tensors(checkpoints(tmp_path)[-1])
    assert len(tensors["devices.theta_lc"]) == len(tensors["there"]) == (state.active_rounds > 0).sum() < 5


def test_some_devices_are_tested_evenly_spread():
    some = prepare(
        small_federation(),
        small_model(),
        config.Algorithm(),
        run=config.Run(evaluate_devices=3, processes=1, device="cpu"),
    )
    everyone = prepare(small_federation(), small_model(), config.Algorithm(), run=config.Run(processes=1, device="cpu"))
    few, all_of_them = (evaluate(initial_state(setup)) for setup in (some, everyone))
    assert list(few.personal.devices) == [0, 2, 4]
    assert few.personal.devices == {i: all_of_them.personal.devices[i] for i in (0, 2, 4)}


def test_a_hundred_thousand_devices_begin_at_once():
    began = time.process_time()
    federation = fedcpsl.load_federation(config.Data(dataset="synthetic", devices=100_000), seed=0)
    work, run = config.Work(rounds=2, active=20), config.Run(processes=1, device="cpu", store="disk")
    end = final(prepare(federation, fedcpsl.mlp(64, 10), fedcpsl.Algorithm(), work=work, run=run))
    assert end.sparse.there.sum() <= 40
    assert len(evaluate(end).personal.devices) == 100
    assert time.process_time() - began < 20


def test_on_demand_runs_go_one_after_another():
    setups = [make("fedcpsl", "host", federation=supply()) for _ in range(2)]
    with pytest.raises(InputError, match="samples made on demand: such runs go one after another"):
        next(simulate_together(setups))


def test_gaps_need_all_samples():
    end = final(make("fedcpsl", "host", federation=supply()))
    with pytest.raises(InputError, match="samples made on demand"):
        gap(end)
    with pytest.raises(InputError, match="samples made on demand"):
        objectives(end)


def spoilt(change):
    def make(device):
        x, y = from_seed(device)
        return change(x, y) if device == 3 else (x, y)

    return make


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x, y: (x[:-1], y[:-1]), r"device '3': x has shape \[9, 6\] and y \[9\]; give \[10, 6\] and \[10\]"),
        (lambda x, y: (x[:, :5], y), r"give \[10, 6\] and \[10\], 0 labelled, 6 unlabelled and 4 test samples"),
        (lambda x, y: (np.where(x > 0, np.nan, x), y), "x has a NaN or infinite value"),
        (lambda x, y: (x.astype(str), y), "x has a NaN or infinite value, or its dtype"),
        (lambda x, y: (x, y + 5), r"values beyond 0 ... 2; give whole class numbers"),
        (lambda x, y: (x, y + 0.5), "y has dtype float64"),
        (lambda x, y: (x, np.full_like(y, -1)), "y is -1 for a labelled or a test sample"),
        (lambda *pair: pair[0], r"the function returned ndarray; return \(x, y\)"),
    ],
)
def test_a_function_that_gives_something_else_is_told(change, complaint):
    made = supply(make=spoilt(change))
    with pytest.raises(InputError, match=complaint):
        made.samples(3)
    with pytest.raises(InputError, match=complaint):
        make("fedcpsl", "host", federation=made)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"labelled": [1, 2]}, "labelled: give a whole number of at least 0, or one for each of the 5 devices"),
        ({"unlabelled": -1}, "unlabelled: give a whole number"),
        ({"tests": 1.5}, "tests: give a whole number"),
        ({"labelled": 0}, "device '4' has no training samples"),
        ({"labelled": 0, "unlabelled": 8}, "no device has a labelled training sample"),
        ({"names": ["a"]}, "names has 1 names for 5 devices"),
        ({"devices": 0}, "give at least 1 device"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(given, complaint):
    sizes = {"devices": 5, "classes": 3, "labelled": [3, 1, 4, 0, 5], "unlabelled": [5, 7, 2, 6, 0]}
    with pytest.raises(InputError, match=complaint):
        fedcpsl.from_function(from_seed, **(sizes | given))


RUN = [
    "run",
    "--algorithm",
    "fedcpsl",
    "--dataset",
    "synthetic",
    "--devices",
    "3000",
    "--active",
    "3",
    "--rounds",
    "20",
    "--set",
]
RUN += ["model.hidden=[8]", "--set", "run.checkpoint_seconds=0", "--set", "run.processes=1"]


def assert_same_files(folder, other):
    for name in ("models.safetensors", "devices.csv"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    kept = [[m | {"seconds": 0} for m in read_metrics(each)] for each in (folder, other)]
    assert kept[0] == kept[1]


def test_many_devices_killed_and_resumed_end_bit_identical(tmp_path):
    assert fedcpsl_command(*RUN, "--out", "whole", "--store", "host", cwd=tmp_path).returncode == 0
    process = spawn(*RUN, "--out", "a", "--store", "disk", cwd=tmp_path)
    for rounds in (2, 5):
        while process.poll() is None and not (tmp_path / f"a/checkpoints/round-{rounds:07d}.safetensors").exists():
            if any(int(p.stem[6:]) > rounds for p in checkpoints(tmp_path / "a")):
                break
            time.sleep(0.005)
        process.kill()
        process.communicate()
        left = {p.name for p in (tmp_path / "a").iterdir() if not p.name.startswith(".")}
        assert left <= {
            "checkpoints",
            "config.toml",
            "manifest.json",
            "metrics.jsonl",
            "split.json",
        }  # and nothing of the store
        process = spawn("run", "--resume", "a", cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_same_files(tmp_path / "a", tmp_path / "whole")
    listed = (tmp_path / "a" / "devices.csv").read_text().splitlines()
    assert 100 < len(listed) <= 1 + 100 + 60
    tensors, _ = load_tensors(tmp_path / "a" / "models.safetensors")
    trained = {name.split("/")[0] for name in tensors if name.startswith("device")}
    assert trained == {f"device{row.split(',')[0]}" for row in listed[1:] if row.split(",")[4] != "0"}


def test_comparing_on_samples_made_on_demand(tmp_path):
    given = ["--dataset", "synthetic", "--devices", "200", "--active", "3", "--rounds", "2", "--seeds", "2"]
    done = fedcpsl_command(
        "compare", *given, "--algorithms", "fedcpsl,apfl", "--set", "model.hidden=[8]", "--out", "c", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "c" / "runs").iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--algorithm", "fedcpsl", "--gaps"], "gaps need the samples of all devices at once"),
        (["run", "--set", "data.stratified=true"], "data.stratified: has no meaning for the data set synthetic"),
        (["run", "--set", "data.normalise=standard"], "synthetic inputs are normalised as they are"),
        (["run", "--partition", "iid"], "synthetic has devices of its own"),
        (["run", "--labelled", "0.1,0.2"], "data.labelled has 2 values for 20 devices"),
        (["data", "--save", "split.npz"], "there is no split to save"),
    ],
)
def test_what_means_nothing_for_synthetic_data_is_refused(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command([arguments[0], "--dataset", "synthetic", *arguments[1:]]) == 2
    assert complaint in capsys.readouterr().err


def test_many_devices_are_shown_by_the_first_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (["data"], ["run", "--dry-run"]):
        assert run_command([*command, "--dataset", "synthetic", "--devices", "5000"]) == 0
        assert "5,000 devices, whose samples are made on demand; the first 30:" in capsys.readouterr().out
