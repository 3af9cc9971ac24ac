"""A model file that is ready to be asked."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcpsl.algorithm import optional
from fedcpsl.config import Config, with_settings
from fedcpsl.engine import Network
from fedcpsl.errors import InputError
from fedcpsl.export import SUFFIXES
from fedcpsl.export.files import Weights, read_onnx, read_safetensors, read_torch
from fedcpsl.export.graph import EXTRA, PersonalModel, Predict, predict_of, with_tensors
from fedcpsl.export.model_manifest import About, Answer, Predictor
from fedcpsl.methods import resolved
from fedcpsl.models import make_model

ROWS_AT_ONCE = 4096


def read_model(path: Path, own: str = "") -> Predictor:
    """An exported model; `own` is the model of the user's code that may be imported for it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        about, _ = read_onnx(content, path)
        return Predictor(about, onnx_answer(content, str(path)))
    if suffix not in SUFFIXES.values():
        raise InputError(
            f"{path}: not a model; give a run's folder, or a file that ends with .onnx, .pt2, .safetensors"
        )
    weights = read_torch(content, path) if suffix == ".pt2" else read_safetensors(content, path)
    return Predictor(weights.about, torch_answer(module_of(weights, path, own)))


def module_of(weights: Weights, path: Path, own: str) -> PersonalModel:
    """The weights in the network that the manifest names; another's code is imported only if the user says so."""
    about, tensors = weights
    name, hidden = _network(about, path)
    if ":" in name and own != name:
        raise InputError(
            f"{path}: its network is code of somebody's own, {name}; give --model {name} to have it imported, or "
            "export to onnx, which needs no code"
        )
    network = make_model(name, hidden, about.input_shape, len(about.classes))
    kinds = {part: any(key.startswith(f"{part}.") for key in tensors) for part in ("general", "localized")}
    parts = [with_tensors(network, {}) if there else None for there in kinds.values()]
    try:
        predict, numbers = answers_of(about, network)
        model = PersonalModel(predict, parts[0], parts[1], numbers if all(parts) else {}, about.scaling)
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{path}: does not fit its network {name}: {' '.join(str(error).split())}") from error
    return model


def _network(about: About, path: Path) -> tuple[str, list[int]]:
    model = about.config.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("name"), str) or not isinstance(model["hidden"], list):
        raise InputError(f"{path}: its manifest does not name a network; export it again")
    return model["name"], model["hidden"]


def answers_of(about: About, module: nn.Module) -> tuple[Predict, dict[str, float]]:
    """What puts the two models' outputs together, and the numbers for it, whose values are among the weights."""
    values = {f"{part}.{key}": v for part in ("algorithm", "work") for key, v in about.config[part].items()}
    config = with_settings(Config(), values)
    network = Network(module, torch.zeros(2, *about.input_shape), len(about.classes))
    found = resolved(config.algorithm, network, config.work)
    numbers = dict.fromkeys(optional(found.algorithm, "PREDICTS_WITH") or (), 0.0)
    return predict_of(found.algorithm, found.kept_method(config.work)), numbers


def torch_answer(model: Any) -> Answer:
    """A PyTorch module's answers."""

    def answer(x: NDArray[Any]) -> NDArray[np.float32]:
        with torch.no_grad():
            pieces = [model(torch.from_numpy(some)) for some in _pieces(x)]
        answers: NDArray[np.float32] = torch.cat(pieces).numpy()
        return answers

    return answer


def onnx_answer(content: bytes, what: str) -> Answer:
    """ONNX Runtime's answers."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"{what}: {EXTRA}") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of a dozen kinds
        raise InputError(f"{what}: ONNX Runtime refuses it: {' '.join(str(error).split())}") from error

    def answer(x: NDArray[Any]) -> NDArray[np.float32]:
        return np.concatenate([session.run(["probabilities"], {"samples": some})[0] for some in _pieces(x)])

    return answer


def _pieces(x: NDArray[Any]) -> list[NDArray[np.float32]]:
    given = np.ascontiguousarray(x, np.float32)
    return [given[first : first + ROWS_AT_ONCE] for first in range(0, len(given), ROWS_AT_ONCE)]
