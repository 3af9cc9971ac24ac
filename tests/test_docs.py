"""What the README and the manual show works: commands parse, settings are accepted, Python runs."""

import re
import shlex
import struct
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from fedcpsl.cli import parser, run_command
from fedcpsl.config import FLAGS, Config, parse_value, read_config, setting, with_settings
from fedcpsl.deployment.job import read_job
from fedcpsl.runs.study import lines_of, read_study

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S+)[^\n]*\n(?P<content>.*?)^(?P=indent)```$", re.M | re.S)
SHELL, SHOWN = ("bash", "console"), ("text", "json", "csv", "{toctree}", "{include}", "{eval-rst}")
FLOWERS = ("flower-superlink", "flower-supernode", "flwr", "mkdir", "printf")  # `make flower-app` runs them
OTHER_PROGRAMS = ("make", "export", "source", "cp", *FLOWERS)  # anything else in a shell block must be fedcpsl


class Block(NamedTuple):
    page: str
    line: int
    language: str
    content: str


def blocks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            content = re.sub(f"^{found['indent']}", "", found["content"], flags=re.M)
            line = text.count("\n", 0, found.start("content")) + 1
            yield Block(page.name, line, found["language"], content)


BLOCKS = list(blocks())


def commands(block):
    """The commands of a shell block, as words: all lines of ```bash, those after a prompt in ```console."""
    for line in block.content.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


COMMANDS = [
    pytest.param(words, id=f"{block.page}:{block.line}-{' '.join(words)}")
    for block in BLOCKS
    if block.language in SHELL
    for words in commands(block)
]


def of_language(language):
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in BLOCKS if b.language == language]


def test_no_block_is_passed_over():
    assert {b.language for b in BLOCKS} <= {*SHELL, *SHOWN, "python", "toml"}
    fences = sum(
        line.lstrip().startswith("```") for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()
    )
    assert fences == 2 * len(BLOCKS)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_one_that_exists(words):
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets)
    elif program == "torchrun":
        assert_parses(arguments[arguments.index("fedcpsl") + 1 :])
    elif program == "python":
        script, *options = arguments
        code = (ROOT / script).read_text()
        assert all(f'"{word}"' in code for word in options if word.startswith("--"))
    elif program not in OTHER_PROGRAMS:
        assert program in ("fedcpsl", ".venv/bin/fedcpsl"), "not a program that this test knows"
        assert_parses(arguments)


def assert_parses(arguments):
    if "--help" in arguments:
        with pytest.raises(SystemExit) as left:
            parser().parse_args(arguments)
        assert left.value.code == 0
        return
    parsed = vars(parser().parse_args(arguments))
    given = {name: parsed[name] for name in FLAGS.values() if parsed.get(name) is not None}
    given |= dict(assignment.split("=", 1) for assignment in parsed.get("set", []))
    for name, text in given.items():
        accepts = setting(*name.split(".")).metadata["test"]
        assert accepts(parse_value(text)) or accepts(text), name
    config = parsed.get("config")
    assert config is None or config.name == "mine.toml" or (ROOT / config).is_file()


