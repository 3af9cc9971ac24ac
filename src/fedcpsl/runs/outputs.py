"""What a finished run leaves: its models, the table of its devices, and what is taken for what."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.data.scaling import Scaling
from fedcpsl.engine import Network
from fedcpsl.evaluation import Evaluation
from fedcpsl.runs.checkpoint import save_tensors
from fedcpsl.runs.confusion import FILE, MOST_COUNTED, Confusion, Counts, to_csv
from fedcpsl.runs.device_table import COLUMNS, TESTS
from fedcpsl.runs.files import write_whole
from fedcpsl.simulation import State


def save_models(folder: Path, state: State, scaling: Scaling | None) -> None:
    """models.safetensors: every model under the network's own names, beta, and how inputs are normalised."""
    setup, method = state.setup, state.setup.kept_method
    network, general = method.network, setup.algorithm.general_model(method, state.server)
    models = {} if general is None else {f"global/{name}": t for name, t in network.named(general).items()}
    if method.traits.personal:
        for i in range(setup.devices) if state.sparse is None else np.flatnonzero(state.sparse.there).tolist():
            own = setup.algorithm.own_model(method, state.device(i))
            assert own is not None
            models |= {f"device{i}/localized/{name}": t for name, t in network.named(own).items()}
        models |= {name: getattr(setup.hyper, name) for name in optional(setup.algorithm, "PREDICTS_WITH") or ()}
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
    table.writerow([*COLUMNS, TESTS])
    shown = (evaluation.personal, evaluation.general, evaluation.localized)
    tests = np.diff(setup.device_data.test.start)
    listed: Sequence[int] = range(setup.devices)
    if state.sparse is not None:
        listed = sorted({*np.flatnonzero(state.sparse.there).tolist(), *evaluation.personal.devices})
    for i in listed:
        accuracies = [a.devices.get(i, "") if a else "" for a in shown]
        sizes = (setup.sizes.labelled[i], setup.sizes.unlabelled[i])
        table.writerow([i, setup.names[i], *sizes, state.active_rounds[i], *accuracies, tests[i]])
    return text.getvalue()


def confusion(state: State, evaluation: Evaluation, classes: Sequence[str]) -> Confusion:
    """Of the tests of every device that takes part: their classes, and those predicted."""
    tests, made = state.setup.device_data.test, evaluation.predictions
    tested = np.zeros(state.setup.devices, bool)
    tested[list(evaluation.personal.devices)] = True
    here = np.repeat(tested, np.diff(tests.start))
    y = tests.y.cpu().numpy()[here]

    def counted(log_h: Tensor) -> Counts:
        pairs = y * len(classes) + log_h.argmax(-1).cpu().numpy()[here]
        return np.bincount(pairs, minlength=len(classes) ** 2).reshape(len(classes), len(classes))

    models = {"personal": made.personal, "global": made.general}
    return Confusion(list(classes), {name: counted(m) for name, m in models.items() if m is not None and len(y)})


def write_tables(folder: Path, state: State, evaluation: Evaluation, class_names: Sequence[str]) -> None:
    """confusion.csv, and devices.csv, which says that a run is finished."""
    classes = class_names or list(map(str, range(state.setup.method.network.classes)))
    if len(classes) <= MOST_COUNTED:
        write_whole(folder / FILE, to_csv(confusion(state, evaluation, classes)))
    write_whole(folder / "devices.csv", device_table(state, evaluation))
