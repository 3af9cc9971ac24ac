"""A simulation's state as one safetensors file, with a checksum of its content."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.errors import RunError
from fedcpsl.runs.files import write_whole
from fedcpsl.runs.folder import metrics_digest
from fedcpsl.simulation import Setup, State
from fedcpsl.simulation.store import Sparse, put_rows, sparse_states
from fedcpsl.trees import Tree, leaves, map_tensors, named_leaves, rebuilt

KEPT = 2  # checkpoints at a time
AT_ONCE = 1 << 22  # bytes of rows that are brought together at a time, and of states on disk before they are let go
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Rows(NamedTuple):
    """Some rows of a tensor, saved as if they were one; brought together a few at a time."""

    tensor: Tensor
    which: Tensor  # at the tensor's side

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.which), *self.tensor.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


def checkpoints(folder: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


def save_checkpoint(folder: Path, state: State) -> None:
    """Write the state, then drop what is older than the last two."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    numbers: dict[str, Any] = {
        "round": state.round,
        "steps": state.steps,
        "uplink_bytes": state.uplink_bytes,
        "downlink_bytes": state.downlink_bytes,
        "lost": state.lost,
        **metrics_digest(folder),
    }
    path = folder / "checkpoints" / f"round-{state.round:07d}.safetensors"
    save_tensors(path, _tensors(state), numbers, state.sparse)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()


def drop_checkpoints(folder: Path) -> None:
    """Once a run is finished, for one that keeps its metrics alone."""
    if (folder / "checkpoints").exists():
        shutil.rmtree(folder / "checkpoints")  # with what a kill may have left half written


def load_checkpoint(path: Path, setup: Setup) -> State:
    """The state that `save_checkpoint` wrote, on the setup's device."""
    tensors, numbers = load_tensors(path)
    where = setup.device_data.where
    try:
        devices, sparse = _devices(tensors, setup)
        on_demand = setup.supply is not None
        if on_demand:
            setup.device_data.hidden.zero_()  # nobody's samples are there
        return State(
            setup=setup,
            round=numbers["round"],
            server=_tree(tensors, "server", setup.first_server(), where),
            devices=devices,
            targets=setup.device_data.one_hot.clone() if on_demand else tensors["targets"].to(where),
            sparse=sparse,
            active_rounds=tensors["active_rounds"].numpy(),
            steps=numbers["steps"],
            uplink_bytes=numbers["uplink_bytes"],
            downlink_bytes=numbers["downlink_bytes"],
            costs={},
            lost=numbers["lost"],
        )
    except KeyError as error:
        raise RunError(f"{path}: not a checkpoint of this version: {error} is missing") from error


def _tree(tensors: Mapping[str, Tensor], prefix: str, like: Tree, where: torch.device | None = None) -> Tree:
    """A state of a checkpoint, by the names of its fields."""
    found = [tensors[name] for name in named_leaves(like, prefix)]
    return rebuilt(like, [t if where is None else t.to(where) for t in found])


