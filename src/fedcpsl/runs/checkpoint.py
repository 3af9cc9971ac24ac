"""A run's states and models as safetensors files: checkpoints to resume from, and the models of a finished run."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.data.scaling import Scaling
from fedcpsl.edge.cell import EdgeTerms
from fedcpsl.edge.state import ARRAYS as EDGE_ARRAYS
from fedcpsl.edge.state import NUMBERS as EDGE_NUMBERS
from fedcpsl.edge.state import EdgeState, Records, initial_edge_state
from fedcpsl.engine import Network
from fedcpsl.errors import RunError
from fedcpsl.evaluation import own_models, prediction_numbers
from fedcpsl.runs.edge_files import ROUNDS_FILE
from fedcpsl.runs.folder import metrics_digest
from fedcpsl.simulation import Setup, State
from fedcpsl.simulation.flight import TASK_NUMBERS, flight_numbers, flight_of, stacked
from fedcpsl.simulation.passes import sent_by
from fedcpsl.simulation.state import Flight
from fedcpsl.simulation.store import Sparse, put_rows, sparse_states
from fedcpsl.storage import SelectedRows, load_tensors, save_tensors, sync_file
from fedcpsl.trees import Tree, leaves, map_tensors, named_leaves, rebuilt

KEPT = 2  # checkpoints at a time


def checkpoints(folder: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


def save_checkpoint(folder: Path, state: State) -> None:
    """Write the state, then delete all checkpoints but the last two."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    numbers: dict[str, Any] = {
        "round": state.round,
        "steps": state.steps,
        "uplink_bytes": state.uplink_bytes,
        "downlink_bytes": state.downlink_bytes,
        "lost": state.lost,
        **metrics_digest(folder),
    }
    if state.edge is not None:
        numbers["edge"] = {name: getattr(state.edge, name) for name in EDGE_NUMBERS}
        sync_file(folder / ROUNDS_FILE)
    path = folder / "checkpoints" / f"round-{state.round:07d}.safetensors"
    save_tensors(path, _tensors(state), numbers, state.sparse.release if state.sparse else None)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()


def drop_checkpoints(folder: Path) -> None:
    """Delete the checkpoints of a finished run that keeps its metrics only."""
    if (folder / "checkpoints").exists():
        shutil.rmtree(folder / "checkpoints")  # with partial files of a killed process


def load_checkpoint(path: Path, setup: Setup) -> State:
    """Load the state that `save_checkpoint` wrote, onto the setup's device."""
    tensors, numbers = load_tensors(path, mapped=True)
    where = setup.data.where
    try:
        devices, sparse = _devices(tensors, setup)
        on_demand = setup.data.supply is not None
        if on_demand:
            setup.data.hidden.zero_()  # no device's samples are loaded
        return State(
            setup=setup,
            round=numbers["round"],
            server=_tree(tensors, "server", setup.terms.first_server(), where),
            devices=devices,
            targets=setup.data.one_hot.clone() if on_demand else tensors["targets"].to(where, copy=True),
            sparse=sparse,
            active_rounds=tensors["active_rounds"].numpy(),
            steps=numbers["steps"],
            uplink_bytes=numbers["uplink_bytes"],
            downlink_bytes=numbers["downlink_bytes"],
            costs={},
            lost=numbers["lost"],
            edge=None if setup.edge is None else _edge(tensors, numbers["edge"], setup.edge),
            flight=_flight(tensors, setup) if "flight.costs" in tensors else (),
        )
    except KeyError as error:
        raise RunError(f"{path}: not a checkpoint of this version: {error} is missing") from error


def save_models(folder: Path, state: State, scaling: Scaling | None) -> None:
    """Write models.safetensors: every model under the network's own names, beta, and the input normalisation."""
    setup, method = state.setup, state.setup.terms.kept_method
    network, general = method.network, setup.terms.algorithm.general_model(method, state.server)
    models = {} if general is None else {f"global/{name}": t for name, t in network.named(general).items()}
    if method.traits.personal:
        there = np.ones(setup.terms.devices, bool) if state.sparse is None else state.sparse.there
        if optional(setup.terms.algorithm, "adapted") and setup.data.supply is None:
            there = np.ones_like(there)  # it takes no visit
        for i in np.flatnonzero(there).tolist():
            (own,) = own_models(state, [i], general, method)
            models |= {f"device{i}/localized/{name}": t for name, t in network.named(own).items()}
        models |= _prediction_tensors(state, np.flatnonzero(there).tolist())
    models |= {f"fixed/{name}": t for name, t in fixed_tensors(network).items()}
    if scaling:
        models |= {"input/shift": torch.from_numpy(scaling.shift), "input/scale": torch.from_numpy(scaling.scale)}
    numbers = {"round": state.round, "devices": state.setup.terms.devices}
    release = state.sparse.release if state.sparse else None
    save_tensors(folder / "models.safetensors", models, numbers, release)


def _prediction_tensors(state: State, devices: Sequence[int]) -> dict[str, Tensor]:
    """Return what `predict` needs of some devices, with a row for every device of the run, 0 for the others."""
    terms, needed = state.setup.terms, optional(state.setup.terms.algorithm, "PREDICTS_WITH") or ()
    if not optional(terms.algorithm, "predicting"):
        return {name: getattr(terms.hyper, name) for name in needed}
    found = prediction_numbers(state, devices)
    full = {name: torch.zeros(terms.devices, *getattr(found, name).shape[1:]) for name in needed}
    for name, rows in full.items():
        rows[list(devices)] = getattr(found, name).to(rows)
    return full


