"""Options that stand for settings, the same for every command that runs something."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedcpsl.cli.declared import declared_settings
from fedcpsl.config import AUTO, FLAGS, Config, Data, parse_value, read_config, setting, with_settings
from fedcpsl.errors import InputError


def add_settings(command: argparse.ArgumentParser, leave_out: Iterable[str] = (), *, config: bool = True) -> None:
    """CONFIG.toml (unless the command has files of its own), a flag for each main setting, and --set for the rest."""
    if config:
        command.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="settings; flags override it")
    for flag, name in FLAGS.items():
        if flag in leave_out:
            continue
        section, _, key = name.partition(".")
        declared = setting(section, key)
        default = getattr(getattr(Config(), section), key)
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


def given_settings(parsed: argparse.Namespace) -> Sequence[Any]:
    """The settings that were given on the command line, whichever way."""
    given = [parsed.config, *parsed.set, *(getattr(parsed, name, None) for name in FLAGS.values())]
    return [value for value in given if value is not None]


def settings_help() -> str:
    lines = ["settings for CONFIG.toml and --set (those above are flags too):"]
    for section in fields(Config):
        lines += ["", f"  [{section.name}]  {type(getattr(Config(), section.name)).__doc__}"]
        for declared in fields(getattr(Config(), section.name)):
            value = getattr(getattr(Config(), section.name), declared.name)
            lines.append(f"    {declared.name} = {value!r}".ljust(34) + f"  {declared.metadata['help']}")
    for names, settings in declared_settings().items():
        lines += ["", f"  [algorithm]  of {', '.join(names)}"]
        lines += [f"    {s.name} = {s.default!r}".ljust(34) + f"  {s.help}" for s in settings if s.name != "name"]
    return "\n".join(lines)


def typed(name: str, text: str) -> Any:
    """A value from the command line, read as what the setting accepts."""
    section, _, key = name.partition(".")
    accepts = setting(section, key).metadata["test"]
    value = parse_value(text)
    return text if not accepts(value) and accepts(text) else value


def config_of(parsed: argparse.Namespace, more: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """The config that a command's options describe; `more` are settings that options of its own stand for."""
    if parsed.config and os.path.isdir(parsed.config):
        raise InputError(_meant(parsed.config, resumes="resume" in parsed))
    values, chosen = read_config(parsed.config) if parsed.config else {}, chosen_settings(parsed)
    config = with_settings(Config(), values | chosen | dict(more))
    _refuse_ignored(config.data, chosen)
    return config


def _meant(folder: Path, *, resumes: bool) -> str:
    """What to give where a folder stands for a config file."""
    inside = folder / "config.toml"
    if not inside.is_file():
        return f"{folder}: is a folder; give a config file"
    return f"{folder}: is a folder; did you mean {inside}{f', or --resume {folder}' * resumes}?"


def _refuse_ignored(data: Data, chosen: Mapping[str, Any]) -> None:
    """Settings that were given by hand (not by a config, which says all) and that others leave without meaning."""
    dataset = chosen.get("data.dataset", "own")
    if data.file and dataset != "own":
        raise InputError(f"--dataset {dataset}: the samples are those of --data {data.file}; leave one of the two out")
    own = data.file and data.device_column and not data.split and data.partition in (AUTO, "natural")
    if own and "data.devices" in chosen:
        raise InputError(
            f"--devices {data.devices}: the devices are those of --device-column {data.device_column}; leave one of "
            "the two out, or share rows out anew with --partition iid"
        )


def taken_out(parsed: argparse.Namespace, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Some of the settings that --set gives, which then are no longer among those of `config_of`."""
    values = chosen_settings(parsed)
    parsed.set = [given for given in parsed.set if not wanted(given.partition("=")[0].strip())]
    return {name: value for name, value in values.items() if wanted(name)}


def chosen_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags and --set give."""
    values: dict[str, Any] = {}
    for assignment in parsed.set:
        name, equals, text = assignment.partition("=")
        if not equals or "." not in name:
            raise InputError(f"--set {assignment}: give it as SECTION.KEY=VALUE, for example --set work.amount=5")
        values[name.strip()] = typed(name.strip(), text.strip())
    flagged = {name: getattr(parsed, name, None) for name in FLAGS.values()}
    return values | {name: typed(name, text) for name, text in flagged.items() if text is not None}