@pytest.mark.parametrize("block", of_language("toml"))
def test_a_config_is_accepted(block, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(block.content)
    (tmp_path / "base.toml").write_text("")
    if "[rows." in block.content:
        study = read_study(path)
        assert all(lines_of(study, dataset) for dataset in study.bases)
    elif "[federation]" in block.content:
        read_job(block.content, block.page)
    else:
        with_settings(Config(), read_config(path))


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"} - {"algorithm.md"}))
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page in order, sharing names, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for block in BLOCKS:
        if block.page == page and block.language == "python":
            exec(compile(block.content, f"{page}:{block.line}", "exec"), names)


ELSEWHERE = {  # pages whose commands are run by other tests, or need what no test has
    "CONTRIBUTING.md": "copies a figure into docs/",
    "algorithm.md": "tests/test_new_algorithm.py",
    "benchmarks.md": "minutes long, on the machine that is named there",
    "cli.md": "tests/test_doctor.py and tests/test_shell.py",
    "federation.md": "tests/test_outsiders.py, tests/test_federation_processes.py and `make flower-app`",
    "index.md": "`make` alone",
}
NOT_HERE = {  # commands that have tests of their own
    "federation": "minutes long; tests/test_federation_processes.py starts such processes",
    "verify": "tests/test_vectors.py",
    "watch": "serves until it is stopped; tests/test_watch.py",
}
STOPPED = {  # folders of runs that pages go on with or show, and what makes them
    "runs/20260101-120000-fedcpsl2-digits": "run --algorithm fedcpsl --rounds 1",
    "runs/mine": "run --algorithm fedcpsl --rounds 1",
    "runs/yours": "run --algorithm fedcpsl --rounds 1 --seed 1",
    "runs/20260101-120000-compare-digits": "compare --algorithms fedcpsl --seeds 1 --rounds 1",
    "runs/20260101-120000-sweep-digits": "sweep --algorithm fedcpsl --grid beta=.5 --seeds 1 --rounds 1",
}
LESS_WORK = {
    "run": ["--rounds", "1", "--set", "run.processes=1"],
    "compare": ["--rounds", "1", "--seeds", "1", "--set", "run.processes=1"],
    "sweep": ["--rounds", "1", "--seeds", "1", "--set", "run.processes=1"],
    "data": [],
    "paper": ["--dry-run"],
    "export": [],
    "predict": [],
    "adapt": [],
    "show": [],
    "report": [],
    "doctor": [],
}
RUN_HERE = sorted({b.page for b in BLOCKS if b.language == "bash"} - ELSEWHERE.keys())


def small_world(folder):
    """What the pages take for granted: a table, arrays, photos, a model, and small MNIST and CIFAR-10 files."""
    rng = np.random.default_rng(0)
    kinds, phones = rng.choice(["cat", "dog", ""], 200), rng.choice(["ann", "bob", "cid"], 200)
    rows = [f"{a:.3f},{b:.3f},{p},{k}" for (a, b), p, k in zip(rng.normal(size=(200, 2)), phones, kinds, strict=True)]
    (folder / "mine.csv").write_text("\n".join(["height,width,phone,kind", *rows]) + "\n")
    without_devices = [",".join(row.split(",")[:2] + row.split(",")[3:]) for row in ["a,b,phone,kind", *rows]]
    (folder / "rows.csv").write_text("\n".join(without_devices) + "\n")
    marked = [f"{row},{int(i % 5 == 0 and not row.endswith(','))},{i}" for i, row in enumerate(rows)]
    (folder / "marked.csv").write_text("\n".join(["height,width,phone,kind,is_test,row_id", *marked]) + "\n")
    y = np.where(rng.random(300) < 0.5, -1, rng.integers(0, 3, 300))
    np.savez(folder / "mine.npz", x=rng.normal(size=(300, 8)), y=y, device=np.repeat(["a", "b", "c"], 100))
    np.savez(folder / "others.npz", x=rng.normal(size=(900, 8)), y=np.arange(900) % 3)
    np.savez(folder / "new.npz", x=rng.normal(size=(30, 8)), y=np.arange(30) % 2)
    for device in ("ann", "bob"):
        for label in ("cat", "dog", "unlabelled"):
            (folder / "photos" / device / label).mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 255, (18, 18, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / device / label / f"{i}.png")
    (folder / "mypackage").mkdir()
    model = "from fedcpsl import mlp\n\n\ndef make(shape, classes):\n    return mlp(3 * 18 * 18, classes, [8])\n"
    (folder / "mypackage" / "mymodule.py").write_text(model)
    (folder / "mymodel.py").write_text(next(b.content for b in BLOCKS if b.page == "models.md" and "def " in b.content))
    (folder / "mine.toml").write_text(
        next(b.content for b in BLOCKS if b.page == "settings.md" and b.language == "toml")
    )
    write_idx(folder / "data" / "mnist" / "train-images-idx3-ubyte", rng.integers(0, 256, (400, 28, 28)))
    write_idx(folder / "data" / "mnist" / "train-labels-idx1-ubyte", np.arange(400) % 10)
    (folder / "data" / "har").mkdir()
    np.savez(
        folder / "data" / "har" / "har_windows.npz",
        x=rng.integers(-999, 999, (96, 128, 6)).astype(np.int16),
        y=np.arange(96) % 6,
        user=np.repeat(np.arange(8), 12),
        exp=np.repeat(np.arange(16), 6),
        scale=np.full(6, 0.001),
        classes=[f"ACTIVITY_{i}" for i in range(6)],
    )
    batches = folder / "data" / "cifar10" / "cifar-10-batches-bin"
    batches.mkdir(parents=True)
    for i in range(1, 6):
        records = rng.integers(0, 256, (80, 3073)).astype(np.uint8)
        records[:, 0] = np.arange(80) % 10
        (batches / f"data_batch_{i}.bin").write_bytes(records.tobytes())


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    """All of fedcpsl's but those under torchrun, with less work than the page asks for."""
    small_world(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDCPSL_DATA", str(tmp_path / "data"))
    ran = 0
    for block in BLOCKS:
        if block.page != page or block.language != "bash":
            continue
        for program, *arguments in commands(block):
            if not program.endswith("fedcpsl") or "--help" in arguments or arguments[0] in NOT_HERE:
                continue
            asked = {word for before, word in pairwise(arguments) if before != "--out"}
            for stopped in STOPPED.keys() & asked - {str(path) for path in Path("runs").glob("*")}:
                assert run_command([*STOPPED[stopped].split(), "--set", "run.processes=1", "--out", stopped]) == 0
            alone = {"--dry-run", "--resume"} & set(arguments)
            given = [path for word in arguments for path in (sorted(glob(word)) if "*" in word else [word])]
            code = run_command([*given, *([] if alone else LESS_WORK[arguments[0]])])
            assert code == 0, (arguments, capsys.readouterr().err)
            ran += 1
    assert ran > 0


def test_every_page_that_is_not_run_here_is_there():
    assert {b.page for b in BLOCKS if b.language == "bash"} >= ELSEWHERE.keys()


LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    """Those of the site are looked after when it is built."""
    assert [link for link in LINK.findall((ROOT / page).read_text()) if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_marks_of_a_merge_are_left(page):
    marks = ("<<<<<<< ", ">>>>>>> ", "=======\n")
    assert not [line for line in page.read_text().splitlines(keepends=True) if line.startswith(marks)]
