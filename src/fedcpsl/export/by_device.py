"""Samples of many devices, each answered by the model of its own device."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.algorithms import traits_of
from fedcpsl.errors import InputError, did_you_mean, printable
from fedcpsl.export.model_manifest import GLOBAL
from fedcpsl.export.saved_run import Kept, choose, device_names

NAMED = 5  # devices in a note


class Answers(NamedTuple):
    """Probabilities, and which model they come from."""

    probabilities: NDArray[np.float32]  # [samples, classes]
    models: list[str]  # of each sample: its device, or "global"
    note: str  # about devices without a model of their own; empty where there are none


def answer_by_device(kept: Kept, x: NDArray[Any], devices: list[str]) -> Answers:
    """A device that the run does not know, or that never trained, is answered by the global model."""
    names = device_names(kept)
    alone = traits_of(kept.config.algorithm.name).alone
    models = [name if name in names and _has_model(kept, names[name]) else GLOBAL for name in devices]
    strangers = sorted({device for device, model in zip(devices, models, strict=True) if model == GLOBAL})
    if strangers and alone:
        raise InputError(
            f"device {printable(strangers[0])!r} is not in {kept.folder}, and {kept.config.algorithm.name} has no "
            f"global model; {did_you_mean(strangers[0], names)}"
        )
    probabilities = np.empty((len(x), len(kept.classes)), np.float32)
    of = np.array(models)
    for model in sorted(set(models)):
        probabilities[of == model] = choose(kept, model).predictor.answer(x[of == model])
    return Answers(probabilities, models, _note(strangers, int((of == GLOBAL).sum())))


def _has_model(kept: Kept, number: int) -> bool:
    return not kept.has_own_models or any(name.startswith(f"device{number}/localized/") for name in kept.tensors)


def _note(strangers: list[str], rows: int) -> str:
    if not strangers:
        return ""
    some = ", ".join(printable(name) or "no device" for name in strangers[:NAMED])
    more = f" and {len(strangers) - NAMED} more" if len(strangers) > NAMED else ""
    what = "row is" if rows == 1 else "rows are"
    return f"{rows} {what} of devices that the run has no model for ({some}{more}): the global model answers them"
