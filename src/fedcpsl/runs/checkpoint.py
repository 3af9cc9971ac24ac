"""A simulation's state as one safetensors file, with a checksum of its content."""

import json
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from fedcpsl.algorithm import Device, Server
from fedcpsl.errors import RunError
from fedcpsl.runs.files import write_whole
from fedcpsl.simulation import Setup, State

KEPT = 2  # checkpoints at a time


def checkpoints(folder: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


def save_checkpoint(folder: Path, state: State) -> None:
    """Write the state, then drop what is older than the last two."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    numbers = {
        "round": state.round,
        "steps": state.steps,
        "uplink_bytes": state.uplink_bytes,
        "downlink_bytes": state.downlink_bytes,
        "lost": state.lost,
    }
    save_tensors(folder / "checkpoints" / f"round-{state.round:07d}.safetensors", _tensors(state), numbers)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()


def load_checkpoint(path: Path, setup: Setup) -> State:
    """The state that `save_checkpoint` wrote, on the setup's device."""
    tensors, numbers = load_tensors(path)
    device = setup.shelf.where
    try:
        on_device = {k: t.to(device) for k, t in tensors.items()}
        return State(
            setup=setup,
            round=numbers["round"],
            server=Server(on_device["server.theta"], on_device["server.c"]),
            devices=Device(on_device["devices.theta_lc"], on_device["devices.c"]),
            targets=on_device["targets"],
            active_rounds=tensors["active_rounds"].numpy(),
            steps=numbers["steps"],
            uplink_bytes=numbers["uplink_bytes"],
            downlink_bytes=numbers["downlink_bytes"],
            costs={},
            lost=numbers["lost"],
        )
    except KeyError as error:
        raise RunError(f"{path}: not a checkpoint of this version: {error} is missing") from error


def save_tensors(path: Path, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
    """Tensors and a few numbers as one safetensors file, with a checksum."""
    from safetensors.torch import save

    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    about = {"numbers": numbers, "sha256": _digest(tensors, numbers)}
    write_whole(path, save(tensors, metadata={"fedcpsl": json.dumps(about)}))  # one key: several have no fixed order


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


def _tensors(state: State) -> dict[str, Tensor]:
    return {
        "server.theta": state.server.theta,
        "server.c": state.server.c,
        "devices.theta_lc": state.devices.theta_lc,
        "devices.c": state.devices.c,
        "targets": state.targets,
        "active_rounds": torch.from_numpy(state.active_rounds),
    }


def _digest(tensors: dict[str, Tensor], numbers: dict[str, int]) -> str:
    h = sha256(json.dumps(numbers).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        h.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        if tensor.numel():
            h.update(tensor.flatten().view(torch.uint8).numpy().data)
    return h.hexdigest()
