"""A run's config: the sections of settings, read from TOML and the command line, checked, and written back."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedcpsl.edge.settings import OFF, Edge, check_edge, with_profile
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.settings import (
    AUTO,
    DEFAULT_ALGORITHM,
    FAMILY,
    SEARCH,
    UNNAMED_ALGORITHM,
    Algorithm,
    Data,
    Model,
    Run,
    Work,
    toml_value,
)

__all__ = ["AUTO", "FLAGS", "SEARCH", "Algorithm", "Config", "Data", "Edge", "Model", "Run", "Work"]


@dataclass(frozen=True)
class Config:
    """All settings of a run, as in its config.toml."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    algorithm: Any = field(default_factory=Algorithm)  # or the settings that the file of another algorithm declares
    work: Work = field(default_factory=Work)
    run: Run = field(default_factory=Run)
    edge: Edge = field(default_factory=Edge)


def algorithm_settings(name: str) -> type[Any]:
    """The settings that an algorithm's file declares; those of FedCPSL's family are known without PyTorch."""
    if name in FAMILY:
        return Algorithm
    from fedcpsl.algorithms import find_algorithm

    return find_algorithm(name)[0].Settings


def other_algorithm_settings() -> list[type[Any]]:
    """The settings of all algorithms outside the family."""
    from fedcpsl.algorithms import all_algorithms

    return list(dict.fromkeys(file.Settings for file, _ in all_algorithms().values() if file.Settings is not Algorithm))


def setting(section: str, key: str) -> Field[Any]:
    """The declaration of one setting, or an error that names the nearest one."""
    sections = {f.name: f.default_factory for f in fields(Config)}
    if section not in sections:
        raise InputError(f"[{section}]: no such section; {did_you_mean(section, sections)}")
    known = {f.name: f for f in fields(_section_type(section))}
    if key not in known and section == "algorithm":
        known = {f.name: f for each in other_algorithm_settings() for f in fields(each)} | known
    if key not in known:
        raise InputError(f"{section}.{key}: no such setting; {did_you_mean(key, known)}")
    return known[key]


def _section_type(section: str) -> type[Any]:
    return type(getattr(Config(), section))


def check_section(section: str, values: Any) -> None:
    """Refuse the first setting of a section that is out of range."""
    for declared in fields(values):
        value = getattr(values, declared.name)
        if not declared.metadata["test"](value):
            raise InputError(f"{section}.{declared.name} = {toml_value(value)}: give {declared.metadata['accepts']}")


def with_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with `section.key` values put in, each checked. The algorithm decides which others there are.

    Any setting of an edge network turns it on; its profile decides what those that are not given are.
    """
    if "algorithm.name" in values:
        config = replace(config, algorithm=_for_algorithm(config.algorithm, values["algorithm.name"]))
    if any(name.startswith("edge.") for name in values):
        by_default = "macro" if config.edge.profile == OFF else config.edge.profile
        config = replace(config, edge=with_profile(config.edge, values.get("edge.profile", by_default)))
    for name, value in values.items():
        section, _, key = name.partition(".")
        setting(section, key)
        part = getattr(config, section)
        own = [f.name for f in fields(part)]
        if key not in own:
            raise InputError(f"{name}: {part.name} has no such setting; {_owner_or_nearest(key, own)}")
        config = replace(config, **{section: replace(part, **{key: value})})
    for declared in fields(config):
        check_section(declared.name, getattr(config, declared.name))
    if config.edge.on:
        check_edge(config.edge)
    return config


def _owner_or_nearest(key: str, own: Sequence[str]) -> str:
    """What to do about a setting that an algorithm has not: FedCPSL's need its name."""
    if key in {f.name for f in fields(Algorithm)}:
        return f'{UNNAMED_ALGORITHM} has: give algorithm.name = "{UNNAMED_ALGORITHM}", or leave it out'
    return did_you_mean(key, own)


def new_config(values: Mapping[str, Any], algorithm: str = DEFAULT_ALGORITHM) -> Config:
    """The config of something new, of the default algorithm unless the values name one.

    A saved file that names none is read with `with_settings(Config(), ...)`, and goes on meaning FedCPSL.
    """
    return with_settings(Config(), {"algorithm.name": algorithm} | dict(values))


