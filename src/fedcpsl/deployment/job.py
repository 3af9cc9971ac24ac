"""A federation's job as a TOML file: a run's config, and [federation] with what a simulator would take from data."""

import tomllib
from dataclasses import replace
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcpsl.algorithm import optional
from fedcpsl.algorithms import find_algorithm
from fedcpsl.config import Config, flat_settings, new_config, to_toml
from fedcpsl.data.federation import Source, parse_axes
from fedcpsl.data.readers import as_colour
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.tables import columns_of_words, features_in_order
from fedcpsl.engine import Network, cache_last_call
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.federation.messages import MAX_SEED, sent_tensors
from fedcpsl.federation.privacy import Protection, check_protection
from fedcpsl.federation.robustness import COORDINATE_WISE, Limits, check_limits
from fedcpsl.federation.server import RoundRules
from fedcpsl.federation.terms import Terms, shapes_of, terms_from
from fedcpsl.models import choose_model, make_model
from fedcpsl.schedule import stream
from fedcpsl.settings import AUTO, UNNAMED_ALGORITHM, toml_value
from fedcpsl.simulation.setup import choose_eta
from fedcpsl.trees import bytes_of

RULE_KEYS: dict[str, type] = {
    "deadline": float,
    "min_devices": int,
    "quorum": int,
    "over_sampling": float,
    "budget": float,
    "attempts": int,
}
RENAMED_KEYS = {"least": "min_devices"}  # since version 0.1
LIMIT_KEYS: dict[str, type] = {
    "bound": float,
    "trim": float,
    "largest_norm": float,
    "largest_samples": int,
}
DATA_KEYS = ("shape", "classes", "features", "shift", "scale")
TRIAL_KEY = "trial"  # set by a server that searches a step size, and by nobody else
TRIAL_ATTEMPTS = 2  # at a round of a trial: a step size that is too large fails soon
PRIVACY_KEYS: dict[str, type] = {"clip": float, "noise": float, "delta": float}
DEFAULT_DELTA = 1e-5
MAX_TEXT_LENGTH = 1 << 18  # characters of a job
MAX_LAYERS = 100
MAX_PARAMETERS = 1 << 28  # of a model: 1 GiB in float32


class Job(NamedTuple):
    """A federation's settings; `text` is the file, which is sent to devices."""

    text: str
    config: Config
    shape: tuple[int, ...]  # of one input
    classes: tuple[str, ...]
    scaling: Scaling | None  # of inputs, the same on every device
    rules: RoundRules
    protection: Protection  # the minimum for every device's updates
    delta: float  # at which epsilon is computed
    features: tuple[str, ...] = ()  # names of a table's features in their order; empty: devices have the same order
    trial: bool = False  # of a step size: devices hold back some labels, and tell the loss on them at the end


def read_job(text: str, where: str) -> Job:
    """Read a job from its text. Every setting is checked, also the model's size before any memory is allocated."""
    config, own = _sections(text, where, UNNAMED_ALGORITHM)
    if ":" in config.model.name or config.model.name == AUTO:
        raise InputError(f"{where}: model.name = {config.model.name!r}: name a model of fedcpsl, for example mlp")
    shape, classes = own.get("shape"), own.get("classes")
    if not isinstance(shape, list) or not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        raise InputError(f"{where}: [federation] shape: give the sizes of one input, for example [1, 28, 28]")
    side = config.data.image_size
    if side and (len(shape) != 3 or shape[1:] != [side, side]):
        raise InputError(
            f"{where}: data.image_size = {side}: an input has shape {shape}; give {[*shape[:1], side, side]}"
        )
    if not isinstance(classes, list) or len(classes) < 2 or len({str(c) for c in classes}) < len(classes):
        raise InputError(f'{where}: [federation] classes: give the names of at least two, for example ["cat", "dog"]')
    if not isinstance(own.get(TRIAL_KEY, False), bool):
        raise InputError(f"{where}: [federation] {TRIAL_KEY} = {own[TRIAL_KEY]!r}: leave it out")
    if config.run.seed >= MAX_SEED:
        raise InputError(f"{where}: run.seed = {config.run.seed}: give a number below {MAX_SEED}")
    private = _numbers(PRIVACY_KEYS, own, where)
    protection = Protection(private.get("clip", 0.0), private.get("noise", 0.0))
    check_protection(protection)
    rules = _rules(config, own, where)
    job = Job(
        text,
        _without_sums(config, where) if rules.limits.aggregation in COORDINATE_WISE else config,
        tuple(shape),
        tuple(map(str, classes)),
        _scaling(own, shape, where),
        rules,
        protection,
        private.get("delta", DEFAULT_DELTA),
        _features(own, shape, where),
        own.get(TRIAL_KEY) is True,
    )
    if parameters_of(job) > MAX_PARAMETERS:
        raise InputError(f"{where}: its model has {parameters_of(job)} parameters; the maximum is {MAX_PARAMETERS}")
    return job


