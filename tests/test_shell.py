"""The command line in a shell: completion, narrow terminals, pipes, JSON, exit codes."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedcpsl.algorithms import all_algorithms
from fedcpsl.cli import completion, parser, report, run_command
from fedcpsl.cli.completion import SCRIPTS, describe
from fedcpsl.config import setting
from fedcpsl.data.sources import DATASETS
from fedcpsl.models import NAMES
from fedcpsl.runs.study import known_studies

from .command import QUICK

pytest.importorskip("termios", reason="terminals of this kind are POSIX")

from .terminal import Terminal, seen_in_terminal

ROOT = Path(__file__).parents[1]
VECTOR = Path(__file__).parent / "vectors" / "fedcpsl.npz"
ANSI, COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]"), re.compile(r"\x1b\[(\d+;)*(3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")
INTERACTIVE = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        "bind 'set show-all-if-ambiguous on'; bind 'set page-completions off'; bind 'set completion-query-items 0'; ",
    ),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit && compinit -u -D; LISTMAX=1000; "),
}
ASKED = [
    ("ru", ["run"]),
    ("run --alg", ["--algorithm"]),
    ("run --algorithm ", ["fedcpsl", "apfl", "local-pseudo"]),
    ("run --dataset cif", ["cifar10"]),
    ("run --partition dir", ["dirichlet"]),
    ("compare --algorithms fedcpsl,sca", ["fedcpsl,scaffold"]),
    ("compare --algorithms fedcpsl2,rel", ["fedcpsl2,related"]),
    ("run --set work.un", ["work.unit="]),
    ("paper momen", ["momentum"]),
    ("federation dem", ["demo"]),
    ("completion fi", ["fish"]),
    ("run min", ["mine.toml"]),
    ("show runs-of", ["runs-of-mine/"]),
]


def needs(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian: apt-get install {shell})")


@pytest.fixture
def folder(tmp_path):
    for shell in ("bash", "zsh", "fish"):
        (tmp_path / f"fedcpsl.{shell}").write_text(SCRIPTS[shell](describe(parser())))
    (tmp_path / "mine.toml").touch()
    (tmp_path / "runs-of-mine").mkdir()
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_what_is_typed(shell, folder):
    needs(shell)
    command, settings = INTERACTIVE[shell]
    terminal = Terminal(*command, cwd=folder, env={"TERM": "dumb"})
    try:
        terminal.type(f"{settings}source ./fedcpsl.{shell}; PS1='rea''dy> '\n")
        assert "ready> " in terminal.read_until(lambda text: "ready> " in text)
        for line, expected in ASKED:
            terminal.type(f"fedcpsl {line}\t")
            seen = terminal.read_until(lambda text, words=expected: all(word in text for word in words), 60)
            assert all(word in seen for word in expected), (line, seen)
            terminal.type("\x15")  # away with the line
            time.sleep(0.1)
            terminal.read_until(lambda _: False, 0.1)
    finally:
        terminal.close()


def test_fish_completes_what_is_typed(folder):
    needs("fish")
    asked = "; ".join(f"echo '== {line}'; complete -C 'fedcpsl {line}'" for line, _ in ASKED)
    script = f"source fedcpsl.fish; {asked}"
    done = subprocess.run(["fish", "--no-config", "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.stderr == ""
    answers = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    for line, expected in ASKED:
        given = [answer.split("\t")[0] for answer in answers[line].splitlines()]
        assert set(expected) <= set(given), line
        assert all(word.startswith(line.split()[-1]) for word in given if not line.endswith(" ")), line


def test_every_option_is_completed_and_every_name_is_known():
    top = describe(parser())
    every = [top, *top.commands, *(nested for command in top.commands for nested in command.commands)]
    of = {(c.path[-1], flag): o.value for c in every for o in c.options for flag in o.flags}
    assert set(of["run", "--algorithm"].names) == set(all_algorithms())
    assert set(of["run", "--dataset"].names) == set(DATASETS)
    assert set(of["run", "--model"].names) == {"auto", *NAMES}
    assert set(next(c for c in every if c.path[-1] == "paper").arguments.names) == {*known_studies(), "all", "edge"}
    assert of["run", "--dry-run"] is None
    assert of["run", "--out"].folders
    for name in completion.setting_names():
        setting(*name.split("."))
        assert all(setting(*name.split(".")).metadata["test"](c) for c in setting(*name.split(".")).metadata["choices"]
                   if c not in ("true", "false"))  # fmt: skip
    for shell in ("bash", "zsh", "fish"):
        script = SCRIPTS[shell](top)
        assert all(flag.lstrip("-") in script for _, flag in of)


@pytest.mark.parametrize("command", [["completion", "bash"], ["doctor", "--help"], ["--help"]])
def test_quick_commands_import_nothing_heavy(command):
    code = (
        "import sys; from fedcpsl.cli import run_command\n"
        f"try: run_command({command})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fedcpsl" in done.stdout


def test_a_shell_that_we_do_not_know(capsys):
    assert run_command(["completion", "tcsh"]) == 2
    assert "choose from" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run `a`, and a comparison `c` whose JSON is in c.json."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        one = [*QUICK, "--set", "run.processes=1"]
        assert run_command(["run", *one, "--out", "a"]) == 0
        with (folder / "c.json").open("w") as file:
            patch.setattr(sys, "stdout", file)
            assert (
                run_command(["compare", *one, "--algorithms", "fedcpsl,apfl", "--seeds", "2", "--out", "c", "--json"])
                == 0
            )
    return folder


def shown(arguments, capsys):
    assert run_command(arguments) == 0
    text = capsys.readouterr().out
    assert not ANSI.search(text)
    assert "…" not in text
    return text


TABLES = [["show", "a"], ["show", "c"], ["data", "--devices", "4"], ["run", "--dry-run", *QUICK]]


@pytest.mark.parametrize("arguments", TABLES, ids=" ".join)
def test_nothing_is_cut_in_a_pipe_or_in_few_columns(arguments, finished, capsys, monkeypatch):
    monkeypatch.chdir(finished)
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = shown(arguments, capsys)
    numbers = re.findall(r"\d+\.\d\d\b", wide)
    for columns in (100, 60, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        narrow = shown(arguments, capsys)
        assert sorted(re.findall(r"\d+\.\d\d\b", narrow)) == sorted(numbers)
        printed = [line for line in narrow.splitlines() if "│" in line or ": " in line]
        assert all(len(line.rstrip()) <= columns for line in printed if "local steps, " not in line)
    if arguments[0] == "show":
        assert len(numbers) >= 4


def test_a_run_in_a_narrow_terminal_without_colours(tmp_path):
    command = [sys.executable, "-m", "fedcpsl", "run", *QUICK, "--set", "run.processes=1", "--out", "a"]
    seen, code = seen_in_terminal(*command, cwd=tmp_path, columns=40, env={"NO_COLOR": "1"})
    assert code == 0, seen
    assert not COLOURS.search(seen)
    plain = ANSI.sub("", seen)
    assert "…" not in plain
    assert "round 3/3" in plain  # the bar
    assert "std over devices: " in plain
    lines = re.split(r"[\r\n]+", plain)
    assert all(len(line) <= 40 for line in lines if not line.startswith(("report", "results")))


def test_json_is_all_there_is_on_stdout(finished, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(finished)
    compared = json.loads((finished / "c.json").read_text())
    assert [case["name"] for case in compared["cases"]] == ["fedcpsl", "apfl"]
    assert run_command(["show", "c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compared
    assert run_command(["show", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 3
    assert run_command(["compare", "--resume", "c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compared
    assert run_command(["verify", str(VECTOR), "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["exact"] is True
    assert {each["executor"] for each in verified["replays"]} == {"sequential", "vectorised"}
    with np.load(VECTOR) as file:
        content = dict(file)
    content["out/round3/device2/nu"] = content["out/round3/device2/nu"] + 1e-6
    np.savez(tmp_path / "wrong.npz", **content)
    assert run_command(["verify", str(tmp_path / "wrong.npz"), "--json"]) == 1
    verified = json.loads(capsys.readouterr().out)
    assert verified["exact"] is False
    assert "nu differs by 1e-06" in verified["replays"][0]["first_difference"]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (None, 0, ""),
        (MemoryError(), 1, "not enough memory"),
        (KeyboardInterrupt(), 130, "stopped at once"),
        (BrokenPipeError(), 0, None),
    ],
)
def test_exit_codes(raised, code, said, monkeypatch, capsys):
    def do(_):
        if raised:
            raise raised

    monkeypatch.setattr(report, "print_results", do)
    if said is None:  # closing it is how a reader that went away is not written to again
        monkeypatch.setattr(sys, "stderr", type("Gone", (), {"close": lambda _: None})())
    assert run_command(["show", "a"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (said or "") in printed.err
    assert printed.err.count("\n") <= 1


def test_exit_codes_of_bad_input_and_of_help(capsys):
    assert run_command(["show", "nowhere"]) == 2
    assert run_command(["shwo"]) == 2
    assert run_command([]) == 2
    assert capsys.readouterr().err.count("\n") == 3
    with pytest.raises(SystemExit) as left:
        run_command(["--help"])
    assert left.value.code == 0


def test_the_page_of_the_command_line_names_every_command_and_code():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = {command.path[-1] for command in describe(parser()).commands}
    assert set(re.findall(r"^\| `([\w-]+)[^|]*\|", page, re.M)) >= commands
    assert set(re.findall(r"^\| (\d+) \|", page, re.M)) == {"0", "1", "2", "130", "143"}
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in set(re.findall(r"FEDCPSL_\w+", source)) | {"NO_COLOR", "COLUMNS"}:
        assert f"`{name}`" in page, name


def test_settings_have_defaults_among_their_choices():
    for name in completion.setting_names():
        section, key = name.split(".")
        declared = setting(section, key)
        choices = declared.metadata["choices"]
        assert not choices or str(declared.default).lower() in choices


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [("show", "a"), ("completion", "bash")])
def test_an_output_that_is_full_or_closed_is_no_traceback(finished, command):
    program = [sys.executable, "-m", "fedcpsl", *command]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(program, cwd=finished, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("fedcpsl: ")
    assert done.stderr.count("\n") == 1
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *program], cwd=finished, stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
