"""split.json of a run's folder: numbers of samples by device and class."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcpsl.config import Config
from fedcpsl.data.download import PUBLISHED
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.sources import data_folders, download_command, find_dataset, load_federation, resolve_auto
from fedcpsl.data.split import LABELLED, UNLABELLED
from fedcpsl.errors import InputError, RunError
from fedcpsl.runs.folder import read_manifest
from fedcpsl.settings import PUBLISHED_TESTS
from fedcpsl.storage import read_json, to_json, write_whole

MAX_DEVICES, MAX_CLASSES = 60, 40
FILE = "split.json"
_cache: dict[Path, "SplitSummary | str"] = {}  # by folder: a page that is watched reads it every few seconds


class SplitSummary(NamedTuple):
    """Samples of the first devices by class, [devices][classes]; `unknown` are unlabelled ones of unknown class."""

    devices: int  # of the whole federation
    names: list[str]
    classes: list[str]
    labelled: list[list[int]]
    unlabelled: list[list[int]]
    unknown: list[int]
    all_classes: int = 0  # of the whole federation; 0 in folders of older versions


def summarise_split(federation: Federation | OnDemand) -> SplitSummary:
    """Count the samples of the first devices by class."""
    shown = min(MAX_DEVICES, federation.devices)
    few = federation if isinstance(federation, Federation) else federation.federation_of(range(shown))
    names = federation.class_names or tuple(map(str, range(federation.classes)))
    labelled, unlabelled = (few.class_counts(role)[:shown] for role in (LABELLED, UNLABELLED))
    unknown = few.counts[:shown, UNLABELLED] - unlabelled.sum(1)
    return SplitSummary(
        devices=federation.devices,
        names=[str(name) for name in federation.names[:shown]],
        classes=[str(name) for name in names[:MAX_CLASSES]],
        labelled=np.asarray(labelled)[:, :MAX_CLASSES].tolist(),
        unlabelled=np.asarray(unlabelled)[:, :MAX_CLASSES].tolist(),
        unknown=unknown.tolist(),
        all_classes=federation.classes,
    )


def nonzero_cells(summary: SplitSummary) -> int:
    """Return the number of non-zero cells of the two tables."""
    return sum(n > 0 for rows in (summary.labelled, summary.unlabelled) for row in rows for n in row)


def write_split_summary(folder: Path, federation: Federation | OnDemand) -> None:
    """Write split.json into a run's folder."""
    write_whole(folder / FILE, to_json(summarise_split(federation)._asdict()) + "\n")


def read_split_summary(folder: Path, config: Config) -> SplitSummary | str:
    """Read split.json, or count the data again in folders of older versions; returns a text if neither is possible."""
    try:
        return _checked(SplitSummary(**read_json(folder / FILE)))
    except FileNotFoundError:
        pass
    except InputError as error:
        return str(error)
    except (ValueError, TypeError) as error:
        return f"{folder / FILE}: cannot be read ({error}); was it damaged or changed by hand?"
    key = folder.resolve()
    if key not in _cache:
        _cache[key] = _recount(folder, config)
    return _cache[key]


def _checked(summary: SplitSummary) -> SplitSummary:
    """Raise TypeError or ValueError unless there is a count for every device and class."""
    shape = len(summary.names), len(summary.classes)
    for counts in (summary.labelled, summary.unlabelled):
        table = np.asarray(counts, np.int64)
        if table.shape != shape and table.size:
            raise ValueError(f"counts of shape {list(table.shape)} where {list(shape)} are needed")
    if len(np.asarray(summary.unknown, np.int64)) != shape[0] or not isinstance(summary.devices, int):
        raise ValueError("not a count for every device")
    return summary


def _recount(folder: Path, config: Config) -> SplitSummary | str:
    """Count the data itself if it is on this machine: reading a run never downloads anything."""
    try:
        data = resolve_auto(config.data)
        published = data.test == PUBLISHED_TESTS
        if data.dataset in PUBLISHED and not find_dataset(data.dataset, data_folders(data.dir), tests=published):
            return f"{data.dataset} is not on this machine; download it with: {download_command(data)}"
        federation = load_federation(data, config.run.seed)
    except (InputError, RunError, OSError) as error:
        return f"the data cannot be read: {error}"
    if federation.digest != read_manifest(folder)["split_sha256"]:
        return "the data has changed since the run began"
    return summarise_split(federation)
