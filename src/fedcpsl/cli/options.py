"""Options that commands share: settings, --tracker, and what algorithm files declare.

The files of algorithms are parsed as text, because `--help` and completion must not wait for PyTorch.
"""

import argparse
import ast
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import fedcpsl
from fedcpsl import settings
from fedcpsl.config import AUTO, FLAGS, Config, Data, new_config, parse_value, read_config, setting
from fedcpsl.errors import InputError
from fedcpsl.settings import ALGORITHM_FOLDERS, DEFAULT_ALGORITHM

TRACKERS = ("tensorboard", "wandb", "mlflow")
PACKAGE = Path(fedcpsl.__file__).parent


def add_settings(command: argparse.ArgumentParser, leave_out: Iterable[str] = (), *, config: bool = True) -> None:
    """Add CONFIG.toml (unless the command has files of its own), an option per main setting, and --set for the rest."""
    if config:
        command.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="settings; flags override it")
    for flag, name in FLAGS.items():
        if flag in leave_out:
            continue
        section, _, key = name.partition(".")
        declared = setting(section, key)
        default = _shown_default(section, key)
        suffix = "" if default == "" else f" [{default}]"
        command.add_argument(
            flag, dest=name, metavar=key.upper(), help=declared.metadata["help"].replace("%", "%%") + suffix
        )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any other setting (see `fedcpsl run --help`)",
    )


def _shown_default(section: str, key: str) -> Any:
    """Return a setting's default; where FedCPSL's is another than the default algorithm's, both."""
    default = getattr(getattr(Config(), section), key)
    if section != "algorithm":
        return default
    if key == "name":
        return DEFAULT_ALGORITHM
    own = _defaults_of(DEFAULT_ALGORITHM).get(key, default)
    return default if own == default else f"{own}; fedcpsl: {default}"


@cache
def _defaults_of(name: str) -> dict[str, Any]:
    """Return the defaults that the file of an algorithm outside the family declares."""
    return {} if name in settings.FAMILY else {s.name: s.default for s in _settings(f"algorithms/{name}.py")}


def given_settings(parsed: argparse.Namespace) -> Sequence[Any]:
    """Return the settings that were given on the command line, as options, --set or CONFIG.toml."""
    given = [parsed.config, *parsed.set, *(getattr(parsed, name, None) for name in FLAGS.values())]
    return [value for value in given if value is not None]


def settings_help() -> str:
    """Return the list of all settings for `run --help`."""
    lines = ["settings for CONFIG.toml and --set (those above are flags too):"]
    for section in fields(Config):
        lines += ["", f"  [{section.name}]  {type(getattr(Config(), section.name)).__doc__}"]
        for declared in fields(getattr(Config(), section.name)):
            value = getattr(getattr(Config(), section.name), declared.name)
            value = DEFAULT_ALGORITHM if (section.name, declared.name) == ("algorithm", "name") else value
            lines.append(f"    {declared.name} = {value!r}".ljust(34) + f"  {declared.metadata['help']}")
    for names, own in declared_settings().items():
        lines += ["", f"  [algorithm]  of {', '.join(names)}"]
        lines += [f"    {s.name} = {s.default!r}".ljust(34) + f"  {s.help}" for s in own if s.name != "name"]
    return "\n".join(lines)


def typed(name: str, text: str) -> Any:
    """Parse a value from the command line as the type that the setting accepts."""
    section, _, key = name.partition(".")
    accepts = setting(section, key).metadata["test"]
    value = parse_value(text)
    return text if not accepts(value) and accepts(text) else value


def config_of(
    parsed: argparse.Namespace,
    more: Mapping[str, Any] = MappingProxyType({}),
    algorithm: str = DEFAULT_ALGORITHM,
) -> Config:
    """Return the config that a command's options describe.

    `more` are settings from the command's own options; `algorithm` is meant where none is named.
    """
    if parsed.config and os.path.isdir(parsed.config):
        raise InputError(_folder_hint(parsed.config, resumes="resume" in parsed))
    values, chosen = read_config(parsed.config) if parsed.config else {}, chosen_settings(parsed)
    config = new_config(values | chosen | dict(more), algorithm)
    _refuse_ignored(config.data, chosen)
    return config


def _folder_hint(folder: Path, *, resumes: bool) -> str:
    """Return the error for a folder that was given in place of a config file."""
    inside = folder / "config.toml"
    if not inside.is_file():
        return f"{folder}: is a folder; give a config file, or --data {folder} if it holds your images"
    return f"{folder}: is a folder; did you mean {inside}{f', or --resume {folder}' * resumes}?"


