"""What is meant where no algorithm is named: the default in something new, FedCPSL in a file that was saved."""

import tomllib
from pathlib import Path

import pytest

from fedcpsl.cli import parser, run_command
from fedcpsl.cli.compare import ALGORITHMS
from fedcpsl.cli.options import config_of
from fedcpsl.config import Config, new_config, read_config, sections_of
from fedcpsl.deployment import serve
from fedcpsl.deployment.demo import demo_job
from fedcpsl.deployment.job import explicit_job, job_terms, read_job
from fedcpsl.errors import InputError
from fedcpsl.runs.folder import read_run_config
from fedcpsl.runs.study import read_study
from fedcpsl.settings import DEFAULT_ALGORITHM, UNNAMED_ALGORITHM
from fedcpsl.sklearn import FedCPSLClassifier

ROOT = Path(__file__).parents[1]
JOB = """
[federation]  # a comment
shape = [6]
classes = ["a", "b"]
scale = [1.0, 2.0, 1.0, 1.0, 1.0, 0.5]
[model]
name = "mlp"
hidden = [5]
[work]
rounds = 2
"""
ETA = "[algorithm]\neta = 0.1\n"


def test_something_new_is_of_the_default_algorithm(tmp_path):
    assert new_config({}).algorithm.name == DEFAULT_ALGORITHM
    assert config_of(parser().parse_args(["run"])).algorithm.name == DEFAULT_ALGORITHM
    mine = tmp_path / "mine.toml"
    mine.write_text("[work]\nrounds = 3\n")
    assert config_of(parser().parse_args(["run", str(mine)])).algorithm.name == DEFAULT_ALGORITHM
    assert ALGORITHMS.split(",")[0] == DEFAULT_ALGORITHM
    assert FedCPSLClassifier().algorithm == DEFAULT_ALGORITHM
    job = read_job(demo_job(devices=2, rounds=1), "job.toml")
    assert job.config.algorithm.name == DEFAULT_ALGORITHM
    job_terms(job)  # has a step size


def test_a_saved_file_without_a_name_is_fedcpsl(tmp_path):
    (tmp_path / "config.toml").write_text("[algorithm]\nalpha_p = 0.1\n")
    kept = read_run_config(tmp_path).algorithm
    assert (kept.name, kept.alpha_p) == (UNNAMED_ALGORITHM, 0.1) == ("fedcpsl", 0.1)
    (tmp_path / "study.toml").write_text('title = "t"\nbases = { mine = "config.toml" }\n[rows.a]\nwork.rounds = 1\n')
    assert read_study(tmp_path / "study.toml").bases["mine"].algorithm.name == "fedcpsl"
    assert read_job(JOB, "job.toml").config.algorithm.name == "fedcpsl"
    assert Config().algorithm.name == "fedcpsl"


def test_every_shipped_run_names_its_algorithm():
    """In its base, or in each row of the study."""
    contents = {path: tomllib.loads(path.read_text()) for path in ROOT.glob("experiments/*/*.toml")}
    unnamed = {
        path: content["bases"].values()
        for path, content in contents.items()
        if not all("name" in row.get("algorithm", {}) for row in content["rows"].values())
    }
    bases = [path.parent / base for path, names in unnamed.items() for base in names]
    bases += ROOT.glob("experiments/*.toml")
    assert len(bases) > 8
    assert [path for path in bases if "algorithm.name" not in read_config(path)] == []


def test_settings_of_fedcpsl_need_its_name():
    with pytest.raises(InputError, match=r"fedcpsl2 has no such setting; fedcpsl has: give algorithm\.name"):
        new_config({"algorithm.alpha_p": 0.1}, "fedcpsl2")
    assert new_config({"algorithm.alpha_p": 0.1, "algorithm.name": "fedcpsl"}, "fedcpsl2").algorithm.alpha_p == 0.1


