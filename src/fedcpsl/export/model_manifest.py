"""The manifest of an exported model: all that is needed to use it, where it comes from, and a checksum; and new samples
for the model (arrays, tables and images), read as its manifest says."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import fedcpsl
from fedcpsl.config import Config
from fedcpsl.data.readers import IMAGE_FILES, as_colour, images_in, is_unlabelled, read_archive, read_images
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.tables import Columns, is_table, options_of, read_rows
from fedcpsl.errors import InputError

GLOBAL = "global"
KEY = "fedcpsl"  # under which a file's metadata has the manifest
PredictSamples = Callable[[NDArray[Any]], NDArray[np.float32]]  # from raw samples to class probabilities
UNKNOWN = -1
KINDS = ".npy, .npz, .csv, .tsv, .parquet, an image or a folder of images"


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


class NewSamples(NamedTuple):
    """Samples as a model is given them, raw."""

    x: NDArray[Any]  # [samples, *shape]
    names: Sequence[int | str]  # numbers from 0, or the images' paths
    y: NDArray[np.int64] | None = None  # -1: unknown; the number of classes: a class that the model lacks
    devices: Sequence[str] | None = None  # of each sample, if the input has them


def read_samples(path: Path, manifest: ModelManifest) -> NewSamples:
    """Read a file of any supported kind and check it against the model."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in IMAGE_FILES:
        samples = _images(path, manifest)
    elif is_table(path):
        samples = _table(path, manifest)
    elif suffix in (".npy", ".npz"):
        samples = _arrays(path, manifest)
    else:
        raise InputError(f"{path}: give {KINDS}" if path.exists() else f"{path}: no such file")
    if samples.x.dtype.kind in "US":
        raise InputError(f"{path}: holds text where the model takes numbers; encode it as numbers, as in training")
    if samples.x.shape[1:] != manifest.input_shape:
        raise InputError(
            f"{path}: an input has shape {list(samples.x.shape[1:])} where the model's is {list(manifest.input_shape)}"
        )
    if not len(samples.x):
        raise InputError(f"{path}: has no samples")
    if samples.x.dtype.kind not in "fiub" or not (np.abs(samples.x) <= np.finfo(np.float32).max).all():
        raise InputError(f"{path}: has inputs that are no finite numbers, or too large for float32")
    plain = samples.x.dtype in (np.uint8, np.float32, np.float64)
    return samples if plain else samples._replace(x=samples.x.astype(np.float64))


def accuracy(samples: NewSamples, predictions: NDArray[np.float32]) -> tuple[int, int] | None:
    """Return how many samples with a known class are predicted correctly, and their number; None without any."""
    if samples.y is None or not (samples.y != UNKNOWN).any():
        return None
    known = samples.y != UNKNOWN
    return int((predictions.argmax(1) == samples.y)[known].sum()), int(known.sum())


def _arrays(path: Path, manifest: ModelManifest) -> NewSamples:
    if path.suffix.lower() == ".npy":
        try:
            x = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path}: not a readable .npy array; write it again with numpy.save") from error
        return NewSamples(x, range(len(x) if x.ndim else 0))
    arrays = read_archive(path)
    if "x" not in arrays:
        raise InputError(f"{path}: has no array 'x' (it has {', '.join(arrays) or 'none'}); add it")
    x, y = arrays["x"], arrays.get("y")
    if x.ndim == 0:
        raise InputError(f"{path}: x has shape []: give one row per sample")
    if y is not None:
        if y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise InputError(f"{path}: y must be one class number for each of the {len(x)} samples, -1 where unknown")
        y = np.where(y < 0, UNKNOWN, np.minimum(y.astype(np.int64), len(manifest.classes)))
    device = arrays.get("device")
    if device is not None and device.shape != (len(x),):
        raise InputError(f"{path}: device must name a device for each of the {len(x)} samples")
    return NewSamples(x, range(len(x)), y, None if device is None else list(map(str, device.tolist())))


def _table(path: Path, manifest: ModelManifest) -> NewSamples:
    if not manifest.features:
        raise InputError(
            f"{path}: the model was not trained on a table, so columns have no meaning to it; "
            f"give an array [samples, {', '.join(map(str, manifest.input_shape))}] as .npy or .npz"
        )
    data = manifest.config.get("data", {})
    options = options_of(data.get("drop", ""), data.get("missing_labels", ""))
    x, labels, devices = read_rows(path, manifest.features, manifest.columns, options)
    return NewSamples(x, range(len(x)), None if labels is None else _classes(labels, manifest), devices)


def _images(path: Path, manifest: ModelManifest) -> NewSamples:
    if len(manifest.input_shape) != 3 or manifest.input_shape[0] not in (1, 3):
        raise InputError(f"{path}: the model takes inputs of shape {list(manifest.input_shape)}, which are no images")
    found = images_in(path) if path.is_dir() else [path]
    if not found:
        raise InputError(f"{path}: has no images ({', '.join(IMAGE_FILES)})")
    scaled = bool(manifest.config.get("data", {}).get("image_size"))
    x, channels = read_images(found, manifest.input_shape[1:] if scaled else None), manifest.input_shape[0]
    if x.shape[1] > channels:
        raise InputError(f"{path}: has coloured images where the model's are grey; convert them")
    x = as_colour(x) if channels == 3 else x  # as in training
    names = [str(each.relative_to(path)) if path.is_dir() else each.name for each in found]
    folders = [each.parent.name for each in found]
    labelled = any(folder in manifest.classes for folder in folders)
    hidden = ["" if is_unlabelled(folder) else folder for folder in folders]
    return NewSamples(x, names, _classes(hidden, manifest) if labelled and path.is_dir() else None)


def _classes(labels: Sequence[str], manifest: ModelManifest) -> NDArray[np.int64]:
    place = {name: i for i, name in enumerate(manifest.classes)} | {"": UNKNOWN, "-1": UNKNOWN}
    return np.array([place.get(label, len(manifest.classes)) for label in labels], np.int64)
