"""Models as files: they answer as the run does, need no pickle, and are refused once changed."""

import io
import json
import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedcpsl.cli import run_command
from fedcpsl.evaluation import evaluate
from fedcpsl.export import model_files
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint
from fedcpsl.runs.experiment import build
from fedcpsl.runs.folder import read_run_config
from tests.command import fedcpsl
from tests.small_runs import answers_of, array_run, ask, make_run, table_run

FORMATS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
OWN = '''
import torch
from torch import nn


class Own(nn.Module):
    """Frozen features, a buffer, dropout, and a parameter under two names."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.features = nn.Linear(inputs, inputs)
        self.features.requires_grad_(False)
        self.register_buffer("offset", torch.randn(inputs))
        self.first, self.drop = nn.Linear(inputs, inputs), nn.Dropout(0.5)
        self.again = self.first
        self.last = nn.Linear(inputs, classes)

    def forward(self, x):
        x = torch.tanh(self.features(x) + self.offset)
        return self.last(self.drop(self.again(torch.relu(self.first(x)))))


class TwoFaced(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (0.5 if torch.compiler.is_exporting() else 1)


class Choosy(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else 2 * x)


def own(shape, classes):
    return Own(*shape, classes)


def two_faced(shape, classes):
    return TwoFaced(*shape, classes)


def choosy(shape, classes):
    return Choosy(*shape, classes)
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return table_run(tmp_path_factory.mktemp("table") / "run")


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The model of bob in every format, the first as a user's command writes it."""
    folder = tmp_path_factory.mktemp("exported")
    done = fedcpsl("export", run, "--device", "bob", "--out", "bob.onnx", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model    bob.onnx\nchecked  ")
    for suffix in (".pt2", ".safetensors"):
        assert run_command(["export", str(run), "--device", "bob", "--out", str(folder / f"bob{suffix}")]) == 0
    return folder


def own_models(folder, monkeypatch):
    (folder / "ownmodels.py").write_text(OWN)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "ownmodels", raising=False)


def test_a_device_called_global_is_not_taken_for_the_global_model(run, tmp_path, capsys):
    odd = tmp_path / "odd"
    shutil.copytree(run, odd)
    table = (odd / "devices.csv").read_text()
    (odd / "devices.csv").write_text(table.replace("bob", "global"))
    code, _, err = ask(capsys, "export", odd, "--device", "global", "--format", "safetensors")
    assert code == 2
    assert "is a device" in err


def test_a_file_answers_as_the_run_evaluates(run, exported, tmp_path, capsys):
    """The test samples of bob as they stand in the table, and the predictions behind the run's own metrics."""
    experiment = build(read_run_config(run))
    state = load_checkpoint(checkpoints(run)[-1], experiment.setup)
    rows = experiment.setup.data.test.rows(1)
    expected = evaluate(state).predictions.personal[rows].exp().numpy()
    federation = experiment.federation
    raw = federation.x[(federation.device == 1) & (federation.role == 2)]
    np.save(tmp_path / "raw.npy", raw)
    for suffix in FORMATS.values():
        code, out, err = ask(capsys, "predict", exported / f"bob{suffix}", tmp_path / "raw.npy")
        assert (code, err) == (0, "")
        assert np.abs(answers_of(out) - expected).max() < 1e-5


def test_other_programs_can_use_the_files(exported):
    """Without fedcpsl: raw rows in, probabilities out, one or many at a time, and the manifest where it belongs."""
    import onnx
    import onnxruntime

    onnx.checker.check_model(onnx.load(exported / "bob.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(str(exported / "bob.onnx"))
    manifest = json.loads(session.get_modelmeta().custom_metadata_map["fedcpsl"])
    assert manifest["device"] == "bob"
    assert manifest["number"] == 1
    assert manifest["classes"] == ["cat", "dog"]
    assert manifest["features"] == ["height", "width"]
    assert manifest["input_shape"] == [2]
    assert manifest["beta"] == 0.75
    assert manifest["algorithm"] == "fedcpsl"
    assert manifest["config"]["work"]["rounds"] == 2
    assert manifest["config"]["data"]["file"] == "mine.csv"
    assert len(manifest["scaling"]["shift"]) == 2
    assert len(manifest["sha256"]) == len(manifest["data_sha256"]) == 64
    extra = {"fedcpsl.json": ""}
    program = torch.export.load(exported / "bob.pt2", extra_files=extra).module()
    assert json.loads(extra["fedcpsl.json"])["device"] == "bob"
    for count in (1, 7):
        x = np.tile(np.float32([170, 0.4]), (count, 1))
        (answers,) = session.run(None, {"samples": x})
        assert answers.shape == (count, 2)
        assert np.allclose(answers.sum(1), 1)
        assert np.allclose(answers, program(torch.from_numpy(x)).numpy(), atol=1e-6)


def test_nothing_in_the_files_is_a_pickle_or_names_this_machine(exported, run):
    with zipfile.ZipFile(exported / "bob.pt2") as archive:
        pieces = [archive.read(name) for name in archive.namelist()]
    assert not any(piece.startswith((b"PK", b"\x80\x02")) for piece in pieces)
    for suffix in FORMATS.values():
        content = (exported / f"bob{suffix}").read_bytes()
        assert str(run.parent).encode() not in content
        assert b"site-packages" not in content
        assert b"src/fedcpsl" not in content


@pytest.mark.parametrize("suffix", FORMATS.values())
def test_a_file_that_was_changed_or_cut_is_refused(exported, suffix, tmp_path, capsys):
    content = (exported / f"bob{suffix}").read_bytes()
    np.save(tmp_path / "raw.npy", np.zeros((1, 2)))
    path = tmp_path / f"bad{suffix}"
    renamed = content.replace(b"cat", b"cow")
    bias = load_file(exported / "bob.safetensors")["localized.3.bias"].numpy().tobytes()
    places = [content.index(bias), content.rindex(b"0.75"), content.index(b"1")]  # a weight, beta, and wherever
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
    for bad in (b"", content[:100], content[:-100], content[: len(content) // 2], renamed, content + b"\0", *flipped):
        path.write_bytes(bad)
        code, out, err = ask(capsys, "predict", path, tmp_path / "raw.npy")
        assert (code, out, err.count("\n")) == (2, "", 1), bad[:40]
        assert err.startswith(f"fedcpsl: {path}: ")


def test_a_pickle_in_a_pt2_is_never_loaded(exported, tmp_path, capsys):
    """A file with a right checksum can still be an attack: one whose weights it calls a pickle."""
    from fedcpsl.export.model_files import _members, _members_of, read_torch
    from fedcpsl.export.model_manifest import with_checksum

    members = _members_of((exported / "bob.pt2").read_bytes(), tmp_path)
    manifest = read_torch((exported / "bob.pt2").read_bytes(), tmp_path).manifest
    config = "data/weights/model_weights_config.json"
    members[config] = members[config].replace(b'"use_pickle": false', b'"use_pickle": true')
    members["extra/fedcpsl.json"] = with_checksum(manifest, _members(members)).encode()
    attack = io.BytesIO()
    with zipfile.ZipFile(attack, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    (tmp_path / "attack.pt2").write_bytes(attack.getvalue())
    np.save(tmp_path / "raw.npy", np.zeros((1, 2)))
    code, _, err = ask(capsys, "predict", tmp_path / "attack.pt2", tmp_path / "raw.npy")
    assert code == 2
    assert "pickle, which is never loaded" in err


def test_a_failed_check_leaves_no_file(tmp_path, capsys, monkeypatch):
    own_models(tmp_path, monkeypatch)
    x = np.random.default_rng(0).normal(size=(36, 4))
    run = array_run(tmp_path / "run", x, model__name="ownmodels:two_faced")
    code, out, err = ask(capsys, "export", run, "--device", "1", "--format", "torch")
    assert (code, out) == (1, "")
    assert "not written: the exported model's probabilities are" in err
    assert not list(run.glob("*device-1*"))


def test_a_network_that_is_no_graph_is_refused_by_one_line(tmp_path, capsys, monkeypatch):
    own_models(tmp_path, monkeypatch)
    x = np.random.default_rng(0).normal(size=(36, 4))
    run = array_run(tmp_path / "run", x, model__name="ownmodels:choosy")
    code, out, err = ask(capsys, "export", run, "--device", "1", "--format", "torch")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be exported as a program" in err
    assert not list(run.glob("*device-1*"))
    assert ask(capsys, "export", run, "--device", "1", "--format", "safetensors")[0] == 0


def test_a_network_of_ones_own(tmp_path, capsys, monkeypatch):
    """In every format, with what is frozen in it as it was; its code is imported only where the user says so."""
    own_models(tmp_path, monkeypatch)
    x = np.random.default_rng(0).normal(3, 2, size=(36, 4)).astype(np.float32)
    run = array_run(tmp_path / "run", x, model__name="ownmodels:own", algorithm__eta=0.5)
    np.save("raw.npy", x)
    monkeypatch.setattr(torch, "manual_seed", lambda _: None)  # what is frozen comes from the run, not from the seed
    code, expected, _ = ask(capsys, "predict", run, "--device", "2", "raw.npy")
    assert code == 0
    for kind, suffix in FORMATS.items():
        assert ask(capsys, "export", run, "--device", "2", "--format", kind)[0] == 0
        path = run / f"device-2{suffix}"
        code, out, err = ask(capsys, "predict", path, "raw.npy")
        if kind != "onnx":
            assert (code, out) == (2, "")
            assert "give --model ownmodels:own to import it" in err
            code, out, err = ask(capsys, "predict", path, "raw.npy", "--model", "ownmodels:own")
        assert (code, err) == (0, "")
        assert np.abs(answers_of(out) - answers_of(expected)).max() < 1e-5


@pytest.mark.parametrize(
    ("model", "shape", "kind"),
    [
        ("cnn", (1, 16, 16), "onnx"),
        ("resnet8", (3, 8, 8), "torch"),
        ("cnn1d", (2, 20), "onnx"),
        ("logistic", (5,), "torch"),
    ],
)
def test_every_network(model, shape, kind, tmp_path, capsys):
    """Bytes for images; `export` itself compares the file with the run."""
    x = np.random.default_rng(0).integers(0, 255, (18, *shape)).astype(np.uint8)
    run = array_run(tmp_path / "run", x, model__name=model, work__rounds=1)
    code, out, err = ask(capsys, "export", run, "--device", "0", "--format", kind)
    assert (code, err) == (0, "")
    np.save(tmp_path / "x.npy", x)
    answers = [ask(capsys, "predict", run / name, tmp_path / "x.npy", "--device", "0") for name in ("", out.split()[1])]
    assert np.abs(answers_of(answers[0][1]) - answers_of(answers[1][1])).max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, {"general", "localized"}),
        ({"algorithm__name": "fedavg"}, {"general"}),
        ({"algorithm__name": "local"}, {"localized"}),
        ({"work__two_phase": True, "work__personal_rounds": 1, "run__dtype": "float64"}, {"general", "localized"}),
        ({"algorithm__beta": [0.1, 0.2, 0.3], "data__normalise": "none"}, {"general", "localized"}),
    ],
)
def test_every_kind_of_run(settings, parts, tmp_path, capsys):
    from safetensors import safe_open

    run = table_run(tmp_path / "run", **settings)
    assert ask(capsys, "export", run, "--device", "1", "--out", tmp_path / "m.safetensors")[0] == 0
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert {name.split(".")[0] for name in file.keys()} - {"beta", "shift", "scale"} == parts  # noqa: SIM118
        if "algorithm__beta" in settings:
            assert file.get_tensor("beta") == pytest.approx(0.2)
            assert "shift" not in file.keys()  # noqa: SIM118
    code, _, err = ask(capsys, "export", run, "--device", "global", "--format", "safetensors")
    assert (code, (run / "global.safetensors").exists()) == ((0, True) if "general" in parts else (2, False))
    assert "general" in parts or "has no global model" in err


def test_the_global_model(run, tmp_path, capsys):
    np.save(tmp_path / "raw.npy", np.random.default_rng(0).normal((170, 0.4), (10, 0.01), (5, 2)))
    assert ask(capsys, "export", run, "--device", "global", "--out", tmp_path / "g.safetensors")[0] == 0
    of_file, of_run, of_bob = (
        answers_of(ask(capsys, "predict", *model, tmp_path / "raw.npy")[1])
        for model in ([tmp_path / "g.safetensors"], [run, "--device", "global"], [run, "--device", "bob"])
    )
    assert np.allclose(of_file, of_run, atol=1e-5)
    assert not np.allclose(of_file, of_bob, atol=1e-3)


def test_what_cannot_be_exported(run, exported, tmp_path, capsys, monkeypatch):
    """One line each, exit code 2, and no file."""
    kept_metrics = table_run(tmp_path / "metrics", run__keep="metrics")
    unknown = tmp_path / "none"
    unknown.mkdir()
    for arguments, words in (
        ([kept_metrics, "--device", "bob"], 'run.keep = "metrics"'),
        ([run], "which device's model? Give --device NAME"),
        ([run, "--device", "bo"], "did you mean 'bob'?"),
        ([run, "--device", "7"], "no such device"),
        ([unknown, "--device", "7"], "not a run's folder"),
        ([run, "--device", "bob", "--out", exported / "bob.onnx"], "exists already"),
        ([run, "--device", "bob", "--out", tmp_path / "no" / "bob.onnx"], "no such folder"),
        ([run, "--device", "bob", "--out", tmp_path / "bob.pickle"], "give a name that ends with .onnx"),
        ([run, "--device", "bob", "--out", tmp_path / "bob.pt2", "--format", "onnx"], "ends with .onnx"),
    ):
        code, out, err = ask(capsys, "export", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert words in err
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, _, err = ask(capsys, "export", run, "--device", "bob", "--out", tmp_path / "bob.onnx")
    assert code == 2
    assert "pip install 'fedcpsl[onnx]'" in err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    np.save(tmp_path / "raw.npy", np.zeros((1, 2)))
    code, _, err = ask(capsys, "predict", exported / "bob.onnx", tmp_path / "raw.npy")
    assert code == 2
    assert "pip install 'fedcpsl[onnx]'" in err
    assert not list(tmp_path.glob("*bob*"))


def test_damaged_and_unfinished_runs(tmp_path, capsys):
    run = table_run(tmp_path / "run")
    models = run / "models.safetensors"
    content = models.read_bytes()
    models.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = ask(capsys, "export", run, "--device", "bob")
    assert code == 1
    assert "corrupt" in err
    assert "run it again" in err
    models.unlink()
    (run / "devices.csv").unlink()
    code, _, err = ask(capsys, "export", run, "--device", "bob")
    assert code == 2
    assert "not finished; resume with: fedcpsl run --resume" in err


def test_runs_of_many_devices_and_of_earlier_versions(tmp_path, capsys):
    """States of devices that were never active take no room, so there is no model either."""
    run = make_run(tmp_path / "many", data__dataset="synthetic", data__devices=40, work__rounds=1, model__name="mlp")
    active = [line.split(",") for line in (run / "devices.csv").read_text().splitlines()[1:]]
    names = {flag: next(row[1] for row in active if (row[4] == "0") is flag) for flag in (True, False)}
    assert ask(capsys, "export", run, "--device", names[False], "--format", "safetensors")[0] == 0
    code, _, err = ask(capsys, "export", run, "--device", names[True], "--format", "safetensors")
    assert code == 2
    assert "never been active" in err
    manifest = json.loads((run / "manifest.json").read_text())
    for name in ("class_names", "input_shape", "features", "sha256"):
        manifest.pop(name)
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert ask(capsys, "export", run, "--device", "global", "--format", "safetensors")[0] == 0
    manifest["split_sha256"] = "other"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert ask(capsys, "export", run, "--device", "global", "--out", tmp_path / "g.pt2")[0] == 2


def test_a_full_disk_leaves_no_file(run, tmp_path, capsys, monkeypatch):
    from pathlib import Path

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    code, _, err = ask(capsys, "export", run, "--device", "bob", "--out", tmp_path / "bob.safetensors")
    assert code == 1
    assert "No space left" in err
    assert list(tmp_path.iterdir()) == []


def test_the_tolerance_is_what_is_promised():
    assert model_files.TOLERANCE == 1e-5
