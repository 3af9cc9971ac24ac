"""Data sets by name: as they are published, and "synthetic", whose samples are made from the seed."""

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl import config
from fedcpsl.data.federation import Source
from fedcpsl.data.ondemand import OnDemand, from_function
from fedcpsl.data.readers import read_archive
from fedcpsl.data.scaling import fixed_scaling
from fedcpsl.errors import InputError
from fedcpsl.schedule import stream

DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FEATURES, CLASSES, SAMPLES = 64, 10, 30  # samples of each device, tests included
SPREAD, SHIFT = 0.4, 0.5  # standard deviations of the classes' means, and of a device's shift
CONCENTRATION = 0.5  # of the Dirichlet distribution of a device's classes
SYNTHETIC_SETTINGS = {"dataset", "dir", "devices", "partition", "labelled", "test", "normalise"}


class Dataset(NamedTuple):
    """A data set by name: how it is read from the folders where it may be, and whether it has devices of its own."""

    read: Callable[[Sequence[Path]], Source]
    has_devices: bool = False


def digits(_: Sequence[Path] = ()) -> Source:
    """Return the 1,797 images of 8 x 8 that ship with scikit-learn, as 64 numbers from 0 to 16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Source(bunch.data.astype(np.uint8), bunch.target.astype(np.int64), DIGITS, scaling=fixed_scaling(0.0, 16.0))


def idx_images(dataset: str, class_names: tuple[str, ...], folders: Sequence[Path]) -> Source:
    """Read the 60,000 training images of MNIST or Fashion-MNIST, 1 x 28 x 28 bytes each, from their IDX files."""
    from fedcpsl.data.download import PUBLISHED, find_or_download

    paths = [find_or_download(dataset, folders, PUBLISHED[dataset][kind]) for kind in ("images", "labels")]
    images, labels = map(read_idx, paths)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or labels.max(initial=0) > 9:
        raise InputError(f"{paths[0]}: its images and labels do not match; fetch both files again")
    # MNIST's mean and deviation as the paper uses them; those of other data are computed from the training samples
    scaling = fixed_scaling(0.1307 * 255, 0.3081 * 255) if dataset == "mnist" else None
    return Source(images[:, None], labels.astype(np.int64), class_names, scaling=scaling)


def cifar10(folders: Sequence[Path]) -> Source:
    """Read the 50,000 training images of CIFAR-10, 3 x 32 x 32 bytes each, from either of the official formats."""
    from fedcpsl.data.cifar import cifar10 as read

    images, labels = read(folders)
    return Source(images, labels, CIFAR10)


def har(folders: Sequence[Path]) -> Source:
    """Read smartphone activity recognition: 30 people as 30 devices, windows of 6 channels x 128 readings.

    Windows overlap, so each person's last recording is the test set and no window is cut in two.
    """
    path = find_har(folders)
    if path is None:
        where = folders[0] / "har" / "har_windows.npz" if folders else "FOLDER/har/har_windows.npz"
        raise InputError(f"{where}: no such file; put it there and name the outer folder with --data-dir FOLDER")
    arrays = read_archive(path)
    missing = [name for name in ("x", "y", "user", "exp", "scale", "classes") if name not in arrays]
    if missing:
        raise InputError(f"{path}: has no array {missing[0]!r}; fetch the file again")
    x, y, user, recording = arrays["x"], arrays["y"].astype(np.int64), arrays["user"], arrays["exp"]
    if x.ndim != 3 or not (len(x) == len(y) == len(user) == len(recording)):
        raise InputError(f"{path}: its arrays do not match; fetch the file again")
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
        recording=recording.astype(np.int64),
    )


def find_har(folders: Sequence[Path]) -> Path | None:
    """Return the path of the file of `har`, or None."""
    names = (folder / sub / "har_windows.npz" for folder in folders for sub in ("har", ""))
    return next((name for name in names if name.is_file()), None)


def find_dataset(dataset: str, folders: Sequence[Path]) -> Path | None:
    """Return where a data set is on this machine; None if it must be downloaded, or copied there by hand."""
    from fedcpsl.data.cifar import find_batches
    from fedcpsl.data.download import PUBLISHED, find_file

    if dataset == "har":
        return find_har(folders)
    if dataset == "cifar10":
        batches = find_batches(folders)
        return batches[0].parent if batches else None
    paths = [find_file(dataset, folders, file) for file in PUBLISHED[dataset].values()]
    return paths[0].parent if all(paths) and paths[0] else None


def read_idx(path: Path) -> NDArray[Any]:
    """Read an IDX file of bytes: a magic number with the number of dimensions, their sizes, the values."""
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


def synthetic(data: config.Data, seed: int) -> OnDemand:
    """Return the federation "synthetic": any number of devices, each one's samples made from the seed and its number.

    Classes are Gaussian, shifted and unequally frequent on each device; `data` has the shares of labels and tests.
    """
    usual = config.Data(axes=data.axes if data.axes in ("", config.AUTO) else config.AUTO)
    for setting in fields(data):
        if setting.name not in SYNTHETIC_SETTINGS and getattr(data, setting.name) != getattr(usual, setting.name):
            raise InputError(f"data.{setting.name}: has no meaning for the data set synthetic; leave it out")
    share = np.asarray(data.labelled, float)
    if share.shape not in ((), (data.devices,)):
        raise InputError(f"data.labelled has {len(share)} values for {data.devices} devices; give one each, or one")
    tests = round(data.test * SAMPLES)
    labelled = np.where(share > 0, np.maximum(1, (share * (SAMPLES - tests)).round()), 0).astype(np.int64)
    means = stream(seed, "split").normal(scale=SPREAD, size=(CLASSES, FEATURES))
    return from_function(
        partial(_synthetic_samples, seed, means),
        devices=data.devices,
        classes=CLASSES,
        labelled=labelled.tolist(),
        unlabelled=(SAMPLES - tests - labelled).tolist(),
        tests=tests,
    )


def _synthetic_samples(
    seed: int, means: NDArray[np.float64], device: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    draw = stream(seed, "split", device + 1)
    y = draw.choice(CLASSES, SAMPLES, p=draw.dirichlet(np.full(CLASSES, CONCENTRATION)))
    x = means[y] + draw.normal(scale=SHIFT, size=FEATURES) + draw.standard_normal((SAMPLES, FEATURES))
    return x.astype(np.float32), y


NAMED = {
    "digits": Dataset(digits),
    "mnist": Dataset(partial(idx_images, "mnist", DIGITS)),
    "fashion-mnist": Dataset(partial(idx_images, "fashion-mnist", CLOTHES)),
    "cifar10": Dataset(cifar10),
    "har": Dataset(har, has_devices=True),
}
