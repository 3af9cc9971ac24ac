"""The command line, by running it."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from fedcpsl.cli import parser, run_command
from fedcpsl.cli.options import config_of
from fedcpsl.config import Config, parse_value, read_config, to_toml, with_settings

from .command import QUICK, fedcpsl

VECTORS = Path(__file__).parent / "vectors"


def test_run_show_and_what_is_written(tmp_path):
    done = fedcpsl("run", *QUICK, "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "personal model" in done.stdout
    assert "report.html" in done.stdout
    folder = tmp_path / "a"
    names = {p.name for p in folder.iterdir()}
    assert {"config.toml", "manifest.json", "metrics.jsonl", "checkpoints", "models.safetensors"} <= names
    assert {"devices.csv", "plots", "report.html"} <= names
    assert not list(folder.rglob("*.partial"))
    resolved = with_settings(Config(), read_config(folder / "config.toml"))
    assert "auto" not in str(resolved)
    kept = load_file(folder / "models.safetensors")
    assert (kept["input/shift"].item(), kept["input/scale"].item()) == (0, 16)  # the digits' own normalisation
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["layout"]["executor"] == "vectorised"
    assert len(manifest["split_sha256"]) == 64
    assert {"torch", "numpy", "python", "cpu", "git_commit", "seed"} <= set(manifest)

    shown = fedcpsl("show", "a", cwd=tmp_path)
    assert "fedcpsl on digits, 3 rounds" in shown.stdout
    final = json.loads(fedcpsl("show", "a", "--json", cwd=tmp_path).stdout)
    for model in ("personal", "global", "localized"):
        assert {"mean", "std", "worst_tenth"} == set(final[model])
        assert 0 <= final[model]["worst_tenth"] <= final[model]["mean"] <= 1
    assert final["rounds"] == 3
    assert final["finished"] is True
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    assert final["uplink_bytes"] == 4 * 16 + 3 * 2 * (4 * parameters + 8)
    assert final["downlink_bytes"] == 3 * 2 * 2 * 4 * parameters
    assert 0 <= final["pseudo_label_accuracy"] <= 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    both = json.loads(fedcpsl("show", "a", "a", "--json", cwd=tmp_path).stdout)
    assert [run["rounds"] for run in both] == [3, 3]

    again = fedcpsl("run", *QUICK, "--out", "a", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    config = fedcpsl("run", folder / "config.toml", "--out", "b", cwd=tmp_path)
    assert config.returncode == 0, config.stderr
    assert (tmp_path / "b" / "models.safetensors").read_bytes() == (folder / "models.safetensors").read_bytes()


def test_the_default_folder_is_named_by_time_algorithm_and_data(tmp_path):
    done = fedcpsl("run", *QUICK, "--algorithm", "apfl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-apfl-digits")


def test_a_baseline_without_a_personal_model(tmp_path):
    assert fedcpsl("run", *QUICK, "--algorithm", "fedavg", "--out", "a", cwd=tmp_path).returncode == 0
    final = json.loads(fedcpsl("show", "a", "--json", cwd=tmp_path).stdout)
    assert final["localized"] is None
    assert final["personal"] == final["global"]
    assert final["pseudo_label_accuracy"] is None


def test_own_data_with_a_beta_per_device_and_lost_uploads(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 90)
    x = rng.normal(size=(90, 4)) + y[:, None]
    np.savez(tmp_path / "mine.npz", x=x, y=np.where(rng.random(90) < 0.5, -1, y), device=np.repeat(["a", "b", "c"], 30))
    done = fedcpsl(
        "run",
        "--algorithm",
        "fedcpsl",
        "--data",
        "mine.npz",
        "--rounds",
        "4",
        "--beta",
        "0.1,0.5,1",
        "--loss-rate",
        ".5",
        "--out",
        "a",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    final = json.loads(fedcpsl("show", "a", "--json", cwd=tmp_path).stdout)
    assert final["lost_uploads"] > 0
    assert final["config"]["algorithm"]["beta"] == [0.1, 0.5, 1]
    assert final["config"]["data"]["labelled"] == 1
    assert (tmp_path / "a" / "devices.csv").read_text().splitlines()[1].startswith("0,a,")


def test_gaps_are_logged_on_request(tmp_path):
    assert fedcpsl("run", *QUICK, "--gaps", "--out", "a", cwd=tmp_path).returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        gaps = line["gaps"]
        assert gaps["total"] == pytest.approx(gaps["grad_norm_sq"] + 31 / 64 * gaps["label_change_sq"])
        assert gaps["personal"] > 0
    alone = fedcpsl("run", *QUICK, "--gaps", "--algorithm", "local", "--out", "b", cwd=tmp_path)
    assert (alone.returncode, "run.gaps = true: local has no server" in alone.stderr) == (2, True)


def test_devices_on_their_own_from_the_command_line(tmp_path):
    done = fedcpsl("run", *QUICK, "--algorithm", "local-pseudo", "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    final = json.loads(fedcpsl("show", "a", "--json", cwd=tmp_path).stdout)
    assert final["global"] is None
    assert (final["uplink_bytes"], final["downlink_bytes"]) == (0, 0)
    assert final["personal"] == final["localized"]


def test_personal_rounds_from_the_command_line_come_after_the_others(tmp_path):
    options = ["--set", "work.personal_rounds=2", "--set", "work.two_phase=true"]
    done = fedcpsl("run", *QUICK, *options, "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["localized"] is None for line in lines] == [True] * 4 + [False] * 2
    assert lines[3]["uplink_bytes"] == lines[5]["uplink_bytes"]


def test_dry_run_prints_and_writes_nothing(tmp_path):
    done = fedcpsl("run", "--dry-run", *QUICK, "--set", "work.unit=hlu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'unit = "hlu"' in done.stdout
    assert "4 devices, 10 classes" in done.stdout
    assert "local steps" in done.stdout
    assert list(tmp_path.iterdir()) == []


BAD_SETTINGS = [
    (["--beta", "1.2"], "algorithm.beta = 1.2: give a number from 0 to 1"),
    (["--beta", "0.1,0.2"], "algorithm.beta has 2 values for 4 devices"),
    (["--gamma", "1"], "algorithm.gamma = 1: give a number from 0 to 1, 1 excluded"),
    (["--active", "9"], "work.active = 9: there are only 4 devices"),
    (["--rounds", "0"], "work.rounds = 0: give a whole number of at least 1"),
    (["--rounds", "ten"], 'work.rounds = "ten"'),
    (["--eta", "-0.1"], "algorithm.eta = -0.1: give a number above 0"),
    (["--eta", "nan"], "algorithm.eta = nan"),
    (["--alpha-p", "inf"], "algorithm.alpha_p = inf"),
    (["--labelled", "0"], "data.labelled = 0"),
    (["--loss-rate", "1.5"], "work.loss_rate = 1.5"),
    (["--algorithm", "fedcspl"], "did you mean 'fedcpsl'"),
    (["--algorithm", "fedshvr"], "this algorithm needs every device"),
    (["--dataset", "digit"], "did you mean 'digits'"),
    (["--device", "cuda"], "what to compute on is given with --processor"),
    (["--algorithm", "qwerty"], "no such algorithm; known: afl, "),
    (["--processor", "tpu9"], "run.device = 'tpu9'"),
    (["--processor", "cuda"], "run.device = 'cuda'"),
    (["--executor", "fast"], 'one of "auto", "sequential", "vectorised"'),
    (["--set", "algorithm.bta=1"], "did you mean 'beta'"),
    (["--set", "algoritm.beta=1"], "did you mean 'algorithm'"),
    (["--set", "beta"], "SECTION.KEY=VALUE"),
    (["--set", "work.hlu=[5,1]"], "work.hlu = [5, 1]"),
    (["--set", "work.amount=1.5"], "work.amount = 1.5"),
    (["--set", "work.amount=true"], "work.amount = true"),
    (["--set", "work.joiners=4"], "work.joiners = 4"),
    (["--bta", "1"], "did you mean '--beta'"),
    (["--data", "nowhere.npz"], "nowhere.npz: no such file"),
    (["--data", "nowhere.csv"], "nowhere.csv: no such file"),
    (["--data", "mine.csv", "--dataset", "mnist"], "--dataset mnist: the samples are those of --data mine.csv; leave"),
    (["--data", "mine.csv", "--device-column", "phone"], "--devices 4: the devices are those of --device-column phone"),
    (["nowhere.toml"], "nowhere.toml: no such config file"),
    (["--modle", "mlp"], "did you mean '--model'"),
    (["--set", "model.name=torch.nn:Nothing"], "cannot be imported"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_SETTINGS, ids=lambda a: " ".join(a) if isinstance(a, list) else "")
def test_bad_settings_get_one_line_exit_2_and_nothing_written(arguments, words, tmp_path, monkeypatch, capsys):
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has cuda")
    monkeypatch.chdir(tmp_path)
    base = QUICK if arguments[0] not in ("--active", "--rounds") else ["--devices", "4", *QUICK[6:]]
    assert run_command(["run", *base, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words in printed.err
    assert list(tmp_path.iterdir()) == []


BAD_TOML = [
    ("[work\nrounds = 3", "not valid TOML"),
    ("rounds = 3", "put it under [work]"),
    ("[work]\nround = 3", "did you mean 'rounds'"),
    ("[wrk]\nrounds = 3", "did you mean 'work'"),
    ('[work]\nrounds = "3"', 'work.rounds = "3"'),
]


@pytest.mark.parametrize(("text", "words"), BAD_TOML)
def test_bad_toml_gets_one_line(text, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", "c.toml"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert words in printed.err
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a command: run, data, "),
        (["federation"], "give a command: demo, app; fedcpsl federation --help explains them"),
        (["rnu"], "rnu: no such command; did you mean 'run'?"),
        (["run", "mine.csv"], "mine.csv: not a config file (TOML); if it is your data, give --data mine.csv"),
    ],
)
def test_what_a_command_is_given_first(arguments, words, capsys):
    assert run_command(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert words in printed


def test_a_folder_where_a_config_is_expected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    assert run_command(["run", "a"]) == 2
    assert (
        capsys.readouterr().err == "fedcpsl: a: is a folder; give a config file, or --data a if it holds your images\n"
    )
    Path("a/config.toml").touch()
    assert run_command(["run", "a"]) == 2
    assert capsys.readouterr().err == "fedcpsl: a: is a folder; did you mean a/config.toml, or --resume a?\n"
    assert run_command(["doctor", "a"]) == 2
    assert capsys.readouterr().err == "fedcpsl: a: is a folder; did you mean a/config.toml?\n"


def test_what_a_config_says_beside_your_own_data_is_no_contradiction(tmp_path):
    """A run's own config.toml names every setting, the number of devices too."""
    (tmp_path / "c.toml").write_text('[data]\nfile = "mine.csv"\ndevice_column = "phone"\ndevices = 3\n')
    options = parser().parse_args(["run", str(tmp_path / "c.toml"), "--set", "data.dataset=own"])
    assert config_of(options).data.devices == 3
    shared = parser().parse_args(["run", str(tmp_path / "c.toml"), "--devices", "5", "--partition", "iid"])
    assert config_of(shared).data.devices == 5