def explicit_job(text: str, where: str, algorithm: str = UNNAMED_ALGORITHM) -> str:
    """Return the text of the same job with every setting in it, so that no reader falls back to its own defaults.

    `algorithm` is meant where the job names none.
    """
    return _text(*_sections(text, where, algorithm))


def explicit_step_size(text: str) -> bool:
    """Return whether a job that can be read says itself what its step size is."""
    return "eta" in tomllib.loads(text).get("algorithm", {})


def _text(config: Config, own: dict[str, Any]) -> str:
    return "\n".join([to_toml(config) + "[federation]", *(f"{key} = {toml_value(own[key])}" for key in own), ""])


def with_step_size(job: Job, eta: float) -> Job:
    """Return the job with another step size."""
    config, own = _sections(job.text, "the job", UNNAMED_ALGORITHM)
    return read_job(_text(replace(config, algorithm=replace(config.algorithm, eta=eta)), own), "the job")


def trial_of(job: Job, eta: float, rounds: int) -> Job:
    """Return a job that tries a step size for a few rounds."""
    config, own = _sections(with_step_size(job, eta).text, "the job", UNNAMED_ALGORITHM)
    short = replace(config, work=replace(config.work, rounds=rounds))
    return read_job(_text(short, own | {TRIAL_KEY: True, "attempts": TRIAL_ATTEMPTS}), "the trial")


def _sections(text: str, where: str, algorithm: str) -> tuple[Config, dict[str, Any]]:
    """Return the config of a job and its section [federation]; `algorithm` is meant where it names none."""
    if len(text) > MAX_TEXT_LENGTH:
        raise InputError(f"{where}: has {len(text)} characters; the maximum is {MAX_TEXT_LENGTH}")
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise InputError(f"{where}: not valid TOML: {error}") from error
    except RecursionError:
        raise InputError(f"{where}: not valid TOML: its lists or tables are nested too deeply") from None
    own = content.pop("federation", None)
    if not isinstance(own, dict):
        raise InputError(f"{where}: needs a section [federation] with shape and classes")
    renamed = {old: new for old, new in RENAMED_KEYS.items() if new not in own}
    own = {renamed.get(key, key): value for key, value in own.items()}
    known = [*RULE_KEYS, *LIMIT_KEYS, "aggregation", *DATA_KEYS, *PRIVACY_KEYS]
    for key in own:
        if key not in (*known, TRIAL_KEY):
            raise InputError(f"{where}: [federation] {key}: no such setting; {did_you_mean(key, known)}")
    if "edge" in content:
        raise InputError(f"{where}: [edge] is for simulations; real devices have networks of their own: leave it out")
    try:
        return new_config(flat_settings(content, where), algorithm), own
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def parameters_of(job: Job) -> int:
    """Return the number of parameters of the job's model, without allocating it."""
    hidden = job.config.model.hidden
    if len(hidden) > MAX_LAYERS or max(hidden, default=0) > MAX_PARAMETERS or prod(job.shape) > MAX_PARAMETERS:
        return MAX_PARAMETERS + 1
    with torch.device("meta"):
        return sum(p.numel() for p in _model_of(job).parameters())


@cache_last_call
def max_message_bytes(job: Job) -> tuple[int, int]:
    """Return the maximum bytes of the tensors of an instruction and of a reply: what the algorithm sends each way."""
    shapes = shapes_of(job_terms(job))
    both_ways = (shapes.broadcast, shapes.probe), (shapes.upload, shapes.answer)
    sizes = [
        [sum(map(bytes_of, sent_tensors(tree).values())) for tree in trees if tree is not None] for trees in both_ways
    ]
    return max(sizes[0]), max(sizes[1])


def _model_of(job: Job) -> nn.Module:
    config = job.config
    name = choose_model(config.model.name, job.shape, "own")
    return make_model(name, config.model.hidden, job.shape, len(job.classes))


def _without_sums(config: Config, where: str) -> Config:
    """Return the config without c and c_i: coordinate-wise aggregation counts no whole update of any device."""
    without = optional(find_algorithm(config.algorithm.name)[0], "without_sums")
    try:
        return replace(config, algorithm=without(config.algorithm)) if without else config
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _numbers(kinds: dict[str, type], own: dict[str, Any], where: str) -> dict[str, Any]:
    given = {}
    for key, kind in kinds.items():
        if key in own:
            if isinstance(own[key], bool) or not isinstance(own[key], int | kind):
                raise InputError(f"{where}: [federation] {key} = {own[key]!r}: give a number")
            given[key] = kind(own[key])
            if not isfinite(given[key]):
                raise InputError(f"{where}: [federation] {key} = {own[key]!r}: give a finite number")
    return given


