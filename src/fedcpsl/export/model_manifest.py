"""What travels with a model: all that is needed to use it, and where it came from."""

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
Answer = Callable[[NDArray[Any]], NDArray[np.float32]]  # from raw samples to the probabilities of the classes


class About(NamedTuple):
    """A model's manifest."""

    device: str  # its name, or "global"
    number: int | None  # of the device in its run
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    features: tuple[str, ...]  # names of a table's columns; none where inputs have no names
    scaling: Scaling | None
    beta: float | None  # None where one network alone answers
    algorithm: str
    config: dict[str, Any]
    data_sha256: str  # of the samples and the split that the run was made from
    fedcpsl: str = fedcpsl.__version__

    @property
    def columns(self) -> Columns:
        """The columns of a table that are no features."""
        data = self.config.get("data", {})
        return Columns(*(str(data.get(name, "")) for name in ("label", "device_column", "test_column")))


class Predictor(NamedTuple):
    """A model that is ready to be asked."""

    about: About
    answer: Answer


def shared_config(config: Config) -> dict[str, Any]:
    """A run's settings as they may travel: of paths, the last part alone."""
    settings = asdict(config)
    data = settings["data"]
    settings["data"] = data | {name: Path(data[name]).name for name in ("file", "dir", "split")}
    return settings


def manifest_of(about: About) -> dict[str, Any]:
    """As plain JSON."""
    scaling = about.scaling and {name: np.asarray(t).tolist() for name, t in about.scaling._asdict().items()}
    return about._asdict() | {"scaling": scaling}


def sealed(about: About, content: Iterable[bytes]) -> str:
    """The manifest as text, with a checksum of itself and of the file's other content."""
    manifest = manifest_of(about)
    return json.dumps(manifest | {"sha256": _checksum(manifest, content)})


def opened(text: str | bytes, content: Iterable[bytes], path: Path) -> About:
    """The manifest of a file; InputError where the file is not as it was written."""
    try:
        manifest = json.loads(text)
        checksum = manifest.pop("sha256")
        about = _about(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its manifest cannot be read ({error}); export it again") from error
    if _checksum(manifest, content) != checksum:
        raise InputError(f"{path}: corrupt (its checksum does not match its content); export it again")
    return about


def _checksum(manifest: dict[str, Any], content: Iterable[bytes]) -> str:
    h = sha256(json.dumps(manifest, sort_keys=True).encode())
    for piece in content:
        h.update(len(piece).to_bytes(8, "little"))
        h.update(piece)
    return h.hexdigest()


def _about(manifest: dict[str, Any]) -> About:
    scaling = manifest["scaling"]
    about = About(**manifest)._replace(
        classes=tuple(map(str, manifest["classes"])),
        input_shape=tuple(int(n) for n in manifest["input_shape"]),
        features=tuple(map(str, manifest["features"])),
        scaling=scaling and Scaling(*(np.asarray(scaling[name], np.float64) for name in Scaling._fields)),
    )
    if not isinstance(about.config, dict) or len(about.classes) < 2 or min(about.input_shape, default=0) < 1:
        raise ValueError("it does not describe a classifier")
    return about
