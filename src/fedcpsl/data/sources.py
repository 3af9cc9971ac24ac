"""Where samples come from: data sets by name and your own files; and who holds them."""

import os
from dataclasses import replace
from pathlib import Path

from fedcpsl import config
from fedcpsl.data.datasets import NAMED
from fedcpsl.data.federation import Federation, Source, array_source, federate
from fedcpsl.data.notes import note_classes, note_inputs, note_roles
from fedcpsl.data.npz import read_archive
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.partition import by_classes, by_dirichlet, by_quantity, by_shards, iid
from fedcpsl.data.roles import LABELLED, TEST, Shares
from fedcpsl.data.split import reuse_split
from fedcpsl.data.synthetic import synthetic
from fedcpsl.data.tables import Choices, Columns, is_table, read_table
from fedcpsl.errors import InputError, did_you_mean

DATASETS = (*NAMED, "synthetic", "own")
WHO = "who holds which row? Say it with --device-column COLUMN, or share rows out with --partition iid --devices N"


def load_federation(data: config.Data, seed: int, source: Source | None = None) -> Federation | OnDemand:
    """The federation that the settings describe; `source` where its samples are read already."""
    data = resolve(data)
    if data.dataset == "synthetic":
        return synthetic(data, seed)
    source = source or load_source(data)
    normalise = data.normalise == "standard"
    if data.split:
        return reuse_split(Path(data.split), source, normalise=normalise)
    placed = place(source, data, seed)
    try:
        federation = federate(placed, shares(data), normalise=normalise, seed=seed)
    except InputError as error:
        raise InputError(f"{data.file}: {error}" if data.file else str(error)) from error
    if data.file:
        roles = federation.role
        note_roles(Path(data.file).name, federation.y, roles == LABELLED, roles == TEST, federation.class_names)
    return federation


def resolve(data: config.Data) -> config.Data:
    """The settings with every `auto` decided."""
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
    return replace(data, dataset=dataset, partition=partition, labelled=labelled, normalise=normalise)


def load_source(data: config.Data) -> Source:
    """The samples, read from wherever the settings say."""
    if data.dataset != "own":
        return NAMED[data.dataset].read(data_folders(data.dir))
    path = Path(data.file)
    if path.is_dir():
        from fedcpsl.data.images import read_image_folder

        return read_image_folder(path)
    if is_table(path):
        if not path.exists():
            raise InputError(f"{path}: no such file")
        if not data.label:
            raise InputError(f"{path}: which column is the label? Say it with --label COLUMN")
        if data.partition == "natural" and not data.device_column and not data.split:
            raise InputError(f"{path}: {WHO}")
        dropped = tuple(name.strip() for name in data.drop.split(",")) if data.drop else ()
        choices = Choices(dropped, missing_is_class=data.missing_labels == "class")
        return read_table(path, Columns(data.label, data.device_column, data.test_column), choices)
    if path.suffix in (".npz", ".npy") or not path.exists():
        return read_npz(path, devices_needed=data.partition == "natural" and not data.split)
    raise InputError(f"{path}: give an .npz, .csv, .tsv or .parquet file, or a folder of images")


def place(source: Source, data: config.Data, seed: int) -> Source:
    """The source with a device for every sample, by the partition that the settings name."""
    n, y = data.devices, source.y
    if data.partition == "natural":
        if source.device is None:
            raise InputError(f"{data.file}: {WHO}")
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
    """How each device's samples are shared out, from resolved settings."""
    assert not isinstance(data.labelled, str)
    having = None if data.labelled_devices == "all" else int(data.labelled_devices)
    return Shares(data.labelled, data.labelled_by, data.stratified, having, data.test, data.validation)


def read_npz(path: Path, *, devices_needed: bool) -> Source:
    """Your own arrays: `x`, `y` (-1 where unlabelled), `device`, and optionally `test`."""
    arrays = read_archive(path)
    for name in ("x", "y", "device") if devices_needed else ("x", "y"):
        if name not in arrays:
            raise InputError(f"{path}: has no array {name!r} (it has {', '.join(arrays) or 'none'}); add it")
    try:
        source = array_source(arrays["x"], arrays["y"], arrays.get("device"), arrays.get("test"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    note_inputs(path.name, source.x)
    note_classes(path.name, source.class_names)
    return source


def data_folders(given: str) -> list[Path]:
    """`--data-dir`, or FEDCPSL_DATA from the environment: where data sets are looked for before the cache."""
    folder = given or os.environ.get("FEDCPSL_DATA", "")
    if folder and not Path(folder).is_dir():
        raise InputError(f"data.dir = {folder!r}: no such folder")
    return [Path(folder)] if folder else []
