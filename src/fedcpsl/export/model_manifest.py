"""The manifest of an exported model: all that is needed to use it, where it comes from, and a checksum."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import fedcpsl
from fedcpsl.config import Config
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.tables import Columns
from fedcpsl.errors import InputError

GLOBAL = "global"
KEY = "fedcpsl"  # under which a file's metadata has the manifest
PredictSamples = Callable[[NDArray[Any]], NDArray[np.float32]]  # from raw samples to class probabilities


class ModelManifest(NamedTuple):
    """What travels with a model; the fields are the keys of its JSON."""

    device: str  # its name, or "global"
    number: int | None  # of the device in its run
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    features: tuple[str, ...]  # names of a table's columns; none where inputs have no names
    scaling: Scaling | None
    beta: float | None  # None if one network alone predicts
    algorithm: str
    config: dict[str, Any]
    data_sha256: str  # of the samples and the split that the run was made from
    fedcpsl: str = fedcpsl.__version__

    @property
    def columns(self) -> Columns:
        """Return the columns of a table that are not features."""
        data = self.config.get("data", {})
        return Columns(*(str(data.get(name, "")) for name in ("label", "device_column", "test_column")))


class Predictor(NamedTuple):
    """A model that is ready to predict."""

    manifest: ModelManifest
    predict: PredictSamples


def shareable_config(config: Config) -> dict[str, Any]:
    """Return a run's settings without the folders of paths, to be shared with the model."""
    settings = {name: values for name, values in asdict(config).items() if name != "edge"}
    data = settings["data"]
    settings["data"] = data | {name: Path(data[name]).name for name in ("file", "dir", "split")}
    return settings


def _as_dict(manifest: ModelManifest) -> dict[str, Any]:
    """Return the manifest as plain JSON values."""
    scaling = manifest.scaling and {name: np.asarray(t).tolist() for name, t in manifest.scaling._asdict().items()}
    return manifest._asdict() | {"scaling": scaling}


def with_checksum(manifest: ModelManifest, content: Iterable[bytes]) -> str:
    """Return the manifest as JSON, with a checksum of itself and of the file's other content."""
    plain = _as_dict(manifest)
    return json.dumps(plain | {"sha256": _checksum(plain, content)})


def verified_manifest(text: str | bytes, content: Iterable[bytes], path: Path) -> ModelManifest:
    """Return the manifest of a file; raise InputError if the checksum does not match."""
    try:
        plain = json.loads(text)
        checksum = plain.pop("sha256")
        manifest = _from_dict(plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its manifest cannot be read ({error}); export it again") from error
    if _checksum(plain, content) != checksum:
        raise InputError(f"{path}: corrupt (its checksum does not match its content); export it again")
    return manifest


def _checksum(plain: dict[str, Any], content: Iterable[bytes]) -> str:
    h = sha256(json.dumps(plain, sort_keys=True).encode())
    for piece in content:
        h.update(len(piece).to_bytes(8, "little"))
        h.update(piece)
    return h.hexdigest()


def _from_dict(plain: dict[str, Any]) -> ModelManifest:
    scaling = plain["scaling"]
    manifest = ModelManifest(**plain)._replace(
        classes=tuple(map(str, plain["classes"])),
        input_shape=tuple(int(n) for n in plain["input_shape"]),
        features=tuple(map(str, plain["features"])),
        scaling=scaling and Scaling(*(np.asarray(scaling[name], np.float64) for name in Scaling._fields)),
    )
    if not isinstance(manifest.config, dict) or len(manifest.classes) < 2 or min(manifest.input_shape, default=0) < 1:
        raise ValueError("it does not describe a classifier")
    return manifest
