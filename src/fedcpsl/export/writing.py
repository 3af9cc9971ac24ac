"""Exporting: the file is made in memory, compared with the run, and only then written."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcpsl.errors import InputError, RunError
from fedcpsl.export.files import onnx_file, read_safetensors, read_torch, safetensors_file, torch_file
from fedcpsl.export.graph import onnx_of, program_of
from fedcpsl.export.model_manifest import About, Answer
from fedcpsl.export.reading import module_of, onnx_answer, torch_answer
from fedcpsl.export.saved_run import Chosen
from fedcpsl.storage import write_whole

TOLERANCE = 1e-5  # in the probabilities
PROBES = 64


def export(chosen: Chosen, kind: str, path: Path) -> float:
    """Write the model and return how far its answers are from the run's; beyond the tolerance nothing is written."""
    content, answer = made(chosen, kind, path)
    gap = largest_gap(answer, chosen.predictor.answer, probes(chosen.about))
    if not gap <= TOLERANCE:
        raise RunError(
            f"{path}: not written: the exported model's probabilities are {gap:.1e} from the run's, more than "
            f"{TOLERANCE:.0e}; does the network behave alike for any number of samples?"
        )
    write_whole(path, content)
    return gap


def made(chosen: Chosen, kind: str, path: Path) -> tuple[bytes, Answer]:
    """The file's content, and what the content itself answers."""
    about, module = chosen.about, chosen.module
    if kind == "safetensors":
        content = safetensors_file(about, module.state_dict())
        own = about.config["model"]["name"]
        return content, torch_answer(module_of(read_safetensors(content, path), path, own))
    program = program_of(module, about.input_shape)
    if kind == "onnx":
        content = onnx_file(about, onnx_of(program))
        return content, onnx_answer(content, str(path))
    content = torch_file(about, program)
    read_torch(content, path)
    return content, torch_answer(torch.export.load(io.BytesIO(content)).module())


def probes(about: About) -> NDArray[np.float32]:
    """Random samples that are spread as those of training were."""
    noise = np.random.default_rng(0).normal(size=(PROBES, *about.input_shape))
    return (noise if about.scaling is None else noise * about.scaling.scale + about.scaling.shift).astype(np.float32)


def largest_gap(one: Answer, other: Answer, x: NDArray[Any]) -> float:
    """Between the probabilities of samples together, and of one on its own."""
    gaps = [np.abs(one(some) - other(some)).max() for some in (x, x[:1])]
    return float(np.max(gaps))


def check_target(path: Path) -> None:
    """Refuse before any work what could not be written after it."""
    if path.exists():
        raise InputError(f"{path}: exists already; give another --out")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder; make it, or give another --out")
