"""Models as files: ONNX, PyTorch's .pt2 and safetensors, each with its manifest: written, read and compared.

An export is made in memory, compared with the run, and only then written. No reader executes code or unpickles.
"""

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcpsl.algorithm import optional
from fedcpsl.config import Config, with_settings
from fedcpsl.engine import Network
from fedcpsl.errors import InputError, RunError
from fedcpsl.export import SUFFIXES
from fedcpsl.export.model_manifest import (
    KEY,
    ModelManifest,
    Predictor,
    PredictSamples,
    verified_manifest,
    with_checksum,
)
from fedcpsl.export.personal_model import (
    EXTRA,
    PersonalModel,
    PredictFromModels,
    onnx_of,
    predict_of,
    program_of,
    quietly,
    with_tensors,
)
from fedcpsl.export.saved_run import ROWS_AT_ONCE, DeviceModel
from fedcpsl.methods import resolved
from fedcpsl.models import make_model
from fedcpsl.storage import write_whole

EXTRA_FILE = f"{KEY}.json"
NOT_IN_CHECKSUM = (
    f"extra/{EXTRA_FILE}",
    ".data/serialization_id",
)  # the manifest itself, and a number that depends on it
TOLERANCE = 1e-5  # of the probabilities
CHECKED_SAMPLES = 64
WEIGHTS = "data/weights/"
TYPES = {  # PyTorch's numbers for them in a .pt2
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}


class TensorFile(NamedTuple):
    """The content of a file with tensors."""

    manifest: ModelManifest
    tensors: dict[str, Tensor]


class Graph(NamedTuple):
    """The content of an ONNX file."""

    manifest: ModelManifest
    content: bytes


def onnx_file(manifest: ModelManifest, graph: bytes) -> bytes:
    """Return an ONNX file: the graph, with the manifest in its metadata."""
    return graph + _metadata(with_checksum(manifest, [graph]).encode())


def read_onnx(content: bytes, path: Path) -> Graph:
    """Read an ONNX file; the manifest is its end, so the checksum covers all bytes before it."""
    mark = _field(0x0A, KEY.encode()) + b"\x12"
    begin = content.rfind(mark)
    text = b"" if begin < 0 else _after_length(content[begin + len(mark) :])
    tail = _metadata(text)
    if begin < 0 or not content.endswith(tail):
        raise InputError(f"{path}: not an ONNX file that `fedcpsl export` wrote, or cut short; export it again")
    graph = content[: -len(tail)]
    return Graph(verified_manifest(text, [graph], path), graph)


def _metadata(text: bytes) -> bytes:
    """Encode a ModelProto's metadata_props in protobuf: field 14 with a key (1) and a value (2)."""
    return _field(0x72, _field(0x0A, KEY.encode()) + _field(0x12, text))


def _field(tag: int, content: bytes) -> bytes:
    length, size = bytearray(), len(content)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([tag, *length, size]) + content


def _after_length(content: bytes) -> bytes:
    """Return the bytes that a protobuf length at the beginning announces."""
    size = shift = 0
    for place, byte in enumerate(content[:5]):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return content[place + 1 : place + 1 + size]
    return b""


def safetensors_file(manifest: ModelManifest, tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file: tensors by name, the manifest as metadata."""
    from safetensors.torch import save

    own = {name: t.detach().clone().contiguous() for name, t in tensors.items()}
    return bytes(save(own, {KEY: with_checksum(manifest, _pieces(own))}))


def read_safetensors(content: bytes, path: Path) -> TensorFile:
    """Read the tensors and the manifest of an exported safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error}); export it again") from error
    text = header.get("__metadata__", {}).get(KEY)
    if text is None:
        raise InputError(f"{path}: has no manifest of fedcpsl; give a file that `fedcpsl export` wrote")
    _refuse_models_of_a_run(text, path)
    return TensorFile(verified_manifest(text, _pieces(tensors), path), tensors)


def _refuse_models_of_a_run(text: str, path: Path) -> None:
    """Raise InputError for models.safetensors of a run's folder, which has other metadata."""
    with suppress(ValueError, TypeError):
        if "numbers" in json.loads(text):
            raise InputError(
                f"{path}: is a run's models file, not an exported model; give the run's folder with --device NAME"
            )


