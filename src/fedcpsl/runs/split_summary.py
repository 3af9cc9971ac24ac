"""Who holds what, kept in a run's folder: samples by device and class."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcpsl.config import Config
from fedcpsl.data.datasets import whereabouts
from fedcpsl.data.download import PUBLISHED
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.roles import LABELLED, UNLABELLED
from fedcpsl.data.sources import data_folders, load_federation, resolve
from fedcpsl.errors import InputError, RunError
from fedcpsl.runs.files import read_json, to_json, write_whole
from fedcpsl.runs.folder import read_manifest

MOST_DEVICES, MOST_CLASSES = 60, 40
FILE = "split.json"
_from_data: dict[Path, "Holdings | str"] = {}  # by folder: a page that is watched asks again and again


class Holdings(NamedTuple):
    """Samples of the first devices by class, [devices][classes]; `unknown` are unlabelled ones of unknown class."""

    devices: int  # of the whole federation
    names: list[str]
    classes: list[str]
    labelled: list[list[int]]
    unlabelled: list[list[int]]
    unknown: list[int]
    all_classes: int = 0  # of the whole federation; 0 in folders from before


def holdings_of(federation: Federation | OnDemand) -> Holdings:
    """Counts of the first devices and classes."""
    shown = min(MOST_DEVICES, federation.devices)
    few = federation if isinstance(federation, Federation) else federation.held(range(shown))
    names = federation.class_names or tuple(map(str, range(federation.classes)))
    labelled, unlabelled = (few.class_counts(role)[:shown] for role in (LABELLED, UNLABELLED))
    unknown = few.counts[:shown, UNLABELLED] - unlabelled.sum(1)
    return Holdings(
        devices=federation.devices,
        names=[str(name) for name in federation.names[:shown]],
        classes=[str(name) for name in names[:MOST_CLASSES]],
        labelled=np.asarray(labelled)[:, :MOST_CLASSES].tolist(),
        unlabelled=np.asarray(unlabelled)[:, :MOST_CLASSES].tolist(),
        unknown=unknown.tolist(),
        all_classes=federation.classes,
    )


def filled(holdings: Holdings) -> int:
    """How many cells of the two tables are not empty."""
    return sum(n > 0 for rows in (holdings.labelled, holdings.unlabelled) for row in rows for n in row)


def write_holdings(folder: Path, federation: Federation | OnDemand) -> None:
    """split.json into a run's folder."""
    write_whole(folder / FILE, to_json(holdings_of(federation)._asdict()) + "\n")


def read_holdings(folder: Path, config: Config) -> Holdings | str:
    """What a run's folder says, or its data where the folder is from before; or why nobody can tell."""
    try:
        return _checked(Holdings(**read_json(folder / FILE)))
    except FileNotFoundError:
        pass
    except InputError as error:
        return str(error)
    except (ValueError, TypeError) as error:
        return f"{folder / FILE}: cannot be read ({error}); was it damaged or changed by hand?"
    place = folder.resolve()
    if place not in _from_data:
        _from_data[place] = _recount(folder, config)
    return _from_data[place]


def _checked(holdings: Holdings) -> Holdings:
    """TypeError or ValueError where counts are not what they are for every device and class."""
    shape = len(holdings.names), len(holdings.classes)
    for counts in (holdings.labelled, holdings.unlabelled):
        table = np.asarray(counts, np.int64)
        if table.shape != shape and table.size:
            raise ValueError(f"counts of shape {list(table.shape)} where {list(shape)} are needed")
    if len(np.asarray(holdings.unknown, np.int64)) != shape[0] or not isinstance(holdings.devices, int):
        raise ValueError("not a count for every device")
    return holdings


def _recount(folder: Path, config: Config) -> Holdings | str:
    """From the data itself, where it lies on this machine: looking at a run never downloads anything."""
    try:
        data = resolve(config.data)
        if data.dataset in PUBLISHED and whereabouts(data.dataset, data_folders(data.dir)) is None:
            return f"{data.dataset} is not on this machine; fetch it with: fedcpsl data --dataset {data.dataset}"
        federation = load_federation(data, config.run.seed)
    except (InputError, RunError, OSError) as error:
        return f"the data cannot be read: {error}"
    if federation.digest != read_manifest(folder)["split_sha256"]:
        return "the data has changed since the run began"
    return holdings_of(federation)