def test_bad_input_as_a_user_sees_it(tmp_path):
    done = fedcpsl("run", "--beta", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert fedcpsl("show", "nothing", cwd=tmp_path).returncode == 2


def test_a_model_of_ones_own_and_one_that_does_not_fit(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def good(shape, classes):\n"
        "    return nn.Sequential(nn.Linear(shape[0], 5), nn.Dropout(.1), nn.Linear(5, classes))\n"
        "def bad(shape, classes): return nn.Linear(shape[0], classes + 1)\n"
    )
    good = fedcpsl("run", *QUICK, "--set", "model.name=mine:good", "--out", "a", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    bad = fedcpsl("run", *QUICK, "--set", "model.name=mine:bad", "--out", "b", cwd=tmp_path)
    assert bad.returncode == 2
    assert "[11] per sample where the data has 10 classes" in bad.stderr
    assert not (tmp_path / "b").exists()


def test_verify_passes_and_fails(tmp_path):
    good = VECTORS / "fedcpsl.npz"
    done = fedcpsl("verify", good, VECTORS / "apfl.npz", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sequential on cpu: exact" in done.stdout
    assert "vectorised on cpu: exact" in done.stdout
    assert "theta_lc" in done.stdout
    with np.load(good) as file:
        content = dict(file)
    content["out/round3/device2/nu"] = content["out/round3/device2/nu"] + 1e-6
    np.savez(tmp_path / "wrong.npz", **content)
    done = fedcpsl("verify", "wrong.npz", cwd=tmp_path)
    assert done.returncode == 1
    assert "first difference at round 3, device 2: nu differs by 1e-06" in done.stdout
    assert fedcpsl("verify", "nowhere.npz", cwd=tmp_path).returncode == 2
    meta = json.loads(str(content["meta"]))
    np.savez(tmp_path / "refused.npz", **content | {"meta": np.array(json.dumps(meta | {"gamma": 2.0}))})
    done = fedcpsl("verify", good, "refused.npz", cwd=tmp_path)
    assert done.returncode == 2
    assert "refused.npz: algorithm.gamma" in done.stderr


def test_help_answers_without_heavy_imports():
    code = (
        "import sys; from fedcpsl.cli import run_command\n"
        "try: run_command(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "momentum" in done.stdout


def test_every_setting_reads_back():
    config = with_settings(Config(), {"algorithm.beta": [0.5, 0.25], "data.file": 'a "b" \\ c', "work.active": 3})
    values = {f"{s}.{k}": v for s, content in tomllib.loads(to_toml(config)).items() for k, v in content.items()}
    assert with_settings(Config(), values) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".5", 0.5),
        ("1e-3", 0.001),
        ("3", 3),
        ("true", True),
        ("0.5,.25", [0.5, 0.25]),
        ("hlu", "hlu"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_values_are_read_as_typed(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)
