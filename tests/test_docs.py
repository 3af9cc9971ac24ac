"""What the README and the manual show works: commands parse, settings are accepted, Python runs."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from fedcpsl.cli import parser
from fedcpsl.config import FLAGS, Config, parse_value, read_config, setting, with_settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S+)[^\n]*\n(?P<content>.*?)^(?P=indent)```$", re.M | re.S)
SHELL, SHOWN = ("bash", "console"), ("text", "json", "csv", "{toctree}", "{include}", "{eval-rst}")
OTHER_PROGRAMS = ("make", "export", "source", "cp")  # anything else in a shell block must be fedcpsl


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
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets)
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
    with_settings(Config(), read_config(path))


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"}))
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page in order, sharing names, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for block in BLOCKS:
        if block.page == page and block.language == "python":
            exec(compile(block.content, f"{page}:{block.line}", "exec"), names)
