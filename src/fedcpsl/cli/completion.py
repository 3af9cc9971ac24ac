"""fedcpsl completion: scripts by which bash, zsh and fish complete commands, options and values."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.cli.options import PACKAGE, algorithm_names, declared_settings, literals
from fedcpsl.config import FLAGS, Config, setting

DEVICES = ("auto", "cpu", "cuda")  # of run.device, which may have a number too


class Value(NamedTuple):
    """Completions of an option or argument: names, files, folders; `listed`: several names separated by commas."""

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
    """A command: the words that lead to it, its options, arguments and subcommands."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    arguments: Value  # of all positional arguments together
    commands: "tuple[Command, ...]"


def add_completion(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script for command completion in your shell",
        description="Print a script by which a shell completes commands, options and names.",
        epilog="bash: source <(fedcpsl completion bash), in ~/.bashrc. zsh: the same with zsh, in ~/.zshrc after "
        "compinit. fish: fedcpsl completion fish | source, in ~/.config/fish/config.fish.",
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help="bash, zsh or fish")
    completion.set_defaults(command=_completion)


def _completion(parsed: argparse.Namespace) -> int:
    from fedcpsl.cli import parser

    print(SCRIPTS[parsed.shell](describe(parser())), end="")
    return 0


def describe(parser: argparse.ArgumentParser, path: Sequence[str] = ("fedcpsl",), help: str = "") -> Command:
    """Return a parser and its subcommands as data."""
    nested, options, arguments = list[Command](), list[Option](), list[Value]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            nested += [describe(p, (*path, name), helps.get(name, "")) for name, p in action.choices.items()]
        elif action.option_strings:
            value = None if action.nargs == 0 else completions_of(action)
            options.append(Option(tuple(action.option_strings), _one_line(action.help), value))
        else:
            arguments.append(completions_of(action))
    positional = Value(
        tuple(dict.fromkeys(name for value in arguments for name in value.names)),
        files=any(value.files for value in arguments),
        folders=any(value.folders for value in arguments),
    )
    return Command(tuple(path), help, tuple(options), positional, tuple(nested))


def completions_of(action: argparse.Action) -> Value:
    """Return the completions of an option's value or of an argument."""
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
    """Return the completions of what has the same name in all commands; None for other names."""
    own: dict[str, Callable[[], Value]] = {
        "data.dataset": lambda: Value(
            (*literals("data/sources.py", "NAMED"), *literals("data/sources.py", "DATASETS"))
        ),
        "data.file": lambda: Value(files=True, folders=True),
        "data.dir": lambda: Value(folders=True),
        "model.name": lambda: Value(("auto", *literals("models.py", "NAMES"))),
        "algorithm.name": lambda: Value(algorithm_names()),
        "run.device": lambda: Value(DEVICES),
        "algorithms": lambda: Value((*algorithm_names(), *literals("algorithms/__init__.py", "GROUPS")), listed=True),
        "studies": lambda: Value((*study_names(), "all", "edge"), files=True),
        "set": lambda: Value(tuple(f"{name}=" for name in setting_names()), assigned=True),
        "grid": lambda: Value(tuple(f"{name}=" for name in setting_names()), assigned=True),
    }
    if dest in own:
        return own[dest]()
    return Value(tuple(setting(*dest.split(".")).metadata["choices"])) if dest in FLAGS.values() else None


def study_names() -> tuple[str, ...]:
    """Return the names of the studies that come with fedcpsl, in the package or the repository."""
    inside = PACKAGE / "experiments"
    folder = inside if inside.is_dir() else PACKAGE.parents[1] / "experiments"
    return tuple(path.stem for path in sorted(folder.glob("*/*.toml")))


def setting_names() -> tuple[str, ...]:
    """Return all settings as section.key."""
    own = [f"algorithm.{setting.name}" for settings in declared_settings().values() for setting in settings]
    known = [f"{s.name}.{f.name}" for s in fields(Config) for f in fields(getattr(Config(), s.name))]
    return tuple(dict.fromkeys([*known, *own]))