def _pieces(tensors: Mapping[str, Tensor]) -> Iterable[bytes]:
    for name in sorted(tensors):
        t = tensors[name]
        yield f"{name} {t.dtype} {list(t.shape)}".encode()
        yield t.flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b""


def torch_file(manifest: ModelManifest, program: torch.export.ExportedProgram) -> bytes:
    """Return a .pt2 archive of an exported program, with the manifest as an extra file."""
    text = with_checksum(manifest, _members(_members_of(_archive(program, {}), Path("the program"))))
    return _archive(program, {EXTRA_FILE: text})


def _archive(program: torch.export.ExportedProgram, extra: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.export.save(program, content, extra_files=extra)
    return content.getvalue()


def read_torch(content: bytes, path: Path) -> TensorFile:
    """Read the weights of a .pt2 without its program.

    `torch.export.load` unpickles and evaluates expressions from the file, so it is only for trusted files.
    """
    members = _members_of(content, path)
    if f"extra/{EXTRA_FILE}" not in members:
        raise InputError(f"{path}: has no manifest of fedcpsl; give a file that `fedcpsl export` wrote")
    manifest = verified_manifest(members[f"extra/{EXTRA_FILE}"], _members(members), path)
    try:
        config = json.loads(members[f"{WEIGHTS}model_weights_config.json"])["config"]
        return TensorFile(manifest, {name: _tensor(payload, members) for name, payload in config.items()})
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{path}: holds no plain weights ({error}); --format torch needs a newer PyTorch") from error


def _tensor(payload: dict[str, Any], members: Mapping[str, bytes]) -> Tensor:
    if payload["use_pickle"]:
        raise ValueError("one is a pickle, which is never loaded")
    meta = payload["tensor_meta"]
    sizes, strides = ([int(n["as_int"]) for n in meta[name]] for name in ("sizes", "strides"))
    raw = torch.frombuffer(bytearray(members[WEIGHTS + payload["path_name"]]), dtype=TYPES[meta["dtype"]])
    return raw.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"])).clone()


def _members_of(content: bytes, path: Path) -> dict[str, bytes]:
    """Return the files of an archive by name, without their common folder."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("PyTorch compresses nothing in it")
            if content[-22:-18] != b"PK\5\6":
                raise ValueError("something was added to its end")
            members = {name.partition("/")[2]: archive.read(name) for name in names}
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        raise InputError(f"{path}: not a readable .pt2 archive ({error}); export it again") from error
    if len(members) < len(names):
        raise InputError(f"{path}: corrupt (a file is in it twice); export it again")
    return members


def _members(members: Mapping[str, bytes]) -> Iterable[bytes]:
    for name in sorted(set(members) - set(NOT_IN_CHECKSUM)):
        yield name.encode()
        yield members[name]


def read_model(path: Path, own: str = "") -> Predictor:
    """Read an exported model; `own` names the network in the user's code that may be imported for it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        manifest, _ = read_onnx(content, path)
        return Predictor(manifest, onnx_predict(content, str(path)))
    if suffix not in SUFFIXES.values():
        raise InputError(
            f"{path}: not a model; give a run's folder, or a file that ends with .onnx, .pt2, .safetensors"
        )
    weights = read_torch(content, path) if suffix == ".pt2" else read_safetensors(content, path)
    return Predictor(weights.manifest, torch_predict(module_of(weights, path, own)))


def module_of(weights: TensorFile, path: Path, own: str) -> PersonalModel:
    """Return the network of the manifest with the weights; custom code is imported only if `own` names it."""
    manifest, tensors = weights
    name, hidden = _network(manifest, path)
    if ":" in name and own != name:
        raise InputError(
            f"{path}: its network is custom code, {name}; give --model {name} to import it, or export to onnx, "
            "which needs no code"
        )
    network = make_model(name, hidden, manifest.input_shape, len(manifest.classes))
    kinds = {part: any(key.startswith(f"{part}.") for key in tensors) for part in ("general", "localized")}
    parts = [with_tensors(network, {}) if there else None for there in kinds.values()]
    try:
        predict, needed, both_ways = algorithm_predict(manifest, network)
        numbers = {name: torch.zeros_like(tensors[name]) for name in needed if name in tensors}
        model = PersonalModel(predict, parts[0], parts[1], numbers, manifest.scaling, both_ways)
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{path}: does not fit its network {name}: {' '.join(str(error).split())}") from error
    return model


def _network(manifest: ModelManifest, path: Path) -> tuple[str, list[int]]:
    model = manifest.config.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("name"), str) or not isinstance(model["hidden"], list):
        raise InputError(f"{path}: its manifest does not name a network; export it again")
    return model["name"], model["hidden"]


