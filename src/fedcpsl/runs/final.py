"""What a finished run leaves: its models, and the table of its devices."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedcpsl.data.scaling import Scaling
from fedcpsl.evaluation import Evaluation
from fedcpsl.network import Network
from fedcpsl.runs.checkpoint import save_tensors
from fedcpsl.simulation import State


def save_models(folder: Path, state: State, scaling: Scaling | None) -> None:
    """models.safetensors: every model under the network's own names, beta, and how inputs are normalised."""
    network = state.setup.method.network
    alone = state.setup.method.parts.alone
    models = {} if alone else {f"global/{name}": t for name, t in network.named(state.server.theta).items()}
    if state.setup.kept_method.parts.personal:
        for i in range(state.setup.devices) if state.sparse is None else np.flatnonzero(state.sparse.there).tolist():
            named = network.named(state.devices.theta_lc[i])
            models |= {f"device{i}/localized/{name}": t for name, t in named.items()}
        models["beta"] = state.setup.hyper.beta
    models |= {f"fixed/{name}": t for name, t in fixed_tensors(network).items()}
    if scaling:
        models |= {"input/shift": torch.from_numpy(scaling.shift), "input/scale": torch.from_numpy(scaling.scale)}
    numbers = {"round": state.round, "devices": state.setup.devices}
    save_tensors(folder / "models.safetensors", models, numbers, state.sparse)


def fixed_tensors(network: Network) -> dict[str, Tensor]:
    """What a network has beside the parameters that are trained: frozen ones, and buffers."""
    named = network.module.named_parameters(remove_duplicate=False)  # a shared parameter has several names
    trained = {name for name, parameter in named if parameter.requires_grad}
    return {name: t for name, t in network.module.state_dict().items() if name not in trained}


def device_table(state: State, evaluation: Evaluation) -> str:
    """devices.csv."""
    setup = state.setup
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["device", "name", "labelled", "unlabelled", "active_rounds", "personal", "global", "localized"])
    shown = (evaluation.personal, evaluation.general, evaluation.localized)
    listed: Sequence[int] = range(setup.devices)
    if state.sparse is not None:
        listed = sorted({*np.flatnonzero(state.sparse.there).tolist(), *evaluation.personal.devices})
    for i in listed:
        accuracies = [a.devices.get(i, "") if a else "" for a in shown]
        sizes = (setup.sizes.labelled[i], setup.sizes.unlabelled[i])
        table.writerow([i, setup.names[i], *sizes, state.active_rounds[i], *accuracies])
    return text.getvalue()