def _one_line(help: str | None) -> str:
    """Return an option's help in one line, as argparse would print it."""
    return " ".join((help or "").replace("%%", "%").split())


BASH = """# fedcpsl for bash; made by `fedcpsl completion bash`
_fedcpsl_names() {
    local IFS=$' \\t\\n'
    COMPREPLY+=($(compgen -W "$1" -- "$cur"))
}
_fedcpsl_list() {
    local before=""
    case $cur in *,*) before="${cur%%,*}," cur="${cur##*,}" ;; esac
    _fedcpsl_names "$1"
    COMPREPLY=("${COMPREPLY[@]/#/$before}")
    compopt -o nospace 2>/dev/null
}
_fedcpsl_assigned() {
    _fedcpsl_names "$1"
    compopt -o nospace 2>/dev/null
}
_fedcpsl_paths() {
    local IFS=$'\\n'
    COMPREPLY+=($(compgen "$1" -- "$cur"))
    compopt -o filenames 2>/dev/null
}
_fedcpsl() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=fedcpsl word
    COMPREPLY=()
    if [[ $cur == = ]]; then cur=""
    elif [[ $prev == = && COMP_CWORD -gt 1 ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$command $word" in
            %(paths)s) command="$command $word" ;;
        esac
    done
    case "$command $prev" in
%(values)s
    esac
    case "$command $cur" in
%(options)s
    esac
    case "$command" in
%(arguments)s
    esac
}
complete -F _fedcpsl fedcpsl
"""

ZSH = """#compdef fedcpsl
# fedcpsl for zsh; made by `fedcpsl completion zsh`
%(functions)s
if [[ $funcstack[1] == _fedcpsl ]]; then
    _fedcpsl "$@"
else
    compdef _fedcpsl fedcpsl
fi
"""

FISH = """# fedcpsl for fish; made by `fedcpsl completion fish`
function __fedcpsl_at
    set -l command fedcpsl
    for word in (commandline -opc)[2..-1]
        if contains -- "$command $word" %(paths)s
            set command "$command $word"
        end
    end
    test "$command" = "$argv"
end
function __fedcpsl_list
    set -l before (string match -r '.*,' -- (commandline -ct) | string replace -r '^--[^=]*=' '')
    printf '%%s\\n' "$before"$argv
end
complete -c fedcpsl -f
%(lines)s
"""


def bash(top: Command) -> str:
    """Return the script for bash 3.2 and newer."""
    every = list(_all_commands(top))
    paths = [shlex.quote(" ".join(c.path)) for c in every[1:]]
    values, options, arguments = [], [], []
    for command in every:
        at = " ".join(command.path)
        for option in command.options:
            if option.value is not None:
                patterns = "|".join(f'"{at} {flag}"' for flag in option.flags)
                values.append(f"        {patterns}) {_in_bash(option.value)}return ;;")
        flags = " ".join(flag for option in command.options for flag in option.flags)
        options.append(f'        "{at} -"*) _fedcpsl_names "{flags}"; return ;;')
        names = " ".join(nested.path[-1] for nested in command.commands)
        given = f'_fedcpsl_names "{names}"; ' if names else _in_bash(command.arguments)
        arguments.append(f'        "{at}") {given or ": "};;')
    return BASH % {
        "paths": "|".join(paths),
        "values": "\n".join(values),
        "options": "\n".join(options),
        "arguments": "\n".join(arguments),
    }


def _in_bash(value: Value) -> str:
    how = "_fedcpsl_list" if value.listed else "_fedcpsl_assigned" if value.assigned else "_fedcpsl_names"
    parts = [f'{how} "{" ".join(value.names)}"; '] if value.names else []
    if value.files or value.folders:
        parts.append(f"_fedcpsl_paths {'-f' if value.files else '-d'}; ")
    return "".join(parts)


