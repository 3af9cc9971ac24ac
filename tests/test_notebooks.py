"""The notebooks run, and what is saved in them is what they give."""

import json
import re

import matplotlib
import pytest

from .notebooks import NOTEBOOKS, code_cells, run

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def texts(outputs):
    """What was printed or shown, less its numbers and spaces; and the numbers."""
    said = ["".join(o.get("text") or o["data"].get("text/plain", "a picture")) for o in outputs]
    return [" ".join(NUMBER.sub("#", text).split()) for text in said], [
        float(n) for n in NUMBER.findall(" ".join(said))
    ]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["activity", "digits"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_its_saved_outputs(path, tmp_path, monkeypatch):
    """Words are the same, numbers nearly: training on another processor rounds differently."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCPSL_DATA", raising=False)
    matplotlib.use("agg")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell, given in zip(code_cells(notebook), run(notebook, path.name), strict=True):
        (words, numbers), (saved_words, saved_numbers) = texts(given), texts(cell["outputs"])
        assert words == saved_words, cell["source"]
        assert numbers == pytest.approx(saved_numbers, rel=0.1, abs=0.1), cell["source"]
    assert not any(tmp_path.iterdir()), "a notebook writes no file"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_that_jupyter_opens(path):
    """What nbformat 4.5 asks for."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert [cell["execution_count"] for cell in code_cells(notebook)] == [*range(1, len(code_cells(notebook)) + 1)], (
        "run them all: python -m tests.notebooks"
    )
    assert all({"cell_type", "id", "metadata", "source"} <= cell.keys() for cell in cells)