def _refuse_ignored(data: Data, chosen: Mapping[str, Any]) -> None:
    """Raise InputError for settings on the command line that others make ineffective (a config file may have both)."""
    dataset = chosen.get("data.dataset", "own")
    if data.file and dataset != "own":
        raise InputError(f"--dataset {dataset}: the samples are those of --data {data.file}; leave one of the two out")
    own = data.file and data.device_column and not data.split and data.partition in (AUTO, "natural")
    if own and "data.devices" in chosen:
        raise InputError(
            f"--devices {data.devices}: the devices are those of --device-column {data.device_column}; leave one of "
            "the two out, or assign the rows to other devices with --partition iid"
        )


def remove_settings(parsed: argparse.Namespace, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Remove some of the settings of --set from the arguments and return them; `config_of` then ignores them."""
    values = chosen_settings(parsed)
    parsed.set = [given for given in parsed.set if not wanted(given.partition("=")[0].strip())]
    return {name: value for name, value in values.items() if wanted(name)}


def chosen_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given by options and --set."""
    values: dict[str, Any] = {}
    for assignment in parsed.set:
        name, equals, text = assignment.partition("=")
        if not equals or "." not in name:
            raise InputError(f"--set {assignment}: give it as SECTION.KEY=VALUE, for example --set work.amount=5")
        values[name.strip()] = typed(name.strip(), text.strip())
    flagged = {name: getattr(parsed, name, None) for name in FLAGS.values()}
    return values | {name: typed(name, text) for name, text in flagged.items() if text is not None}


def add_tracker(command: argparse.ArgumentParser) -> None:
    """Add --tracker."""
    command.add_argument(
        "--tracker", choices=TRACKERS, metavar="NAME", help=f"send metrics there too: {', '.join(TRACKERS)}"
    )


def chosen_tracker(parsed: argparse.Namespace) -> str | None:
    """Return the requested tracker; raise InputError if it is not installed."""
    name: str | None = parsed.tracker
    if name:
        from fedcpsl.runs.trackers import require

        require(name)
    return name


def print_tracked(where: Sequence[str]) -> None:
    """Print to stderr how to view the tracked runs."""
    shown = list(dict.fromkeys(where))
    for text in shown[:3]:
        print(f"tracker  {text}", file=sys.stderr)
    if len(shown) > 3:
        print(f"tracker  and {len(shown) - 3} more", file=sys.stderr)


class DeclaredSetting(NamedTuple):
    """A setting of an algorithm outside FedCPSL's family."""

    name: str
    default: Any
    help: str


def literals(file: str, name: str) -> tuple[str, ...]:
    """Return the strings in a constant of a module: a sequence, or the keys of a dictionary."""
    for node in _parsed(file):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            items = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", [])
            return tuple(str(item.value) for item in items if isinstance(item, ast.Constant))
    return ()


def algorithm_names() -> tuple[str, ...]:
    """Return the names of the algorithms in algorithms/."""
    return tuple(name for file in _files() for name in literals(file, "VARIANTS"))


def declared_settings() -> dict[tuple[str, ...], list[DeclaredSetting]]:
    """Return the algorithms' own settings, by the names of the algorithms that have them."""
    found = {literals(file, "VARIANTS"): _settings(file) for file in _files()}
    return {names: settings for names, settings in found.items() if settings}


def _files() -> list[str]:
    """Return the algorithms' files: the package's, and those of the folders that FEDCPSL_ALGORITHMS names."""
    folders = [
        PACKAGE / "algorithms",
        *map(Path, filter(None, os.environ.get(ALGORITHM_FOLDERS, "").split(os.pathsep))),
    ]
    return [str(path.absolute()) for folder in folders for path in sorted(folder.glob("*.py"))]


def _settings(file: str) -> list[DeclaredSetting]:
    """Return the fields of a class `Settings`, each declared by a call with its default and its help."""
    known: dict[str, Any] = {"__builtins__": {}, **vars(settings)}
    for node in _parsed(file):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = _value(node.value, known)
        if isinstance(node, ast.ClassDef) and node.name == "Settings":
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            calls = [(field.target, field.value) for field in fields]
            return [
                _declared(target.id, call, known)
                for target, call in calls
                if isinstance(target, ast.Name) and isinstance(call, ast.Call)
            ]
    return []


def _parsed(file: str) -> list[ast.stmt]:
    """Return what a file consists of; nothing of one that is no Python, which importing it will say."""
    try:
        return ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _declared(name: str, call: ast.Call, known: dict[str, Any]) -> DeclaredSetting:
    """Return a setting from its declaration, `kind(default, help, ...)`, by position or by name."""
    given = dict(zip(("default", "help"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in ("default", "help")}
    default, help = (_value(given[each], known) if each in given else "" for each in ("default", "help"))
    return DeclaredSetting(name, default, str(help))


def _value(expression: ast.expr, known: dict[str, Any]) -> Any:
    """Return what an expression of constants is; as it is written where there is more in it."""
    try:
        return eval(compile(ast.Expression(expression), "<setting>", "eval"), known)
    except Exception:
        return ast.unparse(expression)
