"""From settings to a federation: data sets by name or your own files, partitioned or with a saved split.

Data sets are read as they are published; the samples of "synthetic" are made from the seed.
"""

import gzip
import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl import config
from fedcpsl.data.federation import Federation, Source, digest_of, federate, parse_axes, with_roles
from fedcpsl.data.notes import note_roles
from fedcpsl.data.ondemand import OnDemand, from_function
from fedcpsl.data.readers import read_archive, read_image_folder, read_npz
from fedcpsl.data.scaling import fixed_scaling
from fedcpsl.data.split import (
    LABELLED,
    ROLES,
    TEST,
    Owners,
    Shares,
    by_classes,
    by_dirichlet,
    by_quantity,
    by_shards,
    iid,
    like_training,
)
from fedcpsl.data.tables import Columns, check_columns, is_table, options_of, read_table
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.schedule import stream
from fedcpsl.settings import PUBLISHED_TESTS

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
    read_tests: Callable[[Sequence[Path]], Source] | None = None  # where tests are published apart from the rest


def digits(_: Sequence[Path] = ()) -> Source:
    """Return the 1,797 images of 8 x 8 that ship with scikit-learn, as 64 numbers from 0 to 16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Source(bunch.data.astype(np.uint8), bunch.target.astype(np.int64), DIGITS, scaling=fixed_scaling(0.0, 16.0))


def idx_images(dataset: str, class_names: tuple[str, ...], folders: Sequence[Path], *, tests: bool = False) -> Source:
    """Read the 60,000 training images of MNIST or Fashion-MNIST, or its 10,000 test images, from their IDX files.

    An image is 1 x 28 x 28 bytes.
    """
    from fedcpsl.data.download import PUBLISHED, find_or_download

    kinds = ("test images", "test labels") if tests else ("images", "labels")
    paths = [find_or_download(dataset, folders, PUBLISHED[dataset][kind]) for kind in kinds]
    images, labels = map(read_idx, paths)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or labels.max(initial=0) > 9:
        raise InputError(f"{paths[0]}: its images and labels do not match; fetch both files again")
    # MNIST's mean and deviation as the paper uses them; those of other data are computed from the training samples
    scaling = fixed_scaling(0.1307 * 255, 0.3081 * 255) if dataset == "mnist" else None
    return Source(images[:, None], labels.astype(np.int64), class_names, scaling=scaling)


def cifar10(folders: Sequence[Path], *, tests: bool = False) -> Source:
    """Read the 50,000 training images of CIFAR-10, or its 10,000 test images, from either of the official formats.

    An image is 3 x 32 x 32 bytes.
    """
    from fedcpsl.data.cifar import TESTS, TRAINING, read_cifar10

    images, labels = read_cifar10(folders, batches=TESTS if tests else TRAINING)
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


def find_dataset(dataset: str, folders: Sequence[Path], *, tests: bool = False) -> Path | None:
    """Return where a data set is on this machine; None if it must be downloaded, or copied there by hand.

    `tests`: only if those that are published apart are there too.
    """
    from fedcpsl.data.cifar import TESTS, TRAINING, find_batches
    from fedcpsl.data.download import PUBLISHED, find_file

    if dataset == "har":
        return find_har(folders)
    if dataset == "cifar10":
        parts = [find_batches(folders, names) for names in (TRAINING, TESTS)[: 1 + tests]]
        return parts[0][0].parent if all(parts) else None
    kinds = ("images", "labels", "test images", "test labels")[: 4 if tests else 2]
    paths = [find_file(dataset, folders, PUBLISHED[dataset][kind]) for kind in kinds]
    return paths[0].parent if all(paths) and paths[0] else None


def download_command(data: config.Data) -> str:
    """Return the command that downloads what the settings need of a data set by name."""
    tests = f" --set data.test={PUBLISHED_TESTS}" if data.test == PUBLISHED_TESTS else ""
    return f"fedcpsl data --dataset {data.dataset}{tests}"


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
    tests = round(data.test_share * SAMPLES)
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


def _published_in_two_parts(read: Callable[..., Source]) -> Dataset:
    return Dataset(read, read_tests=partial(read, tests=True))


NAMED = {
    "digits": Dataset(digits),
    "mnist": _published_in_two_parts(partial(idx_images, "mnist", DIGITS)),
    "fashion-mnist": _published_in_two_parts(partial(idx_images, "fashion-mnist", CLOTHES)),
    "cifar10": _published_in_two_parts(cifar10),
    "har": Dataset(har, has_devices=True),
}


DATASETS = (*NAMED, "synthetic", "own")
NO_LABEL = "which column is the label? Give --label COLUMN"
NO_DEVICES = "which device holds each row? Give --device-column COLUMN, or --partition iid --devices N"


def load_federation(data: config.Data, seed: int, source: Source | None = None) -> Federation | OnDemand:
    """Return the federation that the settings describe; give `source` if its samples are loaded already."""
    data = resolve_auto(data)
    if data.dataset == "synthetic":
        return synthetic(data, seed)
    source = source or load_source(data)
    normalise = data.normalise == "standard"
    if data.split:
        return reuse_split(Path(data.split), source, normalise=normalise)
    assigned = assign_devices(source, data, seed)
    try:
        federation = federate(assigned, shares(data), normalise=normalise, seed=seed)
    except InputError as error:
        raise InputError(f"{data.file}: {error}" if data.file else str(error)) from error
    if data.file:
        roles = federation.role
        note_roles(Path(data.file).name, federation.y, roles == LABELLED, roles == TEST, federation.class_names)
    return federation


HAR_AXES = "0 1 2, 3 4 5"  # of the accelerometer, and of the gyroscope


def resolve_auto(data: config.Data) -> config.Data:
    """Return the settings with a value for every `auto`."""
    dataset = "own" if data.file else data.dataset
    if dataset not in DATASETS:
        raise InputError(f"data.dataset = {dataset!r}: no such data set; {did_you_mean(dataset, DATASETS)}")
    if dataset == "own" and not data.file:
        raise InputError('data.dataset = "own": give your file too, with --data FILE')
    has_devices = dataset in ("own", "synthetic") or NAMED[dataset].has_devices
    partition = ("natural" if has_devices else "classes") if data.partition == config.AUTO else data.partition
    if partition == "natural" and not has_devices:
        raise InputError(f'data.partition = "natural": {dataset} has no devices of its own; give "classes" or another')
    if partition != "natural" and dataset != "own" and has_devices:
        raise InputError(f'data.partition = {partition!r}: {dataset} has devices of its own; give "natural"')
    if data.test == PUBLISHED_TESTS and (dataset not in NAMED or NAMED[dataset].read_tests is None):
        instead = ", or mark tests in a column (data.test_column)" if dataset == "own" else ""
        raise InputError(
            f'data.test = "published": {dataset} has no test set apart from the rest; '
            f"give a share, such as 0.2{instead}"
        )
    if isinstance(data.test, str) and data.test != PUBLISHED_TESTS:
        raise InputError(f'data.test = {data.test!r}: give a number between 0 and 1, or "{PUBLISHED_TESTS}"')
    labelled = (1.0 if dataset == "own" else 0.1) if data.labelled == config.AUTO else data.labelled
    if isinstance(labelled, list) and data.labelled_by == "overall":
        raise InputError('data.labelled_by = "overall": takes one share for all; give data.labelled as one number')
    normalise = data.normalise
    if normalise == config.AUTO:
        normalise = "none" if dataset == "synthetic" else "standard"
    if normalise != "none" and dataset == "synthetic":
        raise InputError(f"data.normalise = {normalise!r}: synthetic inputs are normalised as they are; give none")
    axes = (HAR_AXES if dataset == "har" else "") if data.axes == config.AUTO else data.axes
    return replace(data, dataset=dataset, partition=partition, labelled=labelled, normalise=normalise, axes=axes)


def load_source(data: config.Data, *, one_device: bool = False) -> Source:
    """Read the samples that the settings describe; those of one device among others may have no label."""
    source = _read_source(data, one_device=one_device)
    axes = "" if data.axes == config.AUTO else data.axes
    if axes and source.x.ndim != 3:
        raise InputError(f'data.axes = "{axes}": only windows [channels, time] have axes; leave it out')
    return source._replace(axes=parse_axes(axes, source.x.shape[1]))


def check_header(data: config.Data) -> None:
    """Raise InputError where a device's table lacks a column that is named; its rows are not read."""
    path = Path(data.file)
    if is_table(path):
        check_columns(path, Columns(data.label, data.device_column, data.test_column))


