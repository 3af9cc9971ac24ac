"""A device's personal model as one PyTorch module, and as a program that does not need fedcpsl."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcpsl.algorithm import Algorithm, Method, mean_of_both
from fedcpsl.data.scaling import Scaling
from fedcpsl.errors import InputError

EXTRA = "needs onnx, onnxscript and onnxruntime; pip install 'fedcpsl[onnx]'"
OPSET = 18  # what PyTorch exports natively; runtimes know it since 2023
EXAMPLES = 3  # not 0 or 1, which torch.export may specialise on


PredictFromModels = Callable[[Any, Tensor | None, Tensor | None], Tensor]  # from numbers and the two models' log h


class PersonalModel(nn.Module):
    """Predicts from raw samples, x = (samples - shift) / scale: the algorithm's `predict` of h(x) of the general model
    and of the device's own, or of the only one.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        predict: PredictFromModels,
        general: nn.Module | None,
        localized: nn.Module | None,
        numbers: Mapping[str, float | Tensor],
        scaling: Scaling | None,
        both_ways: bool = False,
    ) -> None:
        super().__init__()
        self.general, self.localized, self.predict, self.both_ways = general, localized, predict, both_ways
        self.normalises, self.numbers = scaling is not None, tuple(numbers)
        for name, number in numbers.items():
            self.register_buffer(name, torch.as_tensor(number).clone())
        for name, given in scaling._asdict().items() if scaling else ():
            self.register_buffer(name, torch.from_numpy(np.asarray(given, np.float32)))
        self.float().eval().requires_grad_(False)

    def forward(self, samples: Tensor) -> Tensor:
        x = (samples - self.shift) / self.scale if self.normalises else samples
        hyper = SimpleNamespace(**{name: getattr(self, name) for name in self.numbers})
        return self.predict(hyper, self._log_h(self.general, x), self._log_h(self.localized, x)).exp()

    def _log_h(self, network: Any, x: Tensor) -> Tensor | None:
        if network is None:
            return None
        log_h = torch.log_softmax(network(x), -1)
        return mean_of_both(log_h, torch.log_softmax(network(x.flip(-1)), -1)) if self.both_ways else log_h


def predict_of(algorithm: Algorithm, method: Method) -> PredictFromModels:
    """Return the algorithm's `predict` with its method bound."""
    return partial(algorithm.predict, method)


class _Reading:
    """Numbers that remember which of them were read."""

    def __init__(self, hyper: Any) -> None:
        self.hyper, self.read = hyper, dict[str, float | Tensor]()

    def __getattr__(self, name: str) -> Tensor:
        number: Tensor = getattr(self.hyper, name)
        self.read[name] = number if number.dim() else float(number)
        return number


def numbers_read(
    predict: PredictFromModels, hyper: Any, classes: int, general: bool, localized: bool
) -> dict[str, float | Tensor]:
    """Return the numbers that `predict` looks at, given answers of the general model, of the device's own, or both."""
    reading, log_h = _Reading(hyper), torch.zeros(1, classes).log_softmax(-1)
    predict(reading, log_h if general else None, log_h if localized else None)
    return reading.read


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module with the given parameters and buffers replaced, by name."""
    copy = deepcopy(module)
    try:
        unknown = copy.load_state_dict(dict(tensors), strict=False).unexpected_keys
    except RuntimeError as error:
        raise InputError(f"the model is not the one that was trained: {' '.join(str(error).split())}") from error
    if unknown:
        raise InputError(f"the model is not the one that was trained: it has no {unknown[0]!r}")
    return copy


def program_of(model: PersonalModel, shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    """Export the model as a PyTorch program for any number of samples, without file names of this machine."""
    example = torch.zeros(EXAMPLES, *shape)
    with quietly():
        try:
            any_number = ({0: torch.export.Dim("samples")},)
            program = torch.export.export(model, (example,), dynamic_shapes=any_number, strict=False)
        except Exception as error:  # custom modules may raise anything
            raise InputError(
                f"the model cannot be exported as a program: {_first_line(error)}; its forward must be plain PyTorch "
                "for any number of samples (--format safetensors saves its weights as they are)"
            ) from error
    for node in program.graph.nodes:
        node.meta = {name: value for name, value in node.meta.items() if name == "val"}
    program._example_inputs = None  # they would be saved as a pickle
    return program


def onnx_of(program: torch.export.ExportedProgram) -> bytes:
    """Return the program as an ONNX graph: input `samples`, output `probabilities`."""
    with quietly():
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError:
            raise InputError(f"--format onnx: {EXTRA}") from None
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=["samples"],
                output_names=["probabilities"],
                external_data=False,
            )
        except Exception as error:
            raise InputError(
                f"the model cannot be written as ONNX: {_first_line(error)}; --format torch may do"
            ) from error
    assert exported is not None
    return _without_metadata(exported.model_proto)


def _without_metadata(model: Any) -> bytes:
    """Serialise the graph without metadata about where and how it was exported."""
    del model.metadata_props[:], model.graph.metadata_props[:], model.graph.value_info[:]
    model.doc_string = ""
    for part in (*model.graph.node, *model.graph.initializer, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]
        part.doc_string = ""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "samples"
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the log, warnings and output of PyTorch's exporters; errors are raised anyway."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
