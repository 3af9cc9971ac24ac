"""Where samples come from: data sets by name, and your own .npz file."""

import gzip
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl import config
from fedcpsl.data.archive import read_archive
from fedcpsl.data.federation import Federation, draw_roles
from fedcpsl.data.partition import by_classes
from fedcpsl.errors import InputError, did_you_mean

DATASETS = ("digits", "mnist", "own")
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


class Labelled(NamedTuple):
    """A data set before it is split: inputs ready for a network, and classes."""

    x: NDArray[Any]
    y: NDArray[np.int64]


def load_federation(data: config.Data, seed: int) -> Federation:
    """The federation that the settings describe."""
    data = resolve(data)
    if data.dataset == "own":
        return read_npz(Path(data.file), data, seed)
    samples = digits() if data.dataset == "digits" else mnist(data_folder(data.dir))
    device = by_classes(samples.y, data.devices, data.classes_per_device, seed)
    x, y, held = samples.x, samples.y, device >= 0
    if not held.all():  # classes that no device holds; else spare a large copy
        x, y, device = x[held], y[held], device[held]
    federation = Federation(
        x,
        y,
        device,
        draw_roles(y, device, None, float(data.labelled), data.test, seed),
        int(samples.y.max()) + 1,
        tuple(str(i) for i in range(data.devices)),
    )
    federation.check()
    return federation


def resolve(data: config.Data) -> config.Data:
    """The settings with every `auto` decided."""
    from dataclasses import replace

    dataset = "own" if data.file else data.dataset
    if dataset not in DATASETS:
        raise InputError(f"data.dataset = {dataset!r}: no such data set; {did_you_mean(dataset, DATASETS)}")
    if dataset == "own" and not data.file:
        raise InputError('data.dataset = "own": give your file too, with --data FILE.npz')
    partition = ("device" if dataset == "own" else "classes") if data.partition == config.AUTO else data.partition
    if (partition == "device") != (dataset == "own"):
        fitting = "device" if dataset == "own" else "classes"
        raise InputError(f"data.partition = {partition!r}: does not fit {dataset}; give {fitting!r}")
    labelled = (1.0 if dataset == "own" else 0.1) if data.labelled == config.AUTO else data.labelled
    return replace(data, dataset=dataset, partition=partition, labelled=labelled)


def digits() -> Labelled:
    """1,797 images of 8 x 8 that ship with scikit-learn, scaled to [0, 1]."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Labelled((bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64))


def mnist(folder: Path) -> Labelled:
    """MNIST's 60,000 training images from its IDX files (.gz or not) in `folder` or `folder/mnist`."""
    images = read_idx(_find(folder, "train-images-idx3-ubyte"))
    labels = read_idx(_find(folder, "train-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise InputError(f"{folder}: the MNIST images and labels do not belong together; fetch both files again")
    x = images.reshape(len(images), -1).astype(np.float32)
    x /= np.float32(255 * MNIST_STD)
    x -= np.float32(MNIST_MEAN / MNIST_STD)
    return Labelled(x, labels.astype(np.int64))


def data_folder(given: str) -> Path:
    """`--data-dir`, or FEDCPSL_DATA from the environment."""
    folder = given or os.environ.get("FEDCPSL_DATA", "")
    if not folder:
        raise InputError("data.dir: say where the data set is, with --data-dir FOLDER or FEDCPSL_DATA=FOLDER")
    if not Path(folder).is_dir():
        raise InputError(f"data.dir = {folder!r}: no such folder")
    return Path(folder)


def _find(folder: Path, name: str) -> Path:
    candidates = [folder / sub / (name + end) for sub in ("mnist", "") for end in (".gz", "")]
    for path in candidates:
        if path.is_file():
            return path
    raise InputError(f"{candidates[0]}: no such file; put MNIST's IDX files there (.gz is fine)")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of bytes: a magic number that says the dimensions, their sizes, the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); fetch the file again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise InputError(f"{path}: not an IDX file of bytes; fetch the file again")
    shape = np.frombuffer(raw, ">u4", raw[3], 4).astype(np.int64)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
    if len(values) != shape.prod():
        raise InputError(f"{path}: has {len(values)} values where its header says {shape.prod()}; fetch it again")
    return values.reshape(shape)


def read_npz(path: Path, data: config.Data, seed: int) -> Federation:
    """Your own data: `x`, `y` (-1 where unlabelled), `device`, and optionally `test`."""
    arrays = read_archive(path)
    for name in ("x", "y", "device"):
        if name not in arrays:
            raise InputError(f"{path}: has no array {name!r} (it has {', '.join(arrays) or 'none'}); add it")
    try:
        federation = Federation.from_arrays(
            arrays["x"],
            arrays["y"],
            arrays["device"],
            arrays.get("test"),
            labelled=float(data.labelled),
            test_fraction=data.test,
            seed=seed,
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return federation
