"""docs/equations.md and the docstrings say the same, both ways."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from fedcpsl import averaging, edge, problem
from fedcpsl.algorithms import all_algorithms

EDGE = [import_module(f"fedcpsl.edge.{path.stem}") for path in sorted(Path(edge.__path__[0]).glob("[a-z]*.py"))]
INDEX = Path(__file__).parents[1] / "docs" / "equations.md"
ROW = re.compile(r"\| .+ \| (?:\$(?P<typeset>[^$]+)\$<br>)?`(?P<formula>[^`]+)`<br>`(?P<function>fedcpsl\.[\w.]+)` \|")
HEAD = "| {} | formula, as its function's docstring has it, function |"
AROUND = (*map(HEAD.format, ("where in the paper", "algorithm", "edge networks")), "|---|---|")
LINES = [line for line in INDEX.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
FOUND = [m for line in LINES if (m := ROW.fullmatch(line))]
ROWS = [(m["formula"].replace("\\|", "|"), m["function"]) for m in FOUND]
TYPESET = [pytest.param(m["typeset"], m["formula"], id=m["function"]) for m in FOUND if m["typeset"]]


def first_line(function):
    return (inspect.getdoc(function) or "").partition("\n")[0]


def public_functions(module):
    own = inspect.getmembers(module, lambda f: inspect.isfunction(f) and f.__module__ == module.__name__)
    return {f"{module.__name__}.{name}": f for name, f in own if not name.startswith("_")}


def test_every_line_of_the_tables_is_read():
    assert [line for line in LINES if line not in AROUND and not ROW.fullmatch(line)] == []
    assert len({function for _, function in ROWS}) == len(ROWS), "a function stands there twice"


@pytest.mark.parametrize(("formula", "function"), ROWS, ids=[function for _, function in ROWS])
def test_a_docstring_opens_with_its_formula(formula, function):
    """What follows the formula in the first line is the end, or punctuation or a bracket that begins a remark."""
    module, _, name = function.rpartition(".")
    line = first_line(getattr(import_module(module), name))
    assert line.startswith(formula)
    assert re.match(r"$|[.:;,]| \(", line.removeprefix(formula)), line
    assert formula.count("(") == formula.count(")"), "the formula is cut short"


def symbols(formula):
    """Names and numbers in their order, of a plain formula or of one in TeX; operators and brackets are left out."""
    plain = re.sub(
        r"\\(operatorname|mathrm|text|tilde|underline|left|right|frac|l?r?Vert|[lr](angle|ceil)|le|,)(?![a-z])",
        " ",
        formula,
    )
    plain = plain.replace("\\nabla", "grad").replace("\\ell", "l").replace("\\", " ")
    plain = re.sub(r"\b(norm|ceil)\(", "(", plain)
    plain = re.sub(r"\bd(?=log |f_)", "d ", plain)
    return re.findall(r"[A-Za-z]+|\d+", plain.replace("_", " "))


@pytest.mark.parametrize(("typeset", "formula"), TYPESET)
def test_a_typeset_formula_is_the_plain_one(typeset, formula):
    assert symbols(typeset) == symbols(formula)


def test_every_formula_has_its_row():
    formulas = public_functions(problem)
    for module in (averaging, *EDGE, *(file for file, _ in all_algorithms().values())):
        formulas |= {name: f for name, f in public_functions(module).items() if re.search(" (=|<-) ", first_line(f))}
    assert set(formulas) - {function for _, function in ROWS} == set()