def _rules(config: Config, own: dict[str, Any], where: str) -> RoundRules:
    given, limits = _numbers(RULE_KEYS, own, where), Limits(**_numbers(LIMIT_KEYS, own, where))
    limits = limits._replace(aggregation=own.get("aggregation", limits.aggregation))
    check_limits(limits)
    active = config.work.active if isinstance(config.work.active, int) else 2
    always = {"rounds": config.work.rounds, "seed": config.run.seed, "deadline": 600.0, "min_devices": active}
    return RoundRules(**always | given, limits=limits)


def _features(own: dict[str, Any], shape: list[int], where: str) -> tuple[str, ...]:
    features = own.get("features", [])
    named = isinstance(features, list) and all(isinstance(name, str) and name for name in features)
    if features and len(shape) > 1:
        raise InputError(
            f"{where}: [federation] features: inputs of shape {shape} are no rows of a table; leave it out"
        )
    if not named or len(set(features)) < len(features) or (features and [len(features)] != shape):
        found = f"{len(features)} names, {len(set(features))} of them different" if named else toml_value(features)
        raise InputError(
            f"{where}: [federation] features: give the names of all {shape[0]} features of a table, each once, where "
            f'there are {found}; a column of words has one for each word, such as "kind=cat"'
        )
    return tuple(features)


def _scaling(own: dict[str, Any], shape: list[int], where: str) -> Scaling | None:
    if "shift" not in own and "scale" not in own:
        return None
    try:
        shift, scale = (np.asarray(own.get(key, default), np.float64) for key, default in (("shift", 0), ("scale", 1)))
    except (TypeError, ValueError):
        raise InputError(f"{where}: [federation] shift, scale: give numbers, or one per feature or channel") from None
    if len(shape) > 1:  # numbers of channels
        shift, scale = (t.reshape(-1, *[1] * (len(shape) - 1)) if t.shape == (shape[0],) else t for t in (shift, scale))
    if not (np.isfinite(shift).all() and np.isfinite(scale).all() and (scale > 0).all()):
        raise InputError(f"{where}: [federation] shift, scale: give finite numbers, scale above 0")
    for name, value in (("shift", shift), ("scale", scale)):
        try:
            fits = np.broadcast_shapes(value.shape, tuple(shape)) == tuple(shape)
        except ValueError:
            fits = False
        if not fits:
            raise InputError(
                f"{where}: [federation] {name} has shape {list(value.shape)} where an input has shape {shape}; give "
                "one number, or one per feature or channel"
            )
    return Scaling(shift, scale)


@cache_last_call
def job_terms(job: Job) -> Terms:
    """Return the terms of a job, the same on both sides."""
    config = job.config
    torch.manual_seed(int(stream(config.run.seed, "init").integers(2**63)))
    dtype = torch.float64 if config.run.dtype == "float64" else torch.float32
    network = Network(_model_of(job), torch.zeros(2, *job.shape, dtype=dtype), len(job.classes))
    eta = choose_eta(config.algorithm.eta, config.data.dataset, config.work.unit)
    active = 4 if config.work.active == AUTO else int(config.work.active)
    return terms_from(replace(config.algorithm, eta=eta), network, config.work, active)


def _features_of(source: Source, job: Job, where: Path) -> NDArray[Any]:
    """Return a table's features in the job's order; without names in the job, as they are, if all are numbers."""
    if not job.features:
        words = columns_of_words(where, source.features)
        if words:
            raise InputError(
                f"{where}: column {words[0]!r} has words, which every device would number in its own way; let the job "
                'name all features ([federation] features, such as "kind=cat" for a word), or leave it out (--drop)'
            )
        return source.x
    named = set(source.features)
    columns = {name.partition("=")[0] for name in named} | named
    missing = [name for name in job.features if name not in columns and name.partition("=")[0] not in columns]
    if missing:
        raise InputError(f"{where}: has no column {missing[0]!r}, which is a feature of the job")
    try:
        return features_in_order(source.x, source.features, job.features, "is no feature of the job")
    except InputError as error:
        raise InputError(f"{where}: {error}; leave it out (--drop), or name it in the job") from error


def fit_to_job(source: Source, job: Job, where: Path) -> Source:
    """Return a device's samples with the job's features and classes; InputError where they do not fit."""
    if source.features:
        source = source._replace(x=_features_of(source, job, where), features=job.features)
    if where.is_dir() and job.shape[0] == 3:
        source = source._replace(x=as_colour(source.x))
    if source.x.shape[1:] != job.shape:
        raise InputError(f"{where}: an input has shape {list(source.x.shape[1:])} where the job's is {list(job.shape)}")
    index = {name: i for i, name in enumerate(job.classes)}
    unknown = [name for name in source.class_names if name not in index]
    if unknown:
        raise InputError(f"{where}: the job has no class {unknown[0]!r}; it has {', '.join(job.classes)}")
    encoded = np.array([*(index[name] for name in source.class_names), -1])
    axes = "" if job.config.data.axes == AUTO else job.config.data.axes
    triples = parse_axes(axes, job.shape[0])
    return source._replace(y=encoded[source.y], class_names=job.classes, scaling=job.scaling, axes=triples)
