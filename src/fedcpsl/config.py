"""Every setting: its default, what it may be, and what it means. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.kinds import (
    choice,
    is_range,
    is_share_or_list,
    is_sizes,
    real,
    setting_of,
    text,
    toml_value,
    whole,
)

Numbers = float | list[float]
AUTO = "auto"


@dataclass(frozen=True)
class Data:
    """Where the samples come from and who holds them."""

    dataset: str = text("digits", "digits (ships with scikit-learn), mnist, or own (set by --data)")
    file: str = text("", "your own data: an .npz file with x, y (-1 where unlabelled), device and, if you like, test")
    dir: str = text("", "folder with data sets such as mnist/*.gz; FEDCPSL_DATA in the environment by default")
    devices: int = whole(20, "how many devices share a data set that has none of its own", 1)
    partition: str = choice(
        AUTO,
        "who gets what: distinct classes per device, or the file's own devices",
        AUTO,
        "classes",
        "device",
    )
    classes_per_device: int = whole(2, 'distinct classes that each device holds (partition "classes")', 1)
    labelled: float | str = real(
        AUTO,
        "share of the training labels that devices may see; auto: 0.1, and all of them in your own data",
        0,
        1,
        open_ends="[",
        also=(AUTO,),
    )
    test: float = real(
        0.2,
        "share of each device's samples that is its test set (unless the file says)",
        0,
        1,
        open_ends="[]",
    )


@dataclass(frozen=True)
class Model:
    """The network that every device trains."""

    name: str = text("mlp", "mlp, or your own as package.module:function, called with (input_shape, classes)")
    hidden: list[int] = setting_of(
        [200, 200], "widths of the mlp's hidden layers", "a list of whole numbers of at least 1", is_sizes
    )


@dataclass(frozen=True)
class Algorithm:
    """The method, its numbers, and switches that take single parts out or put them in."""

    name: str = text("fedcpsl", "fedcpsl, apfsl, apfl, fedshvrp, fedshvr, scaffold or fedavg")
    beta: Numbers = setting_of(
        0.75,
        "weight of the localized model in a device's prediction; one number, or a list with one per device",
        "a number from 0 to 1, or a list of them",
        is_share_or_list,
    )
    gamma: float = real(0.8, "local momentum", 0, 1, open_ends="]")
    eta: float | str = real(
        AUTO,
        "step size of the global model; auto: the paper's for mnist, 0.05 otherwise",
        0,
        open_ends="[",
        also=(AUTO,),
    )
    eta_lc: float | str = real(
        AUTO,
        "step size of the localized model; auto: 2 eta for fedcpsl, eta for apfl and apfsl",
        0,
        open_ends="[",
        also=(AUTO,),
    )
    eta_g: float | str = real(
        "mean_steps", "step size of the server", 0, open_ends="[", also=("mean_steps", "mean_effective_steps")
    )
    alpha_p: float = real(0.03, "weight of the pseudo-label loss", 0)
    alpha_r: float = real(0.01, "weight of the regulariser; 0 makes pseudo-labels one-hot", 0)
    pseudo_labels: str = choice("closed_form", "how pseudo-labels are renewed", "closed_form", "gradient")
    eta_v: float = real(1.0, 'step size of pseudo-labels (pseudo_labels = "gradient")', 0, open_ends="[")
    unlabelled: bool | str = choice(AUTO, "use unlabelled data", AUTO, True, False)
    personal: bool | str = choice(AUTO, "keep a localized model on every device", AUTO, True, False)
    control_variates: bool | str = choice(AUTO, "client variance reduction", AUTO, True, False)
    momentum: bool | str = choice(AUTO, "local momentum", AUTO, True, False)
    normalised: bool | str = choice(AUTO, "divide updates by the effective steps", AUTO, True, False)


@dataclass(frozen=True)
class Work:
    """Who takes part in a round and how much each does."""

    rounds: int = whole(100, "communication rounds", 1)
    active: int | str = whole(
        AUTO, "devices drawn in each round; auto: 4, and all of them for fedshvr", 1, also=(AUTO,)
    )
    unit: str = choice(
        "epochs",
        "what `amount` counts; hlu draws epochs anew for each device and round",
        "epochs",
        "steps",
        "hlu",
    )
    amount: int = whole(2, "local epochs or steps of an active device", 1)
    hlu: list[int] = setting_of(
        [1, 5], "the range that hlu draws epochs from", "two whole numbers, the smaller first", is_range
    )
    batch_labelled: int = whole(32, "labelled samples in a minibatch", 1)
    batch_unlabelled: int = whole(32, "unlabelled samples in a minibatch", 1)
    loss_rate: float = real(0.0, "probability that an upload is lost on its way", 0, 1)
    joiners: int = whole(0, "devices (the last ones) that join late", 0)
    join_round: int = whole(1, "the round after which they join", 1)


@dataclass(frozen=True)
class Run:
    """How it is computed and what is kept."""

    seed: int = whole(0, "seed of everything random: split, start, devices, samples", 0)
    executor: str = choice(
        AUTO,
        "one device after another, or side by side; auto: side by side where it is faster",
        AUTO,
        "sequential",
        "vectorised",
    )
    slots: int = whole(0, "most devices side by side; 0: all active ones", 0)
    processes: int | str = whole(
        AUTO,
        "processes that share a round's devices; auto: one per core on Linux, 1 where there is a GPU",
        1,
        also=(AUTO,),
    )
    device: str = text(AUTO, "cpu, cuda, mps; auto: cuda where there is one, else cpu")
    dtype: str = choice("float32", "floating-point type", "float32", "float64")
    evaluate_every: int = whole(1, "rounds between evaluations", 1)
    checkpoint_seconds: float = real(30.0, "seconds between checkpoints; 0: one after every round", 0)


@dataclass(frozen=True)
class Config:
    """All settings of a run, as in its config.toml."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    algorithm: Algorithm = field(default_factory=Algorithm)
    work: Work = field(default_factory=Work)
    run: Run = field(default_factory=Run)