def _devices(tensors: Mapping[str, Tensor], setup: Setup) -> tuple[Tree, Sparse | None]:
    """The device states of a checkpoint, where they live."""
    one = setup.first_device(setup.first_server())
    rows, where = _tree(tensors, "devices", one), setup.device_data.where
    if not setup.sparse:
        return map_tensors(lambda t: t.to(where), rows), None
    joined = {int(name.split(".")[1]) for name in tensors if name.startswith("start.")}
    starts = {r: _tree(tensors, f"start.{r}", one, where) for r in joined}
    devices, sparse = sparse_states(
        starts[0], setup.devices, setup.nu_shape, setup.store, setup.store_folder, setup.device_data.one_hot
    )
    index = tensors["there"]
    all_kept, had = (*leaves(devices), sparse.nu), (*leaves(rows), tensors["nu"])
    for kept, behind, before in zip(all_kept, sparse.maps, had, strict=True):
        put_rows(kept, behind, index.tolist(), before)
    sparse.there[index.numpy()] = True
    return devices, sparse._replace(starts=starts)


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | Rows],
    numbers: dict[str, int],
    sparse: Sparse | None = None,
    *,
    private: bool = False,
) -> None:
    """Tensors and a few numbers as one safetensors file, with a checksum; `sparse` where they are of states on disk."""
    release = sparse.release if sparse else lambda: None
    placed, end = {}, 0
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
    for name in names:
        t = tensors[name]
        begin, end = end, end + prod(t.shape) * t.dtype.itemsize
        placed[name] = {"dtype": TYPES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    about = {"numbers": numbers, "sha256": _digest(tensors, numbers, release)}
    header = json.dumps({"__metadata__": {"fedcpsl": json.dumps(about)}} | placed).encode()
    header += b" " * (-len(header) % 8)

    def content() -> Iterator[Any]:
        yield len(header).to_bytes(8, "little") + header
        for name in names:
            yield from _pieces(tensors[name])

    write_whole(path, _released(content(), release), private=private)


def numbers_of(path: Path) -> dict[str, Any]:
    """The numbers in a file of `save_tensors`, without reading its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["fedcpsl"])["numbers"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: corrupt ({error}); {_way_out(path)}") from error


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What `save_tensors` wrote; a file that changed since is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("fedcpsl", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path}: corrupt ({error}); {_way_out(path)}") from error
    if "sha256" not in about:
        raise RunError(f"{path}: not written by this version of fedcpsl; {_way_out(path)}")
    if _digest(tensors, about["numbers"]) != about["sha256"]:
        raise RunError(f"{path}: corrupt (its checksum does not match its content); {_way_out(path)}")
    return tensors, about["numbers"]


def _way_out(path: Path) -> str:
    others = [other.name for other in path.parent.glob("round-*.safetensors") if other.name < path.name]
    return f"move it away to resume from {max(others)}" if others else "move it away to start over"


def _tensors(state: State) -> dict[str, Tensor | Rows]:
    """What a checkpoint holds: of states that are sparse, the rows that are there."""
    sparse, kept = state.sparse, named_leaves(state.devices, "devices")
    always: dict[str, Tensor | Rows] = {"active_rounds": torch.from_numpy(state.active_rounds)}
    always |= named_leaves(state.server, "server")
    labels = {} if state.setup.supply is not None else {"targets": state.targets}
    if sparse is None:
        return always | labels | kept
    index = torch.from_numpy(sparse.there.nonzero()[0])
    rows = {name: Rows(t, index.to(t.device)) for name, t in (kept | {"nu": sparse.nu}).items()}
    starts = {name: t for r, one in sparse.starts.items() for name, t in named_leaves(one, f"start.{r}").items()}
    return always | labels | rows | starts | {"there": index}


def _pieces(tensor: Tensor | Rows) -> Iterator[Any]:
    """A tensor's bytes, a piece at a time."""
    if not prod(tensor.shape):
        return
    if isinstance(tensor, Rows):
        step = max(1, AT_ONCE * len(tensor.which) // (prod(tensor.shape) * tensor.dtype.itemsize))
        for some in tensor.which.split(step):
            yield from _pieces(tensor.tensor.index_select(0, some))
    else:
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _released(pieces: Iterable[Any], release: Callable[[], None]) -> Iterator[Any]:
    """The pieces; memory of states on disk is given up now and then on the way."""
    read = 0
    for piece in pieces:
        yield piece
        read += len(piece)
        if read >= AT_ONCE:
            release()
            read = 0


def _digest(
    tensors: Mapping[str, Tensor | Rows], numbers: dict[str, int], release: Callable[[], None] = lambda: None
) -> str:
    def content() -> Iterator[Any]:
        yield json.dumps(numbers).encode()
        for name in sorted(tensors):
            yield f"{name}{tensors[name].dtype}{list(tensors[name].shape)}".encode()
            yield from _pieces(tensors[name])

    h = sha256()
    for piece in _released(content(), release):
        h.update(piece)
    return h.hexdigest()