def zsh(top: Command) -> str:
    """Return the script for zsh 5, to be sourced or saved as _fedcpsl in a folder of $fpath."""
    return ZSH % {"functions": "\n".join(_zsh_function(command) for command in reversed(list(_all_commands(top))))}


def _zsh_function(command: Command) -> str:
    name = "_" + "_".join(command.path)
    specs = [_zsh_option(option) for option in command.options]
    if command.commands:
        specs += ["'1: :->command'", "'*:: :->rest'"]
    else:
        specs.append(_quoted(f"*: :{_in_zsh(command.arguments)}"))
    lines = [f"{name}() {{", "    local context state state_descr line", "    typeset -A opt_args"]
    lines.append("    _arguments -C \\\n        " + " \\\n        ".join(specs))
    if command.commands:
        described = [_quoted(f"{nested.path[-1]}:{nested.help}") for nested in command.commands]
        lines += [
            "    case $state in",
            "    command)",
            "        local -a commands=(\n            " + "\n            ".join(described) + "\n        )",
            "        _describe command commands ;;",
            "    rest)",
            "        case $line[1] in",
            *(f"        {nested.path[-1]}) _{'_'.join(nested.path)} ;;" for nested in command.commands),
            "        esac ;;",
            "    esac",
        ]
    return "\n".join([*lines, "}"])


def _zsh_option(option: Option) -> str:
    help = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    takes = "" if option.value is None else f": :{_in_zsh(option.value)}"
    specs = [
        _quoted(f"*{flag}{'=' if takes and flag.startswith('--') else ''}[{help}]{takes}") for flag in option.flags
    ]
    return " ".join(specs)


def _in_zsh(value: Value) -> str:
    names = " ".join(value.names)
    paths = "_files" if value.files else "_files -/" if value.folders else ""
    if value.listed:
        return f"_sequence compadd - {names}"
    if value.assigned:
        return f"compadd -S '' - {names}"
    if names and paths:
        return f"{{ compadd - {names}; {paths} }}"
    return f"({names})" if names else paths or " "


def fish(top: Command) -> str:
    """Return the script for fish 3."""
    every = list(_all_commands(top))
    paths = " ".join(_quoted(" ".join(command.path)) for command in every[1:])
    lines = [line for command in every for line in _fish_lines(command)]
    return FISH % {"paths": paths, "lines": "\n".join(lines)}


def _fish_lines(command: Command) -> Iterator[str]:
    start = f"complete -c fedcpsl -n {_in_fish('__fedcpsl_at ' + ' '.join(command.path))}"
    for nested in command.commands:
        yield f"{start} -a {nested.path[-1]} -d {_in_fish(nested.help)}"
    for option in command.options:
        flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
        takes = "" if option.value is None else _fish_value(option.value, "-x", "-r -F")
        yield f"{start} {flags}{takes} -d {_in_fish(option.help)}"
    arguments = _fish_value(command.arguments, "", "-F")
    if arguments.strip():
        yield f"{start}{arguments}"


def _fish_value(value: Value, alone: str, with_files: str) -> str:
    names = " ".join(value.names)
    if value.listed:
        names = f"(__fedcpsl_list {names})"
    if value.folders and not value.files:
        names += " (__fish_complete_directories)"
    how = with_files if value.files else alone
    return f"{' ' if how else ''}{how}" + (f" -a {_in_fish(names.strip())}" if names.strip() else "")


def _all_commands(command: Command) -> Iterator[Command]:
    """Yield a command and all its subcommands."""
    yield command
    for nested in command.commands:
        yield from _all_commands(nested)


def _quoted(text: str) -> str:
    """Return a text in single quotes, for zsh and bash."""
    return "'" + text.replace("'", "'\\''") + "'"


def _in_fish(text: str) -> str:
    """Return a text in single quotes, for fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Command], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