def fixed_tensors(network: Network) -> dict[str, Tensor]:
    """Return a network's tensors that are not trained: frozen parameters and buffers."""
    named = network.module.named_parameters(remove_duplicate=False)  # a shared parameter has several names
    trained = {name for name, parameter in named if parameter.requires_grad}
    return {name: t for name, t in network.module.state_dict().items() if name not in trained}


def _tree(tensors: Mapping[str, Tensor], prefix: str, like: Tree, where: torch.device | None = None) -> Tree:
    """Rebuild a state of a checkpoint from the names of its fields."""
    found = [tensors[name] for name in named_leaves(like, prefix)]
    return rebuilt(like, [t if where is None else t.to(where, copy=True) for t in found])


def _devices(tensors: Mapping[str, Tensor], setup: Setup) -> tuple[Tree, Sparse | None]:
    """Load the device states of a checkpoint into their store."""
    one = setup.terms.first_device(setup.terms.first_server())
    rows, where = _tree(tensors, "devices", one), setup.data.where
    if not setup.sparse:
        return map_tensors(lambda t: t.to(where, copy=True), rows), None
    joined = {int(name.split(".")[1]) for name in tensors if name.startswith("start.")}
    if not leaves(one):  # devices that keep nothing
        joined = {0, *setup.terms.joins.tolist()}
    starts = {r: _tree(tensors, f"start.{r}", one, where) for r in joined}
    devices, sparse = sparse_states(
        starts[0],
        setup.terms.devices,
        setup.nu_shape,
        setup.machine.store,
        setup.machine.store_folder,
        setup.data.one_hot,
    )
    index = tensors["there"]
    all_kept, had = (*leaves(devices), sparse.nu), (*leaves(rows), tensors["nu"])
    for kept, behind, before in zip(all_kept, sparse.maps, had, strict=True):
        put_rows(kept, behind, index.tolist(), before)
    sparse.there[index.numpy()] = True
    return devices, sparse._replace(starts=starts)


def _edge(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], terms: EdgeTerms) -> EdgeState:
    """Load the state of an edge network; its records are of a round that has been written."""
    arrays: dict[str, Any] = {
        name: tensors[f"edge.{name}"].numpy() for name in EDGE_ARRAYS if f"edge.{name}" in tensors
    }
    flight: Any = [tensors.get(f"edge.flight.{name}") for name in Records._fields]
    state = initial_edge_state(terms)._replace(**numbers, **arrays)
    return state if flight[0] is None else state._replace(flight=Records(*(t.numpy() for t in flight)))


def _flight(tensors: Mapping[str, Tensor], setup: Setup) -> tuple[Flight, ...]:
    """Load the uploads on their way."""
    upload, sent, _ = sent_by(setup, setup.terms.method)
    one, where = setup.terms.first_device(setup.terms.first_server()), setup.data.where
    kept, uploads, broadcasts = (
        _tree(tensors, f"flight.{name}", like, where)
        for name, like in (("kept", one), ("upload", upload), ("sent", sent))
    )
    numbers = {name: tensors[f"flight.task.{name}"].numpy() for name in TASK_NUMBERS}
    return flight_of(numbers, (kept, uploads, broadcasts, tensors["flight.costs"].to(where, copy=True)))


def _edge_tensors(state: State) -> dict[str, Tensor | SelectedRows]:
    """Return the arrays of an edge network that are not empty, and the uploads on their way."""
    edge, flight = state.edge, state.flight
    if edge is None:
        return {}
    arrays = {f"edge.{name}": getattr(edge, name) for name in EDGE_ARRAYS if getattr(edge, name).size}
    if edge.flight is not None and len(edge.flight.device):
        arrays |= {f"edge.flight.{name}": field for name, field in edge.flight._asdict().items()}
    found: dict[str, Tensor | SelectedRows] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if not flight:
        return found
    found |= {f"flight.task.{name}": torch.from_numpy(array) for name, array in flight_numbers(flight).items()}
    trees = {name: stacked([getattr(each, name) for each in flight]) for name in ("kept", "upload", "sent", "costs")}
    return found | {key: t for name, tree in trees.items() for key, t in named_leaves(tree, f"flight.{name}").items()}


def _tensors(state: State) -> dict[str, Tensor | SelectedRows]:
    """Return the content of a checkpoint: of sparse states, the rows that exist."""
    sparse, kept = state.sparse, named_leaves(state.devices, "devices")
    always: dict[str, Tensor | SelectedRows] = {"active_rounds": torch.from_numpy(state.active_rounds)}
    always |= named_leaves(state.server, "server") | _edge_tensors(state)
    labels = {} if state.setup.data.supply is not None else {"targets": state.targets}
    if sparse is None:
        return always | labels | kept
    index = torch.from_numpy(sparse.there.nonzero()[0])
    rows = {name: SelectedRows(t, index.to(t.device)) for name, t in (kept | {"nu": sparse.nu}).items()}
    starts = {name: t for r, one in sparse.starts.items() for name, t in named_leaves(one, f"start.{r}").items()}
    return always | labels | rows | starts | {"there": index}
