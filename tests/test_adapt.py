"""A personal model for a device that was not in training."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcpsl.export.adaptation import paired_interval
from fedcpsl.storage import load_tensors
from tests.command import fedcpsl
from tests.small_runs import answers_of, array_run, ask, make_run, table_run, write_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return table_run(tmp_path_factory.mktemp("table") / "run", work__rounds=6, algorithm__eta=0.02)


def opposite(path, rows=80):
    """A device whose cats are the others' dogs, which no global model can know."""
    text = write_table(path, rows=rows, seed=5, phones=("dan",)).read_text()
    path.write_text(text.replace("cat", "?").replace("dog", "cat").replace("?", "dog"))
    return path


def test_a_new_device_gains_and_its_folder_is_used_like_a_run(run, tmp_path, capsys):
    opposite(tmp_path / "dan.csv")
    done = fedcpsl("adapt", run, "--data", "dan.csv", "--name", "dan", "--rounds", "30", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["folder"] == "adapted/dan"
    assert found["rounds"] == 30
    assert found["gain"] == pytest.approx(found["personal"] - found["global"])
    assert found["gain"] > 0.3
    assert 0 < found["gain_interval"][0] < found["gain"] < found["gain_interval"][1]
    folder = tmp_path / "adapted" / "dan"
    assert not list(tmp_path.glob("adapted/.*"))
    said = ask(capsys, "predict", folder, tmp_path / "dan.csv")
    assert said[0] == 0
    assert "accuracy" in said[2]
    assert ask(capsys, "export", folder, "--out", tmp_path / "dan.safetensors")[0] == 0
    of_file = ask(capsys, "predict", tmp_path / "dan.safetensors", tmp_path / "dan.csv")
    assert np.allclose(answers_of(said[1]), answers_of(of_file[1]), atol=1e-5)
    assert ask(capsys, "show", folder)[0] == 0
    assert ask(capsys, "report", folder)[0] == 0
    assert json.loads((folder / "split.json").read_text())["names"] == ["dan"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["adapted_from"]["run"] == "run"
    assert manifest["class_names"] == ["cat", "dog"]


def test_the_global_model_and_the_scaling_stay_as_they_are(run, tmp_path, capsys):
    assert ask(capsys, "adapt", run, "--data", opposite(tmp_path / "dan.csv"), "--out", tmp_path / "new")[0] == 0
    before, after = (load_tensors(folder / "models.safetensors")[0] for folder in (run, tmp_path / "new"))
    kept = [name for name in before if name.startswith(("global/", "input/"))]
    assert len(kept) == 6
    assert all(torch.equal(before[name], after[name]) for name in kept)
    localized = "device0/localized/1.weight"
    assert not torch.equal(after[localized], after["global/1.weight"])


def test_it_is_what_personal_rounds_of_a_joiner_are(run, tmp_path):
    """One round, by the functions of the algorithm: theta_lc starts at theta, nu is labelled there, and is fixed."""
    from fedcpsl.export.adaptation import adapt
    from fedcpsl.export.saved_run import load_saved_run
    from fedcpsl.problem import Samples
    from fedcpsl.schedule import draw_tasks
    from fedcpsl.settings import Data
    from fedcpsl.trees import map_tensors

    table = opposite(tmp_path / "dan.csv", rows=30)
    kept = load_saved_run(run)
    adapted = adapt(kept, Data(dataset="own", file=str(table), label="kind", labelled=1.0), "dan", 1)
    setup, device_data = adapted.state.setup, adapted.state.setup.data
    method, hyper = setup.terms.personal_method, map_tensors(lambda t: t[0], setup.terms.hyper)
    algorithm, network = setup.terms.algorithm, method.network
    theta = network.join([kept.tensors[f"global/{name}"] for name in network.shapes])
    server = setup.terms.first_server()._replace(theta=theta)
    broadcast = algorithm.broadcast(server)
    device = algorithm.init_device(method, broadcast)
    n, m = int(setup.terms.sizes.labelled[0]), int(setup.terms.sizes.unlabelled[0])
    x, targets = device_data.x(slice(0, n + m)), device_data.one_hot.clone()
    targets[n:] = algorithm.relabel(setup.terms.method, hyper, broadcast, device, x[n:], targets[n:], torch.tensor(m))
    (task,) = draw_tasks(setup.terms.seed, 0, [0], setup.terms.sizes, setup.terms.work, unlabelled=True, dropout=False)
    local = algorithm.begin(method, hyper, broadcast, device)
    for labelled, unlabelled in zip(task.labelled, task.unlabelled, strict=True):
        rows = torch.from_numpy(np.concatenate([labelled, n + unlabelled]))
        weigh = [torch.zeros(len(rows)) for _ in range(2)]
        weigh[0][: len(labelled)], weigh[1][len(labelled) :] = 1 / len(labelled), 1 / len(unlabelled)
        partner = network.log_probabilities(theta, x[rows])
        samples = Samples(x[rows], targets[rows], *weigh, partner=partner)
        local = algorithm.step(method, hyper, local, samples)
    finished, _ = algorithm.finish(method, hyper, broadcast, device, local, torch.tensor(task.steps))
    assert torch.allclose(adapted.state.devices.theta_lc[0], finished.theta_lc, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["fedavg", "apfl", "fedshvr"])
def test_any_algorithm_with_a_server_can_be_adapted(algorithm, tmp_path, capsys):
    """Also one that has no personal models; and device and test columns may be missing."""
    active = {"work__active": "auto"} if algorithm == "fedshvr" else {}
    run = table_run(tmp_path / "run", algorithm__name=algorithm, work__rounds=1, **active)
    table = opposite(tmp_path / "dan.csv")
    rows = [line.split(",") for line in table.read_text().splitlines()]
    table.write_text("\n".join(f"{k},{w},{h}" for h, w, _, k in rows) + "\n")
    code, out, err = ask(capsys, "adapt", run, "--data", table, "--out", tmp_path / "new", "--rounds", "3")
    assert (code, err) == (0, "")
    assert "personal model" in out
    assert ask(capsys, "predict", tmp_path / "new", table)[0] == 0


def test_arrays_whose_classes_are_numbers(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(36, 4))
    run = array_run(tmp_path / "run", x, algorithm__beta=[0.2, 0.4, 0.6])
    np.savez(tmp_path / "new.npz", x=x, y=np.arange(36) % 2)
    code, _, err = ask(capsys, "adapt", run, "--data", tmp_path / "new.npz", "--out", tmp_path / "new")
    assert (code, err) == (0, "")
    assert float(load_tensors(tmp_path / "new" / "models.safetensors")[0]["beta"]) == pytest.approx(0.4)
    np.savez(tmp_path / "more.npz", x=x, y=np.arange(36) % 4)
    code, _, err = ask(capsys, "adapt", run, "--data", tmp_path / "more.npz", "--out", tmp_path / "more")
    assert code == 2
    assert "the run has no class '3'" in err


def test_what_cannot_be_adapted_is_said_in_one_line_and_leaves_nothing(run, tmp_path, capsys):
    local = table_run(tmp_path / "local", algorithm__name="local", work__rounds=1)
    metrics = table_run(tmp_path / "metrics", run__keep="metrics", work__rounds=1)
    table = opposite(tmp_path / "dan.csv")
    for name, text in (
        ("cow.csv", "height,width,kind\n1,2,cow\n2,3,cat\n"),
        ("wide.csv", "height,width,depth,kind\n1,2,3,cat\n"),
        ("narrow.csv", "height,kind\n1,cat\n"),
        ("bare.csv", "height,width\n1,2\n"),
    ):
        (tmp_path / name).write_text(text)
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 3)), y=np.arange(4) % 2)
    out = tmp_path / "out"
    for arguments, words in (
        ([local, "--data", table], "local has no global model"),
        ([metrics, "--data", table], 'run.keep = "metrics"'),
        ([run, "--data", tmp_path / "cow.csv"], "the run has no class 'cow'; it has cat, dog"),
        ([run, "--data", tmp_path / "wide.csv"], "there is a column 'depth', which is not a feature of the run"),
        ([run, "--data", tmp_path / "narrow.csv"], "column 'width' is missing"),
        ([run, "--data", tmp_path / "bare.csv", "--label", "sort"], "has no column 'sort'"),
        ([run, "--data", tmp_path / "wide.npz"], "an input has shape [3]"),
        ([run, "--data", tmp_path / "absent.csv"], "no such file"),
        ([run, "--data", table, "--rounds", "-1"], "give at least 0"),
        ([tmp_path, "--data", table], "not a run's folder"),
    ):
        code, printed, err = ask(capsys, "adapt", *arguments, "--out", out)
        assert (code, printed, err.count("\n")) == (2, "", 1), err
        assert words in err, err
        assert not out.exists()