def setting(section: str, key: str) -> Field[Any]:
    """The declaration of one setting, or an error that names the nearest one."""
    sections = {f.name: f.default_factory for f in fields(Config)}
    if section not in sections:
        raise InputError(f"[{section}]: no such section; {did_you_mean(section, sections)}")
    known = {f.name: f for f in fields(sections[section])}  # type: ignore[arg-type]
    if key not in known:
        raise InputError(f"{section}.{key}: no such setting; {did_you_mean(key, known)}")
    return known[key]


def check(section: str, values: Any) -> None:
    """Refuse the first setting of a section that is out of range."""
    for declared in fields(values):
        value = getattr(values, declared.name)
        if not declared.metadata["test"](value):
            raise InputError(f"{section}.{declared.name} = {toml_value(value)}: give {declared.metadata['accepts']}")


def with_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with `section.key` values put in, each checked."""
    for name, value in values.items():
        section, _, key = name.partition(".")
        setting(section, key)
        part = replace(getattr(config, section), **{key: value})
        config = replace(config, **{section: part})
    for part in fields(config):
        check(part.name, getattr(config, part.name))
    return config


def read_config(path: Path) -> dict[str, Any]:
    """The `section.key` values of a TOML file."""
    import tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error
    values = {}
    for section, content in document.items():
        if not isinstance(content, dict):
            raise InputError(f"{path}: {section} stands outside a section; put it under {_sections_with(section)}")
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
        except tomllib.TOMLDecodeError:
            continue
    return typed


def _leading_zero(text: str) -> str:
    import re

    return re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)


def to_toml(config: Config) -> str:
    """The config as a TOML document that reads back equal."""
    lines = []
    for section, content in asdict(config).items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in content.items()), ""]
    return "\n".join(lines)


def _sections_with(key: str) -> str:
    owners = [f"[{s.name}]" for s in fields(Config) if key in {f.name for f in fields(s.default_factory)}]  # type: ignore[arg-type]
    return " or ".join(owners) or "one of " + ", ".join(f"[{s.name}]" for s in fields(Config))


FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--dataset": "data.dataset",
        "--data": "data.file",
        "--data-dir": "data.dir",
        "--devices": "data.devices",
        "--labelled": "data.labelled",
        "--algorithm": "algorithm.name",
        "--beta": "algorithm.beta",
        "--gamma": "algorithm.gamma",
        "--eta": "algorithm.eta",
        "--alpha-p": "algorithm.alpha_p",
        "--alpha-r": "algorithm.alpha_r",
        "--active": "work.active",
        "--rounds": "work.rounds",
        "--loss-rate": "work.loss_rate",
        "--seed": "run.seed",
        "--executor": "run.executor",
        "--device": "run.device",
    }
)