def algorithm_predict(manifest: ModelManifest, module: nn.Module) -> tuple[PredictFromModels, tuple[str, ...], bool]:
    """Return the algorithm's `predict`, the names of its numbers, whose values are among the weights, and whether it
    predicts both ways.
    """
    values = {f"{part}.{key}": v for part in ("algorithm", "work") for key, v in manifest.config[part].items()}
    config = with_settings(Config(), values)
    network = Network(module, torch.zeros(2, *manifest.input_shape), len(manifest.classes))
    found = resolved(config.algorithm, network, config.work)
    needed = optional(found.algorithm, "PREDICTS_WITH") or ()
    method = found.kept_method(config.work)
    return predict_of(found.algorithm, method), needed, method.both_ways


def torch_predict(model: Any) -> PredictSamples:
    """Return a function that predicts with a PyTorch module."""

    def predict(x: NDArray[Any]) -> NDArray[np.float32]:
        with torch.no_grad():
            parts = [model(torch.from_numpy(batch)) for batch in _batches(x)]
        probabilities: NDArray[np.float32] = torch.cat(parts).numpy()
        return probabilities

    return predict


def onnx_predict(content: bytes, what: str) -> PredictSamples:
    """Return a function that predicts with ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"{what}: {EXTRA}") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of many types
        raise InputError(f"{what}: ONNX Runtime refuses it: {' '.join(str(error).split())}") from error

    def predict(x: NDArray[Any]) -> NDArray[np.float32]:
        return np.concatenate([session.run(["probabilities"], {"samples": batch})[0] for batch in _batches(x)])

    return predict


def _batches(x: NDArray[Any]) -> list[NDArray[np.float32]]:
    given = np.ascontiguousarray(x, np.float32)
    return [given[first : first + ROWS_AT_ONCE] for first in range(0, len(given), ROWS_AT_ONCE)]


def export(model: DeviceModel, kind: str, path: Path) -> float:
    """Write a model and return the maximum difference of its probabilities from the run's; RunError if too large."""
    content, predict = encode_model(model, kind, path)
    difference = max_difference(predict, model.predictor.predict, random_samples(model.manifest))
    if not difference <= TOLERANCE:
        raise RunError(
            f"{path}: not written: the exported model's probabilities are {difference:.1e} from the run's, more than "
            f"{TOLERANCE:.0e}; does the network give the same output for any number of samples?"
        )
    write_whole(path, content)
    return difference


def encode_model(model: DeviceModel, kind: str, path: Path) -> tuple[bytes, PredictSamples]:
    """Return the file's content, and a function that predicts with that content."""
    manifest, module = model.manifest, model.module
    if kind == "safetensors":
        content = safetensors_file(manifest, module.state_dict())
        own = manifest.config["model"]["name"]
        return content, torch_predict(module_of(read_safetensors(content, path), path, own))
    program = program_of(module, manifest.input_shape)
    if kind == "onnx":
        content = onnx_file(manifest, onnx_of(program))
        return content, onnx_predict(content, str(path))
    content = torch_file(manifest, program)
    read_torch(content, path)
    with quietly():
        program = torch.export.load(io.BytesIO(content))
    return content, torch_predict(program.module())


def random_samples(manifest: ModelManifest) -> NDArray[np.float32]:
    """Return random samples with the mean and scale of the training samples."""
    noise = np.random.default_rng(0).normal(size=(CHECKED_SAMPLES, *manifest.input_shape))
    return (noise if manifest.scaling is None else noise * manifest.scaling.scale + manifest.scaling.shift).astype(
        np.float32
    )


def max_difference(one: PredictSamples, other: PredictSamples, x: NDArray[Any]) -> float:
    """Return the maximum difference of two predictions, of a batch and of a single sample."""
    return float(np.max([np.abs(one(batch) - other(batch)).max() for batch in (x, x[:1])]))


def check_model_target(path: Path) -> None:
    """Raise InputError if the file exists or cannot be written, before any work is done."""
    if path.exists():
        raise InputError(f"{path}: exists already; give another --out")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder; make it, or give another --out")
