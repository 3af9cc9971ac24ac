"""What the files of algorithms declare, read as text: `--help` and completion must not wait for PyTorch."""

import ast
from pathlib import Path
from typing import Any, NamedTuple

import fedcpsl

PACKAGE = Path(fedcpsl.__file__).parent


class Declared(NamedTuple):
    """A setting of an algorithm outside FedCPSL's family."""

    name: str
    default: Any
    help: str


def literals(file: str, name: str) -> tuple[str, ...]:
    """The texts in a constant of a module, a list or the keys of a dictionary."""
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            items = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", [])
            return tuple(str(item.value) for item in items if isinstance(item, ast.Constant))
    return ()


def algorithm_names() -> tuple[str, ...]:
    """Those of every file in algorithms/."""
    return tuple(name for file in _files() for name in literals(file, "VARIANTS"))


def declared_settings() -> dict[tuple[str, ...], list[Declared]]:
    """By the names of the algorithms that have them."""
    found = {literals(file, "VARIANTS"): _settings(file) for file in _files()}
    return {names: settings for names, settings in found.items() if settings}


def _files() -> list[str]:
    return [f"algorithms/{path.name}" for path in sorted(PACKAGE.glob("algorithms/*.py"))]


def _settings(file: str) -> list[Declared]:
    """The fields of a class `Settings`, each declared by a call with its default and its meaning."""
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Settings":
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return [_declared(each.target.id, each.value) for each in fields]  # type: ignore[union-attr, arg-type]
    return []


def _declared(name: str, value: ast.Call) -> Declared:
    default, help = (argument.value if isinstance(argument, ast.Constant) else "auto" for argument in value.args[:2])
    return Declared(name, default, str(help))