def test_an_explicit_job_leaves_nothing_to_the_defaults_of_its_reader():
    """Every setting of every section is in it; who reads it gets the same job, and the same text from it."""
    for given, name in ((JOB, "fedcpsl"), (JOB + ETA, "fedcpsl2"), (JOB + ETA, "ditto")):
        text = explicit_job(given, "job", name)
        content = tomllib.loads(text)
        job = read_job(text, "job")
        for section, settings in sections_of(job.config).items():
            assert set(content[section]) == set(settings)
        assert content["federation"] == tomllib.loads(JOB)["federation"]
        assert job.config.algorithm.name == name
        assert explicit_job(text, "job", "fedavg") == text
    assert explicit_job(JOB, "job") == explicit_job(JOB + '[algorithm]\nname = "fedcpsl"\n', "job", "fedavg")


def served(path, kept):
    return serve._keep_job(path, serve._job_to_serve(path, kept), kept.parent)


@pytest.mark.parametrize("default", ["fedcpsl", "fedcpsl2"])
def test_a_server_writes_down_the_algorithm_that_it_serves(default, tmp_path, monkeypatch):
    """A new folder has the default's name, also when the default becomes another; an old one stays FedCPSL's."""
    given, kept = tmp_path / "given.toml", tmp_path / "job.toml"
    given.write_text(JOB + ETA)
    monkeypatch.setattr(serve, "DEFAULT_ALGORITHM", default)
    job = served(given, kept)
    assert job.config.algorithm.name == default
    assert job.text == kept.read_text() == explicit_job(JOB + ETA, "job", default)
    monkeypatch.setattr(serve, "DEFAULT_ALGORITHM", "fedavg")
    assert served(given, kept).text == job.text
    given.write_text((JOB + ETA).replace("# a comment", ""))
    assert served(given, kept).text == job.text
    given.write_text(JOB + "[algorithm]\neta = 0.2\n")
    with pytest.raises(InputError, match="is another job than"):
        served(given, kept)
    kept.write_text(JOB + ETA)  # as servers kept it before
    given.write_text(JOB + ETA)
    old = served(given, kept)
    assert (old.text, old.config.algorithm.name) == (JOB + ETA, "fedcpsl")
    given.write_text(JOB + ETA.replace("eta", 'name = "fedcpsl2"\neta'))
    with pytest.raises(InputError, match="is another job than"):
        served(given, kept)


def test_a_server_asks_for_a_step_size(tmp_path):
    given = tmp_path / "job.toml"
    given.write_text(JOB + '[algorithm]\nname = "fedcpsl2"\n')
    with pytest.raises(InputError, match="a server has no samples to choose a step size with; give a number"):
        serve._job_to_serve(given, tmp_path / "kept.toml")
    assert not (tmp_path / "kept.toml").exists()


def test_a_dry_run_searches_nothing(tmp_path, monkeypatch, capsys):
    def search(*_):
        raise AssertionError

    monkeypatch.setattr("fedcpsl.runs.experiment.search_etas", search)
    monkeypatch.chdir(tmp_path)
    small = ["--devices", "4", "--rounds", "2", "--set", "run.processes=1", "--set", "run.executor=sequential"]
    assert run_command(["run", "--algorithm", "fedcpsl2", *small, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert 'eta = "search"' in said
    assert 'eta_lc = "auto"' in said
    assert "the step size will be searched first" in said
    assert run_command(["run", "--algorithm", "fedcpsl2", "--eta", "0.1", *small, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "eta = 0.1\n" in said
    assert "searched" not in said


def test_the_classifier_refuses_a_number_that_its_algorithm_has_not():
    with pytest.raises(InputError, match=r"alpha_p = 0\.1: fedcpsl2 has no such setting"):
        FedCPSLClassifier(algorithm="fedcpsl2", alpha_p=0.1)._config(2)
    assert FedCPSLClassifier(algorithm="fedcpsl2")._config(2).algorithm.beta == 0.5
    assert FedCPSLClassifier(algorithm="fedcpsl2", beta=0.75)._config(2).algorithm.beta == 0.75
    assert FedCPSLClassifier(algorithm="fedcpsl", alpha_p=0.1)._config(2).algorithm.alpha_p == 0.1
