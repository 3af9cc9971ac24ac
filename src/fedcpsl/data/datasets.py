"""Data sets by name, as they are published."""

import gzip
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.federation import Source
from fedcpsl.data.npz import read_archive
from fedcpsl.data.scaling import fixed_scaling
from fedcpsl.errors import InputError

DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Named(NamedTuple):
    """A data set by name: how it is read from the folders where it may lie, and whether it has devices of its own."""

    read: Callable[[Sequence[Path]], Source]
    has_devices: bool = False


def digits(_: Sequence[Path] = ()) -> Source:
    """1,797 images of 8 x 8 that ship with scikit-learn, as 64 numbers from 0 to 16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Source(bunch.data.astype(np.uint8), bunch.target.astype(np.int64), DIGITS, scaling=fixed_scaling(0.0, 16.0))


def idx_images(dataset: str, class_names: tuple[str, ...], folders: Sequence[Path]) -> Source:
    """The 60,000 training images of MNIST or Fashion-MNIST, 1 x 28 x 28 bytes each, from their IDX files."""
    from fedcpsl.data.download import PUBLISHED, locate

    paths = [locate(dataset, folders, PUBLISHED[dataset][kind]) for kind in ("images", "labels")]
    images, labels = map(read_idx, paths)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or labels.max(initial=0) > 9:
        raise InputError(f"{paths[0]}: its images and labels do not belong together; fetch both files again")
    # MNIST's mean and deviation as the paper uses them; those of other data are computed from the training samples
    scaling = fixed_scaling(0.1307 * 255, 0.3081 * 255) if dataset == "mnist" else None
    return Source(images[:, None], labels.astype(np.int64), class_names, scaling=scaling)


def cifar10(folders: Sequence[Path]) -> Source:
    """The 50,000 training images of CIFAR-10, 3 x 32 x 32 bytes each, from either of the official formats."""
    from fedcpsl.data.cifar import cifar10 as read

    images, labels = read(folders)
    return Source(images, labels, CIFAR10)


def har(folders: Sequence[Path]) -> Source:
    """Smartphone activity recognition: 30 people as 30 devices, windows of 6 channels x 128 readings.

    Windows overlap, so each person's last recording is the test set and no window is cut in two.
    """
    path = found_har(folders)
    if path is None:
        where = folders[0] / "har" / "har_windows.npz" if folders else "FOLDER/har/har_windows.npz"
        raise InputError(f"{where}: no such file; put it there and name the outer folder with --data-dir FOLDER")
    arrays = read_archive(path)
    missing = [name for name in ("x", "y", "user", "exp", "scale", "classes") if name not in arrays]
    if missing:
        raise InputError(f"{path}: has no array {missing[0]!r}; fetch the file again")
    x, y, user, recording = arrays["x"], arrays["y"].astype(np.int64), arrays["user"], arrays["exp"]
    if x.ndim != 3 or not (len(x) == len(y) == len(user) == len(recording)):
        raise InputError(f"{path}: its arrays do not belong together; fetch the file again")
    people, owner = np.unique(user, return_inverse=True)
    last = np.array([recording[user == person].max() for person in people])
    readings = (x * arrays["scale"]).astype(np.float32).transpose(0, 2, 1)
    return Source(
        np.ascontiguousarray(readings),
        y,
        tuple(str(name).lower().replace("_", " ") for name in arrays["classes"]),
        owner.astype(np.int64),
        tuple(f"person {person}" for person in people),
        test=recording == last[owner],
    )


def found_har(folders: Sequence[Path]) -> Path | None:
    """Where the file of `har` lies."""
    names = (folder / sub / "har_windows.npz" for folder in folders for sub in ("har", ""))
    return next((name for name in names if name.is_file()), None)


def whereabouts(dataset: str, folders: Sequence[Path]) -> Path | None:
    """Where a data set lies on this machine; None where it is to be downloaded, or put there by hand."""
    from fedcpsl.data.cifar import found_batches
    from fedcpsl.data.download import PUBLISHED, found

    if dataset == "har":
        return found_har(folders)
    if dataset == "cifar10":
        batches = found_batches(folders)
        return batches[0].parent if batches else None
    paths = [found(dataset, folders, file) for file in PUBLISHED[dataset].values()]
    return paths[0].parent if all(paths) and paths[0] else None


def read_idx(path: Path) -> NDArray[Any]:
    """An IDX file of bytes: a magic number that says the dimensions, their sizes, the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); delete it and fetch it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise InputError(f"{path}: not an IDX file of bytes; delete it and fetch it again")
    shape = np.frombuffer(raw, ">u4", raw[3], 4).astype(np.int64)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
    if len(values) != shape.prod():
        raise InputError(f"{path}: has {len(values)} values where its header says {shape.prod()}; fetch it again")
    return values.reshape(shape)


NAMED = {
    "digits": Named(digits),
    "mnist": Named(partial(idx_images, "mnist", DIGITS)),
    "fashion-mnist": Named(partial(idx_images, "fashion-mnist", CLOTHES)),
    "cifar10": Named(cifar10),
    "har": Named(har, has_devices=True),
}