def test_a_folder_that_is_there_is_told_after_what_is_wrong_with_the_inputs(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table, local = opposite(tmp_path / "dan.csv"), table_run(tmp_path / "local", algorithm__name="local")
    (tmp_path / "adapted" / "dan").mkdir(parents=True)
    for arguments, words in (
        ([run, "--data", "absent.csv"], "absent.csv: no such file"),
        ([tmp_path, "--data", table], "not a run's folder"),
        ([local, "--data", table], "local has no global model"),
        ([run, "--data", table], "adapted/dan: exists already; give another --name, or --out FOLDER\n"),
        ([run, "--data", table, "--out", "adapted"], "adapted: exists already; give another --out\n"),
    ):
        code, _, err = ask(capsys, "adapt", *arguments, "--name", "dan")
        assert (code, err.count("\n")) == (2, 1), err
        assert words in err, err


def test_a_device_too_small_to_hold_anything_out(run, tmp_path, capsys):
    (tmp_path / "tiny.csv").write_text("height,width,kind\n190,0.42,cat\n150,0.38,\n")
    code, out, err = ask(capsys, "adapt", run, "--data", tmp_path / "tiny.csv", "--out", tmp_path / "new")
    assert (code, err) == (0, "")
    assert "the gain is not known" in out


def test_a_full_disk_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    from fedcpsl.errors import RunError
    from fedcpsl.export import adaptation

    def full(*_):
        raise RunError("models.safetensors: cannot be written: No space left on device")

    monkeypatch.setattr(adaptation, "save_models", full)
    table = opposite(tmp_path / "dan.csv")
    code, _, err = ask(capsys, "adapt", run, "--data", table, "--out", tmp_path / "new")
    assert code == 1
    assert "No space left" in err
    assert [path.name for path in tmp_path.iterdir()] == ["dan.csv"]


def test_interval_of_a_gain_by_hand():
    """3 of 3 better: (3/5) +- 1.96 sqrt(4/5 - 9/25) / sqrt(5) = 0.6 +- 0.5814; 5 better, 5 worse: 0 +- 0.5417."""
    assert paired_interval(3, 0, 3) == pytest.approx((0.0186, 1.0), abs=1e-4)
    low, high = paired_interval(5, 5, 10)
    assert (low, high) == pytest.approx((-0.5417, 0.5417), abs=1e-3)
    assert paired_interval(0, 0, 10)[0] < 0 < paired_interval(0, 0, 10)[1]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_interval_of_a_gain(better, worse, level):
    """It turns with its sign, lies within -1 and 1, and is wider the fewer the samples."""
    count = better + worse + level + 1
    low, high = paired_interval(better, worse, count)
    assert paired_interval(worse, better, count) == pytest.approx((-high, -low))
    assert -1 <= low <= high <= 1
    many = paired_interval(10 * better, 10 * worse, 10 * count)
    assert many[1] - many[0] <= high - low


def test_it_says_when_it_cannot_know(run, tmp_path, capsys):
    """A handful of samples held out tell nothing; none at all is said too."""
    few = write_table(tmp_path / "few.csv", rows=16, seed=8, phones=("dan",), unlabelled=0.0)
    said = ask(capsys, "adapt", run, "--data", few, "--out", tmp_path / "few", "--rounds", "1")[1]
    assert "held out:" in said
    assert "(95 % interval " in said
    assert "whether that is a gain cannot be known from 3 samples" in said
    blank = tmp_path / "blank.csv"
    blank.write_text("height,width,kind\n" + "\n".join(f"{160 + i},0.4," for i in range(9)) + "\n170,0.41,cat\n")
    said = ask(capsys, "adapt", run, "--data", blank, "--out", tmp_path / "blank", "--rounds", "1")
    assert "the gain is not known" in said[1] + said[2]


def test_a_new_device_may_lack_labels_and_words_and_have_what_was_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)

    def table(name, rows, colours, labels):
        height = rng.normal(size=rows)
        kind = np.where(height > 0, "cat", "dog") if labels else np.full(rows, "")
        cells = zip(range(rows), height, rng.choice(["ann", "bob"], rows), rng.choice(colours, rows), kind, strict=True)
        lines = [f"{i},{h:.3f},{phone},{colour},{k}" for i, h, phone, colour, k in cells]
        (tmp_path / name).write_text("\n".join(["row,height,phone,colour,kind", *lines]) + "\n")

    table("mine.csv", 80, ["red", "blue"], labels=True)
    own = {"data__file": "mine.csv", "data__label": "kind", "data__device_column": "phone", "data__drop": "#1"}
    make_run(tmp_path / "run", **own)
    table("red.csv", 30, ["red"], labels=True)  # has the column that was left out, and no row that is blue
    code, out, err = ask(capsys, "adapt", "run", "--data", "red.csv", "--name", "red")
    assert (code, err) == (0, ""), err
    assert "samples held out" in out
    table("empty.csv", 30, ["red", "blue"], labels=False)
    lines = (tmp_path / "empty.csv").read_text().splitlines()
    (tmp_path / "none.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    for name in ("empty", "none"):
        code, out, err = ask(capsys, "adapt", "run", "--data", f"{name}.csv", "--name", name)
        assert code == 0, err
        assert "no labelled sample could be held out" in out
        assert ask(capsys, "predict", f"adapted/{name}", "red.csv", "--device", name)[0] == 0
