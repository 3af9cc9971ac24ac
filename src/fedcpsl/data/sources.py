"""From settings to a federation: data sets by name or your own files, partitioned or with a saved split."""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedcpsl import config
from fedcpsl.data.datasets import NAMED, synthetic
from fedcpsl.data.federation import Federation, Source, digest_of, federate, parse_axes, with_roles
from fedcpsl.data.notes import note_roles
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.readers import read_archive, read_image_folder, read_npz
from fedcpsl.data.split import LABELLED, ROLES, TEST, Shares, by_classes, by_dirichlet, by_quantity, by_shards, iid
from fedcpsl.data.tables import Columns, TableOptions, check_columns, is_table, read_table
from fedcpsl.errors import InputError, did_you_mean

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


def load_source(data: config.Data) -> Source:
    """Read the samples that the settings describe."""
    source = _read_source(data)
    axes = "" if data.axes == config.AUTO else data.axes
    if axes and source.x.ndim != 3:
        raise InputError(f'data.axes = "{axes}": only windows [channels, time] have axes; leave it out')
    return source._replace(axes=parse_axes(axes, source.x.shape[1]))


def check_header(data: config.Data) -> None:
    """Raise InputError where your own table lacks a column that is named; its rows are not read."""
    path = Path(data.file)
    if is_table(path):
        if not data.label:
            raise InputError(f"{path}: {NO_LABEL}")
        check_columns(path, Columns(data.label, data.device_column, data.test_column))


def _read_source(data: config.Data) -> Source:
    if data.dataset != "own":
        return NAMED[data.dataset].read(data_folders(data.dir))
    path = Path(data.file)
    if path.is_dir():
        return read_image_folder(path)
    if is_table(path):
        if not path.exists():
            raise InputError(f"{path}: no such file")
        if not data.label:
            raise InputError(f"{path}: {NO_LABEL}")
        if data.partition == "natural" and not data.device_column and not data.split:
            raise InputError(f"{path}: {NO_DEVICES}")
        dropped = tuple(name.strip() for name in data.drop.split(",")) if data.drop else ()
        options = TableOptions(dropped, missing_is_class=data.missing_labels == "class")
        return read_table(path, Columns(data.label, data.device_column, data.test_column), options)
    if path.suffix in (".npz", ".npy") or not path.exists():
        return read_npz(path, devices_needed=data.partition == "natural" and not data.split)
    raise InputError(f"{path}: give an .npz, .csv, .tsv or .parquet file, or a folder of images")


def assign_devices(source: Source, data: config.Data, seed: int) -> Source:
    """Return the source with a device for every sample, by the partition that the settings name."""
    n, y = data.devices, source.y
    if data.partition == "natural":
        if source.device is None:
            raise InputError(f"{data.file}: {NO_DEVICES}")
        return source
    if data.partition == "iid":
        owner = iid(len(y), n, seed)
    elif data.partition == "quantity":
        owner = by_quantity(len(y), n, data.concentration, seed)
    elif data.partition == "dirichlet":
        owner = by_dirichlet(y, n, data.concentration, seed)
    elif data.partition == "shards":
        owner = by_shards(y, n, data.shards_per_device, seed)
    else:
        owner = by_classes(y, n, data.classes_per_device, seed)
    return source._replace(device=owner, names=tuple(map(str, range(n))))


def shares(data: config.Data) -> Shares:
    """Return the shares of labelled, test and validation samples and the server's, from resolved settings."""
    assert not isinstance(data.labelled, str)
    with_labels = None if data.labelled_devices == "all" else int(data.labelled_devices)
    kept = (data.labelled, data.labelled_by, data.stratified, with_labels)
    return Shares(*kept, data.test, data.validation, data.server, data.foreign_test)


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