def _read_source(data: config.Data, *, one_device: bool) -> Source:
    if data.image_size and not (data.dataset == "own" and Path(data.file).is_dir()):
        raise InputError(
            f"data.image_size = {data.image_size}: only the images of a folder are scaled, and {data.title} is none; "
            "leave it out"
        )
    if data.dataset != "own":
        return _read_named(NAMED[data.dataset], data_folders(data.dir), published_tests=data.test == PUBLISHED_TESTS)
    path = Path(data.file)
    if path.is_dir():
        return read_image_folder(path, data.image_size, one_device=one_device)
    if is_table(path):
        if not path.exists():
            raise InputError(f"{path}: no such file")
        if not data.label and not one_device:
            raise InputError(f"{path}: {NO_LABEL}")
        if data.partition == "natural" and not data.device_column and not data.split:
            raise InputError(f"{path}: {NO_DEVICES}")
        options = options_of(data.drop, data.missing_labels, labels_needed=not one_device)
        return read_table(path, Columns(data.label, data.device_column, data.test_column), options)
    if path.suffix in (".npz", ".npy") or not path.exists():
        devices_needed = data.partition == "natural" and not data.split
        return read_npz(path, devices_needed=devices_needed, labels_needed=not one_device)
    raise InputError(f"{path}: give an .npz, .csv, .tsv or .parquet file, or a folder of images")