def _for_algorithm(settings: Any, name: Any) -> Any:
    """The settings of another algorithm: those that both have as they were set, where they were."""
    if not isinstance(name, str):
        raise InputError(f"algorithm.name = {toml_value(name)}: give text in quotes")
    kind = algorithm_settings(name)
    if isinstance(settings, kind):
        return settings
    shared = {f.name for f in fields(kind)} & {f.name for f in fields(settings)} - {"name"}
    untouched = type(settings)()
    given = {key: getattr(settings, key) for key in shared}
    return kind(name=name, **{key: value for key, value in given.items() if value != getattr(untouched, key)})


def read_config(path: Path) -> dict[str, Any]:
    """The `section.key` values of a TOML file."""
    if path.name.endswith((".csv", ".csv.gz", ".tsv", ".parquet", ".npz")):
        raise InputError(f"{path}: not a config file (TOML); if it is your data, give --data {path}")
    return flat_settings(_document(path), str(path))


def _document(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from error
    except ValueError as error:  # a number of too many digits too
        raise InputError(f"{path}: not valid TOML: {error}") from error
    except RecursionError:
        raise InputError(f"{path}: not valid TOML: its lists or tables are nested too deeply") from None


def read_own_config(path: Path) -> Config:
    """A config as fedcpsl wrote it, to be shown: PyTorch, which algorithms import, is not needed to read it.

    The settings of an algorithm outside the family are taken as they stand there.
    """
    document = _document(path)
    algorithm = document.get("algorithm", {})
    if algorithm.get("name", UNNAMED_ALGORITHM) in FAMILY:
        return with_settings(Config(), flat_settings(document, str(path)))
    others = flat_settings(
        {section: values for section, values in document.items() if section != "algorithm"}, str(path)
    )
    return replace(with_settings(Config(), others), algorithm=make_dataclass("Settings", algorithm)(**algorithm))


def flat_settings(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`section.key` to value, from sections as TOML nests them; what is no setting is named."""
    values = {}
    for section, content in document.items():
        if not isinstance(content, dict):
            raise InputError(f"{where}: {section} stands outside a section; put it under {_sections_with(section)}")
        for key, value in content.items():
            setting(section, key)
            values[f"{section}.{key}"] = value
    return values


def parse_value(typed: str) -> Any:
    """A value as typed on the command line: TOML, else a comma list, else plain text."""
    import tomllib

    for attempt in (typed, f"[{typed}]"):
        try:
            return tomllib.loads(f"value = {_leading_zero(attempt)}")["value"]
        except ValueError:  # not TOML, or a number of too many digits
            continue
    return typed


def _leading_zero(text: str) -> str:
    import re

    return re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)


def sections_of(config: Config) -> dict[str, dict[str, Any]]:
    """The settings by section; without an edge network, where there is none."""
    return {section: values for section, values in asdict(config).items() if section != "edge" or config.edge.on}


def to_toml(config: Config) -> str:
    """The config as a TOML document that reads back equal."""
    lines = []
    for section, content in sections_of(config).items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in content.items()), ""]
    return "\n".join(lines)


def _sections_with(key: str) -> str:
    owners = [f"[{s.name}]" for s in fields(Config) if key in {f.name for f in fields(_section_type(s.name))}]
    return " or ".join(owners) or "one of " + ", ".join(f"[{s.name}]" for s in fields(Config))


FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--dataset": "data.dataset",
        "--data": "data.file",
        "--data-dir": "data.dir",
        "--label": "data.label",
        "--device-column": "data.device_column",
        "--test-column": "data.test_column",
        "--drop": "data.drop",
        "--devices": "data.devices",
        "--partition": "data.partition",
        "--labelled": "data.labelled",
        "--model": "model.name",
        "--algorithm": "algorithm.name",
        "--beta": "algorithm.beta",
        "--gamma": "algorithm.gamma",
        "--eta": "algorithm.eta",
        "--alpha-p": "algorithm.alpha_p",
        "--alpha-r": "algorithm.alpha_r",
        "--active": "work.active",
        "--rounds": "work.rounds",
        "--loss-rate": "work.loss_rate",
        "--edge": "edge.profile",
        "--seed": "run.seed",
        "--executor": "run.executor",
        "--store": "run.store",
        "--processor": "run.device",
        "--precision": "run.precision",
    }
)
