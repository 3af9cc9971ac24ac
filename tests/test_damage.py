"""A run's folder that was damaged: no other model, no history with holes, no traceback. One line names the file."""

import shutil
import subprocess
import sys

import pytest

from fedcpsl.cli import run_command
from fedcpsl.errors import printable
from fedcpsl.storage import new_folder
from tests.command import fedcpsl

QUICK = ["--rounds", "3", "--devices", "4", "--set", "run.processes=1", "--set", "run.checkpoint_seconds=0"]
QUICK += ["--set", "algorithm.name=fedcpsl"]
DAMAGES = {
    "empty": lambda _: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "flipped": lambda raw: raw[: len(raw) // 3] + bytes([raw[len(raw) // 3] ^ 0x10]) + raw[len(raw) // 3 + 1 :],
    "garbage": lambda _: b"\xff\xfe{[[[",
    "deep": lambda _: b"[" * 60_000,
    "huge numbers": lambda raw: raw.replace(b"3", b"9" * 400),
    "escapes": lambda raw: raw.replace(b"digits", b"di\\u001b[31mgits"),
}
FILES = ["config.toml", "manifest.json", "metrics.jsonl", "devices.csv", "confusion.csv", "split.json"]
COMMANDS = [["show", "d"], ["show", "d", "--json"], ["report", "d"], ["run", "--resume", "d"]]
COMMANDS += [["export", "d", "--device", "0", "--out", "x.safetensors"], ["report", "d", "--format", "csv"]]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    assert run_command(["run", *QUICK, "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_in_a_line(file, damage, base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "d")
    path = tmp_path / "d" / file
    raw = DAMAGES[damage](path.read_bytes())
    for command in COMMANDS:
        path.write_bytes(raw)
        (tmp_path / "x.safetensors").unlink(missing_ok=True)
        capsys.readouterr()
        code = run_command(command)
        printed = capsys.readouterr()
        assert code in (0, 1, 2), command
        assert "\x1b[31m" not in printed.out + printed.err
        if code:
            assert printed.err.count("\n") == 1, (command, printed.err)
            assert file in printed.err, (command, printed.err)


@pytest.fixture
def stopped(base, tmp_path):
    """A run that was killed after its second round."""
    folder = tmp_path / "stopped"
    shutil.copytree(base, folder)
    (folder / "checkpoints" / "round-0000003.safetensors").unlink()
    for name in ("devices.csv", "models.safetensors"):
        (folder / name).unlink()
    return folder


def test_it_goes_on_as_it_was(stopped, base, capsys):
    assert run_command(["run", "--resume", str(stopped)]) == 0, capsys.readouterr().err
    assert (stopped / "devices.csv").read_text() == (base / "devices.csv").read_text()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (
            "config.toml",
            lambda t: t.replace("beta = 0.75", "beta = 0.65"),
            "is not the config that the run was started",
        ),
        ("manifest.json", lambda t: t.replace('"seed": 0', '"seed": 1'), "damaged or changed by hand"),
        ("metrics.jsonl", lambda t: "".join(t.splitlines(True)[1:]), "not what it was at the last checkpoint"),
        ("metrics.jsonl", lambda t: t.replace('"round": 1', '"round": 7'), "not what it was at the last checkpoint"),
        ("metrics.jsonl", lambda t: t[: len(t) // 3], "not what it was at the last checkpoint"),
    ],
)
def test_what_resume_relies_on_is_checked(file, change, words, stopped, capsys):
    path = stopped / file
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    assert run_command(["run", "--resume", str(stopped)]) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert file in said
    assert words in said
    path.write_text(text)
    assert run_command(["run", "--resume", str(stopped)]) == 0


def test_a_comparison_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["compare", "--algorithms", "fedcpsl", "--seeds", "1", *QUICK[:6], "--out", "c"]) == 0
    for file, old, new in (
        ("config.toml", "beta = 0.75", "beta = 0.65"),
        ("comparison.json", "fedcpsl", "fedavg"),
        ("comparison.json", '"seeds": [', '"seeds": [[['),
    ):
        path = tmp_path / "c" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        capsys.readouterr()
        for command in (["show", "c"], ["compare", "--resume", "c"]):
            assert run_command(command) == 2
            said = capsys.readouterr().err
            assert (said.count("\n"), file in said) == (1, True)
        path.write_text(text)
    assert run_command(["show", "c"]) == 0


def test_folders_from_before_are_read(base, tmp_path, monkeypatch, capsys):
    """They have no checksums of config and manifest."""
    import json

    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "old")
    path = tmp_path / "old" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"], manifest["config_sha256"]
    path.write_text(json.dumps(manifest))
    for command in (["show", "old"], ["report", "old"], ["run", "--resume", "old"]):
        assert run_command(command) == 0, capsys.readouterr().err


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    """What a kill left in the middle of making it is cleared away, and the name can be used."""
    left = tmp_path / ".mine.partial-999999999"
    left.mkdir()
    (left / "manifest.json").write_text("{}")

    def killed():
        with new_folder(tmp_path / "mine"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "mine") as partial:
        (partial / "a").write_text("b")
        assert not (tmp_path / "mine").exists()
    assert (tmp_path / "mine" / "a").read_text() == "b"
    taken = new_folder(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        taken.__enter__()


def test_names_cannot_steer_a_terminal(tmp_path):
    name = "ann\x1b]0;owned\x07\x1b[2J"
    lines = ["a,kind,phone", *(f"{i}.5,{'u' if i % 2 else 'v'},{name if i % 4 < 2 else 'bob'}" for i in range(40))]
    (tmp_path / "m.csv").write_text("\n".join(lines) + "\n")
    words = ["--data", "m.csv", "--label", "kind", "--device-column", "phone"]
    for command in (["data", *words], ["run", *words, "--rounds", "1", "--set", "run.processes=1", "--out", "r"]):
        done = fedcpsl(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "\x1b]0" not in done.stdout + done.stderr
    assert "\x1b" not in (tmp_path / "r" / "devices.csv").read_text()
    wrong = fedcpsl("run", "--data", "no\x1b[2Jfile.csv", "--label", "k", cwd=tmp_path)
    assert (wrong.returncode, "\x1b" in wrong.stderr) == (2, False)


def test_what_is_printable():
    assert printable("plain é 日本\u00a0x 👩‍⚕️") == "plain é 日本\u00a0x 👩‍⚕️"
    assert printable("a\nb\x1b[31m\u202ec\ud800") == "a?b?[31m?c?"
    assert printable("x" * 50, 10) == "x" * 10


@pytest.mark.parametrize("algorithm", ["fedcpsl", "fedcpsl2"])
@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_showing_needs_no_pytorch(kind, algorithm, base, tmp_path):
    """It takes seconds to import, and a finished run is a few small files."""
    folder, quick = base, [*QUICK[:6], "--eta", "0.05"]
    if kind == "comparison":
        folder = tmp_path / "c"
        assert run_command(["compare", "--algorithms", algorithm, "--seeds", "1", *quick, "--out", str(folder)]) == 0
    elif algorithm != "fedcpsl":
        folder = tmp_path / "r"
        assert run_command(["run", "--algorithm", algorithm, *quick, "--out", str(folder)]) == 0
    for words in ([], ["--json"]):
        script = "import sys; from fedcpsl.cli import run_command; code = run_command(sys.argv[1:]); "
        script += "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
        command = [sys.executable, "-c", script, "show", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "False\n")
        assert "personal" in done.stdout