def _read_named(dataset: Dataset, folders: Sequence[Path], *, published_tests: bool) -> Source:
    """Read a data set by name; the tests that are published with it too, marked as tests, where they are asked for."""
    source = dataset.read(folders)
    if not published_tests:
        return source
    assert dataset.read_tests is not None
    tests = dataset.read_tests(folders)
    if tests.x.shape[1:] != source.x.shape[1:]:
        sizes = " and ".join(" x ".join(map(str, x.shape[1:])) for x in (source.x, tests.x))
        raise InputError(f'data.test = "published": training and test images differ in size ({sizes})')
    return source._replace(
        x=np.concatenate([source.x, tests.x]),
        y=np.concatenate([source.y, tests.y]),
        test=np.repeat([False, True], [len(source.y), len(tests.y)]),
    )


def assign_devices(source: Source, data: config.Data, seed: int) -> Source:
    """Return the source with a device for every sample, by the partition that the settings name."""
    n, y = data.devices, source.y
    if data.partition == "natural":
        if source.device is None:
            raise InputError(f"{data.file}: {NO_DEVICES}")
        return source
    if data.test == PUBLISHED_TESTS and source.test is not None:
        trained, tests = source.y[~source.test], source.y[source.test]
        owner = np.empty(len(y), np.int64)
        owner[~source.test] = _owners(trained, data, seed)
        owner[source.test] = like_training(trained, owner[~source.test], tests, n, seed)
    else:
        owner = _owners(y, data, seed)
    return source._replace(device=owner, names=tuple(map(str, range(n))))


def _owners(y: NDArray[np.int64], data: config.Data, seed: int) -> Owners:
    """The device of every sample, by the partition that the settings name."""
    n = data.devices
    if data.partition == "iid":
        return iid(len(y), n, seed)
    if data.partition == "quantity":
        return by_quantity(len(y), n, data.concentration, seed)
    if data.partition == "dirichlet":
        return by_dirichlet(y, n, data.concentration, seed)
    if data.partition == "shards":
        return by_shards(y, n, data.shards_per_device, seed)
    return by_classes(y, n, data.classes_per_device, seed)


def shares(data: config.Data) -> Shares:
    """Return the shares of labelled, test and validation samples and the server's, from resolved settings."""
    assert not isinstance(data.labelled, str)
    with_labels = None if data.labelled_devices == "all" else int(data.labelled_devices)
    kept = (data.labelled, data.labelled_by, data.stratified, with_labels)
    return Shares(*kept, data.test_share, data.validation, data.server, data.foreign_test)


def data_folders(given: str) -> list[Path]:
    """Return `--data-dir`, or FEDCPSL_DATA from the environment: data sets are searched there before the cache."""
    folder = given or os.environ.get("FEDCPSL_DATA", "")
    if folder and not Path(folder).is_dir():
        raise InputError(f"data.dir = {folder!r}: no such folder")
    return [Path(folder)] if folder else []


def split_bytes(source: Source, federation: Federation) -> bytes:
    """Return an .npz archive of the split: every sample's device (-1: none) and role. The source has its devices."""
    assert source.device is not None
    held = source.device >= 0
    device = np.full(len(source.y), -1, np.int64)
    role = np.full(len(source.y), -1, np.int8)
    device[held], role[held] = federation.device, federation.role
    content = io.BytesIO()
    np.savez_compressed(
        content,
        device=device,
        role=role,
        names=np.array(federation.names),
        samples_sha256=np.array(digest_of(source.x, source.y)),
    )
    return content.getvalue()


def reuse_split(path: Path, source: Source, *, normalise: bool) -> Federation:
    """Return the federation that a saved split describes; InputError if it was made for other samples."""
    arrays = read_archive(path)
    missing = [name for name in ("device", "role", "names", "samples_sha256") if name not in arrays]
    if missing:
        raise InputError(f"{path}: not a saved split (it has no {missing[0]!r}); make one with `fedcpsl data --save`")
    device, role = arrays["device"], arrays["role"]
    if str(arrays["samples_sha256"]) != digest_of(source.x, source.y):
        raise InputError(f"{path}: this split was made for other samples; make one with `fedcpsl data --save`")
    fits = device.dtype.kind == role.dtype.kind == "i" and device.shape == role.shape == source.y.shape
    held = device >= 0 if fits else device
    if not fits or (device >= len(arrays["names"])).any() or not np.isin(role[held], range(len(ROLES))).all():
        raise InputError(f"{path}: this split was changed by hand and does not fit; make it again")
    recording = None if source.recording is None else source.recording[held]
    source = source._replace(x=source.x if held.all() else source.x[held], names=tuple(map(str, arrays["names"])))
    source = source._replace(recording=recording)
    return with_roles(source, source.y[held], device[held], role[held].astype(np.int8), normalise=normalise)
