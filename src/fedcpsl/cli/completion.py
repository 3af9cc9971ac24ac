"""fedcpsl completion: what a shell needs to complete our commands, read off the parsers."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.cli.declared import PACKAGE, algorithm_names, declared_settings, literals
from fedcpsl.config import FLAGS, Config, setting

DEVICES = ("auto", "cpu", "cuda", "mps")  # of run.device, which may have a number too


class Value(NamedTuple):
    """What may follow an option or stand alone: some of these names, a file, a folder; several with commas between."""

    names: tuple[str, ...] = ()
    files: bool = False
    folders: bool = False
    listed: bool = False
    assigned: bool = False  # names end with =, and a value follows


class Option(NamedTuple):
    """One option by all its names; `value` is None for a switch."""

    flags: tuple[str, ...]
    help: str
    value: Value | None


class Command(NamedTuple):
    """A command by the words that lead to it, with what may follow."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    arguments: Value  # of all that are no options, together
    commands: "tuple[Command, ...]"


def add(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="a script by which your shell completes our commands",
        description="Print a script by which a shell completes commands, options and names.",
        epilog="bash: source <(fedcpsl completion bash), in ~/.bashrc. zsh: the same with zsh, in ~/.zshrc after "
        "compinit. fish: fedcpsl completion fish | source, in ~/.config/fish/config.fish.",
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    completion.set_defaults(command=_completion)


def _completion(parsed: argparse.Namespace) -> int:
    from fedcpsl.cli import parser, shells

    write: Callable[[Command], str] = getattr(shells, parsed.shell)
    print(write(described(parser())), end="")
    return 0


def described(parser: argparse.ArgumentParser, path: Sequence[str] = ("fedcpsl",), help: str = "") -> Command:
    """A parser and its commands as data."""
    nested, options, arguments = list[Command](), list[Option](), list[Value]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            nested += [described(p, (*path, name), said.get(name, "")) for name, p in action.choices.items()]
        elif action.option_strings:
            value = None if action.nargs == 0 else completed_by(action)
            options.append(Option(tuple(action.option_strings), _plain(action.help), value))
        else:
            arguments.append(completed_by(action))
    together = Value(
        tuple(dict.fromkeys(name for value in arguments for name in value.names)),
        files=any(value.files for value in arguments),
        folders=any(value.folders for value in arguments),
    )
    return Command(tuple(path), help, tuple(options), together, tuple(nested))


def completed_by(action: argparse.Action) -> Value:
    """What completes an option's value or an argument."""
    if action.choices:
        return Value(tuple(map(str, action.choices)))
    named = _named(action.dest)
    if named is not None:
        return named
    if action.type is not Path:
        return Value()
    metavar = str(action.metavar or "")
    return Value(folders=True) if metavar in ("FOLDER", "RUN", "") else Value(files=True, folders=True)


def _named(dest: str) -> Value | None:
    """What completes something that is known by its name, whichever command has it."""
    own: dict[str, Callable[[], Value]] = {
        "data.dataset": lambda: Value(
            (*literals("data/datasets.py", "NAMED"), *literals("data/sources.py", "DATASETS"))
        ),
        "data.file": lambda: Value(files=True, folders=True),
        "data.dir": lambda: Value(folders=True),
        "model.name": lambda: Value(("auto", *literals("models.py", "NAMES"))),
        "algorithm.name": lambda: Value(algorithm_names()),
        "run.device": lambda: Value(DEVICES),
        "algorithms": lambda: Value(algorithm_names(), listed=True),
        "studies": lambda: Value((*study_names(), "all"), files=True),
        "set": lambda: Value(tuple(f"{name}=" for name in setting_names()), assigned=True),
        "grid": lambda: Value(tuple(f"{name}=" for name in setting_names()), assigned=True),
    }
    if dest in own:
        return own[dest]()
    return Value(tuple(setting(*dest.split(".")).metadata["choices"])) if dest in FLAGS.values() else None


def study_names() -> tuple[str, ...]:
    """The studies that come with fedcpsl, inside the package or in the repository."""
    inside = PACKAGE / "experiments"
    folder = inside if inside.is_dir() else PACKAGE.parents[1] / "experiments"
    return tuple(path.stem for path in sorted(folder.glob("*/*.toml")))


def setting_names() -> tuple[str, ...]:
    """Every setting as section.key."""
    own = [f"algorithm.{each.name}" for declared in declared_settings().values() for each in declared]
    known = [f"{s.name}.{f.name}" for s in fields(Config) for f in fields(getattr(Config(), s.name))]
    return tuple(dict.fromkeys([*known, *own]))


def _plain(help: str | None) -> str:
    """An option's help in one line, as argparse would print it."""
    return " ".join((help or "").replace("%%", "%").split())
