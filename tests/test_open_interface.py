"""Algorithms that own their states and settings: FedDyn, Ditto and FedAMP, wherever FedCPSL is."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import fedcpsl as package
from fedcpsl import config
from fedcpsl.algorithm import OPTIONAL
from fedcpsl.algorithms import all_algorithms, ditto, family, fedamp, feddyn, missing_names, misspelt_names
from fedcpsl.cli.options import algorithm_names, declared_settings
from fedcpsl.config import Config, with_settings
from fedcpsl.errors import InputError
from fedcpsl.federation.terms import terms_of
from fedcpsl.problem import Samples
from fedcpsl.runs.folder import read_run_config
from fedcpsl.settings import FAMILY
from fedcpsl.simulation import prepare
from fedcpsl.sklearn import FedCPSLClassifier
from fedcpsl.trees import bytes_of, leaves, map_tensors, named_leaves, rebuilt

from .command import fedcpsl
from .conftest import small_federation, small_model
from .small_runs import answers_of, ask, table_run, write_table
from .test_conformance import WORK, assert_equal, final, make

NEW = (
    "feddyn",
    "ditto",
    "fedamp",
    "fedcpsl2",
    "perfedavg-fo",
    "flexmatch",
    "semifed",
    "fedmatch",
    "afl",
    "drfa",
    "fednova",
    "pfedme",
)
FEW = ["--rounds", "2", "--set", "run.processes=1"]


def number(value):
    return torch.tensor(value, dtype=torch.float64)


# Numbers worked out by hand.


def test_feddyns_linear_term():
    """alpha (H + w - theta) = alpha (w - anchor), so the anchor is theta - H = 1 - 0.75 = 0.25."""
    setup = make("feddyn")
    one = torch.ones_like(setup.terms.method.network.initial)
    hyper = feddyn.Hyper(number(0.1), number(0.5))
    local = feddyn.begin(setup.terms.method, hyper, feddyn.Broadcast(one), feddyn.Device(0.75 * one))
    assert {value for leaf in local.anchor for value in leaf.flatten().tolist()} == {0.25}


def test_feddyns_server():
    """N = 4, two uploads that sum to (2, 4): Hbar = (1, 0) + (0.5, 1), theta = (0, 0) + (1, 2) + Hbar."""
    server = feddyn.Server(number([0.0, 0.0]), number([1.0, 0.0]))
    after = feddyn.apply(None, server, feddyn.Sum(number([2.0, 4.0]), number(2.0)), 4)
    assert after.mean_memory.tolist() == [1.5, 1.0]
    assert after.theta.tolist() == [2.5, 3.0]


def test_dittos_pull():
    """Where no sample counts, v <- 3 - eta_lc lam (3 - theta) = 3 - 0.1 2 (3 - 1) = 2.6; nothing pulls w."""
    setup = make("ditto")
    method, one = setup.terms.method, torch.ones_like(setup.terms.method.network.initial)
    hyper = ditto.Hyper(eta=number(0.3), eta_lc=number(0.1), lam=number(2.0))
    local = ditto.begin(method, hyper, ditto.Broadcast(one), ditto.Device(3 * one))
    none = Samples(number([[0.5] * 6]), number([[1.0, 0.0, 0.0]]), number([0.0]), number([0.0]))
    local = ditto.step(method, hyper, local, none)
    for leaf in local.models:
        assert leaf[0].flatten().tolist() == [1.0] * leaf[0].numel()
        assert leaf[1].flatten().tolist() == pytest.approx([2.6] * leaf[1].numel())


def test_fedamps_cloud_models():
    """|W_0 - W_1|^2 = 4: xi = (0.5/2) e^(-4/2) = 0.0338338, u_0 = xi (2, 0); device 2 was never counted."""
    models, counted = number([[0.0, 0.0], [2.0, 0.0], [50.0, 50.0]]), number([1.0, 1.0, 0.0])
    server = fedamp.Server(models, counted, number([0.25, 0.75, 0.0]))
    settings = fedamp.Settings(sigma=2.0, alpha=0.5)
    assert fedamp.cloud_models(settings, server, torch.tensor([0]))[0].tolist() == pytest.approx(
        [0.0676676, 0.0], abs=1e-6
    )
    # by angle: the only other one has the whole share, 1 - 0.4
    along = server._replace(models=number([[1.0, 0.0], [2.0, 0.0], [50.0, 50.0]]))
    by_angle = fedamp.Settings(attention="cosine", self_weight=0.4)
    assert fedamp.cloud_models(by_angle, along, torch.tensor([0]))[0].tolist() == pytest.approx([1.6, 0.0])
    assert fedamp.general_model(None, server).tolist() == [1.5, 0.0]
    nobody = server._replace(counted=number([0.0] * 3), omega=number([0.0] * 3))
    assert fedamp.cloud_models(by_angle, nobody, torch.tensor([1]))[0].tolist() == [2.0, 0.0]


# Settings.


def test_the_names_known_without_pytorch_are_the_familys():
    assert set(FAMILY) == set(family.VARIANTS)
    assert set(algorithm_names()) == set(all_algorithms())


@pytest.mark.parametrize("name", NEW)
def test_what_is_read_as_text_is_what_the_file_declares(name):
    kind = config.algorithm_settings(name)
    (declared,) = [settings for names, settings in declared_settings().items() if name in names]
    assert [each.name for each in declared] == [f.name for f in fields(kind)]
    assert all(each.help == f.metadata["help"] for each, f in zip(declared, fields(kind), strict=True))
    assert all(each.default == f.default for each, f in zip(declared, fields(kind), strict=True))


def test_what_two_algorithms_share_is_carried_over():
    begun = with_settings(Config(), {"algorithm.eta": 0.3, "algorithm.eta_lc": 0.4, "algorithm.beta": 0.5})
    other = with_settings(begun, {"algorithm.lam": 2.0, "algorithm.name": "ditto"}).algorithm
    assert other == ditto.Settings(eta=0.3, eta_lc=0.4, lam=2.0)
    assert with_settings(Config(algorithm=other), {"algorithm.name": "apfl"}).algorithm.eta_lc == 0.4


def test_what_was_not_chosen_is_each_algorithms_own_default():
    """FedCPSL's momentum is 0.8, FedNova's 0; `mean_steps` is no server step of pFedMe's."""
    assert with_settings(Config(), {"algorithm.name": "fednova"}).algorithm.gamma == 0
    assert with_settings(Config(), {"algorithm.name": "pfedme"}).algorithm.eta_g == 1
    chosen = with_settings(Config(), {"algorithm.gamma": 0.5})
    assert with_settings(chosen, {"algorithm.name": "fednova"}).algorithm.gamma == 0.5
    assert FedCPSLClassifier(algorithm="fednova")._config(3).algorithm.gamma == 0
    assert FedCPSLClassifier(algorithm="fednova", gamma=0.3)._config(3).algorithm.gamma == 0.3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"algorithm.name": "ditto", "algorithm.beta": 0.5}, "algorithm.beta: ditto has no such setting"),
        ({"algorithm.lam": 0.5}, "algorithm.lam: fedcpsl has no such setting"),
        ({"algorithm.name": "ditto", "algorithm.lam": -1}, "algorithm.lam = -1: give a number of at least 0"),
        ({"algorithm.sigmaa": 0.5}, "algorithm.sigmaa: no such setting; did you mean 'sigma'?"),
        ({"algorithm.name": "dito"}, "no such algorithm; did you mean 'ditto'?"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(values, words):
    with pytest.raises(InputError, match=re.escape(words)):
        with_settings(Config(), values)


def test_settings_of_another_file_are_refused():
    with pytest.raises(InputError, match=r"has settings of its own; give fedcpsl.algorithms.ditto.Settings"):
        prepare(small_federation(), small_model(), config.Algorithm(name="ditto"), WORK)
    with pytest.raises(InputError, match=r"own weight could be negative.*give at most sigma / \(N - 1\) = 25"):
        make("fedamp", alpha=30.0)
    with pytest.raises(InputError, match="feddyn has none"):
        make("feddyn", work=config.Work(personal_rounds=1))
    with pytest.raises(InputError, match="Ditto trains its own models in every round"):
        make("ditto", work=config.Work(personal_rounds=1, two_phase=True))


# Everywhere.


@pytest.mark.parametrize("name", NEW)
def test_it_runs_and_is_shown_and_goes_on(name, tmp_path, capsys):
    folder = tmp_path / "run"
    assert ask(capsys, "run", "--algorithm", name, *FEW, "--out", folder)[0] == 0
    assert type(read_run_config(folder).algorithm) is config.algorithm_settings(name)
    found = json.loads(ask(capsys, "show", folder, "--json")[1])
    assert found["algorithm"] == name
    again = tmp_path / "again"
    assert ask(capsys, "run", folder / "config.toml", "--out", again)[0] == 0
    assert (again / "devices.csv").read_text() == (folder / "devices.csv").read_text()
    assert ask(capsys, "report", folder, "--alone")[0] == 0


def test_comparisons_and_sweeps_know_their_settings(tmp_path, capsys):
    few = ["--seeds", "1", *FEW]
    words = ["--algorithms", "fedavg,ditto,feddyn,fedamp", "--set", "algorithm.lam=0.5", "--set", "algorithm.alpha=2"]
    assert ask(capsys, "compare", *words, *few, "--out", tmp_path / "c")[0] == 0
    chosen = {
        name: read_run_config(tmp_path / "c" / "runs" / f"{name}-seed0").algorithm for name in ("ditto", "feddyn")
    }
    assert (chosen["ditto"].lam, chosen["feddyn"].alpha) == (0.5, 2)
    assert ask(capsys, "sweep", "--algorithm", "ditto", "--grid", "lam=0,1", *few, "--out", tmp_path / "s")[0] == 0
    code, _, said = ask(capsys, "compare", "--algorithms", "fedavg,apfl", "--set", "algorithm.lam=1", *few)
    assert (code, "none of these algorithms has such a setting" in said) == (2, True)


def test_help_and_completion_know_them(tmp_path):
    said = fedcpsl("run", "--help", cwd=tmp_path).stdout
    assert "of ditto" in said
    assert "lam = 1.0" in said
    assert "algorithm.lam=" in fedcpsl("completion", "bash", cwd=tmp_path).stdout


@pytest.mark.parametrize("form", ["onnx", "safetensors", "torch"])
@pytest.mark.parametrize("name", NEW)
def test_a_file_answers_as_the_run_does(name, form, tmp_path, capsys):
    run = table_run(tmp_path / "run", algorithm__name=name, work__rounds=4)
    table = write_table(tmp_path / "new.csv", rows=20, seed=3)
    path = tmp_path / f"ann.{ {'onnx': 'onnx', 'safetensors': 'safetensors', 'torch': 'pt2'}[form] }"
    assert ask(capsys, "export", run, "--device", "ann", "--format", form, "--out", path)[0] == 0
    ours, theirs = (ask(capsys, "predict", *words)[1] for words in ((run, table, "--device", "ann"), (path, table)))
    assert np.allclose(answers_of(ours), answers_of(theirs), atol=1e-5)


def test_ditto_is_adapted_to_a_new_device(tmp_path, capsys):
    run = table_run(tmp_path / "run", algorithm__name="ditto", work__rounds=4)
    table = write_table(tmp_path / "dan.csv", rows=60, seed=5, phones=("dan",), unlabelled=0.0)
    text = table.read_text().replace("cat", "?").replace("dog", "cat").replace("?", "dog")
    table.write_text(text)
    code, said, complained = ask(
        capsys, "adapt", run, "--data", table, "--out", tmp_path / "dan", "--rounds", "40", "--json"
    )
    assert code == 0, complained
    assert json.loads(said)["gain"] > 0.3
    code, _, complained = ask(
        capsys, "adapt", table_run(tmp_path / "dyn" / "run", algorithm__name="feddyn"), "--data", table
    )
    assert (code, "feddyn has no personal rounds" in complained) == (2, True)


@pytest.mark.parametrize("name", NEW)
def test_the_classifier_takes_it(name):
    rng = np.random.default_rng(0)
    x, device = rng.normal(size=(60, 4)), np.arange(60) % 3
    y = (x[:, 0] > 0).astype(int)
    learner = FedCPSLClassifier(algorithm=name, rounds=30, hidden=(8,), random_state=0).fit(x, y, device=device)
    assert learner.score(x, y, device=device) > 0.8


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_personal_rounds_of_ditto_move_v_alone(executor):
    longer = config.Work(**{f.name: getattr(WORK, f.name) for f in fields(WORK)} | {"personal_rounds": 2})
    with_them, without = final(make("ditto", executor, work=longer)), final(make("ditto", executor))
    assert torch.equal(with_them.server.theta, without.server.theta)
    assert not torch.equal(with_them.devices.v, without.devices.v)
    assert_equal(
        with_them, final(make("ditto", "vectorised" if executor == "sequential" else "sequential", work=longer))
    )


def test_what_cannot_run_on_real_devices_says_why():
    with pytest.raises(InputError, match=r"give algorithm\.weighted = false"):
        terms_of(make("feddyn"))
    with pytest.raises(InputError, match=r"leave algorithm\.alpha and algorithm\.lam at auto"):
        terms_of(make("fedamp", alpha=3.0))


# The contract holds for callers too.


def test_a_sum_is_never_added_into_what_an_algorithm_returned(monkeypatch):
    """A contribution whose fields are one tensor: adding in place would count it twice."""
    monkeypatch.setattr(feddyn, "contribution", lambda _m, _h, upload, _w: feddyn.Sum(*[upload.delta] * 2))
    monkeypatch.setattr(feddyn, "apply", lambda _m, server, total, _n: server._replace(theta=server.theta + total[0]))
    twice = [final(make("feddyn", executor)) for executor in ("sequential", "vectorised")]
    assert_equal(*twice)


def test_trees():
    tree = feddyn.Local((number([1.0]), number([[2.0]])), (), number(3.0))
    assert [t.numel() for t in leaves(tree)] == [1, 1, 1]
    assert list(named_leaves(tree, "local")) == ["local.models.0", "local.models.1", "local.costs"]
    doubled = map_tensors(lambda t: 2 * t, tree)
    again = rebuilt(tree, leaves(doubled))
    assert isinstance(again, feddyn.Local)
    assert [t.sum().item() for t in leaves(again)] == [2.0, 4.0, 6.0]
    assert bytes_of(tree) == 24


def test_a_misspelt_optional_function_is_named():
    """Not a helper that the file itself calls; but also what a function was once called."""
    file = ModuleType("mine")
    lines = ["def relable(): ...", "def _recieve(): ...", "def step_sizes(): ...", "def partners(): ...", "reviw = 1"]
    lines += ["def prepare(): ...", "def commit(): return [lambda: partners()]", "def merge(): ..."]
    exec("\n".join(lines), vars(file))
    found = [("merge", "merged"), ("prepare", "prepare_visit"), ("relable", "relabel")]
    assert list(misspelt_names(file)) == found
    file.relabel = None
    assert list(misspelt_names(file)) == found[:2]
    for own, _ in all_algorithms().values():
        assert list(misspelt_names(own)) == []


def test_whatever_is_asked_for_is_known_to_be_optional():
    calls = [
        (path, call)
        for path in Path(package.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "optional"
    ]
    names = {call.args[1].value for _, call in calls if isinstance(call.args[1], ast.Constant)}
    assert len(names) > 20
    assert names <= OPTIONAL


def test_what_a_file_lacks_is_named():
    names = vars(ditto) | {"costs": None}
    assert missing_names(SimpleNamespace(**names)) == []
    del names["costs"], names["apply"]
    assert missing_names(SimpleNamespace(**names)) == ["costs", "apply"]
    assert missing_names(SimpleNamespace(**names, receive=None)) == ["costs"]
